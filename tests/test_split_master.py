"""The split master: bf16 weights and an int16 remainder hold an fp32 value exactly, whatever its bits are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hytrain.kernels.split import clear_remainder, fit_remainder, join, nearest_half, split

NAN = 0x7FC00000

# name -> (master's bits, weights' bits, remainder)
EXAMPLES = {
    "zero": (0x00000000, 0x0000, 0),
    "negative zero": (0x80000000, 0x8000, 0),
    "one": (0x3F800000, 0x3F80, 0),
    "just below a tie": (0x3F807FFF, 0x3F80, 0x7FFF),
    "a tie goes up from an even number": (0x3F808000, 0x3F81, -0x8000),
    "a tie goes up from an odd number": (0x3F818000, 0x3F82, -0x8000),
    "a negative tie goes away from zero": (0xBF808000, 0xBF81, -0x8000),
    "just above a tie": (0x3F808001, 0x3F81, -0x7FFF),
    "a carry into the exponent": (0x3FFFFFFF, 0x4000, -1),
    "least subnormal": (0x00000001, 0x0000, 1),
    "greatest subnormal": (0x007FFFFF, 0x0080, -1),
    "negative subnormal tie": (0x80008000, 0x8001, -0x8000),
    "greatest number, whose weight is infinite": (0x7F7FFFFF, 0x7F80, -1),
    "least number": (0xFF7FFFFF, 0xFF80, -1),
    "infinity": (0x7F800000, 0x7F80, 0),
    "negative infinity": (0xFF800000, 0xFF80, 0),
    "nan": (0x7FC00000, 0x7FC0, 0),
    "a signalling nan": (0x7F800001, 0x7FC0, 0),
    "a nan whose carry would reach the sign": (0x7FFFFFFF, 0x7FC0, 0),
    "a nan whose carry would wrap around": (0xFFFFFFFF, 0x7FC0, 0),
}


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


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    master, weight, remainder = EXAMPLES[name]
    weights, remainders = split(from_bits(torch.tensor([master])))
    assert (to_bits(weights).item(), remainders.item()) == (weight, remainder)
    assert to_bits(join(weights, remainders)).item() == canonical(torch.tensor(master)).item()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_any_pattern(patterns: list[int]) -> None:
    check(torch.tensor(patterns))


@pytest.mark.parametrize("stride", [0x7FFF, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_all_patterns(stride: int) -> None:
    chunk = 1 << 22
    for begin in range(0, 1 << 32, chunk * stride):
        check(torch.arange(begin, min(begin + chunk * stride, 1 << 32), stride))


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
