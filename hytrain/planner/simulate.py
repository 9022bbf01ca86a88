"""Simulates one step of training. The policies ask how long a step would take with these layers on the GPU.

    GPU   ┃ B3 ━━━━━━┳ B2 ━━━━━━┳ B1 ━━━ g1 ━┃ F1 ━━━━━━━━ F2 ━━━ ··stall·· F3 ━━━┃   the GPU owns layer 1
    D2H   ┃          └─ 3 ──┐   └─ 2 ──┐                   ▲                ▲         first in, first out
    CPU   ┃                 └── 3 ━━━━━┿ 2 ━━━━━━┓ 3 ━━━━━━┿━━━━━┓          │         in forward order
    H2D   ┃                                      └─── 2 ───┘     └─── 3 ────┘         first in, first out

Between backward and forward is the loop's other work. Further micro-batches of a step follow the forward. Each layer's
forward waits for its own update, so both links and the CPU are idle when a backward begins: all steps are the same,
and one step is the steady state. If the CPU's updates slow the GPU down, the step is simulated until the assumed and
the resulting slowdown agree.

The CPU checks its queue after each tile, so a layer that is earlier in forward order starts at the end of the current
tile. All tiles of a layer take the same time. A layer is copied in one piece.

Visits take the link in both directions, first in, first out, once a layer's gradients are complete. Gradients and
weights pass them in small pieces, and make each take longer by its part of the time that these copies take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil, inf

from hytrain.planner.contention import beside
from hytrain.planner.profile import LayerProfile, Profile

TILE_NUMEL = 16 << 20
ROUNDS = 4  # simulations of a step with drag: the remaining error is below drag ** ROUNDS

# (kind, lid, start_s, end_s), kinds: backward, gpu_update, d2h, cpu_update, h2d, visit, stall, forward.
# The step's backward begins at 0.
Event = tuple[str, int, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step in steady state: from the start of one backward to the start of the next.

    If the CPU is ahead of the verdict, it is an unclipped step, but `step_s` is the mean of all steps. `stalls_s` has
    the layers whose forward waited for weights. `events` are grouped by server, each in order of time; a preempted
    CPU update has several.
    """

    step_s: float
    stalls_s: Mapping[int, float]
    gpu_busy_s: float
    cpu_busy_s: float
    events: tuple[Event, ...]

    @property
    def stall_s(self) -> float:
        return sum(self.stalls_s.values())


def simulate(profile: Profile, gpu_lids: frozenset[int], *, tile_numel: int = TILE_NUMEL) -> Timeline:
    """The steady state if the GPU owns these layers. The CPU updates the others that do not visit the GPU.

    Raises ValueError for unknown layers.
    """
    profile.require(gpu_lids)
    timeline = _steady(profile, gpu_lids, tile_numel)
    if not (profile.speculates and profile.clipped):
        return timeline
    clipped_s = _steady(replace(profile, speculates=False), gpu_lids, tile_numel).step_s
    return replace(timeline, step_s=(1 - profile.clipped) * timeline.step_s + profile.clipped * clipped_s)


def _steady(profile: Profile, gpu_lids: frozenset[int], tile_numel: int) -> Timeline:
    """The steady state of clipped or of unclipped steps."""
    timeline = _play(profile, gpu_lids, tile_numel)
    work_s = undisturbed_s = profile.forward_s + profile.backward_s
    if profile.drag and undisturbed_s:
        for _ in range(ROUNDS):
            work_s = undisturbed_s + profile.drag * beside(work_s, timeline.cpu_busy_s, timeline.stall_s)
            factor = work_s / undisturbed_s
            layers = [
                replace(layer, forward_s=layer.forward_s * factor, backward_s=layer.backward_s * factor)
                for layer in profile.layers
            ]
            timeline = _play(replace(profile, layers=tuple(layers)), gpu_lids, tile_numel)
    return timeline


def _play(profile: Profile, gpu_lids: frozenset[int], tile_numel: int) -> Timeline:
    events: list[Event] = []
    landed, visits, over_s, now = _backward(profile, gpu_lids, events)
    if profile.awaits_verdict and not profile.speculates:
        landed = [(layer, max(end_s, over_s)) for layer, end_s in landed]
    updated = _cpu(landed, tile_numel, events)
    if profile.speculates:  # layers updated before the verdict are sent after it, in forward order
        updated = [(layer, max(end_s, over_s)) for layer, end_s in updated]
        updated.sort(key=lambda done: (done[1], done[0].position))
    cpu_busy_s = sum(layer.cpu_update_s for layer, _ in landed)
    ready_s = {
        layer.lid: end_s for layer, end_s in _link("h2d", ((layer, layer.h2d_s, at) for layer, at in updated), events)
    }
    ready_s |= {layer.lid: end_s for layer, end_s in _visits(visits, [layer for layer, _ in landed], events)}
    stalls_s = {}
    gpu_busy_s = now
    now += profile.other_s
    for layer in profile.layers:
        due_s, now = now, max(now, ready_s.get(layer.lid, 0.0))
        if now > due_s:
            stalls_s[layer.lid] = now - due_s
            events.append(("stall", layer.lid, due_s, now))
        events.append(("forward", layer.lid, now, now + layer.forward_s))
        now += layer.forward_s
        gpu_busy_s += layer.forward_s
    return Timeline(
        step_s=now + profile.middle_s,
        stalls_s=stalls_s,
        gpu_busy_s=gpu_busy_s + profile.middle_s,
        cpu_busy_s=cpu_busy_s,
        events=tuple(events),
    )


