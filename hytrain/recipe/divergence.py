"""Whether training has diverged: a loss, a validation loss or weights that are not finite.

Where steps whose gradients are not finite are skipped, one such step may be that of a bad batch, and float16 begins
with some. Then it takes many of them in a row.

The journal passes in each step's numbers once they have been read; the loop has the weights checked before it saves
them, and stops.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from hytrain.recipe import config
from hytrain.recipe.parallel import Job

SKIPPED_IN_A_ROW = 20


class Divergence:
    """`step` is the first step that shows it, counted from 1, or None; `sign` says what was seen."""

    step: int | None = None
    sign = ""

    def __init__(self, train: config.Train) -> None:
        self._skips = train.on_nonfinite == "skip" or train.loss_scale is not None
        self._in_a_row = 0

    def look_at_step(self, step: int, loss: float, grad_norm: float) -> None:
        """`grad_norm` is any finite number if it is not known."""
        if not self._skips:
            if not math.isfinite(loss):
                self._note(step, f"the loss of step {step} is {loss}")
            return
        self._in_a_row = 0 if math.isfinite(loss) and math.isfinite(grad_norm) else self._in_a_row + 1
        if self._in_a_row == SKIPPED_IN_A_ROW:
            self._note(
                step, f"the last {SKIPPED_IN_A_ROW} steps until step {step} had a loss or gradients with inf or NaN"
            )

    def look_at_validation(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            self._note(step, f"the validation loss after step {step} is {loss}")

    @torch.no_grad()
    def look_at_weights(self, step: int, model: nn.Module, job: Job) -> bool:
        """Whether all parameters are finite, on all ranks. Waits for the device."""
        shards = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
        weights = [shard for shard in shards if shard.numel()]
        finite = all(job.ranks.gather(bool(get_total_norm(weights, norm_type=math.inf).isfinite())))
        if not finite:
            self._note(step, f"the weights after step {step} are not finite")
        return finite

    def _note(self, step: int, sign: str) -> None:
        if self.step is None:
            self.step, self.sign = step, sign
