"""Tensor parallelism (`parallelize_module`), alone and with FSDP2: as with torch's AdamW, bit for bit.

Parameters that no plan names are plain tensors, alike on all ranks of the tensor-parallel mesh: so are their gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankGroup
from sharded_models import Decoder, clip, clipped, fused, loop, next_token_loss, require_one_norm, same_as
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hytrain

CPU: dict[str, Any] = {"k": 0.0}
BOTH: dict[str, Any] = {"k": (0.0, 1.0)}


@cache
def mesh() -> DeviceMesh:
    """All ranks of two; of four, two are data-parallel."""
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))


def data_rank() -> int:
    return dist.get_rank() // 2


def columns_and_rows() -> Decoder:
    """Only the two matrices of each block are split."""
    model = Decoder(hidden=48)
    for block in model.blocks:
        parallelize_module(block, mesh()["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sequence_parallel() -> Decoder:
    """Between the matrices, each rank has half of the sequence: the norms' gradients are sums over the ranks."""
    model = Decoder(hidden=48, scaled=False)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh()["tensor"], plan)
    return model


def tensor_and_data_parallel() -> Decoder:
    model = columns_and_rows()
    for block in model.blocks:
        fully_shard(block, mesh=mesh()["data"])
    fully_shard(model, mesh=mesh()["data"])
    return model


def backward(model: Any, opt: Any, step: int) -> Tensor:
    """torch leaves some gradients distributed in another way than their parameters; HyTrain does not."""
    loss = next_token_loss(model, step, data_rank())
    loss.backward()
    for p in model.parameters() if not isinstance(opt, hytrain.AdamW) else ():
        if isinstance(p, DTensor):
            p.grad = p.grad.redistribute(p.device_mesh, p.placements)
    return loss.detach()


def compare(make: Callable[[], Decoder], *choices: dict[str, Any]) -> None:
    same_as(fused, partial(loop, backward), make, [*choices])


@pytest.mark.parametrize("make", [columns_and_rows, sequence_parallel])
def test_the_same_bits_as_torch(make: Callable[[], Decoder], two_ranks: RankGroup) -> None:
    two_ranks.run(compare, make, CPU, BOTH)


def test_with_fsdp2(four_ranks: RankGroup) -> None:
    four_ranks.run(compare, tensor_and_data_parallel, {"k": (0.0, 1.0, 1.0, 0.0)})


def test_what_each_rank_has_counts_once_in_the_norm(two_ranks: RankGroup) -> None:
    for make, max_norm in ((columns_and_rows, 1.11), (sequence_parallel, 1.11)):
        require_one_norm(two_ranks.run(clip, partial(clipped, backward), make, max_norm, CPU, BOTH), max_norm)


def test_with_fsdp2_there_is_one_norm(four_ranks: RankGroup) -> None:
    norms = four_ranks.run(
        clip, partial(clipped, backward), tensor_and_data_parallel, 0.777, {"k": (0.0, 1.0, 1.0, 0.0)}
    )
    require_one_norm(norms, 0.777)


def warned(differs: bool) -> list[str]:
    """The norms are plain parameters, on each rank one."""
    model = columns_and_rows()
    if differs and dist.get_rank() == 1:
        with torch.no_grad():
            model.norm.weight[3] += 0.5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hytrain.AdamW(model, lr=1e-3).close()
    return [str(each.message) for each in caught if each.filename == __file__]


def test_copies_that_differ_are_warned_of(two_ranks: RankGroup) -> None:
    assert two_ranks.run(warned, False) == [[], []]
    first, second = two_ranks.run(warned, True)
    assert not first and len(second) == 1 and second[0].startswith("norm.weight has other values on rank 1")
