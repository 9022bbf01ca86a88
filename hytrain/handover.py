"""Moves layers between owners, state and all. Called at a step's boundary, when the layers are CURRENT.

    to the CPU   AllocatePlanes ─▶ arena ◀─ weights, remainder, moments ─▶ TakeOver
    to the GPU   weights are there; remainder, moments ◀─ arena ─▶ GiveUp ─▶ arena unpinned and closed

What moves is every bit of a layer's state, so the result of training does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hytrain.link import Link
from hytrain.planes import STATE_PLANES, ArenaPlanes, DevicePlanes, TrainedLayer, TrainedParameter
from hytrain.transfer import Copy, Transfers
from protocol.messages import AllocatePlanes, GiveUp, Plan, TakeOver


class Handover:
    """Moves layers of one model over one link."""

    def __init__(self, layers: list[TrainedLayer], *, link: Link, transfers: Transfers) -> None:
        self._layers, self._link, self._transfers = layers, link, transfers

    def start(self, plan: Plan) -> None:
        """First owners: all state is zero, the parameters' values are the masters."""
        for layer in self._layers:
            if layer.lid in plan.gpu_lids:
                layer.planes = DevicePlanes(layer.segments)
        cpu = [layer for layer in self._layers if layer.lid not in plan.gpu_lids]
        for layer in self._allocate(cpu):
            self._weights_out(layer)
            self._give(layer, plan, 0)

    def to_cpu(self, layers: list[TrainedLayer], plan: Plan, step: int) -> None:
        """From the GPU to the CPU, which owns the layers from `step` on. Raises `ClusterError`, `CapacityError`."""
        self._transfers.settle()
        devices = {layer.lid: layer.device for layer in layers}
        for layer in self._allocate(layers):
            self._weights_out(layer)
            with layer.arena.pinned_state():
                self._transfers.move(_state_copies(layer.arena, devices.pop(layer.lid)))
            self._give(layer, plan, step)

    def to_gpu(self, layer: TrainedLayer, plan: Plan, step: int) -> None:
        """From the CPU to the GPU, which owns the layer from `step` on. Raises `torch.OutOfMemoryError` unchanged."""
        arena, device = layer.arena, DevicePlanes(layer.segments)
        with arena.pinned_state():
            self._transfers.move(_state_copies(device, arena))
        layer.life.change_owner("gpu")
        layer.planes = device
        arena.close()
        self._link.post("optimizer", GiveUp(plan_id=plan.plan_id, lid=layer.lid, step=step))

    def import_weights(self, parameters: list[TrainedParameter], *, keep_remainder: bool) -> None:
        """The values of `parameters` become the masters: exactly, or with the remainders that belong to them."""
        self._transfers.settle()
        for known in parameters:
            for layer, index in known.places:
                segment, remainder = layer.segments[index], layer.state("remainder")[index]
                if remainder is not None:
                    _fit_remainder(remainder, segment.weights) if keep_remainder else remainder.zero_()
                if isinstance(layer.planes, ArenaPlanes):
                    _present(layer.planes.weights[index]).copy_(segment.weights)

    def _allocate(self, layers: list[TrainedLayer]) -> Iterable[TrainedLayer]:
        """Ask for the layers' arenas; yields each layer once it has its own, mapped and pinned."""
        awaited = {layer.lid: layer for layer in layers}
        for layer in layers:
            self._link.post("optimizer", AllocatePlanes(lid=layer.lid))
        while awaited:
            file = self._link.receive_arena({lid: layer.layout for lid, layer in awaited.items()})
            layer = awaited.pop(file.layout.lid)
            layer.planes = ArenaPlanes(file, self._transfers)
            yield layer

    def _weights_out(self, layer: TrainedLayer) -> None:
        for segment, plane in zip(layer.segments, layer.arena.weights, strict=True):
            _present(plane).copy_(segment.weights)

    def _give(self, layer: TrainedLayer, plan: Plan, step: int) -> None:
        layer.life.change_owner("cpu")
        self._link.post("optimizer", TakeOver(plan_id=plan.plan_id, lid=layer.lid, step=step))


def _state_copies(into: ArenaPlanes | DevicePlanes, out_of: ArenaPlanes | DevicePlanes) -> list[Copy]:
    pairs: list[tuple[Tensor | None, Tensor | None]] = []
    for plane in STATE_PLANES:
        pairs += zip(into.state(plane), out_of.state(plane), strict=True)
    return [(destination, source) for destination, source in pairs if destination is not None and source is not None]


def _fit_remainder(remainder: Tensor, weights: Tensor) -> None:
    """Clear remainders that make no master with these weights: below a zero, or beside an infinity or a NaN."""
    bits = weights.view(torch.int16)
    zero, special = (bits & 0x7FFF) == 0, (bits & 0x7F80) == 0x7F80
    unfit = (zero.to(remainder.device) & (remainder < 0)) | special.to(remainder.device)
    remainder.masked_fill_(unfit, 0)


def _present(plane: Tensor | None) -> Tensor:
    assert plane is not None, "weights exist for every segment"
    return plane
