"""Which layers the GPU should own from the next step on.

Owns the choice; the coordinator calls `decide` at a step boundary and carries the decision out as a plan.

    limits ──▶ Ladder (ladder.py): what fits, in nested choices, its rungs
                 │
                 ├─ fixed, cotrain, balance: the first rung that holds their k
                 ├─ deadline: what serves the objective (deadline.py) ──▶ target ──▶ worth the move? ──▶ Decision
                 └─ random: a rung of a shuffled ladder                                └─ no: current stays
"""

from __future__ import annotations

from dataclasses import dataclass

from hytrain.planner.deadline import Target, aim, worth_moving
from hytrain.planner.formulas import balance_k, cotrain_k, prefix_for
from hytrain.planner.ladder import Infeasible, Ladder, build_ladder
from hytrain.planner.profile import Limits, Profile
from hytrain.planner.simulate import simulate
from protocol.messages import OBJECTIVES

POLICIES = ("fixed", "cotrain", "balance", "deadline", "random")

CLEAR_CHANGE = 0.05  # of the parameters: what a formula's k must change by before layers follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    gpu_lids: frozenset[int]
    k: float  # what `gpu_lids` amounts to, whole layers
    reason: str  # one sentence for people
    predicted_step_s: float
    changed: bool  # against `current`


def decide(
    policy: str,
    profile: Profile,
    limits: Limits,
    *,
    fixed_k: float | None,
    current: frozenset[int],
    horizon_steps: int,
    min_gain: float,
    objective: str = "speed",
    seed: int = 0,
) -> Decision:
    """The layers that the GPU should own, given those it owns now.

    `fixed_k` is for policy "fixed"; `seed` is for "random", which owns other layers after every call.
    `objective` is for "deadline" alone, the others have no choice to make and their reason says so:
    "speed" is the least GPU memory within 1 % of the best step, "gpu-memory" the least that the host's memory
    allows and "host-memory" as many layers as the GPU's memory allows, both at any speed.

    "deadline" moves for speed if the predicted gain is more than the fraction `min_gain` of a step and repays
    the moves within `horizon_steps`, and for memory if that is a clear saving and costs no speed. "cotrain"
    and "balance" follow their formulas, but for changes smaller than `CLEAR_CHANGE`. Limits go first.

    Raises Infeasible if nothing fits, ValueError for an unknown policy or objective, a k outside [0, 1],
    unknown layers.
    """
    profile.require(current)
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}, choose one of {', '.join(OBJECTIVES)}")
    ladder = build_ladder(profile, limits, profile.layers)
    if policy == "fixed":
        if fixed_k is None:
            raise ValueError('policy "fixed" needs a k')
        target = _by_formula("k as given", fixed_k, profile, ladder)
    elif policy == "cotrain":
        target = _by_formula("(t_U - t_B) / 2 t_U", cotrain_k(profile), profile, ladder)
    elif policy == "balance":
        target = _by_formula("(t_U - t_B) / (1 + α) t_U", balance_k(profile), profile, ladder)
    elif policy == "deadline":
        target = aim(objective, profile, limits)
    elif policy == "random":
        target = _by_chance(seed, profile, limits, ladder, current)
    else:
        raise ValueError(f"unknown policy {policy!r}, choose one of {', '.join(POLICIES)}")

    if target.gpu_lids != current and limits.allow(profile, current):
        if policy in ("cotrain", "balance"):
            target = _unless_close(profile, current, target)
        elif policy == "deadline":
            target = worth_moving(objective, profile, limits, current, target, horizon_steps, min_gain)
    return Decision(
        gpu_lids=target.gpu_lids,
        k=profile.k_of(target.gpu_lids),
        reason=target.reason if policy == "deadline" else _without(objective, target.reason),
        predicted_step_s=simulate(profile, target.gpu_lids).step_s,
        changed=target.gpu_lids != current,
    )


# --- what each policy wants ---


def _by_formula(name: str, k: float, profile: Profile, ladder: Ladder) -> Target:
    lids = ladder.rung(ladder.rung_for(k, profile))
    got, wanted = profile.k_of(lids), profile.k_of(prefix_for(k, profile))
    if got < wanted:
        cut = f", and GPU memory has room for k={got:.2f}"
    elif got > wanted and len(lids) == ladder.lowest:
        cut = f", and host memory needs k={got:.2f}"
    else:
        cut = f", in whole layers {got:.2f}"
    return Target(gpu_lids=lids, reason=f"{name} is {k:.2f}{cut}")


def _by_chance(seed: int, profile: Profile, limits: Limits, ladder: Ladder, current: frozenset[int]) -> Target:
    """Layers in an order drawn from the seed, as many as drawn; drawn again if that changes nothing."""
    for draw in range(16):
        drawn = [mixed(seed, draw, layer.lid) for layer in profile.layers]
        order = [layer for _, layer in sorted(zip(drawn, profile.layers, strict=True), key=lambda pair: pair[0])]
        try:
            shuffled = build_ladder(profile, limits, order)
        except Infeasible:
            shuffled = ladder
        span = len(shuffled.layers) + 1 - shuffled.lowest
        lids = shuffled.rung(shuffled.lowest + mixed(seed, draw, -1) % span)
        if lids != current:
            break
    return Target(gpu_lids=lids, reason=f"drawn at random from seed {seed}")


def mixed(*words: int) -> int:
    """64 well-mixed bits (the finalizer of splitmix64), so that seeds in a row give unrelated draws."""
    mask = (1 << 64) - 1
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state


# --- whether to move ---


def _unless_close(profile: Profile, current: frozenset[int], target: Target) -> Target:
    """A formula's k wobbles with the measurements; layers don't have to."""
    now, wanted = profile.k_of(current), profile.k_of(target.gpu_lids)
    if abs(wanted - now) >= CLEAR_CHANGE:
        return target
    return Target(gpu_lids=current, reason=f"k={now:.2f} stays: {target.reason}, too close for a move")


def _without(objective: str, reason: str) -> str:
    return reason if objective == "speed" else f'{reason}; only policy "deadline" heeds objective "{objective}"'
