"""Sequences that are divided among the ranks, which have all of it for some heads in attention: torch's bits.

    (batch, length / ranks, heads, …) ─ all-to-all ─▶ (batch, length, heads / ranks, …) ─ attention ─▶ and back

Parameters are sharded by FSDP2 over the same ranks. HyTrain sees nothing else.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import RankGroup
from sharded_models import WIDTH, Decoder, fused, loop, same_as, tokens
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

HEADS = 4


def exchanged(x: Tensor, split: int, joined: int) -> Tensor:
    """Of `x`, all ranks' parts of dimension `joined`, and this rank's part of dimension `split`."""
    world = dist.get_world_size()
    parts = torch.stack(x.chunk(world, split))
    each = [1] * world
    came = all_to_all_single_autograd(parts.contiguous(), each, each, dist.group.WORLD)
    return torch.cat([*came.unbind()], joined)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: (batch, this rank's part of the length, width)."""
        of_heads = exchanged(self.inward(self.norm(x)).unflatten(-1, (HEADS, -1)), 2, 1)
        q, k, v = of_heads.transpose(1, 2).chunk(3, -1)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        y: Tensor = self.outward(exchanged(seen, 1, 2).flatten(2))
        return x + y


def make() -> Decoder:
    model = Decoder(block=Attention)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def backward(model: Any, opt: Any, step: int) -> Tensor:
    """All ranks have the same batch, each its part of every sequence."""
    batch = tokens(step, 0)
    inputs, targets = (part.chunk(dist.get_world_size(), 1)[dist.get_rank()] for part in (batch[:, :-1], batch[:, 1:]))
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach()


def compare(*choices: dict[str, Any]) -> None:
    same_as(fused, partial(loop, backward), make, [*choices])


def one_rank_reads_what_another_has() -> bool:
    """The first rank's tokens are in what the last one computes."""
    torch.manual_seed(dist.get_rank())
    block = Attention()
    for parameter in block.parameters():
        dist.broadcast(parameter.data, 0)
    x = torch.randn(1, 2, WIDTH, requires_grad=True)
    (block(x).sum() * float(dist.get_rank() == dist.get_world_size() - 1)).backward()
    return bool(x.grad.abs().sum() > 0)  # type: ignore[union-attr]


def test_the_same_bits_as_torch(two_ranks: RankGroup, four_ranks: RankGroup) -> None:
    assert two_ranks.run(one_rank_reads_what_another_has) == [True, True]
    two_ranks.run(compare, {"k": 0.0}, {"k": (0.0, 1.0)})
    four_ranks.run(compare, {"k": (0.0, 1.0, 0.5, 0.0)})
