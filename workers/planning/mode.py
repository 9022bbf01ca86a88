"""Whether the optimizer process updates ahead of verdicts, or after them.

    Verdict ─▶ share of clipped steps ─▶ with every plan: what being ahead would save ─▶ SetMode

While a plan is on its way to layers for which being ahead no longer pays, the mode waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hytrain import planner
from hytrain.planner import Decision, Profile
from protocol import messages as m
from protocol.address import Address
from workers.effects import Command, Note, Send


class Mode:
    """One optimizer's. `skipped`: so many steps were skipped."""

    def __init__(self, table: m.LayerTable, optimizer: Address) -> None:
        self._table, self._optimizer = table, optimizer
        self._is_ahead, self.is_told = table.speculate is not False, True
        self._clipped = planner.ClippedShare()
        self._waits_from_plan: str | None = None  # why the CPU will wait for verdicts from the next plan on
        self.skipped = 0

    def continue_from(self, before: Mode) -> None:
        self._clipped, self.skipped = before._clipped, before.skipped

    @property
    def name(self) -> str | None:
        """What happens to gradients before the verdict; None if there is no verdict."""
        name = "speculate" if self._is_ahead else "defer"
        return name if self._table.awaits_verdict and self.is_told else None

    def of(self, profile: Profile) -> Profile:
        """The profile with a CPU that updates as it does now."""
        return self._in(profile, self._is_ahead)

    def _in(self, profile: Profile, is_ahead: bool) -> Profile:
        return planner.ahead(profile, self._clipped.value) if is_ahead else profile

    def on_verdict(self, verdict: m.Verdict) -> None:
        """Count whether the step was clipped or skipped, so that early updates had to be undone."""
        self._clipped.add(clipped=verdict.skipped or verdict.scale != 1.0)
        self.skipped += verdict.skipped

    def decide(
        self, policy: str, profile: Profile, current: frozenset[int], plan: Callable[[Profile], Decision], *, seed: int
    ) -> tuple[Decision, list[Command]]:
        """What to plan in the mode that is best with it, and what tells the optimizer to change its mode."""
        is_ahead, why = self._best(policy, profile, plan, seed)
        decision = plan(self._in(profile, is_ahead))
        ends = self._is_ahead and not is_ahead and policy != "random"
        if decision.changed and ends and self._gain(profile, current) >= planner.SAME_SPEED:
            self._waits_from_plan = why  # with the current layers it still pays
            return decision, []
        self._waits_from_plan = None
        return decision, self._set(is_ahead, why)

    def _best(self, policy: str, profile: Profile, plan: Callable[[Profile], Decision], seed: int) -> tuple[bool, str]:
        """Whether the CPU should update ahead of verdicts, given the layers that the GPU would then own, and why."""
        if self._table.speculate is not None:
            return self._is_ahead, "as asked"
        if policy == "random":
            return planner.drawn(seed), f"drawn at random from seed {seed}"
        share = self._clipped.value
        decision = plan(planner.ahead(profile, share))
        there = replace(profile, visit=decision.visit, offload=decision.offload)
        gained = self._gain(there, decision.gpu_lids)
        why = f"{share:.0%} of the steps are clipped, updating ahead saves {gained:.1%} of a step"
        return gained >= planner.SAME_SPEED, why

    def _gain(self, profile: Profile, gpu_lids: frozenset[int]) -> float:
        return planner.gain(profile, gpu_lids, self._clipped.value)

    def on_applied(self, *, as_planned: bool) -> list[Command]:
        """A plan is in effect: the mode that has waited for it begins."""
        why, self._waits_from_plan = self._waits_from_plan, None
        return self._set(False, why) if why is not None and as_planned else []

    def _set(self, is_ahead: bool, why: str) -> list[Command]:
        if self.is_told and is_ahead == self._is_ahead:
            return []
        self._is_ahead, self.is_told = is_ahead, True
        return [Note(f"mode {self.name}: {why}"), Send(self._optimizer, m.SetMode(speculate=is_ahead))]

    def check(self) -> None:
        self._clipped.check()
        assert self._table.speculate in (None, self._is_ahead), "a requested mode is kept"
