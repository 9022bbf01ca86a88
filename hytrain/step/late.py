"""Gradients that are read when their updates have begun: answered from where they still are, until `step()`.

    the CPU's layers     in their `grads` planes, which the next backward writes
    the GPU's layers     kept until `step()`, if steps need no more memory for that, and there is some beside

So a loop gets the norms that it logs every hundredth step. From its next step on, updates begin in `step()`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hytrain.memory.capacity import Room
from hytrain.model.trained import TrainedLayer, TrainedParameter
from hytrain.step.common import Common
from hytrain.step.life import State
from hytrain.tensors import is_distributed, shaped


class LateReads:
    """Those of one model's parameters."""

    def __init__(self, common: Common) -> None:
        self._transfers, self._health, self._verdicts = common.transfers, common.health, common.verdicts
        self._timing = common.accumulation.timing
        self._layers = [(layer, sum(weights.nbytes for weights in layer.weights)) for layer in common.layers]
        self._lids = frozenset[int]()  # of the GPU's layers: their gradients are kept in this step
        self._kept: dict[int, dict[int, Tensor]] = {}
        for known in common.parameters:
            known.late = self.value

    def heed(self, room: Room | None) -> None:
        """`room`: what the device has between two steps, and what they have needed of it; None if there is no bound.

        At the end of backward it also has the gradients that are kept: no more than steps have needed elsewhere.
        Before, it may have activations besides, and for that there is memory which no step has needed. What was kept
        in the last step is part of what that has needed. Gradients of layers that come to the GPU with the next step
        are not kept in it: their state may take all there is.
        """
        owned = {layer.lid: nbytes for layer, nbytes in self._layers if layer.life.placement.updates == "gpu"}
        all_of, more = sum(owned.values()), sum([nbytes for lid, nbytes in owned.items() if lid not in self._lids])
        has_room = room is None or (room.now + all_of <= room.needed and room.needed + more <= room.usable)
        self._lids = frozenset(owned) if has_room else frozenset()

    def keep(self, layer: TrainedLayer, gradients: dict[int, Tensor]) -> None:
        """The GPU updates the layer with these, which nobody else needs after that."""
        if layer.lid in self._lids:
            self._kept[layer.lid] = gradients

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
