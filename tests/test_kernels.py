"""Every backend of the AdamW and Adam update against torch's with fused=True on fp32 masters, bit for bit.

The GPU's kernel takes part like another backend. DeepSpeed's operator rounds its scalars differently, so it
is held to the tolerance in `assert_agrees`. NaNs are equal whatever their payload, which IEEE 754 leaves open.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hytrain.kernels import choice as backends
from hytrain.kernels.backend import DTYPES, Backend, Elements, Into, Operands
from hytrain.kernels.build import NATIVE, build, find_compiler
from hytrain.kernels.native import FLAGS, SOURCE
from hytrain.kernels.scalars import Scalars, scalars
from hytrain.kernels.split import join, nearest_half, split
from hytrain.kernels.torch_backend import vectors
from protocol.rules import AdamWHyper

HYPER = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
HYPERS = {
    "usual": HYPER,
    "maximize": dataclasses.replace(HYPER, maximize=True),
    "no decay": dataclasses.replace(HYPER, lr=6e-4, beta2=0.95, eps=1e-5, weight_decay=0.0),
    "beta1 of a half": dataclasses.replace(HYPER, lr=0.1, beta1=0.5),
    "beta1 below a half": dataclasses.replace(HYPER, beta1=0.3),
    "no momentum": dataclasses.replace(HYPER, beta1=0.0, beta2=0.0),
    "Adam": dataclasses.replace(HYPER, decoupled=False),
    "Adam maximizes": dataclasses.replace(HYPER, decoupled=False, maximize=True, beta1=0.3, eps=1e-5),
    "Adam without decay": dataclasses.replace(HYPER, decoupled=False, weight_decay=0.0),
}
PAIRS = pytest.mark.parametrize("pair", DTYPES, ids="-".join)
GPU = pytest.param("gpu", marks=pytest.mark.gpu)
EXACT = ["native", "torch", GPU]
# DeepSpeed compiles its operator in about a minute.
ALL = [*EXACT, pytest.param("deepspeed", marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
BLOCK = 4096  # elements that a thread of the native backend takes at once


@dataclass(kw_only=True)
class Planes:
    """One segment's state, [numel] each."""

    weights: Tensor
    remainder: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def arguments(self) -> dict[str, Any]:
        """As an update on the device takes them."""
        return {"weights": self.weights, "remainder": self.remainder, "moments": (self.exp_avg, self.exp_avg_sq)}

    def addresses(self) -> dict[str, Any]:
        """As an update on host memory takes them."""
        return {
            "weights": self.weights.data_ptr(),
            "remainder": 0 if self.remainder is None else self.remainder.data_ptr(),
            "moments": (self.exp_avg.data_ptr(), self.exp_avg_sq.data_ptr()),
        }

    @classmethod
    def of(cls, master: Tensor, weights_dtype: str) -> Planes:
        weights, remainder = master.clone(), None
        if weights_dtype != "float32":
            weights, remainder = split(master) if weights_dtype == "bfloat16" else (nearest_half(master), weights)
        zeros = torch.zeros_like(master)
        return cls(weights=weights, remainder=remainder, exp_avg=zeros, exp_avg_sq=zeros.clone())

    def master(self) -> Tensor:
        if self.remainder is None:
            return self.weights
        return self.remainder if self.weights.dtype is torch.float16 else join(self.weights, self.remainder)

    def map(self, function: Callable[[Tensor], Tensor]) -> Planes:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Planes(**{name: None if t is None else function(t) for name, t in fields.items()})

    def copy_from(self, other: Planes) -> None:
        for field in dataclasses.fields(self):
            if (mine := getattr(self, field.name)) is not None:
                mine.copy_(getattr(other, field.name))


Update = Callable[..., None]


def elements_of(numel: int) -> Elements:
    """All elements of a parameter, in torch's vectors and after them."""
    return Elements(tail=numel - numel % vectors().lanes, fuses=vectors().fuses)


def on_host(backend: Backend) -> Update:
    def update(planes: Planes, grads: Tensor, step: Scalars, elements: Elements | None = None) -> None:
        backend.update(
            Operands(
                **planes.addresses(),
                grads=grads.data_ptr(),
                numel=grads.numel(),
                weights_dtype=str(planes.weights.dtype).removeprefix("torch."),
                grads_dtype=str(grads.dtype).removeprefix("torch."),
                scalars=step,
                elements=elements or elements_of(grads.numel()),
            )
        )

    return update


