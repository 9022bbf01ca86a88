"""The state of layers and parameters during training.

TrainedParameter   one parameter: its update count, whether it may be read, its consumed-gradient placeholder
TrainedSegment     a piece of a parameter in a layer, as a 1-D view in storage order
TrainedLayer       the unit that is moved: its life, its placement, its planes, this step's gradients
Gate               a module that reads layers when it is called
OffloadedBlock      such a module, whose weights are on the device only while it computes
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from hytrain.memory.clock import Stream
from hytrain.memory.planes import ArenaPlanes, DevicePlanes, Moving, Planes
from hytrain.memory.transfer import Copy, Fence, Transfer
from hytrain.model import graphs
from hytrain.model.block_life import BlockLife, Pin
from hytrain.model.consumed import ConsumedGradient
from hytrain.model.fsdp import gathered
from hytrain.model.lifecycle import LayerLife, State
from hytrain.model.summed import Sum, summed
from hytrain.tensors import (
    DTYPES,
    address,
    addresses,
    distinct,
    distributed,
    flat,
    has_kept_gradient,
    has_own_storage,
    has_shared_gradient,
    holders,
    laid_out,
    local,
    local_like,
    shaped,
    version,
    versions,
    with_gradients_of_others,
)
from protocol.handles import EXACT, ArenaLayout, Precision
from protocol.messages import Layer, Segment
from protocol.placement import Placement

#: What torch's `TensorWeakRef` calls with what a weak reference returns, but each call of that takes a microsecond, and
#: each step has several for each parameter.
_fix_weakref: Final[Callable[[Tensor], None]] = torch._C.TensorBase._fix_weakref  # type: ignore[attr-defined]
#: The dtypes of state wherever it is not in planes. float8's codes become the numbers that they stand for.
_OUTSIDE: Final = DTYPES | {"float8": torch.bfloat16}


#: A parameter, and the same as a tensor, in whose `p.grad` a gradient has come.
Come = tuple["TrainedParameter", Tensor]


class Held(Protocol):
    """Who has offered a layer's state."""

    def take_back(self, layer: TrainedLayer) -> None: ...


def plane_dtypes(parameter: nn.Parameter, rule: str, precision: Precision) -> dict[str, torch.dtype]:
    """The planes that a parameter's state has under this rule, with the dtypes that others see."""
    planes = precision.planes(str(parameter.dtype).removeprefix("torch."), rule)
    return {plane: _OUTSIDE[dtype] for plane, dtype in planes.items()}


