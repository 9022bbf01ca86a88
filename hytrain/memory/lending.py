"""Lends the present weights to other processes: says in which shared memory they are. `Engine.lend_weights` calls it.

    the CPU owns the layer        in its arena, in the current bank: the plane that the optimizer updates
    offloaded weights that visit   in its arena, too
    any other layer               in copies, which this process brings up to date each time that weights are lent
    a parameter in pieces         in the copies: its pieces are in several arenas; also one whose rows do not follow
                                  each other in memory

What the CPU owns is not copied. Pages of copies that are not needed any more are freed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hytrain.memory.arena import Mapping, Memory, SharedMemory, free_pages
from hytrain.model.layers import clean
from hytrain.model.trained import TrainedParameter
from hytrain.tensors import shaped
from protocol.handles import PAGE_BYTES


class Lent(NamedTuple):
    """A parameter's weights begin at byte `offset` of `memory`, one after the other."""

    memory: Memory
    offset: int


class Lending:
    """The weights of `parameters`, as another process finds them. Each copy begins on a page, so it is freed alone."""

    def __init__(self, parameters: Sequence[TrainedParameter]) -> None:
        self._parameters = parameters
        self._offsets, nbytes = spread(known.own for known in parameters)
        self._copies = SharedMemory("weights", nbytes)
        self._views = views(self._copies.mapping, self._offsets, [known.own for known in parameters])
        self._memory = Memory(self._copies.descriptor, nbytes)
        self._copied = [False] * len(parameters)

    def weights(self) -> dict[str, Lent]:
        """Once all updates were waited for: where each parameter's weights are, by its name."""
        lent = dict[str, Lent]()
        for index, known in enumerate(self._parameters):
            home = self._home(known)
            if home is None:
                self._copy(known, self._views[index])
                lent[clean(known.name)] = Lent(self._memory, self._offsets[index])
            else:
                lent[clean(known.name)] = home
                if self._copied[index]:
                    free_pages(self._copies.descriptor, self._offsets[index], known.own.nbytes)
            self._copied[index] = home is None
        return lent

    def _copy(self, known: TrainedParameter, copy: Tensor) -> None:
        """From host memory where its weights are there, too: a copy from the GPU would wait for what that computes."""
        parts = [(layer.arena.weights if layer.keeps_weights else layer.values)[index] for layer, index in known.places]
        elements = parts[0] if len(parts) == 1 else torch.cat([part.cpu() for part in parts])
        copy.copy_(shaped(elements, known.own))

    def _home(self, known: TrainedParameter) -> Lent | None:
        """Where the parameter's current weights are in an arena; None if none has all of them."""
        if len(known.places) != 1 or not known.own.is_contiguous():
            return None
        [(layer, index)] = known.places
        return Lent(layer.arena.memory, layer.arena.weights_offset(index)) if layer.keeps_weights else None

    def close(self) -> None:
        self._views = []
        self._copies.close()


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
