"""Gradients that are read when their updates have begun: answered from where they still are, until `step()`.

    the CPU's layers     in their `grads` planes, which the next backward writes
    the GPU's layers     kept until `step()`, if steps need no more memory for that, and there is some beside

So a loop gets the norms that it logs every hundredth step. From its next step on, updates begin in `step()`.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from hytrain.memory.capacity import Room
from hytrain.memory.planes import DevicePlanes
from hytrain.model.trained import TrainedLayer, TrainedParameter
from hytrain.step.common import Common
from hytrain.step.life import State
from hytrain.tensors import is_distributed, shaped
from protocol.handles import DTYPE_BYTES


class LateReads:
    """Those of one model's parameters."""

    def __init__(self, common: Common) -> None:
        self._transfers, self._health, self._verdicts = common.transfers, common.health, common.verdicts
        self._timing = common.accumulation.timing
        self._layers = common.layers
        # Of gradients that are kept, and of the same in the dtypes in which their updates read them.
        self._nbytes = [
            sum(each.numel * sum(DTYPE_BYTES[dtype] for dtype in {each.dtype, each.grads_dtype}) for each in segments)
            for segments in [layer.spec.segments for layer in common.layers]
        ]
        self._budget = 0.0  # bytes to keep in a step
        self._left: float | None = None  # of them in this one, once a layer was updated
        self._kept_bytes = 0
        self._kept: dict[int, dict[int, Tensor]] = {}
        self._owned = frozenset[int]()  # layers whose state was on the device when the last step ended
        for known in common.parameters:
            known.late = self.value

    def heed(self, room: Room | None) -> None:
        """`room`: what the device has between two steps, and what they have needed of it; None if there is no bound.

        At the end of backward it also has the gradients that are kept: no more than steps have needed elsewhere.
        Before, it may have activations besides, and for that there is memory which no step has needed. What was kept
        in the last step is part of what that has needed.
        """
        kept, self._kept_bytes, self._left = self._kept_bytes, 0, None
        self._budget = inf if room is None else min(room.needed - room.now, room.usable - room.needed + kept)
        self._owned = frozenset([layer.lid for layer in self._layers if isinstance(layer.holds, DevicePlanes)])

    def keep(self, layer: TrainedLayer, gradients: dict[int, Tensor]) -> bool:
        """The GPU updates the layer with these, which nobody else needs after that. Whether they stay until then."""
        if self._left is None:  # state that has come with this step has taken its memory by now
            states = [(other.lid, other.holds) for other in self._layers]
            came = [at.nbytes for lid, at in states if isinstance(at, DevicePlanes) and lid not in self._owned]
            self._left = self._budget - sum(came)
        if is_kept := (nbytes := self._nbytes[layer.lid]) <= self._left:
            self._left -= nbytes
            self._kept_bytes += nbytes
            self._kept[layer.lid] = gradients
        return is_kept

    def value(self, parameter: TrainedParameter) -> Tensor | None:
        """A copy of the gradient with which this step updates the parameter, in its shape; None if it is gone.

        If updates await a verdict, it is not what torch would have there, which may have scaled it.
        """
        life = self._health.life
        if life.state is not State.COMMITTED or parameter.step != life.step or self._verdicts.awaited:
            return None
        if is_distributed(parameter.parameter):
            return None
        self._transfers.drain()  # also of copies to planes
        parts = [self._part(layer, index) for layer, index in parameter.places]
        there = [part for part in parts if part is not None and part.dtype == parameter.own.dtype]
        if len(there) != len(parts):
            return None
        self._timing.is_late("uses gradients")
        return shaped(torch.cat([part.to(parameter.own.device, copy=True) for part in there]), parameter.own)

    def _part(self, layer: TrainedLayer, index: int) -> Tensor | None:
        if layer.life.placement.updates == "cpu":
            return layer.arena.grads[index]
        return self._kept.get(layer.lid, {}).get(index)

    def end_step(self) -> None:
        self._kept.clear()
