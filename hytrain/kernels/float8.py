"""Moments as 8-bit floats, in torch. The torch backend computes with them; saving and loading convert them.

A code is the upper part of a float32, so reading and writing take a few operations per element and no element needs
another one: there are no blocks and no scales. A constant is added to the magnitude first, and its bits are taken off
again. So zero has the code zero, and below the constant the codes are evenly spaced.

    x ─▶ |x| + 2^-28 ─▶ its exponent, and two bits of its mantissa, rounded stochastically ─▶ less those of 2^-28

    moment   plane                       sign    constant   least number above 0   largest number
    first    exp_avg, momentum_buffer    1 bit   2^-28      2^-30                  12
    second   exp_avg_sq                  none    2^-56      2^-58                  192

Two mantissa bits are steps of 14 to 25 %. Numbers beyond the largest one become it. All that is not finite becomes NaN,
which has the last code. A second moment above zero stays above zero, as the update is divided by its root.

The random bits are those of rounding.py, and the expectation is the exact value between the least and the largest
number. update.cpp and triton_update.py contain the same.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

#: Of a float32's bits, all but two of the mantissa's are cut off.
_CUT: Final = 21
#: So many elements are converted at a time, as that takes several times their memory.
_CHUNK: Final = 1 << 22
#: The random bits that round to nearest.
_NEAREST: Final = 1 << 15


class Format(NamedTuple):
    """`added`: the bits of what is added to the magnitude. `largest`: the largest number's code. NaN's is the next."""

    added: int
    largest: int
    has_sign: bool


#: By the moment's index in its rule.
FORMATS: Final = (Format((127 - 28) << 23, 0x7E, True), Format((127 - 56) << 23, 0xFE, False))
#: A moment's index by its plane.
_INDEX: Final = {"exp_avg": 0, "momentum_buffer": 0, "exp_avg_sq": 1}


def widened(codes: Tensor, moment: int) -> Tensor:
    """The float32 numbers of uint8 `codes`, in their shape."""
    added, largest, has_sign = FORMATS[moment]
    code = codes.to(torch.int32)
    magnitude = code & 0x7F if has_sign else code
    constant = torch.full_like(magnitude, added).view(torch.float32)
    exact = (magnitude * (1 << _CUT) + added).view(torch.float32) - constant
    return torch.where(code == magnitude, exact, -exact).masked_fill_(magnitude > largest, torch.nan)


def rounded(exact: Tensor, random: Tensor, moment: int) -> Tensor:
    """The uint8 codes of float32 numbers, rounded with sixteen `random` bits for each element.

    These are the upper ones of the 21 that are added. The lower five are their mean, or sums would be cut off too low.
    """
    added, largest, has_sign = FORMATS[moment]
    magnitude = exact.abs()
    constant = torch.full_like(magnitude, added, dtype=torch.int32).view(torch.float32)
    kept = (magnitude + constant).view(torch.int32) - added
    code = ((kept + random.to(torch.int32) * 32 + 16) >> _CUT).clamp_(max=largest)
    if has_sign:
        code += torch.signbit(exact).to(torch.int32) * 0x80
    else:
        code = torch.where(magnitude > 0, code.clamp(min=1), code)
    return code.masked_fill_(~exact.isfinite(), largest + 1).to(torch.uint8)


def to_plane(values: Tensor, plane: str) -> Tensor:
    """What a plane of moments has of `values`, rounded to nearest: uint8. Both have shape (numel,), in host memory."""
    codes = torch.empty(values.shape, dtype=torch.uint8, device="cpu")
    for into, part in zip(codes.split(_CHUNK), values.split(_CHUNK), strict=True):
        exact = part.float()
        into.copy_(rounded(exact, torch.full_like(exact, _NEAREST, dtype=torch.int32), _INDEX[plane]))
    return codes


def from_plane(codes: Tensor, plane: str) -> Tensor:
    """The numbers of a plane's codes, from which `to_plane` makes the same codes: bfloat16, shape (numel,).

    They are in host memory. A GPU that is full of state has no room for them.
    """
    numbers = torch.empty(codes.shape, dtype=torch.bfloat16, device="cpu")
    for into, part in zip(numbers.split(_CHUNK), codes.split(_CHUNK), strict=True):
        into.copy_(widened(part.cpu(), _INDEX[plane]))
    return numbers


def are_numbers(values: Tensor, plane: str) -> bool:
    """Whether nothing of `values`, of shape (numel,) in host memory, is lost in this plane."""
    return all(torch.equal(from_plane(to_plane(part, plane), plane), part) for part in values.split(_CHUNK))
