"""The optimizer that a recipe asks for, and its learning rate: linear warm-up, then one of Transformers' schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from hytrain.checks import muon_groups
from hytrain.errors import ConfigError
from hytrain.optimizer import Optimizer
from hytrain.recipe import config
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


def factors(train: config.Train) -> Callable[[int], float]:
    """The learning rate of step number `step` (from 0) as a fraction of `train.lr`.

    Raises ConfigError if `train.schedule_options` do not fit the schedule.
    """
    warmup = train.warmup_steps
    try:
        library = get_scheduler(
            train.schedule, torch.optim.SGD([torch.zeros(1)], lr=train.lr), warmup, train.length, train.schedule_options
        )
        shape: Callable[[int], float] = library.lr_lambdas[0]
        shape(warmup)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"train.schedule_options do not fit train.schedule: {train.schedule}: {error}.") from None
    floor = train.min_lr / train.lr

    def fraction(step: int) -> float:
        if step < warmup:  # Transformers' own warm-up has a learning rate of 0 in the first step
            return (step + 1) / warmup
        return floor + (1 - floor) * shape(min(step, train.length))

    return fraction


def scheduler(optimizer: torch.optim.Optimizer, train: config.Train, start: int) -> LambdaLR:
    """A scheduler after `start` finished steps. The rate depends on the step alone, so there is no state to save."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = train.lr
    return LambdaLR(optimizer, factors(train), last_epoch=start - 1)
