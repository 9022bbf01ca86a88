"""Muon's matrices that ranks share: the bits of torch's Muon on one rank, given the same gathered gradients.

All matrices are Muon's here, also the embedding's and the head's, and one of which a single rank has all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import muon
import pytest
import torch
import torch.distributed as dist
from helpers import OnMasters, differing, late_weights, opened, wait_for_coordinator
from ranks import RankGroup
from sharded_models import STEPS, Decoder, for_this_rank, local, next_token_loss, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hytrain
from hytrain.memory import visits
from hytrain.tensors import part_of

NUMBERS: dict[str, Any] = {"lr": 0.02, "adamw": {"lr": 1e-2}}
#: By rank. The first of several ranks has the momentum in host memory, the second on the device.
BOTH: dict[str, Any] = {"k": (0.0, 1.0)}
HIDDEN = 48


@cache
def mesh(*shape: int, names: tuple[str, ...] = ("replicate", "shard")) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])


def sharded(model: Decoder, over: DeviceMesh, **options: Any) -> Decoder:
    for block in model.blocks:
        fully_shard(block, mesh=over, **options)
    fully_shard(model, mesh=over, **options)
    return model


def plain() -> Decoder:
    return sharded(Decoder(hidden=HIDDEN), mesh(dist.get_world_size()))


def uneven() -> Decoder:
    """Rows that the ranks cannot share evenly."""
    return sharded(Decoder(), mesh(dist.get_world_size()))


def bfloat16() -> Decoder:
    return sharded(Decoder(hidden=HIDDEN).to(torch.bfloat16), mesh(dist.get_world_size()))


def mixed_precision() -> Decoder:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(Decoder(hidden=HIDDEN), mesh(dist.get_world_size()), mp_policy=policy)


def by_columns_and_rows() -> Decoder:
    """The matrices of blocks are divided by rows and by columns; embedding, head and scales are on all ranks."""
    model, over = Decoder(hidden=HIDDEN), mesh(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, over["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def in_two_dimensions() -> Decoder:
    return sharded(by_columns_and_rows(), mesh(2, 2, names=("data", "tensor"))["data"])


def hybrid() -> Decoder:
    return sharded(Decoder(hidden=HIDDEN), mesh(2, 2))


class Turns(nn.Module):
    """Two matrices that take turns in the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y: Tensor = self.turns[self.count % 2](x)
        return x + y


def taking_turns() -> Decoder:
    model = Decoder()
    model.blocks = nn.ModuleList(Turns() for _ in range(3))
    return sharded(model, mesh(2))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if (p.ndim == 2) is of_muon], "use_muon": of_muon}
        for of_muon in (True, False)
    ]


class Whole(OnMasters, muon.Muon):
    """torch's Muon over whole matrices, which each rank has, and its AdamW over this rank's parts of all others."""

    def __init__(self, model: nn.Module, **numbers: Any) -> None:
        self.found = dict(model.named_parameters())
        self.own = {name: nn.Parameter(self._of(p, p.detach()).clone()) for name, p in self.found.items()}
        super().__init__(model, [{"params": list(self.own.values())}], **{**NUMBERS, **numbers})

    @staticmethod
    def _of(parameter: Tensor, tensor: Tensor) -> Tensor:
        """Gradients of tensor-parallel modules may still be sums."""
        if parameter.ndim == 2 and isinstance(tensor, DTensor):
            return tensor.full_tensor()
        if isinstance(parameter, DTensor) and isinstance(tensor, DTensor):
            tensor = tensor.redistribute(parameter.device_mesh, parameter.placements)
        return local(tensor)

    def step(self, closure: Any = None) -> Any:
        for name, p in self.found.items():
            self.own[name].grad = None if p.grad is None else self._of(p, p.grad)
        result = super().step(closure)
        with torch.no_grad():
            for name, p in self.found.items():
                local(p).copy_(part_of(self.own[name], p) if p.ndim == 2 else self.own[name])
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        for name, p in self.found.items():
            p.grad = self.own[name].grad = None

    def momentum(self) -> dict[str, Tensor]:
        """This rank's parts."""
        state = {name: self.state[self.master_of.get(own, own)] for name, own in self.own.items()}
        return {
            f"{name}.momentum": part_of(its["momentum_buffer"], self.found[name]).contiguous()
            for name, its in state.items()
            if "momentum_buffer" in its and local(self.found[name]).numel()
        }


