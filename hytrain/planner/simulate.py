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

Visits take the link in both directions, first in, first out, once a layer's gradients are complete, or after backward
(protocol/visiting.py). Gradients and weights pass them in small pieces, and make each take longer; so does the CPU,
whose updates take longer, too (contention.py). Offloaded weights that a visit updates stay on the GPU until then, and
those that are put off until forward.

Offloaded weights come through a window of so many layers: in backward, those that forward has not left there; in
forward, those that were updated in host memory, and those that do not stay in the window from backward on. Each is
fetched after the one before it, once there is room. In backward, a block's activations come with its weights, if they
rest in host memory, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from math import ceil, inf
from statistics import fmean

from hytrain.planner.contention import Crowding, beside
from hytrain.planner.profile import LayerProfile, Profile
from protocol.placement import Places
from protocol.rules import TILE_NUMEL
from protocol.visiting import Turn, most_put_off_bytes, put_off, wider_by_bytes

ROUNDS = 4  # simulations of a step with drag: the remaining error is below drag ** ROUNDS

# (kind, lid, start_s, end_s), kinds: backward, gpu_update, d2h, cpu_update, h2d, visit, fetch, stall, forward.
# The step's backward begins at 0.
Event = tuple[str, int, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step in steady state: from the start of one backward to the start of the next.

    It is an unclipped step if the CPU is ahead of the verdict, and one in which the CPU has its usual pace; `step_s`
    is the mean of all steps. `stalls_s` has the layers whose forward waited for updates. `fetch_s` is the wait for
    copies of offloaded weights, and backward's for visits, if waiting gradients take all the memory that they may.
    `events` are grouped by server, each in order of time; a preempted CPU update has several.
    """

    step_s: float
    stalls_s: Mapping[int, float]
    fetch_s: float
    cpu_busy_s: float
    events: tuple[Event, ...]

    @property
    def stall_s(self) -> float:
        return sum(self.stalls_s.values())


def simulate(profile: Profile, gpu_lids: frozenset[int], *, tile_numel: int = TILE_NUMEL) -> Timeline:
    """The steady state if the GPU owns these layers. The CPU updates the others that do not visit the GPU."""
    places = profile.places(gpu_lids)
    crowding = profile.crowding(places)
    steady = partial(_steady, places=places, tile_numel=tile_numel)
    waiting = replace(profile, speculates=False) if profile.speculates and profile.clipped else None

    def mean_s(unclipped: Timeline, paced: Crowding) -> float:
        """Of clipped and unclipped steps."""
        if waiting is None:
            return unclipped.step_s
        clipped = steady(waiting, paced)
        return (1 - profile.clipped) * unclipped.step_s + profile.clipped * clipped.step_s

    timeline = steady(profile, crowding)
    usual_s = mean_s(timeline, crowding)
    steps_s = list[float]()
    for pace in sorted(profile.cpu_paces, reverse=True):
        paced = replace(crowding, cpu=crowding.cpu * pace)
        steps_s.append(mean_s(steady(profile, paced), paced))
        if steps_s == [usual_s]:
            break  # nothing waits for the CPU, even when it is at its slowest
    return replace(timeline, step_s=fmean(steps_s or [usual_s]))


def _steady(
    profile: Profile,
    crowding: Crowding,
    *,
    places: Places,
    tile_numel: int,
) -> Timeline:
    """The steady state of clipped or of unclipped steps."""
    play = partial(_play, profile, places, crowding, tile_numel)
    undisturbed_s = profile.forward_s + profile.backward_s
    if not undisturbed_s:
        return play(1.0)
    work_s = beside_visits_s = undisturbed_s + crowding.work_lost_s
    timeline = play(work_s / undisturbed_s)
    for _ in range(ROUNDS if profile.drag else 0):
        work_s = beside_visits_s + profile.drag * beside(work_s, timeline.cpu_busy_s, timeline.stall_s)
        timeline = play(work_s / undisturbed_s)
    return timeline


def _play(
    profile: Profile,
    places: Places,
    crowding: Crowding,
    tile_numel: int,
    longer: float,
) -> Timeline:
    """Forward and backward take `longer` than alone, by this factor."""
    events: list[Event] = []
    widens = not profile.waits and not places.visiting.isdisjoint(places.offloaded)
    window = _Window(profile, events, visits=widens)
    held_bytes = None if profile.hold_bytes is None else profile.hold_bytes - window.for_visits_bytes
    visits = _Visits(crowding.visits, held_bytes)
    landed, over_s, now = _backward(profile, places, longer, window, visits, events)
    if profile.waits and not profile.speculates:
        landed = [(layer, max(end_s, over_s)) for layer, end_s in landed]
    updated = _cpu(landed, tile_numel, crowding.cpu, events)
    if profile.speculates:  # layers updated before the verdict are sent after it, in forward order
        updated = [(layer, max(end_s, over_s)) for layer, end_s in updated]
        updated.sort(key=lambda done: (done[1], done[0].position))
    cpu_busy_s = crowding.cpu * sum(layer.cpu_update_s for layer, _ in landed)
    landing = [(layer, layer.h2d_s, at) for layer, at in updated if layer.lid not in places.offloaded]
    ready_s = {layer.lid: end_s for layer, end_s in _link("h2d", landing, events)}
    ready_s |= visits.ends_s
    events += visits.events
    ready_s |= {layer.lid: at for layer, at in updated if layer.lid in places.offloaded}
    stalls_s = {}
    now += profile.other_s
    window.turn()
    for layer in profile.layers:
        due_s, now = now, max(now, ready_s.get(layer.lid, 0.0))
        if now > due_s:
            stalls_s[layer.lid] = now - due_s
            events.append(("stall", layer.lid, due_s, now))
        if layer.lid in places.offloaded:
            is_put_off = layer.block in visits.staying
            stays = is_put_off or (layer.lid in places.visiting and window.has_room)
            now = window.enter(layer, now, updated_s=ready_s.get(layer.lid, 0.0), is_there=stays)
        forward_s = longer * layer.forward_s
        events.append(("forward", layer.lid, now, now + forward_s))
        now += forward_s
        if layer.lid in places.offloaded and layer.block not in visits.staying:
            window.leave(now)
    return Timeline(
        step_s=now + profile.middle_s,
        stalls_s=stalls_s,
        fetch_s=window.waited_s + visits.waited_s,
        cpu_busy_s=cpu_busy_s,
        events=tuple(events),
    )


class _Window:
    """The GPU memory through which offloaded weights come, and the link that brings them, in forward or in backward."""

    def __init__(self, profile: Profile, events: list[Event], *, visits: bool) -> None:
        self.block_bytes = profile.block_bytes
        block_bytes = max(self.block_bytes.values(), default=0)
        hold_bytes = profile.weights_bytes if profile.hold_bytes is None else profile.hold_bytes
        self.for_visits_bytes = wider_by_bytes(hold_bytes, block_bytes) if visits else 0
        largest = max(layer.weights_bytes for layer in profile.layers)
        self._slots = max(1, (profile.window_bytes + self.for_visits_bytes) // largest) if largest else 1
        self._events, self._left_s, self._free_s = events, list[float](), 0.0
        self.leave = self._left_s.append  # at a time, to make room for another layer
        weights_bytes = profile.weights_bytes
        self._activations_s = profile.activations_s / weights_bytes if weights_bytes else 0.0  # per byte of weights
        self.waited_s = 0.0

    @property
    def has_room(self) -> bool:
        """Whether nothing has to leave for the next layer."""
        return len(self._left_s) < self._slots

    def turn(self) -> None:
        """Forward follows backward. The last layers of that are still there."""
        self._left_s.clear()
        self._activations_s = 0.0

    def enter(self, layer: LayerProfile, now: float, *, updated_s: float = 0.0, is_there: bool) -> float:
        """When the layer, which is reached now, has its weights."""
        if is_there:
            return now
        room_s = 0.0 if self.has_room else self._left_s[-self._slots]
        begins_s = max(self._free_s, updated_s, room_s)
        self._free_s = begins_s + layer.h2d_s + self._activations_s * layer.weights_bytes
        self._events.append(("fetch", layer.lid, begins_s, self._free_s))
        self.waited_s += max(0.0, self._free_s - now)
        return max(now, self._free_s)


def _backward(
    profile: Profile,
    places: Places,
    longer: float,
    window: _Window,
    visits: _Visits,
    events: list[Event],
) -> tuple[list[tuple[LayerProfile, float]], float, float]:
    """When each gradient has arrived, when backward is over, and when the GPU is done.

    If updates wait for that, the GPU's start when backward is over, in no particular order. Visits start then in
    forward order, if they do or if they are put off.
    """
    now = 0.0
    leaving: list[tuple[LayerProfile, float, float]] = []
    held: list[LayerProfile] = []
    later = frozenset[int]()  # visits that are put off until backward is over
    if places.visiting and not profile.waits:
        later = put_off(
            [
                Turn(
                    layer.lid,
                    longer * layer.forward_s,
                    longer * layer.backward_s + (layer.gpu_update_s if layer.lid in places.gpu else 0.0),
                    visits.longer * layer.visit_s if layer.lid in places.visiting else 0.0,
                )
                for layer in profile.layers
            ]
        )

    def update(layer: LayerProfile) -> None:
        nonlocal now
        events.append(("gpu_update", layer.lid, now, now + layer.gpu_update_s))
        now += layer.gpu_update_s

    for layer in reversed(profile.layers):
        if layer.lid in places.offloaded:
            now = window.enter(layer, now, is_there=window.has_room)
        backward_s = longer * layer.backward_s
        events.append(("backward", layer.lid, now, now + backward_s))
        now += backward_s
        left_s = now
        if layer.lid in places.visiting:
            weights_bytes = window.block_bytes[layer.block] if layer.lid in places.offloaded else 0
            if profile.waits or (layer.lid in later and visits.puts_off(layer, weights_bytes)):
                held.append(layer)
            else:
                left_s = visits.add(layer, now)
                now = visits.make_room(now)
        elif layer.lid in places.cpu:
            leaving.append((layer, layer.d2h_s, now))
        elif profile.waits:
            held.append(layer)
        else:
            update(layer)
        if layer.lid in places.offloaded:
            window.leave(left_s)
    over_s = now
    for layer in reversed(held):
        if layer.lid in places.visiting:
            visits.add(layer, over_s)
        else:
            update(layer)
    return _link("d2h", leaving, events), over_s, now


class _Visits:
    """State that visits the GPU, first in, first out. Each visit takes `longer` than alone, by this factor.

    What waits for it takes at most `hold_bytes` of memory; beyond that, backward waits.
    """

    def __init__(self, longer: float, hold_bytes: int | None) -> None:
        self.longer, self._free_s = longer, 0.0
        self._hold_bytes, self._waiting, self._waiting_bytes = hold_bytes, deque[tuple[float, int]](), 0
        self.staying, self._put_off_bytes = set[int](), 0  # blocks whose weights stay until forward
        self.waited_s = 0.0
        self.ends_s: dict[int, float] = {}
        self.events: list[Event] = []

    def add(self, layer: LayerProfile, now: float) -> float:
        """When the layer is updated, whose gradients are there now."""
        begins_s = max(self._free_s, now)
        self._free_s = self.ends_s[layer.lid] = begins_s + self.longer * layer.visit_s
        self.events.append(("visit", layer.lid, begins_s, self._free_s))
        self._waiting.append((self._free_s, layer.waiting_bytes))
        self._waiting_bytes += layer.waiting_bytes
        return self._free_s

    def puts_off(self, layer: LayerProfile, weights_bytes: int) -> bool:
        """Whether the layer's gradients may wait until backward is over, and so may its block if that is offloaded."""
        stays_bytes = 0 if layer.block in self.staying else weights_bytes
        nbytes = self._put_off_bytes + layer.waiting_bytes + stays_bytes
        if self._hold_bytes is not None and nbytes > most_put_off_bytes(self._hold_bytes):
            return False
        self._put_off_bytes = nbytes
        if weights_bytes:
            self.staying.add(layer.block)
        return True

    def make_room(self, now: float) -> float:
        """When backward goes on, with all but the last layer's gradients in the memory that they may take."""
        began_s = now
        while len(self._waiting) > 1:
            waiting_bytes = self._waiting_bytes + self._put_off_bytes
            is_full = self._hold_bytes is not None and waiting_bytes > self._hold_bytes
            ends_s, nbytes = self._waiting[0]
            if ends_s > now and not is_full:
                break
            now = max(now, ends_s)
            self._waiting.popleft()
            self._waiting_bytes -= nbytes
        self.waited_s += now - began_s
        return now


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
    landed: list[tuple[LayerProfile, float]], tile_numel: int, longer: float, events: list[Event]
) -> list[tuple[LayerProfile, float]]:
    """The optimizer's queue: the layers and their ends, in the order of their ends. Updates take `longer` than alone.

    Between two arrivals only whole tiles run, so they are simulated together.
    """
    queue: list[tuple[int, int]] = []  # (position, index into landed)
    tiles = [max(1, ceil(layer.numel / tile_numel)) for layer, _ in landed]
    tile_s = [longer * layer.cpu_update_s / count for (layer, _), count in zip(landed, tiles, strict=True)]
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
