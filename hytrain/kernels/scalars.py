"""The user's hyperparameters, and the scalars of one AdamW update.

The trainer reads a `Hyper` from each parameter group at a step's first gradient. Each backend turns it and the
segment's step count into `Scalars`. They are computed in double precision and rounded to float32 once, as they enter
a kernel, as in torch's fused AdamW.

    Hyper + step  ->  Scalars  ->  Backend.update (host memory)  or  gpu.update (device tensors)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

#: The scalars that kernels take, in the order of adamw.cpp's Scalars.
KERNEL_SCALARS = ("factor", "mix1", "mix2", "beta2", "decay", "neg_step_size", "sqrt_bias2", "eps")
kernel_scalars = attrgetter(*KERNEL_SCALARS)


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
    """The scalars in the update of one segment at one step (Loshchilov & Hutter, 2019).

        g = factor * g                                  the scale of clipping, negative to maximize
        m = m + mix1 * (g - m)
        v = v * beta2 + mix2 * g * g
        p = p * decay + (neg_step_size * m) / (sqrt(v) / sqrt_bias2 + eps)

    `hyper` and `step` are for the backends that compute these values themselves.
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


@lru_cache(maxsize=64)  # the segments of a step share them
def scalars(hyper: Hyper, step: int, scale: float = 1.0) -> Scalars:
    """The scalars of a segment's update number `step`, counted from 1, with the gradient multiplied by `scale`.

    `scale` is a float32. Raises ValueError for step 0.
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