def on_device(planes: Planes, grads: Tensor, step: Scalars, elements: Elements | None = None) -> None:
    from hytrain.kernels import gpu

    there, elements = planes.map(to_device), elements or elements_of(grads.numel())
    gpu.update(**there.arguments(), grads=to_device(grads), scalars=step, elements=elements)
    planes.copy_from(there)


def to_device(plane: Tensor) -> Tensor:
    """On the GPU, at an address as odd as here."""
    return shifted(plane, plane.storage_offset() % 16)


def shifted(plane: Tensor, offset: int) -> Tensor:
    return torch.empty(offset + plane.numel(), dtype=plane.dtype, device="cuda")[offset:].copy_(plane)


def open_backend(name: str) -> Backend:
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    return backends.load(name, threads=2)[0]


def open_update(name: str) -> Update:
    return on_device if name == "gpu" else on_host(open_backend(name))


class Reference:
    """torch.optim.AdamW(fused=True), or Adam's, on an fp32 master."""

    def __init__(self, master: Tensor, hyper: AdamWHyper) -> None:
        self.parameter = torch.nn.Parameter(master.float().clone())
        same = {name: getattr(hyper, name) for name in ("lr", "eps", "weight_decay", "maximize")}
        kind = torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
        self.optimizer = kind([self.parameter], betas=(hyper.beta1, hyper.beta2), fused=True, **same)

    def step(self, grads: Tensor) -> None:
        self.parameter.grad = grads.float()
        self.optimizer.step()

    def planes(self) -> Planes:
        state = self.optimizer.state[self.parameter]
        return Planes(
            weights=self.parameter.detach(),
            remainder=None,
            exp_avg=state["exp_avg"],
            exp_avg_sq=state["exp_avg_sq"],
        )


def train(
    update: Update, planes: Planes, reference: Reference, hyper: AdamWHyper, grads: Iterable[Tensor], dtype: str
) -> None:
    """One step with each gradient, in this dtype, on both."""
    for step, gradient in enumerate(grads, 1):
        gradient = gradient.to(getattr(torch, dtype))
        update(planes, gradient, scalars(hyper, step))
        reference.step(gradient)


def some_grads(numel: int, generator: torch.Generator) -> Tensor:
    """Magnitudes from 1e-6 to 10, some zeros of both signs."""
    magnitudes = 10 ** (torch.rand(numel, generator=generator) * 7 - 6)
    signs = torch.randint(-1, 2, (numel,), generator=generator)
    return torch.where(torch.rand(numel, generator=generator) < 0.01, -0.0, magnitudes * signs)


def from_bits(*patterns: int) -> Tensor:
    return torch.tensor(patterns).to(torch.int32).view(torch.float32)


SPECIAL = torch.cat(
    [
        torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-20, 3e19, -3e38, torch.inf, -torch.inf, torch.nan]),
        from_bits(0x00000001, 0x80000001, 0x007FFFFF, 0x80008000, 0x00800000),  # around the subnormals
        from_bits(0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001),  # around ties
        from_bits(0x7F7FFFFF, 0xFF7FFFFF, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF),  # greatest numbers and NaNs
    ]
)


def assert_identical(ours: Planes, reference: Planes, case: str = "") -> None:
    """Equal in every bit, NaNs aside; and float16 weights are those of their master."""
    for name in ("master", "exp_avg", "exp_avg_sq"):
        a, b = (p.master() if name == "master" else getattr(p, name) for p in (ours, reference))
        differ = (a.view(torch.int32) != b.view(torch.int32)) & ~(a.isnan() & b.isnan())
        where = differ.nonzero().flatten()[:5].tolist()
        assert not where, f"{case}: {name} differs at {where}: {a[where].tolist()}, not {b[where].tolist()}"
    if ours.weights.dtype is torch.float16:
        assert torch.equal(ours.weights.view(torch.int16), nearest_half(ours.master()).view(torch.int16)), case


