"""Gradient norms and the verdict on each step: the scale of its gradients, or that it is skipped.

Global clipping:

    layer full ─ add: norm by parameter ─┐
    backward over ─ judge ───────────────┴─▶ norm ─▶ scale, on the device ─▶ GPU-owned layers, now
                                                     └─ copied to the host ─▶ Verdict ─▶ optimizer: its layers

Norms are computed on the device, whoever owns the layer, and combined in the order of the parameters, by the functions
that `torch.nn.utils.clip_grad_norm_` calls, but always in float32. That of a parameter in pieces comes with the layer
that has its first. So scale and verdict do not depend on k. Only `count_last` waits for the device.

With a scaled loss, the gradients' norm is divided by the loss scale, and the verdict's scale includes that division. A
non-finite step is skipped, and lowers a dynamic loss scale.

With several ranks, each counts the parts that no earlier rank has, and the squares of their norms are gathered and
added in the order of the ranks: all ranks come to the same verdict, in the same bits.

Per-layer clipping is a different algorithm: each layer's gradients are scaled by the layer's own norm as soon as they
are complete. No update waits for a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hytrain.errors import NonFiniteGradients
from hytrain.memory.transfer import Transfer, Transfers
from hytrain.model.trained import TrainedLayer, TrainedParameter
from hytrain.options import Options
from hytrain.run.ranks import Ranks
from hytrain.step.scaling import LossScale
from protocol.messages import Verdict

#: As in torch.nn.utils.clip_grad_norm_.
NORM_EPS: Final = 1e-6
#: The scale that marks a skipped step.
SKIPPED: Final = -1.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """The decision about a step, on its way to the host. Read it once `arrival` has finished.

    `is_loops`: the loop itself has multiplied the gradients.
    """

    step: int
    arrival: Transfer
    _on_host: Tensor
    is_loops: bool = False

    @property
    def scale(self) -> float:
        return float(self._on_host[0])

    def message(self) -> Verdict:
        """Called on the sender thread."""
        skipped = self.scale == SKIPPED and not self.is_loops
        return Verdict(step=self.step, scale=1.0 if skipped else self.scale, skipped=skipped, rounds=self.is_loops)


class Verdicts:
    """The norms and verdicts of one model.

    If `takes_norms` is set, `add` must see the gradients of each layer. If `awaited` is set, steps await a verdict.
    `grad_norm` is the last step's norm, `scale` the factor of its gradients: float32, shape (), on the device.
    `factor`: by which the loop has multiplied all gradients of this step that the CPU reads, in their dtype.
    `skipped` counts skipped steps. `loss_scale` is None if losses are not scaled. `counted` are the ids of the
    parameters that this rank counts in the norm.
    """

    def __init__(
        self,
        parameters: list[TrainedParameter],
        options: Options,
        transfers: Transfers,
        *,
        ranks: Ranks,
        counted: Set[int],
    ) -> None:
        self._parameters, self._transfers = parameters, transfers
        self._ranks, self._counted = ranks, counted
        self._max_norm = options.max_grad_norm if options.clip == "global" else None
        self._max_layer_norm = options.max_grad_norm if options.clip == "per_layer" else None
        self._on_nonfinite, self.awaited = options.on_nonfinite, options.awaits_verdict
        self._skips = options.skips_nonfinite
        self.takes_norms = self.awaited or self._max_layer_norm is not None
        wanted, self._device = options.loss_scale, parameters[0].own.device
        self.loss_scale = None if wanted is None else LossScale(wanted, self._device)
        self._order = {id(known): index for index, known in enumerate(parameters)}
        self._norms: dict[int, Tensor] = {}  # by number of the parameter
        self._last: Judgement | None = None
        self.grad_norm: Tensor | None = None
        self.scale: Tensor | None = None
        self.factor: Tensor | None = None
        self.skipped = 0

    def add(self, layer: TrainedLayer) -> None:
        """Add the norms of a layer whose gradients, in `filled`, are complete."""
        if self.awaited:
            begun = {i: layer.whole.get(i, grad) for i, grad in layer.filled.items() if layer.segments[i].start == 0}
            norms = _norms(list(begun.values()))
            for index, norm in zip(begun, norms, strict=True):
                owner = layer.segments[index].owner
                if id(owner.parameter) in self._counted:
                    self._norms[self._order[id(owner)]] = norm
        if self._max_layer_norm is not None:
            norm = torch.linalg.vector_norm(torch.stack(_norms([layer.filled[i] for i in sorted(layer.filled)])))
            scale = torch.clamp(self._max_layer_norm / (self._unscaled(norm) + NORM_EPS), max=1.0)
            for gradient in layer.filled.values():
                gradient.mul_(scale)

    def norm_of(self, layers: Iterable[TrainedLayer]) -> Tensor:
        """The norm of the step's gradients, before its verdict: `add` and `judge` are still to come."""
        for layer in layers:
            self.add(layer)
        return self._unscaled(self._total())

    def judge(self, step: int) -> Judgement:
        """All gradients of `step` have come: decide on the device, and start the copy out. `count_last` comes first."""
        norm = self._unscaled(self._total())
        scale = torch.ones_like(norm)
        if self._max_norm is not None:
            scale = torch.clamp(self._max_norm / (norm + NORM_EPS), max=1.0)
        scale, finite = self._unscaled(scale), torch.isfinite(norm)
        if self._skips:
            scale = torch.where(finite, scale, SKIPPED)
        if self.loss_scale is not None:
            self.loss_scale.learn(finite)
        self.grad_norm, self.scale = norm, scale
        on_host = _number_on_host(scale.is_cuda)
        self._last = Judgement(step, self._transfers.state_out([(on_host, scale.view(1))]), on_host)
        return self._last

    @property
    def comes(self) -> bool:
        """Whether the optimizer is sent a verdict on this step: on its norm, or the loop's own."""
        return self.awaited or self.factor is not None

    def by_loop(self, step: int) -> Judgement:
        """The loop has multiplied all gradients of `step` by its own factor, which was kept for the optimizer."""
        assert self.factor is not None, "there is one"
        on_host = _number_on_host(self.factor.is_cuda)
        arrival = self._transfers.state_out([(on_host, self.factor.float().view(1))])
        return Judgement(step, arrival, on_host, is_loops=True)

    def take_part(self, step: int) -> None:
        """This rank had no gradient in a step, but others may have: come to their verdict with a part of zero."""
        if self.awaited and self._ranks.world > 1:
            self.count_last()
            self.judge(step)

    def _total(self) -> Tensor:
        """The norm of all gradients that have come in this step, on all ranks. With several, a collective."""
        norms = [self._norms[number] for number in sorted(self._norms)]
        self._norms.clear()
        if self._ranks.world == 1:
            whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
            return whole
        own = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=self._device)
        squares = torch.empty(self._ranks.world, dtype=torch.float64, device=self._device)
        torch.distributed.all_gather(list(squares.split(1)), own.double().square().view(1))
        total: Tensor = squares.sum().sqrt().float()
        return total

    def _unscaled(self, number: Tensor) -> Tensor:
        return number if self.loss_scale is None else number * self.loss_scale.inverse

    def host_scale(self) -> float | None:
        """On device "cpu", the factor of the gradients; None for a skipped step."""
        scale = 1.0 if self.scale is None else float(self.scale)
        return None if scale == SKIPPED else scale

    def continue_from(self, before: Verdicts) -> None:
        self.skipped, self.loss_scale = before.skipped, before.loss_scale

    def close(self) -> None:
        self._norms.clear()

    def skipped_by_now(self) -> int:
        """How many steps were skipped, with the last one: waits for its verdict."""
        if self._last is None:
            return self.skipped
        self._last.arrival.synchronize()
        return self.skipped + (self._last.scale == SKIPPED)

    def count_last(self) -> None:
        """Wait for the last step's verdict. A skipped step is counted, but not as an update of any parameter.

        Raises `NonFiniteGradients`, once, for a skipped step with `on_nonfinite="raise"`.
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
                f"a gradient of step {last.step} was not finite: the step was skipped, and no bit of the state has "
                'changed. Look at the loss, or pass on_nonfinite="skip"'
            )


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """Their norms, in float32, by the kernels that clip_grad_norm_ takes on a CPU and on CUDA."""
    return list(torch._foreach_norm(gradients, 2.0, dtype=torch.float32)) if gradients else []


def _number_on_host(pinned: bool) -> Tensor:
    """Memory for one float32, whatever torch's default dtype and device are."""
    return torch.empty(1, dtype=torch.float32, device="cpu", pin_memory=pinned)
