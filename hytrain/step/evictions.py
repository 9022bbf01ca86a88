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
import threading
import time
from typing import Any

import torch

from hytrain.errors import CapacityError
from hytrain.memory.capacity import GpuMemory, Room
from hytrain.memory.planes import ArenaPlanes, DevicePlanes, state_copies
from hytrain.memory.transfer import Copy, Transfer
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
        self._growth, self._telling = Growth(), threading.Lock()
        self._has_lacked = False  # torch's allocator, since this last looked
        self._device, self._handover, self._plans, self._memory = device, handover, plans, memory

    def evict(self, nbytes: int, why: str) -> int:
        """Free so many bytes of the GPU's memory. Returns how many: less if none are left, or the host has no room."""
        freed = 0
        with self._health.undivided("an eviction of state"):
            while (layer := self._next()) is not None:
                if freed >= nbytes and (not freed or self.prepare_slots()):
                    break
                if not (left := self._evict(layer, why)):
                    break
                freed += left
            if freed:
                self.prepare_slots()
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
        needed, why = self._growth.foreseen(size), f"a batch of {size} elements, larger than any before"
        if needed is None and self._has_lacked:  # what was on offer has left, and that may not suffice again
            needed, why = self._growth.most, "a batch as large as one that had no room"
        room = self._memory.room() if needed is not None else None
        if room is None or needed is None or graphs.is_captured(self._layers[0].weights[0]):
            return
        self._has_lacked = False
        if (lacking := room.now + needed - room.usable) > 0:
            self.evict(lacking, why)

    def end_step(self, room: Room | None) -> None:
        """`room`: what there is between two steps."""
        if room is not None:
            self._growth.end_step(room.needed, room.now)

    def _next(self) -> TrainedLayer | None:
        """Of the layers whose state can go, the last one in forward: it has most time for its visits."""
        positions = self._device.positions
        return max(filter(self._handover.may_evict, self._layers), key=lambda one: positions[one.lid], default=None)

    def _evict(self, layer: TrainedLayer, why: str) -> int:
        """Returns how many bytes are free now."""
        device = layer.holds
        assert isinstance(device, DevicePlanes), "one that may be evicted"
        nbytes = device.nbytes
        layer.take_back()
        if layer.holds is not device:  # torch's allocator was faster
            return nbytes
        began_s = time.monotonic()
        try:
            arena = self._handover.arenas.own(layer)
        except (CapacityError, OSError) as error:
            _log.warning("the state of layer %s cannot leave the GPU: %s", layer.name, error)
            return 0
        copies = leaving_copies(layer, device, arena)
        self._transfers.drain()  # any stream may have written them
        copied = self._transfers.state_out(copies)
        copied.synchronize()
        if not self.leave(layer, arena, copied, nbytes, began_s, why):
            self._handover.arenas.keep(layer, arena)
            return 0
        return nbytes

    def leave(
        self,
        layer: TrainedLayer,
        arena: ArenaPlanes,
        copied: Transfer,
        nbytes: int,
        began_s: float,
        why: str,
        ended_s: float | None = None,
    ) -> bool:
        """Its state, `nbytes`, is `copied` to the arena, and visits the GPU from now on. All are told.

        `ended_s`: when it has left already. Otherwise False, and nothing has changed, if a plan moves it.
        """
        newest, device = self._plans.plan, layer.holds
        assert newest is not None and isinstance(device, DevicePlanes), "there was a first plan, and it is on the GPU"
        has_left = ended_s is not None
        if not self._handover.evict(layer, arena, copied, newest.plan_id, has_left=has_left):
            return False
        device.close()
        self._handover.arenas.drop(layer)  # made ready in the meantime
        step, until_s = self._health.life.step, time.monotonic() if ended_s is None else ended_s
        told = Evicted(lid=layer.lid, step=step, nbytes=nbytes, evict_s=until_s - began_s, reason=why)
        with self._telling:  # descriptors and messages come in one order
            self._link.give_arena(arena.file)
            for role in ("optimizer", "coordinator"):
                self._link.post(role, told)
        self._meter.evicted(layer.lid, nbytes, began_s, until_s)
        return True

    def begin_anew(self) -> None:
        """State has left where torch lacked memory, and its peak has begun anew: the next peak is this step's."""
        self._memory.forget()
        self._growth.peak, self._has_lacked = 0, True

    def prepare_slots(self) -> bool:
        """Whether there is memory for visits, which is made here: an update in backward could not do without."""
        try:
            self._visits.prepare()
        except torch.OutOfMemoryError:
            return False
        return True


def leaving_copies(layer: TrainedLayer, device: DevicePlanes, arena: ArenaPlanes) -> list[Copy]:
    """Those that its state leaves with, and its weights where they may rest in host memory."""
    copies = state_copies(arena, device)
    return copies if layer.block is None else copies + weights_copies(layer, arena)
