"""The loss of each step as a number, without ever making the GPU wait for the question.

    step t    loss[t] ─ copy ─▶ pinned slot ─ event
    step t+1  loss[t+1] ─ copy ─▶ other slot     ; event of t has long passed ─▶ float(loss[t])

The loop's journal puts the loss of one step in and gets the one before out.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LossReader:
    """At most one loss is under way; on a CPU it is simply a tensor that is read later."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._slots = [torch.zeros((), pin_memory=self._on_gpu) for _ in range(2)]
        self._event: torch.cuda.Event | None = None
        self._waiting = False

    def swap(self, loss: Tensor) -> float | None:
        """Starts reading `loss`, a scalar of any dtype, and returns the previous one if there was one."""
        slot, event = self._slots[1], None
        slot.copy_(loss.detach(), non_blocking=self._on_gpu)
        if self._on_gpu:
            event = torch.cuda.Event(blocking=True)
            event.record()
        previous = self.take()
        self._slots.reverse()
        self._event, self._waiting = event, True
        return previous

    def take(self) -> float | None:
        """The loss under way, or None if there is none; waits for its copy."""
        if not self._waiting:
            return None
        if self._event is not None:
            self._event.synchronize()
        self._waiting = False
        return float(self._slots[0])
