"""Copies in GPU memory that no step so far has needed, so that training need not wait until they are in files.

    state, weights ── copy ──▶ loan ── a thread ──▶ files ─▶ given back
         └─ training goes on

Without room there is no loan, and training waits for the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Final

import torch
from torch import Tensor

from hytrain.memory.capacity import GpuMemory
from hytrain.run.ranks import Ranks
from hytrain.state.tensor_file import Described, await_devices

ALIGNMENT: Final = 256


class Loan:
    """`copies`, by name, in `memory` that is lent until it is given back. It is None without so much."""

    def __init__(self, of: GpuMemory, nbytes: int) -> None:
        self._of, self._nbytes = of, nbytes
        self.memory = of.lend(nbytes)
        self.copies: dict[str, Tensor] = {}

    def end_with(self, write: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Have the copies written, and free them. Nobody else may hold one."""
        try:
            write(self.copies)
        finally:
            self.give_back()

    def give_back(self) -> None:
        self.copies.clear()
        if self.memory is not None:
            self.memory = None
            self._of.take_back(self._nbytes)

    __del__ = give_back  # if writing failed before it began


def copied(of: GpuMemory, tensors: Described, read: Callable[[str], Tensor], ranks: Ranks) -> Loan | None:
    """A loan with copies of what `read` returns for `tensors`; None unless every rank has memory for its own."""
    sizes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
    loan = Loan(of, sum(map(_aligned, sizes.values())))
    if not all(ranks.gather(loan.memory is not None)):
        return None
    assert loan.memory is not None
    used = 0
    for name, (dtype, shape) in tensors.items():
        room = loan.memory[used : used + sizes[name]]
        loan.copies[name] = room.view(dtype).view(torch.Size(shape)).copy_(read(name))
        used += _aligned(sizes[name])
    await_devices([loan.memory])
    return loan


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
