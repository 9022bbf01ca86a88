"""Several backwards to one step: which of them is the last, and the sums until then.

    backward 1 … n-1    gradient ─▶ sum, float32, made on the parameter's device  nothing leaves
    backward n          gradient + sum ─▶ the gradient's own dtype ─▶ its layer   as if there had been one backward
    step() before that  sum ─▶ the gradient's own dtype ─▶ its layer

Sums are made in the order of the backwards, wherever the layer's owner is, so the bits do not depend on k. They lie on
the device if it has room for them when the first one is made, else in host memory (sums.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from hytrain.memory.transfer import Transfers
from hytrain.model.trained import TrainedParameter
from hytrain.step.sums import DeviceSums, HostSums, Sums

_log = logging.getLogger(__name__)


class Accumulation:
    """One optimizer's: which backward is a step's last, and the sums of those before it.

    `has_sums`: there has been a sum; until then `take` has nothing to add.
    """

    def __init__(self, backwards: int) -> None:
        self._backwards = backwards
        self._held = False
        self._goes_on: Callable[[], bool] = lambda: False
        self.begin_anew(DeviceSums)

    def begin_anew(self, choose: Callable[[], Sums]) -> None:
        """Sum up over other layers from now on. `choose` says where sums are to lie, when the first one is made."""
        self._choose = choose
        self._sums: Sums = DeviceSums()
        self.has_sums = False

    @property
    def pending(self) -> list[TrainedParameter]:
        """Parameters with a sum that has not been taken."""
        return self._sums.waiting()

    @property
    def advice(self) -> str:
        """When to call `step()`."""
        if self._backwards == 1:
            return "call opt.step() after each backward, or pass grad_accumulation=n"
        return f"with grad_accumulation={self._backwards}, call opt.step() after so many"

    @contextmanager
    def held(self) -> Iterator[None]:
        """No backward inside is the last."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def ask(self, goes_on: Callable[[], bool]) -> None:
        """Let a loop say whether more backwards follow. Once they did, only it knows, whatever their number."""
        self._goes_on = goes_on

    def begin(self, ended: int) -> bool:
        """A backward begins, after `ended` others of the step; whether it is the last."""
        if goes_on := self._goes_on():
            self._backwards = 1
        self._sums.begin()
        return not (self._held or goes_on) and ended + 1 >= self._backwards

    def add(self, parameter: TrainedParameter) -> None:
        """Take the parameter's gradient away, into its sum."""
        gradient = parameter.gradient()
        parameter.parameter.grad = None  # so that autograd does not add to it, or keep it
        if not self.has_sums:
            self._sums, self.has_sums = self._choose(), True
        total = self._sums.take(parameter)
        self._sums.put(parameter, gradient.float() if total is None else total.add_(gradient))

    def take(self, parameter: TrainedParameter) -> Tensor:
        """The step's gradient in storage order, shape (numel,): the last backward's and the sum, or one of them."""
        total = self._sums.take(parameter)
        if total is None:
            return parameter.gradient()
        if parameter.parameter.grad is not None:
            total.add_(parameter.gradient())
        return total.to(parameter.parameter.dtype)

    def drop(self) -> None:
        """The sums are not wanted."""
        self._sums.clear()

    def close(self) -> None:
        """Give the memory of sums up, once no copy is under way."""
        self._sums.clear()
        self._sums.close()


def choose_sums(
    place: str, parameters: Sequence[TrainedParameter], transfers: Transfers, free_bytes: int | None
) -> Sums:
    """Where sums lie: "device", "host", or "auto", the device if `free_bytes` suffice, None being any amount."""
    needed = 4 * sum(known.parameter.numel() for known in parameters)
    if place == "auto":
        place = "device" if free_bytes is None or needed <= free_bytes else "host"
        free = "enough" if free_bytes is None else f"{free_bytes / 1e9:.2f} GB"
        _log.info("sums of gradients take %.2f GB on the %s; free on the device: %s", needed / 1e9, place, free)
    return DeviceSums() if place == "device" else HostSums(transfers)
