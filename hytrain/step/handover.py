"""Moves layers from one placement to another, state and all, while training goes on.

    agreed      a thread: arenas are made, mapped and pinned; memory on the device; state planes to be left are pinned
    boundary    to the host   weights, state ─▶ arena ─(there)─▶ TakeOver        placed there from now on
                to the GPU    state ◀─ arena, once the optimizer is done with the last update
    backward    to the GPU    placed there from now on ─(there)─▶ GiveUp         before the step's first gradient
    later       a thread: arenas are closed, state planes unpinned

What moves is every bit of a layer's state, so the result of training does not depend on it. Copies have a stream of
their own. Pinning takes tenths of a second for a large layer, allocating on the device milliseconds: training waits
for neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from hytrain.errors import ClusterError, HyTrainError
from hytrain.memory.planes import HOST_PLANES, STATE_PLANES, ArenaPlanes, DevicePlanes, Moving, Planes
from hytrain.memory.transfer import Copy, Transfer, Transfers
from hytrain.model.trained import TrainedLayer
from hytrain.run.link import THREAD_PREFIX, Link
from hytrain.step.health import Health
from hytrain.step.reads import Reads
from protocol.messages import AllocatePlanes, GiveUp, Plan, TakeOver

CLOSE_TIMEOUT_S: Final = 5.0


@dataclass(slots=True)
class _Move:
    """One plan's handovers: `leaving` layers go to host memory, `coming` ones to the GPU.

    `arenas` and `devices` have been made and are not yet their layers'. `copies` go to arenas; layers have left the
    arenas in `closing`.
    """

    plan: Plan
    leaving: list[TrainedLayer]
    coming: list[TrainedLayer]
    arenas: dict[int, ArenaPlanes] = field(default_factory=dict)
    devices: dict[int, DevicePlanes] = field(default_factory=dict)
    copies: list[tuple[ArenaPlanes, Transfer]] = field(default_factory=list)
    closing: list[tuple[ArenaPlanes, Transfer]] = field(default_factory=list)
    prepared: bool = False
    begun: bool = False


class Handover:
    """Moves layers of one model over one link, one plan at a time: `prepare`, `begin`, `finish`."""

    def __init__(
        self, layers: list[TrainedLayer], *, link: Link, transfers: Transfers, health: Health, reads: Reads
    ) -> None:
        self._layers, self._link, self._transfers = layers, link, transfers
        self._health, self._reads = health, reads
        self._move: _Move | None = None
        self._departing: list[tuple[ArenaPlanes, Transfer]] = []
        self._thread: threading.Thread | None = None
        # Plans arrive on the link's thread: a move and the thread that works on it are seen together or not at all.
        self._lock = threading.Lock()
        self._worked = False

    def start(self, plan: Plan) -> None:
        """First placements: all state is zero, the parameters' values are the masters. Raises `ClusterError`, …"""
        hosted = [layer for layer in self._layers if plan.placement(layer.lid).state == "host"]
        for layer in self._layers:
            if layer not in hosted:
                layer.planes = layer.device_planes()
                self._place(layer, plan, step=0)
        for layer, arena in self._allocate(hosted, plan):
            layer.planes = arena
            self._place(layer, plan, step=0, after=self._transfers.state_out(_first_copies(layer, arena)))

    # ------------------------------------------------------------ before: memory

    def prepare(self, plan: Plan) -> None:
        """Make ready what the plan needs, on a thread. The last plan's handovers have finished."""
        moving = [layer for layer in self._layers if layer.life.placement is not plan.placement(layer.lid)]
        leaving = [layer for layer in moving if plan.placement(layer.lid).state == "host"]
        coming = [layer for layer in moving if layer not in leaving]
        with self._lock:
            self._move = _Move(plan, leaving, coming)
            self._run(partial(self._prepare, self._move))

    def _prepare(self, move: _Move) -> None:
        """A GPU without room for a layer leaves it and those after it where they are."""
        for layer, arena in self._allocate(move.leaving, move.plan, gently=True):
            move.arenas[layer.lid] = arena
            arena.pin_state()
        for index, layer in enumerate(move.coming):
            try:
                move.devices[layer.lid] = layer.device_planes(fresh=False)
            except torch.OutOfMemoryError:
                del move.coming[index:]
                break
            layer.arena.pin_state()
        move.prepared = True

    def _allocate(
        self, layers: list[TrainedLayer], plan: Plan, *, gently: bool = False
    ) -> Iterator[tuple[TrainedLayer, ArenaPlanes]]:
        """Ask for the layers' arenas; yields each layer once its own is there, mapped and pinned."""
        awaited = {layer.lid: layer for layer in layers}
        for layer in layers:
            self._link.post("optimizer", AllocatePlanes(lid=layer.lid))
        while awaited:
            file = self._link.receive_arena({lid: layer.layout for lid, layer in awaited.items()})
            layer = awaited.pop(file.layout.lid)
            yield layer, HOST_PLANES[plan.placement(layer.lid).name](file, self._transfers, gently=gently)

    @property
    def is_prepared(self) -> bool:
        return self._move is not None and self._move.prepared

    # ------------------------------------------------------------ at a boundary: copies

    def begin(self, step: int) -> None:
        """Start the copies of the plan that was prepared; it holds from `step` on. Waits for nothing."""
        move = self._move
        assert move is not None and move.prepared and not move.begun, "prepared, and begun once"
        move.begun = True
        for layer in move.leaving:
            arena = move.arenas[layer.lid]
            assert layer.planes is not None, "a layer that takes part has a placement"
            copies = [*_weights_copies(layer, arena), *_state_copies(arena, layer.planes)]
            departure = self._transfers.state_out(copies)
            layer.planes = move.arenas.pop(layer.lid)
            self._place(layer, move.plan, step, after=departure)
            # Who sends TakeOver keeps what is being copied until it is there; then the device's memory is free.
            move.copies.append((arena, replace(departure, keep=())))
        fence = self._transfers.fence()
        for layer in move.coming:
            with self._health.changed:
                layer.moving = Moving(move.devices.pop(layer.lid), fence)
                if layer.landing is not None or layer.life.is_current:
                    self.state_in(layer)

    def state_in(self, layer: TrainedLayer) -> None:
        """The optimizer is done with a layer whose state is expected here: start the copy. Holds `health.changed`."""
        assert layer.moving is not None
        copies = _state_copies(layer.moving.device, layer.arena)
        layer.moving.arrival = self._transfers.state_in(copies, layer.moving.fence)

    # ------------------------------------------------------------ before the first gradient: placements

    def finish(self, step: int) -> tuple[Plan, int] | None:
        """Place what is on its way to the GPU; the plan and how many layers moved, if one was begun."""
        move = self._move
        if move is None or not move.begun:
            return None
        for layer in move.coming:
            self._reads.wait_for(layer)  # its weights may not have been needed in this step's forward
            moving, layer.moving = layer.moving, None
            assert moving is not None and moving.arrival is not None, "started with the last update, or before"
            arena, layer.planes = layer.arena, moving.device
            move.closing.append((arena, moving.arrival))
            self._place(layer, move.plan, step, after=moving.arrival)
        with self._lock:
            self._move, self._departing = None, move.copies
            self._run(partial(_clear_up, move.copies, move.closing))
        return move.plan, len(move.leaving) + len(move.coming)

    def await_copies(self) -> None:
        """Return once planes that were handed over can be read. `finish` comes first."""
        for _, departure in self._departing:
            departure.synchronize()
        self._departing = []

    def expose_state(self) -> None:
        """The state planes of layers are about to be read and written by others, with copies of any size.

        A copy must not cross from one pinned piece to the next, so nothing stays pinned; the next handover is slower.
        """
        self.wait()
        if self._move is not None:
            for layer in self._move.coming:
                layer.arena.unpin_state()

    def has_worked(self) -> bool:
        """Whether layers have moved, or their memory was worked on, since this was asked last."""
        with self._lock:
            under_way = self._move is not None and self._move.begun
            at_work = self._thread is not None and self._thread.is_alive()
            worked, self._worked = self._worked, under_way or at_work
        return worked or under_way

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the thread has made ready, or cleared up, all it was told to."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    # ------------------------------------------------------------

    def close(self) -> None:
        """Give up what was prepared and no layer has got, and what layers have left. The link is closed already."""
        self.wait(CLOSE_TIMEOUT_S)
        if self._move is not None:
            for arena in (*self._move.arenas.values(), *(arena for arena, _ in self._move.closing)):
                arena.close()
            self._move.arenas.clear()
            self._move.closing.clear()
            self._move.devices.clear()

    def _place(self, layer: TrainedLayer, plan: Plan, step: int, after: Transfer | None = None) -> None:
        """The layer is placed as planned from now on. Whoever updates it waits for `after`, which moves its state.

        The optimizer gives up the layers that the GPU updates, and its hold on their memory.
        """
        before, now = layer.life.placement, plan.placement(layer.lid)
        layer.life.place(now)
        if now.updates == "cpu":
            self._link.post("optimizer", TakeOver(plan_id=plan.plan_id, lid=layer.lid, step=step), after=after)
            return
        if before.updates == "cpu":
            layer.came = step
        if before.updates == "cpu" or now.state == "host":
            self._link.post("optimizer", GiveUp(plan_id=plan.plan_id, lid=layer.lid, step=step), after=after)
        if after is not None:
            self._transfers.land(after)

    def _run(self, task: Callable[[], None]) -> None:
        """Run a task on a thread of its own, after the one before; what it raises, training raises. Holds the lock."""
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


