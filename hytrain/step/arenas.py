"""Memory for the state of layers that leave the GPU.

    asked_for  the optimizer process makes it, piece by piece between its tiles, and sends its descriptor
    own        it is made here at once, by several threads, for state that cannot wait
    ready      the same, made before anybody needs it

`Handover` asks for the first, `Evictions` and `Parking` make the second, `Reclaiming` has the third made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

from hytrain.errors import CapacityError
from hytrain.memory.arena import Arena
from hytrain.memory.capacity import HostRoom, host_bound
from hytrain.memory.host import available_bytes
from hytrain.memory.planes import ArenaPlanes, DevicePlanes
from hytrain.model.trained import TrainedLayer
from hytrain.readable import gib
from hytrain.step.common import Common
from protocol.messages import AllocatePlanes, PlanesRefused, ReleasePlanes

#: Host memory that is left to all others: less would end a process.
LEFT_BYTES: Final = 1 << 30

_log = logging.getLogger(__name__)


class Arenas:
    """New ones, for the layers of one model, in what `host_room` has for them."""

    def __init__(self, common: Common, host_room: HostRoom) -> None:
        self._host_room = host_room
        self._layers, self._link, self._transfers = common.layers, common.link, common.transfers
        self._kept: dict[int, ArenaPlanes] = {}  # by LID: our own, which no layer uses now
        self.is_full = False  # the host has no more memory to make ready

    def asked_for(
        self, layers: list[TrainedLayer], *, gently: bool = False
    ) -> Iterator[tuple[TrainedLayer, ArenaPlanes | CapacityError]]:
        """Ask the optimizer for arenas. Yields each layer when its arena is mapped and pinned, or if it cannot be.

        `gently`, while training goes on: state planes are pinned, too, since state is to be copied there.
        """
        awaited = {layer.lid: layer for layer in layers}
        for layer in layers:
            self._link.post("optimizer", AllocatePlanes(lid=layer.lid))
        while awaited:
            answer = self._link.receive_arena({lid: layer.layout for lid, layer in awaited.items()})
            layer = awaited.pop(answer.lid if isinstance(answer, PlanesRefused) else answer.layout.lid)
            try:
                if isinstance(answer, PlanesRefused):
                    raise CapacityError(f"no host memory for it: {answer.reason}")
                made: ArenaPlanes | CapacityError = (arena := ArenaPlanes(answer, self._transfers, gently=gently))
                if gently:
                    arena.pin("state")
            except CapacityError as error:
                made = error
                self._link.post("optimizer", ReleasePlanes(lid=layer.lid))
            yield layer, made

    def keep(self, layer: TrainedLayer, arena: ArenaPlanes) -> None:
        """Its state is on the GPU, and may leave again: pinned memory for that takes long to make."""
        self.drop(layer)
        self._kept[layer.lid] = arena

    def kept(self, layer: TrainedLayer) -> ArenaPlanes | None:
        """Memory of our own that waits for its state."""
        return self._kept.get(layer.lid)

    def drop(self, layer: TrainedLayer) -> None:
        """Its state does not need ours."""
        if (arena := self._kept.pop(layer.lid, None)) is not None:
            arena.close()

    def make_ready(self, layers: list[TrainedLayer], goes_on: Callable[[], bool]) -> None:
        """Keep memory for the state of these layers, as far as planes may take it, until it has to stop."""
        for layer in layers:
            if layer.lid in self._kept:
                continue
            if not goes_on():
                return
            try:
                if self._needed(layer) > self._left():
                    raise CapacityError("the rest of host memory is for others")
                arena = self._made(layer, gently=True)
                if isinstance(layer.holds, DevicePlanes):
                    self.keep(layer, arena)
                else:  # it has left for memory of its own in the meantime
                    arena.close()
            except (CapacityError, OSError) as reason:
                _log.debug("no memory is made ready for more state to leave the GPU: %s", reason)
                self.is_full = True
                return

    def pin_visiting(self) -> None:
        """Pin what was unpinned for somebody to read, and visits need, before a forward."""
        for layer in self._layers:
            if layer.life.placement.visits:
                layer.arena.pin("state", gently=False)

    def close(self) -> None:
        for arena in self._kept.values():
            arena.close()
        self._kept.clear()

    def own(self, layer: TrainedLayer) -> ArenaPlanes:
        """Pinned memory for its state, and for weights. Raises `CapacityError` or `OSError` without it."""
        if (kept := self._kept.pop(layer.lid, None)) is not None:
            return kept
        needed, left = self._needed(layer), available_bytes()
        if needed + LEFT_BYTES > left:
            raise CapacityError(f"it takes {gib(needed)} of host memory, and {gib(left)} are left")
        return self._made(layer, gently=False)

    def _left(self) -> int:
        """Bytes that planes may still take."""
        if self._host_room.stated_bytes is None:
            free = self._host_room.free()
            return host_bound(None) if free is None else free
        held = [layer.layout.nbytes for layer in self._layers if isinstance(layer.holds, ArenaPlanes)]
        ready = [self._needed(layer) for layer in self._layers if layer.lid in self._kept]
        return self._host_room.stated_bytes - sum(held) - sum(ready)

    @staticmethod
    def _needed(layer: TrainedLayer) -> int:
        return layer.layout.nbytes - layer.layout.plane_nbytes["grads"]

    def _made(self, layer: TrainedLayer, *, gently: bool) -> ArenaPlanes:
        arena = ArenaPlanes(Arena(layer.layout), self._transfers, gently=gently, is_own=True)
        arena.pin("state", gently=gently)
        return arena
