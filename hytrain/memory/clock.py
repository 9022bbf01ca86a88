"""Streams, marks in the device's work, and the time between them. Nothing here waits for the device.

A mark is a CUDA timing event on a stream, or a reading of the host's clock on device "cpu". `transfer`
leaves marks around copies, `step.measure` around layers. A later step reads them, once the device has passed them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

Mark = Any
Span = tuple[Mark, Mark]
#: A CUDA stream; None on device "cpu", where every call has finished on return.
Stream = torch.cuda.Stream | None
#: The device's clock drifts from the host's by about 10 us per second, so the two are compared regularly.
ANCHOR_EVERY_S: Final = 1.0
ANCHOR_TRIES: Final = 4
ANCHOR_PATIENCE_S: Final = 2e-4


_streams: Final[dict[tuple[int, int, int], torch.cuda.Stream]] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """What `torch.cuda.current_stream` returns, without making a new object each time: hooks ask for each gradient."""
    which = torch._C._cuda_getCurrentStream(torch.cuda.current_device() if device.index is None else device.index)
    if (known := _streams.get(which)) is None:
        known = _streams[which] = torch.cuda.current_stream(device)
    return known


class OnStream:
    """A context in which a stream is the current one. Each copy has one, and torch's own contexts take longer.

    It comes back to the stream before. To set that makes its device the current one, which is the first GPU in a new
    thread: so another device is left and entered again.
    """

    __slots__ = ("_away", "_before", "_device", "_stream")

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._away: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        self._before = current_stream(self._device)
        if torch.cuda.current_device() != self._device.index:
            self._away = torch.cuda.device(self._device)
            self._away.__enter__()
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: Any) -> None:
        try:
            torch.cuda.set_stream(self._before)
        finally:
            if self._away is not None:
                self._away.__exit__(*error)


class HostClock:
    """Marks are readings of the monotonic clock, in seconds."""

    runs_ahead = False
    mark: Callable[[], Mark] = staticmethod(time.monotonic)

    def mark_on(self, stream: Stream) -> Mark:
        return self.mark()

    def passed(self, mark: Mark) -> bool:
        return True

    def seconds(self, span: Span) -> float:
        return float(span[1] - span[0])

    def anchor(self, marks: Iterable[Mark] = ()) -> None:
        """Marks are already on the monotonic clock, and numbers need no pool."""

    recycle = anchor

    def at(self, mark: Mark) -> float:
        return float(mark)


class CudaClock:
    """Marks are timing events, taken from a pool: no allocation in steady state."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: deque[Mark] = deque()
        self._idle: torch.cuda.Stream | None = None
        self._anchor: tuple[Mark, float] | None = None

    def mark(self) -> Mark:
        """On the current stream."""
        return self.mark_on(current_stream(self._device))

    def mark_on(self, stream: torch.cuda.Stream) -> Mark:
        event = self._event()
        event.record(stream)
        return event

    def passed(self, mark: Mark) -> bool:
        return bool(mark.query())

    def seconds(self, span: Span) -> float:
        return float(span[0].elapsed_time(span[1])) / 1e3

    def recycle(self, marks: Iterable[Mark]) -> None:
        self._pool.extend(marks)

    def _event(self) -> Mark:
        try:
            return self._pool.pop()
        except IndexError:  # two threads use the pool, so a check before pop() would race
            return torch.cuda.Event(enable_timing=True)

    def anchor(self) -> None:
        """Relate the device's clock to the host's: record an event on an idle stream between two host readings.

        The narrowest of several tries is used. If no event completes in time, the last anchor stays; the first one
        takes its time.
        """
        if self._anchor is not None and time.monotonic() - self._anchor[1] < ANCHOR_EVERY_S:
            return
        self._idle = self._idle or torch.cuda.Stream(self._device)
        patience_s = math.inf if self._anchor is None else ANCHOR_PATIENCE_S
        idle = self._idle
        tries = [found for _ in range(ANCHOR_TRIES) if (found := self._try_anchor(idle, patience_s)) is not None]
        if tries:
            _, event, at_s = min(tries, key=lambda found: found[0])
            self._pool.extend(other for _, other, _ in tries if other is not event)
            if self._anchor is not None:
                self._pool.append(self._anchor[0])
            self._anchor = event, at_s

    def _try_anchor(self, idle: torch.cuda.Stream, patience_s: float) -> tuple[float, Mark, float] | None:
        """The time between the two host readings, the event, and their middle; None if it took too long."""
        event = self._event()
        event.record(idle)  # the first record also creates the event, which takes longer
        began_s = before_s = time.monotonic()
        event.record(idle)
        asked_s = time.monotonic()
        while not event.query():
            before_s, asked_s = asked_s, time.monotonic()
            if asked_s - began_s > patience_s:
                self._pool.append(event)
                return None
        after_s = time.monotonic()
        return after_s - before_s, event, (before_s + after_s) / 2

    def at(self, mark: Mark) -> float:
        assert self._anchor is not None, "anchor() comes first"
        event, at_s = self._anchor
        return at_s + self.seconds((event, mark))


Clock = HostClock | CudaClock
