"""Moves layers from one placement to another, with all their state, while training continues.

    plan agreed  thread: make, map and pin new arenas; allocate on the device; pin the state planes of layers to leave
    boundary     to the host  copy state to the arena, and weights for the CPU, then TakeOver    placed from now on
                 to the GPU   copy the state from the arena, after the last update
    backward     to the GPU   placed on the GPU from now on; after the copy, GiveUp  before the step's first gradient
    later        thread: close old arenas, unpin state planes that do not visit

Every bit of a layer's state moves, so handovers do not change the result of training. The copies have their own stream.
For a large layer, pinning takes tenths of a second and allocation on the device milliseconds; training waits for
neither. A layer whose state stays on the host, while its updater changes, keeps its arena: the CPU gets it at the
boundary, with the weights, and the GPU in backward, after the CPU's last update.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from hytrain.errors import CapacityError, ClusterError, HyTrainError
from hytrain.memory.arrivals import Arrivals
from hytrain.memory.capacity import HostRoom
from hytrain.memory.planes import ArenaPlanes, DevicePlanes, Moving, state_copies
from hytrain.memory.transfer import Copy, Transfer
from hytrain.model.trained import TrainedLayer
from hytrain.run.link import CLOSE_TIMEOUT_S, THREAD_PREFIX
from hytrain.step.arenas import Arenas
from hytrain.step.common import Common
from hytrain.step.gradient import RoundTrip
from protocol.messages import GiveUp, Plan, TakeOver
from protocol.placement import VISIT, Placement

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Move:
    """The handovers of one plan: `leaving` layers move to host memory, `coming` layers to the GPU.

    The state of `taken` layers stays on the host and is the CPU's now; that of `visiting` ones will visit the GPU.
    `arenas` and `devices` are allocated but not in use yet. `copies` write into arenas. `closing` are the arenas that
    layers have left, `unpinned` those whose state rests on the host from now on.
    """

    plan: Plan
    leaving: list[TrainedLayer] = field(default_factory=list)
    coming: list[TrainedLayer] = field(default_factory=list)
    taken: list[TrainedLayer] = field(default_factory=list)
    visiting: list[TrainedLayer] = field(default_factory=list)
    arenas: dict[int, ArenaPlanes] = field(default_factory=dict)
    devices: dict[int, DevicePlanes] = field(default_factory=dict)
    copies: list[tuple[ArenaPlanes, Transfer]] = field(default_factory=list)
    closing: list[tuple[ArenaPlanes, list[Transfer]]] = field(default_factory=list)
    unpinned: list[ArenaPlanes] = field(default_factory=list)
    prepared: bool = False
    begun: bool = False

    def list_of(self, before: Placement, now: Placement) -> list[TrainedLayer]:
        if now.state == "gpu":
            return self.coming
        if before.state == "gpu":
            return self.leaving
        return self.taken if now.updates == "cpu" else self.visiting

    @property
    def moved(self) -> int:
        return sum(map(len, (self.leaving, self.coming, self.taken, self.visiting)))


class Handover:
    """Moves the layers of one model, one plan at a time: `prepare`, `begin`, `finish`."""

    def __init__(self, common: Common, trip: RoundTrip, arrivals: Arrivals, host_room: HostRoom) -> None:
        self._layers, self._link, self._transfers = common.layers, common.link, common.transfers
        self._health, self._trip, self._visits, self._offload = common.health, trip, common.visits, common.offload
        self.arenas, self.arrivals = Arenas(common, host_room), arrivals
        self._move: _Move | None = None
        self._departing: list[tuple[ArenaPlanes, Transfer]] = []
        self._thread: threading.Thread | None = None
        # Plans arrive on the link's thread. The lock keeps `_move` and the thread that works on it consistent.
        self._lock = threading.Lock()
        self._worked = self.is_parked = False
        self._told, self._evicted = set[int](), -1  # layers that lacked memory; the newest plan at the last eviction

    def start(self, plan: Plan) -> None:
        """Give layers their first placement: state is zero, the parameters are the masters. Raises `ClusterError`."""
        self._offload.plan(plan.places.offloaded)
        hosted = [layer for layer in self._layers if plan.places[layer.lid].state == "host"]
        for layer in self._layers:
            if layer not in hosted:
                layer.planes = layer.device_planes()
                self._place(layer, plan, step=0)
        for layer, arena in self.arenas.asked_for(hosted):
            if isinstance(arena, CapacityError):
                raise arena
            layer.planes, now = arena, plan.places[layer.lid]
            if now.updates == "cpu":
                arena.pin("grads", gently=False)
            copied = self._transfers.state_out(_first_copies(layer, arena, now))
            if now.visits:
                copied.synchronize()  # nobody else waits for it, and keeps its sources until then
                arena.pin("state", gently=False)
                self._visits.prepare()
            self._place(layer, plan, step=0, after=copied)
        self.arrivals.came()

    def prepare(self, plan: Plan) -> None:
        """Allocate the memory that the plan needs, on a thread. The last plan's handovers must have finished."""
        move = _Move(plan)
        with self._lock:
            if self._move is not None and self._move.plan is plan:
                return  # `resume` just did
            for layer in self._layers:
                before, now = layer.life.placement, plan.places[layer.lid].resident
                # A plan that was made before an eviction takes GPU memory that was needed for something else.
                takes_memory = now.state == "gpu" and plan.plan_id <= self._evicted
                if before is not now and not takes_memory:
                    move.list_of(before, now).append(layer)
            self._move = move  # from here on, nothing that leaves with it is offered
        for layer in list(move.leaving):
            layer.take_back()
        with self._lock:
            if self.is_parked:  # `resume` comes back to it
                self._move = None if self._move is move else self._move
                self.arrivals.lapsed()
            elif self._move is move:
                self._run(partial(self._prepare, move))

    def make_ready(self, layers: list[TrainedLayer]) -> None:
        """Make memory for their state to leave to, on a thread, unless that is at work, or until it has other work."""

        def goes_on() -> bool:
            with self._lock:  # under which this thread was started
                return self._thread is threading.current_thread() and not self.is_parked

        with self._lock:
            if not self.is_parked and (self._thread is None or not self._thread.is_alive()):
                self._run(partial(self.arenas.make_ready, layers, goes_on))

    def park(self) -> None:
        """Prepare nothing more until `resume`. Returns once what was begun is done."""
        with self._lock:
            self.is_parked = True
        self.wait()
        with self._lock:
            if self._move is not None and not self._move.prepared:  # its thread has not been started
                self._move = None

    def resume(self) -> None:
        """Plans may be prepared again. The step that comes next tells nothing about others."""
        with self._lock:
            self.is_parked, self._worked = False, True

    def may_evict(self, layer: TrainedLayer) -> bool:
        """Whether it has state on the GPU, and no plan that is under way moves it anyway."""
        leaving = () if self._move is None else self._move.leaving
        return isinstance(layer.holds, DevicePlanes) and bool(layer.holds.parts) and layer not in leaving

    def offer(self, layer: TrainedLayer, begin: Callable[[], None]) -> None:
        """Call `begin`, which offers its state to the allocator, unless a plan moves it."""
        with self._lock:
            if self.may_evict(layer):
                begin()

    def evict(
        self, layer: TrainedLayer, arena: ArenaPlanes, copied: Transfer, newest_plan: int, *, has_left: bool = False
    ) -> bool:
        """Its state, which was `copied` to an arena of our own, visits the GPU from now on.

        False, and nothing has changed, if a plan has come meanwhile that moves it. If it `has_left`, that plan does
        without it.
        """
        with self._lock:
            if has_left and self._move is not None and layer in self._move.leaving:
                self._move.leaving.remove(layer)
            if not self.may_evict(layer):
                return False
            layer.life.place(VISIT)
            layer.holds, layer.returned = arena, replace(copied, keep=())
            self._evicted = newest_plan
        return True

    def _prepare(self, move: _Move) -> None:
        """Layers for which there is no memory stay where they are, and after one on the GPU the others do so too."""
        self._prepare_visits(move)
        for layer in move.leaving:
            self.arenas.drop(layer)
        for layer, arena in self.arenas.asked_for(move.leaving, gently=True):
            if isinstance(arena, CapacityError):
                self._stays(layer, arena)
            else:
                move.arenas[layer.lid] = arena
        move.leaving = [layer for layer in move.leaving if layer.lid in move.arenas]
        self._prepare_gradients(move)
        for index, layer in enumerate(move.coming):
            try:
                move.devices[layer.lid] = layer.device_planes(fresh=False)
            except torch.OutOfMemoryError:
                self._stays(layer, "no GPU memory for its state")
                del move.coming[index:]
                break
            layer.arena.pin("state")
        self.arrivals.came()
        move.prepared = True

    def _prepare_gradients(self, move: _Move) -> None:
        """Memory for the gradients of layers that will be the CPU's."""
        for layer in [*move.leaving, *move.taken]:
            if move.plan.places[layer.lid].updates == "cpu":
                (move.arenas.get(layer.lid) or layer.arena).pin("grads")

    def _prepare_visits(self, move: _Move) -> None:
        leaving = [layer for layer in move.leaving if move.plan.places[layer.lid].visits]
        try:
            if leaving or move.visiting:
                self._visits.prepare()
        except torch.OutOfMemoryError:
            for layer in (*leaving, *move.visiting):
                self._stays(layer, "no GPU memory for visits")
            move.leaving = [layer for layer in move.leaving if layer not in leaving]
            move.visiting.clear()
        for layer in move.visiting:
            layer.arena.pin("state")

    def _stays(self, layer: TrainedLayer, why: object) -> None:
        """Say once why a layer cannot move. A plan may ask for it again and again."""
        if layer.lid not in self._told:
            self._told.add(layer.lid)
            _log.warning("layer %s stays on the %s: %s", layer.name, layer.life.placement.name, why)

    @property
    def is_prepared(self) -> bool:
        return self._move is not None and self._move.prepared

    @property
    def is_begun(self) -> bool:
        return self._move is not None and self._move.begun

    def begin(self, step: int) -> None:
        """At a step boundary, start the copies of the prepared plan, which holds from `step` on. Does not wait."""
        move = self._move
        assert move is not None and move.prepared and not move.begun, "prepared, and begun once"
        move.begun = True
        for layer in (*move.taken, *move.coming):
            if layer.returned is not None:  # what is copied now may still be on its way from the last visit
                self._transfers.land(layer.returned)
        for layer in (*move.leaving, *move.taken):
            self._leave(layer, move, step)
        fence = self._transfers.fence()
        for layer in move.coming:
            with self._health.changed:
                layer.moving = Moving(move.devices.pop(layer.lid), fence)
                if layer.landing is not None or layer.life.is_current:
                    layer.moving.start(layer.arena, self._transfers)

    def _leave(self, layer: TrainedLayer, move: _Move, step: int) -> None:
        """Copy to the arena what its next updater needs there, and place the layer."""
        for_cpu, before = move.plan.places[layer.lid].updates == "cpu", layer.planes
        assert before is not None, "a layer that takes part has a placement"
        arena = move.arenas.pop(layer.lid, None) or layer.arena
        if for_cpu:
            self._trip.wait_for(layer)
        needs_weights = not layer.keeps_weights and (for_cpu or layer.block is not None)
        copies = weights_copies(layer, arena) if needs_weights else []
        if before is not arena:
            copies += state_copies(arena, before)
        departure = self._transfers.state_out(copies)
        if not copies and layer.returned is not None:  # its state was on its way here from its last visit
            departure = layer.returned
        layer.planes = arena
        self._place(layer, move.plan, step, after=departure)
        if layer.block is not None:
            layer.block.is_left_by(replace(departure, keep=()))
        if for_cpu:  # the sender of TakeOver keeps the sources of the copy alive
            departure = replace(departure, keep=())
            move.unpinned.append(arena)
        move.copies.append((arena, departure))

    def finish(self, step: int) -> tuple[Plan, int]:
        """Before the first gradient, place layers on the GPU. Returns the plan that was begun, and its moves."""
        move = self._move
        assert move is not None and move.begun, "begun"
        for layer in move.coming:
            self._trip.wait_for(layer)  # its weights may not have been needed in this step's forward
            if layer.block is not None and layer.rests_on_host:
                for other in layer.block.layers:
                    self._trip.wait_for(other)
                try:
                    self._offload.settle(layer.block)
                except torch.OutOfMemoryError:
                    self._turns_back(layer, move)
                    continue
            moving, layer.moving = layer.moving, None
            assert moving is not None and moving.arrival is not None, "started with the last update, or before"
            with self._lock:  # until it is placed there, no other thread may evict it
                arena, layer.planes = layer.arena, moving.device
                self._place(layer, move.plan, step, after=moving.arrival)
            fetched = None if layer.block is None else layer.block.arrival
            move.closing.append((arena, [copy for copy in (moving.arrival, fetched) if copy is not None]))
        move.coming = [layer for layer in move.coming if layer.life.placement.state == "gpu"]
        for layer in move.visiting:
            self._trip.wait_for(layer)
            self._place(layer, move.plan, step)
        # Without room for its state on the GPU, a layer's weights stay where they are, too.
        stays = {
            layer.lid
            for layer in self._layers
            if layer.life.placement.state == "host"
            and move.plan.places[layer.lid].state == "gpu"
            and (layer.block is not None and layer.block.life.planned)
        }
        self._offload.plan(stays | move.plan.places.offloaded)
        self.arrivals.came()
        with self._lock:
            self._move = None
            self._departing = [(arena, replace(departure, keep=())) for arena, departure in move.copies]
            dropping = [layer.arena for layer in move.visiting]
            self._run(partial(_clear_up, move.copies, move.closing, move.unpinned, dropping))
        return move.plan, move.moved

    def _turns_back(self, layer: TrainedLayer, move: _Move) -> None:
        """There is room for the layer's state, which has come, but not for its weights."""
        self._stays(layer, "no GPU memory for its weights")
        moving, layer.moving = layer.moving, None
        assert moving is not None and moving.arrival is not None, "started with the last update, or before"
        moving.arrival.synchronize()  # whoever gets its memory next, on whichever stream, comes after that
        if not layer.life.placement.visits:
            move.unpinned.append(layer.arena)
            move.copies.append((layer.arena, moving.arrival))

    def await_copies(self) -> None:
        """Return once the planes that were handed over can be read. Call `finish` first."""
        departing = self._departing
        for _, departure in departing:
            departure.synchronize()
        with self._lock:
            if self._departing is departing:  # on another thread, layers may have moved again
                self._departing = []

    def expose_state(self) -> None:
        """Unpin state planes, so that copies of any size can read and write them. The next handover is slower."""
        self.wait()
        for layer in self._layers:
            if isinstance(layer.planes, ArenaPlanes):
                layer.planes.unpin("state")

    def has_worked(self) -> bool:
        """Whether layers moved, or their memory was prepared or released, since the last call."""
        with self._lock:
            under_way = self._move is not None and self._move.begun
            at_work = self._thread is not None and self._thread.is_alive()
            worked, self._worked = self._worked, under_way or at_work
        return worked or under_way

    def wait(self, timeout_s: float | None = None) -> None:
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def close(self) -> bool:
        """Free prepared memory that no layer uses, and arenas that layers have left. The link is closed already.

        Returns whether its thread, which pins and copies state, has ended.
        """
        self.arrivals.lapsed()
        self.wait(CLOSE_TIMEOUT_S)
        if self._thread is not None and self._thread.is_alive():
            _log.error("a handover of layers hangs: its memory is kept")
            return False
        if self._move is not None:
            for arena in (*self._move.arenas.values(), *(arena for arena, _ in self._move.closing)):
                arena.close()
            self._move.arenas.clear()
            self._move.closing.clear()
            self._move.devices.clear()
        self.arenas.close()
        return True

    def _place(self, layer: TrainedLayer, plan: Plan, step: int, after: Transfer | None = None) -> None:
        """Place the layer as planned from now on. Its updater waits for `after`, which moves its state.

        The optimizer gives up the layers that the GPU updates, and their memory unless their state stays there.
        """
        before, now = layer.life.placement, plan.places[layer.lid].resident
        layer.life.place(now)
        layer.is_counted = False
        if now.updates == "cpu":
            banks = layer.arena.banks
            message = TakeOver(plan_id=plan.plan_id, lid=layer.lid, step=step, banks=banks)
            self._link.post("optimizer", message, after=after)
            return
        if before.state == "host":
            layer.came = step
            self._link.post("optimizer", GiveUp(plan_id=plan.plan_id, lid=layer.lid, step=step), after=after)
        layer.source = None
        if after is not None:
            layer.returned = replace(after, keep=())  # its sources are kept by `_Move.copies`
            if not now.visits:
                self._transfers.land(after)  # for who reads it now; other streams wait before they update it

    def _run(self, task: Callable[[], None]) -> None:
        """Run a task on its own thread, after the previous one. Its error stops training. The caller holds the lock."""
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            try:
                task()
            except HyTrainError as error:
                self._health.fail(error)
            except Exception as error:
                self._health.fail(ClusterError(f"a handover failed: {type(error).__name__}: {error}"))

        thread = threading.Thread(target=run, name=THREAD_PREFIX + "handover", daemon=True)
        thread.start()
        self._thread, self._worked = thread, True


