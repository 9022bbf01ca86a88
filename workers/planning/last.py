"""The plan with which the last run ended, on the same machine, of the same layers with the same options.

    a plan rests ─ Remember ─▶ `workers.coordinate.last_plans` keeps it ─▶ the next run's first plan

It is where measurements begin, and no more: what they say is planned from the first measured step on, as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from hytrain.planner.contention import USUAL_STEPS
from hytrain.planner.policies import Decision
from protocol import messages as m
from protocol.placement import Places
from workers.effects import Command, Remember
from workers.planning.commands import Wishes
from workers.planning.room import Room


@dataclass(frozen=True, slots=True, kw_only=True)
class LastPlan:
    """`shares` are those of visits and of offloaded weights. `gpu_bytes` is the table's, from the run's start."""

    places: Places
    shares: tuple[float, float]
    gpu_bytes: int | None

    @property
    def decision(self) -> Decision:
        visit, offload = self.shares
        why = "the plan with which the last run like this one ended"
        return Decision(gpu_lids=self.places.gpu, visit=visit, offload=offload, reason=why)

    def fits(self, table: m.LayerTable, room: Room) -> bool:
        """Whether a run may begin with it. What it needs on the GPU beside state is as it was, or not known yet."""
        offloadable = {lid for block in table.blocks for lid in block}
        if len(self.places) != len(table.layers) or not offloadable >= self.places.offloaded:
            return False
        if any(layer.stays_on_device and layer.lid in self.places.cpu for layer in table.layers):
            return False
        if table.gpu_bytes is not None and table.gpu_bytes >> 30 < (self.gpu_bytes or 0) >> 30:  # a GiB less
            return False
        limits = room.limits.gpu_state_bytes, room.limits.host_bytes
        taken = zip(room.bytes_of(self.places), limits, strict=True)
        return all(limit is None or nbytes <= limit for nbytes, limit in taken)


class Last:
    """What a run begins with, if that is known, and what the next one is to begin with."""

    def __init__(self, table: m.LayerTable, last: LastPlan | None) -> None:
        self._table, self._last = table, last
        self._rests_at = inf

    def begins_with(self, wishes: Wishes, room: Room) -> LastPlan | None:
        """The last plan, unless plans do not follow measurements, or there may be no room for it."""
        fits = wishes.are_found and self._last is not None and self._last.fits(self._table, room)
        return self._last if fits else None

    def changed(self, step: int) -> None:
        """From this step on, there are other placements."""
        self._rests_at = step + USUAL_STEPS  # without another plan, it rests

    def keeps(self, step: int, wishes: Wishes, places: Places, shares: tuple[float, float]) -> list[Command]:
        """Have these placements kept once they rest, unless they come from commands."""
        if step < self._rests_at or not wishes.are_found or wishes.kept != Wishes(self._table).kept:
            return []
        self._rests_at = inf
        return [Remember(self._table, places, shares)]


def same(table: m.LayerTable) -> str:
    """What tables of the same training have in common, whatever memory there is."""
    common = replace(table, inbox="trainer", gpu_bytes=None, host_bytes=None, hold_bytes=0, continues=False)
    return repr(common)
