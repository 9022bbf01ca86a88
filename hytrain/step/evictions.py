"""State leaves the GPU at once, where its memory is needed: a move that the trainer makes alone.

    evict ─▶ the layer's state, into an arena that is made here     its memory on the GPU is free
          ─▶ it visits the GPU from now on, also in the step that is under way
          ─▶ the arena ─▶ optimizer       Evicted ─▶ optimizer, coordinator, who plan on from there

A plan's handover asks the optimizer for memory, and begins between two steps. This can wait for neither: it may be
called in the middle of forward or backward. Whether state rests on the GPU or visits it, the same kernel
updates a layer.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from hytrain.errors import CapacityError
from hytrain.memory.capacity import GpuMemory, Room
from hytrain.memory.planes import state_copies
from hytrain.model import graphs
from hytrain.model.trained import TrainedLayer
from hytrain.run.ownership import PlanBook
from hytrain.step.autograd import in_backward
from hytrain.step.blocks import tensors_in
from hytrain.step.common import Common
from hytrain.step.device import DeviceUpdates
from hytrain.step.growth import Growth
from hytrain.step.handover import Handover, weights_copies
from hytrain.step.life import State
from protocol.messages import Evicted

_log = logging.getLogger(__name__)


class Evictions:
    """Those of one model."""

    def __init__(
        self, common: Common, device: DeviceUpdates, handover: Handover, plans: PlanBook, memory: GpuMemory
    ) -> None:
        self._layers, self._link, self._transfers = common.layers, common.link, common.transfers
        self._health, self._meter, self._visits = common.health, common.meter, common.visits
        self._growth = Growth()
        self._device, self._handover, self._plans, self._memory = device, handover, plans, memory

    def evict(self, nbytes: int, why: str) -> int:
        """Free so many bytes of the GPU's memory. Returns how many: less if none are left, or the host has no room."""
        freed = 0
        with self._health.undivided("an eviction of state"):
            while (layer := self._next()) is not None:
                if freed >= nbytes and (not freed or self._has_slots()):
                    break
                if not (left := self._evict(layer, why)):
                    break
                freed += left
            if freed:
                self._has_slots()
                self._memory.begin_anew()  # steps with less state have other peaks
                self._growth.peak = 0
        return freed

    def before_forward(self, *inputs: Any) -> None:
        """The model is about to compute with these. A batch larger than any so far gets the room that it needs."""
        if not self._memory.is_bounded or torch._C._is_tracing() or torch.compiler.is_compiling():
            return
        if not torch.is_grad_enabled() or in_backward() or self._health.life.state not in (State.IDLE, State.SUMMED):
            return
        size = sum(tensor.numel() for tensor in tensors_in(inputs))
        needed = self._growth.foreseen(size)
        room = self._memory.room() if needed is not None else None
        if room is None or needed is None or graphs.is_captured(self._layers[0].weights[0]):
            return
        if (lacking := room.now + needed - room.usable) > 0:
            self.evict(lacking, f"a batch of {size} elements, larger than any before")

    def end_step(self, room: Room | None) -> None:
        """`room`: what there is between two steps."""
        if room is not None:
            self._growth.end_step(room.needed, room.now)

    def _has_slots(self) -> bool:
        """Whether there is memory for visits, which is made here: an update in backward could not do without."""
        try:
            self._visits.prepare()
        except torch.OutOfMemoryError:
            return False
        return True

    def _next(self) -> TrainedLayer | None:
        """Of the layers whose state can go, the last one in forward: it has most time for its visits."""
        positions = self._device.positions
        return max(filter(self._handover.may_evict, self._layers), key=lambda one: positions[one.lid], default=None)

    def _evict(self, layer: TrainedLayer, why: str) -> int:
        """Returns how many bytes are free now."""
        began_s, nbytes = time.monotonic(), layer.device.nbytes
        try:
            arena = self._handover.arenas.own(layer)
        except (CapacityError, OSError) as error:
            _log.warning("the state of layer %s cannot leave the GPU: %s", layer.name, error)
            return 0
        copies = state_copies(arena, layer.device)
        if layer.block is not None:
            copies += weights_copies(layer, arena)
        self._transfers.drain()  # any stream may have written them
        copied = self._transfers.state_out(copies)
        copied.synchronize()
        newest = self._plans.plan
        assert newest is not None, "there was a first plan"
        device, file = layer.device, arena.file
        if not self._handover.evict(layer, arena, copied, newest.plan_id):
            self._handover.arenas.keep(layer, arena)
            return 0
        device.close()
        self._link.give_arena(file)
        ended_s, step = time.monotonic(), self._health.life.step
        told = Evicted(lid=layer.lid, step=step, nbytes=nbytes, evict_s=ended_s - began_s, reason=why)
        for role in ("optimizer", "coordinator"):
            self._link.post(role, told)
        self._meter.evicted(layer.lid, nbytes, began_s, ended_s)
        return nbytes
