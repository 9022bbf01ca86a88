"""Measures each layer's times on the trainer without waiting for the device.

Hooks leave marks: CUDA events on the stream where the work is, or readings of the clock on a CPU. A step's marks
are turned into seconds in a later step, when the device has passed them all.

    pre-hook  arrive ──(stall)── go ──(forward)── next arrive …      backward: one mark as each layer completes

    marks ─ passed? ─▶ intervals ─┬─▶ LayerTimes, for the coordinator
                                  └─▶ spans of the timeline, on the monotonic clock (only if there is one)

Marks that were given to a `Meter` are its own: it leaves them to the clock to be used again.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

from hytrain.memory.clock import Clock, Mark, Span
from hytrain.run.trace import TraceWriter
from protocol.messages import LayerTimes

#: Steps whose marks may still be in flight before their measurement is given up.
MAX_OPEN_STEPS: Final = 8
#: A new anchor moves the device's times by less than this.
MAX_JUMP_S: Final = 1e-4
#: Two marks without any work in between are not a stall.
MIN_STALL_S: Final = 2e-5
#: Field of `LayerTimes` -> track and name in the timeline.
TRACKS: Final = {
    "forward_s": ("compute", "forward"),
    "stall_s": ("compute", "stall"),
    "backward_s": ("compute", "backward"),
    "gpu_update_s": ("compute", "update"),
    "d2h_s": ("D2H", "D2H"),
    "h2d_s": ("H2D", "H2D"),
}


@dataclass(slots=True)
class StepMarks:
    """The marks of one step: `forward` and `backward` in the order they were left.

    `spans` are copies and device updates: kind, layer, the step that they belong to. `turns` are there if the step has
    several backwards: where each began. `starved` counts the backwards of layers at whose end the device had done
    all before, and waited for launches. In forward it also does so after a stall.
    """

    step: int
    forward: list[tuple[tuple[int, ...], Span]] = field(default_factory=list)
    backward: list[tuple[int, Mark]] = field(default_factory=list)
    spans: list[tuple[str, int, int, Span]] = field(default_factory=list)
    turns: list[Mark] = field(default_factory=list)
    starved: int = 0
    end: Mark = None

    def marks(self) -> Iterator[Mark]:
        """All of them, the first one of the step's own work first, then those of copies, the end at last."""
        for _, span in self.forward:
            yield from span
        yield from self.turns
        for _, mark in self.backward:
            yield mark
        for *_, span in self.spans:
            yield from span
        if self.end is not None:
            yield self.end


class Interval(NamedTuple):
    """What layers `lids` were at, as a field of `LayerTimes`; seconds from the first of the step's marks."""

    kind: str
    lids: tuple[int, ...]
    step: int
    began_s: float
    ended_s: float

    @property
    def duration_s(self) -> float:
        return max(self.ended_s - self.began_s, 0.0)