def assert_agrees(name: str, ours: Planes, reference: Planes, lr: float) -> None:
    """Bit for bit; DeepSpeed's operator within what 1 - beta and 1 - beta**step lose in float32."""
    if name != "deepspeed":
        assert_identical(ours, reference, name)
        return
    torch.testing.assert_close(ours.exp_avg, reference.exp_avg, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.exp_avg_sq, reference.exp_avg_sq, rtol=1e-4, atol=0)
    torch.testing.assert_close(ours.master(), reference.master(), rtol=1e-6, atol=1e-3 * lr)


@PAIRS
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
@pytest.mark.parametrize("name", ALL)
def test_matches_torch(name: str, hyper: AdamWHyper, pair: tuple[str, str]) -> None:
    update, generator = open_update(name), torch.Generator().manual_seed(0)
    numel = 2 * BLOCK + 1003
    master = torch.randn(numel, generator=generator)
    planes, reference = Planes.of(master, pair[0]), Reference(master, hyper)
    train(update, planes, reference, hyper, (some_grads(numel, generator) for _ in range(12)), pair[1])
    assert_agrees(name, planes, reference.planes(), hyper.lr)
    assert not torch.equal(planes.master(), master)


@PAIRS
@pytest.mark.parametrize("name", ALL)
def test_sizes(name: str, pair: tuple[str, str]) -> None:
    update, generator = open_update(name), torch.Generator().manual_seed(1)
    for numel in (*range(1, 71), *range(121, 136), *range(993, 1010), *range(BLOCK - 9, BLOCK + 10)):
        master = torch.randn(numel, generator=generator)
        planes, reference = Planes.of(master, pair[0]), Reference(master, HYPER)
        train(update, planes, reference, HYPER, [some_grads(numel, generator) for _ in range(2)], pair[1])
        assert_agrees(name, planes, reference.planes(), HYPER.lr)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("name", EXACT)
def test_the_tail_is_the_whole_tensors(name: str, threads: int) -> None:
    """However many threads torch divides it among, and we."""
    update, generator = open_update(name), torch.Generator().manual_seed(12)
    before = torch.get_num_threads()
    try:
        for numel in (1 << 20, (1 << 20) + 1, (1 << 20) - 9, (1 << 20) + 4095):
            master = torch.randn(numel, generator=generator)
            planes, reference = Planes.of(master, "float32"), Reference(master, HYPER)
            if name != "gpu":
                update = on_host(backends.load(name, threads)[0])
            torch.set_num_threads(threads)
            train(update, planes, reference, HYPER, [some_grads(numel, generator)] * 2, "float32")
            assert_identical(planes, reference.planes(), f"{numel} elements")
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def every_library() -> None:
    """Both kernels are built here: on a new machine that is no cost of the test."""
    for flags in FLAGS.values():
        build(SOURCE, flags=(*NATIVE, *flags))


#: Prints how torch computes, and raises if something differs from its bits.
COMPARE = """
import torch
from test_kernels import HYPERS, Planes, Reference, assert_identical, open_update, some_grads, train
from test_rules import HYPERS as OTHERS
import test_rules
from hytrain.kernels.torch_backend import vectors
print(torch.backends.cpu.get_cpu_capability(), *vectors())
for name in ("native", "torch"):
    for case, hyper in HYPERS.items():
        generator = torch.Generator().manual_seed(13)
        for numel in (7, 1003):
            master = torch.randn(numel, generator=generator)
            planes, reference = Planes.of(master, "float32"), Reference(master, hyper)
            grads = [some_grads(numel, generator) for _ in range(3)]
            train(open_update(name), planes, reference, hyper, grads, "float32")
            assert_identical(planes, reference.planes(), f"{name}, {case}, {numel}")
    for hyper in OTHERS.values():
        test_rules.test_matches_torch(name, hyper, ("float32", "float32"), torch.float32)
"""


@pytest.mark.spawns
@pytest.mark.usefixtures("every_library")
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_follows_torch_on_every_processor(capability: str) -> None:
    """torch fuses no operations on old processors, nor if it is told to be for them."""
    if capability == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no AVX-512, which torch would use all the same")
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", COMPARE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    name, *found = result.stdout.split()
    assert found == ["8", str(name != "DEFAULT")]


