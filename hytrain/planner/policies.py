"""Decides which layers the GPU should own from the next step on.

The coordinator asks `first_lids` for the plan of step 0. Later it calls `decide` at a step's boundary and carries the
decision out as a plan.

    limits ──▶ Ladder (ladder.py): what fits, as nested sets, its rungs
                 │
                 ├─ fixed, balance: the first rung with at least their k
                 ├─ deadline: the best for the objective (deadline.py) ──▶ target ──▶ worth the move? ──▶ Decision
                 └─ random: a rung of a shuffled ladder                                └─ no: no change
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf
from typing import Any, Final

from hytrain.planner.book import ROLES
from hytrain.planner.contention import LITTLE
from hytrain.planner.deadline import CLEAR_SAVING, Target, aim, worth_moving
from hytrain.planner.ladder import Infeasible, Ladder, balance_k, build_ladder, prefix_for
from hytrain.planner.profile import SAME_SPEED, LayerFacts, LayerProfile, Limits, Profile, Question, Shares
from hytrain.planner.simulate import simulate

#: Of the parameters: those that are tried for visits and for offloaded weights.
SHARES: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
CLIMBS: Final = 3  # around so many of the fastest shares, others are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    gpu_lids: frozenset[int]
    visit: float  # the share of the parameters whose state visits the GPU, as `Order.visiting` takes it
    offload: float  # the share whose weights rest in host memory, as `Order.offloaded` takes it
    reason: str  # one sentence for people
    predicted_step_s: float | None = None  # None before a step is measured
    changed: bool = True  # from `current`


def decide(asked: Question, profile: Profile) -> Decision:
    """The layers that the GPU should own. `profile.visit` and `profile.offload` are the current shares.

    Raises Infeasible if nothing fits.
    """
    policy, objective, current = asked.policy, asked.objective, asked.current
    visit, offload = asked.visit, asked.offload
    now = profile
    asked = replace(asked, now=now.split(current))
    profile = _with(profile, (0.0 if visit is None else visit, 1.0 if offload is None else offload))
    if policy == "deadline" and None in (visit, offload):
        profile = _best_shares(asked, now)
    asked = replace(asked, limits=asked.limits.beside_visits(profile))
    target = _target(asked, profile)
    if asked.limits.allow(profile, current):
        if policy == "balance":
            target = _unless_close(profile, current, target)
        elif policy == "deadline":
            target = worth_moving(asked, profile, target)
    return Decision(
        gpu_lids=target.gpu_lids,
        visit=profile.visit,
        offload=profile.offload,
        reason=_shares(profile) + (target.reason if policy == "deadline" else _without(objective, target.reason)),
        predicted_step_s=simulate(profile, target.gpu_lids).step_s,
        changed=target.gpu_lids != current or (profile.visit, profile.offload) != (now.visit, now.offload),
    )


def _target(asked: Question, profile: Profile) -> Target:
    """What the policy would choose if moves cost nothing."""
    if asked.policy == "deadline":
        return aim(asked.objective, profile, asked.limits)
    ladder = build_ladder(profile, asked.limits, profile.layers)
    if asked.policy == "balance":
        return _by_formula("(t_U - t_B) / (1 + α) t_U", balance_k(profile), profile, ladder)
    if asked.policy == "random":
        return _by_chance(asked, profile, ladder)
    assert asked.fixed_k is not None, 'policy "fixed" has a k'
    return _by_formula("k as given", asked.fixed_k, profile, ladder)


def _best_shares(asked: Question, profile: Profile) -> Profile:
    """The best shares of visits and of offloaded weights for the objective, each with its best layers.

    For speed those with the least GPU memory among those within 1 % of the fastest; for memory the fastest of those
    that need the least. Every other share is tried, then what is next to the fastest, until that brings no other: to
    choose one share after the other would miss what only both together bring. Other shares cost steps in which layers
    change owners, so a clear gain or saving is needed.
    """
    visits, offloads = (SHARES if share is None else (share,) for share in (asked.visit, asked.offload))
    now = (profile.visit if len(visits) > 1 else visits[0], profile.offload if len(offloads) > 1 else offloads[0])
    objective = asked.objective
    tried = dict[Shares, tuple[float, int] | None]()
    every = set(product(visits, offloads))
    more = {now, *product(visits[::2], offloads[::2])}
    while more:
        for pair in more:
            tried[pair] = _tried(asked, profile, pair)
        known = {pair: found for pair, found in tried.items() if found is not None}
        if not known and (more := every - tried.keys()):
            continue
        if not known:
            return _with(profile, (visits[0], offloads[-1]))  # the least GPU memory, where it says what does not fit
        by_speed = sorted(known, key=lambda pair: known[pair][0])
        enough_s = known[by_speed[0]][0] * (1 + SAME_SPEED) if objective == "speed" else inf
        good = [pair for pair in by_speed if known[pair][0] <= enough_s]
        best = min(good, key=lambda pair: (known[pair][1], pair if objective == "speed" else known[pair][0]))
        others = {known[pair]: pair for pair in reversed(by_speed)}  # one of those that come to the same
        around = (
            product(_beside(pair[0], visits), _beside(pair[1], offloads))
            for pair in (best, *list(reversed(others.values()))[:CLIMBS])
        )
        more = {pair for pairs in around for pair in pairs} - tried.keys()
    if now in known:
        (now_s, now_bytes), (best_s, best_bytes) = known[now], known[best]
        gains = now_s - best_s > (asked.min_gain + SAME_SPEED) * now_s
        saves = now_bytes - best_bytes > CLEAR_SAVING * profile.gpu_state_bytes(profile.lids)
        best = best if gains or saves else now
    return _with(profile, best)


def _tried(asked: Question, profile: Profile, shares: Shares) -> tuple[float, int] | None:
    """The step's time with these shares and their best layers, and the memory that the objective is about.

    None if that does not fit.
    """
    there, limits, objective = _with(profile, shares), asked.limits, asked.objective
    least = there.gpu_state_bytes(frozenset()) + there.held_for_visits_bytes
    if limits.gpu_state_bytes is not None and least > limits.gpu_state_bytes:
        return None
    try:
        lids = aim(objective, there, limits.beside_visits(there), few=0).gpu_lids
    except Infeasible:
        return None
    on_gpu = there.gpu_state_bytes(lids) + there.held_for_visits_bytes
    of_these = (known.step_s for split, known in asked.tried.items() if split[1:] == shares)
    simulated_s = asked.miss(there.split(lids)) * simulate(there, lids).step_s
    step_s = min([simulated_s, *(each_s for each_s in of_these if each_s is not None)])
    return step_s, there.host_bytes(lids) if objective == "host-memory" else on_gpu


def _beside(share: float, shares: Sequence[float]) -> Sequence[float]:
    """The share, and the next smaller and larger one of `shares`."""
    at = bisect(shares, share)
    return sorted({share, *shares[max(0, at - 2) : at + 1]})


def _with(profile: Profile, shares: Shares) -> Profile:
    return replace(profile, visit=shares[0], offload=shares[1])


def _shares(profile: Profile) -> str:
    offloaded = f"{profile.offload:.0%} of the weights rest in host memory; " if profile.offload else ""
    must = f"the CPU cannot update {profile.must_visit:.0%}, whose state visits the GPU or stays there; "
    visiting = f"the state of {profile.visit:.0%} visits the GPU; " if profile.visit else ""
    return offloaded + (must if profile.must_visit else "") + visiting


def first_lids(
    facts: Iterable[LayerFacts],
    limits: Limits,
    k: float | None,
    *,
    visit: float = 0.0,
    offload: float = 0.0,
    window_bytes: int = 0,
    for_visits_bytes: int = 0,
) -> frozenset[int]:
    """The layers that the GPU owns in the first steps: those for `k`, or as few as host memory allows if k is None.

    The GPU memory of the activations and the step time are not known yet. Too many layers on the GPU would end the
    first step out of memory; too few only make the first steps slow.
    Raises Infeasible if nothing fits.
    """
    unknown: dict[str, Any] = dict.fromkeys(ROLES, 0.0)
    layers = (LayerProfile(**asdict(fact), **unknown) for fact in sorted(facts, key=lambda fact: fact.position))
    profile = Profile(
        layers=tuple(layers),
        visit=visit,
        offload=offload,
        window_bytes=window_bytes,
        for_visits_bytes=for_visits_bytes,
    )
    ladder = build_ladder(profile, limits.beside_visits(profile), profile.layers)
    return ladder.rung(ladder.lowest if k is None else ladder.rung_for(k, profile))


def drawn_visits(layers: Iterable[LayerFacts], gpu_lids: frozenset[int], seed: int) -> frozenset[int]:
    """About half of the layers that the GPU does not own, drawn from the seed, and all that must visit it."""
    others = (layer for layer in layers if layer.lid not in gpu_lids)
    return frozenset(layer.lid for layer in others if layer.must_visit or mixed(seed, layer.lid, -2) & 1)


def drawn_offloads(layers: Iterable[LayerFacts], gpu_lids: frozenset[int], seed: int) -> frozenset[int]:
    """About half of the blocks that can be offloaded, drawn from the seed; not those of which the GPU owns a layer."""
    owned = {layer.block for layer in layers if layer.lid in gpu_lids}
    found = (layer for layer in layers if layer.weights_bytes and layer.block not in owned)
    return frozenset(layer.lid for layer in found if mixed(seed, layer.block, -3) & 1)


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


def _by_chance(asked: Question, profile: Profile, ladder: Ladder) -> Target:
    """A random number of layers in random order, both drawn from the seed; drawn again if nothing changes."""
    for draw in range(16):
        drawn = [mixed(asked.seed, draw, layer.lid) for layer in profile.layers]
        order = [layer for _, layer in sorted(zip(drawn, profile.layers, strict=True), key=lambda pair: pair[0])]
        try:
            shuffled = build_ladder(profile, asked.limits, order)
        except Infeasible:
            shuffled = ladder
        span = len(shuffled.layers) + 1 - shuffled.lowest
        lids = shuffled.rung(shuffled.lowest + mixed(asked.seed, draw, -1) % span)
        if lids != asked.current:
            break
    return Target(gpu_lids=lids, reason=f"drawn at random from seed {asked.seed}")


def mixed(*words: int) -> int:
    """64 well-mixed bits (the finalizer of splitmix64), so consecutive seeds give unrelated draws."""
    mask = (1 << 64) - 1
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state


def _unless_close(profile: Profile, current: frozenset[int], target: Target) -> Target:
    """The target, unless its k is close to the current one: a formula's k varies with the measurements."""
    now, wanted = profile.k_of(current), profile.k_of(target.gpu_lids)
    if abs(wanted - now) >= LITTLE:
        return target
    return Target(gpu_lids=current, reason=f"k={now:.2f} stays: {target.reason}, too close for a move")


def _without(objective: str, reason: str) -> str:
    return reason if objective == "speed" else f'{reason}; only policy "deadline" heeds objective "{objective}"'
