"""The backwards of a step: when each begins and ends, and which gradients are taken in it.

    the first gradient ─▶ begin: placements hold for this step, by `boundary`; in its last backward, updates begin
    each gradient      ─▶ to its way (`gradient`), or to the sums if more backwards come (`accumulation`)
    autograd's end     ─▶ end: `commit` completes the updates

`hooks` calls `on_gradient` from autograd's threads. Gradients may also come otherwise: set by the loop before `step()`,
computed by another process, or reduced outside of autograd, as pipelines do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, cast

import torch
from torch import Tensor

from hytrain.errors import NonFiniteGradients, UsageError
from hytrain.memory.clock import Stream
from hytrain.memory.transfer import Transfer, turns
from hytrain.model.consumed import ConsumedGradient
from hytrain.model.summed import summed
from hytrain.model.trained import Come, TrainedLayer, TrainedParameter, first_consumed, with_gradients
from hytrain.model.watched import unwatched
from hytrain.step.autograd import REENTRANT, Running, in_backward, inside_reentrant_checkpoint
from hytrain.step.boundary import Boundary
from hytrain.step.commit import Commit
from hytrain.step.common import Common
from hytrain.step.gradient import RoundTrip
from hytrain.step.life import IN_BACKWARD, Event, State
from hytrain.step.reads import Reads
from hytrain.step.timing import SEEN
from hytrain.uncompiled import uncompiled

_LEFT: Final = (
    "the gradient of {} is still the last step's: torch would use it again, but HyTrain has consumed it. Call "
    "opt.zero_grad() after each opt.step()"
)


class Backward:
    """The backwards of one model."""

    def __init__(self, common: Common, trip: RoundTrip, commit: Commit, boundary: Boundary, reads: Reads) -> None:
        self._layers, self._parameters, self._transfers = common.layers, common.parameters, common.transfers
        self._health, self._meter, self._offload = common.health, common.meter, common.offload
        self._verdicts, self._accumulation, self._kept = common.verdicts, common.accumulation, common.kept
        self._trip, self._commit, self._boundary, self._reads = trip, commit, boundary, reads
        self._ends_by_itself = True  # autograd calls `end`, or drops the backward
        self._running: Running | None = None  # until `end` is called; None if a gradient was lost
        self._task: int | None = None  # autograd's number of the whole backward, if it has one
        self._summed_later: dict[TrainedParameter, None] = {}
        self._health.end_dropped = self.end_dropped

    def on_gradient(self, parameter: TrainedParameter, tensor: Tensor) -> None:
        """The complete gradient of `tensor`, which is the parameter, is in `p.grad`.

        In a step's last backward it waits there until all of its layer have come. They are taken together.
        """
        life, stream, places = self._health.life, self._transfers.stream(), parameter.places
        waits = life.state is State.COMMITTING and len(places) == 1
        if not waits or life.backward in (parameter.backward, parameter.shared_in):
            with unwatched():
                self._take([(parameter, tensor)], stream)
            return
        layer, _ = places[0]
        layer.waiting[parameter] = tensor, stream
        if len(layer.waiting) + len(layer.filled) == len(layer.segments):
            self._take_waiting(layer)

    def _take_waiting(self, layer: TrainedLayer) -> None:
        """Those of each stream on that one: what is made of them, or freed, comes after what has computed them."""
        waiting, layer.waiting = layer.waiting, {}
        current = self._transfers.stream()
        of = dict[Stream, list[Come]]()
        for parameter, (tensor, stream) in waiting.items():
            of.setdefault(stream, []).append((parameter, tensor))
        with unwatched():
            for stream, come in of.items():
                if stream is not current:
                    with self._transfers.on(stream):
                        self._take(come, stream)
            if current in of:
                self._take(of[current], current)

    def _take(self, come: list[Come], stream: Stream) -> None:
        """Take gradients that have come together, of at most one layer or of one parameter, computed on `stream`."""
        health, life = self._health, self._health.life
        if health.failure is not None:
            health.check()
        self.end_dropped()
        come = [(parameter, tensor) for parameter, tensor in come if self._is_next(parameter, tensor)]
        try:
            if life.state is not State.SUMMING:
                self._trip.take(come, stream)
            for parameter, _ in come if life.state is State.SUMMING else ():
                if self._accumulation.timing.may_be_last:
                    self._measure(dict.fromkeys([layer for layer, _ in parameter.places]), whole=True)
                self._accumulation.add(parameter)
        except BaseException:
            self._running = None  # gradients may be lost
            raise
        for parameter, _ in come:
            if parameter.block is not None:
                self._offload.had_gradient(parameter.block, life.backward)

    def _is_next(self, parameter: TrainedParameter, tensor: Tensor) -> bool:
        """Whether the gradient in `tensor`, the parameter, is to be taken now. The first one begins the backward.

        Reentrant checkpoints have backwards of their own, each with a gradient of what they share. Autograd adds them
        up in `p.grad`, and the sum is taken when the whole backward ends.
        """
        health, life = self._health, self._health.life
        if tensor.grad is None:
            return False
        if life.state not in IN_BACKWARD:
            self._begin_or_leave_none(parameter, tensor)
        elif sentence := _why_not(parameter, tensor.grad):
            health.refuse(sentence)
        is_shared = parameter.shared_in == life.backward
        if is_shared and self._task not in (None, torch._C._current_graph_task_id()):
            self._summed_later[parameter] = None
            return False
        if parameter in self._summed_later:
            return False
        if parameter.backward == life.backward:
            cure = REENTRANT if inside_reentrant_checkpoint() else ""
            health.refuse(f"a second gradient of {parameter.name} in one backward{cure}")
        parameter.backward = life.backward
        if not parameter.awaited:
            self._reads.meet_uncovered(parameter)
        return True

    def _measure(self, layers: Iterable[TrainedLayer], *, whole: bool) -> None:
        """Updates begin in `step()`, but of these layers all gradients have come, or no others come any more."""
        backward = self._health.life.backward
        for layer in layers:
            come = [segment.owner.backward == backward for segment in layer.segments]
            if all(come) if whole else any(come) and not all(come):
                self._meter.backward(layer.lid)

    def _begin_or_leave_none(self, parameter: TrainedParameter, tensor: Tensor) -> None:
        try:
            self._begin(parameter, cast(Tensor, tensor.grad))
        except (NonFiniteGradients, UsageError):  # caused by what came before: leave no gradient of this backward
            if summed(tensor.grad) is not None:  # to which it was added: drop the step's
                for known in self._parameters:
                    known.parameter.grad = None
            tensor.grad = None
            raise

    def _begin(self, parameter: TrainedParameter, gradient: Tensor) -> None:
        """The first gradient of a backward has come. Raises if what came before was wrong, and then changes nothing."""
        health, life = self._health, self._health.life
        if sentence := _why_not(parameter, gradient):
            raise UsageError(sentence)
        if not life.ended:
            self._accumulation.begin_step(life.step, keeps=self._keeps_gradients(parameter))
        scaling = self._verdicts.loss_scale
        is_reentrant = inside_reentrant_checkpoint()
        if is_reentrant and not self._accumulation.timing.in_step:
            raise UsageError("reentrant activation checkpointing: pass use_reentrant=False to checkpoint()")
        if scaling is not None and not scaling.claim():
            raise UsageError("a backward from a loss that was not scaled since step(): opt.scale(loss).backward()")
        first, last = life.ended == 0, self._accumulation.begin(life.ended)
        if is_reentrant:
            self._accumulation.timing.saw("begins backward in a reentrant checkpoint")
        if first and (left := first_consumed(self._parameters)) is not None:
            raise UsageError(_LEFT.format(left.name))
        event = Event.BEGIN_LAST if last else Event.BEGIN
        health.require(event, name=parameter.name)
        if first:
            self._boundary.finish_plan()
        if last:
            self._commit.begin_step()
        life.on(event)
        if not (first and self._accumulation.timing.may_be_last):
            self._meter.turn()
        self._summed_later.clear()
        self._running = Running.now(self.end)
        self._ends_by_itself = self._running is not None
        self._task = None if self._running is None else self._running.task

    def _keeps_gradients(self, parameter: TrainedParameter) -> bool:
        """Whether the loop has kept gradients of the last step, to which a backward adds that begins with this one."""
        if not self._accumulation.timing.learns:
            return False
        others = [known for known in with_gradients(self._parameters) if known is not parameter]
        return bool(others) or summed(parameter.parameter.grad) is not None

    @uncompiled
    def end(self, *, by_step: bool = False) -> None:
        """The whole backward has succeeded. Called by autograd, or by `end_outside` if it ran outside of autograd.

        With `by_step`, `step()` has begun the updates: gradients stay in `p.grad`, as in torch.
        """
        life = self._health.life
        self._running, self._task, later, self._summed_later = None, None, self._summed_later, {}
        with unwatched():
            for parameter in later:
                self.on_gradient(parameter, parameter.parameter)
            for layer in [layer for layer in self._layers if layer.waiting]:
                self._take_waiting(layer)
            if life.state is State.COMMITTING:
                self._commit.complete(keep=by_step)
            else:
                self._accumulation.end_backward()
                self._commit.end_sum()
                if self._accumulation.timing.may_be_last:
                    self._measure(self._layers, whole=False)
        self._kept.end_backward()
        self._offload.end_backward()
        life.on(Event.END)  # last, so that an exception above counts as one in backward

    def end_outside(self) -> None:
        """`step()` ends the backward if gradients were reduced outside of autograd, as pipelines do."""
        if self._health.life.state in IN_BACKWARD and not self._ends_by_itself:
            self._ends_by_itself = True  # once: if that raises, the step stays refused
            self.end()

    def end_dropped(self, wait_s: float = 0.0) -> None:
        """End a backward that autograd has dropped: it has raised, or was compiled.

        It leaves what it leaves in torch: the gradients that it has computed. Waits so long for another thread.
        """
        running = self._running
        if running is None or self._task in (ConsumedGradient.refused_in, torch._C._current_graph_task_id()):
            return
        if wait_s and not in_backward():
            running.wait(wait_s)
        if running.is_over and running is self._running:
            self.end()

    def begin_by_hand(self) -> None:
        """`step()` was called without a backward. If the loop has set gradients, they are the step's, as in torch."""
        if self._health.life.state is not State.IDLE:
            return
        given = with_gradients(self._parameters)
        if not given:
            return
        if self._health.life.step:  # or else they may have come before there was a session
            self._accumulation.timing.saw("sets or keeps gradients", after_step=True)
        self._reads.synchronize()
        for parameter in given:
            assert parameter.parameter.grad is not None
            if parameter.parameter.grad.requires_grad:  # its values are the step's
                parameter.parameter.grad = parameter.parameter.grad.detach()
            if sentence := _why_not(parameter, parameter.parameter.grad):
                raise UsageError(sentence)
        with self._accumulation.held():
            self._begin(given[0], cast(Tensor, given[0].parameter.grad))
        self.end_outside()

    def begin_summed(self, *, by_step: bool = False) -> None:
        """No more backwards come in this step. If they only summed, its updates begin now, as `end` says."""
        life = self._health.life
        if life.state is State.SUMMED and not with_gradients(self._parameters):
            life.on(Event.DROP)
            self._accumulation.timing.saw(SEEN[Event.DROP])
            self._meter.drop_backward()
        if life.state is State.SUMMED:
            self._accumulation.note_dropped()
            self._meter.begin_held()
            self._commit.begin_step()
            life.on(Event.STEP)
            with self._health.undivided("the update of layers"):
                self.end(by_step=by_step)

    def drop(self) -> None:
        """Drop the gradients of backwards that have begun no updates."""
        self._meter.drop_backward()
        self._accumulation.drop()

    def add(self, gradients: Sequence[Tensor | None]) -> Transfer | None:
        """Add gradients that were computed elsewhere to the step's sums, as a backward that is not the last one.

        One for each parameter, in its shape and contiguous, in pinned host memory; None where it has none. Returns the
        last copy out of that memory, which ends after all others. Raises `UsageError` as a backward does.
        """
        life, transfers, arrival = self._health.life, self._transfers, None
        self._health.check()
        given = zip(self._parameters, gradients, strict=True)
        with self._accumulation.held():
            for turn in turns([(parameter, gradient) for parameter, gradient in given if gradient is not None]):
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


def _why_not(parameter: TrainedParameter, gradient: Tensor) -> str | None:
    """Why a gradient cannot be taken; None if it can."""
    if gradient.layout is not torch.strided:
        return f"the gradient of {parameter.name} is sparse: use sparse=False in its embedding"
    if gradient.requires_grad:
        return (
            "backward(create_graph=True) needs gradients that HyTrain consumes: take them with "
            "torch.autograd.grad(loss, parameters, create_graph=True)"
        )
    return None
