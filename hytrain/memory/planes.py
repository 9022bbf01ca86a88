"""A layer on the trainer's side: its parameters, and its planes wherever its owner keeps them.

TrainedParameter   one parameter: its step count, its consumed-gradient marker, where its storage was
TrainedSegment     one piece of it inside a layer, as 1-D view in storage order
TrainedLayer       the layer: its life, and one of
    ArenaPlanes      the CPU owns it: `grads` and `weights` mapped and pinned, the rest mapped to be read; in the bank
                     that holds, where there are two
    DevicePlanes     the GPU owns it: `remainder`, `exp_avg`, `exp_avg_sq` on the device; on the way there, `Moving`
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from hytrain.errors import UnsupportedError
from hytrain.kernels.backend import Backend
from hytrain.kernels.scalars import Scalars
from hytrain.kernels.split import clear_remainder
from hytrain.memory.arena import ArenaFile, Mapping
from hytrain.memory.transfer import Copy, Room, Stream, Transfer, Transfers
from hytrain.model.consumed import ConsumedGradient
from hytrain.model.layers import ModelLayer, storage_order
from hytrain.model.lifecycle import LayerLife, State
from protocol.handles import ArenaLayout, TensorHandle, bank_plane, check_handle, layout, plane_dtype
from protocol.messages import Layer, Segment
from protocol.placement import GPU

DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int16": torch.int16,
}
STATE_PLANES: Final = ("remainder", "exp_avg", "exp_avg_sq")


class Gate:
    """A module before whose forward layers must have landed. `step` is the last one in which it was entered."""

    def __init__(self, layers: tuple[TrainedLayer, ...]) -> None:
        self.layers = layers
        self.step = -1


class TrainedParameter:
    """One parameter that HyTrain trains. `count` is its step count, `step` the last step it had a gradient in,
    `backward` the last backward; `awaited` says that its last update was waited for, or there was none.

    Its `gates` are those of the modules that read it when they are called. `version` is what autograd's counter
    must show as long as nobody else writes the parameter.
    """

    def __init__(self, name: str, parameter: nn.Parameter, group: int) -> None:
        self.name, self.parameter, self.group = name, parameter, group
        self.count = 0
        self.step = self.backward = -1
        self.awaited = False
        self.address = parameter.data_ptr()
        self.version: int | None = parameter._version
        self.found = parameter._version  # the counter when it was built
        self.consumed = ConsumedGradient(parameter)
        self.places: list[tuple[TrainedLayer, int]] = []
        self.gates: list[Gate] = []

    def was_written(self) -> bool:
        """Whether somebody else has written the parameter since the last update."""
        return self.version is not None and self.parameter._version != self.version

    def note_write(self) -> None:
        if self.version is not None:
            self.version += 1

    def note_all_writes(self) -> None:
        if self.version is not None:
            self.version = self.parameter._version

    def drop_consumed(self) -> None:
        """Nobody will ever clear the marker: no later gradient, of whatever optimizer, is to meet it."""
        if self.parameter.grad is self.consumed:
            self.parameter.grad = None

    def gradient(self) -> Tensor:
        """The gradient in the parameter's storage order, shape (numel,)."""
        gradient = self.parameter.grad
        assert gradient is not None
        if gradient.stride() != self.parameter.stride():
            aligned = torch.empty_strided(
                self.parameter.size(), self.parameter.stride(), dtype=gradient.dtype, device=gradient.device
            )
            gradient = aligned.copy_(gradient)
        return storage_order(gradient)


@dataclass(slots=True)
class TrainedSegment:
    """One segment: its description, its parameter, and the parameter's elements as a 1-D view."""

    spec: Segment
    owner: TrainedParameter
    start: int
    weights: Tensor

    def part(self, whole: Tensor) -> Tensor:
        """This segment's elements of a tensor in the parameter's storage order."""
        if self.spec.numel == whole.numel():
            return whole
        return whole[self.start : self.start + self.spec.numel]