@PAIRS
@pytest.mark.parametrize("name", EXACT)
def test_special_values(name: str, pair: tuple[str, str]) -> None:
    """All pairs of a special master and a special first gradient, then ordinary gradients and zeros."""
    update, generator = open_update(name), torch.Generator().manual_seed(2)
    master = SPECIAL.repeat_interleave(SPECIAL.numel())
    planes, reference = Planes.of(master, pair[0]), Reference(master, HYPER)
    first = SPECIAL.repeat(SPECIAL.numel())
    for step, grads in enumerate((first, some_grads(first.numel(), generator), torch.zeros_like(first)), 1):
        grads = grads.to(getattr(torch, pair[1]))
        update(planes, grads, scalars(HYPER, step))
        reference.step(grads)
        assert_identical(planes, reference.planes(), f"step {step}")
        assert step > 1 or planes.exp_avg.isinf().any()
    assert planes.exp_avg.isnan().any() and planes.master().isfinite().any()


@PAIRS
@pytest.mark.parametrize("name", EXACT)
def test_rows_without_gradients_sink_through_the_subnormals(name: str, pair: tuple[str, str]) -> None:
    """As an embedding's do: one small gradient, then none. Flushing subnormals to zero would show.

    Gradients so small are scaled ones in float16, subnormals among them too.
    """
    update, hyper = open_update(name), dataclasses.replace(HYPER, beta1=0.8)
    first, scale = torch.logspace(-37, -17, 48), 1.0
    if pair[1] == "float16":
        first, scale = torch.logspace(-24, 16, 48, base=2), 2.0**-73
    planes, reference = Planes.of(first, pair[0]), Reference(first, hyper)
    seen = {"exp_avg": 0, "exp_avg_sq": 0}
    for step in range(1, 201):
        grads = (first if step == 1 else torch.zeros(48)).clamp(max=6e4).to(getattr(torch, pair[1]))
        update(planes, grads, scalars(hyper, step, scale))
        reference.step(grads.float() * scale)
        for moment in seen:
            seen[moment] += int(is_subnormal(getattr(planes, moment)).sum())
    assert min(seen.values()) > 500, seen
    assert_identical(planes, reference.planes())


def is_subnormal(values: Tensor) -> Tensor:
    return (values != 0) & (values.abs() < torch.finfo(torch.float32).tiny)


@pytest.mark.parametrize("name", [EXACT[0], EXACT[2]])
def test_nans_leave_in_one_form(name: str) -> None:
    """torch's payloads depend on its compiler; ours do not, so owners can be compared bit for bit."""
    update = open_update(name)
    for dtype, grads in DTYPES:
        planes = Planes.of(SPECIAL, dtype)
        update(planes, torch.full_like(SPECIAL, -torch.nan).to(getattr(torch, grads)), scalars(HYPER, 1))
        for plane in (planes.master(), planes.exp_avg, planes.exp_avg_sq):
            assert plane.view(torch.int32).unique().tolist() == [0x7FC00000]
        if dtype == "float16":
            assert planes.weights.view(torch.int16).unique().tolist() == [0x7E00]


@pytest.mark.parametrize("name", EXACT)
def test_every_float16_gradient_and_every_rounding_to_float16(name: str) -> None:
    check_float16(open_update(name))


