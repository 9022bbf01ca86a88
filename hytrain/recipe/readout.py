"""Reads a step's loss and norm from tensors without synchronizing the GPU.

    step t    numbers[t] ─ copy ─▶ pinned slot ─ event
    step t+1  numbers[t+1] ─ copy ─▶ other slot    ; the event of t has passed ─▶ floats of t

The journal passes in the numbers of one step and gets those of the step before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Readout:
    """At most one step's numbers are pending. On a CPU they are tensors that are read later."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._slots = [torch.zeros(0, dtype=torch.float32), torch.zeros(0, dtype=torch.float32)]
        self._event: torch.cuda.Event | None = None
        self._names: tuple[str, ...] | None = None

    def swap(self, numbers: Mapping[str, Tensor]) -> dict[str, float] | None:
        """Starts reading `numbers`, scalars of any dtype, and returns the previous ones, or None."""
        values = torch.stack([number.detach().float() for number in numbers.values()])
        if self._slots[1].shape != values.shape:
            self._slots[1] = torch.zeros(values.shape, dtype=torch.float32, device="cpu", pin_memory=self._on_gpu)
        slot, event = self._slots[1], None
        slot.copy_(values, non_blocking=self._on_gpu)
        if self._on_gpu:
            event = torch.cuda.Event(blocking=True)
            event.record()
        previous = self.take()
        self._slots.reverse()
        self._event, self._names = event, tuple(numbers)
        return previous

    def take(self) -> dict[str, float] | None:
        """The pending numbers, or None if there are none. Waits for their copy."""
        if self._names is None:
            return None
        if self._event is not None:
            self._event.synchronize()
        names, self._names = self._names, None
        return dict(zip(names, self._slots[0].tolist(), strict=True))
