"""Handles each gradient in the trainer: from its hook to the CPU's or the GPU's update, and the new weights back.

    on_gradient ─ layer full ─ _send ─┬─ the CPU updates: gradients_out ─ on_departure: GradReady ─▶ optimizer
                                      └─ the GPU updates: on the device, now; or as soon as the state visits it
    optimizer ─ WeightsReady ─▶ on_weights_ready: weights_in ─▶ `reads` waits for exactly this

If a step awaits a verdict, the GPU's updates are held back until backward has ended; so are visits that would only make
others wait. `hooks` calls from autograd's threads, `link` from its own two threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

import torch
from torch import Tensor

from hytrain.errors import NonFiniteGradients, UsageError
from hytrain.kernels.backend import Backend
from hytrain.kernels.scalars import scalars
from hytrain.memory.clock import Stream
from hytrain.memory.transfer import TURN_BYTES, Transfer, Transfers
from hytrain.memory.visits import Visit, Visits
from hytrain.model.lifecycle import Event as LayerEvent
from hytrain.model.summed import summed
from hytrain.model.trained import TrainedLayer, TrainedParameter, first_consumed, with_gradients
from hytrain.model.watched import unwatched
from hytrain.run.link import Draft, Link
from hytrain.step.accumulation import Accumulation
from hytrain.step.boundary import Boundary
from hytrain.step.handover import Handover
from hytrain.step.health import Health
from hytrain.step.life import IN_BACKWARD, Event, State
from hytrain.step.masters import Masters
from hytrain.step.measure import Meter
from hytrain.step.offload import Offload
from hytrain.step.reads import REENTRANT, Reads, in_backward, inside_reentrant_checkpoint
from hytrain.step.verdict import Judgement, NormSoFar, Verdicts
from hytrain.tensors import count_write, version
from protocol.handles import STATE_PLANES
from protocol.messages import Counted, GradReady, Message, StepBegin, WeightsReady
from protocol.rules import Hyper
from protocol.visiting import Turn, put_off

Groups = tuple[Hyper, ...]

_TOO_LATE: Final = (
    "the learning rate, or another value in opt.param_groups, was set between backward and step(), but the updates "
    "began in backward, with the values of that time: set them before backward, or after opt.step(), as schedulers do "
    "that step after the optimizer; or call backward in opt.no_sync(), so that the updates begin in step()"
)
_LEFT: Final = (
    "the gradient of {} is still that of the last step, which torch would use again, and which HyTrain has consumed: "
    "call opt.zero_grad() after each opt.step()"
)


@dataclass(frozen=True, slots=True)
class Departure(Draft):
    """A layer's gradients on their way to the host, possibly with the norm of the step's gradients so far."""

    layer: TrainedLayer
    step: int
    counts: tuple[int, ...]
    norm: NormSoFar | None

    def grad_ready(self) -> GradReady:
        exceeds = self.norm is not None and self.norm.exceeds()
        return GradReady(step=self.step, lid=self.layer.lid, counts=self.counts, exceeds=exceeds)


class Backward:
    """The gradients of one model. `read_groups` returns the current hyperparameters of the parameter groups.

    The stages of a pipeline end their backwards one after another, and each needs the next one's gradients. So the
    verdict of a stage, a collective, comes in `step()`.
    """

    def __init__(
        self,
        layers: list[TrainedLayer],
        parameters: list[TrainedParameter],
        *,
        link: Link,
        transfers: Transfers,
        host: Backend | None,
        read_groups: Callable[[], Groups],
        overlap: bool,
        is_stage: bool,
        health: Health,
        meter: Meter,
        reads: Reads,
        masters: Masters,
        verdicts: Verdicts,
        accumulation: Accumulation,
        handover: Handover,
        boundary: Boundary,
        visits: Visits,
        offload: Offload,
    ) -> None:
        self._layers, self._parameters, self._visits = layers, parameters, visits
        self._link, self._transfers, self._host = link, transfers, host
        self._read_groups, self._overlap, self._is_stage = read_groups, overlap, is_stage
        self._health, self._meter, self._reads, self._masters = health, meter, reads, masters
        self._verdicts, self._accumulation = verdicts, accumulation
        self._handover, self._boundary, self._offload = handover, boundary, offload
        self._groups: Groups = ()
        # The GPU's updates until backward is over: the layer, the stream that has made its gradients, and these.
        self._held: list[tuple[TrainedLayer, Stream, Collection[Tensor], Callable[[], None]]] = []
        self.positions: Sequence[int] = [layer.spec.position for layer in layers]  # in forward, as learned by now
        self._put_off: frozenset[int] = frozenset()  # of this step's visits
        self._ends_by_itself = True  # autograd calls `end`
        self._task: int | None = None  # autograd's number of the whole backward, if it has one
        self._summed_later: dict[TrainedParameter, None] = {}
        self._kept: list[tuple[TrainedParameter, Tensor, int]] = []  # gradients that the loop has, too; their versions

    def on_gradient(self, parameter: TrainedParameter) -> None:
        """Take a parameter's complete gradient, and send off each layer that it completes.

        Reentrant checkpoints have backwards of their own, each with a gradient of what they share. Autograd adds them
        up in `p.grad`, and the sum is taken when the whole backward ends.
        """
        tensor, health, life = parameter.parameter, self._health, self._health.life
        if health.failure is not None:
            raise health.failure
        if tensor.grad is None:
            return
        if life.state in IN_BACKWARD:
            if sentence := _why_not(parameter, tensor.grad):
                health.refuse(sentence)
        else:
            try:
                self._begin(parameter, tensor.grad)
            except (NonFiniteGradients, UsageError):  # caused by what came before: leave no gradient of this backward
                if summed(tensor.grad) is not None:  # to which it was added: drop the step's
                    for known in self._parameters:
                        known.parameter.grad = None
                tensor.grad = None
                raise
        is_shared = parameter.shared_in == life.backward
        if is_shared and self._task not in (None, torch._C._current_graph_task_id()):
            self._summed_later[parameter] = None
            return
        if parameter in self._summed_later:
            return
        if parameter.backward == life.backward:
            cure = REENTRANT if inside_reentrant_checkpoint() else ""
            health.refuse(f"a second gradient of {parameter.name} in one backward{cure}")
        parameter.backward = life.backward
        if not parameter.awaited:
            self._reads.meet_uncovered(parameter)
        if life.state is State.SUMMING:
            self._accumulation.add(parameter)
            self._offload.had_gradient(parameter)
            return
        if not parameter.is_in_place:
            health.refuse(f"the storage of {parameter.name} was replaced in the middle of a backward")
        stream = self._transfers.stream()
        total = None if parameter.sum is None else self._accumulation.take(parameter)
        if total is None:
            total = self._copy_kept(parameter)
        full = parameter.fill(total, life.step, stream)
        tensor.grad = parameter.consumed
        for layer in full:
            self._meter.backward(layer.lid)
            if self._overlap:
                self._send(layer, stream)
        self._offload.had_gradient(parameter)

    def _copy_kept(self, parameter: TrainedParameter) -> Tensor | None:
        """A copy of the gradient if the loop keeps the tensor that has it. It is consumed long before `step()`."""
        if (kept := parameter.kept()) is None:
            return None
        self._kept.append((parameter, kept, 0))
        return parameter.gradient().clone()

    def written_since(self) -> TrainedParameter | None:
        """A parameter with such a tensor that the loop has written after backward."""
        kept, self._kept = self._kept, []
        return next((parameter for parameter, gradient, seen in kept if version(gradient) != seen), None)

    def _send(self, layer: TrainedLayer, stream: Stream) -> None:
        """Send a complete layer's gradients to the optimizer, or update on the device. `stream` is the current one."""
        if layer.streams != {stream}:
            self._transfers.join(layer.streams, layer.filled.values())
        if self._overlap and self._verdicts.takes_norms:
            self._verdicts.add(layer)
        awaited, step = self._verdicts.awaited, self._health.life.step
        with self._health.changed:
            gradients, copies = layer.depart(step, awaits_verdict=awaited)
        counts = layer.sent
        if copies is None:
            is_held = self._overlap and (awaited or self._puts_off(layer, gradients.values()))
            update = partial(self._update_on_device, layer, step, counts, gradients, is_held=is_held)
            if is_held:
                self._held.append((layer, stream, gradients.values(), update))
            else:
                update()
            return
        self._offload.begin_update(layer)
        norm = self._verdicts.norm_so_far(layer) if awaited else None
        leaving = self._transfers.gradients_out(copies if norm is None else [*copies, norm.copy])
        self._meter.span("d2h_s", layer.lid, step, leaving.span)
        self._link.post("optimizer", Departure(layer, step, counts, norm), after=leaving)

    def _puts_off(self, layer: TrainedLayer, gradients: Collection[Tensor]) -> bool:
        """Whether the layer's visit can wait until backward is over, and so can its gradients and offloaded weights."""
        if layer.lid not in self._put_off or not layer.life.placement.visits:
            return False
        block = layer.block if layer.rests_on_host else None
        weights_bytes = 0 if block is None or self._offload.is_put_off(block) else block.nbytes
        puts_off = self._visits.puts_off(sum(gradient.nbytes for gradient in gradients), weights_bytes)
        if block is not None and puts_off:
            self._offload.put_off(block)
        return puts_off

    def _update_on_device(
        self,
        layer: TrainedLayer,
        step: int,
        counts: tuple[int, ...],
        gradients: dict[int, Tensor],
        *,
        is_held: bool,
    ) -> None:
        on_host = self._host is not None
        scale = self._verdicts.host_scale() if on_host else 1.0
        if scale is None:
            return  # a skipped step; on a GPU the kernel handles this
        verdict = None if on_host else self._verdicts.scale
        numbers = {i: scalars(self._groups[layer.segments[i].spec.group], counts[i], scale) for i in gradients}
        if layer.life.placement.visits:
            self._offload.before_update(layer)
            segments, state = layer.segments, [layer.state(plane) for plane in STATE_PLANES]
            homes = layer.arena.weights if layer.keeps_weights else [None] * len(segments)
            visits = [
                Visit(segments[i].spec, segments[i].weights, grads, [plane[i] for plane in state], numbers[i], homes[i])
                for i, grads in gradients.items()
            ]
            awaited = self._verdicts.awaited
            updated, returned = self._visits.update(
                visits, after=layer.returned, host=self._host, verdict=verdict, awaited=awaited
            )
            layer.landing, layer.returned = updated, returned
            self._meter.span("visit_s", layer.lid, step, returned.span)
            if self._visits.is_full and not is_held:
                arrived = self._meter.mark()
                self._visits.make_room()
                self._meter.fetched(layer.lid, arrived)
        else:
            began = self._transfers.clock.mark()
            for index, gradient in gradients.items():
                layer.device.update(index, gradient, numbers[index], self._host, verdict)
            self._meter.span("gpu_update_s", layer.lid, step, (began, self._transfers.clock.mark()))
        layer.note_writes()

    def _begin(self, parameter: TrainedParameter, gradient: Tensor) -> None:
        """The first gradient of a backward has come. Raises if what came before was wrong, and then changes nothing."""
        health, life = self._health, self._health.life
        if sentence := _why_not(parameter, gradient):
            raise UsageError(sentence)
        scaling = self._verdicts.loss_scale
        if inside_reentrant_checkpoint():
            raise UsageError("reentrant activation checkpointing: pass use_reentrant=False to checkpoint()")
        if scaling is not None and not scaling.claim():
            raise UsageError("a backward from a loss that was not scaled since step(): opt.scale(loss).backward()")
        first, last = life.ended == 0, self._accumulation.begin(life.ended)
        if first and (left := first_consumed(self._parameters)) is not None:
            raise UsageError(_LEFT.format(left.name))
        event = Event.BEGIN_LAST if last else Event.BEGIN
        health.require(event, name=parameter.name)
        if last:
            self._begin_step()
        life.on(event)
        if not (first and last):
            self._meter.turn()
        self._summed_later.clear()
        self._ends_by_itself = in_backward()
        self._task = torch._C._current_graph_task_id() if self._ends_by_itself else None
        if self._ends_by_itself:
            _queue(partial(_queue, self.end))  # after what others queue in this backward: FSDP2's roots reduce there

    def _begin_step(self) -> None:
        """The step's updates are about to begin: fix placements, masters and hyperparameters for this step."""
        step = self._health.life.step
        with self._health.undivided("a handover of layers"):
            self._boundary.finish_plan(step)
        self._verdicts.count_last()
        self._masters.begin_step()
        for layer in self._layers:
            if layer.life.placement.updates == "cpu" and not layer.is_counted:
                layer.is_counted = True
                counts = tuple(segment.owner.count for segment in layer.segments)
                self._link.post("optimizer", Counted(lid=layer.lid, counts=counts))
        self._groups = self._read_groups()
        self._put_off = self._visits_after_backward()
        if self._overlap:
            self._tell_step()

    def _tell_step(self) -> None:
        begin = StepBegin(
            step=self._health.life.step,
            groups=self._groups,
            awaits_verdict=self._verdicts.awaited,
            float_mode=0 if self._host is None else self._host.float_mode,
        )
        self._link.post("optimizer", begin)

    def _visits_after_backward(self) -> frozenset[int]:
        """Which layers' visits are put off, by the times of the last step that was measured."""
        if self._verdicts.awaited:
            return frozenset()
        return put_off(
            [
                Turn(
                    one.lid,
                    one.forward_s or 0.0,
                    (one.backward_s or 0.0) + (one.gpu_update_s or 0.0),
                    one.visit_s or 0.0,
                )
                for one in sorted(self._meter.times, key=lambda one: self.positions[one.lid])
            ]
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, *, by_step: bool = False) -> None:
        """The whole backward has succeeded. Called by autograd, or by `end_outside` if it ran outside of autograd.

        With `by_step`, `step()` has begun the updates: gradients stay in `p.grad`, as in torch.
        """
        life = self._health.life
        self._task, later, self._summed_later = None, self._summed_later, {}
        with unwatched():
            for parameter in later:
                self.on_gradient(parameter)
            if life.state is State.COMMITTING:
                self._complete(keep=by_step)
        self._kept = [(parameter, gradient, version(gradient)) for parameter, gradient, _ in self._kept]
        self._offload.end_backward()
        life.on(Event.END)  # last, so that an exception above counts as one in backward

    def begin_by_hand(self) -> None:
        """`step()` was called without a backward. If the loop has set gradients, they are the step's, as in torch."""
        if self._health.life.state is not State.IDLE:
            return
        given = with_gradients(self._parameters)
        if not given:
            return
        self._reads.synchronize()
        for parameter in given:
            assert parameter.parameter.grad is not None
            if sentence := _why_not(parameter, parameter.parameter.grad):
                raise UsageError(sentence)
        with self._accumulation.held():
            self._begin(given[0], cast(Tensor, given[0].parameter.grad))
        self.end_outside()

    def add(self, gradients: Sequence[Tensor | None]) -> Transfer | None:
        """Take another process's gradients, one for each parameter or None, as those of a backward that only sums.

        They are in pinned memory. Returns the last copy out of it, which ends after all others.
        """
        life, transfers, arrival = self._health.life, self._transfers, None
        self._health.check()
        given = zip(self._parameters, gradients, strict=True)
        with self._accumulation.held():
            for turn in _turns([(parameter, gradient) for parameter, gradient in given if gradient is not None]):
                # Copies, because a sum in float32 begins with the first gradient itself.
                own = [torch.empty_like(gradient, device=parameter.own.device) for parameter, gradient in turn]
                copies = [(copy.view(-1), gradient.view(-1)) for copy, (_, gradient) in zip(own, turn, strict=True)]
                before = transfers.so_far()
                arrival = transfers.fetch(copies, after=[before])
                transfers.land(arrival)
                transfers.clock.recycle((before.span[0], *arrival.span))
                for copy, (parameter, _) in zip(own, turn, strict=True):
                    if life.state not in IN_BACKWARD:
                        self._begin(parameter, copy)
                    parameter.backward = life.backward
                    self._accumulation.add_from_elsewhere(parameter, copy)
        self.end_outside()
        return arrival

    def end_outside(self) -> None:
        """`step()` ends the backward if gradients were reduced outside of autograd, as pipelines do."""
        if self._health.life.state in IN_BACKWARD and not self._ends_by_itself:
            self.end()

    def begin_summed(self, *, by_step: bool = False) -> None:
        """No more backwards come in this step. If they only summed, its updates begin now, as `end` says."""
        life = self._health.life
        if life.state is State.SUMMED and not with_gradients(self._parameters):
            life.on(Event.DROP)
        if life.state is State.SUMMED:
            self._begin_step()
            life.on(Event.STEP)
            with self._health.undivided("the update of layers"):
                self.end(by_step=by_step)

    def norm(self) -> Tensor | None:
        """The norm of the step's gradients, all of which have come: without overlap, no verdict has been made yet."""
        waiting = [layer for layer in self._layers if layer.filled]
        return self._verdicts.norm_of(waiting) if waiting and self._verdicts.awaited else self._verdicts.grad_norm

    def commit(self) -> bool:
        """`step()` was called: send off what backward did not. Returns False if there was no gradient."""
        life = self._health.life
        self.begin_summed(by_step=True)
        if life.state is State.IDLE:
            self._verdicts.take_part(life.step)
            return False
        if not self._overlap:  # no update has begun, so what was written and set since backward counts
            self._groups = self._read_groups()
            self._tell_step()
            self._masters.import_written()
        elif self._read_groups() != self._groups:
            self._health.refuse(_TOO_LATE)
        with self._health.undivided("the update of layers"):
            self._flush()
            if self._overlap and self._is_stage:
                self._judge()
        return True

    def _complete(self, *, keep: bool) -> None:
        """All gradients of the step have come: also send the layers that lack some of theirs (I5)."""
        self._fill_others(keep=keep)
        if self._overlap:
            self._flush()
            if not (self._is_stage and self._verdicts.awaited):
                self._judge()

    def _fill_others(self, *, keep: bool) -> None:
        """Take the gradients that are in `p.grad`: no last backward has reached them. With `keep`, they stay there."""
        step, stream = self._health.life.step, self._transfers.stream()
        clips = self._verdicts.takes_norms  # torch would leave clipped gradients there
        keeps = self._reads.await_parameter if keep and self._accumulation.keeps and not clips else None
        for parameter in with_gradients(self._parameters):
            self._reads.await_parameter(parameter)  # perhaps nothing has read it since its last update
            total = self._accumulation.take(parameter, keep=keeps)
            is_own = total is None  # the loop's, which may write it from now on
            if is_own:
                total = parameter.gradient().clone() if keep else self._copy_kept(parameter)
            parameter.fill(total, step, stream)
            if not keep or (keeps is None and not is_own):
                parameter.parameter.grad = parameter.consumed

    def _flush(self) -> None:
        """Send off all layers that have gradients. Without overlap, finish each layer before the next."""
        layers, stream = [layer for layer in self._layers if layer.filled], self._transfers.stream()
        for layer in layers:
            if len(layer.filled) < len(layer.segments):
                self._meter.backward(layer.lid)
        if not self._overlap:
            for layer in layers if self._verdicts.takes_norms else ():
                self._verdicts.add(layer)
            self._judge()
        for layer in layers:
            self._send(layer, stream)
            if not self._overlap:
                self._reads.wait_for(layer, on_host=True)

    def _judge(self) -> None:
        """All gradients of the step have come: decide by their norm if updates await that, and make those held back."""
        if self._verdicts.awaited:
            judgement = self._verdicts.judge(self._health.life.step)
            for role in ("optimizer", "coordinator"):
                self._link.post(role, judgement, after=judgement.arrival)
        self.update_held()

    def update_held(self) -> None:
        """Make the updates that were held back until now: forward needs the first layers first."""
        self._visits.begin_put_off()
        for _, stream, gradients, update in sorted(self._held, key=lambda held: self.positions[held[0].lid]):
            self._transfers.join([stream], gradients)
            update()
        self._held.clear()

    def on_departure(self, draft: Draft) -> Message:
        """A draft's copy has finished: return its message. Called on the sender thread."""
        if isinstance(draft, Departure):
            draft.layer.life.on(LayerEvent.COPIED, draft.step)
            return draft.grad_ready()
        assert isinstance(draft, Judgement), "a trainer posts no other drafts"
        return draft.verdict()

    def on_weights_ready(self, done: WeightsReady) -> None:
        """The optimizer has updated a layer: start the copy of its weights. Called on the receiver thread."""
        layer = self._layers[done.lid]
        layer.life.on(LayerEvent.WEIGHTS_READY, done.step)
        layer.arena.banks = done.banks
        copies, is_offloaded = layer.incoming(), layer.rests_on_host
        if is_offloaded:
            count_write([weights for weights, _ in copies])  # they stay where they are until they are needed
            copies = []
        landing = self._transfers.weights_in(copies)
        with self._health.changed:
            layer.note_writes()
            layer.landing, layer.source = landing, layer.planes
            if layer.moving is not None:
                self._handover.state_in(layer)
            self._health.changed.notify_all()
        if not is_offloaded:
            self._meter.span("h2d_s", layer.lid, done.step, landing.span)

    def close(self) -> None:
        self._held.clear()
        self._kept.clear()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _queue(call: Callable[[], None]) -> None:
    """Call it when all gradients of the present backward are computed, after the calls that were queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _why_not(parameter: TrainedParameter, gradient: Tensor) -> str | None:
    """Why a gradient cannot be taken; None if it can."""
    if gradient.layout is not torch.strided:
        return f"the gradient of {parameter.name} is sparse: use sparse=False in its embedding"
    if gradient.requires_grad:
        return "backward(create_graph=True) needs gradients that HyTrain has consumed"
    return None


def _turns(given: Iterable[tuple[TrainedParameter, Tensor]]) -> Iterator[list[tuple[TrainedParameter, Tensor]]]:
    """In the same order, gradients of at most `TURN_BYTES` at a time, or one that is larger."""
    turn, nbytes = list[tuple[TrainedParameter, Tensor]](), 0
    for parameter, gradient in given:
        if turn and nbytes + gradient.nbytes > TURN_BYTES:
            yield turn
            turn, nbytes = [], 0
        turn.append((parameter, gradient))
        nbytes += gradient.nbytes
    if turn:
        yield turn
