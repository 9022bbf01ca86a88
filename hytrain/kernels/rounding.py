"""Stochastic rounding to bfloat16, in torch: of moments, and of weights that are their own masters.

A number lies between two bfloat16 numbers. The upper one is taken with the probability that makes the expectation
exact: sixteen random bits are added below the bits that are kept, and the sum is cut off. Rounding to nearest would
lose changes of less than half a place: at beta2 = 0.999 the second moment of steady gradients would stand still, and
so would weights whose step is less than 1/512 of them.

The random bits are a function of the parameter's name, the step, and the element's index in the parameter. So they are
the same for each owner and placement, for any number of threads, and after a resume. Name and step are hashed once to
two seeds (`backend.seeds`). The index is mixed with them by two multiplications, as more would make the CPU's update
wait for its processor instead of its memory. The mixing is that of lowbias32 (C. Wellons, "Prospecting for hash
functions", 2018), with the second seed inside. update.cpp and triton_update.py contain the same.

    mixed(index; seeds(name, step))  ─▶ 32 bits ─┬─ lower half ─▶ the rule's first moment
                                                 ├─ upper half ─▶ its second one, if it has two
                                 └─ · odd, upper half ─▶ weights
"""

from __future__ import annotations

import zlib
from typing import Final

import torch
from torch import Tensor

from hytrain.kernels.backend import Elements, seeds
from hytrain.kernels.split import canonical

_MASK: Final = 0xFFFFFFFF


def key_of(name: str) -> int:
    """A parameter's key, from its name: 32 bits."""
    return zlib.crc32(name.encode())


def random_bits(elements: Elements, numel: int, step: int) -> Tensor:
    """32 random bits for each of `numel` consecutive elements: int64, shape (numel,)."""
    before, within = seeds(elements.key, step)
    x = ((elements.first + torch.arange(numel, dtype=torch.int64, device="cpu")) & _MASK) ^ before
    x = _times(x ^ (x >> 16), 0x7FEB352D) ^ within
    x = _times(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)


def more_random_bits(random: Tensor) -> Tensor:
    """Sixteen bits for an element's weight, of its 32 `random` bits. Each half of those says nothing about them."""
    return _times(random, 0x9E3779B1) >> 16


def _times(x: Tensor, factor: int) -> Tensor:
    """The product modulo 2^32. In halves, since that of all 64 bits would have a sign."""
    return ((((x >> 16) * factor & 0xFFFF) << 16) + (x & 0xFFFF) * factor) & _MASK


def rounded(exact: Tensor, random: Tensor) -> Tensor:
    """float32 `exact`, rounded with sixteen `random` bits for each element: bfloat16. All NaNs become the same NaN.

    Of an infinity and of that NaN, the bits that are cut off are zeros, so nothing is carried.
    """
    return ((canonical(exact) + random.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)
