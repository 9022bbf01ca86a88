"""Experts that are divided among the ranks, which send each other tokens: as with torch's AdamW, bit for bit.

    x of this rank ─ router ─▶ all-to-all ─▶ this rank's experts ─▶ all-to-all ─▶ y of this rank

Each rank has its experts' matrices as a DTensor's shard. All else is sharded by FSDP2, which is told to ignore experts.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import RankGroup
from sharded_models import WIDTH, Decoder, clip, clipped, fused, loop, next_token_loss, require_one_norm, same_as
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

EXPERTS, HIDDEN = 4, 24


@cache
def mesh() -> DeviceMesh:
    """Of two ranks, both have experts; of four, two pairs have copies of them."""
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "expert"))


class Experts(nn.Module):
    """Matrices (experts, width, hidden) and (experts, hidden, width), of which each rank has some experts'."""

    def __init__(self) -> None:
        super().__init__()
        self.up = self._divided(torch.randn(EXPERTS, WIDTH, HIDDEN) / 6)
        self.down = self._divided(torch.randn(EXPERTS, HIDDEN, WIDTH) / 5)

    def _divided(self, whole: Tensor) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(whole, mesh()["expert"], [Shard(0)]))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """Rows of `x`, each by the one of this rank's experts that `expert` names."""
        up, down = (p.to_local() for p in (self.up, self.down))  # type: ignore[operator]
        y = torch.zeros_like(x)
        for index in range(len(up)):
            (rows,) = torch.where(expert == index)
            y = y.index_add(0, rows, functional.silu(x[rows] @ up[index]) @ down[index])
        return y


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, -2)
        scores, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        group = mesh()["expert"].get_group()
        given = torch.empty_like(counts)  # of each rank, for each of this rank's experts
        dist.all_to_all_single(given, counts, group=group)
        sent, came = (each.view(2, -1).sum(1).tolist() for each in (counts, given))
        there = all_to_all_single_autograd(flat[order], came, sent, group)
        mine = torch.arange(EXPERTS // 2).repeat(2).repeat_interleave(given)
        back = all_to_all_single_autograd(self.experts(there, mine), sent, came, group)
        y = torch.zeros_like(flat).index_copy(0, order, back) * scores[:, None]
        return x + y.view_as(x)


def make() -> Decoder:
    """Of four ranks, those with the same experts share these as FSDP2 does."""
    model, all_ranks = Decoder(block=Routed), mesh()._flatten("all")
    if dist.get_world_size() > 2:
        for block in model.blocks:
            fully_shard(block.experts, mesh=mesh()["data"])  # type: ignore[arg-type]
    experts = {p for block in model.blocks for p in block.experts.parameters()}  # type: ignore[union-attr]
    for block in model.blocks:
        fully_shard(block, mesh=all_ranks, ignored_params=experts)
    fully_shard(model, mesh=all_ranks, ignored_params=experts)
    return model


def backward(model: Any, opt: Any, step: int) -> Tensor:
    loss = next_token_loss(model, step)
    loss.backward()
    return loss.detach()


def compare(*choices: dict[str, Any]) -> None:
    same_as(fused, partial(loop, backward), make, [*choices])


def test_the_same_bits_as_torch(two_ranks: RankGroup) -> None:
    two_ranks.run(compare, {"k": 0.0}, {"k": (0.0, 1.0)}, {"k": 0.5})


def test_experts_that_several_ranks_share(four_ranks: RankGroup) -> None:
    four_ranks.run(compare, {"k": (0.0, 1.0, 1.0, 0.0)})


def test_the_norm_is_of_all_experts(two_ranks: RankGroup, four_ranks: RankGroup) -> None:
    """The limit is below some steps' norm."""
    for ranks, limit in ((two_ranks, 0.85), (four_ranks, 0.59)):
        require_one_norm(ranks.run(clip, partial(clipped, backward), make, limit, {"k": 0.0}, {"k": (0.0, 1.0)}), limit)
