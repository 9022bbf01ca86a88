"""When a followed run needs somebody: `hytrain-monitor --follow --on-stall CMD --on-divergence CMD`.

    snapshots ─▶ Alerts.look ─▶ Trouble about a "stall" or a "divergence" ─▶ run: CMD, while the monitor goes on

An alert comes once, and again only after things were well in between. It reads no clock, file or socket.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from workers.watch.troubles import Snapshot, Trouble

#: Waits of the last so many steps are looked at together: a single slow step is no alert.
STEPS: Final = 16
#: Of the time of these steps: that much of waiting is an alert, and that little is its end.
STALLED: Final = 0.3
CALM: Final = 0.15
#: With so much of the step, the CPU is busy all the time.
BUSY: Final = 0.85


@dataclass(slots=True)
class Alerts:
    """What was told by now."""

    _records: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=STEPS))
    _told: set[str] = field(default_factory=set)

    def look(self, snapshot: Snapshot) -> Iterator[Trouble]:
        """The alerts of a new status."""
        troubles = {trouble.about: trouble for trouble in snapshot.troubles}
        for process, _ in snapshot.processes:
            trouble = troubles.get(str(process.address))
            if self._is_new(str(process.address), begins=trouble is not None, ends=trouble is None):
                assert trouble is not None, "it begins with one"
                yield Trouble("stall", trouble.text)
        record = json.loads(snapshot.status.record)
        if not record or (self._records and record == self._records[-1]):
            return
        self._records.append(record)
        divergence = troubles.get("divergence")
        is_well = divergence is None and "loss" in record  # other records say nothing of it
        if self._is_new("divergence", begins=divergence is not None, ends=is_well):
            assert divergence is not None, "it begins with one"
            yield divergence
        share = sum(one["stall_s"] for one in self._records) / max(sum(one["step_s"] for one in self._records), 1e-9)
        is_full = len(self._records) == STEPS
        if self._is_new("waiting", begins=is_full and share >= STALLED, ends=share <= CALM):
            steps = f"of the {STEPS} steps up to step {record['step']}"
            yield Trouble("stall", f"{share:.0%} {steps} were spent waiting for weights or memory; {_cause(record)}")

    def _is_new(self, what: str, *, begins: bool, ends: bool) -> bool:
        if ends:
            self._told.discard(what)
        if not begins or what in self._told:
            return False
        self._told.add(what)
        return True


def _cause(record: dict[str, Any]) -> str:
    """What is likely behind long waits."""
    busy_s, step_s = record.get("cpu_busy_s"), record["step_s"]
    if busy_s is not None and busy_s >= BUSY * step_s:
        return "the CPU updates all the time: give it more cores, or find out what else runs on them"
    if record.get("visiting_layers") or record.get("offloaded_layers"):
        return "the CPU is not always busy, so copies between host and GPU take the time"
    return "the CPU is not always busy, so its updates come late for another reason: look at a timeline"
