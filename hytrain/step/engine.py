"""The trainer's engine: takes each gradient from its hook to the weights of the next forward.

    backward ─ on_gradient ─ layer full ─┬─ the CPU's: gradients_out ─ GradReady ─▶ optimizer
                                         └─ the GPU's: update on the device, now
    optimizer ─ WeightsReady ─ weights_in ─ before_forward waits for exactly this ─▶ next forward

`hooks` call in from the user's threads, `link` from its own two. `lifecycle` says what each event means for a layer;
`transfer`, `planes` and `handover` do the moving, `boundary` what is due between steps. No step ends with a barrier.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Final

import torch
from torch.utils.checkpoint import CheckpointFunction

from hytrain.checks import Options
from hytrain.errors import ClusterError, HyTrainError, NonFiniteGradients, StaleReadError, UsageError
from hytrain.kernels.backend import Backend
from hytrain.kernels.scalars import Hyper, scalars
from hytrain.memory.planes import Gate, TrainedLayer, TrainedParameter
from hytrain.memory.transfer import Transfers
from hytrain.model.lifecycle import Command, Event
from hytrain.run.link import Link
from hytrain.run.trace import TraceWriter
from hytrain.statistics import Statistics
from hytrain.step.accumulation import Accumulation, choose_sums
from hytrain.step.boundary import Boundary
from hytrain.step.handover import Handover
from hytrain.step.health import Health
from hytrain.step.measure import Meter
from hytrain.step.verdict import Clipping
from protocol.messages import GradReady, GroupHyper, Message, Plan, Reassign, StepBegin, WeightsReady

FAILURE_GRACE_S: Final = 1.0

_log = logging.getLogger(__name__)
Groups = tuple[GroupHyper, ...]


class Engine:
    """One model's layers, their lives, and the threads between them and the optimizer process."""

    def __init__(
        self,
        layers: list[TrainedLayer],
        parameters: list[TrainedParameter],
        *,
        link: Link,
        transfers: Transfers,
        host: Backend | None,
        read_groups: Callable[[], Groups],
        free_gpu_bytes: Callable[[], int | None],
        options: Options,
        trace: TraceWriter | None = None,
    ) -> None:
        self.layers, self.parameters = layers, parameters
        self.health = Health()
        self._step = self._steps_before = 0
        self._link, self._transfers, self._host = link, transfers, host
        self._read_groups = read_groups
        self._overlap = options.overlap
        self.clipping = Clipping(parameters, options, transfers, hints=layers[0].layout.banks == 2)
        self.accumulation = Accumulation(
            options.grad_accumulation,
            lambda: choose_sums(options.accumulate_on, parameters, transfers, free_gpu_bytes()),
        )
        numels, names = [layer.spec.numel for layer in layers], [layer.name for layer in layers]
        self._meter = Meter(transfers.clock, numels, trace=trace, names=names)
        self._handover = Handover(layers, link=link, transfers=transfers, health=self.health)
        self._boundary = Boundary(
            layers, link=link, handover=self._handover, meter=self._meter, free_gpu_bytes=free_gpu_bytes
        )
        self._groups: Groups | None = None
        self._hypers: list[Hyper] = []
        self._in_backward = self._backward_done = False
        self._backward = 0  # backwards begun
        self._scaled = 0  # losses of this step that were scaled, and not gone backward from
        self._written = self._state_loaded = False
        self._held: list[Callable[[], None]] = []  # the GPU's updates, until the verdict
        self._has_thawed: Callable[[], bool] = lambda: False
        self._thaw: Callable[[], Callable[[], None] | None] = lambda: None
        self._root = Gate(())
        self._synchronized = -1
        self._came: frozenset[int] = frozenset()  # layers that were the CPU's in this step's forward, and are not now

    def start(self, plan: Plan) -> None:
        """Give every layer its first placement, by the coordinator's first plan."""
        try:
            self._boundary.start(plan)
        except ClusterError as error:
            with self.health.changed:  # the optimizer's own words, if it has any, say more than a closed socket
                self.health.changed.wait_for(lambda: self.health.failure is not None, FAILURE_GRACE_S)
            raise self.health.failure or error from error

    def watch(self, has_thawed: Callable[[], bool], thaw: Callable[[], Callable[[], None] | None]) -> None:
        """Once there are parameters that were frozen, call what `thaw` refers to, which replaces this engine."""
        self._has_thawed, self._thaw = has_thawed, thaw

    def succeed(self, before: Engine) -> None:
        """Go on counting where another engine has ended."""
        self.steps, self._state_loaded = before.steps, before._state_loaded
        self.accumulation = before.accumulation
        self.clipping.succeed(before.clipping)

    # ------------------------------------------------------------ forward

    def before_root(self) -> None:
        """The whole model is entered: what was written from outside counts, and what no other gate covers waits."""
        if _graph_task() == -1:
            self.health.check()
            self.settle_writes()
            if self._thaws() and (thaw := self._thaw()) is not None:
                thaw()
                return  # the other engine has been told
            if self.accumulation.is_first:
                self._meter.restart()
            if not torch.is_grad_enabled():
                self.synchronize()  # without gradients nobody would notice a read that no gate covers
        self._enter(self._root)

    def settle_writes(self) -> None:
        """What was written from outside, and said so, becomes the masters; raises `UsageError` for other writes."""
        self.import_written()
        self._refuse_foreign_writes()

    def _thaws(self) -> bool:
        """Whether a frozen parameter has been unfrozen, and a step begins."""
        if not torch.is_grad_enabled() or self._groups is not None or not self.accumulation.is_first:
            return False
        return self._has_thawed()

    def before_forward(self, gate: Gate) -> None:
        """The current stream may read the gate's layers after this. Idempotent, also inside backward."""
        self._enter(gate)

    def before_read(self, parameter: TrainedParameter) -> None:
        """The current stream may read the parameter after this, except in backward, which updates it."""
        if self._in_backward:
            return
        if all(gate.step != self._step for gate in parameter.gates):
            for layer, _ in parameter.places:
                if not layer.life.is_current:
                    self._await(layer)
        parameter.awaited = True

    def _enter(self, gate: Gate) -> None:
        self.health.check()
        inside_backward = _graph_task() != -1
        if not inside_backward:
            self._require_no_backward()
        gate.step = self._step
        if not gate.layers:
            return
        measured = not inside_backward and torch.is_grad_enabled() and self.accumulation.is_first
        arrived = self._meter.arrive() if measured else None
        for layer in gate.layers:
            if inside_backward and layer.life.updated == self._step:
                self.health.refuse(f"layer {layer.name} is used again in the backward that has already updated it")
            if not layer.life.is_current:
                self._await(layer)
            elif layer.landing is not None:
                self._transfers.land(layer.landing)  # the stream that awaited it may have been another one
        if measured:
            lids = tuple(layer.lid for layer in gate.layers)
            self._meter.forward(lids, arrived)
            self._boundary.entered(gate)

    def _await(self, layer: TrainedLayer, on_host: bool = False) -> None:
        """Wait until the layer's new weights are on their way in, and let the stream wait for their arrival.

        `on_host` waits for the arrival itself, for readers on whatever stream.
        """
        self.health.wait_for(
            lambda: layer.landing is not None or layer.life.is_current, f"the update of layer {layer.name}"
        )
        if layer.life.is_current:
            return
        landing = layer.landing
        assert landing is not None, "what has been waited for"
        for segment in layer.segments:
            if segment.owner.parameter.data_ptr() != segment.owner.address:
                raise UsageError(
                    f"the storage of {segment.owner.name} was replaced while its update was under way: call "
                    "opt.synchronize() before swapping .data, and opt.close() before moving or converting the model"
                )
        self._transfers.land(landing)
        if on_host:
            landing.synchronize()
        with self.health.changed:
            if not layer.life.is_current:
                layer.life.on(Event.AWAITED, layer.life.updated)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the step's scale, if there is one."""
        if self.clipping.loss_scale is None:
            return loss
        self._scaled += 1
        return loss * self.clipping.loss_scale.value

    # ------------------------------------------------------------ backward

    def on_gradient(self, parameter: TrainedParameter) -> None:
        """A parameter's gradient is complete: take it, and send its layers off as they fill."""
        tensor = parameter.parameter
        self.health.check()
        if tensor.grad is None:
            return
        self._check_gradient(parameter, tensor.grad)
        if not self._in_backward:
            try:
                self._begin_backward(parameter)
            except (NonFiniteGradients, UsageError):  # of what was before: no gradient of this backward is left behind
                tensor.grad = None
                raise
        if parameter.backward == self._backward:
            self.health.refuse(f"a second gradient of {parameter.name} in one backward")
        parameter.backward = self._backward
        if not parameter.awaited and all(gate.step != self._step for gate in parameter.gates):
            self._meet_uncovered(parameter)
        if not self.accumulation.is_last:
            self.accumulation.add(parameter)
            return
        self._fill(parameter)
        tensor.grad = parameter.consumed
        for layer, _ in parameter.places:
            if len(layer.filled) == len(layer.segments):
                self._meter.backward(layer.lid)
                if self._overlap:
                    self._dispatch(layer)

    def _fill(self, parameter: TrainedParameter) -> None:
        """Give the step's gradient of a parameter to its layers."""
        gradient = self.accumulation.take(parameter)
        parameter.step = self._step
        parameter.count += 1
        parameter.awaited = False
        stream = self._transfers.stream()
        for layer, index in parameter.places:
            layer.filled[index] = layer.segments[index].part(gradient)
            layer.streams.add(stream)

    def _check_gradient(self, parameter: TrainedParameter, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            self.health.refuse(f"the gradient of {parameter.name} is sparse: use sparse=False in its embedding")
        if gradient.requires_grad:
            self.health.refuse("backward(create_graph=True) needs gradients that HyTrain has consumed")
        if parameter.parameter.data_ptr() != parameter.address:
            self.health.refuse(
                f"the storage of {parameter.name} was replaced after hytrain.AdamW was made: move or convert the model "
                "before, or call opt.close() first"
            )

    def _begin_step(self) -> None:
        lids = {layer.lid for layer in self.layers if layer.life.placement.updates == "cpu"}
        self._finish_handovers()
        self._came = frozenset(lid for lid in lids if self.layers[lid].life.placement.updates == "gpu")
        self.clipping.settle()
        self.import_written()
        if self._root.step != self._step:  # the whole model was not entered, which looks for them
            self._refuse_foreign_writes()
        if self._state_loaded:  # a float16 master is no part of its weights: those that were there may be others
            halves = [known for known in self.parameters if known.parameter.dtype is torch.float16]
            self._import(halves, keep_remainder=True)
        self._state_loaded = False
        self._groups = self._read_groups()
        self._hypers = [Hyper(**{name: getattr(g, name) for name in GroupHyper.__slots__}) for g in self._groups]
        begin = StepBegin(step=self._step, groups=self._groups, awaits_verdict=self.clipping.is_wanted)
        self._link.post("optimizer", begin)

    def _begin_backward(self, parameter: TrainedParameter) -> None:
        if self.clipping.loss_scale is not None:
            if self._scaled == 0:
                self.health.refuse(
                    "a backward from a loss that was not scaled since step(): opt.scale(loss).backward()"
                )
            self._scaled -= 1
        self.accumulation.begin()
        if self.accumulation.is_last and self._groups is None:
            self._begin_step()
        if self._backward_done:
            self.health.refuse(
                f"a backward reached {parameter.name} before step() was called for the last one: call opt.step() "
                "after each backward, or pass grad_accumulation=n"
                if self.accumulation.backwards == 1
                else f"a backward reached {parameter.name} before step() was called: with "
                f"grad_accumulation={self.accumulation.backwards}, call opt.step() after so many"
            )
        if _inside_reentrant_checkpoint():
            self.health.refuse("reentrant activation checkpointing: pass use_reentrant=False to checkpoint()")
        self._in_backward = True
        self._backward += 1
        if not (self.accumulation.is_first and self.accumulation.is_last):
            self._meter.turn()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _meet_uncovered(self, parameter: TrainedParameter) -> None:
        """A gradient of a parameter whose module was not called: from now on the root waits for its layers (I1)."""
        for layer, _ in parameter.places:
            waited = self._synchronized == self._step or (layer in self._root.layers and self._root.step == self._step)
            was_cpu = layer.life.placement.updates == "cpu" or layer.lid in self._came
            if was_cpu and layer.life.updated >= 0 and not waited:
                self.health.abort(
                    StaleReadError(
                        f"{parameter.name} was read without its module being called, while its update may have been "
                        "under way: call the module, or opt.synchronize() before forward"
                    )
                )
            if layer not in self._root.layers:
                self._root.layers = (*self._root.layers, layer)

    def _end_backward(self) -> None:
        """Called by autograd when the whole backward has succeeded."""
        self.accumulation.end()
        if self.accumulation.is_last:
            self._complete()
        self._in_backward = False  # last: an exception in here is one in backward

    def _complete(self) -> None:
        """The step's last backward is over: layers without all gradients leave too (I5)."""
        self._backward_done = True
        for parameter in self.accumulation.pending:
            self._fill(parameter)
        if self._overlap:
            self._flush()
            self._judge()

    def _flush(self) -> None:
        """Send off all layers that have gradients; without overlap, one after the other, each to its end."""
        layers = [layer for layer in self.layers if layer.filled]
        for layer in layers:
            if len(layer.filled) < len(layer.segments):
                self._meter.backward(layer.lid)
        if not self._overlap:
            for layer in layers:
                self.clipping.add(layer)
            self._judge()
        for layer in layers:
            self._dispatch(layer)
            if not self._overlap and not layer.life.is_current:
                self._await(layer, on_host=True)

    def _judge(self) -> None:
        """The step's gradients are all there: their norm says what becomes of them."""
        if not self.clipping.is_wanted:
            return
        judgement = self.clipping.judge(self._step)
        for role in ("optimizer", "coordinator"):
            self._link.post(role, judgement.verdict, after=judgement.arrival)
        for update in self._held:
            update()
        self._held.clear()

    def _dispatch(self, layer: TrainedLayer) -> None:
        """The layer's gradients are all there: to the optimizer, or straight into the device's update."""
        step, counts = self._step, layer.counts()
        self._transfers.join(layer.streams, layer.filled.values())
        layer.streams.clear()
        if self._overlap:
            self.clipping.add(layer)
        layer.landing = None
        if layer.life.on(Event.FILLED, step) is Command.UPDATE_ON_DEVICE:
            update = partial(self._update_on_device, layer, counts, dict(layer.filled))
            layer.filled.clear()
            if self._overlap and self.clipping.is_wanted:
                self._held.append(update)
            else:
                update()
            return
        if not self.clipping.is_wanted:
            self._outdate(layer, counts)
        norm = self.clipping.norm_so_far(layer)
        departure = self._transfers.gradients_out([*layer.outgoing(), *([norm.copy] if norm else [])])
        layer.filled.clear()
        layer.sent = counts
        self._meter.span("d2h_s", layer.lid, departure.span)
        ready = GradReady(step=step, lid=layer.lid, counts=counts)
        self._link.post(
            "optimizer",
            partial(norm.told_with, ready) if norm else ready,
            after=departure,
            before_sending=lambda: layer.life.on(Event.COPIED, step),
        )

    def _outdate(self, layer: TrainedLayer, counts: tuple[int, ...]) -> None:
        """The weights may change from now on: a read later in this backward is an error, as with the GPU's updates.

        `W` and `W.detach()` in one graph make such a read. Autograd compares versions when it comes to it.
        """
        with self.health.changed:
            written = [segment.weights for segment, count in zip(layer.segments, counts, strict=True) if count]
            torch.autograd.graph.increment_version(written)
            layer.note_writes(counts)

    def _update_on_device(
        self, layer: TrainedLayer, counts: tuple[int, ...], gradients: dict[int, torch.Tensor]
    ) -> None:
        on_host = self._host is not None
        scale = self.clipping.host_scale() if on_host else 1.0
        if scale is None:
            return  # a skipped step; on a GPU the kernel sees to that
        began = self._transfers.clock.mark()
        for index, gradient in gradients.items():
            segment = layer.segments[index]
            numbers = scalars(self._hypers[segment.spec.group], counts[index], scale)
            layer.device.update(index, segment, gradient, numbers, self._host, None if on_host else self.clipping.scale)
        layer.note_writes(counts)
        self._meter.span("gpu_update_s", layer.lid, (began, self._transfers.clock.mark()))

    # ------------------------------------------------------------ the step's boundary

    def step(self) -> None:
        """Mark the boundary: everything was sent when it appeared. Does nothing if there was no gradient."""
        self.health.check()
        self._require_no_backward()
        self._check_consumed()
        if self.accumulation.pending and not self._backward_done:  # fewer backwards than were announced
            self._begin_step()
            with self._undivided("the update of layers"):
                self._complete()
        if self._groups is None:
            return
        if self._read_groups() != self._groups:
            self.health.refuse(
                "a parameter group's hyperparameters changed between backward and step(): HyTrain reads them when "
                "the step's last backward begins, so call the scheduler after opt.step()"
            )
        with self._undivided("the update of layers"):
            self._flush()
            ended, self._step = self._step, self._step + 1
            self._groups, self._backward_done, self._scaled = None, False, 0
            self.accumulation.reset()
        self._boundary.report(ended, self.steps)
        self._boundary.learn_positions(self._root)
        with self._undivided("a handover of layers"):
            self._boundary.begin_plan(self._step)

    def _check_consumed(self) -> None:
        """What backward has updated is what `torch.optim.AdamW` would update now, by the gradients there are."""
        for parameter in self.parameters:
            gradient = parameter.parameter.grad
            if gradient is not None and gradient is not parameter.consumed:
                self.health.refuse(f"the gradient of {parameter.name} was set by hand, where HyTrain cannot see it")
            if gradient is None and self._backward_done and parameter.backward == self._backward:
                self.health.refuse(
                    f"the gradient of {parameter.name} was dropped between backward and step(), when its update had "
                    'begun: pass on_nonfinite="skip" to leave out steps, and freeze what is not to be trained'
                )
            if gradient is not None and self._groups is None and self.accumulation.is_first:
                raise UsageError(
                    "step() was called again without a backward: gradients that HyTrain has consumed are used once; "
                    "call opt.zero_grad() after each opt.step()"
                )

    def _require_no_backward(self) -> None:
        """For callers outside of it. One that was interrupted never ends, so that each of them is refused."""
        if self._in_backward:
            raise UsageError(
                "the last backward ended with an exception, so training cannot go on (make the optimizer anew and load "
                "a checkpoint); or it goes on in another thread, which comes first"
            )

    def require_boundary(self, what: str) -> None:
        """Raise `UsageError` between a step's first gradient and `step()`."""
        self.health.check()
        if self._groups is not None or self._in_backward or not self.accumulation.is_first:
            raise UsageError(f"{what} between backward and step(): call it after opt.step()")

    def require_no_update(self, what: str) -> None:
        """Raise `UsageError` between a backward that updates and `step()`: torch would update after that."""
        self.health.check()
        if self._groups is not None:
            raise UsageError(
                f"{what} between backward and step(), when updates have begun that torch would make afterwards: "
                "call it after opt.step()"
            )

    def drop_gradients(self) -> None:
        """Gradients that were summed for a later update are not wanted. Raises `UsageError` if it has begun."""
        if self._backward_done:
            raise UsageError(
                "zero_grad() between backward and step() comes too late: the updates began in backward. Call it after "
                'opt.step(); to leave out steps, pass on_nonfinite="skip"; freeze what a loss is not to train'
            )
        if not self._in_backward:
            self.accumulation.reset()

    def _finish_handovers(self) -> None:
        with self._undivided("a handover of layers"):
            self._boundary.finish_plan(self._step, self._finish_update)

    @contextlib.contextmanager
    def _undivided(self, what: str) -> Iterator[None]:
        """What was left half-way ends training: a layer must not have two owners, nor a step some of its updates."""
        try:
            yield
        except BaseException as error:
            self.health.fail(UsageError(f"{what} was interrupted by {type(error).__name__}: {error}"))
            raise

    def _finish_update(self, layer: TrainedLayer) -> None:
        if not layer.life.is_current:
            self._await(layer)

    # ------------------------------------------------------------ what arrives (link's threads)

    def on_message(self, message: Message) -> None:
        match message:
            case WeightsReady(lid=lid):
                self._on_weights_ready(self.layers[lid], message)
            case Plan():
                self._boundary.on_plan(message)
            case Reassign():
                self._boundary.on_reassign(message)
            case _:
                raise HyTrainError(f"a trainer has no use for {type(message).__name__}")

    def _on_weights_ready(self, layer: TrainedLayer, done: WeightsReady) -> None:
        layer.life.on(Event.WEIGHTS_READY, done.step)
        layer.arena.banks = done.banks
        landing = self._transfers.weights_in(layer.incoming())
        with self.health.changed:
            layer.note_writes(layer.sent)
            layer.landing = landing
            if layer.moving is not None:
                self._handover.state_in(layer)
            self.health.changed.notify_all()
        self._meter.span("h2d_s", layer.lid, landing.span)

    def on_failure(self, error: HyTrainError) -> None:
        """From now on every call raises `error`."""
        self.health.fail(error)

    def end_in_child(self) -> bool:
        """This process was forked from the one that trains. Whether its model is whole: no update was under way."""
        whole = not self._in_backward and all(layer.life.is_current for layer in self.layers)
        self.health.end_in_child(
            UsageError("this process was forked from the one that trains, and the optimizer is its parent's")
            if whole
            else UsageError(
                "this process was forked while updates were under way, which only its parent gets: "
                "opt.synchronize() before forking, if the child is to use the model"
            )
        )
        return whole

    # ------------------------------------------------------------ from outside

    @property
    def statistics(self) -> Statistics:
        return self._boundary.statistics

    @property
    def steps(self) -> int:
        """Steps finished since the beginning of training, those before a resumption among them."""
        return self._steps_before + self._step

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps_before = steps - self._step

    def synchronize(self) -> None:
        """Return once every update has landed in the parameters (I6)."""
        self.health.check()
        if _graph_task() == -1:
            self._require_no_backward()
        elif self.clipping.is_wanted and any(layer.life.updated == self._step for layer in self.layers):
            raise UsageError("synchronize() in a backward whose updates wait for the norm: call it after opt.step()")
        for layer in self.layers:
            if not layer.life.is_current:
                self._await(layer, on_host=True)
        self._finish_handovers()
        self._handover.settle()
        self.clipping.settle()
        self._synchronized = self._step

    def expose_state(self) -> None:
        """Return once the optimizer state can be read and written, wherever it is."""
        self.synchronize()
        self._handover.expose_state()

    def weights_were_written(self) -> None:
        """Parameters were written from outside: they become the masters before the next update."""
        self._written = True

    def state_was_loaded(self) -> None:
        """Remainders came with the state: weights that are loaded before the next step belong to them."""
        self._state_loaded = True

    def import_weights(self, *, keep_remainder: bool = False) -> None:
        """Make all parameters' values the master weights, without remainders or with those that fit; the moments stay.

        Raises `UsageError` for a parameter that was written while its update was under way.
        """
        self.health.check()
        for parameter in self._written_parameters():
            if not all(layer.life.is_current for layer, _ in parameter.places):
                raise UsageError(f"{parameter.name} was written before its update: opt.synchronize() before writing")
        self._import(self.parameters, keep_remainder=keep_remainder)

    def import_written(self) -> None:
        """What was written from outside, and said so, becomes the masters."""
        if self._written:
            self.synchronize()
            self._import(self._written_parameters(), keep_remainder=self._state_loaded)

    def _import(self, parameters: list[TrainedParameter], *, keep_remainder: bool) -> None:
        self.synchronize()
        self._written = False
        self._handover.import_weights(parameters, keep_remainder=keep_remainder)
        for parameter in parameters:
            parameter.note_all_writes()

    def _written_parameters(self) -> list[TrainedParameter]:
        """Those that somebody else has written, by autograd's version counter.

        Where weights are just coming in, writes and their notes cannot be told apart: such a parameter is next time's.
        """
        with self.health.changed:
            return [
                known
                for known in self.parameters
                if known.was_written() and not any(layer.is_arriving for layer, _ in known.places)
            ]

    def _refuse_foreign_writes(self) -> None:
        """A write that the next update would overwrite (I6)."""
        for parameter in self._written_parameters():
            raise UsageError(f"{parameter.name} was written from outside: call opt.import_weights() after writing")

    def close(self) -> None:
        """Let the last updates land, then leave the run. Nothing works after this."""
        if isinstance(self.health.failure, ClusterError):
            _log.warning("updates may be lost, so go on from a checkpoint: %s", self.health.failure)
        try:
            if self.health.failure is None and not self._in_backward:
                self._end_last_step()
        finally:
            self.health.fail(UsageError("this hytrain.AdamW is closed"))
            self._link.close()
            self.release()

    def _end_last_step(self) -> None:
        """Raises `NonFiniteGradients` of the last step, which nobody else would hear of."""
        try:
            self.synchronize()
        except NonFiniteGradients:
            raise
        except UsageError as error:
            _log.error("the last updates did not reach the model: %s", error)
        except HyTrainError:
            pass  # the run is over already; whoever trains has heard of it

    def release(self) -> None:
        """Give all planes up, once no copy from or into them is under way."""
        with contextlib.suppress(RuntimeError):  # a device that has failed copies nothing any more
            self._transfers.settle()
        self._handover.close()
        for layer in self.layers:
            layer.close()
        self.accumulation.close()
        self.clipping.close()
        self._held.clear()
        self._meter.close()


def _graph_task() -> int:
    """The running backward of this thread, -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def _inside_reentrant_checkpoint() -> bool:
    """Whether this thread is in a backward that reentrant activation checkpointing started inside another."""
    code = CheckpointFunction.backward.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
