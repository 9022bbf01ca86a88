"""Hyperparameters as the user means them, and the scalars that one AdamW update needs.

The trainer reads a `Hyper` from each parameter group at a step's first gradient; whoever runs the update
turns it and the segment's step count into `Scalars`. Pure arithmetic on Python floats, which are doubles:
each scalar is rounded to float32 once, where it enters a kernel, as torch's fused AdamW does it.

    Hyper + step  ->  Scalars  ->  Backend.update (host memory)  or  gpu.update (device tensors)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """One parameter group's hyperparameters, with the meanings of torch.optim.AdamW."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """What the update of one segment at one step multiplies and divides by (Loshchilov & Hutter, 2019).

        g = factor * g                                  -1 to maximize, times what clipping scales by
        m = m + mix1 * (g - m)
        v = v * beta2 + mix2 * g * g
        p = p * decay + (neg_step_size * m) / (sqrt(v) / sqrt_bias2 + eps)

    `hyper` and `step` ride along for the backends that compute these values themselves.
    """

    hyper: Hyper
    step: int
    scale: float
    factor: float
    mix1: float
    mix2: float
    beta2: float
    decay: float
    neg_step_size: float
    sqrt_bias2: float
    eps: float


@lru_cache(maxsize=64)  # one step's segments share them, whoever updates
def scalars(hyper: Hyper, step: int, scale: float = 1.0) -> Scalars:
    """The scalars of a segment's update number `step`, counted from 1. Raises ValueError for step 0.

    `scale` is what the gradient is multiplied by first, a float32.
    """
    if step < 1:
        raise ValueError(f"an update's step counts from 1, not {step}: increment it before the update")
    return Scalars(
        hyper=hyper,
        step=step,
        scale=scale,
        factor=-scale if hyper.maximize else scale,
        mix1=1 - hyper.beta1,
        mix2=1 - hyper.beta2,
        beta2=hyper.beta2,
        decay=1 - hyper.lr * hyper.weight_decay,
        neg_step_size=-(hyper.lr / (1 - hyper.beta1**step)),
        sqrt_bias2=math.sqrt(1 - hyper.beta2**step),
        eps=hyper.eps,
    )
