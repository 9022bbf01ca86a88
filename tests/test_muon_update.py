"""Muon's update on one device against torch's Muon: both passes, the orthogonalization between them, and their pieces.

"cpu" is torch's operators, "cuda" Triton's kernel; the products of matrices are torch's on both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_rules import Planes
from torch import Tensor
from torch.optim import _muon

from hytrain.kernels import choice
from hytrain.kernels.backend import Operands
from hytrain.kernels.orthogonal import orthogonalized
from hytrain.kernels.scalars import Scalars, muon_step, scalars
from hytrain.kernels.split import join
from hytrain.memory.passes import passes, work_bytes
from hytrain.memory.planes import DevicePlanes
from hytrain.memory.transfer import HostTransfers, transfers_for
from hytrain.memory.visits import Visit, Visits
from hytrain.model.layers import split_layers
from hytrain.tensors import DTYPES
from protocol.handles import EXACT, STATE_PLANES
from protocol.messages import Segment
from protocol.rules import ON_DEVICE, MuonHyper
from workers.optimize.arenas import SegmentPlanes

HYPER = MuonHyper(lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)
HYPERS = {
    "torch's defaults": HYPER,
    "without nesterov": replace(HYPER, nesterov=False),
    "without decay, slowly": replace(HYPER, weight_decay=0.0, momentum=0.3),
    "the step of AdamW": replace(HYPER, adjust="match_rms_adamw"),
    "another iteration": replace(HYPER, a=2.0, b=-1.5, c=0.5, ns_steps=8, eps=1e-3),
}
SHAPES = [(64, 48), (48, 64), (33, 7), (1, 16), (128, 1)]
KINDS = ("float32", "bfloat16", "float16")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
of_hyper = pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
of_kind = pytest.mark.parametrize("kind", KINDS)
HOST = choice.load("native", 1)[0]


def segment(shape: tuple[int, int], kind: str = "float32", **others: Any) -> Segment:
    numel = shape[0] * shape[1]
    return Segment(
        name="w", numel=numel, dtype=kind, grads_dtype=kind, group=0, rule="muon", shape=shape, **{"key": 7} | others
    )


def gradients(shape: tuple[int, int], count: int) -> list[Tensor]:
    """Of several magnitudes, the last one of zeros."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * 10.0 ** (2 - 2 * i) for i in range(count - 1)] + [
        torch.zeros(shape)
    ]


def torchs(hyper: MuonHyper, parameter: torch.nn.Parameter) -> torch.optim.Muon:
    given = {name: getattr(hyper, name) for name in ("lr", "weight_decay", "momentum", "nesterov", "eps", "ns_steps")}
    coefficients = (hyper.a, hyper.b, hyper.c)
    return torch.optim.Muon([parameter], ns_coefficients=coefficients, adjust_lr_fn=hyper.adjust, **given)


def master(weights: Tensor, planes: DevicePlanes) -> Tensor:
    [remainder] = planes.state("remainder")
    if remainder is None:
        return weights
    return remainder if weights.dtype is torch.float16 else join(weights, remainder)


