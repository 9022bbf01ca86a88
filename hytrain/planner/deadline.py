"""The target of policy "deadline", and whether it is worth the move.

Owns the choice between speed and memory. The target is a rung of the ladder (ladder.py):

    speed          the least GPU memory among the rungs within 1 % of the fastest; with few layers, among all sets
    gpu-memory     the least GPU memory that host memory allows, at any speed
    host-memory    the least host memory that GPU memory allows, at any speed

What was measured counts more than what is simulated. What a split of the layers was found to take longer than
simulated, it is expected to take again, and so are those beside it; and one under which steps were shorter is returned
to. A gain counts if steps scatter by less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

from hytrain.planner.contention import LITTLE, SETTLED_STEPS, USUAL_STEPS
from hytrain.planner.ladder import Infeasible, Ladder, Steps, build_ladder, search
from hytrain.planner.profile import SAME_SPEED, LayerProfile, Limits, Profile, Question
from hytrain.planner.simulate import simulate
from hytrain.readable import gib

CLEAR_SAVING = 0.03  # of all optimizer state: the least that a move must save if it gains no speed
LEAVE_OUT_TRIES = 4
FEW = 8  # the most layers of which all sets are tried: 256 simulated steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    gpu_lids: frozenset[int]
    reason: str


def aim(objective: str, profile: Profile, limits: Limits, *, few: int = FEW) -> Target:
    """The best layers for the objective, whoever owns them now. Raises Infeasible if nothing fits.

    Of at most `few` layers, all sets are tried.
    """
    if objective == "gpu-memory":
        return _least_on_the_gpu(profile, limits, few)
    if objective == "host-memory":
        return _most_on_the_gpu(profile, limits, few)
    return _fastest(profile, limits, few)


def _least_on_the_gpu(profile: Profile, limits: Limits, few: int) -> Target:
    """The lowest rung without needless layers; with few layers, the best of all sets."""
    ladder = build_ladder(profile, limits, profile.layers)
    lids = ladder.rung(ladder.lowest)
    for layer in _largest_first(ladder.layers[: ladder.lowest]):
        if limits.allow(profile, lids - {layer.lid}):  # a larger layer after it makes it needless
            lids -= {layer.lid}
    lids = min([lids, *_all_sets(profile, limits, few)], key=profile.gpu_state_bytes)
    why = "is the least that host memory allows" if lids else "since host memory holds everything"
    return Target(gpu_lids=lids, reason=f"GPU memory is to be saved: k={profile.k_of(lids):.2f} {why}")


def _most_on_the_gpu(profile: Profile, limits: Limits, few: int) -> Target:
    """In forward order or large layers first, whichever fills the GPU better; with few layers, the best of all sets."""
    by_rank = build_ladder(profile, limits, profile.layers)
    by_size = build_ladder(profile, replace(limits, host_bytes=None), _largest_first(profile.layers))
    choices = [ladder.rung(len(ladder.layers)) for ladder in (by_rank, by_size)]
    lids = min([*choices, *_all_sets(profile, limits, few)], key=profile.host_bytes)
    why = "is all that GPU memory has room for" if lids != profile.lids else "since GPU memory holds everything"
    return Target(gpu_lids=lids, reason=f"host memory is to be saved: k={profile.k_of(lids):.2f} {why}")


def _all_sets(profile: Profile, limits: Limits, few: int) -> list[frozenset[int]]:
    """All sets of layers that the limits allow, if there are so few layers; else none."""
    lids = [layer.lid for layer in profile.layers]
    counts = range(len(lids) + 1) if len(lids) <= few else range(0)
    sets = (frozenset(some) for count in counts for some in combinations(lids, count))
    return [some for some in sets if limits.allow(profile, some)]


def _largest_first(layers: Iterable[LayerProfile]) -> list[LayerProfile]:
    return sorted(layers, key=lambda layer: -layer.gpu_state_bytes)


def _fastest(profile: Profile, limits: Limits, few: int = FEW) -> Target:
    ladder = build_ladder(profile, limits, profile.layers)
    steps = Steps(profile, ladder)
    j = search(steps)
    full = steps[len(ladder.layers)]
    memory_bound = len(ladder.layers) < len(profile.layers) and full.stall_s > SAME_SPEED * full.step_s
    if memory_bound:
        for other in _leaving_one_out(profile, limits, ladder):
            other_steps = Steps(profile, other)
            if other_steps[len(other.layers)].step_s < (1 - SAME_SPEED) * steps[j].step_s:
                steps, j = other_steps, search(other_steps)
    target = Target(gpu_lids=steps.ladder.rung(j), reason=_why(steps, j))
    if len(profile.layers) > few:
        return target
    return _best_set(profile, limits, target, steps[j].step_s)


def _best_set(profile: Profile, limits: Limits, target: Target, target_s: float) -> Target:
    """The best of all sets of few layers, which need not be a prefix, if it is clearly better than the target."""
    steps_s = {some: simulate(profile, some).step_s for some in _all_sets(profile, limits, FEW)}
    enough_s = (1 + SAME_SPEED) * min(steps_s.values())
    best = min((some for some in steps_s if steps_s[some] <= enough_s), key=profile.gpu_state_bytes)
    if target_s <= enough_s and not _saving(profile, target.gpu_lids, best):
        return target
    why = f"with the best of all sets of layers: steps of {_ms(steps_s[best])}, {_ms(target_s)} with the first layers"
    return Target(gpu_lids=best, reason=f"k={profile.k_of(best):.2f} {why}")


def _leaving_one_out(profile: Profile, limits: Limits, ladder: Ladder) -> list[Ladder]:
    """Ladders without one of the largest layers: it may take the room of several that would help more."""
    others = []
    for large in _largest_first(ladder.layers)[:LEAVE_OUT_TRIES]:
        try:
            others.append(build_ladder(profile, limits, [layer for layer in profile.layers if layer is not large]))
        except Infeasible:
            continue
    return others


def _why(steps: Steps, j: int) -> str:
    profile, ladder = steps.profile, steps.ladder
    k = f"k={profile.k_of(ladder.rung(j)):.2f}"
    chosen = steps[j]
    late = chosen.stall_s > SAME_SPEED * chosen.step_s
    if late and j == len(ladder.layers) < len(profile.layers):
        return f"the CPU's updates end {_ms(chosen.stall_s)} late at {k}, and GPU memory has no room for more layers"
    if late:
        return f"the CPU's updates end {_ms(chosen.stall_s)} late at {k}, but no other k is clearly faster"
    if j == 0:
        return f"the CPU keeps up with all layers, so the GPU owns none ({k})"
    if j == ladder.lowest:
        return f"the GPU owns no more than what host memory has no room for ({k})"
    below = steps[j - 1]
    if not below.stalls_s and profile.speculates and profile.clipped:
        return f"{profile.clipped:.0%} of the steps are clipped, and wait; {k} has the shortest steps on average"
    if not below.stalls_s:
        return f"the CPU's updates slow the GPU's kernel launches down; with {k} steps are shortest"
    before = f"the CPU's updates would end {_ms(below.stall_s)} late at k={profile.k_of(ladder.rung(j - 1)):.2f}"
    return f"{before}; at {k} {'next to nothing' if chosen.stalls_s else 'nothing'} waits for them"


def worth_moving(asked: Question, profile: Profile, target: Target) -> Target:
    """The target if it is clearly better for the objective than the current layers; else another target, or those."""
    current = asked.current
    if asked.objective != "speed" and target.gpu_lids == current:
        return target
    if asked.objective == "gpu-memory":
        saved = profile.gpu_state_bytes(current) - profile.gpu_state_bytes(target.gpu_lids)
        return target if saved > 0 else _stay(profile, current, target, "would save nothing")
    if asked.objective == "host-memory":
        saved = profile.host_bytes(current) - profile.host_bytes(target.gpu_lids)
        if saved > CLEAR_SAVING * profile.host_bytes(frozenset()):
            return target
        return _stay(profile, current, target, f"would save {gib(saved)} of host memory, too little for a move")
    return _if_it_pays(asked, profile, target)


def _stay(profile: Profile, current: frozenset[int], target: Target, why: str) -> Target:
    here, there = profile.k_of(current), profile.k_of(target.gpu_lids)
    return Target(gpu_lids=current, reason=f"k={here:.2f} stays: moving to k={there:.2f} {why}")


def _if_it_pays(asked: Question, profile: Profile, target: Target) -> Target:
    """The target if it is faster; else fewer layers than now if that saves memory; else the current layers."""
    current, horizon_steps = asked.current, asked.horizon_steps
    now_s = expected_s(asked, profile, current)
    if asked.tried and asked.now not in asked.tried:
        return _stay(profile, current, target, "has to wait until that has been measured")
    target = _measured(asked, profile, target)
    if target.gpu_lids == current:
        return _never_tried(asked, profile) or target
    gain_s, cost_s = _trade(asked, profile, target)
    gives_back = profile.gpu_state_bytes(target.gpu_lids) < profile.gpu_state_bytes(current)
    lasting_s = min(gain_s, _trade(asked, profile.with_cpu(1 + profile.cpu_slack), target)[0]) if gives_back else gain_s
    if lasting_s > asked.min_gain * now_s and lasting_s * horizon_steps > cost_s:
        return target
    now = asked.tried.get(asked.now)
    is_measured = not asked.tried or (now is not None and now.steps >= SETTLED_STEPS)
    if is_measured and _saving(profile, current, target.gpu_lids):
        # Assume a slow CPU: layers returned because it is fast for a moment would move back a few steps later.
        fewer = _fastest(profile.with_cpu(1 + profile.cpu_slack), asked.limits)
        fewer_gain_s, fewer_cost_s = _trade(asked, profile, fewer)
        saved = _saving(profile, current, fewer.gpu_lids)
        same_s = SAME_SPEED * now_s
        if saved and fewer_gain_s >= -same_s and fewer_cost_s <= same_s * horizon_steps:
            k = profile.k_of(fewer.gpu_lids)
            slower = f"even when it is {profile.cpu_slack:.0%} slower"
            reason = f"k={k:.2f} frees {gib(saved)} of GPU memory, and the CPU keeps up, {slower}"
            return replace(fewer, reason=reason)
    price = f"would make a step {_longer(-gain_s)}, and cost {_ms(cost_s)} once"
    if lasting_s < gain_s:
        price += f"; when the CPU is {profile.cpu_slack:.0%} slower, as it was at times, {_longer(-lasting_s)}"
    return _never_tried(asked, profile) or _stay(profile, current, target, price)


def _measured(asked: Question, profile: Profile, target: Target) -> Target:
    """The layers with which steps were the shortest not long ago, if they are longer now, and with the target."""
    now = asked.tried.get(asked.now)
    if now is None or now.step_s is None or now.steps < SETTLED_STEPS:
        return target
    of_target_s = inf if target.gpu_lids == asked.current else expected_s(asked, profile, target.gpu_lids)
    best_s, best = min(of_target_s, (1 - 2 * asked.min_gain) * now.step_s), target
    for split, known in asked.tried.items():
        if split[1:] != (profile.visit, profile.offload) or not asked.limits.allow(profile, known.gpu_lids):
            continue
        if known.steps >= SETTLED_STEPS and known.step_s is not None and known.step_s < best_s:
            reason = f"k={split[0]:.2f} had steps of {_ms(known.step_s)}, which take {_ms(now.step_s)} now"
            best_s, best = known.step_s, Target(gpu_lids=known.gpu_lids, reason=reason)
    return best


def _never_tried(asked: Question, profile: Profile) -> Target | None:
    """As many layers on the GPU as fit, once, where steps are long and nothing measured tells why.

    With these layers, the CPU's part of that would end. At best, steps are as long as what is measured of the layers.
    """
    now = asked.tried.get(asked.now)
    if now is None or now.steps < USUAL_STEPS or asked.now[1:] != (profile.visit, profile.offload):
        return None
    ladder = build_ladder(profile, asked.limits, profile.layers)
    lids = ladder.rung(len(ladder.layers))
    k, now_s, least_s = profile.k_of(lids), expected_s(asked, profile, asked.current), explained_s(profile, lids)
    is_tried = any(split[0] >= k for split in asked.tried)
    if is_tried or now_s - least_s <= (LITTLE + 4 * asked.min_gain) * now_s:
        return None
    reason = f"steps take {_ms(now_s)}, and the layers' times explain {_ms(least_s)} at k={k:.2f}, which is tried"
    return Target(gpu_lids=lids, reason=reason)


def explained_s(profile: Profile, gpu_lids: frozenset[int]) -> float:
    """A simulated step without the loop's own work, in which there may be more than that."""
    return simulate(profile, gpu_lids).step_s - profile.other_s


