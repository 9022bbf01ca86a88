"""Pinned host memory that is no layer's plane: sums of gradients, and what autograd has saved.

Pinned        one piece, for DMA
PinnedStack   grows at its end and shrinks there, in slabs that stay pinned for the next step
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hytrain.memory.arena import SharedMemory
from hytrain.memory.transfer import PIECE_BYTES, Transfers

#: A stack grows by so much: pinning takes time, and what is pinned is taken from others.
SLAB_BYTES: Final = PIECE_BYTES


class Pinned:
    """`tensor` is uint8, shape (nbytes,)."""

    def __init__(self, nbytes: int, transfers: Transfers) -> None:
        """Raises `OSError` without host memory."""
        # Not private: after a fork, a page that is written would be another one, and DMA would go on with the old one.
        shared = SharedMemory("pinned", nbytes)
        self._mapping, self._transfers = shared.mapping, transfers
        shared.close()
        self._mapping.populate((0, nbytes))
        self.tensor = torch.frombuffer(self._mapping.buffer, dtype=torch.uint8)
        transfers.pin(self._mapping.address, nbytes)

    def close(self) -> None:
        """No copy may be under way."""
        self._transfers.unpin(self._mapping.address, self._mapping.nbytes)


class PinnedStack:
    """Memory by its place from the bottom, in bytes. Its owner knows which of it is in use."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._slabs: list[Pinned] = []

    @property
    def nbytes(self) -> int:
        """What is pinned: the most that was ever in use, in whole slabs."""
        return SLAB_BYTES * len(self._slabs)

    def grow(self, nbytes: int) -> None:
        """Pin slabs until there are so many bytes. Raises `OSError` without host memory."""
        while self.nbytes < nbytes:
            self._slabs.append(Pinned(SLAB_BYTES, self._transfers))

    def parts(self, start: int, nbytes: int) -> list[Tensor]:
        """The range as views of the slabs, in order: uint8, `nbytes` elements in all."""
        stop, found = start + nbytes, []
        while start < stop:
            index, offset = divmod(start, SLAB_BYTES)
            part = self._slabs[index].tensor[offset : offset + stop - start]
            found.append(part)
            start += len(part)
        return found

    def close(self) -> None:
        """No copy may be under way."""
        for slab in self._slabs:
            slab.close()
        self._slabs.clear()
