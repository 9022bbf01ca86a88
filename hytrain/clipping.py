"""Gradient norms, and what they say about a step: how its gradients are scaled, or that it is skipped.

Global:

    layer full ─ add: one norm a segment ─┐
    backward over ─ judge ────────────────┴─▶ norm ─▶ scale, on the device ─▶ GPU-owned layers, now
                                                      └─ copied to the host ─▶ Verdict ─▶ optimizer: its layers

The norms are computed where gradients appear, whoever owns the layer, and summed up in the parameters' order: as
`torch.nn.utils.clip_grad_norm_` does it, but in float32 for any gradient, and for a parameter in pieces piece by
piece. So scale and verdict do not depend on k. Nothing here waits for the device but `settle`.

Per layer, a different algorithm: each layer's gradients are scaled by their own norm as soon as they are complete.
Nobody waits for a verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hytrain.checks import Options
from hytrain.errors import NonFiniteGradients
from hytrain.planes import TrainedLayer, TrainedParameter
from hytrain.transfer import Transfer, Transfers
from protocol.messages import Verdict

#: As in torch.nn.utils.clip_grad_norm_.
NORM_EPS: Final = 1e-6
#: What the scale is for a step that is to be left out.
SKIPPED: Final = -1.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was decided about a step, on its way to the host."""

    step: int
    arrival: Transfer
    _on_host: Tensor

    @property
    def scale(self) -> float:
        """Once it has arrived."""
        return float(self._on_host[0])

    def verdict(self) -> Verdict:
        """What the optimizer is told, once it has arrived."""
        skipped = self.scale == SKIPPED
        return Verdict(step=self.step, scale=1.0 if skipped else self.scale, skipped=skipped)


class Clipping:
    """One model's norms. `grad_norm` is the last step's, `scale` what its gradients are multiplied by: float32
    scalars on the device. `skipped` counts the steps that were left out.
    """

    def __init__(self, parameters: list[TrainedParameter], options: Options, transfers: Transfers) -> None:
        self._parameters, self._transfers = parameters, transfers
        self._max_norm = options.max_grad_norm if options.clip == "global" else None
        self._max_layer_norm = options.max_grad_norm if options.clip == "per_layer" else None
        self._on_nonfinite = options.on_nonfinite
        self._order = {id(known): index for index, known in enumerate(parameters)}
        self._norms: dict[tuple[int, int], Tensor] = {}
        self._last: Judgement | None = None
        self.grad_norm: Tensor | None = None
        self.scale: Tensor | None = None
        self.skipped = 0

    @property
    def is_wanted(self) -> bool:
        """Whether steps wait for a verdict."""
        return self._max_norm is not None or self._on_nonfinite is not None

    def add(self, layer: TrainedLayer) -> None:
        """The layer's gradients are complete, in `filled`."""
        if not self.is_wanted and self._max_layer_norm is None:
            return
        norms = {
            index: torch.linalg.vector_norm(gradient, dtype=torch.float32) for index, gradient in layer.filled.items()
        }
        if self.is_wanted:
            for index, norm in norms.items():
                segment = layer.segments[index]
                self._norms[self._order[id(segment.owner)], segment.start] = norm
        if self._max_layer_norm is not None:
            norm = torch.linalg.vector_norm(torch.stack([norms[index] for index in sorted(norms)]))
            scale = torch.clamp(self._max_layer_norm / (norm + NORM_EPS), max=1.0)
            for gradient in layer.filled.values():
                gradient.mul_(scale)

    def judge(self, step: int) -> Judgement:
        """All gradients of `step` are there: decide on the device, and send the decision to the host.

        The last one was settled before.
        """
        norm = torch.linalg.vector_norm(torch.stack([self._norms[place] for place in sorted(self._norms)]))
        self._norms.clear()
        scale = torch.ones_like(norm)
        if self._max_norm is not None:
            scale = torch.clamp(self._max_norm / (norm + NORM_EPS), max=1.0)
        if self._on_nonfinite is not None:
            scale = torch.where(torch.isfinite(norm), scale, SKIPPED)
        self.grad_norm, self.scale = norm, scale
        on_host = torch.empty(1, pin_memory=scale.is_cuda)
        self._last = Judgement(step, self._transfers.state_out([(on_host, scale.view(1))]), on_host)
        return self._last

    def host_scale(self) -> float | None:
        """On device "cpu", what to multiply gradients by now; None for nothing is to be done."""
        scale = 1.0 if self.scale is None else float(self.scale)
        return None if scale == SKIPPED else scale

    def close(self) -> None:
        """Give the norms up."""
        self._norms.clear()

    def settle(self) -> None:
        """Count the last step, once its verdict is known; a skipped one counts for no parameter.

        Raises `NonFiniteGradients`, once, for a skipped step if it is to raise.
        """
        last, self._last = self._last, None
        if last is None:
            return
        last.arrival.synchronize()
        if last.scale != SKIPPED:
            return
        self.skipped += 1
        for known in self._parameters:
            known.count -= known.step == last.step
        if self._on_nonfinite == "raise":
            raise NonFiniteGradients(
                f"a gradient of step {last.step} was not finite: the step was left out, every bit of the state is as "
                'before; look at the loss, or pass on_nonfinite="skip"'
            )
