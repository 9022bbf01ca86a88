"""Records what the optimizer process has done since its last report, and draws its timeline.

    GradReady ─ arrived ─(waiting)─ updated ─(CPU update)─ updated … ─ sent ─ WeightsReady
                                       └──────── undone ◀────────┘

`Session` calls it for each tile. Consecutive tiles of a layer are drawn as one span. A layer that was interrupted by a
more urgent one has several spans.
"""

from __future__ import annotations

from collections.abc import Sequence

from hytrain.run.trace import TraceWriter
from protocol.messages import CpuUpdate, OptimizerReport


class Progress:
    """The times of each layer in the current step, in seconds of the monotonic clock."""

    def __init__(self, trace: TraceWriter | None, names: Sequence[str]) -> None:
        self._trace, self._names = trace, names
        self._arrived_s: dict[int, float] = {}
        self._update_s: dict[int, float] = {}
        self._drawn_waiting: set[int] = set()
        self._updates: list[CpuUpdate] = []
        self._busy_s = 0.0
        self._busy_until_s: float | None = None  # the end of the last tile, if another follows at once
        self._run: tuple[int, int, float, float] | None = None

    def arrived(self, lid: int, at_s: float) -> None:
        """The layer's GradReady was received."""
        self._arrived_s[lid] = at_s

    def updated(self, lid: int, step: int, began_s: float, ended_s: float) -> None:
        """A tile of the layer was updated. Its time includes messages handled since the previous tile."""
        took_s = ended_s - (began_s if self._busy_until_s is None else self._busy_until_s)
        self._busy_s += took_s
        self._busy_until_s = ended_s
        if self._trace is not None:
            self._draw(self._trace, lid, step, began_s, ended_s)
        self._update_s[lid] = self._update_s.get(lid, 0.0) + took_s

    def rests(self) -> None:
        """There is nothing to do until a message arrives."""
        self._busy_until_s = None

    def undone(self, lid: int) -> None:
        """The layer's update was discarded."""
        self._update_s.pop(lid, None)

    def sent(self, lid: int, step: int, at_s: float) -> None:
        """The layer's update is final, and its WeightsReady was sent."""
        queued_s = at_s - self._arrived_s.pop(lid)
        self._drawn_waiting.discard(lid)
        if (update_s := self._update_s.pop(lid, None)) is not None:  # None in a skipped step
            self._updates.append(CpuUpdate(lid=lid, update_s=update_s, queued_s=queued_s))
        if self._trace is not None:
            self._end_run(self._trace)
            self._trace.instant("messages", f"WeightsReady {self._names[lid]}", at_s, lid=lid, step=step)

    def touched(self, lid: int, began_s: float, ended_s: float) -> None:
        """A piece of the layer's memory was touched."""
        self._busy_until_s = None
        if self._trace is not None:
            self._end_run(self._trace)
            self._trace.span("planes", f"touch {self._names[lid]}", began_s, ended_s, lid=lid)

    def report(self, step: int, threads: int) -> OptimizerReport:
        """The work since the last report."""
        updates = tuple(sorted(self._updates, key=lambda update: update.lid))
        report = OptimizerReport(step=step, threads=threads, busy_s=self._busy_s, updates=updates)
        self._updates, self._busy_s = [], 0.0
        if self._trace is not None:
            self._trace.flush()
        return report

    def close(self) -> None:
        """Write the rest of the timeline."""
        if self._trace is not None:
            self._end_run(self._trace)
            self._trace.flush()

    def _draw(self, trace: TraceWriter, lid: int, step: int, began_s: float, ended_s: float) -> None:
        if self._run is not None and self._run[0] == lid:
            self._run = (*self._run[:3], ended_s)
            return
        self._end_run(trace)
        self._run = (lid, step, began_s, ended_s)
        if lid not in self._drawn_waiting:
            self._drawn_waiting.add(lid)
            name, arrived_s = self._names[lid], self._arrived_s[lid]
            trace.span("waiting", name, arrived_s, began_s, kind="waiting", lid=lid, step=step)

    def _end_run(self, trace: TraceWriter) -> None:
        if self._run is not None:
            lid, step, began_s, ended_s = self._run
            trace.span("CPU update", self._names[lid], began_s, ended_s, kind="CPU update", lid=lid, step=step)
            self._run = None
