"""Waits for weights before modules read them.

    a module is called       BeforeForward ─▶ enter(gate)       waits for the updates of the module's layers
    the model is called      engine ─▶ enter_root()             waits for parameters that no other module covers, and
                                                                for what compiled code reads
    any other use of one     Watched ─▶ `uses`                  waits for this parameter
    state_dict, save, …      engine ─▶ synchronize()            waits for all updates, on the host
    autograd, in backward    what was saved ─▶ `blocks`         fetches offloaded weights, and activations

A layer that is CURRENT can be read. If its update is under way, the reader waits (`RoundTrip.wait_for`): the thread for
the optimizer's message, the stream for the copy of the weights. `TrainedParameter.awaited` says that the last update
has been waited for. The gradient of a parameter for which this is not so may come from a stale read (I1).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from hytrain.errors import HyTrainError, StaleReadError, UsageError
from hytrain.memory.clock import Mark, Stream
from hytrain.model.block_life import Pin
from hytrain.model.trained import Gate, TrainedLayer, TrainedParameter, written
from hytrain.model.watched import unwatched
from hytrain.step.autograd import REENTRANT, in_backward, inside_reentrant_checkpoint
from hytrain.step.blocks import Blocks, tensors_in
from hytrain.step.common import Common
from hytrain.step.gradient import RoundTrip
from hytrain.step.life import Event, State
from hytrain.step.marks import Waited
from hytrain.tensors import is_distributed
from hytrain.uncompiled import Weakly

_log = logging.getLogger(__name__)

WRITTEN_EARLY: Final = (
    '{} was written before its update: opt.synchronize() before writing, or updates="step" if a backward writes it'
)
_CALLED_EARLY: Final = (
    "{} is called between backward and step(), but its update has already begun, which torch would make in step(). "
    "Call opt.step() after each backward; to accumulate over n backwards, pass grad_accumulation=n, or wrap all but a "
    "step's last one in opt.no_sync(). Evaluate before backward, or after opt.step(), or pass "
    'updates="step"'
)
_NOT_CALLED: Final = (
    "{} was read without its module being called, while its update may have been under way: call the module, or "
    "opt.synchronize() before forward"
)
_TRACED_OFFLOADED: Final = (
    "torch.jit.trace of a model whose weights are offloaded, where its copy would find none: trace "
    "copy.deepcopy(model), or leave out offload_weights="
)
_NOT_GATHERED: Final = (
    "{} has a gradient, but its shards were not read after their last update: call its module, and with FSDP2 let a "
    "step's last backward reshard, as it does by default (set_reshard_after_backward(True))"
)


class Reads:
    """The modules of one model that read. `root` is the gate of parameters that no other module covers.

    `loose`: of parameters that no module has which was called. They may be read where nobody waits (in `torch.func`),
    so `step()` does. `_hoisted`: the gates of modules inside compiled code, for which the whole model waits.
    `_in_root`: it computes.
    """

    loose: Sequence[Gate] = ()

    def __init__(self, common: Common, trip: RoundTrip, blocks: Blocks) -> None:
        self.root = Gate()
        self._thread: int | None = None  # the one that trains
        self._layers, self._parameters = common.layers, common.parameters
        self._health, self._meter, self.arrive = common.health, common.meter, common.meter.arrive
        self._trip, self._offload, self._blocks, self._visits = trip, common.offload, blocks, common.visits
        self._activations = common.activations
        self._hoisted: dict[Gate, None] = {}
        self._in_root = False
        self._order: dict[int, None] | None = {}  # layers as the first forwards entered them
        self.is_traced = False  # and so read by TorchScript, which calls none of this

    def enter(self, gate: Gate) -> None:
        """A module reads the gate's layers: make the current stream wait for them. Idempotent, also inside backward."""
        measured = self._measures(gate)
        arrived = self._meter.arrive() if measured else None
        self._await(gate, measured)
        if measured:
            self._meter.forward(gate.lids, arrived)

    def before_gather(
        self, gate: Gate, modules: Stream
    ) -> tuple[TrainedLayer | None, Waited | None, Callable[[], None] | None]:
        """The same for an all-gather that reads them, for `modules` on another stream.

        Returns a layer that this backward has updated: its shards must be there, but nobody may use the result. Or the
        marks around the wait, for `use_gathered`, and what to call at its end, as far as they are measured.
        """
        if (again := self._trip.updated_in_this_backward(gate)) is not None:
            if gate.block is not None:
                self._offload.enter(gate.block, True)
            return again, None, None
        measured, waited = self._measures(gate), None
        fetches = in_backward() and gate.block is not None and gate.block.life.is_offloaded
        before = (self._meter.mark(modules), self._meter.mark()) if measured or fetches else None
        self._await(gate, measured)
        self.leave(gate)
        if before is not None:
            ended = self._meter.mark()
            waited = Waited((before[0], self._meter.mark(modules)), (before[1], ended))
        return None, waited, self._meter.gather(gate.lids) if torch.is_grad_enabled() or in_backward() else None

    def after_reading(self, gate: Gate) -> None:
        """The all-gather has copied the shards, on the current stream."""
        if gate.block is not None:
            self._offload.after_gather(gate.block, in_backward())

    def use_gathered(self, gate: Gate, arrived: Mark, waited: Waited) -> None:
        """Modules compute with what was gathered."""
        if in_backward():
            self._meter.fetched(gate.lids[0], arrived, waited)
        else:
            self._meter.forward(gate.lids, arrived, waited)

    def _measures(self, gate: Gate) -> bool:
        """Whether this is a step's first forward."""
        idle = self._health.life.state is State.IDLE
        return idle and bool(gate.layers) and torch.is_grad_enabled() and not in_backward()

    def _await(self, gate: Gate, measured: bool) -> None:
        inside, life = in_backward(), self._health.life
        if not inside:
            self._health.require(Event.OUTSIDE)
        else:
            self._health.check()
            if (again := self._trip.updated_in_this_backward(gate)) is not None:
                self.refuse_again(again)
        if torch._C._is_tracing():
            self._note_tracing()
        self._visits.let_go()  # forward can use the memory
        for layer in gate.layers:
            if life.state is State.COMMITTED and layer.life.updated == life.step:
                raise UsageError(_CALLED_EARLY.format(f"layer {layer.name}"))
            self._trip.wait_for(layer)
            if gate is self.root:
                self._offload.use(layer)
        if gate.is_block or gate.block is not None:
            self._blocks.enter(gate, inside=inside, measured=measured)
        gate.unwatch()
        if not inside:
            gate.note_entered(before=life.backward + 1)
        self.mark_awaited(gate.parameters, inside=inside)
        if measured:
            self.note_order(gate.layers)

    def leave(self, gate: Gate, output: Any = None) -> None:
        """A module's forward has ended, and returned `output`."""
        if not (self._in_root and gate in self._hoisted):
            gate.watch()
        if gate.is_block or gate.block is not None:
            self._blocks.leave(gate, output)

    def hoist(self, gate: Gate) -> bool:
        """The compiler traces a call of the gate's module: whether the whole model waits instead of it from now on.

        The graph that is being made computes now, too, so this waits as well. It is for plain parameters only: torch
        does not call it where nobody has waited.
        """
        if not self._in_root or self._offload.may_offload or self._activations is not None:
            return False
        if gate not in self._hoisted:
            self._hoisted[gate] = None
            try:
                self.enter(gate)
            except HyTrainError:  # the hook raises it again, outside of the compiler, which would make it its own
                return False
        return True

    def note_mode(self, training: bool) -> None:
        """The whole model is about to compute, in training mode or in evaluation mode."""
        if torch.is_grad_enabled() and not in_backward():
            self._health.timing.training = training

    def enter_root(self) -> None:
        """The whole model is about to compute."""
        self._in_root = True
        for gate in (self.root, *self._hoisted):
            self.enter(gate)
        self._blocks.enter_root()

    def leave_root(self, output: Any) -> None:
        """The whole model's forward has ended. `output` is what it returned.

        A backward that comes through it after another one, but before `step()`, is refused before it begins: autograd
        would find changed weights, and name nobody.
        """
        self._in_root = False
        for gate in (self.root, *self._hoisted):
            self.leave(gate)
        self._blocks.leave_root()
        if torch.is_grad_enabled():
            before, after = Weakly(self.enter_backward), Weakly(self.leave_backward)
            for node in {node for tensor in tensors_in(output) if (node := tensor.grad_fn) is not None}:
                node.register_prehook(before)
                if self._hoisted:
                    node.register_hook(after)

    def enter_backward(self, *_: Any) -> None:
        """The node that made the model's output is about to compute. That of compiled code does it with parameters."""
        if self._health.life.state is State.COMMITTED:
            self._health.require(Event.BEGIN, name="the model's output")
        for gate in self._hoisted:
            gate.unwatch()

    def leave_backward(self, *_: Any) -> None:
        """This node has computed. Only now do its gradients come, and updates begin."""
        for gate in self._hoisted:
            gate.watch()

    def _note_tracing(self) -> None:
        """`torch.jit.trace` makes a copy that has the same parameters. Raises `UsageError` if those are offloaded."""
        if self._offload.may_offload:
            raise UsageError(_TRACED_OFFLOADED)
        if not self.is_traced:
            _log.warning(
                "torch.jit.trace has run the model, and may have made a copy that reads weights where HyTrain cannot "
                "wait for their updates: from now on, step() waits for all updates. Trace copy.deepcopy(model) instead"
            )
        self.is_traced = True

    def refuse_again(self, layer: TrainedLayer) -> None:
        cure = REENTRANT if inside_reentrant_checkpoint() else ""
        self._health.refuse(f"layer {layer.name} is used again in the backward that has already updated it{cure}")

    def end_step(self) -> None:
        """A step has ended: wait for what may be read where nobody waits."""
        self._thread = threading.get_ident()
        if self.is_traced:
            self.synchronize()
        for gate in () if self.is_traced else self.loose:
            for layer in gate.layers:
                self._trip.wait_for(layer)
            self.mark_awaited(gate.parameters, inside=in_backward())

    def before_fork(self) -> None:
        """Wait for all updates, unless a step is under way, or another thread than this one trains."""
        if self._health.life.state is State.IDLE and self._thread == threading.get_ident():
            self._health.check()
            self.synchronize()

    def synchronize(self) -> None:
        """Return once every update has landed in the parameters, on the host (I6)."""
        for layer in self._layers:
            self._trip.wait_for(layer, on_host=True)
        self._offload.refresh_views()
        with unwatched():
            self.mark_awaited(self._parameters, inside=in_backward())

    def mark_awaited(self, parameters: Iterable[TrainedParameter], *, inside: bool) -> None:
        """Mark parameters as readable. In a backward, those whose gradient has come are about to change again.

        Raises `UsageError` for a write that may have come while an update was under way, by autograd's count.
        """
        step = self._health.life.step
        due = [known for known in parameters if not known.awaited and not (inside and known.step == step)]
        for known in written([known for known in due if known.count]) if due else ():
            raise UsageError(WRITTEN_EARLY.format(known.name))
        for known in due:
            known.awaited = True

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
                if layer.block is not None:
                    layer.block.life.pin(Pin.HIDDEN)  # it is read where nobody sees it

    def note_order(self, layers: Iterable[TrainedLayer]) -> None:
        """A training forward has come to these layers, in the order in which it needs them."""
        if self._order is not None:
            self._order.update(dict.fromkeys([layer.lid for layer in layers]))

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
