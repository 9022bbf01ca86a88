"""The rules besides AdamW against torch.optim.SGD and a Lion in plain torch, bit for bit, on every backend.

Each case trains fp32 masters next to the reference, which has the rounding of bf16 moments and of weights without
masters added after each step. The GPU's kernel takes part like another backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import minifloats
import pytest
import torch
from lion import Lion
from test_kernels import BLOCK, SPECIAL, shifted, some_grads
from test_rounding import bits_again, name_of
from torch import Tensor

from hytrain.kernels import choice, float8
from hytrain.kernels.backend import DTYPES, Elements, Into, Operands
from hytrain.kernels.scalars import TYPICAL, Scalars, scalars
from hytrain.kernels.split import join, nearest_half, split
from hytrain.kernels.torch_backend import vectors
from protocol.rules import MOMENTS, ON_DEVICE, Hyper, LionHyper, SGDHyper

KEY = 0xC0FFEE11


def sgd(momentum: float = 0.9, **changed: Any) -> SGDHyper:
    usual = {"lr": 0.0123, "dampening": 0.0, "nesterov": False, "weight_decay": 0.1}
    return SGDHyper(momentum=momentum, **(usual | changed))


LION = LionHyper(lr=0.0123, beta1=0.9, beta2=0.99, weight_decay=0.1)
HYPERS: dict[str, Hyper] = {
    "sgd": sgd(0.0),
    "sgd without decay": sgd(0.0, weight_decay=0.0),
    "sgd maximizes": sgd(0.0, maximize=True),
    "momentum": sgd(),
    "momentum without decay": sgd(weight_decay=0.0),
    "dampened": sgd(dampening=0.3, maximize=True),
    "wholly dampened": sgd(dampening=1.0),
    "nesterov": sgd(nesterov=True),
    "lion": LION,
    "lion of other betas": replace(LION, beta1=0.3, beta2=0.5, maximize=True),
    "lion without momentum": replace(LION, beta1=0.0, beta2=0.0, weight_decay=0.0),
}
EVERY_RULE = [HYPERS[name] for name in ("sgd", "momentum", "lion")]
#: (weights, gradients); "lone" are bfloat16 weights without masters.
KINDS = (*DTYPES, ("lone", "bfloat16"))
NAMES = pytest.mark.parametrize("name", ["native", "torch", pytest.param("gpu", marks=pytest.mark.gpu)])
of_kind = pytest.mark.parametrize("kind", KINDS, ids="-".join)
of_state = pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.uint8], ids=name_of)
of_rule = pytest.mark.parametrize("hyper", EVERY_RULE, ids=lambda hyper: hyper.rule)


@dataclass
class Planes:
    """One segment: weights, remainder or None, and the rule's moments, [numel] each."""

    weights: Tensor
    remainder: Tensor | None
    moments: list[Tensor]

    @classmethod
    def of(cls, master: Tensor, kind: str, hyper: Hyper, state: torch.dtype) -> Planes:
        weights, remainder = master.clone(), None
        if kind == "bfloat16":
            weights, remainder = split(master)
        elif kind == "float16":
            weights, remainder = nearest_half(master), weights
        elif kind == "lone":
            weights = master.bfloat16()
        return cls(weights, remainder, [torch.zeros(master.numel(), dtype=state) for _ in MOMENTS[hyper.rule]])

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self.weights, *([] if self.remainder is None else [self.remainder]), *self.moments])

    def map(self, function: Callable[[Tensor], Tensor]) -> Planes:
        remainder = None if self.remainder is None else function(self.remainder)
        return Planes(function(self.weights), remainder, [function(moment) for moment in self.moments])

    def master(self) -> Tensor:
        if self.remainder is None:
            return self.weights.float()
        return self.remainder if self.weights.dtype is torch.float16 else join(self.weights, self.remainder)

    def addresses(self) -> dict[str, Any]:
        remainder = 0 if self.remainder is None else self.remainder.data_ptr()
        moments = tuple(moment.data_ptr() for moment in self.moments)
        return {"weights": self.weights.data_ptr(), "remainder": remainder, "moments": moments}


Update = Callable[..., None]


def opened(name: str) -> Update:
    if name == "gpu":
        return on_device
    backend = choice.load(name, threads=2)[0]

    def update(
        planes: Planes, grads: Tensor, step: Scalars, state: torch.dtype, first: int = 0, into: Planes | None = None
    ) -> None:
        dtypes = {"weights": planes.weights.dtype, "grads": grads.dtype, "state": state}
        backend.update(
            Operands(
                **planes.addresses(),
                **{f"{plane}_dtype": name_of(dtype) for plane, dtype in dtypes.items()},
                grads=grads.data_ptr(),
                numel=grads.numel(),
                scalars=step,
                elements=Elements(KEY, first, fuses=vectors().fuses),
                into=None if into is None else Into(**into.addresses()),
            )
        )

    return update