def data_rank(model: nn.Module) -> int:
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return dist.get_rank() // 2 if any("tensor" in (over.mesh_dim_names or ()) for over in meshes) else dist.get_rank()


def backward(model: nn.Module, step: int) -> None:
    next_token_loss(model, step, data_rank(model)).backward()


Practice = Callable[[nn.Module, Any], object]


def loop(model: nn.Module, opt: Any, steps: Iterable[int] = range(STEPS)) -> None:
    for step in steps:
        backward(model, step)
        opt.step()
        opt.zero_grad()


def moving(model: nn.Module, opt: Any) -> None:
    """Layers move between the steps, on each rank others."""
    for step in range(3 * STEPS):
        loop(model, opt, [step])
        if isinstance(opt, hytrain.Muon) and opt.statistics().step > 1:
            wait_for_coordinator(opt)
            opt._engine._handover.wait()
    assert not isinstance(opt, hytrain.Muon) or opt.statistics().moved, "some did"


def accumulated(model: nn.Module, opt: Any) -> None:
    """Every backward reduces gradients, and two make a step."""
    for step in range(STEPS):
        for part in range(2):
            backward(model, 10 * step + part)
        opt.step()
        opt.zero_grad()


def scheduled(model: nn.Module, opt: Any) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step))
    for step in range(STEPS):
        loop(model, opt, [step])
        schedule.step()


def results(model: nn.Module, opt: Any, practice: Practice) -> dict[str, Tensor]:
    """This rank's parts of weights and momentum after the practice."""
    named = dict(model.named_parameters())
    practice(model, opt)
    if isinstance(opt, hytrain.Muon):
        opt.synchronize()
    found = {name: local(p.detach()).clone() for name, p in named.items()}
    if isinstance(opt, Whole):
        return found | opt.momentum()
    names = [name for group in groups_of(model) for name, _ in group["params"]]
    for index, entry in opt.state_dict()["state"].items():
        if "momentum_buffer" in entry and local(named[names[index]]).numel():
            found[f"{names[index]}.momentum"] = local(entry["momentum_buffer"]).clone()
    return found


def compare(make: Callable[[], nn.Module], practice: Practice, *choices: dict[str, Any]) -> None:
    theirs = make()
    expected = results(theirs, Whole(theirs), practice)
    assert any("momentum" in name for name in expected)
    for choice in choices:
        ours = make()
        with opened(hytrain.Muon, ours, groups_of(ours), **NUMBERS, **for_this_rank(choice)) as opt, late_weights():
            found = results(ours, opt, practice)
        if unequal := differing(found, expected):
            raise AssertionError(f"{choice}: {unequal}")


CPU, GPU = {"k": 0.0}, {"k": 1.0}
ROWS: dict[str, tuple[Any, ...]] = {
    "plain": (plain, loop, CPU, GPU, BOTH),
    "uneven rows": (uneven, loop, BOTH),
    "bfloat16": (bfloat16, loop, CPU, GPU, BOTH),
    "mixed precision": (mixed_precision, loop, BOTH),
    "layers that move": (plain, moving, {"policy": "random"}),
    "without overlap": (plain, loop, {**BOTH, "overlap": False}),
    "tensor-parallel": (by_columns_and_rows, loop, CPU, BOTH),
    "matrices that take turns": (taking_turns, loop, CPU, BOTH),
    "accumulation": (plain, accumulated, {**BOTH, "grad_accumulation": 2}),
    "a scheduler": (plain, scheduled, BOTH),
}


def compare_row(name: str) -> None:
    make, practice, *choices = ROWS[name]
    compare(make, practice, *choices)


@pytest.mark.parametrize("name", ROWS)
def test_the_bits_of_torchs_muon_on_whole_matrices(name: str, two_ranks: RankGroup) -> None:
    two_ranks.run(compare_row, name)


@pytest.mark.parametrize("make", [plain, hybrid, in_two_dimensions])
def test_the_same_on_four_ranks(make: Callable[[], nn.Module], four_ranks: RankGroup) -> None:
    """Of replicas, too, and of matrices that are divided in both dimensions."""
    four_ranks.run(compare, make, loop, {"k": (0.0, 1.0, 0.5, 0.0)})
