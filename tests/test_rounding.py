"""Moments in bfloat16 or 8 bits, and weights without masters: every backend against torch's AdamW, whose moments and
weights are rounded here, bit for bit.

The random bits are computed a second time, with NumPy's unsigned integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import combinations
from typing import Any

import minifloats
import numpy as np
import pytest
import torch
from test_kernels import BLOCK, HYPER, SPECIAL, Planes, Reference, elements_of, shifted, some_grads
from torch import Tensor

from hytrain.kernels import choice, torch_backend
from hytrain.kernels.backend import DTYPES, Elements, Into, Operands, seeds
from hytrain.kernels.rounding import key_of, more_random_bits, random_bits, rounded
from hytrain.kernels.scalars import Scalars, scalars
from protocol.messages import STATE_DTYPES
from protocol.rules import AdamWHyper

#: Dtypes of weights, gradients and moments; "lone" are bfloat16 weights without masters.
LONE = [("lone", "bfloat16", state) for state in STATE_DTYPES]
KINDS = pytest.mark.parametrize(
    "kind", [*((*pair, state) for pair in DTYPES for state in ("bfloat16", "float8")), *LONE], ids="-".join
)
NAMES = pytest.mark.parametrize("name", ["native", "torch", pytest.param("gpu", marks=pytest.mark.gpu)])
KEY = key_of("model.layers.0.weight")

Update = Callable[[Planes, Tensor, Scalars, int], None]


def opened(name: str, key: int = KEY) -> Update:
    """An update of elements from `first` on."""
    if name == "gpu":
        return on_device(key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "CHUNK_PER_THREAD", 1024)
        backend = choice.load(name, threads=2)[0]

    def update(planes: Planes, grads: Tensor, step: Scalars, first: int = 0) -> None:
        backend.update(Operands(**arguments(planes, grads, step), elements=elements_from(first, grads.numel(), key)))

    return update


def elements_from(first: int, numel: int, key: int) -> Elements:
    """The last elements of a parameter, in torch's vectors and after them."""
    every = elements_of(numel)
    return every._replace(key=key, first=first, tail=first + every.tail)


def arguments(planes: Planes, grads: Tensor, step: Scalars) -> dict[str, Any]:
    dtypes = {"weights": planes.weights, "grads": grads, "state": planes.exp_avg}
    names = {f"{name}_dtype": name_of(plane.dtype) for name, plane in dtypes.items()}
    return {**planes.addresses(), "grads": grads.data_ptr(), "numel": grads.numel(), **names, "scalars": step}


def name_of(dtype: torch.dtype) -> str:
    return "float8" if dtype is torch.uint8 else str(dtype).removeprefix("torch.")


def on_device(key: int) -> Update:
    from hytrain.kernels import gpu

    def update(planes: Planes, grads: Tensor, step: Scalars, first: int = 0) -> None:
        there = planes.map(lambda plane: shifted(plane, plane.storage_offset() % 16))
        elements = elements_from(first, grads.numel(), key)
        gpu.update(**there.arguments(), grads=shifted(grads, 0), scalars=step, elements=elements)
        planes.copy_from(there)

    return update


def of(master: Tensor, dtype: str, moments: str = "bfloat16") -> Planes:
    planes = Planes.of(master, "bfloat16" if dtype == "lone" else dtype)
    kept = torch.uint8 if moments == "float8" else getattr(torch, moments)
    state = {name: getattr(planes, name).to(kept) for name in ("exp_avg", "exp_avg_sq")}  # of zeros
    if dtype == "lone":
        state["remainder"] = None
    return dataclasses.replace(planes, **state)


def bits_again(first: int, numel: int, step: int, key: int = KEY) -> Tensor:
    before, within = (np.uint32(seed) for seed in seeds(key, step))
    x = (np.uint64(first) + np.arange(numel, dtype=np.uint64)).astype(np.uint32) ^ before
    x = ((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)) ^ within
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return torch.from_numpy((x ^ (x >> np.uint32(16))).astype(np.int64))