def on_device(planes: Planes, grads: Tensor, step: Scalars, state: torch.dtype, first: int = 0) -> None:
    from hytrain.kernels import gpu

    there = planes.map(lambda plane: shifted(plane, plane.storage_offset() % 16))
    gpu.update(
        **vars(there), grads=shifted(grads, 0), scalars=step, elements=Elements(KEY, first, fuses=vectors().fuses)
    )
    for plane, updated in zip(planes, there, strict=True):
        plane.copy_(updated)


class Reference:
    """The rule in plain torch on an fp32 master, with the rounding of what is kept in bf16."""

    def __init__(self, planes: Planes, hyper: Hyper) -> None:
        self.parameter = torch.nn.Parameter(planes.master().clone())
        self.optimizer = of_hyper(hyper, self.parameter)
        self.names, self.count = MOMENTS[hyper.rule], 0
        self.is_lone = planes.remainder is None and planes.weights.dtype is torch.bfloat16
        self.state = planes.moments[0].dtype if planes.moments else torch.float32

    def step(self, grads: Tensor, first: int = 0) -> None:
        self.count += 1
        self.parameter.grad = grads.float()
        self.optimizer.step()
        random = bits_again(first, grads.numel(), self.count, KEY)
        for moment in self.moments():
            if self.state is torch.bfloat16:
                moment.copy_(rounded(moment, random % 65536))
            elif self.state is torch.uint8:
                moment.copy_(minifloats.rounded(moment, random % 65536, 0))
        if self.is_lone:
            self.parameter.data.copy_(rounded(self.parameter.detach(), random * 0x9E3779B1 % 2**32 // 65536))

    def moments(self) -> list[Tensor]:
        return [self.optimizer.state[self.parameter][name] for name in self.names]


def of_hyper(hyper: Hyper, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    given = asdict(hyper)
    if isinstance(hyper, LionHyper):
        return Lion([parameter], betas=(given.pop("beta1"), given.pop("beta2")), **given)
    return torch.optim.SGD([parameter], **given)


def rounded(values: Tensor, random: Tensor) -> Tensor:
    patterns = torch.where(values.isnan(), 0x7FC00000, values.view(torch.int32))
    return ((patterns + random.int()) >> 16 << 16).view(torch.float32)


def assert_same(planes: Planes, reference: Reference, case: str = "") -> None:
    """Equal in every bit, zeros' signs too; NaNs aside."""
    expected = [reference.parameter.detach(), *reference.moments()]
    found = [minifloats.as_numbers(it, 0) if it.dtype is torch.uint8 else it for it in planes.moments]
    for index, (ours, theirs) in enumerate(zip([planes.master(), *found], expected, strict=True)):
        differ = (ours.float().view(torch.int32) != theirs.view(torch.int32)) & ~(ours.isnan() & theirs.isnan())
        where = differ.nonzero().flatten()[:5].tolist()
        assert not where, f"{case}: plane {index} differs at {where}: {ours[where]}, not {theirs[where]}"
    if planes.weights.dtype is torch.float16:
        assert torch.equal(planes.weights.view(torch.int16), nearest_half(planes.master()).view(torch.int16))


def test_every_rule_is_here() -> None:
    """Besides those that only the trainer's device computes."""
    assert {hyper.rule for hyper in EVERY_RULE} | {"adamw"} == set(MOMENTS) - ON_DEVICE == set(TYPICAL) - ON_DEVICE


@of_state
@of_kind
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
@NAMES
def test_matches_torch(name: str, hyper: Hyper, kind: tuple[str, str], state: torch.dtype) -> None:
    """The elements' indices pass 2^32 on the way."""
    update, generator = opened(name), torch.Generator().manual_seed(0)
    for numel, first in ((1, 0), (63, 5), (64, 0), (2 * BLOCK + 1003, (1 << 32) - BLOCK)):
        master = torch.randn(numel, generator=generator)
        planes = Planes.of(master, kind[0], hyper, state)
        reference = Reference(planes, hyper)
        for step in range(1, 6):
            grads = some_grads(numel, generator).to(getattr(torch, kind[1]))
            update(planes, grads, scalars(hyper, step), state, first)
            reference.step(grads, first)
        assert_same(planes, reference, f"{numel} elements")
        assert not torch.equal(planes.master(), master)


@of_kind
@of_rule
@NAMES
def test_special_values(name: str, hyper: Hyper, kind: tuple[str, str]) -> None:
    """All pairs of a special master and a special first gradient, then ordinary gradients and zeros."""
    update, generator = opened(name), torch.Generator().manual_seed(2)
    planes = Planes.of(SPECIAL.repeat_interleave(SPECIAL.numel()), kind[0], hyper, torch.float32)
    reference, first = Reference(planes, hyper), SPECIAL.repeat(SPECIAL.numel())
    for step, grads in enumerate((first, some_grads(first.numel(), generator), torch.zeros_like(first)), 1):
        grads = grads.to(getattr(torch, kind[1]))
        update(planes, grads, scalars(hyper, step), torch.float32)
        reference.step(grads)
        assert_same(planes, reference, f"step {step}")
    assert planes.master().isnan().any() and planes.master().isfinite().any()


@of_state
@of_kind
@of_rule
@pytest.mark.parametrize("name", ["native", "torch"])
def test_into_other_planes_as_in_place(name: str, hyper: Hyper, kind: tuple[str, str], state: torch.dtype) -> None:
    update, generator = opened(name), torch.Generator().manual_seed(3)
    for numel in (1, 64, 2 * BLOCK + 77):
        grads = some_grads(numel, generator).to(getattr(torch, kind[1]))
        before = Planes.of(torch.randn(numel, generator=generator), kind[0], hyper, state)
        for moment in before.moments:
            random = torch.randn(numel, generator=generator)
            moment.copy_(float8.to_plane(random, "exp_avg") if state is torch.uint8 else random)
        in_place, read, written = before.map(Tensor.clone), before.map(Tensor.clone), before.map(torch.zeros_like)
        update(in_place, grads, scalars(hyper, 3, 0.5), state)
        update(read, grads, scalars(hyper, 3, 0.5), state, into=written)
        for one, other in ((written, in_place), (read, before)):
            for plane, expected in zip(one, other, strict=True):
                assert torch.equal(plane, expected)


@of_kind
@of_rule
@NAMES
def test_tiles_equal_the_whole(name: str, hyper: Hyper, kind: tuple[str, str]) -> None:
    update, generator, state = opened(name), torch.Generator().manual_seed(4), torch.bfloat16
    numel = BLOCK + 777
    grads = some_grads(numel, generator).to(getattr(torch, kind[1]))
    whole = Planes.of(torch.randn(numel, generator=generator), kind[0], hyper, state)
    tiled = whole.map(Tensor.clone)
    update(whole, grads, scalars(hyper, 1), state, 11)
    for begin, end in ((0, 333), (333, BLOCK + 5), (BLOCK + 5, numel)):
        update(tiled.map(lambda plane: plane[begin:end]), grads[begin:end], scalars(hyper, 1), state, 11 + begin)  # noqa: B023
    for plane, expected in zip(tiled, whole, strict=True):
        assert torch.equal(plane, expected)


@of_rule
@NAMES
def test_the_scale_of_clipping(name: str, hyper: Hyper) -> None:
    """As if the gradient had been multiplied before."""
    update, generator = opened(name), torch.Generator().manual_seed(5)
    grads, scale = some_grads(1000, generator), float(torch.tensor(0.3))
    scaled = Planes.of(torch.randn(1000, generator=generator), "float32", hyper, torch.float32)
    expected = scaled.map(Tensor.clone)
    for step in (1, 2):
        update(scaled, grads, scalars(hyper, step, scale), torch.float32)
        update(expected, grads * scale, scalars(hyper, step), torch.float32)
    for plane, other in zip(scaled, expected, strict=True):
        assert torch.equal(plane.view(torch.int32), other.view(torch.int32))


@pytest.mark.gpu
@of_rule
def test_the_verdict_on_the_device_is_the_scale(hyper: Hyper) -> None:
    """As if it had been known on the host; below 0, not a bit changes."""
    from hytrain.kernels import gpu

    generator = torch.Generator().manual_seed(6)
    before = Planes.of(torch.randn(3077, generator=generator), "bfloat16", hyper, torch.float32)
    grads = some_grads(3077, generator).to("cuda", torch.bfloat16)
    for scale in (0.37, 1.0, -1.0):
        judged, known = (before.map(Tensor.cuda) for _ in range(2))
        verdict = torch.tensor(scale, device="cuda")
        gpu.update(**vars(judged), grads=grads, scalars=scalars(hyper, 1), verdict=verdict)
        if scale > 0:
            gpu.update(**vars(known), grads=grads, scalars=scalars(hyper, 1, float(verdict)))
        for plane, expected in zip(judged, known, strict=True):
            assert torch.equal(plane, expected)
