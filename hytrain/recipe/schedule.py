"""The learning rate over the run: linear warm-up, then half a cosine down to `min_lr`."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hytrain.recipe import config


def cosine(optimizer: Optimizer, train: config.Train, start: int) -> LambdaLR:
    """A scheduler after `start` finished steps. The rate depends on the step alone, so there is no state to save."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = train.lr
    return LambdaLR(optimizer, lambda step: factor(step, train), last_epoch=start - 1)


def factor(step: int, train: config.Train) -> float:
    """The learning rate of step number `step` (from 0) as a fraction of `train.lr`."""
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    floor = train.min_lr / train.lr
    done = (step - train.warmup_steps) / (train.length - train.warmup_steps)
    return floor + (1 - floor) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
