"""Waits for weights before they are read. Every reader of parameters comes through here.

    a module is called       BeforeForward ─▶ enter(gate)       waits for the updates of the module's layers
    the model is called      engine ─▶ enter(root)              waits for parameters that no other module covers
    any other use of one     Watched ─▶ use(parameter)          waits for this parameter
    state_dict, save, …      engine ─▶ synchronize()            waits for all updates, on the host
    autograd, in backward    what was saved ─▶ unpack           fetches offloaded weights, and activations

A layer that is CURRENT can be read. If its update is under way, the reader waits: the thread for the optimizer's
message, the stream for the copy of the weights. `TrainedParameter.awaited` says that the last update has been waited
for. The gradient of a parameter for which this is not so may come from a stale read (I1).
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from hytrain.errors import HyTrainError, StaleReadError, UsageError
from hytrain.memory.clock import Mark, Stream
from hytrain.memory.transfer import Transfer, Transfers
from hytrain.memory.visits import Visits
from hytrain.model import graphs
from hytrain.model.block_life import Pin
from hytrain.model.lifecycle import Event as LayerEvent
from hytrain.model.trained import Gate, OffloadedBlock, TrainedLayer, TrainedParameter
from hytrain.model.watched import unwatched
from hytrain.step.activations import MODIFIED, Activations, Saved
from hytrain.step.health import Health
from hytrain.step.life import IN_BACKWARD, Event, State
from hytrain.step.measure import Meter, Waited
from hytrain.step.offload import Offload
from hytrain.tensors import has_memory, is_distributed, saves_with_other_hooks, version

_log = logging.getLogger(__name__)

_USED_EARLY: Final = (
    "{} is used between backward and step(), when its update has begun, which torch makes in step(): use it before "
    "backward, or after opt.step()"
)
_CALLED_EARLY: Final = (
    "{} is called between backward and step(), when its update has begun, which torch makes in step(). Call opt.step() "
    "after each backward; to accumulate over n backwards, pass grad_accumulation=n, or wrap all but a step's last one "
    "in opt.no_sync(). Evaluate before backward, or after opt.step()"
)

#: What helps where a backward is made of several.
REENTRANT: Final = ": reentrant checkpointing makes a backward of several, so pass use_reentrant=False to checkpoint()"
_NOT_CALLED: Final = (
    "{} was read without its module being called, while its update may have been under way: call the module, or "
    "opt.synchronize() before forward"
)
_REPLAYED: Final = (
    "the block of {} is a CUDA graph, which reads weights where they were when it was made, so that they cannot be "
    "offloaded: leave out offload_weights="
)
_TRACED_STREAMED: Final = (
    "torch.jit.trace of a model whose weights are offloaded, where its copy would find none: trace "
    "copy.deepcopy(model), or leave out offload_weights="
)
_NOT_GATHERED: Final = (
    "{} has a gradient, but its shards were not read after their last update: call its module, and with FSDP2 let a "
    "step's last backward reshard, as it does by default (set_reshard_after_backward(True))"
)


class Reads:
    """The readers of one model. `root` is the gate of parameters that no other module covers."""

    def __init__(
        self,
        layers: list[TrainedLayer],
        parameters: list[TrainedParameter],
        *,
        transfers: Transfers,
        health: Health,
        meter: Meter,
        offload: Offload,
        visits: Visits,
        activations: Activations | None,
        overlap: bool,
    ) -> None:
        self.root = Gate()
        self._layers, self._parameters, self._overlap = layers, parameters, overlap
        self._of = {id(known.parameter): known for known in parameters}
        self._transfers, self._health, self._meter = transfers, health, meter
        self._offload, self._visits, self._activations = offload, visits, activations
        self._order: dict[int, None] | None = {}  # layers as the first forwards entered them
        self._pack: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None
        self._no_graphs = set[OffloadedBlock]()  # that have been seen to be no CUDA graphs
        self._measured: dict[OffloadedBlock, tuple[Transfer, int]] = {}  # the last copy that the meter got, its step
        self._saving: dict[Gate, list[saved_tensors_hooks]] = {}  # of offloaded modules that run forward, and the root
        self.is_traced = False  # and so read by TorchScript, which calls none of this
        self._copies: list[tuple[weakref.ref[Tensor], int, str]] = []  # made by `away`, with their versions and names

    def enter(self, gate: Gate) -> None:
        """A module reads the gate's layers: make the current stream wait for them. Idempotent, also inside backward."""
        if not self._measures(gate):
            self._await(gate)
            return
        arrived = self._meter.mark()
        self._await(gate)
        self._meter.forward(_lids(gate), arrived)

    def before_gather(self, gate: Gate, modules: Stream) -> Waited | None:
        """The same for an all-gather that reads them, for `modules` on another stream.

        Returns the marks around the wait, for `use_gathered`, if it is measured.
        """
        if not self._measures(gate):
            self._await(gate)
            self.leave(gate)
            return None
        noticed, began = self._meter.mark(modules), self._meter.mark()
        self._await(gate)
        self.leave(gate)
        waited = began, self._meter.mark()
        return Waited((noticed, self._meter.mark(modules)), waited)

    def before_use_of_gathered(self) -> Mark:
        """Modules are about to wait for an all-gather."""
        return self._meter.mark()

    def use_gathered(self, gate: Gate, arrived: Mark, waited: Waited) -> None:
        """Modules compute with what was gathered."""
        self._meter.forward(_lids(gate), arrived, waited)

    def _measures(self, gate: Gate) -> bool:
        """Whether this is a step's first forward."""
        idle = self._health.life.state is State.IDLE
        return bool(gate.layers) and idle and torch.is_grad_enabled() and not in_backward()

    def _await(self, gate: Gate) -> None:
        inside = in_backward()
        if inside:
            self._health.check()
        else:
            self._health.require(Event.OUTSIDE)
        if torch._C._is_tracing():
            self._note_tracing()
        life = self._health.life
        if (again := self.updated_in_this_backward(gate)) is not None:
            self.refuse_again(again)
        self._visits.let_go()  # forward can use the memory
        for layer in gate.layers:
            if self._overlap and life.state is State.COMMITTED and layer.life.updated == life.step:
                raise UsageError(_CALLED_EARLY.format(f"layer {layer.name}"))
            self.wait_for(layer)
            if gate is self.root:
                self._offload.use(layer)
        if gate.is_block and not inside and (activations := self._offloaded_activations) is not None:
            activations.enter_block()
        if gate.block is not None:
            self._fetch(gate, inside)
            self._begin_saving(gate)
        for parameter in gate.parameters:
            parameter.unwatch()
        if not inside:
            coming = life.backward + 1
            for parameter in gate.parameters if gate.entered_before == coming else ():
                parameter.shared_in = coming
            gate.entered_before = coming
        self._mark_awaited(gate.parameters, inside)
        if self._order is not None and self._measures(gate):
            self._order.update(dict.fromkeys(_lids(gate)))

    def _note_tracing(self) -> None:
        """`torch.jit.trace` makes a copy that has the same parameters. Raises `UsageError` if those are offloaded."""
        if self._offload.may_offload:
            raise UsageError(_TRACED_STREAMED)
        if not self.is_traced:
            _log.warning(
                "torch.jit.trace has run the model, and may have made a copy that reads its weights where nobody waits "
                "for their updates: from now on, step() waits for all of them. Trace copy.deepcopy(model) instead"
            )
        self.is_traced = True

    def updated_in_this_backward(self, gate: Gate) -> TrainedLayer | None:
        """The first of the gate's layers that the backward which runs has already updated."""
        step = self._health.life.step
        return next((layer for layer in gate.layers if layer.life.updated == step), None) if in_backward() else None

    def refuse_again(self, layer: TrainedLayer) -> None:
        cure = REENTRANT if inside_reentrant_checkpoint() else ""
        self._health.refuse(f"layer {layer.name} is used again in the backward that has already updated it{cure}")

    def gathering(self, gate: Gate) -> Callable[[], None] | None:
        """The all-gather of the gate's shards begins: what to call at its end, so that training steps measure it."""
        if not (torch.is_grad_enabled() or in_backward()):
            return None
        return self._meter.gather(_lids(gate))

    def leave(self, gate: Gate, output: Any = None) -> None:
        """A module's forward has ended, and returned `output`."""
        for parameter in gate.parameters:
            parameter.watch()
        block = gate.block
        if gate.is_block and (activations := self._offloaded_activations) is not None and not in_backward():
            activations.leave_block()
        if block is None:
            return
        if saving := self._saving.get(gate):
            saving.pop().__exit__()
        if block.life.is_offloaded and block not in self._no_graphs and torch.is_grad_enabled():
            made = [tensor for tensor in _tensors_in(output) if tensor.grad_fn is not None]
            if graphs.replays(made, [known.parameter for known in gate.parameters]):
                raise UsageError(_REPLAYED.format(gate.parameters[0].name))
            if made:
                self._no_graphs.add(block)
        if not block.life.is_offloaded or in_backward():
            return
        if torch.is_grad_enabled():
            again = _EnterBeforeBackward(self, gate)
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(again)
                if self._offload.block_of(tensor) is block:
                    self._offload.note_view(block)
        self._offload.leave(block)

    def _begin_saving(self, gate: Gate) -> None:
        """The module's forward begins: what autograd saves of its weights is fetched when backward unpacks it."""
        block = gate.block
        if block is not None and block.life.is_offloaded and self._may_save_with_hooks():
            self._save_with_hooks(gate)

    @staticmethod
    def _may_save_with_hooks() -> bool:
        if in_backward() or saves_with_other_hooks():
            return False
        return torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def _save_with_hooks(self, gate: Gate) -> None:
        saving = self._saving_hooks()
        saving.__enter__()
        self._saving.setdefault(gate, []).append(saving)

    def _saving_hooks(self) -> saved_tensors_hooks:
        """Hooks under which autograd may save offloaded weights, and activations go to host memory."""
        if self._pack is None:
            self._pack = _packing(self, self._offload.block_of, self._activations)
        return saved_tensors_hooks(*self._pack)

    def enter_backward(self, gate: Gate) -> None:
        """The gate's module computes in backward, on the current stream. Not if it has been updated there already."""
        if self.updated_in_this_backward(gate) is not None:
            return
        for layer in gate.layers:
            self.wait_for(layer)
        if gate.block is not None:
            self._fetch(gate, True)

    def _fetch(self, gate: Gate, inside: bool) -> None:
        """A block computes: wait for its weights, if they are offloaded, and measure one copy per step."""
        block, step = gate.block, self._health.life.step
        assert block is not None, "the gate of a block"
        waits = inside and block.life.is_offloaded and Pin.COMPUTES not in block.life.pins
        arrived = self._meter.mark() if waits else None
        self._offload.enter(block, inside)
        if waits:
            self._meter.fetched(block.layers[0].lid, arrived)
        arrival = block.arrival if block.life.is_offloaded and self._measures(gate) else None
        measured, measured_in = self._measured.get(block, (None, -1))
        if arrival is not None and arrival is not measured and measured_in < step:
            self._measured[block] = arrival, step
            self._meter.span("h2d_s", _lids(gate), step, arrival.span)

    def use(self, tensor: Tensor) -> None:
        """A parameter's value is used outside of its module's forward: make the current stream wait for its update.

        Raises `UsageError` if this step's update of it has begun, before `step()` was called; but not while an error of
        HyTrain is handled, so that whoever cleans up (`model.cpu()`) does not hide it.
        """
        known = self._of.get(id(tensor))
        if known is None:  # a new parameter, made of a watched one
            tensor.__class__ = tensor.plain  # type: ignore[attr-defined]
            return
        if not self._may_use(known):
            return
        if known.awaited and in_backward() and graphs.is_captured(tensor):
            return  # forward has waited, and does so before each replay
        for layer, _ in known.places:
            self.wait_for(layer)
            self._offload.use(layer)
            if self._order is not None and torch.is_grad_enabled():
                self._order.setdefault(layer.lid)
        self._require_own_writes(known)
        known.awaited = True

    def away(self, tensor: Tensor) -> Tensor | None:
        """A copy of a parameter's value in host memory, if it is offloaded; all updates have been waited for."""
        known = self._of.get(id(tensor))
        if known is None or not any(layer.rests_on_host for layer, _ in known.places) or not self._may_use(known):
            return None
        for layer, _ in known.places:
            self._offload.land(layer)
        copied = known.values().clone()
        self._copies.append((weakref.ref(copied), version(copied), known.name))
        return copied

    def forget_copies(self) -> None:
        """Weights are loaded: what was written to copies of them is loaded now, as after DCP, or not meant to be."""
        self._copies.clear()

    def require_unwritten_copies(self) -> None:
        """Raise `UsageError` if a copy was written, as one would write weights in torch."""
        self._copies = [known for known in self._copies if known[0]() is not None]
        for copied, before, name in self._copies:
            if (tensor := copied()) is not None and version(tensor) != before:
                self._copies.clear()
                raise UsageError(
                    f"{name} of model.state_dict() was written, but it is offloaded, so this is a copy in host memory: "
                    "call model.load_state_dict() with what you have written"
                )

    def around_use(self, tensor: Tensor) -> AbstractContextManager[Any]:
        """A context for an operation on a parameter that is used outside of its module's forward."""
        known = self._of.get(id(tensor))
        block = None if known is None or not known.places else known.places[0][0].block
        if block is None or not block.life.is_offloaded:
            return nullcontext()
        return self._during_use(block)

    @contextmanager
    def _during_use(self, block: OffloadedBlock) -> Iterator[None]:
        saves = torch.is_grad_enabled() and not saves_with_other_hooks()
        with self._offload.using(block), self._saving_hooks() if saves else nullcontext():
            yield

    def _may_use(self, known: TrainedParameter) -> bool:
        """Whether a parameter can be used now; False while an error is handled. Raises what `use` does."""
        life = self._health.life
        cleans_up = isinstance(sys.exc_info()[1], HyTrainError)  # not any: a whole loop may be in an `except`
        if known.step == life.step and life.state in IN_BACKWARD:
            if cleans_up:
                return False
            raise UsageError(
                f"{known.name} is used while backward runs, which has updated it already: use it before, or after "
                "opt.step()"
            )
        if known.step == life.step and self._overlap and not cleans_up:
            raise UsageError(_USED_EARLY.format(known.name))
        return True

    def enter_root(self) -> None:
        """The whole model is about to compute: from here on, what autograd saves goes to host memory, if asked for."""
        self.enter(self.root)
        if self._activations is not None and self._may_save_with_hooks():
            self._activations.begin_forward()
            self._save_with_hooks(self.root)

    @property
    def _offloaded_activations(self) -> Activations | None:
        """Whoever takes what autograd saves now."""
        return self._activations if self._saving.get(self.root) else None

    def leave_root(self, output: Any) -> None:
        """The whole model's forward has ended. `output` is what it returned.

        A backward that comes through it after another one, but before `step()`, is refused before it begins: autograd
        would find changed weights, and name nobody.
        """
        self.leave(self.root)
        if (activations := self._offloaded_activations) is not None and not in_backward():
            self._saving[self.root].pop().__exit__()
            activations.end_forward()
        if torch.is_grad_enabled():
            refuse = _RefuseSecondBackward(self._health)
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(refuse)

    def _require_own_writes(self, known: TrainedParameter) -> None:
        """Raise `UsageError` for a write that may have come while an update was under way, by autograd's count."""
        if not known.awaited and known.count and known.was_written():
            raise UsageError(f"{known.name} was written before its update: opt.synchronize() before writing")

    def wait_for(self, layer: TrainedLayer, *, on_host: bool = False) -> None:
        """Wait until the copy of the layer's new weights was started, and make the stream wait for its end.

        With `on_host`, the thread also waits for the end, for readers on any stream.
        """
        if not layer.life.is_current:
            self._await_landing(layer)
        elif layer.landing is not None:
            self._transfers.land(layer.landing)  # the stream that waited before may be another one
        for ends in (layer.landing, layer.returned) if on_host else ():
            if ends is not None:
                ends.synchronize()

    def _await_landing(self, layer: TrainedLayer) -> None:
        self._health.wait_for(
            lambda: layer.landing is not None or layer.life.is_current, f"the update of layer {layer.name}"
        )
        landing = layer.landing
        if layer.life.is_current or landing is None:
            return
        for segment in layer.segments:
            if not segment.owner.is_in_place:
                raise UsageError(
                    f"the storage of {segment.owner.name} was replaced while its update was under way: call "
                    "opt.synchronize() before swapping .data, and opt.close() before moving or converting the model"
                )
        self._transfers.land(landing)
        with self._health.changed:
            if not layer.life.is_current:
                layer.life.on(LayerEvent.AWAITED, layer.life.updated)

    def await_parameter(self, parameter: TrainedParameter) -> None:
        """Wait for a parameter's last update, which reads its gradient."""
        for layer, _ in parameter.places:
            self.wait_for(layer)

    def synchronize(self) -> None:
        """Return once every update has landed in the parameters, on the host (I6)."""
        for layer in self._layers:
            self.wait_for(layer, on_host=True)
        self._offload.refresh_views()
        with unwatched():
            self._mark_awaited(self._parameters, in_backward())

    def _mark_awaited(self, parameters: list[TrainedParameter], inside: bool) -> None:
        """Mark parameters as readable. In a backward, those whose gradient has come are about to change again."""
        for parameter in parameters:
            if not inside or parameter.step != self._health.life.step:
                self._require_own_writes(parameter)
                parameter.awaited = True

    def meet_uncovered(self, parameter: TrainedParameter) -> None:
        """A parameter that nobody waited for has a gradient: from now on the root waits for its layers (I1).

        Raises `StaleReadError` if an update may have been under way when the parameter was read.
        """
        step = self._health.life.step
        for layer, _ in parameter.places:
            was_under_way = layer.life.placement.state == "host" or layer.came == step
            if was_under_way and layer.life.updated >= 0:
                stale = _NOT_GATHERED if is_distributed(parameter.parameter) else _NOT_CALLED
                self._health.refuse(stale.format(parameter.name), StaleReadError)
            if layer not in self.root.layers:
                self.root.add(layer)
                self._offload.keep(layer)

    def learned_order(self) -> tuple[int, ...] | None:
        """Once, after the first step: the position of each layer in the order in which forward entered them.

        Layers that the root waits for come first. Layers that were not entered come last, in the order of the table.
        """
        if self._order is None:
            return None
        place = {lid: index for index, lid in enumerate(self._order)}
        place.update((layer.lid, -1) for layer in self.root.layers)
        self._order = None
        order = sorted(range(len(self._layers)), key=lambda lid: (place.get(lid, len(place)), lid))
        return tuple(order.index(lid) for lid in range(len(order)))


