"""The split master: bf16 weights and an int16 remainder hold an fp32 value exactly, whatever its bits are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hytrain.kernels.split import clear_remainder, fit_remainder, join, nearest_half, split

NAN = 0x7FC00000


def from_bits(bits: Tensor) -> Tensor:
    """float32 with the lower 32 bits of an int64 tensor."""
    return bits.to(torch.int32).view(torch.float32)


def to_bits(values: Tensor) -> Tensor:
    """The bit patterns of float32, bfloat16 or int16, as non-negative int64."""
    width = 8 * values.itemsize
    signed = values.view({16: torch.int16, 32: torch.int32}[width])
    return signed.to(torch.int64) & ((1 << width) - 1)


def canonical(bits: Tensor) -> Tensor:
    return torch.where((bits & 0x7FFFFFFF) > 0x7F800000, NAN, bits)


def check(bits: Tensor) -> None:
    weights, remainder = split(from_bits(bits))
    expected = canonical(bits)
    assert torch.equal(to_bits(join(weights, remainder)), expected), "not exact"
    assert torch.equal(to_bits(weights), (expected + 0x8000) >> 16), "not rounded half up"


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_any_pattern(patterns: list[int]) -> None:
    check(torch.tensor(patterns))


def test_patterns_around_every_weight() -> None:
    """For each of the 65536 upper halves: the lower halves at both ends and around the tie."""
    upper = torch.arange(1 << 16) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        check(upper | lower)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_patterns() -> None:
    chunk = 1 << 22
    for begin in range(0, 1 << 32, chunk):
        check(torch.arange(begin, begin + chunk))


def test_masters_of_float16_fit_their_weights_or_are_replaced() -> None:
    master = torch.tensor([1.0001, 1e-9, -1e-9, 70000.0, torch.nan, 2.0, -0.0])
    weights = nearest_half(master)
    assert weights.tolist()[:4] == [1.0, 0.0, -0.0, torch.inf] and to_bits(weights)[4] == 0x7E00
    kept = master.clone()
    fit_remainder(kept, weights)
    assert torch.equal(to_bits(kept), to_bits(master))
    nans = from_bits(torch.tensor([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF]))
    assert to_bits(nearest_half(nans)).tolist() == [0x7E00] * 4
    weights[[0, 1, 5]] = torch.tensor([1.5, -0.0, 3.0]).half()
    fit_remainder(kept, weights)
    assert kept[[0, 1, 5]].tolist() == [1.5, 0.0, 3.0] and to_bits(kept)[1] == 0x80000000
    assert torch.equal(to_bits(kept)[[2, 3]], to_bits(master)[[2, 3]])
    clear_remainder(kept, weights)
    assert torch.equal(to_bits(kept), to_bits(weights.float()))


def test_remainders_that_make_no_master_with_bfloat16_are_cleared() -> None:
    """Below a zero of either sign, and beside what is not finite; all others stay, though they are of other weights."""
    weights = torch.tensor([0.0, -0.0, 0.0, 1.0, torch.inf, torch.nan], dtype=torch.bfloat16)
    remainder = torch.tensor([-1, -7, 7, -7, 7, -7], dtype=torch.int16)
    fit_remainder(remainder, weights)
    assert remainder.tolist() == [0, 0, 7, -7, 0, 0]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected torch.float32, got torch.float64"):
        split(torch.ones(2, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"expected torch.int16, got torch.int32"):
        join(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int32))
