"""Whether the optimizer process updates ahead of the verdict on a step's norm, or waits for it.

    Verdict ─▶ share of clipped steps ─▶ with every plan: what being ahead would save ─▶ SetMode

Being ahead lets the CPU update during all of backward. In a step that is clipped or skipped it is useless. While a plan
is on its way to layers for which being ahead no longer pays, the mode waits for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hytrain.planner.policies import Decision, decide, mixed
from hytrain.planner.profile import SAME_SPEED, Profile, Question
from hytrain.planner.simulate import simulate
from protocol import messages as m
from protocol.address import Address
from workers.effects import Command, Note, Send

#: The weight of the newest step in the share of those that were clipped.
WEIGHT: Final = 0.1


def ahead(profile: Profile, clipped: float) -> Profile:
    """The profile with a CPU that does not wait for verdicts. The share `clipped` of its steps is undone."""
    return replace(profile, speculates=profile.awaits_verdict and not profile.in_step, clipped=clipped)


def gain(profile: Profile, gpu_lids: frozenset[int], clipped: float) -> float:
    """The fraction of a step that being ahead saves, with these layers on the GPU."""
    waiting_s = simulate(replace(profile, speculates=False), gpu_lids).step_s
    return 1 - simulate(ahead(profile, clipped), gpu_lids).step_s / waiting_s if waiting_s else 0.0


class Mode:
    """One optimizer's. `clipped`: the share of steps that were clipped or skipped; `skipped`: how many were skipped."""

    def __init__(self, table: m.LayerTable, optimizer: Address) -> None:
        self._table, self._optimizer = table, optimizer
        self._is_ahead, self.is_told = table.speculate is not False, True
        self.clipped, self._verdicts = 0.0, 1  # the first steps are averaged with an assumed one, which was not clipped
        self._waits_from_plan: str | None = None  # why the CPU will wait for verdicts from the next plan on
        self.skipped = 0

    def continue_from(self, before: Mode) -> None:
        self.clipped, self._verdicts, self.skipped = before.clipped, before._verdicts, before.skipped

    @property
    def name(self) -> str | None:
        """What happens to gradients before the verdict; None if there is no verdict."""
        name = "speculate" if self._is_ahead else "defer"
        return name if self._table.awaits_verdict and self.is_told else None

    def of(self, profile: Profile) -> Profile:
        """The profile with a CPU that updates as it does now."""
        return self._in(profile, self._is_ahead)

    def _in(self, profile: Profile, is_ahead: bool) -> Profile:
        return ahead(profile, self.clipped) if is_ahead else profile

    def on_verdict(self, verdict: m.Verdict) -> None:
        """Count whether the step was clipped or skipped, so that early updates had to be undone."""
        self._verdicts += 1
        is_clipped = verdict.skipped or verdict.scale != 1.0
        self.clipped += max(WEIGHT, 1 / self._verdicts) * (is_clipped - self.clipped)
        self.skipped += verdict.skipped

    def decide(self, asked: Question, profile: Profile) -> tuple[Decision, list[Command]]:
        """What to plan in the mode that is best with it, and what tells the optimizer to change its mode."""
        is_ahead, why = self._best(asked, profile)
        decision = decide(asked, self._in(profile, is_ahead))
        ends = self._is_ahead and not is_ahead and asked.policy != "random"
        if decision.changed and ends and gain(profile, asked.current, self.clipped) >= SAME_SPEED:
            self._waits_from_plan = why  # with the current layers it still pays
            return decision, []
        self._waits_from_plan = None
        return decision, self._set(is_ahead, why)

    def _best(self, asked: Question, profile: Profile) -> tuple[bool, str]:
        """Whether the CPU should update ahead of verdicts, given the layers that the GPU would then own, and why."""
        if self._table.speculate is not None:
            return self._is_ahead, "as asked"
        if asked.policy == "random":
            return mixed(asked.seed, -2) % 2 == 1, f"drawn at random from seed {asked.seed}"
        decision = decide(asked, ahead(profile, self.clipped))
        there = replace(profile, visit=decision.visit, offload=decision.offload)
        gained = gain(there, decision.gpu_lids, self.clipped)
        why = f"{self.clipped:.0%} of the steps are clipped, updating ahead saves {gained:.1%} of a step"
        return gained >= SAME_SPEED, why

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
        assert 0.0 <= self.clipped <= 1.0
        assert self._table.speculate in (None, self._is_ahead), "a requested mode is kept"
