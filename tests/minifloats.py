"""The 8-bit floats of moments, computed a second time: in NumPy's float64, with frexp in place of bit patterns."""

from __future__ import annotations

from math import ldexp, nan
from typing import Final

import numpy as np
import torch
from torch import Tensor

#: By the moment's index: the power of two that is added, and the largest sum that has a code.
EXPONENTS: Final = (-28, -56)
LARGEST: Final = (12.0, 192.0)


def as_numbers(codes: Tensor, moment: int) -> Tensor:
    """float32 numbers of uint8 codes, shape (numel,)."""
    found = []
    for code in codes.tolist():
        sign, code = (-1.0, code - 128) if moment == 0 and code >= 128 else (1.0, code)
        total = ldexp(1 + code % 4 / 4, EXPONENTS[moment] + code // 4)
        number = np.float32(total) - np.float32(ldexp(1, EXPONENTS[moment]))
        found.append(nan if total > LARGEST[moment] else sign * float(number))
    return torch.tensor(found)


def rounded(values: Tensor, random: Tensor, moment: int) -> Tensor:
    """float32 `values` as the numbers that their codes stand for. `random` has sixteen bits for each."""
    exact, added = values.numpy().astype(np.float32), np.float32(ldexp(1, EXPONENTS[moment]))
    total = (np.abs(exact) + added).astype(np.float64)
    finite = np.isfinite(exact)
    exponent = np.frexp(np.where(finite, total, 1.0))[1]
    step = np.exp2(exponent - 3.0)  # the last of three binary digits
    below = np.floor(np.where(finite, total, 1.0) / step) * step
    chance = (total - below) / step + (random.numpy() + 0.5) / 65536
    kept = np.minimum(np.where(chance >= 1, below + step, below), LARGEST[moment])
    if moment == 1:
        kept = np.where(exact != 0, np.maximum(kept, 1.25 * float(added)), kept)
    number = np.copysign(kept.astype(np.float32) - added, exact if moment == 0 else 1.0)
    return torch.from_numpy(np.where(finite, number, np.float32(nan)).astype(np.float32))
