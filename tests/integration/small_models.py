"""Small models, their batches and losses.

Transformers is imported where it is needed, as that takes as long as many a test.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 256


def gpt2(dtype: torch.dtype = torch.float32) -> nn.Module:
    """About 120 k parameters, dropout on, the embedding tied to the head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=48, n_layer=3, n_head=4, n_positions=32, vocab_size=VOCAB, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model.to(dtype).train()


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    """About 150 k parameters, untied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        vocab_size=VOCAB,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(dtype).train()


def mixtral(dtype: torch.dtype = torch.float32, implementation: str = "eager") -> nn.Module:
    """About 170 k parameters, each block's eight experts fused in two tensors; two of them see each token.

    `implementation`: "eager" computes expert by expert, "grouped_mm" all at once, as Transformers does by default.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        vocab_size=VOCAB,
    )
    config._experts_implementation = implementation
    model: nn.Module = MixtralForCausalLM(config)
    return model.to(dtype).train()


class Mixture(nn.Module):
    """A residual block of eight experts, modules of their own. Each row of x, (rows, width), goes through two.

    An expert without a row is not called, so its parameters have no gradient.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 8, bias=False)
        experts = (nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(8))
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x).softmax(-1).topk(2)
        y = x
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            if len(row):
                y = y.index_add(0, row, expert(x[row]) * shares[row, place, None])
        return y


def mixture(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Three blocks of experts."""
    torch.manual_seed(0)
    return nn.Sequential(*[Mixture(32) for _ in range(3)]).to(dtype)


def perceptron(width: int = 32, depth: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A few blocks of a Linear and a Tanh: the quickest model with more than one layer."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]).to(dtype)


class Poisoned(nn.Module):
    """A perceptron, or another model, with gradients that are inf or NaN in chosen steps. The loop sets `step`.

    `poison` has for each such step the number of the parameter, and the value.
    """

    def __init__(self, body: nn.Module, poison: dict[int, tuple[int, float]]) -> None:
        super().__init__()
        self.body, self.poison, self.step = body, poison, 0
        for index, parameter in enumerate(body.parameters()):
            parameter.register_hook(partial(self._poison, index))

    def _poison(self, index: int, gradient: Tensor) -> Tensor | None:
        where, value = self.poison.get(self.step, (-1, 0.0))
        return gradient.index_fill(0, torch.tensor([1]), value) if where == index else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


def in_parts(model: nn.Module, step: int) -> Tensor:
    """As `square_loss`, but the model itself is never called, only its children."""
    x = vectors(step)
    for block in model.children():
        x = block(x)
    loss: Tensor = (x - vectors(step).sin()).square().mean()
    return loss


def tokens(step: int, batch: int = 4, length: int = 16) -> Tensor:
    """The batch of one step, int64 (batch, length)."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCAB, (batch, length), generator=generator)


def vectors(step: int, width: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    """The batch of one step for `perceptron`, (8, width)."""
    return torch.randn(8, width, generator=torch.Generator().manual_seed(1000 + step)).to(dtype)


def language_loss(model: nn.Module, step: int) -> Tensor:
    batch = tokens(step)
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def routed_loss(model: nn.Module, step: int) -> Tensor:
    """Of `mixture` over three rows: at least two experts of each block have none."""
    x = vectors(step, dtype=next(model.parameters()).dtype)[:3]
    loss: Tensor = (model(x) - x.sin()).float().square().mean()
    return loss


def square_loss(model: nn.Module, step: int) -> Tensor:
    x = vectors(step, dtype=next(model.parameters()).dtype)
    loss: Tensor = (model(x) - x.sin()).float().square().mean()
    return loss


def fails_in_backward(model: Any) -> None:
    """Its backward raises between the gradients of the last block and those of the first."""

    def fail(gradient: Tensor) -> Tensor:
        raise MemoryError("out of memory, say")

    x = model[0](vectors(0, dtype=next(model.parameters()).dtype))
    x.register_hook(fail)
    for block in list(model)[1:]:
        x = block(x)
    with suppress(MemoryError):
        x.square().mean().backward()
        raise AssertionError("backward has not raised")


def behind_frozen() -> nn.Sequential:
    """A perceptron behind a layer that is to be frozen, a BatchNorm and a dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), perceptron())


def share_of_loss(model: nn.Module, batch: dict[str, Any], *, parts: int) -> Tensor:
    """The loss of one of `micro_batches`, over their number."""
    x, (scale, target) = batch["x"], batch["more"]
    if target["fails"]:
        raise ValueError("as it was told to")
    loss: Tensor = scale * (model(x) - target["y"].float()).square().mean() / parts
    return loss


def micro_batches(step: int, count: int) -> list[dict[str, Any]]:
    """What a script's loop might have: of different sizes, nested, with more than one dtype."""
    made = []
    for index in range(count):
        x = vectors(100 * step + index)[: 4 + index]
        made.append({"x": x, "more": (0.5 + index, {"y": x.sin().to(torch.bfloat16), "fails": False})})
    return made