class TrainedParameter:
    """One parameter that HyTrain trains.

    The parameter is its user's: whoever refers to it keeps it, and all that its hooks know, up to the optimizer.
    Threads and Python's exit refer to this, so its reference is weak. Updates land in `own`, also once it `is_gone`.

    `count` is its number of updates, which `restore` sets. `step` and `backward` are the last step and backward in
    which it had a gradient. `awaited` says that its last update has been waited for, so that it may be read.
    `shared_in`: a backward before which its module was called several times. `own` is an alias of the storage that
    HyTrain writes. `found` was autograd's version counter at construction. `version` is the counter's value while
    nobody else writes the parameter, or None if other tensors share the counter. `block` is its block, if that may be
    offloaded. `shard`: what FSDP2 keeps of it, if all-gathers of such a block read it.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, group: int, rule: str = "adamw", precision: Precision = EXACT
    ) -> None:
        self.name, self.group, self.rule = name, group, rule
        self._reference: Callable[[], Any] = weakref.ref(parameter)
        self.plane_dtypes = plane_dtypes(parameter, rule, precision)
        self.count = 0
        self.step = self.backward = -1
        self.awaited, self.shared_in = False, -1
        self.own = local(parameter).detach()
        self.address = address(self.own)
        self.found = version(parameter)
        self.version: int | None = self.found
        self.late: Callable[[TrainedParameter], Tensor | None] = lambda parameter: None  # a gradient that is consumed
        self.consumed = self._placeholder(parameter)
        self._references = getrefcount(self.consumed)
        self.sum: weakref.ref[Sum] | None = None  # of the gradients of this step's backwards, while it is kept
        self._plain: type = type(parameter)
        self._watched: type = type(parameter)
        self.places: list[tuple[TrainedLayer, int]] = []
        self.block: OffloadedBlock | None = None
        self.shard: Callable[[], Any] = lambda: None

    def _placeholder(self, parameter: Tensor) -> ConsumedGradient:
        this = weakref.ref(self)

        def find(placeholder: ConsumedGradient) -> Tensor | None:
            known = this()
            return known.late(known) if known is not None and known.consumed is placeholder else None

        return ConsumedGradient(parameter, find)

    def consume(self) -> ConsumedGradient:
        """What is in `p.grad` from now on: another placeholder than before, if the loop still has that."""
        if getrefcount(self.consumed) > self._references:
            self.consumed = self._placeholder(self.parameter)
        return self.consumed

    def restore(self, count: int) -> None:
        """Its state, with which it has had so many updates, is loaded."""
        self.count = count
        for layer, _ in self.places:
            layer.is_counted = False

    @property
    def parameter(self) -> nn.Parameter:
        parameter: nn.Parameter | None = self._reference()
        assert parameter is not None, f"{self.name} has gone with its optimizer, which keeps it"
        _fix_weakref(parameter)
        return parameter

    @property
    def is_updated_on_host(self) -> bool:
        """Whether the CPU updates all of it."""
        return bool(self.places) and all([layer.life.placement.updates == "cpu" for layer, _ in self.places])

    @property
    def is_gone(self) -> bool:
        return self._reference() is None

    @property
    def memory(self) -> Tensor:
        """A tensor that has all of its storage."""
        return next(iter(gathered(self.shard())), self.own)

    @property
    def is_aliased(self) -> bool:
        """Whether a tensor that is not known shares its memory: a view of somebody's, or a graph's."""
        others = gathered(self.shard())
        known = distinct(local(self.parameter), self.own, *others) if others else 2
        return holders(self.own) > known + len(self.places)

    def let_go(self) -> None:
        """It is trained no more: not even a weak reference is left, in the way of `torch.utils.swap_tensors`."""
        self._reference = lambda: None

    def watch_with(self, watched: type) -> None:
        """The parameter's class is `watched` from now on, and its present one while a gate's module runs."""
        self._plain, self._watched = type(self.parameter), watched
        self.parameter.__class__ = watched

    def values(self) -> Tensor:
        """This rank's part of its current weights on the CPU, in its shape, once all updates were waited for."""
        parts = [layer.values[index].cpu() for layer, index in self.places] or [self.own.cpu()]
        return shaped(parts[0] if len(parts) == 1 else torch.cat(parts), self.own)

    @property
    def is_in_place(self) -> bool:
        """Whether the parameter still has the storage that HyTrain writes, which `share_memory_()` may have moved."""
        return self.is_gone or address(self.parameter) == address(self.own)

    def follow(self) -> None:
        """Train the parameter in the storage that it has now. For autograd this is no write."""
        self.own.data = local(self.parameter).data
        self.address = address(self.own)
        elements = flat(self.own)
        for layer, index in self.places:
            segment = layer.segments[index]
            segment.weights.data = segment.part(elements)

    def note_all_writes(self) -> None:
        if self.version is not None:
            self.version = version(self.parameter)

    def release(self) -> None:
        """Leave an ordinary parameter, with a gradient of its own in `p.grad`, which others can use, or None."""
        if self.is_gone:
            return
        if self._watched is not self._plain:
            self.parameter.__class__ = self._plain
        gradient = self.parameter.grad
        if gradient is self.consumed:
            self.parameter.grad = None
        elif (total := summed(gradient)) is not None:
            self.parameter.grad = None if total.own is None else distributed(total.own, self.parameter)

    def gradient(self, parameter: Tensor) -> Tensor:
        """This rank's part of the gradient in `p.grad`, shape (numel,), in the parameter's storage order."""
        given = parameter.grad
        assert given is not None
        gradient = given
        if type(given) is not Tensor:
            total = summed(given)
            gradient = local_like(given, parameter) if total is None else total.value()
        if gradient.is_cuda and graphs.may_write_again(gradient):
            gradient = gradient.clone()
        if gradient.is_contiguous() and self.own.is_contiguous():
            return gradient.view(-1)
        return flat(laid_out(gradient, self.own))

    def kept(self) -> Tensor | None:
        """The gradient in `p.grad` if the loop has that tensor, too, and may read and write it there; else None."""
        parameter = self.parameter
        if (total := summed(parameter.grad)) is not None:
            return total.own
        return parameter.grad if has_kept_gradient(parameter) else None

    def shared(self) -> Tensor | None:
        """The gradient in `p.grad` if another tensor may read and write its memory, as far as is known; else None.

        Graphs of the compiler have theirs, but write it only in their own backward.
        """
        gradient = self.parameter.grad
        if gradient is None or summed(gradient) is not None or not has_shared_gradient(self.parameter):
            return None
        return None if gradient.is_cuda and graphs.may_write_again(gradient) else gradient

    def fill(self, gradient: Tensor, step: int, stream: Stream) -> list[TrainedLayer]:
        """Give the step's gradient, shape (numel,), computed on `stream`, to its layers.

        Returns the layers that are now complete.
        """
        self._begin_update(step)
        places, full = self.places, []
        is_whole = len(places) == 1
        if len(places) > 1:
            first, index = places[0]
            first.whole[index] = gradient
        for layer, index in places:
            layer.filled[index] = gradient if is_whole else layer.segments[index].part(gradient)
            layer.streams.add(stream)
            if len(layer.filled) == len(layer.segments):
                full.append(layer)
        return full

    def fill_in_place(self, step: int) -> None:
        """The step's gradient is in the `grads` planes of its layers, or on its way there."""
        self._begin_update(step)
        for layer, index in self.places:
            layer.filled[index] = layer.arena.grads[index]

    def _begin_update(self, step: int) -> None:
        self.step, self.awaited = step, False
        self.count += 1


