"""The scale of the loss, which keeps gradients above what float16 rounds to zero. They are divided by it again.

    opt.scale(loss) ─▶ backward ─▶ gradients times the scale ─▶ their norm ─▶ verdict, with 1/scale in it ─▶ updates
                                                                  └─ finite, or not ─▶ the next step's scale

`verdict` owns it. Its numbers stay on the device, where they are made: nobody waits for them.
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
    """A number; or "dynamic": doubled after so many good steps in a row, halved by one that is not finite.

    `value` is the present scale, float32 on the device, shape (). A graph may keep it, so it is never written.
    """

    def __init__(self, wanted: float | str, device: torch.device) -> None:
        self._is_dynamic = wanted == "dynamic"
        self.value = torch.full((), INITIAL if self._is_dynamic else float(wanted), device=device, dtype=torch.float32)
        self._good_steps = torch.zeros((), device=device, dtype=torch.int32)
        self._scaled = 0  # losses of this step that no backward has begun from

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the present scale."""
        self._scaled += 1
        return loss * self.value

    def claim(self) -> bool:
        """A backward begins: whether a loss was scaled for it."""
        self._scaled -= 1
        return self._scaled >= 0

    def end_step(self) -> None:
        """What was scaled and not gone backward from is no part of the next step."""
        self._scaled = 0

    @property
    def inverse(self) -> Tensor:
        """What scaled gradients are multiplied by, rounded once."""
        return self.value.double().reciprocal().float()

    def learn(self, finite: Tensor) -> None:
        """A step is over, and its gradients were finite, or were not."""
        if self._is_dynamic:
            value, good_steps = self.value.clone(), self._good_steps.clone()
            torch._amp_update_scale_(value, good_steps, (~finite).float(), GROWTH, BACKOFF, GROWTH_STEPS)
            self.value, self._good_steps = value, good_steps

    def state(self) -> dict[str, float]:
        """To be saved. Waits for the device."""
        return {"scale": float(self.value), "good_steps": int(self._good_steps)}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from what `state` gave; a fixed scale stays as it is, and so does one that was not saved."""
        if self._is_dynamic and state is not None:
            self.value = torch.full_like(self.value, state["scale"])
            self._good_steps = torch.full_like(self._good_steps, state["good_steps"])
