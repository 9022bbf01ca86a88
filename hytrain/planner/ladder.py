"""The search space of the policies, and the search for the smallest fast set of layers.

A ladder has the layers that fit on the GPU together, in forward order. Rung j is its first j layers. Without a memory
limit, the rungs are the prefixes of the forward order.

    step time   stalls ╲                ╱ the GPU's own work grows
                         ╲           ╱
                           ╲_____╱
                ──┬────────┬────┬────────┬──▶ rung
              lowest:    the    no       highest: GPU memory is full,
              host       choice stalls   or no layer is left
              fits

A step is fastest near the rung where the stalls end. Bisection finds that rung, then the lowest rung within 1 % of it,
with a dozen simulated steps instead of one per layer. If the CPU's updates cost the GPU more time than its own updates
take, the curve keeps falling, and the highest rung is the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from hytrain.errors import HyTrainError
from hytrain.planner.profile import SAME_SPEED, LayerProfile, Limits, Profile
from hytrain.planner.simulate import Timeline, simulate
from hytrain.readable import gib


class Infeasible(HyTrainError, ValueError):
    """No choice of layers respects both memory limits."""


def balance_k(profile: Profile) -> float:
    """(t_U - t_B) / ((1 + alpha) t_U): CPU and GPU finish their updates at the same time, if copies take none.

    Source: HyTrainDNN. alpha is the measured GPU update time over the CPU's.
    """
    t_u = profile.cpu_update_s
    return min(1.0, max(0.0, (t_u - profile.backward_s) / ((1 + profile.alpha) * t_u))) if t_u else 0.0


def prefix_for(k: float, profile: Profile) -> frozenset[int]:
    """The first layers in forward order with at least the fraction k of the parameters."""
    numel = profile.numel
    wanted = k * numel
    lids = set()
    for layer in profile.layers:
        if wanted <= 1e-9 * numel:  # k = 0.3 of ten layers is three, despite binary rounding
            break
        lids.add(layer.lid)
        wanted -= layer.numel
    return frozenset(lids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    layers: tuple[LayerProfile, ...]  # which fit on the GPU together
    lowest: int  # below this rung, host memory is too small for the other layers

    def rung(self, j: int) -> frozenset[int]:
        return frozenset(layer.lid for layer in self.layers[:j])

    def rung_for(self, k: float, profile: Profile) -> int:
        """The lowest rung that holds as many parameters as the prefix for k, or the highest there is."""
        prefix = prefix_for(k, profile)
        wanted = sum(layer.numel for layer in profile.layers if layer.lid in prefix)
        j = 0
        while j < len(self.layers) and wanted > 0:
            wanted -= self.layers[j].numel
            j += 1
        return max(j, self.lowest)


def build_ladder(profile: Profile, limits: Limits, order: Sequence[LayerProfile]) -> Ladder:
    """Take layers in this order, skipping those that no longer fit on the GPU.

    Raises Infeasible if the other layers do not fit in host memory.
    """
    taken: list[LayerProfile] = []
    gpu_bytes = weights_bytes = 0
    least_bytes = profile.weights_on_gpu_bytes(0)
    of_block: dict[int, int] = {}  # those that are not on the GPU yet
    for layer in profile.layers:
        of_block[layer.block] = of_block.get(layer.block, 0) + layer.weights_bytes
    for layer in order:
        there = weights_bytes + of_block.get(layer.block, 0)
        needed = gpu_bytes + layer.gpu_state_bytes + max(least_bytes, there + profile.in_window_bytes)
        if limits.gpu_state_bytes is None or needed <= limits.gpu_state_bytes:
            taken.append(layer)
            gpu_bytes += layer.gpu_state_bytes
            weights_bytes = there
            of_block.pop(layer.block, None)

    def on_host_bytes(j: int) -> int:
        return profile.host_bytes(frozenset(layer.lid for layer in taken[:j]))

    bound, lowest = inf if limits.host_bytes is None else limits.host_bytes, 0
    most_bytes = sum(layer.host_bytes for layer in profile.layers)  # if none visits
    while lowest < len(taken) and most_bytes > bound:
        most_bytes -= taken[lowest].host_bytes
        lowest += 1
    if on_host_bytes(lowest) <= bound:  # then all above do; which layers visit depends on the rung, so go one by one
        while lowest and on_host_bytes(lowest - 1) <= bound:
            lowest -= 1
    else:
        raise Infeasible(
            f"the layers need {gib(on_host_bytes(0))} of host memory, where {_allowed(limits.host_bytes)} is allowed; "
            f"owning those that fit the {_allowed(limits.gpu_state_bytes)} allowed for state on the GPU "
            f"({gib(gpu_bytes)}) still leaves {gib(on_host_bytes(lowest))} on the host"
        )
    return Ladder(layers=tuple(taken), lowest=lowest)


class Steps:
    """The simulated step of each rung, each simulated once."""

    def __init__(self, profile: Profile, ladder: Ladder) -> None:
        self.profile = profile
        self.ladder = ladder
        self._known: dict[int, Timeline] = {}

    def __getitem__(self, j: int) -> Timeline:
        if j not in self._known:
            self._known[j] = simulate(self.profile, self.ladder.rung(j))
        return self._known[j]

    def fastest(self, *rungs: int) -> int:
        """The fastest of these rungs and all rungs simulated before."""
        return min({*self._known, *rungs}, key=lambda j: (self[j].step_s, j))


def search(steps: Steps) -> int:
    """The lowest rung within 1 % of the fastest.

    Bisection begins at the rung of policy "balance". It assumes that stalls shrink from rung to rung. A busy link can
    violate that slightly, so that rung is tried in any case: the default must not be slower than it.
    """
    ladder, profile = steps.ladder, steps.profile
    lowest, highest = ladder.lowest, len(ladder.layers)
    guess = ladder.rung_for(balance_k(profile), profile)
    no_stalls = _no_stalls(steps, guess)
    rungs = [guess, no_stalls, highest]
    # Clipped steps, and those in which the CPU is slow, stall up to a higher rung.
    slower = [replace(profile, speculates=False)] if profile.speculates and profile.clipped else []
    slower += [profile.with_cpu(max(profile.cpu_paces))] if profile.cpu_paces else []
    if slower:
        waiting = max(_no_stalls(Steps(other, ladder), no_stalls) for other in slower)
        rungs += [waiting, max(waiting - 1, lowest)]
    fastest = steps.fastest(*rungs)
    enough_s = steps[fastest].step_s * (1 + SAME_SPEED)
    return _first(lambda j: steps[j].step_s <= enough_s, lowest, fastest, (lowest + fastest) // 2)


def _no_stalls(steps: Steps, guess: int) -> int:
    lowest, highest = steps.ladder.lowest, len(steps.ladder.layers)
    return _first(lambda j: steps[j].stall_s <= 1e-9 * steps[j].step_s, lowest, highest, guess)


def _first(holds: Callable[[int], bool], low: int, high: int, probe: int) -> int:
    """The first number in [low, high] for which `holds`, else `high`: bisection that starts at `probe`."""
    while low < high:
        probe = min(max(probe, low), high - 1)
        if holds(probe):
            high = probe
        else:
            low = probe + 1
        probe = (low + high) // 2
    return low


def _allowed(size_bytes: int | None) -> str:
    return "any amount" if size_bytes is None else gib(size_bytes)
