"""Lends the GPU to somebody else between two steps: `opt.park()`, `opt.resume()`.

    park    plans in work are finished ─▶ state, and weights if asked ─▶ host memory ─▶ GPU memory is free
    resume  GPU memory ─▶ state and weights come back ─▶ plans go on

Placements stay, so neither the optimizer process nor the coordinator has to know. Layers that the CPU updates, or whose
state visits the GPU, have their state in host memory anyway, and most weights, too. What parking has to copy, it copies
into pinned memory that is kept for the next time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hytrain.errors import CapacityError
from hytrain.memory.planes import ArenaPlanes, DevicePlanes, state_copies
from hytrain.memory.transfer import Copy
from hytrain.model.trained import TrainedLayer, TrainedParameter
from hytrain.model.watched import unwatched
from hytrain.step.boundary import Boundary
from hytrain.step.common import Common
from hytrain.step.handover import Handover
from hytrain.step.life import Event, State
from hytrain.tensors import allocate, free, has_memory, has_own_storage, holders, shaped, untraced


class Parking:
    """That of one model."""

    def __init__(
        self, common: Common, handover: Handover, boundary: Boundary, import_written: Callable[[], None]
    ) -> None:
        self._layers, self._parameters, self._transfers = common.layers, common.parameters, common.transfers
        self._health, self._visits, self._offload = common.health, common.visits, common.offload
        self._handover, self._boundary, self._import_written = handover, boundary, import_written
        self._parked: list[TrainedLayer] = []  # whose state has left the device
        self._away: list[TrainedParameter] = []  # whose weights have
        self._had_slots = False

    def park(self, *, weights: bool) -> None:
        """Raises `UsageError` within a step, and `CapacityError` without host memory; then nothing has left."""
        life, event = self._health.life, Event.PARK_WEIGHTS if weights else Event.PARK
        self._health.require(event, what="opt.park()")
        if life.state is State.PARKED_WEIGHTS:
            return
        self._import_written()
        try:
            self._boundary.park(life.step)
            self._park(weights=weights)
        except BaseException:
            self._boundary.resume()
            raise
        self._health.on(event)
        self._transfers.release()

    @untraced()
    def _park(self, *, weights: bool) -> None:
        for layer in self._layers:
            layer.take_back()  # or torch's allocator could use the memory that it leaves to
        leaving = [layer for layer in self._layers if isinstance(layer.holds, DevicePlanes)]
        arenas = dict[TrainedLayer, ArenaPlanes]()
        try:
            for layer in leaving:
                arenas[layer] = self._handover.arenas.own(layer)
        except BaseException as error:
            for layer, arena in arenas.items():
                self._handover.arenas.keep(layer, arena)
            if isinstance(error, CapacityError | OSError):
                raise CapacityError(f"opt.park() cannot take state from the GPU: {error}") from None
            raise
        with self._health.undivided("opt.park()"):
            self._transfers.drain()
            self._offload.free_all()
            self._had_slots = self._visits.free_slots() or self._had_slots
            copies = [copy for layer, arena in arenas.items() for copy in state_copies(arena, layer.device)]
            away = self._movable() if weights else []
            copies += [copy for known in away for copy in self._weights_out(known, arenas)]
            self._transfers.state_out(copies).synchronize()
            for layer, arena in arenas.items():
                device, layer.planes = layer.device, arena
                device.close()
            with unwatched():
                free(*[known.own for known in away])
            self._parked += leaving
            self._away += away

    def _movable(self) -> list[TrainedParameter]:
        """Those with memory of their own, of which nobody else has a view. Offloaded blocks leave by themselves."""
        return [
            known
            for known in self._parameters
            if known.places
            and has_memory(known.own)
            and not (known.block is not None and known.block.life.is_offloaded)
            and has_own_storage(known.own)
            and holders(known.own) <= 2 + len(known.places)
        ]

    def _weights_out(self, known: TrainedParameter, arenas: dict[TrainedLayer, ArenaPlanes]) -> list[Copy]:
        """Those that are not in host memory anyway."""
        return [
            (arenas.get(layer, layer.planes).weights[index], layer.segments[index].weights)  # type: ignore[union-attr]
            for layer, index in known.places
            if not layer.keeps_weights
        ]

    def resume(self) -> None:
        """Raises `torch.OutOfMemoryError` without memory for all of it; then it stays parked. Nothing if it is not."""
        self._health.check()
        if self._health.life.state not in (State.PARKED, State.PARKED_WEIGHTS):
            return
        try:
            self._bring_weights()
            planes = [(layer, layer.device_planes(fresh=False)) for layer in self._parked]
            if self._had_slots:
                self._visits.prepare()
        except torch.OutOfMemoryError as error:
            error.add_note(
                "opt.resume() needs the GPU memory that opt.park() gave back: free it, and call resume() again"
            )
            raise
        with self._health.undivided("opt.resume()"):
            copies = [copy for layer, device in planes for copy in state_copies(device, layer.arena)]
            self._transfers.state_in(copies, self._transfers.fence()).synchronize()
            for layer, device in planes:
                self._handover.arenas.keep(layer, layer.arena)
                layer.planes = device
            self._parked, self._had_slots = [], False
            self._health.on(Event.RESUME)
        self._boundary.resume()

    @untraced()
    def _bring_weights(self) -> None:
        places = [place for known in self._away for place in known.places]
        with unwatched():
            allocate(*[known.own for known in self._away])
            copies = [(layer.segments[index].weights, layer.arena.weights[index]) for layer, index in places]
            self._transfers.state_in(copies, self._transfers.fence()).synchronize()
        self._away = []

    def end(self) -> None:
        """Leave ordinary weights: on the GPU, or in host memory where there is no room."""
        try:
            self._bring_weights()
        except torch.OutOfMemoryError:
            with unwatched():
                for known in self._away:
                    if not known.is_gone:
                        parts = [layer.arena.weights[index] for layer, index in known.places]
                        known.parameter.data = shaped(torch.cat(parts), known.own)
            self._away = []
