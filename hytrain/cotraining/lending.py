"""Lends the current weights to the CPU trainer: says in which shared memory each parameter is. `Partner` calls it.

    the CPU owns the layer        in its arena, in the current bank: the plane that the optimizer updates
    offloaded weights that visit   in its arena, too
    any other layer               in the copies, which this process brings up to date for each step
    a parameter in pieces         in the copies: its pieces are in several arenas; also one whose rows do not follow
                                  each other in memory

What the CPU owns is not copied. Pages of copies that are not needed any more are freed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from hytrain.memory.arena import Mapping, SharedMemory, free_pages
from hytrain.memory.planes import ArenaPlanes
from hytrain.model.trained import TrainedParameter
from hytrain.tensors import shaped
from protocol.handles import PAGE_BYTES
from protocol.messages import LendMemory, Message, TakeBack, WeightsAt

#: The memories that the CPU trainer is started with: the last one has buffers and frozen parameters. Arenas have
#: further numbers.
COPIES, GRADIENTS, INPUTS, OTHERS = range(4)
#: More than the kernel takes in one datagram.
MAX_DATAGRAM_BYTES: Final = 1 << 20
#: Places are told in messages of at most so many parameters, each of which fits into a datagram.
MOST_PLACES: Final = 2000
Order = tuple[Message, int | None]  # with the descriptor that goes with it


class Lending:
    """The weights of `parameters`, as another process finds them. Offsets are in bytes.

    `offsets[i]` is where the copy of parameter i begins, and in each slot of gradients its gradient; both end at
    `nbytes`. Each begins on a page, so that it can be freed alone.
    """

    def __init__(self, parameters: Sequence[TrainedParameter]) -> None:
        self._parameters = parameters
        self.offsets, self.nbytes = spread(known.own for known in parameters)
        self.copies = SharedMemory("weights", self.nbytes)
        self._views = views(self.copies.mapping, self.offsets, [known.own for known in parameters])
        self._places: list[tuple[int, int]] = [(-1, -1)] * len(parameters)  # what the other process was told last
        self._lent: dict[ArenaPlanes, int] = {}
        self._next = OTHERS + 1

    def orders(self) -> Iterator[Order]:
        """Once all updates were waited for: what to tell the other process, in order, before it computes."""
        homes = [self._home(known) for known in self._parameters]
        places = []
        for index, (known, home) in enumerate(zip(self._parameters, homes, strict=True)):
            if home is None:
                self._copy(known, self._views[index])
                places.append((COPIES, self.offsets[index]))
                continue
            arena, offset = home
            if arena not in self._lent:
                self._lent[arena], self._next = self._next, self._next + 1
                yield (
                    LendMemory(memory=self._lent[arena], nbytes=arena.file.layout.shared_nbytes),
                    arena.file.descriptor,
                )
            places.append((self._lent[arena], offset))
        moved = [index for index, place in enumerate(places) if place != self._places[index]]
        for memory in sorted({places[index][0] for index in moved}):
            there = [index for index in moved if places[index][0] == memory]
            for first in range(0, len(there), MOST_PLACES):
                some = tuple(there[first : first + MOST_PLACES])
                offsets = tuple(places[index][1] for index in some)
                yield WeightsAt(memory=memory, parameters=some, offsets=offsets), None
        used = {home[0] for home in homes if home is not None}
        for arena in [arena for arena in self._lent if arena not in used]:
            yield TakeBack(memory=self._lent.pop(arena)), None
        for index in moved:
            if self._places[index][0] == COPIES:  # told already that it is elsewhere
                free_pages(self.copies.descriptor, self.offsets[index], self._parameters[index].own.nbytes)
        self._places = places

    def _copy(self, known: TrainedParameter, copy: Tensor) -> None:
        """From host memory where its weights are there, too: a copy from the GPU would wait for what that computes."""
        parts = [(layer.arena.weights if layer.keeps_weights else layer.values)[index] for layer, index in known.places]
        elements = parts[0] if len(parts) == 1 else torch.cat([part.cpu() for part in parts])
        copy.copy_(shaped(elements, known.own))

    def _home(self, known: TrainedParameter) -> tuple[ArenaPlanes, int] | None:
        """The arena that has the parameter's current weights, and where; None if none has all of them."""
        if len(known.places) != 1 or not known.own.is_contiguous():
            return None
        [(layer, index)] = known.places
        return (layer.arena, layer.arena.weights_offset(index)) if layer.keeps_weights else None

    def close(self) -> None:
        self._views = []
        self.copies.close()


def spread(tensors: Iterable[Tensor]) -> tuple[list[int], int]:
    """Where each of them begins, in bytes, if each has pages of its own; and where the last one ends."""
    *offsets, end = accumulate((-(-each.nbytes // PAGE_BYTES) * PAGE_BYTES for each in tensors), initial=0)
    return offsets, end


def views(mapping: Mapping, offsets: Iterable[int], like: Iterable[Tensor], start: int = 0) -> list[Tensor]:
    """Tensors in a mapping, with the shapes and dtypes of `like`, each at its offset from `start`, in bytes."""
    return [view(mapping, start + at, each.dtype, each.shape) for at, each in zip(offsets, like, strict=True)]


def view(mapping: Mapping, at: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor of this shape that begins at byte `at`. It keeps the mapping alive."""
    numel = math.prod(shape)
    if not numel:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapping.buffer, dtype=dtype, count=numel, offset=at).view(shape)