class ArenaPlanes:
    """The planes of a layer that the CPU owns, as views of the optimizer's arena.

    `banks` are those that hold, by segment: where `weights` and `state` look. Nobody has the others' planes to read.
    """

    def __init__(self, file: ArenaFile, transfers: Transfers, *, gently: bool = False) -> None:
        """Map and pin `grads` and `weights`. Raises `CapacityError` if they cannot be pinned."""
        self._file, self._transfers = file, transfers
        self._shared: Mapping | None = None
        try:
            self._shared = file.map_shared()
            transfers.pin(self._shared.address, self._shared.nbytes, gently=gently)
        except BaseException:
            file.close()
            raise
        self._all: Mapping | None = None
        self._mapping_all = threading.Lock()  # a handover maps on a thread of its own
        self._state_is_pinned = False
        layout = file.layout
        self.banks = (0,) * len(layout.handles["grads"])
        self.grads = [self._view(self._shared, handle) for handle in layout.handles["grads"]]
        self._weights = [
            [self._view(self._shared, handle) for handle in layout.handles[bank_plane("weights", bank)]]
            for bank in range(layout.banks)
        ]

    @property
    def weights(self) -> list[Tensor | None]:
        """The `weights` plane's segments."""
        return [self._weights[bank][index] for index, bank in enumerate(self.banks)]

    def state(self, plane: str) -> list[Tensor | None]:
        """A state plane's segments, mapped when first asked for. The optimizer must be done with the layer."""
        whole, handles = self._whole(), self._file.layout.handles
        return [self._view(whole, handles[bank_plane(plane, bank)][index]) for index, bank in enumerate(self.banks)]

    def pin_state(self) -> None:
        """Pin the state planes, for the time of a handover: they then move at the link's speed."""
        self._transfers.pin(*self._state_range(), gently=True)
        self._state_is_pinned = True

    def unpin_state(self) -> None:
        if self._state_is_pinned:
            self._transfers.unpin(*self._state_range())
            self._state_is_pinned = False

    def _state_range(self) -> tuple[int, int]:
        """Address and size of the state planes."""
        whole, shared_nbytes = self._whole(), self._file.layout.shared_nbytes
        return whole.address + shared_nbytes, whole.nbytes - shared_nbytes

    def _whole(self) -> Mapping:
        with self._mapping_all:
            if self._all is None:
                self._all = self._file.map_all()
            return self._all

    def close(self) -> None:
        """Unpin and give the mapping up; pages live on while somebody holds a view."""
        assert self._shared is not None, "closed once"
        self.unpin_state()
        self._transfers.unpin(self._shared.address, self._shared.nbytes)
        self._shared = self._all = None
        self.grads, self._weights, self.banks = [], [], ()
        self._file.close()

    def _view(self, mapping: Mapping, handle: TensorHandle | None) -> Tensor | None:
        if handle is None:
            return None
        check_handle(handle, self._file.layout)
        dtype = DTYPES[handle.dtype]
        return torch.frombuffer(mapping.buffer, dtype=dtype, count=handle.numel, offset=handle.offset)


class DevicePlanes:
    """The state of a layer that the GPU owns: as it begins, or whatever was in the memory before."""

    def __init__(self, segments: list[TrainedSegment], *, fresh: bool = True) -> None:
        """Raises `torch.OutOfMemoryError` unchanged. Unless it is `fresh`, something has to be moved in first."""
        device = segments[0].weights.device
        self._on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        make = torch.zeros if fresh else torch.empty

        def part(plane: str, segment: TrainedSegment) -> Tensor | None:
            dtype = plane_dtype(plane, segment.spec)
            return None if dtype is None else make(segment.spec.numel, dtype=DTYPES[dtype], device=device)

        self._planes = {plane: [part(plane, segment) for segment in segments] for plane in STATE_PLANES}
        for segment, remainder in zip(segments, self._planes["remainder"], strict=True):
            if fresh and remainder is not None:
                clear_remainder(remainder, segment.weights)

    def state(self, plane: str) -> list[Tensor | None]:
        return self._planes[plane]

    def update(
        self,
        index: int,
        segment: TrainedSegment,
        grads: Tensor,
        scalars: Scalars,
        host: Backend | None = None,
        verdict: Tensor | None = None,
    ) -> None:
        """AdamW on segment `index`, on the current stream; on device "cpu" the host's backend does it.

        `verdict` is what `Clipping.judge` says, on the device; the host's backend needs it in `scalars`.
        """
        remainder, exp_avg, exp_avg_sq = (self._planes[plane][index] for plane in STATE_PLANES)
        assert exp_avg is not None and exp_avg_sq is not None
        grads = grads.to(DTYPES[segment.spec.grads_dtype])
        if grads.is_cuda:
            from hytrain.kernels import gpu

            with self._on_device:
                gpu.update(
                    weights=segment.weights,
                    grads=grads,
                    remainder=remainder,
                    exp_avg=exp_avg,
                    exp_avg_sq=exp_avg_sq,
                    scalars=scalars,
                    verdict=verdict,
                )
        else:
            assert host is not None, "device cpu has a host backend"
            host.update(
                weights=segment.weights.data_ptr(),
                grads=grads.data_ptr(),
                remainder=0 if remainder is None else remainder.data_ptr(),
                exp_avg=exp_avg.data_ptr(),
                exp_avg_sq=exp_avg_sq.data_ptr(),
                numel=segment.spec.numel,
                weights_dtype=segment.spec.dtype,
                grads_dtype=segment.spec.grads_dtype,
                scalars=scalars,
            )
        torch.autograd.graph.increment_version(segment.weights)


@dataclass(slots=True, eq=False)
class Moving:
    """A layer's state on its way to the device: where to, from when on, and the copy once it was started."""

    device: DevicePlanes
    room: Room
    arrival: Transfer | None = None