@pytest.fixture
def no_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for processors without float16. It is built here: on a new machine that is no cost of the test."""
    monkeypatch.setenv("CXX", " ".join([*find_compiler(os.environ), "-DHYTRAIN_F16C=0"]))
    build(SOURCE)


@pytest.mark.usefixtures("no_float16")
def test_float16_where_the_processor_does_not_convert() -> None:
    check_float16(open_update("native"))


def check_float16(update: Update) -> None:
    """Without momentum the first moment is the gradient. With a learning rate of zero the master stays as it is: here
    at each float16 value, half-way to the next, and right beside both."""
    step = scalars(AdamWHyper(lr=0.0, beta1=0.0, beta2=0.0, eps=1e-8, weight_decay=0.0), 1)
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    planes = Planes.of(torch.zeros(every.numel()), "float16")
    update(planes, every, step)
    finite = every.isfinite()
    assert torch.equal(planes.exp_avg[finite].view(torch.int32), every[finite].float().view(torch.int32))
    assert not planes.exp_avg[~finite].isfinite().any()

    values = torch.cat([torch.arange(0x7C00).to(torch.int16).view(torch.float16).float(), torch.tensor([65536.0])])
    around = torch.cat([values, (values[1:] + values[:-1]) / 2]).view(torch.int32)
    beside = torch.cat([around - 1, around, around + 1])[1:].view(torch.float32)  # but for what is below zero
    master = torch.cat([beside, -beside, SPECIAL[~SPECIAL.isnan()]])
    planes = Planes.of(master, "float16")
    planes.weights.zero_()
    update(planes, torch.zeros(master.numel(), dtype=torch.float16), step)
    assert torch.equal(planes.master().view(torch.int32), master.view(torch.int32))
    assert torch.equal(planes.weights.view(torch.int16), master.half().view(torch.int16))


@PAIRS
@pytest.mark.parametrize("name", ALL)
def test_tiles_equal_the_whole(name: str, pair: tuple[str, str]) -> None:
    """However a segment is cut, and wherever its range begins; and nothing else is written."""
    update, generator = open_update(name), torch.Generator().manual_seed(3)
    numel = BLOCK + 777
    master = torch.randn(numel, generator=generator)
    grads = some_grads(numel, generator).to(getattr(torch, pair[1]))
    read_only = grads.clone()
    whole, tiled, untouched = (Planes.of(master, pair[0]) for _ in range(3))
    update(whole, grads, scalars(HYPER, 1))
    for begin, end in ((1, 1 + 333), (1 + 333, BLOCK + 5), (BLOCK + 5, numel - 3), (numel - 3, numel - 1)):
        part, elements = slice(begin, end), elements_of(numel)._replace(first=begin)
        update(tiled.map(lambda plane: plane[part]), grads[part], scalars(HYPER, 1), elements)  # noqa: B023
    assert_identical(tiled.map(lambda plane: plane[1:-1]), whole.map(lambda plane: plane[1:-1]))
    assert_identical(tiled.map(lambda plane: plane[:: numel - 1]), untouched.map(lambda plane: plane[:: numel - 1]))
    assert torch.equal(grads, read_only)


@PAIRS
@pytest.mark.parametrize("name", [EXACT[0], EXACT[1], ALL[-1]])
def test_into_other_planes_as_in_place(name: str, pair: tuple[str, str]) -> None:
    """Whatever the size, and whether or not the planes begin with a cache line; what is read stays as it was."""
    backend, generator = open_backend(name), torch.Generator().manual_seed(10)
    for numel, offset in ((1, 0), (63, 0), (64, 1), (2 * BLOCK + 77, 0), (2 * BLOCK, 3)):
        grads = some_grads(numel, generator).to(getattr(torch, pair[1]))
        before = Planes.of(torch.randn(numel, generator=generator), pair[0])
        before.exp_avg.normal_(generator=generator)
        before.exp_avg_sq.uniform_(generator=generator)
        in_place, read = before.map(Tensor.clone), before.map(Tensor.clone)
        rooms = {name: room(plane, offset) for name, plane in vars(read).items() if plane is not None}
        other = Planes(**{"remainder": None} | {name: written for name, (_, written) in rooms.items()})
        on_host(backend)(in_place, grads, scalars(HYPER, 3, 0.5))
        backend.update(
            Operands(
                **read.addresses(),
                grads=grads.data_ptr(),
                numel=numel,
                weights_dtype=pair[0],
                grads_dtype=pair[1],
                scalars=scalars(HYPER, 3, 0.5),
                elements=elements_of(numel),
                into=Into(**other.addresses()),
            )
        )
        assert_identical(other, in_place)
        for name, (around, written) in rooms.items():
            assert torch.equal(getattr(read, name), getattr(before, name))
            assert int((around == 7).sum()) - int((written == 7).sum()) == around.numel() - numel, "nothing beside it"


def room(plane: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Memory full of sevens, and as many elements in it as `plane` has, so many from the start of a cache line."""
    around = torch.full((plane.numel() + 200,), 7, dtype=plane.dtype)
    start = (-around.data_ptr() % 64) // around.element_size() + offset
    return around, around[start : start + plane.numel()]


