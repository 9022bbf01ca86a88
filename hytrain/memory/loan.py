"""Copies in GPU memory that no step so far has needed, so that training need not wait until they are in files.

    state, weights ── copy ──▶ loan ── a thread ──▶ files ─▶ given back
         └─ training goes on

Without room there is no loan, and training waits for the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final

import torch
from torch import Tensor

from hytrain.memory.capacity import GpuMemory

ALIGNMENT: Final = 256


class Loan:
    """`copies` has what was put in, by name, until the loan is given back."""

    def __init__(self, memory: GpuMemory, buffer: Tensor) -> None:
        self._memory, self._buffer = memory, buffer
        self._nbytes, self._used = buffer.numel(), 0
        self.copies: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor. The buffer has room for what was announced to `borrow`."""
        room = self._buffer[self._used : self._used + tensor.numel() * tensor.element_size()]
        self._used += _aligned(room.numel())
        self.copies[name] = room.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def give_back(self) -> None:
        """Free the copies. Nobody may hold one."""
        if self._nbytes:
            self.copies.clear()
            self._buffer = self._buffer.new_empty(0)
            self._memory.take_back(self._nbytes)
            self._nbytes = 0

    def __del__(self) -> None:
        self.give_back()  # if writing failed before it began


def borrow(memory: GpuMemory, tensors: Mapping[str, tuple[torch.dtype, torch.Size]]) -> Loan | None:
    """A loan with room for all of `tensors`; None without so much memory."""
    nbytes = sum(_aligned(prod(shape) * dtype.itemsize) for dtype, shape in tensors.values())
    buffer = memory.lend(nbytes)
    return None if buffer is None else Loan(memory, buffer)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