class Meter:
    """Collects marks and turns them into `LayerTimes`, a step or more later; and into a timeline, if asked to."""

    def __init__(
        self, clock: Clock, numels: list[int], *, trace: TraceWriter | None = None, names: Sequence[str] = ()
    ) -> None:
        self._clock, self._numels = clock, numels
        self._trace, self._names = trace, names
        self._open: deque[StepMarks] = deque(maxlen=MAX_OPEN_STEPS)
        self._now = StepMarks(0)
        self._turning = threading.Lock()  # copies are reported by another thread
        self._drawn_until: dict[str, float] = {}
        self.stall_s = self.middle_s = self.starved = 0.0
        self.measured: int | None = None  # the step of the last times
        if trace is not None:
            clock.anchor()

    def arrive(self) -> Mark:
        """A module is entered: the mark for `forward`, left before anybody waits for weights."""
        return self._clock.mark()

    def forward(self, lids: tuple[int, ...], arrived: Mark) -> None:
        """The module that has arrived, and needs layers `lids`, goes on, maybe after a stall."""
        self._now.forward.append((lids, (arrived, self._clock.mark())))

    def restart(self) -> None:
        """A forward begins. The one before, if no backward came of it, is no part of the step."""
        if not self._now.backward:
            self._clock.recycle(mark for _, span in self._now.forward for mark in span)
            self._clock.recycle(self._now.turns)  # of a backward whose gradients were dropped
            self._now.forward.clear()
            self._now.turns.clear()

    def turn(self) -> None:
        """One of several backwards begins: what is measured lies before the first and after the last."""
        self._now.turns.append(self._clock.mark())

    def backward(self, lid: int) -> None:
        now = self._now
        before = now.backward[-1][1] if now.backward else now.forward[-1][1][1] if now.forward else None
        if self._clock.runs_ahead and before is not None:
            now.starved += self._clock.passed(before)
        now.backward.append((lid, self._clock.mark()))

    def span(self, kind: str, lid: int, step: int, span: Span) -> None:
        """A copy or a device update of a layer for `step`; `kind` names the field of `LayerTimes`.

        The weights of a step may come back when the next one has begun.
        """
        with self._turning:
            self._now.spans.append((kind, lid, step, span))

    def end_step(self, step: int) -> tuple[LayerTimes, ...]:
        """Close this step's marks; the times of the oldest step that the device has passed, if any."""
        self._now.end = self._clock.mark()
        with self._turning:
            self._open.append(self._now)
            self._now = StepMarks(step + 1)
        if not self._passed(self._open[0]):
            self.measured = None
            return ()
        marks = self._open.popleft()
        self.measured = marks.step
        intervals = self._intervals(marks)
        if self._trace is not None:
            self._draw(marks, intervals, self._trace)
            self._trace.flush()
            self._clock.anchor()
        self.middle_s = self._clock.seconds((marks.turns[0], marks.turns[-1])) if marks.turns else 0.0
        self.starved = marks.starved / len(marks.backward) if marks.backward else 0.0
        self._clock.recycle(marks.marks())
        return self._times(intervals)

    def close(self) -> None:
        """Draw what is left, of the steps that the device has passed."""
        if self._trace is not None:
            for marks in (*self._open, self._now):
                if self._passed(marks):
                    self._draw(marks, self._intervals(marks), self._trace)
            self._trace.close()

    def _passed(self, marks: StepMarks) -> bool:
        """Whether all of the step's work is done; copies of it may take longer than its end."""
        return all(self._clock.passed(mark) for mark in reversed(list(marks.marks())))

    def _intervals(self, marks: StepMarks) -> list[Interval]:
        """The step's marks, pairwise. What is measured at a module's entry is the stall of its first layer."""
        first = next(marks.marks(), None)

        def interval(kind: str, lids: tuple[int, ...], began: Mark, ended: Mark, step: int = marks.step) -> Interval:
            return Interval(kind, lids, step, self._clock.seconds((first, began)), self._clock.seconds((first, ended)))

        found = [interval("stall_s", lids[:1], *span) for lids, span in marks.forward]
        for (lids, (_, went)), (_, (arrived, _)) in pairwise(marks.forward):
            found.append(interval("forward_s", lids, went, arrived))
        if marks.forward and marks.backward:
            (lids, (_, went)), (lid, done) = marks.forward[-1], marks.backward[0]
            found += _turn(interval("forward_s", lids, went, marks.turns[0] if marks.turns else done))
            found[-1] = found[-1]._replace(lids=(lid,))
            if marks.turns:
                found.append(interval("backward_s", (lid,), marks.turns[-1], done))
        # A device update follows its layer's mark on the same stream; without overlap, all follow the last mark.
        updates = [interval(kind, (lid,), *span) for kind, lid, _, span in marks.spans if kind == "gpu_update_s"]
        updated_s = {update.lids[0]: update.ended_s for update in updates}
        for (before, mark), (lid, ended) in pairwise(marks.backward):
            whole = interval("backward_s", (lid,), mark, ended)
            after_s = updated_s.get(before, whole.began_s)
            found.append(whole._replace(began_s=after_s) if after_s <= whole.ended_s else whole)
        return found + [interval(kind, (lid,), *span, step=step) for kind, lid, step, span in marks.spans]

    def _times(self, intervals: list[Interval]) -> tuple[LayerTimes, ...]:
        """By layer. A module's time is shared by the layers it consists of, by size."""
        times: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for interval in intervals:
            total = sum(self._numels[lid] for lid in interval.lids)
            for lid in interval.lids:
                times[lid][interval.kind] += interval.duration_s * self._numels[lid] / total
        self.stall_s = sum(interval.duration_s for interval in intervals if interval.kind == "stall_s")
        return tuple(LayerTimes(lid=lid, **fields) for lid, fields in sorted(times.items()))

    # ------------------------------------------------------------ the timeline

    def _draw(self, marks: StepMarks, intervals: list[Interval], trace: TraceWriter) -> None:
        first = next(marks.marks(), None)
        if first is None:
            return
        zero_s = self._clock.at(first)
        if marks.end is not None:
            self._draw_span("step", f"step {marks.step}", zero_s, self._clock.at(marks.end), trace, step=marks.step)
        for kind, lids, step, began_s, ended_s in sorted(intervals, key=lambda interval: interval.ended_s):
            if kind == "stall_s" and ended_s - began_s < MIN_STALL_S:
                continue
            track, what = TRACKS[kind]
            layer = self._names[lids[0]] if self._names else str(lids[0])
            name, lid = f"{what} {layer}", lids[0]
            self._draw_span(track, name, zero_s + began_s, zero_s + ended_s, trace, kind=what, lid=lid, step=step)

    def _draw_span(
        self, track: str, name: str, began_s: float, ended_s: float, trace: TraceWriter, **args: Any
    ) -> None:
        """Draw a span, but not into the one before because the clock was anchored anew in between."""
        before_s = self._drawn_until.get(track, began_s)
        if before_s - began_s < MAX_JUMP_S:
            began_s = max(began_s, before_s)
        self._drawn_until[track] = max(ended_s, began_s)
        trace.span(track, name, began_s, ended_s, **args)


def _turn(whole: Interval) -> list[Interval]:
    """From the last module's entry to the first finished gradient lie its forward and backward: one to two."""
    turned_s = whole.began_s + whole.duration_s / 3
    return [whole._replace(ended_s=turned_s), whole._replace(kind="backward_s", began_s=turned_s)]
