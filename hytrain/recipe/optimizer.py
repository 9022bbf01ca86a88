"""The optimizer that a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hytrain.checks import muon_groups
from hytrain.optimizer import Optimizer
from hytrain.recipe.config import Recipe
from hytrain.recipe.model import decay_groups

Process = tuple[str, int, Iterable[int]]  # role, process ID, cores
Factory = Callable[[nn.Module, Recipe], Optimizer]


def hytrain_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """HyTrain's optimizer with the recipe's options; the default of the loop."""
    import hytrain

    kinds: dict[str, Any] = {"adamw": hytrain.AdamW, "sgd": hytrain.SGD, "lion": hytrain.Lion, "muon": hytrain.Muon}
    train, options = recipe.train, recipe.optimizer.model_dump()
    dtype = options.pop("gradient_dtype")
    groups, numbers = decay_groups(model, train.weight_decay), train.hyperparameters
    if train.optimizer == "muon":  # one learning rate, and one schedule, for both of its algorithms
        groups = _split(groups, muon_groups(model))
        numbers = {"lr": train.lr, "adjust_lr_fn": "match_rms_adamw", "adamw": numbers}
    names = {"weight_decay", "grad_accumulation", "max_grad_norm", "loss_scale", "on_nonfinite"}
    made: Optimizer = kinds[train.optimizer](
        model,
        param_groups=groups,
        gradient_dtype=None if dtype == "auto" else getattr(torch, dtype),
        **numbers,
        **train.model_dump(include=names),
        updates="backward",
        **options,
    )
    return made


def _split(groups: list[dict[str, Any]], of_muon: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each group in two: the parameters that are Muon's, and the others."""
    hidden = {id(parameter) for group in of_muon if group["use_muon"] for _, parameter in group["params"]}
    halves = [
        {**group, "params": [p for p in group["params"] if (id(p) in hidden) is use_muon], "use_muon": use_muon}
        for group in groups
        for use_muon in (True, False)
    ]
    return [half for half in halves if half["params"]]