def _backward(
    profile: Profile, gpu_lids: frozenset[int], events: list[Event]
) -> tuple[list[tuple[LayerProfile, float]], list[tuple[LayerProfile, float]], float, float]:
    """When each gradient has arrived, when each visit can begin, when backward is over, and when the GPU is done.

    If updates await a verdict, the GPU's start when backward is over, in no particular order, and visits in forward
    order.
    """
    now = 0.0
    visiting = profile.visiting(gpu_lids)
    visits: list[tuple[LayerProfile, float]] = []
    leaving: list[tuple[LayerProfile, float, float]] = []
    held: list[LayerProfile] = []

    def update(layer: LayerProfile) -> None:
        nonlocal now
        events.append(("gpu_update", layer.lid, now, now + layer.gpu_update_s))
        now += layer.gpu_update_s

    for layer in reversed(profile.layers):
        events.append(("backward", layer.lid, now, now + layer.backward_s))
        now += layer.backward_s
        if layer.lid in visiting:
            visits.append((layer, now))
        elif layer.lid not in gpu_lids:
            leaving.append((layer, layer.d2h_s, now))
        elif profile.awaits_verdict:
            held.append(layer)
        else:
            update(layer)
    over_s = now
    for layer in held:
        update(layer)
    if profile.awaits_verdict:
        visits = [(layer, over_s) for layer, _ in reversed(visits)]
    return _link("d2h", leaving, events), visits, over_s, now


def _visits(
    visits: list[tuple[LayerProfile, float]], others: list[LayerProfile], events: list[Event]
) -> list[tuple[LayerProfile, float]]:
    """When each layer is updated by a visit that can begin at its time, while the others' copies pass."""
    visits_s = sum(layer.move_s for layer, _ in visits)
    passing_s = max(sum(layer.d2h_s for layer in others), sum(layer.h2d_s for layer in others))
    longer = 1 + passing_s / visits_s if visits_s else 1.0
    return _link("visit", ((layer, longer * layer.move_s, at) for layer, at in visits), events)


def _link(
    kind: str, copies: Iterable[tuple[LayerProfile, float, float]], events: list[Event]
) -> list[tuple[LayerProfile, float]]:
    """One direction of the link copies (layer, copy_s, enqueued_s) in the order of enqueueing; returns each end."""
    free_s = 0.0
    ends = []
    for layer, copy_s, enqueued_s in copies:
        start_s = max(free_s, enqueued_s)
        free_s = start_s + copy_s
        events.append((kind, layer.lid, start_s, free_s))
        ends.append((layer, free_s))
    return ends


def _cpu(
    landed: list[tuple[LayerProfile, float]], tile_numel: int, events: list[Event]
) -> list[tuple[LayerProfile, float]]:
    """The optimizer's queue: the layers and their ends, in the order of their ends.

    Between two arrivals only whole tiles run, so they are simulated together.
    """
    queue: list[tuple[int, int]] = []  # (position, index into landed)
    tiles = [max(1, ceil(layer.numel / tile_numel)) for layer, _ in landed]
    tile_s = [layer.cpu_update_s / count for (layer, _), count in zip(landed, tiles, strict=True)]
    done: list[tuple[LayerProfile, float]] = []
    now, arrived = 0.0, 0
    while len(done) < len(landed):
        if not queue:
            now = max(now, landed[arrived][1])
        while arrived < len(landed) and landed[arrived][1] <= now:
            heappush(queue, (landed[arrived][0].position, arrived))
            arrived += 1
        index = queue[0][1]
        layer = landed[index][0]
        run = tiles[index]
        next_s = landed[arrived][1] if arrived < len(landed) else inf
        if next_s < now + run * tile_s[index]:
            run = min(run, ceil((next_s - now) / tile_s[index]))
        events.append(("cpu_update", layer.lid, now, now + run * tile_s[index]))
        now += run * tile_s[index]
        tiles[index] -= run
        if not tiles[index]:
            heappop(queue)
            done.append((layer, now))
    return done
