"""State that torch's allocator may evict, at any allocation: `memory/reclaim.py` serves it.

    after an update    offer ─▶ its state may leave any time, on whichever thread lacks memory
    while one is held  the same: it visits the GPU then
    before all others  take_back ─▶ it stays
                               └─▶ it has left: from now on it visits the GPU, as after any eviction
    end of a step      memory is made ready for as much state as a step's batch needs

An update comes after all that reads or writes the state, and one that is held has not begun. So an event is all that
has to be awaited, and a layer is offered nowhere else.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import NamedTuple

import torch

from hytrain.memory.capacity import Room
from hytrain.memory.planes import ArenaPlanes, DevicePlanes
from hytrain.memory.reclaim import Left, Offer
from hytrain.memory.transfer import Transfer
from hytrain.model.trained import TrainedLayer
from hytrain.readable import gib
from hytrain.step.common import Common
from hytrain.step.device import DeviceUpdates
from hytrain.step.evictions import Evictions, leaving_copies
from hytrain.step.handover import Handover
from hytrain.tensors import addresses


class _Known(NamedTuple):
    """An offer, and what it was made of."""

    offer: Offer
    device: weakref.ref[DevicePlanes]
    arena: ArenaPlanes
    weights: list[int]


class Reclaiming:
    """That of one model. Without a `library`, nothing is offered."""

    def __init__(
        self,
        common: Common,
        device: DeviceUpdates,
        handover: Handover,
        evictions: Evictions,
        library: ctypes.CDLL | None,
    ) -> None:
        self._layers, self._health, self._device = common.layers, common.health, device
        self._handover, self._evictions, self._library = handover, evictions, library
        self._parameters, self._visits = common.parameters, common.visits
        self._room: Room | None = None  # after the last step
        self._known: dict[int, _Known] = {}  # by LID
        self._lock = threading.Lock()  # of an offer's end: a plan comes on the link's thread
        self._evicted = self._count()
        if library is not None:
            device.offer = self.offer

    def _count(self) -> int:
        """How many layers have left in this process."""
        return 0 if self._library is None else int(self._library.hytrain_reclaim_evictions())

    def offer(self, layer: TrainedLayer) -> None:
        """The current stream has its update: from now on its state may leave, if there is memory for it."""
        arena, planes = self._handover.arenas.kept(layer), layer.holds
        if arena is None or not isinstance(planes, DevicePlanes):
            return

        def begin() -> None:
            offer, layer.offer = self._of(layer, planes, arena), self
            offer.begin(self._device.positions[layer.lid])

        with self._lock:
            self._handover.offer(layer, begin)

    def _of(self, layer: TrainedLayer, planes: DevicePlanes, arena: ArenaPlanes) -> Offer:
        """Its offer, made anew if anything is elsewhere now."""
        known, weights = self._known.get(layer.lid), [] if layer.block is None else addresses(layer.weights)
        if known is None or known.device() is not planes or known.arena is not arena or known.weights != weights:
            if known is not None:
                known.offer.close()
            assert self._library is not None, "or nothing is offered"
            offer = Offer(self._library, planes.parts, leaving_copies(layer, planes, arena))
            known = self._known[layer.lid] = _Known(offer, weakref.ref(planes), arena, weights)
        return known.offer

    def take_back(self, layer: TrainedLayer) -> None:
        """What was offered stays, or has left and visits from now on."""
        with self._lock:
            if layer.offer is None:
                return
            known = self._known[layer.lid]
            try:
                if (left := known.offer.end()) is not None:
                    with self._health.undivided("an eviction of state"):
                        self._note_left(layer, left)
            finally:
                layer.offer = None  # last: until then, all who ask for its state wait here

    def _note_left(self, layer: TrainedLayer, left: Left) -> None:
        known = self._known.pop(layer.lid)
        known.offer.close()
        arena = self._handover.arenas.own(layer)
        assert arena is known.arena, "what was made ready for it"
        copied = Transfer(None, (left.began_s, left.ended_s))
        why = f"a request of {gib(left.asked)} that had no room"
        self._evictions.leave(layer, arena, copied, left.nbytes, left.began_s, why, ended_s=left.ended_s)
        self._evictions.begin_anew()

    def settle(self) -> None:
        """All that has left until now visits from now on."""
        if (count := self._count()) == self._evicted:
            return
        self._evicted = count
        with self._lock:
            left = [one for one in self._layers if one.offer is not None and self._known[one.lid].offer.has_left]
        for layer in left:
            layer.take_back()
        if left:
            self._evictions.prepare_slots()

    def end_step(self, room: Room | None) -> None:
        """Have memory ready for as much state as a batch takes. `room`: what there is between two steps.

        Also where the GPU has as much free: another program may have taken that by the next step.
        """
        self._evictions.end_step(room)
        if room is None or room == self._room:  # as after the last step
            return
        arenas = self._handover.arenas
        arenas.is_full = arenas.is_full and self._room is None  # until steps need other memory than before
        self._room = room
        if self._library is None:
            return
        self._library.hytrain_reclaim_say(self._sentence(room).encode())
        if arenas.is_full:
            return
        lacking, making = room.needed - room.now, []
        positions = self._device.positions
        for layer in sorted(self._layers, key=lambda one: positions[one.lid], reverse=True):
            if lacking <= 0:
                break
            if self._handover.may_evict(layer):
                lacking -= layer.layout.nbytes - layer.layout.plane_nbytes["grads"]
                if arenas.kept(layer) is None:
                    making.append(layer)
        if making:
            self._room = None  # a handover's thread may be at work
            self._handover.make_ready(making)

    def _sentence(self, room: Room) -> str:
        """What torch's OutOfMemoryError says besides."""
        state = sum(layer.holds.nbytes for layer in self._layers if isinstance(layer.holds, DevicePlanes))
        weights = sum(known.own.untyped_storage().nbytes() for known in self._parameters)
        parts = (weights, state, self._visits.slots_bytes, room.needed - room.now)
        told = [gib(nbytes) for nbytes in parts]
        return (
            f"HyTrain: after the last step, weights took {told[0]} of this device, optimizer state {told[1]}, and "
            f"slots for state that visits {told[2]}; steps needed up to {told[3]} more, for activations and gradients. "
            "What is left of the state would not have made room. Use a smaller batch, or pass offload_activations=True "
            'or offload_weights="auto"'
        )

    def note(self, error: BaseException | None) -> None:
        """A forward ends with this. Without the library, torch's error says nothing yet of what took the memory."""
        if isinstance(error, torch.OutOfMemoryError) and self._library is None and self._room is not None:
            error.add_note(self._sentence(self._room))

    def close(self) -> None:
        """Nothing is offered any more. What has left is not told to anybody."""
        self._device.offer = lambda layer: None
        if self._library is not None:
            self._library.hytrain_reclaim_say(b"")
        with self._lock:
            for layer in self._layers:
                if layer.offer is not None:
                    layer.offer = None
                    self._known[layer.lid].offer.end()
            for known in self._known.values():
                known.offer.close()
            self._known.clear()
