"""Which layers the GPU should own from the next step on.

Owns the choice; the coordinator calls `decide` at a step boundary and carries the decision out as a plan.

    limits ──▶ Ladder (ladder.py): what fits, in nested choices, its rungs
                 │
                 ├─ fixed, cotrain, balance: the first rung that holds their k
                 ├─ deadline: search the rungs with simulate()     ──▶ target ──▶ worth the move? ──▶ Decision
                 └─ random: a rung of a shuffled ladder                             └─ no: current stays
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hytrain.planner.formulas import balance_k, cotrain_k, prefix_for
from hytrain.planner.ladder import SAME_SPEED, Infeasible, Ladder, Steps, build_ladder, gb, search
from hytrain.planner.profile import Limits, Profile
from hytrain.planner.simulate import simulate

POLICIES = ("fixed", "cotrain", "balance", "deadline", "random")

CLEAR_CHANGE = 0.05  # of the parameters: what a formula's k must change by before layers follow
CLEAR_SAVING = 0.05  # of all optimizer state: what a move must save if it brings no speed
CPU_SLACK = 0.1  # how much slower the CPU may become without making such a move regretted
LEAVE_OUT_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    gpu_lids: frozenset[int]
    k: float  # what `gpu_lids` amounts to, whole layers
    reason: str  # one sentence for people
    predicted_step_s: float
    changed: bool  # against `current`


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    gpu_lids: frozenset[int]
    reason: str


def decide(
    policy: str,
    profile: Profile,
    limits: Limits,
    *,
    fixed_k: float | None,
    current: frozenset[int],
    horizon_steps: int,
    min_gain: float,
    seed: int = 0,
) -> Decision:
    """The layers that the GPU should own, given those it owns now.

    `fixed_k` is for policy "fixed"; `seed` is for "random", which owns other layers after every call.
    "deadline" moves for speed if the predicted gain is more than the fraction `min_gain` of a step and repays
    the moves within `horizon_steps`, and for memory if that is a clear saving and costs no speed. "cotrain"
    and "balance" follow their formulas, but for changes smaller than `CLEAR_CHANGE`. Limits go first.

    Raises Infeasible if nothing fits, ValueError for an unknown policy, a k outside [0, 1], unknown layers.
    """
    profile.require(current)
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
        target = _by_deadline(profile, limits)
    elif policy == "random":
        target = _by_chance(seed, profile, limits, ladder, current)
    else:
        raise ValueError(f"unknown policy {policy!r}, choose one of {', '.join(POLICIES)}")

    if target.gpu_lids != current and limits.allow(profile, current):
        if policy in ("cotrain", "balance"):
            target = _unless_close(profile, current, target)
        elif policy == "deadline":
            target = _if_it_pays(profile, limits, current, target, horizon_steps, min_gain)
    return Decision(
        gpu_lids=target.gpu_lids,
        k=profile.k_of(target.gpu_lids),
        reason=target.reason,
        predicted_step_s=simulate(profile, target.gpu_lids).step_s,
        changed=target.gpu_lids != current,
    )


# --- what each policy wants ---


def _by_formula(name: str, k: float, profile: Profile, ladder: Ladder) -> _Target:
    lids = ladder.rung(ladder.rung_for(k, profile))
    got, wanted = profile.k_of(lids), profile.k_of(prefix_for(k, profile))
    if got < wanted:
        cut = f", and GPU memory has room for k={got:.2f}"
    elif got > wanted and len(lids) == ladder.lowest:
        cut = f", and host memory needs k={got:.2f}"
    else:
        cut = f", in whole layers {got:.2f}"
    return _Target(gpu_lids=lids, reason=f"{name} is {k:.2f}{cut}")


def _by_deadline(profile: Profile, limits: Limits) -> _Target:
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
    return _Target(gpu_lids=steps.ladder.rung(j), reason=_why(steps, j))


def _leaving_one_out(profile: Profile, limits: Limits, ladder: Ladder) -> list[Ladder]:
    """With little GPU memory, one large layer can take the room of several that would do more good."""
    others = []
    for large in sorted(ladder.layers, key=lambda layer: -layer.gpu_state_bytes)[:LEAVE_OUT_TRIES]:
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
        return f"CPU finishes {_ms(chosen.stall_s)} late at {k}, and GPU memory has no room for more"
    if late:
        return f"CPU finishes {_ms(chosen.stall_s)} late at {k}, but no other k is clearly faster"
    if j == 0:
        return f"CPU is in time at {k}"
    if j == ladder.lowest:
        return f"{k} is the least that host memory allows"
    below = steps[j - 1]
    before = f"CPU finishes {_ms(below.stall_s)} late at k={profile.k_of(ladder.rung(j - 1)):.2f}"
    return f"{before}; {k} is the least {'with next to no' if chosen.stalls_s else 'without'} stalls"


def _by_chance(seed: int, profile: Profile, limits: Limits, ladder: Ladder, current: frozenset[int]) -> _Target:
    """Layers in an order drawn from the seed, as many as drawn; drawn again if that changes nothing."""
    for draw in range(16):
        drawn = [_mixed(seed, draw, layer.lid) for layer in profile.layers]
        order = [layer for _, layer in sorted(zip(drawn, profile.layers, strict=True), key=lambda pair: pair[0])]
        try:
            shuffled = build_ladder(profile, limits, order)
        except Infeasible:
            shuffled = ladder
        span = len(shuffled.layers) + 1 - shuffled.lowest
        lids = shuffled.rung(shuffled.lowest + _mixed(seed, draw, -1) % span)
        if lids != current:
            break
    return _Target(gpu_lids=lids, reason=f"drawn at random from seed {seed}")


def _mixed(*words: int) -> int:
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


def _unless_close(profile: Profile, current: frozenset[int], target: _Target) -> _Target:
    """A formula's k wobbles with the measurements; layers don't have to."""
    now, wanted = profile.k_of(current), profile.k_of(target.gpu_lids)
    if abs(wanted - now) >= CLEAR_CHANGE:
        return target
    return _Target(gpu_lids=current, reason=f"k={now:.2f} stays: {target.reason}, too close for a move")


def _if_it_pays(
    profile: Profile,
    limits: Limits,
    current: frozenset[int],
    target: _Target,
    horizon_steps: int,
    min_gain: float,
) -> _Target:
    """The target if it is faster; else fewer layers than now if that saves memory; else what is."""
    now_s = simulate(profile, current).step_s
    gain_s, cost_s = _trade(profile, current, target)
    if gain_s > min_gain * now_s and gain_s * horizon_steps > cost_s:
        return target
    if _saving(profile, current, target):
        # Layers given back because the CPU happens to look fast would be taken again a few steps later.
        fewer = _by_deadline(_with_slower_cpu(profile), limits)
        fewer_gain_s, fewer_cost_s = _trade(profile, current, fewer)
        bearable_s = SAME_SPEED * now_s
        saved = _saving(profile, current, fewer)
        if saved and fewer_gain_s >= -bearable_s and fewer_cost_s <= bearable_s * horizon_steps:
            k = profile.k_of(fewer.gpu_lids)
            reason = f"k={k:.2f} saves {gb(saved)} on the GPU and would do with a CPU {CPU_SLACK:.0%} slower"
            return replace(fewer, reason=reason)
    here, there = profile.k_of(current), profile.k_of(target.gpu_lids)
    price = f"changes a step by {-1e3 * gain_s:+.1f} ms and costs {_ms(cost_s)} once"
    return _Target(gpu_lids=current, reason=f"k={here:.2f} stays: moving to k={there:.2f} {price}")


def _trade(profile: Profile, current: frozenset[int], target: _Target) -> tuple[float, float]:
    """What every step gains by going to the target, and what going there costs once, in seconds."""
    gain_s = simulate(profile, current).step_s - simulate(profile, target.gpu_lids).step_s
    moving = current ^ target.gpu_lids
    return gain_s, sum(layer.move_s for layer in profile.layers if layer.lid in moving)


def _saving(profile: Profile, current: frozenset[int], target: _Target) -> int:
    """Bytes of GPU memory that the target saves, 0 if they are not worth a move."""
    saved = profile.gpu_state_bytes(current) - profile.gpu_state_bytes(target.gpu_lids)
    return saved if saved > CLEAR_SAVING * profile.gpu_state_bytes(profile.lids) else 0


def _with_slower_cpu(profile: Profile) -> Profile:
    slower = 1 + CPU_SLACK
    return Profile(layers=tuple(replace(layer, cpu_update_s=layer.cpu_update_s * slower) for layer in profile.layers))


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:.1f} ms" if time_s < 0.01 else f"{1e3 * time_s:.0f} ms"
