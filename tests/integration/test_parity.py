"""Three processes against one: the weights after a closed loop are those of torch's fused AdamW, in every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import LR, adamw, differing, same_as_torch, state, train, weights
from small_models import gpt2, in_parts, llama, perceptron, square_loss, vectors
from torch import nn
from variants import every_second

import hytrain

STEPS = 100


@every_second(dtype=[torch.float32, torch.bfloat16], make={"gpt2": gpt2, "llama": llama})
def test_a_hundred_steps(make: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    def run(model: nn.Module, opt: Any) -> list[float]:
        before = weights(model)
        losses = train(model, opt, range(STEPS))
        if isinstance(opt, hytrain.AdamW):
            assert opt.statistics().step == STEPS and 0.4 <= opt.statistics().k < 1.0, "both owners took part"
        else:
            assert len(differing(before, weights(model))) == len(before), "every parameter is trained"
        return losses

    same_as_torch(run, lambda: make(dtype), k=0.4)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the rest does not and has a learning rate of its own."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.2},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 2 * LR, "betas": (0.8, 0.95)},
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameter_groups_and_a_schedule(dtype: torch.dtype) -> None:
    def run(model: nn.Module, opt: Any) -> Any:
        warm_up = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 10) * 0.97**step)
        return train(model, opt, range(40), scheduler=warm_up), [group["lr"] for group in opt.param_groups]

    same_as_torch(run, lambda: gpt2(dtype), groups_of, k=0.4)


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_maximize_and_other_numbers(k: float) -> None:
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.0, 0.5), "eps": 1e-3, "weight_decay": 0.3, "maximize": True}

    def closeness(model: nn.Module, step: int) -> torch.Tensor:
        loss: torch.Tensor = -(model(vectors(step)) - 1).square().mean()
        return loss

    same_as_torch(lambda model, opt: train(model, opt, range(20), closeness), k=k, **options)


class Partial(nn.Module):
    """Frozen, tied, twice used and sometimes unused parts.

    `blocks.1` is frozen, `blocks.2` has the weight of `blocks.0`, `blocks.3` runs in every third step alone,
    `blocks.4` runs twice, `blocks.5` never.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.blocks[1].requires_grad_(False)
        self.blocks[2].weight = self.blocks[0].weight
        self.last = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.first(x).tanh()
        for index, block in enumerate(self.blocks[:5]):
            if index != 3 or step % 3 == 0:
                x = block(x).tanh() + x
        return self.last(self.blocks[4](x))  # type: ignore[no-any-return]


def partial_loss(model: nn.Module, step: int) -> torch.Tensor:
    x = vectors(step)
    loss: torch.Tensor = (model(x, step) - x.sin()).square().mean()
    return loss


@pytest.mark.parametrize("k", [0.0, 0.5, 1.0])
def test_tied_frozen_and_sometimes_unused_parameters(k: float) -> None:
    def run(model: nn.Module, opt: Any) -> Any:
        before = weights(model)
        losses = train(model, opt, range(30), partial_loss)
        counts = {index: int(entry["step"]) for index, entry in opt.state_dict()["state"].items()}
        assert set(counts.values()) == {30, 10}, "a parameter's own step count stands still without a gradient"
        still = set(before) - {difference.split(":")[0] for difference in differing(before, weights(model))}
        assert still == {"blocks.1.weight", "blocks.1.bias", "blocks.5.weight", "blocks.5.bias"}
        return losses, counts

    same_as_torch(run, Partial, weight_decay=0.1, k=k)


def test_a_step_without_any_gradient_changes_nothing() -> None:
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(3), lambda model, step: model(vectors(step)).square().mean())
        opt.synchronize()
        before = weights(model)
        opt.step()
        opt.zero_grad()
        opt.synchronize()
        assert differing(before, weights(model)) == []
        assert opt.statistics().step == 3


def test_half_of_the_layers_in_each_precision() -> None:
    """A layer may mix dtypes, segment by segment."""

    def mixed() -> nn.Module:
        model = perceptron(depth=3)
        for block in model:
            block[0].weight.data = block[0].weight.data.bfloat16()
        return model

    with torch.autocast("cpu", torch.bfloat16):
        same_as_torch(lambda model, opt: train(model, opt, range(20), in_parts), mixed, k=0.4)


@pytest.mark.parametrize("k", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("first", [0, 3])
def test_denormal_numbers_are_flushed_where_torch_flushes_them(first: int, k: float) -> None:
    """From this step on. Gradients are just no denormal numbers, and a tenth of them is one."""

    def tiny_loss(model: nn.Module, step: int) -> torch.Tensor:
        return square_loss(model, step) * 2e-35

    def run(model: nn.Module, opt: Any) -> None:
        try:
            for step in range(6):
                torch.set_flush_denormal(step >= first)
                train(model, opt, [step], tiny_loss)
        finally:
            torch.set_flush_denormal(False)
        averages.append({name: each for name, each in state(opt).items() if not name.startswith("step")})

    averages: list[dict[str, torch.Tensor]] = []
    same_as_torch(run, perceptron, eps=2e-38, k=k)
    assert differing(*averages) == []
    assert any((each != 0).any() for each in averages[0].values())