def fill(
    come: list[Come], given: Callable[[TrainedParameter, Tensor], Tensor | None], step: int, stream: Stream
) -> list[TrainedLayer]:
    """Give gradients, computed on `stream`, to their layers, and leave placeholders. Returns what is complete now.

    Usually a gradient is what `p.grad` has, and nobody else has that. Otherwise it is what `given` returns for the
    parameter, and for the same as a tensor, shape (numel,); unless that is None.
    """
    full, others = [], with_gradients_of_others([(tensor, known.own) for known, tensor in come])
    for number, (known, tensor) in enumerate(come):
        gradient = given(known, tensor) if number in others or known.sum is not None else None
        full += known.fill(known.gradient(tensor) if gradient is None else gradient, step, stream)
        tensor.grad = known.consume()
    return full


def gradients(parameters: Iterable[TrainedParameter]) -> list[tuple[TrainedParameter, Tensor | None]]:
    """What is in each one's `p.grad`."""
    return [(known, tensor.grad) for known, tensor in _there(parameters)]


def with_gradients(parameters: Iterable[TrainedParameter]) -> list[TrainedParameter]:
    """Those whose `p.grad` has a gradient that no update has consumed."""
    there = gradients(parameters)
    return [known for known, gradient in there if gradient is not None and gradient is not known.consumed]


def first_consumed(parameters: Iterable[TrainedParameter]) -> TrainedParameter | None:
    """One whose `p.grad` stands for a gradient that an update has consumed."""
    for known, tensor in _there(parameters):
        if tensor.grad is known.consumed:
            return known
    return None


def changed(parameters: Iterable[TrainedParameter]) -> tuple[list[TrainedParameter], list[TrainedParameter]]:
    """Those with other storage than the one that HyTrain writes, and those that others have `written`."""
    there = _there(parameters)
    at = addresses([*[tensor for _, tensor in there], *[known.own for known, _ in there]])
    moved = [known for (known, _), now, own in zip(there, at, at[len(there) :], strict=False) if now != own]
    return moved, _written(there)


def written(parameters: Iterable[TrainedParameter]) -> list[TrainedParameter]:
    """Those that others have written since their last update."""
    return _written(_there(parameters))


def _written(there: list[tuple[TrainedParameter, Tensor]]) -> list[TrainedParameter]:
    counted = versions([tensor for _, tensor in there])
    return [known for (known, _), seen in zip(there, counted, strict=True) if known.version not in (None, seen)]


def _there(parameters: Iterable[TrainedParameter]) -> list[tuple[TrainedParameter, Tensor]]:
    there = []
    for known in parameters:
        if (tensor := known._reference()) is not None:
            _fix_weakref(tensor)
            there.append((known, tensor))
    return there


@dataclass(slots=True)
class TrainedSegment:
    """One segment of a layer. `weights` is a view of its parameter's elements, shape (numel,).

    `first` has their first values, if the parameter has no memory yet.
    """

    spec: Segment
    owner: TrainedParameter
    start: int
    weights: Tensor
    first: Tensor | None = None

    def part(self, whole: Tensor) -> Tensor:
        if self.spec.numel == whole.numel():
            return whole
        return whole[self.start : self.start + self.spec.numel]


