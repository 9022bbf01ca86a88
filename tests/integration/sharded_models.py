"""A small model for several ranks, and the comparison of two optimizers over what each rank holds of it.

Parts of parameters are uneven, and one is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import LR, Reference, adamw, differing, late_weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hytrain

WIDTH, HIDDEN, VOCAB = 32, 35, 67
STEPS = 6


class Block(nn.Module):
    """About 2 k parameters. Of `scale`, the first of several ranks holds all."""

    def __init__(self, hidden: int, scaled: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1, WIDTH)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.up(self.norm(x))))
        return x + (y if self.scale is None else y * self.scale)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head; (batch, length) tokens to logits."""

    def __init__(
        self,
        blocks: int = 3,
        hidden: int = HIDDEN,
        *,
        scaled: bool = True,
        tied: bool = False,
        checkpointed: bool = False,
        block: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList((block or partial(Block, hidden, scaled))() for _ in range(blocks))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def tokens(step: int, data_rank: int) -> Tensor:
    """The batch of one step and rank, int64 (4, 9)."""
    generator = torch.Generator().manual_seed(1000 + 10 * step + data_rank)
    return torch.randint(VOCAB, (4, 9), generator=generator)


def next_token_loss(model: nn.Module, step: int, data_rank: int | None = None) -> Tensor:
    batch = tokens(step, dist.get_rank() if data_rank is None else data_rank).to(next(model.parameters()).device)
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def part_loss(model: nn.Module, batch: dict[str, Tensor], *, parts: int) -> Tensor:
    """The loss of a micro-batch, `tokens`, over the number of a step's."""
    logits = model(batch["tokens"][:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch["tokens"][:, 1:].flatten()) / parts


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


#: A step's backward, which returns the loss.
Backward = Callable[[Any, Any, int], Tensor]


def loop(backward: Backward, model: Any, opt: Any) -> Iterable[Tensor]:
    for step in range(STEPS):
        yield backward(model, opt, step)
        opt.step()
        opt.zero_grad()


def clipped(backward: Backward, norms: list[float], max_norm: float, model: Any, opt: Any) -> Iterable[Tensor]:
    """torch's clip_grad_norm_ takes neither DTensors of different meshes nor plain tensors beside them."""
    for step in range(STEPS):
        yield backward(model, opt, step)
        if not isinstance(opt, hytrain.AdamW):
            gradients = [p.grad for p in model.parameters()]
            whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
            norm = nn.utils.get_total_norm(whole)
            for gradient in gradients:
                gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
            norms.append(norm.item())
        opt.step()
        opt.zero_grad()
        if isinstance(opt, hytrain.AdamW):
            norms.append(float(opt.grad_norm))  # type: ignore[arg-type]


def fused(model: nn.Module) -> torch.optim.AdamW:
    """torch's AdamW over all parameters; it takes no plain tensors beside DTensors in one group."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is distributed] for distributed in (True, False)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=LR, fused=True)


class LocalReference(Reference):
    """`Reference` over this rank's parts of the parameters, for bfloat16 ones with float32 masters."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = {p: nn.Parameter(local(p.detach())) for p in model.parameters()}
        super().__init__(model, [{"params": list(self.parts.values())}], lr=LR)

    def step(self, closure: Any = None) -> Any:
        for parameter, part in self.parts.items():
            part.grad = None if parameter.grad is None else local(parameter.grad)
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        for parameter, part in self.parts.items():
            parameter.grad = part.grad = None


Practice = Callable[[Any, Any], Iterable[Tensor]]


def trained(practice: Practice, model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the practice returns, and this rank's parts of weights and state afterwards."""
    named = dict(model.named_parameters())  # now: FSDP2 may have other ones there later
    name_of = {id(p): name for name, p in named.items()}
    if isinstance(opt, LocalReference):
        name_of.update((id(part), name_of[id(p)]) for p, part in opt.parts.items())
        name_of.update((id(master), name_of[id(part)]) for part, master in opt.master_of.items())
    order = [name_of[id(p)] for group in opt.param_groups for p in group["params"]]
    results = {f"result {index}": tensor for index, tensor in enumerate(practice(model, opt))}
    if isinstance(opt, hytrain.AdamW):
        opt.synchronize()
    results |= {name: local(p.detach()).clone() for name, p in named.items()}
    for index, entry in opt.state_dict()["state"].items():
        if local(named[order[index]].detach()).numel():
            planes = {plane: torch.as_tensor(entry[plane]) for plane in ("exp_avg", "exp_avg_sq", "step")}
            results |= {f"{order[index]}.{plane}": local(value).float().clone() for plane, value in planes.items()}
    return results


def same_as(
    reference: Callable[[nn.Module], torch.optim.Optimizer],
    practice: Practice,
    make: Callable[[], nn.Module],
    choices: list[dict[str, Any]],
) -> None:
    """HyTrain gives the same bits as the reference on this rank, for each choice of its options.

    A `k` that is a tuple has each rank's. Weights are late where the CPU may update.
    """
    model = make()
    expected = trained(practice, model, reference(model))
    for choice in choices:
        options, model = for_this_rank(choice), make()
        with adamw(model, **options) as opt:
            with late_weights() if isinstance(options.get("k"), float) else nullcontext():
                found = trained(practice, model, opt)
        if unequal := differing(found, expected):
            raise AssertionError(f"{choice}: {unequal}")


def for_this_rank(options: dict[str, Any]) -> dict[str, Any]:
    k = options.get("k", "auto")
    return {**options, "k": k[dist.get_rank() % len(k)] if isinstance(k, tuple) else k}


#: The norms that it finds are put into the list; the number is the most that gradients are left with.
ClippedPractice = Callable[[list[float], float, Any, Any], Iterable[Tensor]]


def clip(
    practice: ClippedPractice, make: Callable[[], nn.Module], max_norm: float, *choices: dict[str, Any]
) -> list[list[float]]:
    """The norms with torch's AdamW and then with each choice, which all leave the same bits."""
    model, norms = make(), [[] for _ in range(len(choices) + 1)]
    results = [trained(partial(practice, norms[0], max_norm), model, fused(model))]
    for choice, seen in zip(choices, norms[1:], strict=True):
        model = make()
        with adamw(model, max_grad_norm=max_norm, **for_this_rank(choice)) as opt, late_weights():
            results.append(trained(partial(practice, seen, max_norm), model, opt))
    for result, choice in zip(results[2:], choices[1:], strict=True):
        if unequal := differing(result, results[1]):
            raise AssertionError(f"{choice}: {unequal}")
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    return norms


def require_one_norm(norms_by_rank: list[list[list[float]]], max_norm: float) -> None:
    expected, *found = norms_by_rank[0]
    assert min(expected) < max_norm < max(expected), f"some steps are clipped, others are not: {expected}"
    for norms in found:
        assert norms == found[0]
        assert norms == pytest.approx(expected, rel=1e-6)
    for norms in norms_by_rank[1:]:
        assert norms[1:] == found, "on every rank"
