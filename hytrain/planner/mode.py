"""Decides whether the CPU updates ahead of the verdict on a step's norm, or waits for it.

Being ahead lets the CPU update during all of backward. In a step that is clipped or skipped it is useless.

    verdicts ──▶ share of steps that were clipped ─┐
    profile, layers on the GPU ──▶ both simulated ─┴─▶ what being ahead saves ──▶ worth it?
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from hytrain.planner.policies import mixed
from hytrain.planner.profile import Profile
from hytrain.planner.simulate import simulate

WEIGHT: Final = 0.1  # weight of the newest step in the smoothed share


@dataclass(slots=True)
class ClippedShare:
    """The smoothed share of steps that were clipped or skipped.

    The first steps are averaged together with an assumed unclipped one; each later step counts with `WEIGHT`.
    """

    value: float = 0.0
    count: int = 0

    def add(self, *, clipped: bool) -> None:
        self.count += 1
        self.value += max(WEIGHT, 1 / (self.count + 1)) * (clipped - self.value)

    def check(self) -> None:
        assert 0.0 <= self.value <= 1.0


def ahead(profile: Profile, clipped: float) -> Profile:
    """The profile with a CPU that does not wait for verdicts. The share `clipped` of its steps is undone."""
    return replace(profile, speculates=profile.awaits_verdict, clipped=clipped)


def gain(profile: Profile, gpu_lids: frozenset[int], clipped: float) -> float:
    """The fraction of a step that being ahead saves, with these layers on the GPU."""
    waiting_s = simulate(replace(profile, speculates=False), gpu_lids).step_s
    return 1 - simulate(ahead(profile, clipped), gpu_lids).step_s / waiting_s if waiting_s else 0.0


def drawn(seed: int) -> bool:
    """The mode of policy "random", drawn from the seed."""
    return mixed(seed, -2) % 2 == 1