@pytest.mark.parametrize("name", ["native", "torch"])
def test_result_does_not_depend_on_threads(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    master = torch.randn(5 * BLOCK + 9, generator=generator)
    grads = some_grads(master.numel(), generator).bfloat16()
    before = torch.get_num_threads()
    first, *others = (Planes.of(master, "bfloat16") for _ in range(4))
    try:
        for planes, threads in zip((first, *others), (2, 1, 3, 8), strict=True):
            on_host(backends.load(name, threads)[0])(planes, grads, scalars(HYPER, 1))
    finally:
        torch.set_num_threads(before)
    for planes in others:
        assert_identical(planes, first)


#: (the first pattern, how far the next, how many): lower halves around ties and at both ends; and all patterns.
AROUND_TIES = [(lower - (1 << 31), 1 << 16, 1 << 16) for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
EVERY = [(begin, 1, 1 << 22) for begin in range(-(1 << 31), 1 << 31, 1 << 22)]
SLOW_EVERY = pytest.param(EVERY, marks=[pytest.mark.slow, pytest.mark.timeout(900)])


@pytest.mark.parametrize("mode", [3, 3 << 2], ids=["flushes", "rounds to 0"])
def test_all_threads_compute_as_the_one_that_calls(mode: int) -> None:
    """Also those of OpenMP's that were there before the mode changed; and none of them keeps it."""
    backend = backends.load("native", 1)[0]
    master = torch.linspace(-1.0, 1.0, 3 * BLOCK)
    grads, step = torch.full_like(master, 3e-38), scalars(dataclasses.replace(HYPER, eps=2e-38), 1)
    results = []
    for threads, in_mode in ((3, 0), (1, mode), (3, mode), (3, 0)):
        backend.threads, planes = threads, Planes.of(master, "float32")
        backend.float_mode = in_mode
        try:
            on_host(backend)(planes, grads, step)
            assert backend.float_mode == in_mode
        finally:
            backend.float_mode = 0
        results.append(planes)
    for one, other in ((0, 3), (1, 2)):
        assert torch.equal(results[one].weights, results[other].weights)
        assert torch.equal(results[one].exp_avg, results[other].exp_avg)
    assert not torch.equal(results[0].weights, results[1].weights)


@pytest.mark.parametrize("ranges", [AROUND_TIES, SLOW_EVERY], ids=["ties", "all"])
@pytest.mark.parametrize("name", [EXACT[0], EXACT[2]])
def test_split_inside_the_kernel(name: str, ranges: list[tuple[int, int, int]]) -> None:
    """With a learning rate of zero an update is a join and a split, and must change nothing."""
    update, step = open_update(name), scalars(dataclasses.replace(HYPER, lr=0.0), 1)
    for first, stride, count in ranges:
        master = torch.arange(first, first + stride * count, stride).to(torch.int32).view(torch.float32)
        expected = Planes.of(master, "bfloat16")
        planes = expected.map(Tensor.clone)
        update(planes, torch.zeros(count, dtype=torch.bfloat16), step)
        assert torch.equal(planes.weights.view(torch.int16), expected.weights.view(torch.int16))
        assert torch.equal(planes.remainder, expected.remainder)


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_reaches_beyond_two_to_the_31() -> None:
    from hytrain.kernels import gpu

    tail = 4096 + 5
    numel = (1 << 31) + tail
    if torch.cuda.mem_get_info()[0] < 16 * numel:
        pytest.skip("needs 32 GiB of free GPU memory")
    generator = torch.Generator().manual_seed(5)
    expected = Planes.of(torch.randn(tail, generator=generator), "bfloat16")
    grads = some_grads(tail, generator).bfloat16()
    planes = expected.map(lambda plane: torch.zeros(numel, dtype=plane.dtype, device="cuda"))
    planes.map(lambda plane: plane[-tail:]).copy_from(expected)
    all_grads = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    all_grads[-tail:] = grads
    gpu.update(**planes.arguments(), grads=all_grads, scalars=scalars(HYPER, 1), elements=elements_of(numel))
    open_update("native")(expected, grads, scalars(HYPER, 1))
    assert_identical(planes.map(lambda plane: plane[-tail:].cpu()), expected)
    assert not planes.weights[:-tail].any()


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize(
    ("dtypes", "remainder", "message"),
    [
        (("float16", "bfloat16"), 8, "no update for float16 weights with bfloat16 gradients"),
        (("float16", "float16"), 0, "a remainder belongs to 16-bit weights"),
        (("float32", "bfloat16"), 8, "a remainder belongs to 16-bit weights, and only to them: these are float32"),
    ],
)
def test_planes_that_do_not_belong_together(name: str, dtypes: tuple[str, str], remainder: int, message: str) -> None:
    backend, _ = backends.load(name, threads=2)
    with pytest.raises(ValueError, match=message):
        backend.update(Operands(
            weights=8, grads=8, remainder=remainder, moments=(8, 8), numel=1,
            weights_dtype=dtypes[0], grads_dtype=dtypes[1], scalars=scalars(HYPER, 1),
        ))  # fmt: skip


@pytest.mark.spawns
def test_native_brings_no_torch() -> None:
    """The optimizer process pins its cores first; and it is up sooner."""
    check = "import sys; from hytrain.kernels.choice import load; load('native', 1); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout.strip() == "False"


def before_a_guard_page(plane: Tensor) -> Tensor:
    """A copy that ends where its memory does: whoever touches what is behind it ends with SIGSEGV."""
    room = -(-plane.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + room
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = torch.frombuffer(memory, dtype=plane.dtype, count=plane.numel(), offset=room - plane.nbytes)
    return copy.copy_(plane)


@PAIRS
def test_native_touches_nothing_beyond_the_end(pair: tuple[str, str]) -> None:
    update = open_update("native")
    for numel in (1, 64, 77, BLOCK, BLOCK + 333):
        planes = Planes.of(torch.ones(numel), pair[0]).map(before_a_guard_page)
        update(planes, before_a_guard_page(torch.ones(numel, dtype=getattr(torch, pair[1]))), scalars(HYPER, 1))


# Prints this process's number of threads after updates by 1, 4 and 2 of them. Those let go end by themselves.
COUNT_THREADS = """
import ctypes, mmap, os, sys, time
from hytrain.kernels.backend import Operands
from hytrain.kernels.choice import load
from hytrain.kernels.scalars import scalars
from protocol.rules import AdamWHyper
numel = 1 << 20
memory = mmap.mmap(-1, 16 * numel)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
planes = {"weights": base, "grads": base + 4 * numel, "moments": (base + 8 * numel, base + 12 * numel)}
step = scalars(AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1), 1)
backend, _ = load(sys.argv[1], 1)
for threads in (1, 4, 2):
    backend.threads = threads
    dtypes = {"weights_dtype": "float32", "grads_dtype": "float32"}
    backend.update(Operands(**planes, **dtypes, remainder=0, numel=numel, scalars=step))
    seen, deadline = len(os.listdir("/proc/self/task")), time.monotonic() + 60
    if threads == 1:
        others = seen - 1
    while seen > others + threads and time.monotonic() < deadline:
        seen = len(os.listdir("/proc/self/task"))
    print("threads", backend.threads, seen - others)
"""


@pytest.mark.spawns
@pytest.mark.parametrize("name", [EXACT[0], EXACT[1], ALL[-1]])
def test_threads_may_change_between_calls(name: str) -> None:
    """As the coordinator commands it in the middle of a run: that many work, and no others are left."""
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    result = subprocess.run(
        [sys.executable, "-c", COUNT_THREADS, name], capture_output=True, text=True, timeout=600, check=True
    )
    counts = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("threads")]
    assert counts == [["1", "1"], ["4", "4"], ["2", "2"]]


# ---------------------------------------------------------------- clipping


@PAIRS
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("maximize", [False, True])
def test_a_scaled_gradient_is_a_gradient_times_the_scale(name: str, pair: tuple[str, str], maximize: bool) -> None:
    """In float32: exactly what the fp32 gradient, multiplied first, gives."""
    update, generator = open_update(name), torch.Generator().manual_seed(8)
    hyper = dataclasses.replace(HYPER, maximize=maximize)
    master = torch.randn(1000, generator=generator)
    grads = some_grads(1000, generator).to(getattr(torch, pair[1]))
    scale = float(torch.tensor(0.3))
    scaled, expected = Planes.of(master, pair[0]), Planes.of(master, "float32")
    for step in (1, 2):
        update(scaled, grads, scalars(hyper, step, scale))
        update(expected, grads.float() * scale, scalars(hyper, step))
    assert torch.equal(scaled.master().view(torch.int32), expected.master().view(torch.int32))
    assert torch.equal(scaled.exp_avg_sq, expected.exp_avg_sq)


@PAIRS
@pytest.mark.parametrize("name", [name for name in ALL if name != GPU])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("by", [0.3, -1.7, 0.0, 2.0**-70, math.inf, math.nan], ids=str)
def test_a_multiplied_gradient_is_torchs_product(name: str, pair: tuple[str, str], maximize: bool, by: float) -> None:
    """In the gradient's dtype, as the loop's own `mul_` leaves it; of special values, and where no strip is full."""
    update, generator = open_update(name), torch.Generator().manual_seed(8)
    hyper, by = dataclasses.replace(HYPER, maximize=maximize), float(torch.tensor(by))
    grads = torch.cat([SPECIAL, some_grads(1100, generator)]).to(getattr(torch, pair[1]))
    master = torch.randn(grads.numel(), generator=generator)
    multiplied, expected = (Planes.of(master, pair[0]) for _ in range(2))
    for step in (1, 2):
        before = grads.clone()
        update(multiplied, grads, scalars(hyper, step, by=by))
        update(expected, grads * by, scalars(hyper, step))
        assert torch.equal(grads.view(torch.uint8), before.view(torch.uint8)), "only read"
    assert_identical(multiplied, expected)


@pytest.mark.gpu
@PAIRS
def test_the_verdict_on_the_device_is_the_scale(pair: tuple[str, str]) -> None:
    """As if it had been known on the host; below 0, not a bit changes."""
    from hytrain.kernels import gpu

    generator = torch.Generator().manual_seed(9)
    numel = 3 * 1024 + 5
    master = torch.randn(numel, generator=generator).cuda()
    grads = some_grads(numel, generator).to("cuda", getattr(torch, pair[1]))
    for scale in (0.37, 1.0, -1.0):
        verdict = torch.tensor(scale, device="cuda")
        judged, known = (Planes.of(master, pair[0]) for _ in range(2))
        gpu.update(**judged.arguments(), grads=grads, scalars=scalars(HYPER, 1), verdict=verdict)
        if scale > 0:
            gpu.update(**known.arguments(), grads=grads, scalars=scalars(HYPER, 1, float(verdict)))
        assert_identical(judged, known)


@pytest.mark.gpu
def test_launches_that_are_remembered_are_those_for_such_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All dtypes, at even and odd addresses in turn, with and without a verdict; Triton is asked once for each kind."""
    from hytrain.kernels import gpu, triton_update

    asked: list[int] = []

    class Asked:
        def __getitem__(self, grid: Any) -> Any:
            asked.append(grid)
            return kernel[grid]

    kernel = triton_update.update_kernel
    monkeypatch.setattr(triton_update, "update_kernel", Asked())
    monkeypatch.setattr(gpu, "_compiled", {})
    generator = torch.Generator().manual_seed(11)
    native = open_update("native")
    ones = torch.ones((), device="cuda")
    places = [(5 * 1024, 0), (3000, 0), (3001, 1), (2000, 8), (70, 1), (3000, 3)]
    launches = [(place, pair, verdict) for place in places for pair in DTYPES for verdict in (None, ones)]
    for step, ((numel, offset), pair, verdict) in enumerate(launches, 1):
        grads = some_grads(numel, generator).to(getattr(torch, pair[1]))
        here = Planes.of(torch.randn(numel, generator=generator), pair[0])
        there = here.map(lambda plane: shifted(plane, offset))  # noqa: B023
        gpu.update(
            **there.arguments(),
            grads=shifted(grads, offset),
            scalars=scalars(HYPER, step),
            verdict=verdict,
            elements=elements_of(numel),
        )
        native(here, grads, scalars(HYPER, step))
        assert_identical(there.map(lambda plane: plane.cpu()), here)
    assert len(asked) == len(gpu._compiled) < len(launches) // 2
