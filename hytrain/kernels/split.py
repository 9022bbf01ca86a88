"""The fp32 master of 16-bit weights, split into weights and `remainder`, in torch.

bf16 is the upper half of fp32, so weights and an int16 remainder are the master. fp16 has another exponent: the
remainder is the master itself, the weights are its nearest fp16 number, half to even.

The code that fills, saves or checks planes uses this; the kernels contain the same arithmetic. The remainder is the
difference of the bit patterns, so bf16 weights are the master with its magnitude rounded half up. Half to even, as in
`.bfloat16()`, would need one value more than 16 bits have. The two differ only in exact ties.

    bf16   master 0x3f80_c000  ->  weights 0x3f81, remainder 0xc000 (-0x4000)  ->  0x3f81_0000 - 0x4000
    fp16   master 0x3f80_c000  ->  weights 0x3c06, remainder 0x3f80_c000
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_NAN = 0x7FC00000
_HALF_NAN = 0x7E00

#: The dtype of `remainder` by the dtype of the weights; float32 weights have none.
REMAINDERS: Final = {torch.bfloat16: torch.int16, torch.float16: torch.float32}


def canonical(values: Tensor) -> Tensor:
    """The bits of float32 `values` as int32, with the same pattern for all NaNs."""
    _expect(values, torch.float32)
    return torch.where(values.isnan(), _NAN, values.view(torch.int32))


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 tensor as bfloat16 weights and int16 remainder of its shape. All NaNs become the same NaN."""
    bits = canonical(master)
    # A carry cannot reach the sign: the largest remaining patterns are infinity and this NaN.
    weights = (bits + 0x8000) >> 16
    remainder = bits - (weights << 16)
    return weights.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join(weights: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master that was split into `weights` and `remainder`."""
    _expect(weights, torch.bfloat16)
    _expect(remainder, torch.int16)
    return ((weights.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def _expect(tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"expected {dtype}, got {tensor.dtype}")


def nearest_half(master: Tensor) -> Tensor:
    """The float16 weights of a float32 master. All NaNs become the same NaN."""
    _expect(master, torch.float32)
    bits = master.half().view(torch.int16)
    return bits.masked_fill_(master.isnan(), _HALF_NAN).view(torch.float16)


def clear_remainder(remainder: Tensor, weights: Tensor) -> None:
    """Make the weights the master. No device copies into `remainder`, which may be pinned in several pieces."""
    if remainder.dtype == torch.float32:
        remainder.copy_(weights.to(remainder.device))
    else:
        remainder.zero_()


def fit_remainder(remainder: Tensor, weights: Tensor) -> None:
    """Clear remainders that do not fit these weights.

    With bfloat16 these are a negative one of a zero, and any of an infinity or a NaN; with float16, masters of other
    weights.
    """
    weights = weights.to(remainder.device)
    bits = weights.view(torch.int16)
    if remainder.dtype == torch.float32:
        fit = nearest_half(remainder).view(torch.int16) == bits
        remainder.copy_(torch.where(fit, remainder, weights))
        return
    zero, special = (bits & 0x7FFF) == 0, (bits & 0x7F80) == 0x7F80
    remainder.masked_fill_((zero & (remainder < 0)) | special, 0)
