"""Sequences that ranks share, under FSDP2 over the same ranks: the bits of torch's AdamW, whoever updates.

    torch's context_parallel    keys and values go round a ring, a part of them meets a part of the queries at a time
    a recipe's parallel.context an all-to-all before attention and after it: all of the sequence, some of the heads

torch has kernels for its ring on GPUs only. Here its own steps of the ring call the kernel that attention has on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import adamw, differing
from ranks import RankGroup
from sharded_models import VOCAB, WIDTH, Decoder, for_this_rank, fused, loop, same_as, trained
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, LENGTH = 4, 64


def tokens(step: int) -> Tensor:
    """The batch of one step, int64 (2, LENGTH): all ranks have the same."""
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(step))


@cache
def mesh(device: str) -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


def shard(model: Any, blocks: Any) -> Any:
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


# ---------------------------------------------------------------- torch's context_parallel


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(self.norm(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(3, -1)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.outward(seen.transpose(1, 2).flatten(2))
        return x + y


class Positioned(Decoder):
    """With an embedding of places, which are divided like the tokens."""

    def __init__(self) -> None:
        super().__init__(block=Attention)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embedding(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """torch's ring with an attention that has the same bits each time."""
    if device == "cuda":
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
        return
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def handler(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[DTensor, ...]:
        spec = args[0]._spec
        named = zip((argument.name for argument in op._schema.arguments), args)
        given = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in named} | options
        step: Any = ring._templated_ring_attention
        if op is backward:
            step = partial(ring._templated_ring_attention_backward, grad_out_name="grad_out")
        results = step(spec.mesh.get_group(), 2, op, **given)
        return tuple(DTensor.from_local(each, spec.mesh, spec.placements, run_check=False) for each in results)

    with pytest.MonkeyPatch.context() as patch:
        for op in (forward, backward):
            patch.setitem(ring.custom_ops, op, handler)
        yield


def positioned(device: str, sharded: bool = True) -> Any:
    model = Positioned().to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    return shard(model, model.blocks) if sharded else model


def backward_in_a_ring(model: Any, opt: Any, step: int) -> Tensor:
    """The mean loss of the ranks' parts. What follows each token is found before the sequence is divided."""
    device, batch = next(model.parameters()).device, tokens(step)
    made = (batch, batch.roll(-1, 1), torch.arange(LENGTH)[None])
    inputs, following, places = buffers = [each.to(device, copy=True) for each in made]
    with ExitStack() as stack:
        if isinstance(model, FSDPModule):
            options: dict[str, Any] = {"buffer_seq_dims": [1, 1, 1], "no_restore_buffers": {*buffers}}
            stack.enter_context(kernels_of(device.type))
            stack.enter_context(context_parallel(mesh(device.type), buffers=buffers, **options))
        loss = functional.cross_entropy(model(inputs, places).flatten(0, 1).float(), following.flatten())
        loss.backward()
    mean = loss.detach().clone()
    if isinstance(model, FSDPModule):
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean


# ---------------------------------------------------------------- a recipe's parallel.context


def llama(device: str, sharded: bool = True) -> Any:
    """Its loss is that of the whole sequences. With `sharded`, ranks have parts of them.

    Its frequencies are others for sequences longer than half of these.
    """
    import transformers

    from hytrain.recipe.context import Context
    from hytrain.recipe.loss import in_chunks

    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}
    heads = {"num_key_value_heads": HEADS, "head_dim": 8}
    factors = {"rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 2.0}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": LENGTH // 2, **factors}
    config = transformers.LlamaConfig(**shape, **heads, vocab_size=VOCAB, use_cache=False, rope_parameters=rope)
    model: Any = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    if not sharded:
        return model.train()
    in_chunks(shard(model, model.model.layers).train(), 2, Context(mesh(device)))
    return model


def backward_of_heads(model: Any, opt: Any, step: int) -> Tensor:
    batch = tokens(step)[:, 1:].to(next(model.parameters()).device)  # a length that ranks cannot share evenly
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    found: Tensor = loss.detach()
    return found


class Way(NamedTuple):
    make: Callable[..., Any]
    backward: Callable[..., Tensor]


WAYS = {"ring": Way(positioned, backward_in_a_ring), "heads": Way(llama, backward_of_heads)}


def beside_whole_sequences(way: str) -> None:
    """Loss and gradients are those of one process that has all."""
    whole, divided = (WAYS[way].make("cpu", sharded) for sharded in (False, True))
    expected, loss = (WAYS[way].backward(model, None, 0) for model in (whole, divided))
    torch.testing.assert_close(loss, expected)
    for (name, one), other in zip(whole.named_parameters(), divided.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=1e-4, atol=1e-6, msg=name)


def compare(way: str, *choices: dict[str, Any]) -> None:
    same_as(fused, partial(loop, WAYS[way].backward), lambda: WAYS[way].make("cpu"), [*choices])


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_as_torch(way: str, two_ranks: RankGroup, four_ranks: RankGroup) -> None:
    two_ranks.run(beside_whole_sequences, way)
    two_ranks.run(compare, way, {"k": 0.0}, {"k": (0.0, 1.0)})
    four_ranks.run(beside_whole_sequences, way)
    four_ranks.run(compare, way, {"k": (0.0, 1.0, 0.5, 0.0)})


def one_result(way: str, *choices: dict[str, Any]) -> None:
    """Each choice leaves the same bits as the first one."""
    torch.use_deterministic_algorithms(True)
    results = []
    for choice in choices:
        model = WAYS[way].make("cuda")
        with adamw(model, **for_this_rank(choice)) as opt:
            results.append(trained(partial(loop, WAYS[way].backward), model, opt))
    torch.use_deterministic_algorithms(False)
    for result, choice in zip(results[1:], choices[1:], strict=True):
        assert not (unequal := differing(result, results[0])), (choice, unequal)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_for_any_owner(way: str, two_gpus: RankGroup) -> None:
    """In bfloat16, with the kernels of GPUs."""
    two_gpus.run(one_result, way, {"k": 1.0}, {"k": 0.0}, {"k": (0.0, 1.0)})