def expected_s(asked: Question, profile: Profile, gpu_lids: frozenset[int]) -> float:
    """The simulated step, in which what the layers' times do not explain takes as long as with what was tried."""
    rest_s = asked.rest_s(profile.split(gpu_lids))
    return explained_s(profile, gpu_lids) + (profile.other_s if rest_s is None else rest_s)


def _trade(asked: Question, profile: Profile, target: Target) -> tuple[float, float]:
    """What each step gains at the target, and what the move costs once, in seconds."""
    gain_s = expected_s(asked, profile, asked.current) - expected_s(asked, profile, target.gpu_lids)
    moving = asked.current ^ target.gpu_lids
    return gain_s, sum(layer.move_s for layer in profile.layers if layer.lid in moving)


def _saving(profile: Profile, current: frozenset[int], target: frozenset[int]) -> int:
    """Bytes of GPU memory that the target saves; 0 if they are not worth a move."""
    saved = profile.gpu_state_bytes(current) - profile.gpu_state_bytes(target)
    return saved if saved > CLEAR_SAVING * profile.gpu_state_bytes(profile.lids) else 0


def _longer(time_s: float) -> str:
    return f"{_ms(abs(time_s))} {'longer' if time_s > 0 else 'shorter'}"


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:.1f} ms" if time_s < 0.01 else f"{1e3 * time_s:.0f} ms"
