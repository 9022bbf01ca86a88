"""Several backwards to one step: which of them is the last, and the sums until then.

    backward 1 … n-1    gradient ─▶ sum, float32, on the parameter's device       nothing leaves
    backward n          gradient + sum ─▶ the gradient's own dtype ─▶ its layer   as if there had been one backward
    step() before that  sum ─▶ the gradient's own dtype ─▶ its layer

Sums are made in the order of the backwards, wherever the layer's owner is, so the bits do not depend on k.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from hytrain.planes import TrainedParameter


class Accumulation:
    """One model's. `is_last` says of the backward that runs, or ran last, whether the step's updates begin in it."""

    def __init__(self, backwards: int) -> None:
        self.backwards = backwards
        self.is_last = True
        self._done = 0  # of this step
        self._held = False
        self._sums: dict[TrainedParameter, Tensor] = {}

    @property
    def is_first(self) -> bool:
        """Whether no backward of the step has ended yet."""
        return self._done == 0

    @property
    def pending(self) -> list[TrainedParameter]:
        """Parameters with a sum that has not been taken."""
        return list(self._sums)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No backward inside is the last."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def begin(self) -> None:
        """A backward begins."""
        self.is_last = not self._held and self._done + 1 >= self.backwards

    def end(self) -> None:
        """It has ended well."""
        self._done += 1

    def add(self, parameter: TrainedParameter) -> None:
        """Take the parameter's gradient away, into its sum."""
        gradient = parameter.gradient()
        parameter.parameter.grad = None  # so that autograd does not add to it, or keep it
        if (total := self._sums.get(parameter)) is None:
            self._sums[parameter] = gradient.float()
        else:
            total.add_(gradient)

    def take(self, parameter: TrainedParameter) -> Tensor:
        """The step's gradient in storage order, shape (numel,): the last backward's and the sum, or one of them."""
        total = self._sums.pop(parameter, None)
        if total is None:
            return parameter.gradient()
        if parameter.parameter.grad is not None:
            total.add_(parameter.gradient())
        return total.to(parameter.parameter.dtype)

    def reset(self) -> None:
        """The step is over, or its gradients are not wanted."""
        self._sums.clear()
        self._done, self.is_last = 0, True