@dataclass(slots=True, eq=False)
class TrainedLayer:
    """One layer.

    `waiting` has parameters whose gradients have come in this backward, and the streams that computed those. `filled`
    holds this step's gradients by segment until they are sent, `streams` the streams that computed them. `whole` holds
    those of parameters in pieces, of which the layer has the first. Such a layer has nothing else, and is sent first.
    `sent` are the update counts of the update under way. `landing` ends when the last update's weights are there,
    `returned` when its state is back from a visit, or has come from the GPU. `source` are the planes that the weights
    came from, `moving` is the copy of the state to the GPU. `came` is the step in which the GPU last took over updates
    from the CPU or from visits, or -1. `block` is its block, if that may be offloaded: then the arena's `weights`
    are current also where the GPU updates. `is_counted`: the optimizer knows how many updates it has had.
    `planes` have its state. While it is on `offer` to torch's allocator, they may go any time: who asks for them ends
    that first, so that they stay. `holds` are the same without asking.
    """

    lid: int
    name: str
    spec: Layer
    layout: ArenaLayout
    segments: list[TrainedSegment]
    life: LayerLife
    holds: Planes | None = None
    offer: Held | None = None
    landing: Transfer | None = None
    returned: Transfer | None = None
    source: Planes | None = None
    waiting: dict[TrainedParameter, tuple[Tensor, Stream]] = field(default_factory=dict)
    filled: dict[int, Tensor] = field(default_factory=dict)
    whole: dict[int, Tensor] = field(default_factory=dict)
    streams: set[Stream] = field(default_factory=set)
    sent: tuple[int, ...] = ()
    moving: Moving | None = None
    came: int = -1
    block: OffloadedBlock | None = None
    is_counted: bool = False

    @property
    def planes(self) -> Planes | None:
        self.take_back()
        return self.holds

    @planes.setter
    def planes(self, planes: Planes | None) -> None:
        assert self.offer is None, "who replaces planes has asked for them"
        self.holds = planes

    def take_back(self) -> None:
        """Its state stays where it is. If the allocator has evicted it, it visits the GPU from now on."""
        if (offer := self.offer) is not None:
            offer.take_back(self)

    @property
    def weights(self) -> list[Tensor]:
        return [segment.weights for segment in self.segments]

    @property
    def rests_on_host(self) -> bool:
        """Whether its weights are offloaded now."""
        return self.block is not None and self.block.life.is_offloaded

    @property
    def placement(self) -> Placement:
        """Where its weights and its state rest now, and who updates it."""
        return self._with_weights(on_host=self.rests_on_host)

    @property
    def planned(self) -> Placement:
        """The same with weights where they are to rest from their next forward on."""
        return self._with_weights(on_host=self.block is not None and self.block.life.planned)

    def _with_weights(self, *, on_host: bool) -> Placement:
        placement = self.life.placement
        return placement.weights_on("host") if on_host and placement.state == "host" else placement

    @property
    def keeps_weights(self) -> bool:
        """Whether its current weights are in the arena, too."""
        return self.life.placement.updates == "cpu" or (self.block is not None and self.life.placement.visits)

    @property
    def values(self) -> list[Tensor]:
        """Its current weights, once all updates were waited for: on the device, or in host memory where they rest."""
        return self.arena.weights if self.is_away else self.weights

    @property
    def is_away(self) -> bool:
        """Whether its current weights are in host memory alone."""
        return self.block is not None and self.block.life.is_away

    @property
    def is_arriving(self) -> bool:
        """Whether the copy of its new weights is being started right now."""
        return self.life.state is State.LANDING and self.landing is None

    def state(self, plane: str) -> list[Tensor | None]:
        """One of `STATE_PLANES` by segment, wherever it is kept."""
        planes = self.planes
        assert planes is not None, "a layer that takes part has a placement"
        return planes.state(plane)

    def part(self, plane: str, index: int) -> Tensor | None:
        """Segment `index` of it. All of them would be more views than a caller for one segment needs."""
        planes = self.planes
        assert planes is not None, "a layer that takes part has a placement"
        return planes.part(plane, index)

    def device_planes(self, *, fresh: bool = True) -> DevicePlanes:
        """Allocate the layer's state on the GPU. Raises `torch.OutOfMemoryError`."""
        return DevicePlanes(self.spec.segments, self.weights, fresh=fresh)

    def note_writes(self, written: Iterable[int]) -> None:
        """Expect one more version of each parameter whose segment was written."""
        for owner in [self.segments[index].owner for index in written]:
            if owner.version is not None:
                owner.version += 1

    def incoming(self) -> list[Copy]:
        """The copies of updated segments out of the `weights` plane."""
        planes = self.arena.weights
        return [(s.weights, planes[index]) for index, s in enumerate(self.segments) if self.sent[index]]

    @property
    def arena(self) -> ArenaPlanes:
        planes = self.planes
        assert isinstance(planes, ArenaPlanes), f"the state of layer {self.lid} is not in host memory"
        return planes

    @property
    def device(self) -> DevicePlanes:
        planes = self.planes
        assert isinstance(planes, DevicePlanes), f"the state of layer {self.lid} is not on the GPU"
        return planes

    def close(self) -> None:
        self.filled.clear()
        self.whole.clear()
        if self.holds is not None:
            self.holds.close()
        self.holds = self.moving = self.returned = None


