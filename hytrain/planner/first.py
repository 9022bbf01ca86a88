"""The first plan, made before any step. The coordinator proposes it for step 0.

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
    """The layers that the GPU owns in the first steps: those for `k`, or as few as host memory allows if k is None.

    The GPU memory of the activations and the step time are not known yet. Too many layers on the GPU would end the
    first step out of memory; too few only make the first steps slow.
    Raises Infeasible if nothing fits, ValueError for a k outside [0, 1].
    """
    unknown: dict[str, Any] = dict.fromkeys(ROLES, 0.0)
    layers = (LayerProfile(**asdict(fact), **unknown) for fact in sorted(facts, key=lambda fact: fact.position))
    profile = Profile(layers=tuple(layers))
    ladder = build_ladder(profile, limits, profile.layers)
    return ladder.rung(ladder.lowest if k is None else ladder.rung_for(k, profile))