def _clear_up(copied: list[tuple[ArenaPlanes, Transfer]], closing: list[tuple[ArenaPlanes, Transfer]]) -> None:
    """Unpin the state of layers that went to the CPU, close the arenas of those that came from it."""
    for arena, departure in copied:
        departure.synchronize()
        arena.unpin_state()
    for arena, arrival in closing:
        arrival.synchronize()
        arena.close()


def _first_copies(layer: TrainedLayer, arena: ArenaPlanes) -> list[Copy]:
    """What does not begin as zeros: the weights, and where they are float16 their masters."""
    whole = [index for index, segment in enumerate(layer.segments) if segment.spec.dtype == "float16"]
    masters = arena.state("remainder") if whole else []
    copies = [(_present(masters[index]), layer.segments[index].weights.float()) for index in whole]
    return [*_weights_copies(layer, arena), *copies]


def _weights_copies(layer: TrainedLayer, arena: ArenaPlanes) -> list[Copy]:
    return list(zip(arena.weights, layer.weights, strict=True))


def _state_copies(into: Planes, out_of: Planes) -> list[Copy]:
    pairs: list[tuple[Tensor | None, Tensor | None]] = []
    for plane in STATE_PLANES:
        pairs += zip(into.state(plane), out_of.state(plane), strict=True)
    return [(destination, source) for destination, source in pairs if destination is not None and source is not None]


def _present(master: Tensor | None) -> Tensor:
    assert master is not None, "a float16 segment has a master"
    return master
