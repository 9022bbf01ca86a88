"""Gradients that others have, too, where updates begin in backward: copied, and looked at again in `step()`."""

from __future__ import annotations

from torch import Tensor

from hytrain.model.trained import TrainedParameter
from hytrain.tensors import version


class KeptGradients:
    """A step's gradients in tensors that the loop has set as `p.grad`, or whose memory another tensor has.

    HyTrain takes a copy, and consumes that long before `step()`. So what others write after that would be lost.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[TrainedParameter, Tensor, int | None]] = []  # with their versions, once those count

    def copy_of(self, parameter: TrainedParameter) -> Tensor | None:
        """A copy of the parameter's gradient, shape (numel,), if others have the tensor or its memory; else None."""
        if (kept := parameter.kept()) is not None:
            self._kept.append((parameter, kept, None))  # autograd may add to what else is in the same memory
        elif (kept := parameter.shared()) is not None:
            self._kept.append((parameter, kept, version(kept)))
        return None if kept is None else parameter.gradient(parameter.parameter).clone()

    def end_backward(self) -> None:
        """From now on, no write of what the loop has set is autograd's."""
        self._kept = [(known, tensor, version(tensor) if seen is None else seen) for known, tensor, seen in self._kept]

    def written_since(self) -> TrainedParameter | None:
        """A parameter whose gradient was written after it was copied. Forgets them all."""
        kept, self._kept = self._kept, []
        return next((parameter for parameter, gradient, seen in kept if version(gradient) != seen), None)

    def close(self) -> None:
        self._kept.clear()