def _lids(gate: Gate) -> tuple[int, ...]:
    return tuple(layer.lid for layer in gate.layers)


class _RefuseSecondBackward:
    def __init__(self, health: Health) -> None:
        self._health = weakref.ref(health)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, gradients: tuple[Tensor, ...]) -> None:
        health = self._health()
        if health is not None and health.life.state is State.COMMITTED:
            health.require(Event.BEGIN, name="the model's output")


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A tensor that autograd has saved, and its version then: of an offloaded weight, whose `gate` that is, or any."""

    tensor: Tensor
    version: int
    gate: Gate | None


def _packing(
    reads: Reads, block_of: Callable[[Tensor], OffloadedBlock | None], activations: Activations | None
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """What autograd does with a tensor that it saves, and with what it has saved when it needs it."""
    me = weakref.ref(reads)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(tensor: Tensor) -> Any:
        block = block_of(tensor)
        if block is not None:
            return _OnDevice(tensor, version(tensor), block.gate)
        with unwatched():
            alias = tensor.detach()  # or a tensor that its own node saves would never be freed
        is_own = type(alias) is Tensor  # what a subclass has elsewhere stays
        saved = activations.save(tensor, alias) if activations is not None and is_own else None
        return _OnDevice(alias, version(alias), None) if saved is None else saved

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Saved):
            assert activations is not None, "has made it"
            return activations.restore(saved)
        if not isinstance(saved, _OnDevice):
            return cast(Tensor, saved)
        if version(saved.tensor) != saved.version:
            raise RuntimeError(MODIFIED)
        if saved.gate is None:
            return saved.tensor
        if (reads := me()) is not None:
            reads.enter_backward(saved.gate)
            if torch.is_grad_enabled() and saved.gate.block is not None:
                reads._offload.hold(saved.gate.block)  # `create_graph`: what this backward saves is not seen
        if not has_memory(saved.tensor):
            raise UsageError(f"layer {saved.gate.layers[0].name} is used again after its update has begun")
        return saved.tensor

    return pack, unpack


class _EnterBeforeBackward:
    """A pre-hook of the nodes that made a module's output: its backward is likely to begin, so its weights come."""

    def __init__(self, reads: Reads, gate: Gate) -> None:
        self._reads, self._gate = weakref.ref(reads), gate

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, gradients: tuple[Tensor, ...]) -> None:
        reads = self._reads()
        if reads is not None:
            reads.enter_backward(self._gate)


def _tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors_in(list(output.values()))
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _tensors_in(part)


def inside_reentrant_checkpoint() -> bool:
    """Whether this thread runs a backward that reentrant activation checkpointing started inside another one."""
    code: Final = CheckpointFunction.backward.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def in_backward() -> bool:
    """Whether this thread runs a backward of autograd."""
    return bool(torch._C._current_graph_task_id() != -1)