class Rounding(Reference):
    """torch's AdamW, whose moments and lone weights are rounded after each step."""

    def __init__(self, planes: Planes) -> None:
        super().__init__(planes.master().float(), HYPER)
        self.is_lone = planes.remainder is None and planes.weights.dtype is torch.bfloat16
        self.state = planes.exp_avg.dtype

    def round(self, step: int, first: int = 0) -> None:
        state = self.optimizer.state[self.parameter]
        random = bits_again(first, self.parameter.numel(), step)
        moments = [(state["exp_avg"], random % 65536), (state["exp_avg_sq"], random // 65536)]
        for index, (values, bits) in enumerate(moments):
            if self.state is torch.bfloat16:
                self._round(values, bits)
            elif self.state is torch.uint8:
                values.copy_(minifloats.rounded(values, bits, index))
        if self.is_lone:
            self._round(self.parameter.detach(), random * 0x9E3779B1 % 2**32 // 65536)

    def _round(self, values: Tensor, bits: Tensor) -> None:
        exact = np.where(values.isnan(), np.uint32(0x7FC00000), values.numpy().view(np.uint32))
        upper = (exact + bits.numpy().astype(np.uint32)) >> np.uint32(16)
        values.copy_(torch.from_numpy((upper << np.uint32(16)).view(np.float32)))


def numbers(planes: Planes, name: str) -> Tensor:
    plane: Tensor = getattr(planes, name)
    return minifloats.as_numbers(plane, name == "exp_avg_sq") if plane.dtype is torch.uint8 else plane


def assert_same(ours: Planes, reference: Planes, case: str = "") -> None:
    for name in ("master", "exp_avg", "exp_avg_sq"):
        a, b = ((p.master() if name == "master" else numbers(p, name)).float() for p in (ours, reference))
        assert torch.equal(a.nan_to_num(7.0, 8.0, 9.0), b.nan_to_num(7.0, 8.0, 9.0)), f"{name} {case}"


@KINDS
@NAMES
def test_matches_torch_with_rounded_state(name: str, kind: tuple[str, str, str]) -> None:
    """The elements' indices pass 2^32 on the way."""
    update, generator = opened(name), torch.Generator().manual_seed(0)
    for numel, first in ((1, 0), (63, 5), (2 * BLOCK + 1003, (1 << 32) - BLOCK)):
        master = torch.randn(numel, generator=generator)
        planes = of(master, kind[0], kind[2])
        reference = Rounding(planes)
        for step in range(1, 9):
            grads = some_grads(numel, generator).to(getattr(torch, kind[1]))
            update(planes, grads, scalars(HYPER, step), first)
            reference.step(grads)
            reference.round(step, first)
            assert_same(planes, reference.planes(), f"of {numel} in step {step}")


@pytest.mark.parametrize(
    "kind",
    [("float32", "float32", "bfloat16"), ("lone", "bfloat16", "bfloat16"), ("float32", "float32", "float8")],
    ids=["float32", "lone", "float8"],
)
@NAMES
def test_special_values(name: str, kind: tuple[str, str, str]) -> None:
    """Infinities stay what they are in bfloat16, and all NaNs become one."""
    update = opened(name)
    master = SPECIAL.repeat_interleave(SPECIAL.numel())
    planes = of(master, kind[0], kind[2])
    reference = Rounding(planes)
    for step, grads in enumerate((SPECIAL.repeat(SPECIAL.numel()), torch.zeros_like(master)), 1):
        grads = grads.to(getattr(torch, kind[1]))
        update(planes, grads, scalars(HYPER, step), 0)
        reference.step(grads)
        reference.round(step)
        assert_same(planes, reference.planes(), f"step {step}")
        assert step > 1 or planes.exp_avg.isinf().any() or kind[2] == "float8"
    if kind[2] == "float8":
        assert (planes.exp_avg == 0x7F).any() and not (planes.exp_avg == 0xFF).any()
        return
    for plane in (planes.exp_avg, *([planes.weights] if kind[0] == "lone" else [])):
        assert set(plane.view(torch.int16)[plane.isnan()].tolist()) == {0x7FC0}


@KINDS
@NAMES
def test_tiles_equal_the_whole(name: str, kind: tuple[str, str, str]) -> None:
    update, generator = opened(name), torch.Generator().manual_seed(3)
    numel = BLOCK + 777
    master, grads = torch.randn(numel, generator=generator), some_grads(numel, generator).to(getattr(torch, kind[1]))
    whole, tiled = (of(master, kind[0], kind[2]) for _ in range(2))
    update(whole, grads, scalars(HYPER, 1), 11)
    for begin, end in ((0, 336), (336, BLOCK + 8), (BLOCK + 8, numel)):
        tile = tiled.map(lambda plane, begin=begin, end=end: plane[begin:end])  # type: ignore[misc]
        update(tile, grads[begin:end], scalars(HYPER, 1), 11 + begin)
    for plane, other in zip(vars(tiled).values(), vars(whole).values(), strict=True):
        assert plane is other or torch.equal(plane, other)


@pytest.mark.parametrize("name", ["native", "torch"])
@KINDS
def test_into_other_planes_as_in_place(name: str, kind: tuple[str, str, str]) -> None:
    backend, generator = choice.load(name, threads=3)[0], torch.Generator().manual_seed(10)
    for numel in (63, 2 * BLOCK + 77):
        grads = some_grads(numel, generator).to(getattr(torch, kind[1]))
        before = of(torch.randn(numel, generator=generator), kind[0], kind[2])
        in_place, into = before.map(Tensor.clone), before.map(torch.zeros_like)
        opened(name)(in_place, grads, scalars(HYPER, 3, 0.5), 0)
        which = {"into": Into(**into.addresses()), "elements": elements_from(0, numel, KEY)}
        backend.update(Operands(**arguments(before, grads, scalars(HYPER, 3, 0.5)), **which))
        for plane, other in zip(vars(into).values(), vars(in_place).values(), strict=True):
            assert plane is other or torch.equal(plane, other)


def test_the_second_moment_of_steady_gradients_gets_there() -> None:
    """Rounded to nearest it stands still, a third below."""
    hyper = AdamWHyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    update, numel = opened("native"), 4096
    planes, nearest = of(torch.zeros(numel), "float32"), torch.zeros((), dtype=torch.bfloat16)
    grads = torch.ones(numel)
    for step in range(1, 5001):
        update(planes, grads, scalars(hyper, step), 0)
        nearest = (nearest.float() * hyper.beta2 + (1 - hyper.beta2)).bfloat16()
    found = planes.exp_avg_sq.double()
    assert found.mean().item() == pytest.approx(1 - hyper.beta2**5000, rel=2e-3)
    assert found.std().item() < 0.04
    assert nearest.item() < 0.8


def test_a_weight_without_a_master_gets_where_its_steps_lead() -> None:
    """Each step is 1/2560 of it. Rounded to nearest it stands still."""
    hyper = AdamWHyper(lr=1 / 2560, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0)
    update, numel = opened("native"), 4096
    planes, nearest = of(torch.ones(numel), "lone", "float32"), torch.ones((), dtype=torch.bfloat16)
    grads = torch.full((numel,), -1.0, dtype=torch.bfloat16)
    for step in range(1, 1025):
        update(planes, grads, scalars(hyper, step), 0)
        nearest = (nearest.float() + hyper.lr).bfloat16()
    assert planes.weights.double().mean().item() == pytest.approx(1.4, abs=3e-3) and nearest.item() == 1.0
    assert planes.weights.double().std().item() < 0.1


def test_the_expectation_is_the_exact_value() -> None:
    """Of each number, the mean over all that may be drawn is the number itself."""
    everything = torch.arange(1 << 16)
    for exact in (1.0, -1.3, 3.1e-39, -7.7e37, 1 + 2**-23, 2 - 2**-23, 1 + 2**-8):
        value = torch.full((1 << 16,), exact)
        assert rounded(value, everything).double().mean().item() == value[0].item()


def correlation(x: Tensor, y: Tensor) -> float:
    """In standard deviations of the mean of independent numbers."""
    return float((x * y).mean() * 12 * len(x) ** 0.5)


def test_random_bits_are_uniform_and_unrelated() -> None:
    """Between those of moments and weight, neighbours, steps and parameters, within 4.5 standard deviations."""
    numel = 1 << 18

    def parts(key: int, step: int) -> list[Tensor]:
        random = random_bits(Elements(key), numel, step)
        bits = (random & 0xFFFF, random >> 16, more_random_bits(random))
        return [part.double() / 65536 - 0.5 for part in bits]

    for step in (1, 2, 1000):
        now, later, other = parts(KEY, step), parts(KEY, step + 1), parts(KEY + 1, step)
        pairs = [*combinations(now, 2), *zip(now, later), *zip(now, other), (now[0][1:], later[0][:-1])]
        pairs += [(part[lag:], part[:-lag]) for part in now for lag in (1, 2, 64, 4096)]
        assert max(abs(correlation(x, y)) for x, y in pairs) < 4.5
        for half in now:
            counts = torch.histc(half, 256, -0.5, 0.5)
            chi = float(((counts - numel / 256) ** 2).sum() / (numel / 256))
            assert 160 < chi < 370, "of 255 degrees of freedom"
            assert abs(float(half.mean())) * (12 * numel) ** 0.5 < 4.5


def test_the_bits_are_those_of_the_format() -> None:
    """Changed bits would change what a resumed training computes."""
    assert key_of("weight") == 0x07CD5541 and seeds(1, 2) == (2414991258, 4190724030)
    assert random_bits(Elements(1, 3), 2, 2).tolist() == bits_again(3, 2, 2, key=1).tolist() == [1092916004, 3276572534]


def bits(planes: Planes) -> dict[str, Any]:
    seen = vars(planes.map(lambda plane: plane.view(torch.uint8)))
    return {name: value.tolist() for name, value in seen.items() if value is not None}


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize(
    ("dtype", "moments"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16"),
     ("lone", "bfloat16"), ("bfloat16", "float8")],
)  # fmt: skip
def test_segments_of_one_launch_have_the_bits_of_launches_of_their_own(dtype: str, moments: str, offset: int) -> None:
    """The segments of three layers. Gradients come in six places, weights move, one update is on another stream, and
    one skipped by its verdict. In one step the layers are in another order, and in one without the first of them.
    """
    from hytrain.kernels import gpu

    generator = torch.Generator().manual_seed(3)
    numels = [5, 1024, 70_000, 3 * 1024, 1]
    each = [of(torch.randn(numel, generator=generator), dtype, moments) for numel in numels]
    together, alone = ([planes.map(lambda plane: shifted(plane, offset)) for planes in each] for _ in range(2))
    elements = [elements_from(100 * i, numel, KEY + i) for i, numel in enumerate(numels)]
    layers = [range(2), range(2, 4), range(4, 5)]
    rows = [rows_of([together[i] for i in of], [elements[i] for i in of]) for of in layers]
    like = [planes.weights for planes in together]
    places = [[torch.empty_like(weights) for weights in like] for _ in range(6)]
    other = torch.cuda.Stream()
    verdicts = {1: 0.5, 2: -1.0, 4: None}
    for step, place in enumerate([0, 1, 0, 1, 1, 0, 2, 3, 4, 5, 0, 1], 1):
        for mine in places[place]:
            mine.copy_(some_grads(mine.numel(), generator))
        if step == 5:
            for planes in together:
                planes.weights.data = planes.weights.clone()
        factor = verdicts.get(step, 1.0)
        verdict = None if factor is None else torch.tensor(factor, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(other if step == 6 else torch.cuda.current_stream()):
            order = {8: [2, 0, 1], 9: [1, 2]}.get(step, [0, 1, 2])
            grads = [places[place][i] for layer in order for i in layers[layer]]
            gpu.update_rows([rows[layer] for layer in order], grads, scalars(HYPER, step), verdict)
        torch.cuda.synchronize()
        updated = sorted(i for layer in order for i in layers[layer])
        for planes, mine, of_parameter in [(alone[i], places[place][i], elements[i]) for i in updated]:
            gpu.update(
                **planes.arguments(),
                grads=mine,
                scalars=scalars(HYPER, step),
                verdict=verdict,
                elements=of_parameter,
            )
        for planes, expected in zip(together, alone, strict=True):
            assert bits(planes) == bits(expected)


def rows_of(each: list[Planes], elements: list[Elements]) -> Any:
    from hytrain.kernels import gpu

    return gpu.Rows(
        [planes.weights for planes in each],
        [planes.remainder for planes in each],
        [(planes.exp_avg, planes.exp_avg_sq) for planes in each],
        elements,
    )


@pytest.mark.gpu
def test_gradients_that_alternate_between_two_places_have_two_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    from hytrain.kernels import gpu

    made = list[Tensor]()
    on_device = gpu.on_device

    def noted(tensor: Tensor, device: torch.device) -> Tensor:
        made.append(tensor)
        return on_device(tensor, device)

    monkeypatch.setattr(gpu, "on_device", noted)
    planes = of(torch.randn(64), "bfloat16", "float32").map(Tensor.cuda)
    rows = rows_of([planes], [elements_from(0, 64, KEY)])
    places = [torch.zeros_like(planes.weights) for _ in range(2)]
    for step in range(1, 9):
        gpu.update_rows([rows], [places[step % 2]], scalars(HYPER, step))
    assert [tensor.dim() for tensor in made].count(2) == 2


@pytest.mark.gpu
def test_gradients_of_one_launch_have_the_weights_lengths() -> None:
    from hytrain.kernels import gpu

    rows = rows_of([of(torch.randn(64), "bfloat16", "float32").map(Tensor.cuda)], [elements_from(0, 64, KEY)])
    with pytest.raises(ValueError, match="of one length"):
        gpu.update_rows([rows], [torch.zeros(63, dtype=torch.bfloat16, device="cuda")], scalars(HYPER, 1))
