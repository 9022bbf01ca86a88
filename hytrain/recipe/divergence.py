"""Whether training has diverged: a loss, a validation loss or weights that are not finite.

The journal looks at each loss when it has been read; the loop looks at the weights before it saves them, and stops.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from hytrain.recipe import config

#: Where steps with inf or NaN are skipped, one such loss may be that of a bad batch, and the weights are still good.
LOSSES_IN_A_ROW = 10


class Divergence:
    """`step` is the first step that shows it, counted from 1, or None; `sign` says what was seen."""

    step: int | None = None
    sign = ""

    def __init__(self, train: config.Train) -> None:
        skips = train.on_nonfinite == "skip" or train.loss_scale is not None
        self._patience = LOSSES_IN_A_ROW if skips else 1
        self._in_a_row = 0

    def look_at_loss(self, step: int, loss: float) -> None:
        self._in_a_row = 0 if math.isfinite(loss) else self._in_a_row + 1
        if self._in_a_row >= self._patience:
            self._note(step, f"the loss of step {step} is {loss}")

    def look_at_validation(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            self._note(step, f"the validation loss after step {step} is {loss}")

    @torch.no_grad()
    def look_at_weights(self, step: int, model: nn.Module) -> bool:
        """Whether all parameters are finite. Waits for the device."""
        finite = bool(get_total_norm(model.parameters(), norm_type=math.inf).isfinite())
        if not finite:
            self._note(step, f"the weights after step {step} are not finite")
        return finite

    def _note(self, step: int, sign: str) -> None:
        if self.step is None:
            self.step, self.sign = step, sign
