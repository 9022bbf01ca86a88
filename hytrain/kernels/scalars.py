"""The scalars of one update, from the user's hyperparameters.

The trainer reads a `Hyper` from each parameter group at a step's first gradient. Each backend turns it and the
segment's step count into `Scalars`. They are computed in double precision and rounded to float32 once, as they enter
a kernel, as in torch's optimizers.

    Hyper + step  ->  Scalars  ->  Backend.update (host memory)  or  gpu.update (device tensors)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from protocol.rules import AdamWHyper, Hyper, LionHyper, MuonHyper, SGDHyper


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """The scalars in the update of one segment at one step.

    `values` are what the rule's kernels take: `factor` first, by which they multiply the gradient, the scale of
    clipping, negative to maximize; then what the rule's function here returns. `hyper` and `step` are for the backends
    that compute these values themselves. `kernel` is the arithmetic: the rule, or a later pass of its update.
    Before that, the gradient is multiplied `by` a number, and rounded to its own dtype. Only backends do that.
    """

    hyper: Hyper
    step: int
    scale: float
    values: tuple[float, ...]
    kernel: str
    by: float = 1.0


def _adamw(hyper: AdamWHyper, step: int) -> tuple[float, ...]:
    """mix1, mix2, beta2, decay, neg_step_size, sqrt_bias2, eps and l2 (Loshchilov & Hutter, 2019).

    The weight decay is in `decay`, or, if it is not decoupled, in `l2` (Kingma & Ba, 2015). Without `l2`, its line is
    left out, as in `_sgd`.

    g = g + l2 * p
    m = m + mix1 * (g - m)
    v = v * beta2 + mix2 * g * g
    p = p * decay + (neg_step_size * m) / (sqrt(v) / sqrt_bias2 + eps)
    """
    return (
        1 - hyper.beta1,
        1 - hyper.beta2,
        hyper.beta2,
        1 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0,
        -(hyper.lr / (1 - hyper.beta1**step)),
        math.sqrt(1 - hyper.beta2**step),
        hyper.eps,
        0.0 if hyper.decoupled else hyper.weight_decay,
    )


def _sgd(hyper: SGDHyper, step: int) -> tuple[float, ...]:
    """weight_decay and neg_lr. Without weight decay its line is left out: 0 * p would turn -0 into 0, and inf into NaN.

    d = g + weight_decay * p
    p = p + neg_lr * d
    """
    return hyper.weight_decay, -hyper.lr


def _sgd_momentum(hyper: SGDHyper, step: int) -> tuple[float, ...]:
    """weight_decay, neg_lr, keep, mix and ahead (Sutskever et al., 2013, in torch's form).

    Zeros leave out what torch leaves out: `keep` in the first update, whose buffer is the gradient, and `ahead` without
    Nesterov's momentum.

    d = g + weight_decay * p
    b = keep * b + mix * d      or d, if keep is 0
    p = p + neg_lr * (d + ahead * b)      or b, if ahead is 0
    """
    keep = hyper.momentum if step > 1 else 0.0
    return (*_sgd(hyper, step), keep, 1 - hyper.dampening, hyper.momentum if hyper.nesterov else 0.0)


def _lion(hyper: LionHyper, step: int) -> tuple[float, ...]:
    """beta1, mix1, beta2, mix2, decay and neg_lr (Chen et al., 2023).

    p = p * decay + neg_lr * sign(m * beta1 + g * mix1)
    m = m * beta2 + mix2 * g
    """
    decay = 1 - hyper.lr * hyper.weight_decay
    return hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, decay, -hyper.lr


def _muon(hyper: MuonHyper, step: int) -> tuple[float, ...]:
    """mix and ahead (Jordan et al., 2024, in torch's form): the first pass, whose result d is to be orthogonalized.

    Without Nesterov's momentum, `ahead` is 0.

    b = b + mix * (g - b)
    d = g + ahead * (b - g)      or b, if ahead is 0
    """
    return 1 - hyper.momentum, hyper.momentum if hyper.nesterov else 0.0


def muon_step(hyper: MuonHyper, step: int, rows: int, cols: int) -> Scalars:
    """decay and neg_lr: the last pass. Its gradient is the orthogonalized matrix, so no scale multiplies it.

    The learning rate is adjusted to the matrix as `torch.optim.Muon` does ("match_rms_adamw": Liu et al., 2025).

    p = p * decay + neg_lr * o
    """
    ratio = 0.2 * math.sqrt(max(rows, cols)) if hyper.adjust == "match_rms_adamw" else math.sqrt(max(1, rows / cols))
    values = (1.0, 1 - hyper.lr * hyper.weight_decay, -(hyper.lr * ratio))
    return Scalars(hyper=hyper, step=step, scale=1.0, values=values, kernel="muon_step")


#: Hyperparameters to measure each rule's updates with.
TYPICAL: Final[dict[str, Hyper]] = {
    hyper.rule: hyper
    for hyper in (
        AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0),
        SGDHyper(lr=1e-3, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=1e-4),
        SGDHyper(lr=1e-3, momentum=0.9, dampening=0.0, nesterov=False, weight_decay=1e-4),
        LionHyper(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0),
        MuonHyper(lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True),
    )
}
_OF_RULE: Final[dict[str, Callable[[Any, int], tuple[float, ...]]]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "sgd_momentum": _sgd_momentum,
    "lion": _lion,
    "muon": _muon,
}


@lru_cache(maxsize=256)  # the segments of a step share them
def scalars(hyper: Hyper, step: int, scale: float = 1.0, by: float = 1.0) -> Scalars:
    """The scalars of a segment's update number `step`, counted from 1, with the gradient multiplied by `scale`.

    Before, it is multiplied `by` a number and rounded. Both are float32. Raises ValueError for step 0.
    """
    if step < 1:
        raise ValueError(f"an update's step counts from 1, not {step}: increment it before the update")
    factor = -scale if hyper.maximize else scale
    values = (factor, *_OF_RULE[hyper.rule](hyper, step))
    return Scalars(hyper=hyper, step=step, scale=scale, values=values, kernel=hyper.rule, by=by)
