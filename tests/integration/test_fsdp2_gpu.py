"""FSDP2 on two GPUs: who updates a shard changes no bit, with explicit prefetch, clipping and accumulation too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import opened, wait_for_coordinator
from ranks import RankGroup
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hytrain

pytestmark = [pytest.mark.gpu, pytest.mark.spawns]

STEPS = 12


def llama(*, dtype: torch.dtype = torch.bfloat16, prefetch: bool = False, **options: Any) -> nn.Module:
    """A small Llama whose blocks and root are sharded."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**shape, vocab_size=4096, attn_implementation="eager", use_cache=False)
    model: Any = transformers.LlamaForCausalLM(config).to("cuda", dtype).train()
    layers = model.model.layers
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if prefetch:
        for index, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(list(layers[index + 1 : index + 3]))
            layer.set_modules_to_backward_prefetch(list(layers[max(index - 2, 0) : index][::-1]))
    return model  # type: ignore[no-any-return]


def run(options: dict[str, Any], making: dict[str, Any], backwards: int = 1, kind: str = "AdamW") -> dict[str, Tensor]:
    """Train. Returns the losses and this rank's shards, on the CPU."""
    torch.use_deterministic_algorithms(True)
    rank = dist.get_rank()
    options = {name: value[rank] if isinstance(value, tuple) else value for name, value in options.items()}
    model: Any = llama(**making)
    losses = []
    with opened(getattr(hytrain, kind), model, lr=1e-3, grad_accumulation=backwards, **options) as opt:
        for step in range(STEPS):
            for part in range(backwards):
                generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
                tokens = torch.randint(4096, (4, 64), generator=generator).cuda()
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
            if options.get("policy") == "random" and step > 1:
                wait_for_coordinator(opt)
        opt.synchronize()
        model.reshard()
        found = {name: p.to_local().detach().cpu().clone() for name, p in model.named_parameters()}
    torch.use_deterministic_algorithms(False)
    return {**found, "losses": torch.stack(losses).cpu()}


@pytest.mark.parametrize(
    "options, making, backwards, kind",
    [
        ({}, {}, 1, "AdamW"),
        ({"max_grad_norm": 0.5}, {"prefetch": True}, 1, "AdamW"),
        ({}, {"dtype": torch.float32, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, 1, "AdamW"),
        ({}, {"reshard_after_forward": False}, 2, "AdamW"),
        ({}, {}, 1, "Muon"),
        ({"max_grad_norm": 0.5}, {"dtype": torch.float32, "prefetch": True}, 2, "Muon"),
    ],
    ids=["bfloat16", "prefetch, clipped", "mixed precision", "ZeRO-2, accumulated", "Muon", "Muon, clipped"],
)
def test_the_same_bits_for_any_owner(
    options: dict[str, Any], making: dict[str, Any], backwards: int, kind: str, two_gpus: RankGroup
) -> None:
    expected = two_gpus.run(run, {**options, "k": 1.0}, making, backwards, kind)
    assert expected[0]["losses"][-1] < expected[0]["losses"][0]
    for choice in ({"k": 0.0}, {"k": (0.0, 1.0)}, {"k": "auto", "policy": "random"}):
        found = two_gpus.run(run, {**options, **choice}, making, backwards, kind)
        for rank, (theirs, whole) in enumerate(zip(found, expected, strict=True)):
            unequal = [name for name, value in whole.items() if not torch.equal(theirs[name], value)]
            assert not unequal, (choice, rank, unequal)
