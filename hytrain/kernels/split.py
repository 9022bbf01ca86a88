"""The split master in torch: fp32 <-> bf16 weights and the int16 remainder that makes them exact again.

For whoever fills the planes, saves them or checks them; the kernels have the same arithmetic inside. The
remainder is the difference of the bit patterns, so the weights are the master with its magnitude rounded
half up. (Half to even, as `.bfloat16()` rounds, needs one remainder more than 16 bits can tell apart; the two
differ on exact ties alone.)

    master 0x3f80_c000  ->  weights 0x3f81, remainder 0xc000 (-0x4000)  ->  0x3f81_0000 - 0x4000
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0x7FC00000


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 tensor as bfloat16 weights and int16 remainder of its shape. All NaNs become one."""
    _expect(master, torch.float32)
    bits = torch.where(master.isnan(), _NAN, master.view(torch.int32))
    # A NaN's carry could run into the sign; the largest pattern left, that of infinity, has room.
    weights = (bits + 0x8000) >> 16
    remainder = bits - (weights << 16)
    return weights.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join(weights: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of which `weights` and `remainder` are the split."""
    _expect(weights, torch.bfloat16)
    _expect(remainder, torch.int16)
    return ((weights.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def _expect(tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"expected {dtype}, got {tensor.dtype}")


def fit_remainder(remainder: Tensor, weights: Tensor) -> None:
    """Clear remainders that make no master with these weights: below a zero, or beside an infinity or a NaN."""
    bits = weights.view(torch.int16)
    zero, special = (bits & 0x7FFF) == 0, (bits & 0x7F80) == 0x7F80
    unfit = (zero.to(remainder.device) & (remainder < 0)) | special.to(remainder.device)
    remainder.masked_fill_(unfit, 0)
