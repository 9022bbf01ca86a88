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

from hytrain.memory.planes import TrainedParameter
from hytrain.memory.transfer import Transfers
from hytrain.step.sums import DeviceSums, HostSums, Sums

_log = logging.getLogger(__name__)


class Accumulation:
    """One model's. `is_last` says of the backward that runs, or ran last, whether the step's updates begin in it."""

    def __init__(self, backwards: int, choose: Callable[[], Sums]) -> None:
        """`choose` says where sums are to lie, when the first one is made."""
        self.backwards = backwards
        self.is_last = True
        self._done = 0  # of this step
        self._held = False
        self._goes_on: Callable[[], bool] = lambda: False
        self._choose = choose
        self._sums: Sums = DeviceSums()
        self._has_chosen = False

    @property
    def is_first(self) -> bool:
        """Whether no backward of the step has ended yet."""
        return self._done == 0

    @property
    def pending(self) -> list[TrainedParameter]:
        """Parameters with a sum that has not been taken."""
        return self._sums.waiting()

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

    def begin(self) -> None:
        """A backward begins."""
        if goes_on := self._goes_on():
            self.backwards = 1
        self.is_last = not (self._held or goes_on) and self._done + 1 >= self.backwards
        self._sums.begin()

    def end(self) -> None:
        """It has ended well."""
        self._done += 1

    def add(self, parameter: TrainedParameter) -> None:
        """Take the parameter's gradient away, into its sum."""
        gradient = parameter.gradient()
        parameter.parameter.grad = None  # so that autograd does not add to it, or keep it
        if not self._has_chosen:
            self._sums, self._has_chosen = self._choose(), True
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

    def reset(self) -> None:
        """The step is over, or its gradients are not wanted."""
        self._sums.clear()
        self._done, self.is_last = 0, True

    def close(self) -> None:
        """Give the memory of sums up, once no copy is under way."""
        self.reset()
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
