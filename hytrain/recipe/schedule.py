"""The learning rate over the run: linear warm-up, then one of Transformers' schedules down to `min_lr`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from hytrain.errors import ConfigError
from hytrain.recipe import config


def factors(train: config.Train) -> Callable[[int], float]:
    """The learning rate of step number `step` (from 0) as a fraction of `train.lr`.

    Raises ConfigError if `train.schedule_options` do not fit the schedule.
    """
    warmup = train.warmup_steps
    try:
        library = get_scheduler(
            train.schedule, SGD([torch.zeros(1)], lr=train.lr), warmup, train.length, train.schedule_options
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


def scheduler(optimizer: Optimizer, train: config.Train, start: int) -> LambdaLR:
    """A scheduler after `start` finished steps. The rate depends on the step alone, so there is no state to save."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = train.lr
    return LambdaLR(optimizer, factors(train), last_epoch=start - 1)