class Gate:
    """The layers that a module must wait for before its forward, and the parameters that it may read then.

    `block`: its block, if that may be offloaded. `is_block`: its module, or all-gather, is that of a repeated block.
    `entered_before`: the backward before which its module was last called.
    """

    def __init__(self, layers: Sequence[TrainedLayer] = ()) -> None:
        self.block: OffloadedBlock | None = None
        self.is_block = False
        self.entered_before = -1
        self.layers: list[TrainedLayer] = []
        self.lids: tuple[int, ...] = ()
        self.parameters: list[TrainedParameter] = []
        for layer in layers:
            self.add(layer)

    def add(self, layer: TrainedLayer) -> None:
        self.layers.append(layer)
        self.lids = (*self.lids, layer.lid)
        self.parameters += [segment.owner for segment in layer.segments]

    def watch(self) -> None:
        for known, tensor in _there(self.parameters):
            tensor.__class__ = known._watched

    def unwatch(self) -> None:
        for known, tensor in _there(self.parameters):
            tensor.__class__ = known._plain

    def note_entered(self, *, before: int) -> None:
        """Its module is called before this backward. If that is not the first time, gradients may come in parts."""
        for parameter in self.parameters if self.entered_before == before else ():
            parameter.shared_in = before
        self.entered_before = before


@dataclass(slots=True, eq=False)
class OffloadedBlock:
    """A block whose weights may rest in host memory. Its layers have no other reader.

    A parameter keeps its identity, its shape and its storage object. Only the storage's memory comes and goes, so what
    autograd has saved of a weight is there again when backward needs it.

    `life`: where its weights are; `Offload` alone changes it. `is_pooled`: its memory is of the pool of fetched
    weights, not where the user has allocated it. `arrival`: the copy that brought it; `leaving`: copies out of it;
    `computed`: where computations with it ended, on each stream. `lacking` counts the gradients that are still to come
    in the last `backward` that made one. `is_gathered`: only all-gathers of FSDP2 read it, which copy it.
    """

    gate: Gate
    parameters: list[TrainedParameter]
    is_gathered: bool = False
    life: BlockLife = field(default_factory=BlockLife)
    is_pooled: bool = False
    arrival: Transfer | None = None
    leaving: list[Transfer] = field(default_factory=list)
    computed: dict[Stream, Fence] = field(default_factory=dict)
    backward: int = -1
    lacking: int = 0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(memory.nbytes for memory in self.memory)

    @property
    def layers(self) -> list[TrainedLayer]:
        return self.gate.layers

    @property
    def memory(self) -> list[Tensor]:
        """Tensors that have all of its parameters' storages."""
        return [known.memory if self.is_gathered else known.own for known in self.parameters]

    @property
    def state_rests_on_host(self) -> bool:
        """Whether the state of all its layers is in host memory, where weights can be, too."""
        return all(isinstance(layer.holds, ArenaPlanes) for layer in self.layers)

    @property
    def is_current_on_host(self) -> bool:
        """Whether no update of it is under way on the host."""
        return all([layer.landing is not None or layer.life.is_current for layer in self.gate.layers])

    @property
    def may_leave(self) -> bool:
        """Whether nobody needs its memory on the GPU now, and nobody else can have a view of it."""
        if not self.life.may_leave:
            return False
        is_arriving = any(
            [layer.is_arriving for layer in self.gate.layers]
        )  # its own writes are being counted right now
        moved, written = changed(self.parameters)
        if moved or (written and not is_arriving):
            return False  # to be imported when the next step begins
        if not has_own_storage(*self.memory):
            return False  # others have given it another one
        if not self.is_pooled and not all(copy.has_ended for copy in self.copies_out):
            return False  # whoever gets its memory next does not wait for them
        return Pin.VIEWED not in self.life.pins or not self.is_aliased

    @property
    def is_aliased(self) -> bool:
        return any(known.is_aliased for known in self.parameters)

    @property
    def copies_out(self) -> list[Transfer]:
        return [*self.leaving, *[layer.returned for layer in self.gate.layers if layer.returned is not None]]

    def is_left_by(self, copy: Transfer) -> None:
        """A copy out of its weights was started."""
        self.leaving = [*(other for other in self.leaving if not other.has_ended), copy]

    def incoming(self) -> list[Copy]:
        """The copies of its weights out of host memory."""
        return [
            (segment.weights, weights)
            for layer in self.layers
            for segment, weights in zip(layer.segments, layer.arena.weights, strict=True)
        ]
