"""The marks of a step, which `measure` makes times of.

StepMarks   where they were left
NoMarks     stands for the clock in steps that are not measured
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from hytrain.memory.clock import Clock, Mark, Span, Stream


class Waited(NamedTuple):
    """An all-gather's wait for updates: what modules noticed of the thread's wait, and the wait of its own stream."""

    on_modules_stream: Span
    on_its_stream: Span

    def marks(self) -> Iterator[Mark]:
        return chain(*self)


@dataclass(slots=True)
class StepMarks:
    """The marks of one step; `forward` and `backward` in the order in which they were left.

    A module in `forward` may wait for FSDP2's all-gather, which has `waited` for updates, before the module's marks.
    `spans` are copies and device updates: kind, layers, the step that they belong to, marks. `gathers` are FSDP2's
    all-gathers. `fetched` are backward's waits for offloaded weights. `turns` are the starts of the backwards, if the
    step has several. `starved` counts the layers at the end of whose backward the device had finished all earlier work,
    so that it waited for launches. (In forward, a stall also causes that.) If updates have waited for `step()`, `held`
    is the time between the last gradient and their beginning. In a step that is drawn, `began` is the end of the step
    before, `left` the end of that one's `step()`, and `entered` the beginning of its own. `launched_s` has the host's
    time at which the marks were left that end forwards and backwards, and `traffic` the bytes to the device and to host
    memory.
    """

    step: int
    forward: list[tuple[tuple[int, ...], Span]] = field(default_factory=list)
    waited: dict[int, Waited] = field(default_factory=dict)  # by index in `forward`
    backward: list[tuple[int, Mark]] = field(default_factory=list)
    spans: list[tuple[str, tuple[int, ...], int, Span]] = field(default_factory=list)
    gathers: list[tuple[tuple[int, ...], Span]] = field(default_factory=list)
    fetched: list[tuple[int, Span, Waited | None]] = field(default_factory=list)
    turns: list[Mark] = field(default_factory=list)
    starved: int = 0
    number: int = 0
    end: Mark = None
    began: Mark = None
    left: Mark = None
    entered: Mark = None
    held: Span | None = None
    launched_s: dict[Mark, float] = field(default_factory=dict)
    traffic: tuple[int, int] = (0, 0)

    def marks(self) -> Iterator[Mark]:
        """All marks: the step's own work, beginning with its first mark, then copies and all-gathers, then the end."""
        forward = [
            mark
            for index, (_, span) in enumerate(self.forward)
            for mark in chain(self.waited[index].marks() if index in self.waited else (), span)
        ]
        backward = [mark for _, mark in self.backward]
        copies = [mark for *_, span in self.spans for mark in span]
        others = [mark for _, span in self.gathers for mark in span] + list(self.of_fetched())
        ends = [mark for mark in (self.began, self.left, self.entered, self.end) if mark is not None]
        ends += self.held[1:] if self.held is not None else ()
        return chain(forward, self.turns, backward, copies, others, ends)

    def of_fetched(self) -> Iterator[Mark]:
        for _, span, waited in self.fetched:
            yield from chain(span, waited.marks() if waited else ())


class NoMarks:
    """The clock of a step that is not measured. Others may still leave marks on their own."""

    runs_ahead = False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def mark(self) -> Mark:
        return None

    def mark_on(self, stream: Stream) -> Mark:
        return None

    def recycle(self, marks: Iterable[Mark]) -> None:
        self._clock.recycle([mark for mark in marks if mark is not None])
