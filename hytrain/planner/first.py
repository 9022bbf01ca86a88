"""The first plan, before any step has run.

Owns the guess; the coordinator asks for it when it has the layer table, and proposes it as the plan for step 0.

    sizes x rates ──▶ a Profile whose forward and backward are assumed ──▶ the deadline search ──▶ first layers
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from hytrain.planner.book import Rates
from hytrain.planner.ladder import Steps, build_ladder, search
from hytrain.planner.profile import LayerFacts, LayerProfile, Limits, Profile

#: Of the GPU memory that may go to state: what the first plan takes of it at most, while the activations are unknown.
FIRST_SHARE: Final = 0.5


def first_lids(
    facts: Iterable[LayerFacts], rates: Rates, limits: Limits, k: float | None, *, objective: str = "speed"
) -> frozenset[int]:
    """The layers that the GPU owns in the first steps: those for `k`, or if that is None a guess.

    How long forward and backward will take is not known, so no k can be known to be right. Too many layers on
    the GPU cost memory at once, and perhaps an out-of-memory error when the activations come; too few cost a
    part of the CPU's update time in each of a few slow steps, until the first are measured. So the guess is
    the least for a step whose forward and backward last as long as the CPU's updates of everything. Longer
    steps need less, and it is soon given back. In shorter ones the CPU is late at any small k. What the rates
    do tell is in it: a slow link or few large layers need more, since the first layer's trip has to hide behind
    the layers below it; and where the GPU updates no faster than the CPU does, it gets next to none. It takes at most
    `FIRST_SHARE` of the memory for state, unless the host could not hold the rest.

    Objective "gpu-memory" begins with the least that the host allows, "host-memory" with all of that share.
    Raises Infeasible if nothing fits, ValueError for a k outside [0, 1].
    """
    profile = _assumed(facts, rates)
    whole = build_ladder(profile, limits, profile.layers)
    if k is not None:
        return whole.rung(whole.rung_for(k, profile))
    least = whole.rung(whole.lowest)
    if limits.gpu_state_bytes is not None:
        share = max(int(FIRST_SHARE * limits.gpu_state_bytes), profile.gpu_state_bytes(least))
        limits = replace(limits, gpu_state_bytes=share)
    ladder = build_ladder(profile, limits, profile.layers)
    if objective == "gpu-memory":
        return least
    if objective == "host-memory":
        return ladder.rung(len(ladder.layers))
    return ladder.rung(search(Steps(profile, ladder)))


def _assumed(facts: Iterable[LayerFacts], rates: Rates) -> Profile:
    """Forward takes a third and backward two thirds of the CPU's update time, each layer by its size."""
    return Profile(
        layers=tuple(
            LayerProfile(
                lid=fact.lid,
                position=fact.position,
                numel=fact.numel,
                forward_s=fact.numel * rates.cpu_update_s / 3,
                backward_s=fact.numel * rates.cpu_update_s * 2 / 3,
                d2h_s=fact.numel * rates.d2h_s,
                h2d_s=fact.numel * rates.h2d_s,
                cpu_update_s=fact.numel * rates.cpu_update_s,
                gpu_update_s=fact.numel * rates.gpu_update_s,
                gpu_state_bytes=fact.gpu_state_bytes,
                held_bytes=fact.held_bytes,
                host_bytes=fact.host_bytes,
            )
            for fact in sorted(facts, key=lambda fact: fact.position)
        )
    )