def equal(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@of_kind
@of_hyper
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_of_torchs_muon(shape: tuple[int, int], hyper: MuonHyper, kind: str) -> None:
    """On an fp32 master, from gradients of the weights' dtype."""
    spec = segment(shape, kind)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(spec.numel, generator=generator).to(DTYPES[kind])
    planes = DevicePlanes([spec], [weights])
    parameter = torch.nn.Parameter(weights.float().view(shape))
    reference = torchs(hyper, parameter)
    for step, grads in enumerate(gradients(shape, 4), 1):
        grads = grads.to(DTYPES[kind])
        planes.update({0: grads.view(-1)}, scalars(hyper, step), HOST)
        parameter.grad = grads.float()
        reference.step()
        assert equal(master(weights, planes), parameter.detach().view(-1)), step
        [momentum] = planes.state("momentum_buffer")
        assert momentum is not None
        assert equal(momentum, reference.state[parameter]["momentum_buffer"].view(-1)), step


def test_a_parameter_that_lies_by_columns() -> None:
    """Its shape decides the step: torch's bits, in its own order."""
    shape = (48, 16)
    parameter = torch.nn.Parameter(torch.randn(16, 48, generator=torch.Generator().manual_seed(2)).T)
    spec, weights = segment(shape, by_columns=True), parameter.detach().T.clone().view(-1)
    planes, reference = DevicePlanes([spec], [weights]), torchs(HYPER, parameter)
    for step, grads in enumerate(gradients(shape, 3), 1):
        stored = grads.T.contiguous()
        planes.update({0: stored.view(-1)}, scalars(HYPER, step), HOST)
        parameter.grad = stored.T
        reference.step()
    assert equal(weights.view(16, 48).T.contiguous(), parameter.detach().contiguous())


@DEVICES
@pytest.mark.parametrize("shape", [*SHAPES, (256, 1024)], ids=str)
def test_orthogonalized_as_by_torch(shape: tuple[int, int], device: str) -> None:
    """Bit for bit, in an autocast too; and near to orthogonal: singular values around 1."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device)
    found = orthogonalized(matrix, HYPER)
    expected = _muon._zeropower_via_newtonschulz(matrix, (HYPER.a, HYPER.b, HYPER.c), HYPER.ns_steps, HYPER.eps)
    assert torch.equal(found, expected) and found.shape == shape
    with torch.autocast(device, dtype=torch.float16):
        assert torch.equal(orthogonalized(matrix, HYPER), expected)
    singular = torch.linalg.svdvals(found.float())
    assert singular.shape == (min(shape),) and 0.4 < singular.min() and singular.max() < 1.3


def visited(spec: Segment, weights: Tensor, state: list[Tensor | None], grads: Tensor, step: Scalars) -> None:
    """The same update, of state in host memory."""
    transfers = transfers_for(weights.device)
    visits = Visits(transfers, weights.device, [spec], hold_bytes=1 << 30)
    host = HOST if isinstance(transfers, HostTransfers) else None
    for ended in visits.update([Visit(spec, weights, grads, state, step)], after=None, host=host, verdict=None):
        ended.synchronize()
    visits.close()


@DEVICES
@of_kind
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float8"])
def test_pieces_give_the_bits_of_the_whole(
    kind: str, state_dtype: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State that comes through slots, a piece of the matrix at a time; rounded moments, too."""
    monkeypatch.setattr("hytrain.memory.visits.SLOT_NUMEL", 640)
    spec = segment((48, 40), kind, state_dtype=state_dtype)
    host = HOST if device == "cpu" else None
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(spec.numel, generator=generator).to(device, DTYPES[kind])
    planes, others = DevicePlanes([spec], [weights]), weights.clone()
    state = [None if plane is None else plane.cpu() for [plane] in map(planes.state, STATE_PLANES)]
    state = [None if plane is None else (plane.pin_memory() if device == "cuda" else plane.clone()) for plane in state]
    for step in range(1, 4):
        grads = torch.randn(spec.numel, generator=generator).to(device, DTYPES[kind])
        planes.update({0: grads}, scalars(HYPER, step), host)
        visited(spec, others, state, grads, scalars(HYPER, step))
    assert torch.equal(weights, others)
    for plane, away in zip(STATE_PLANES, state, strict=True):
        [here] = planes.state(plane)
        assert (here is None) is (away is None)
        assert here is None or away is None or torch.equal(here.cpu(), away), plane


def test_the_scale_of_clipping() -> None:
    """As if the gradient had been multiplied before. What was made orthogonal is not."""
    spec, scale = segment((16, 24)), float(torch.tensor(0.3))
    found = [torch.ones(spec.numel) for _ in range(2)]
    known, multiplied = (DevicePlanes([spec], [weights]) for weights in found)
    for step, grads in enumerate(gradients((16, 24), 3), 1):
        known.update({0: grads.view(-1)}, scalars(HYPER, step, scale), HOST)
        multiplied.update({0: grads.view(-1) * scale}, scalars(HYPER, step), HOST)
    assert equal(*found) and not torch.equal(found[0], torch.ones(spec.numel))


@pytest.mark.gpu
@of_kind
def test_the_gpus_passes_have_the_bits_of_torchs_operators(kind: str) -> None:
    """What is orthogonalized aside, whose products are the device's own."""
    from hytrain.kernels import gpu

    spec = segment((48, 40), kind)
    start = torch.randn(spec.numel, generator=torch.Generator().manual_seed(5))
    for hyper in (HYPER, replace(HYPER, nesterov=False, momentum=0.3)):
        for grads in gradients((48, 40), 3):
            grads = grads.view(-1).to(DTYPES[kind])
            first = Planes(torch.zeros(spec.numel), None, [start.clone()])
            last = Planes.of(start, kind, hyper, torch.float32)
            last.moments.clear()
            step = muon_step(hyper, 1, 48, 40)
            for planes, given, numbers in ((first, grads, scalars(hyper, 1, 0.5)), (last, grads.bfloat16(), step)):
                there = planes.map(Tensor.cuda)
                gpu.update(**vars(there), grads=given.cuda(), scalars=numbers)
                backend = choice.load("torch", 1)[0]
                backend.update(
                    Operands(
                        **planes.addresses(),
                        grads=given.data_ptr(),
                        numel=spec.numel,
                        weights_dtype=str(planes.weights.dtype).removeprefix("torch."),
                        grads_dtype=str(given.dtype).removeprefix("torch."),
                        scalars=numbers,
                    )
                )
                for plane, expected in zip(there, planes, strict=True):
                    assert torch.equal(plane.cpu(), expected)


@pytest.mark.gpu
def test_the_verdict_on_the_device() -> None:
    """A scale multiplies gradients, not what was made of them; below 0, not a bit changes."""
    spec = segment((48, 40), "bfloat16")
    grads = torch.randn(spec.numel, generator=torch.Generator().manual_seed(6)).to("cuda", torch.bfloat16)
    for scale in (0.37, 0.0, -1.0):
        found = []
        for verdict, factor in ((torch.tensor(scale, device="cuda"), 1.0), (None, scale)):
            weights = torch.ones(spec.numel, dtype=torch.bfloat16, device="cuda")
            planes = DevicePlanes([spec], [weights])
            if factor >= 0:
                planes.update({0: grads}, scalars(HYPER, 1, float(torch.tensor(factor))), verdict=verdict)
            [momentum], [remainder] = planes.state("momentum_buffer"), planes.state("remainder")
            found.append((weights, momentum, remainder))
        for one, other in zip(*found, strict=True):
            assert one is not None and other is not None and torch.equal(one, other), scale


@pytest.mark.gpu
def test_near_to_torchs_muon_on_the_gpu() -> None:
    """Whose elementwise operators round otherwise."""
    spec = segment((256, 512))
    generator = torch.Generator().manual_seed(8)
    weights = torch.randn(spec.numel, generator=generator).cuda()
    parameter = torch.nn.Parameter(weights.clone().view(256, 512))
    before, planes, reference = weights.clone(), DevicePlanes([spec], [weights]), torchs(HYPER, parameter)
    for step in range(1, 11):
        grads = torch.randn(spec.numel, generator=generator).cuda()
        planes.update({0: grads}, scalars(HYPER, step))
        parameter.grad = grads.view(256, 512)
        reference.step()
    moved, expected = weights - before, parameter.detach().view(-1) - before
    assert (moved - expected).norm() < 0.01 * expected.norm()


def test_what_an_update_takes_besides() -> None:
    shapes = [(10, 20), (30, 40)]
    assert work_bytes([segment(shape) for shape in shapes]) == 12 * 1200
    assert work_bytes([Segment(name="w", numel=99, dtype="float32", grads_dtype="float32", group=0)]) == 0


def test_a_matrix_is_no_segment_without_its_shape() -> None:
    for shape in ((), (10,), (9, 11), (2, 5, 10)):
        with pytest.raises(ValueError, match=r"segment 'w' of 100 elements is no matrix of shape"):
            Segment(name="w", numel=100, dtype="float32", grads_dtype="float32", group=0, rule="muon", shape=shape)


def test_another_rules_scalars_are_no_muon() -> None:
    spec = Segment(name="w", numel=4, dtype="float32", grads_dtype="float32", group=0)
    with pytest.raises(AssertionError, match="another rule's"):
        next(passes(spec, torch.ones(4), torch.ones(4), scalars(HYPER, 1)))


def test_the_optimizer_process_updates_none() -> None:
    """Whatever a plan says: on fp32 weights, the first pass alone would put the direction in their place."""
    planes = SegmentPlanes(segment((4, 4)), (0, 4), ({},))
    with pytest.raises(AssertionError, match="planned for the trainer's device"):
        planes.update(HOST, 0, 16, scalars(HYPER, 1))


def test_matrices_are_not_cut() -> None:
    """Other parameters of their size are; both keep their order."""
    model = torch.nn.Module()
    model.first, model.second = torch.nn.Linear(64, 100, bias=False), torch.nn.Linear(64, 100, bias=False)
    model.second.weight = torch.nn.Parameter(torch.zeros(64, 100).T)
    rules, parameters = ["adamw", "muon"], [model.first.weight, model.second.weight]
    layers = split_layers(model, set(map(id, parameters)), whole={id(model.second.weight)}, piece_numel=2560)
    group_of = {id(parameter): group for group, parameter in enumerate(parameters)}
    specs = [layer.describe(group_of, rules, None, EXACT) for layer in layers]
    assert [(s.numel, s.rule in ON_DEVICE, s.shape, s.by_columns) for spec in specs for s in spec.segments] == [
        (2176, False, (), False),
        (2176, False, (), False),
        (2048, False, (), False),
        (6400, True, (100, 64), True),
    ]
    assert [spec.stays_on_device for spec in specs] == [False, False, False, True]
