"""The interface of an optimizer in the loop, and HyTrain's own optimizer made from a recipe.

The loop and the checkpoints use the protocol alone, so a plain PyTorch optimizer can implement it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from hytrain.checks import muon_groups
from hytrain.recipe.config import Recipe
from hytrain.recipe.model import decay_groups
from hytrain.statistics import Statistics

Process = tuple[str, int, Iterable[int]]  # role, process ID, cores


class TrainingOptimizer(Protocol):
    """An optimizer of HyTrain as the loop uses it: a `torch.optim.Optimizer` that writes a log and saves itself."""

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
    def checkpoint_requested(self) -> bool: ...
    def async_save(self, folder: Path) -> Future[None]: ...
    def load(self, folder: Path) -> None: ...
    def processes(self) -> list[Process]: ...


Factory = Callable[[nn.Module, Recipe], TrainingOptimizer]


def hytrain_optimizer(model: nn.Module, recipe: Recipe) -> TrainingOptimizer:
    """HyTrain's optimizer with the recipe's options; the default of the loop."""
    import hytrain

    kinds = {"adamw": hytrain.AdamW, "sgd": hytrain.SGD, "lion": hytrain.Lion, "muon": hytrain.Muon}
    train, options = recipe.train, recipe.optimizer.model_dump()
    dtype = options.pop("gradient_dtype")
    groups, numbers = decay_groups(model, train.weight_decay), train.hyperparameters
    if train.optimizer == "muon":  # one learning rate, and one schedule, for both of its algorithms
        groups = _split(groups, muon_groups(model))
        numbers = {"lr": train.lr, "adjust_lr_fn": "match_rms_adamw", "adamw": numbers}
    names = {"weight_decay", "grad_accumulation", "max_grad_norm", "loss_scale", "on_nonfinite"}
    optimizer = kinds[train.optimizer](
        model,
        param_groups=groups,
        gradient_dtype=None if dtype == "auto" else getattr(torch, dtype),
        **numbers,
        **train.model_dump(include=names),
        updates="backward",
        **options,
    )
    return cast(TrainingOptimizer, optimizer)


def _split(groups: list[dict[str, Any]], of_muon: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each group in two: the parameters that are Muon's, and the others."""
    hidden = {id(parameter) for group in of_muon if group["use_muon"] for _, parameter in group["params"]}
    halves = [
        {**group, "params": [p for p in group["params"] if (id(p) in hidden) is use_muon], "use_muon": use_muon}
        for group in groups
        for use_muon in (True, False)
    ]
    return [half for half in halves if half["params"]]
