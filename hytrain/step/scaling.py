"""Loss scaling: keeps small gradients from rounding to zero in float16. The update divides them by the scale.

    opt.scale(loss) ─▶ backward ─▶ gradients times the scale ─▶ their norm ─▶ verdict, with 1/scale in it ─▶ updates
                                                                  └─ finite, or not ─▶ the next step's scale

`verdict` owns the scale. It is computed and kept on the device, so nothing waits for it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

# The defaults of torch.amp.GradScaler.
INITIAL: Final = 2.0**16
GROWTH: Final = 2.0
BACKOFF: Final = 0.5
GROWTH_STEPS: Final = 2000


class LossScale:
    """A fixed number; or "dynamic": doubled after `GROWTH_STEPS` good steps in a row, halved by a non-finite step.

    `value` is the current scale: float32 on the device, shape (). It is never written in place: a graph may keep it.
    """

    def __init__(self, wanted: float | str, device: torch.device) -> None:
        self._is_dynamic = wanted == "dynamic"
        self.value = torch.full((), INITIAL if self._is_dynamic else float(wanted), device=device, dtype=torch.float32)
        self._good_steps = torch.zeros((), device=device, dtype=torch.int32)
        self._scaled = 0  # losses of this step whose backward has not begun

    def scale(self, loss: Tensor) -> Tensor:
        self._scaled += 1
        return loss * self.value

    def claim(self) -> bool:
        """A backward begins. Returns whether a loss was scaled for it."""
        was_scaled = self._scaled > 0
        self._scaled -= was_scaled
        return was_scaled

    def end_step(self) -> None:
        """Forget losses that were scaled but had no backward."""
        self._scaled = 0

    @property
    def inverse(self) -> Tensor:
        """The factor that unscales gradients, rounded once."""
        return self.value.double().reciprocal().float()

    def learn(self, finite: Tensor) -> None:
        """Adapt the scale after a step. `finite` says whether the step's gradients were finite."""
        if self._is_dynamic:
            value, good_steps = self.value.clone(), self._good_steps.clone()
            torch._amp_update_scale_(value, good_steps, (~finite).float(), GROWTH, BACKOFF, GROWTH_STEPS)
            self.value, self._good_steps = value, good_steps

    def state(self) -> dict[str, float]:
        """The state to save. Waits for the device."""
        return {"scale": float(self.value), "good_steps": int(self._good_steps)}

    def load(self, state: dict[str, Any] | None) -> None:
        """Load a saved state. A fixed scale does not change; without a saved state, nor does a dynamic one."""
        if self._is_dynamic and state is not None:
            self.value = torch.full_like(self.value, state["scale"])
            self._good_steps = torch.full_like(self._good_steps, state["good_steps"])
