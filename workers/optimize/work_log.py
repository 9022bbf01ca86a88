"""Records what the optimizer process has done since its last report, and draws its timeline.

    GradReady ─ arrived ─(waiting)─ updated ─(CPU update)─ updated … ─ sent ─ WeightsReady
                                       └──────── undone ◀────────┘

`Session` calls it for each tile. Consecutive tiles of a layer are drawn as one span. A layer that was interrupted by a
more urgent one has several spans.
"""

from __future__ import annotations

from collections.abc import Sequence

from hytrain.run.trace import EVERY_STEP, NO_STEP, TraceWriter
from protocol.messages import CpuUpdate, OptimizerReport


class Progress:
    """The times of each layer in the current step, in seconds of the monotonic clock."""

    def __init__(self, trace: TraceWriter, names: Sequence[str]) -> None:
        self._trace, self._names = trace, names
        self._arrived_s: dict[int, float] = {}
        self._update_s: dict[int, float] = {}
        self._drawn_waiting: set[int] = set()
        self._updates: list[CpuUpdate] = []
        self._busy_s = 0.0
        self._busy_until_s: float | None = None  # the end of the last tile, if another follows at once
        self._run: tuple[int, int, float, float] | None = None

    def trace(self, steps: range) -> None:
        """Draw these steps from now on."""
        self._end_run()
        self._trace.begin(steps)

    def begins(self, step: int) -> bool:
        """A step begins. Whether the timeline that was asked for is complete now, and written.

        In the step after its last one, layers that forward did not need may still be updated for that one.
        """
        if not self._trace.is_on or step <= self._trace.steps.stop:
            return False
        self.trace(NO_STEP)
        return True

    def arrived(self, lid: int, at_s: float) -> None:
        """The layer's GradReady was received."""
        self._arrived_s[lid] = at_s

    def updated(self, lid: int, step: int, began_s: float, ended_s: float) -> None:
        """A tile of the layer was updated. Its time includes messages handled since the previous tile."""
        took_s = ended_s - (began_s if self._busy_until_s is None else self._busy_until_s)
        self._busy_s += took_s
        self._busy_until_s = ended_s
        if self._trace.draws(step):
            self._draw(lid, step, began_s, ended_s)
        self._update_s[lid] = self._update_s.get(lid, 0.0) + took_s

    def rests(self) -> None:
        """There is nothing to do until a message arrives."""
        self._busy_until_s = None

    def undone(self, lid: int) -> None:
        """The layer's update was discarded."""
        self._update_s.pop(lid, None)

    def sent(self, lid: int, step: int, at_s: float) -> None:
        """The layer's update is final, and its WeightsReady was sent."""
        del self._arrived_s[lid]
        self._drawn_waiting.discard(lid)
        if (update_s := self._update_s.pop(lid, None)) is not None:  # None in a skipped step
            self._updates.append(CpuUpdate(lid=lid, update_s=update_s))
        if self._trace.draws(step):
            self._end_run()
            self._trace.instant("messages", f"WeightsReady {self._names[lid]}", at_s, lid=lid, step=step)

    def touched(self, lid: int, began_s: float, ended_s: float) -> None:
        """A piece of the layer's memory was touched."""
        self._busy_until_s = None
        if self._trace.is_on:
            self._end_run()
            self._trace.span("planes", f"touch {self._names[lid]}", began_s, ended_s, lid=lid)

    def report(self, step: int, threads: int) -> OptimizerReport:
        """The work since the last report."""
        updates = tuple(sorted(self._updates, key=lambda update: update.lid))
        report = OptimizerReport(step=step, threads=threads, busy_s=self._busy_s, updates=updates)
        self._updates, self._busy_s = [], 0.0
        self._trace.flush()
        return report

    def close(self) -> None:
        """Write the rest of the timeline. The next trainer counts its steps anew."""
        self.trace(self._trace.steps if self._trace.steps == EVERY_STEP else NO_STEP)

    def _draw(self, lid: int, step: int, began_s: float, ended_s: float) -> None:
        if self._run is not None and self._run[0] == lid:
            self._run = (*self._run[:3], ended_s)
            return
        self._end_run()
        self._run = (lid, step, began_s, ended_s)
        if lid not in self._drawn_waiting:
            self._drawn_waiting.add(lid)
            name, arrived_s = self._names[lid], self._arrived_s[lid]
            self._trace.span("waiting", name, arrived_s, began_s, kind="waiting", lid=lid, step=step)

    def _end_run(self) -> None:
        if self._run is not None:
            lid, step, began_s, ended_s = self._run
            self._trace.span("CPU update", self._names[lid], began_s, ended_s, kind="CPU update", lid=lid, step=step)
            self._run = None