def _clear_up(
    copied: list[tuple[ArenaPlanes, Transfer]],
    closing: list[tuple[ArenaPlanes, list[Transfer]]],
    unpinned: list[ArenaPlanes],
    dropping: list[ArenaPlanes],
) -> None:
    for _, departure in copied:
        departure.synchronize()
    for arena in unpinned:
        arena.unpin("state")
    for arena in dropping:
        arena.drop_gradients()
    for arena, copies in closing:
        for copy in copies:
            copy.synchronize()
        arena.close()


def _first_copies(layer: TrainedLayer, arena: ArenaPlanes, now: Placement) -> list[Copy]:
    """The planes that do not begin as zeros: the weights, which the CPU needs, and the masters of float16 weights.

    Those on the meta device get theirs later, from a blueprint.
    """
    needs_weights = now.updates == "cpu" or layer.block is not None
    first = [segment.weights if segment.first is None else segment.first for segment in layer.segments]
    pairs = zip(arena.weights, first, strict=True) if needs_weights else ()
    copies = [(into, weights) for into, weights in pairs if not weights.is_meta]
    for index, (segment, weights) in enumerate(zip(layer.segments, first, strict=True)):
        if segment.spec.dtype == "float16" and not weights.is_meta:
            master = arena.part("remainder", index)
            assert master is not None, "a float16 segment has a master"
            copies.append((master, weights.float()))
    return copies


def weights_copies(layer: TrainedLayer, arena: ArenaPlanes) -> list[Copy]:
    return list(zip(arena.weights, layer.weights, strict=True))
