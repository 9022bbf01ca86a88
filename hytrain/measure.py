"""Measures each layer's times on the trainer without waiting for the device.

Hooks leave marks: CUDA events on the stream where the work is, or readings of the clock on a CPU. A step's marks
are turned into seconds in a later step, when the device has passed them all.

    pre-hook  arrive ──(stall)── go ──(forward)── next arrive …      backward: one mark as each layer completes
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from protocol.messages import LayerTimes

Mark = Any
Span = tuple[Mark, Mark]
#: Steps whose marks may still be in flight before their measurement is given up.
MAX_OPEN_STEPS: Final = 8


class Clock(Protocol):
    def mark(self) -> Mark: ...

    def passed(self, mark: Mark) -> bool: ...

    def seconds(self, span: Span) -> float: ...


class HostClock:
    """Marks are readings of the monotonic clock, in seconds."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def passed(self, mark: Mark) -> bool:
        return True

    def seconds(self, span: Span) -> float:
        return float(span[1] - span[0])


class CudaClock:
    """Marks are timing events on the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: Mark) -> bool:
        return bool(mark.query())

    def seconds(self, span: Span) -> float:
        return float(span[0].elapsed_time(span[1])) / 1e3


@dataclass(slots=True)
class StepMarks:
    """The marks of one step: `forward` and `backward` in the order they were left."""

    step: int
    forward: list[tuple[tuple[int, ...], Span]] = field(default_factory=list)
    backward: list[tuple[int, Mark]] = field(default_factory=list)
    spans: list[tuple[str, int, Span]] = field(default_factory=list)
    end: Mark = None


class Meter:
    """Collects marks and turns them into `LayerTimes`, a step or more later."""

    def __init__(self, clock: Clock, numels: list[int]) -> None:
        self._clock, self._numels = clock, numels
        self._open: deque[StepMarks] = deque(maxlen=MAX_OPEN_STEPS)
        self._now = StepMarks(0)
        self.stall_s = 0.0

    def forward(self, lids: tuple[int, ...], span: Span) -> None:
        """A module that needs layers `lids` is entered: it arrived, and (after a stall) went on."""
        self._now.forward.append((lids, span))

    def restart(self) -> None:
        """A forward begins. The one before, if no backward came of it, is no part of the step."""
        if not self._now.backward:
            self._now.forward.clear()

    def backward(self, lid: int) -> None:
        self._now.backward.append((lid, self._clock.mark()))

    def span(self, kind: str, lid: int, span: Span) -> None:
        """A copy or a device update of a layer; `kind` names the field of `LayerTimes`."""
        self._now.spans.append((kind, lid, span))

    def end_step(self, step: int) -> tuple[LayerTimes, ...]:
        """Close this step's marks; the times of the oldest step that the device has passed, if any."""
        self._now.end = self._clock.mark()
        self._open.append(self._now)
        self._now = StepMarks(step + 1)
        if not self._clock.passed(self._open[0].end):
            return ()
        marks = self._open.popleft()
        if not all(self._clock.passed(span[1]) for _, _, span in marks.spans):
            return ()
        return self._times(marks)

    def _times(self, marks: StepMarks) -> tuple[LayerTimes, ...]:
        times: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        seconds = self._clock.seconds
        self.stall_s = 0.0
        for lids, span in marks.forward:
            stall = seconds(span)
            self.stall_s += stall
            times[lids[0]]["stall_s"] += stall
        for (lids, (_, went)), (_, (arrived, _)) in zip(marks.forward, marks.forward[1:], strict=False):
            self._share(times, lids, "forward_s", seconds((went, arrived)))
        if marks.forward and marks.backward:
            self._turn(times, marks)
        for (_, before), (lid, mark) in zip(marks.backward, marks.backward[1:], strict=False):
            times[lid]["backward_s"] += seconds((before, mark))
        for kind, lid, span in marks.spans:
            times[lid][kind] += seconds(span)
        return tuple(LayerTimes(lid=lid, **fields) for lid, fields in sorted(times.items()))

    def _turn(self, times: dict[int, dict[str, float]], marks: StepMarks) -> None:
        """From the last module's entry to the first finished gradient lie forward and backward: one to two."""
        lids, (_, went) = marks.forward[-1]
        first, mark = marks.backward[0]
        turn_s = max(self._clock.seconds((went, mark)), 0.0)
        self._share(times, lids, "forward_s", turn_s / 3)
        times[first]["backward_s"] += turn_s * 2 / 3

    def _share(self, times: dict[int, dict[str, float]], lids: tuple[int, ...], kind: str, seconds: float) -> None:
        """One module's time over the layers it consists of, by size."""
        total = sum(self._numels[lid] for lid in lids)
        for lid in lids:
            times[lid][kind] += max(seconds, 0.0) * self._numels[lid] / total
