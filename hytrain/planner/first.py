"""The first plan, before any step has run.

The coordinator asks for it when it has the layer table, and proposes it as the plan for step 0.

    sizes, limits ──▶ ladder (ladder.py) ──▶ its lowest rung, or the one for a given k
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from hytrain.planner.book import ROLES
from hytrain.planner.ladder import build_ladder
from hytrain.planner.profile import LayerFacts, LayerProfile, Limits, Profile


def first_lids(facts: Iterable[LayerFacts], limits: Limits, k: float | None) -> frozenset[int]:
    """The layers that the GPU owns in the first steps: those for `k`; if that is None, the least that the host allows.

    Nobody knows yet how much GPU memory the activations will take, nor how long a step is. Too many layers on the GPU
    would end training in its first step, out of memory. Too few make the first steps slow, until one was measured.
    Raises Infeasible if nothing fits, ValueError for a k outside [0, 1].
    """
    profile = _untimed(facts)
    ladder = build_ladder(profile, limits, profile.layers)
    return ladder.rung(ladder.lowest if k is None else ladder.rung_for(k, profile))


def _untimed(facts: Iterable[LayerFacts]) -> Profile:
    """The layers without their times, which are not known."""
    none: dict[str, Any] = dict.fromkeys(ROLES, 0.0)
    layers = (LayerProfile(**asdict(fact), **none) for fact in sorted(facts, key=lambda fact: fact.position))
    return Profile(layers=tuple(layers))