@dataclass(slots=True, eq=False)
class TrainedLayer:
    """One layer. `filled` holds this step's gradients by segment until they are sent or applied, `streams` those that
    they were made on, `sent` the step counts of the update that is under way, `landing` the last one's weights on their
    way in, or there, `moving` its state."""

    spec: Layer
    name: str
    layout: ArenaLayout
    segments: list[TrainedSegment]
    life: LayerLife
    planes: ArenaPlanes | DevicePlanes | None = None
    landing: Transfer | None = None
    filled: dict[int, Tensor] = field(default_factory=dict)
    streams: set[Stream] = field(default_factory=set)
    sent: tuple[int, ...] = ()
    moving: Moving | None = None

    @property
    def lid(self) -> int:
        return self.spec.lid

    @property
    def is_arriving(self) -> bool:
        """Whether its weights' copies are being started right now."""
        return self.life.state is State.LANDING and self.landing is None

    def state(self, plane: str) -> list[Tensor | None]:
        """One of `STATE_PLANES`, by segment, wherever the owner keeps it."""
        assert self.planes is not None, "a layer that takes part has an owner"
        return self.planes.state(plane)

    def outgoing(self) -> list[Copy]:
        """This step's gradients on their way into the `grads` plane."""
        planes = self.arena
        return [(_present(planes.grads[index]), gradient) for index, gradient in sorted(self.filled.items())]

    def incoming(self) -> list[Copy]:
        """The segments that the update under way has changed, on their way out of the `weights` plane."""
        return [
            (segment.weights, _present(plane))
            for segment, plane, count in zip(self.segments, self.arena.weights, self.sent, strict=True)
            if count
        ]

    def note_writes(self, counts: tuple[int, ...]) -> None:
        """An update has written the parameters of those segments whose count is not 0: one version each."""
        for segment, count in zip(self.segments, counts, strict=True):
            if count:
                segment.owner.note_write()

    def counts(self) -> tuple[int, ...]:
        """Each segment's step count in this step's update, 0 for those without a gradient."""
        return tuple(segment.owner.count if index in self.filled else 0 for index, segment in enumerate(self.segments))

    @property
    def arena(self) -> ArenaPlanes:
        assert isinstance(self.planes, ArenaPlanes), f"layer {self.lid} is not the CPU's"
        return self.planes

    @property
    def device(self) -> DevicePlanes:
        assert isinstance(self.planes, DevicePlanes), f"layer {self.lid} is not the GPU's"
        return self.planes

    def close(self) -> None:
        """Give the planes up, and gradients."""
        self.filled.clear()
        if isinstance(self.planes, ArenaPlanes):
            self.planes.close()
        self.planes = self.moving = None


def build_layers(
    layers: list[ModelLayer],
    groups: list[list[nn.Parameter]],
    grad_dtype: torch.dtype | None,
    before: Sequence[TrainedParameter] = (),
) -> tuple[list[TrainedLayer], list[TrainedParameter]]:
    """The trainer's side of each layer, and of each parameter in them. Nobody owns a layer yet.

    `before` are those of the build that this one replaces.
    """
    group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group}
    owners: dict[int, TrainedParameter] = {}
    built: list[TrainedLayer] = []
    for layer in layers:
        spec = layer.describe(layer.lid, group_of, grad_dtype)
        trained = TrainedLayer(spec, layer.name, layout(spec), [], LayerLife(layer.lid, GPU))
        for index, (piece, segment) in enumerate(zip(layer.pieces, spec.segments, strict=True)):
            owner = owners.setdefault(
                id(piece.parameter),
                TrainedParameter(piece.name, piece.parameter, group_of[id(piece.parameter)]),
            )
            weights = storage_order(piece.parameter.detach())[piece.start : piece.start + piece.numel]
            trained.segments.append(TrainedSegment(segment, owner, piece.start, weights))
            owner.places.append((trained, index))
        built.append(trained)
    parameters = list(owners.values())
    _check_memory(parameters, before)
    return built, parameters


def _check_memory(parameters: list[TrainedParameter], before: Sequence[TrainedParameter]) -> None:
    """Refuse parameters over the same memory; leave those alone that share a version counter with others.

    Who shares is found by counting a write on all of them, but for those that were known `before`: a graph may be
    waiting for its backward, and a write would spoil it.
    """
    by_address = sorted(parameters, key=lambda known: known.address)
    for first, second in zip(by_address, by_address[1:], strict=False):
        if first.address + first.parameter.nbytes > second.address:
            raise UnsupportedError(f"{first.name} and {second.name} share memory: tie them as one Parameter")
    shares = {id(known.parameter): known.version is None for known in before}
    new = [known for known in parameters if id(known.parameter) not in shares]
    versions = [known.parameter._version for known in new]
    torch.autograd.graph.increment_version([known.parameter for known in new])
    for known, version in zip(new, versions, strict=True):
        known.version = version + 1 if known.parameter._version == version + 1 else None
    for known in parameters:
        if shares.get(id(known.parameter)):
            known.version = None


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "grads and weights exist for every segment"
    return tensor
