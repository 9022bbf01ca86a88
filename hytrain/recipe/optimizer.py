"""What the loop needs of an optimizer, and the making of HyTrain's own from a recipe.

The loop and the checkpoints see the protocol alone, so that a plain PyTorch optimizer can stand behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from hytrain.recipe.config import Recipe
from hytrain.recipe.model import decay_groups

Process = tuple[str, int, Iterable[int]]  # role, process number, cores


class Statistics(Protocol):
    """How the last step went."""

    @property
    def k(self) -> float: ...
    @property
    def stall_s(self) -> float: ...


class TrainingOptimizer(Protocol):
    """`hytrain.AdamW` as the loop uses it: a `torch.optim.Optimizer` that keeps records and saves itself."""

    param_groups: list[dict[str, Any]]

    @property
    def grad_norm(self) -> Tensor | None: ...
    @property
    def loss_scale(self) -> Tensor | None: ...
    def scale(self, loss: Tensor) -> Tensor: ...
    def step(self) -> object: ...
    def zero_grad(self) -> None: ...
    def synchronize(self) -> None: ...
    def log(self, step: int, **numbers: float) -> None: ...
    def statistics(self) -> Statistics: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def processes(self) -> list[Process]: ...


Factory = Callable[[nn.Module, Recipe], TrainingOptimizer]


def hytrain_adamw(model: nn.Module, recipe: Recipe) -> TrainingOptimizer:
    """`hytrain.AdamW` with the recipe's numbers; the default of the loop."""
    import hytrain

    train, wanted = recipe.train, recipe.optimizer
    options: dict[str, Any] = {}
    if wanted.gradient_dtype != "auto":
        options["gradient_dtype"] = getattr(torch, wanted.gradient_dtype)
    optimizer = hytrain.AdamW(
        model,
        decay_groups(model, train.weight_decay),
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        grad_accumulation=train.grad_accumulation,
        max_grad_norm=train.max_grad_norm,
        loss_scale=train.loss_scale,
        speculate=wanted.speculate,
        k=wanted.k,
        policy=wanted.policy,
        objective=wanted.objective,
        backend=wanted.backend,
        **options,
    )
    return cast(TrainingOptimizer, optimizer)
