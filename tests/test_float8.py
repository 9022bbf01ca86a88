"""Moments as 8-bit floats: what each code stands for, and how numbers are rounded to it.

test_rounding.py and test_rules.py compare each backend's updates with those of minifloats.py.
"""

from __future__ import annotations

import pytest
import torch
from minifloats import EXPONENTS, LARGEST, as_numbers
from test_rounding import of, opened
from torch import Tensor

from hytrain.kernels import float8
from hytrain.kernels.scalars import scalars
from protocol.rules import MOMENT_PLANES, MOMENTS, AdamWHyper

EVERYTHING = torch.arange(1 << 16)
both = pytest.mark.parametrize("moment", [0, 1], ids=["first", "second"])


def codes_of(moment: int) -> Tensor:
    """All codes of numbers, the least number first."""
    negative = [code + 128 for code in reversed(range(127))] if moment == 0 else []
    return torch.tensor([*negative, *range(127 if moment == 0 else 255)], dtype=torch.uint8)


@both
def test_every_code_has_a_number(moment: int) -> None:
    codes = codes_of(moment)
    numbers = float8.widened(codes, moment)
    assert numbers.tolist() == as_numbers(codes, moment).tolist()
    assert (numbers.diff() >= 0).all() and len(set(numbers.tolist())) == len(codes) - (moment == 0)  # two zeros
    assert numbers.max().item() == pytest.approx(LARGEST[moment], rel=1e-6)
    assert numbers[numbers > 0].min().item() == 2.0 ** (EXPONENTS[moment] - 2)
    assert float8.widened(torch.tensor([127, 255][moment], dtype=torch.uint8), moment).isnan()


@both
def test_what_is_saved_is_read_as_the_same_codes(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in several pieces."""
    monkeypatch.setattr(float8, "_CHUNK", 100)
    plane = ("exp_avg", "exp_avg_sq")[moment]
    codes = torch.cat([codes_of(moment), torch.tensor([[127, 255][moment]], dtype=torch.uint8)])
    saved = float8.from_plane(codes, plane)
    assert saved.dtype is torch.bfloat16
    assert float8.to_plane(saved, plane).tolist() == codes.tolist()
    assert float8.to_plane(saved.float(), plane).tolist() == codes.tolist()
    numbers = saved[:-1]  # without NaN
    assert float8.are_numbers(numbers, plane)
    assert not float8.are_numbers(torch.cat([numbers, numbers[-1:] * 0.97]), plane)


def test_every_plane_of_moments_has_a_format() -> None:
    for moments in MOMENTS.values():
        for index, plane in enumerate(moments):
            ones = torch.ones(1)
            there = float8.to_plane(ones, plane)
            assert float8.widened(there, index).item() == pytest.approx(1.0)
    assert set(MOMENT_PLANES) == set(float8._INDEX)


@both
def test_the_expectation_is_the_exact_value(moment: int) -> None:
    """Of each number, the mean over all that may be drawn is the number itself: also below the constant."""
    for exact in (1.0, 1.3, 0.999, 5.5, 2.0**-28, 2.0**-31, 3.3e-9, 0.0):
        value = torch.full((1 << 16,), exact)
        found = float8.widened(float8.rounded(value, EVERYTHING, moment), moment).double()
        assert found.mean().item() == pytest.approx(exact, rel=2e-6, abs=2.0 ** (EXPONENTS[moment] - 18))
        assert len(set(found.tolist())) <= 2


@both
def test_numbers_beyond_the_largest_become_it_and_others_nan(moment: int) -> None:
    values = torch.tensor([13.0, 200.0, 3e38, torch.inf, -torch.inf, torch.nan])
    for random in (0, 65535):
        codes = float8.rounded(values, torch.full((6,), random), moment).tolist()
        largest, first = (126, 126) if moment == 0 else (254, codes[0])
        assert codes == [first, largest, largest, *[largest + 1] * 3]
    if moment == 0:
        assert float8.rounded(-values[:3], torch.zeros(3, dtype=torch.int64), 0).tolist() == [254] * 3


def test_the_nearest_is_saved() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5000, generator=generator) * torch.exp2(torch.randint(-30, 4, (5000,), generator=generator))
    for plane, moment, given in (("exp_avg", 0, values), ("exp_avg_sq", 1, values**2)):
        numbers = float8.widened(codes_of(moment), moment)
        given = given.clamp(numbers.min() if moment == 0 else numbers[1], numbers.max())
        found = float8.widened(float8.to_plane(given, plane), moment)
        least = (numbers - given[:, None]).abs().min(dim=1).values
        assert torch.allclose((found - given).abs(), least, rtol=1e-4, atol=2.0 ** (EXPONENTS[moment] - 24))


def test_the_second_moment_of_steady_gradients_gets_there() -> None:
    """Rounded to nearest it would stand still long before."""
    hyper = AdamWHyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    update, numel = opened("native"), 4096
    planes, grads = of(torch.zeros(numel), "float32", "float8"), torch.ones(numel)
    nearest = torch.zeros(1, dtype=torch.uint8)
    for step in range(1, 5001):
        update(planes, grads, scalars(hyper, step), 0)
        kept = float8.widened(nearest, 1) * hyper.beta2 + (1 - hyper.beta2)
        nearest = float8.to_plane(kept, "exp_avg_sq")
    found = float8.widened(planes.exp_avg_sq, 1).double()
    assert found.mean().item() == pytest.approx(1 - hyper.beta2**5000, rel=2e-2)
    assert found.std().item() < 0.4
    assert float8.widened(nearest, 1).item() < 0.1


def test_a_second_moment_stays_above_zero() -> None:
    """Or what is left of the first one would be divided by eps alone."""
    assert float8.rounded(torch.tensor([1e-30, 2.0**-60, 0.0]), torch.zeros(3, dtype=torch.int64), 1).tolist() == [
        1,
        1,
        0,
    ]
