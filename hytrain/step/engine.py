"""The trainer's engine: composes the parts of one model's step.

    backward   when a backward begins and ends         reads      waits for weights before modules read them
    gradient   a gradient's way and its update's       uses       waits for other uses of parameters
    commit     when a step's updates begin and end     blocks     weights and activations that come and go
    device     updates on the device                   masters    weights written from outside
    verdict    gradient norms: clip or skip a step     boundary   reports and plans between two steps
                                                       handover   moves layers between placements

No step ends with a barrier. `hooks` calls `reads`, `uses` and `backward`, `link` calls `gradient`, `optim` the rest.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Final

import torch
from torch import Tensor

from hytrain.errors import ClusterError, HyTrainError, NonFiniteGradients, UsageError
from hytrain.kernels.backend import Backend
from hytrain.memory.arrivals import Arrivals
from hytrain.memory.capacity import GpuMemory, HostRoom
from hytrain.memory.lending import Lending, Loan
from hytrain.memory.planes import ArenaPlanes
from hytrain.memory.transfer import Transfers
from hytrain.memory.visits import Visits
from hytrain.model.trained import OffloadedBlock, TrainedLayer, TrainedParameter
from hytrain.options import Options
from hytrain.run.link import Link
from hytrain.run.ownership import PlanBook
from hytrain.run.ranks import Ranks
from hytrain.run.trace import TraceWriter
from hytrain.statistics import Statistics
from hytrain.step.accumulation import Accumulation, choose_sums, plane_sums
from hytrain.step.activations import Activations
from hytrain.step.autograd import in_backward
from hytrain.step.backward import Backward
from hytrain.step.blocks import Blocks
from hytrain.step.boundary import Boundary
from hytrain.step.check import CheckedTrip, SelfCheck
from hytrain.step.commit import Commit
from hytrain.step.common import Common
from hytrain.step.device import DeviceUpdates
from hytrain.step.evictions import Evictions
from hytrain.step.gradient import RoundTrip
from hytrain.step.handover import Handover
from hytrain.step.health import Health, interrupts_held_back
from hytrain.step.kept import KeptGradients
from hytrain.step.life import BETWEEN, IN_BACKWARD, Event, State
from hytrain.step.masters import Masters
from hytrain.step.measure import Meter
from hytrain.step.offload import Offload
from hytrain.step.parking import Parking
from hytrain.step.reads import Reads
from hytrain.step.reclaim import Reclaiming
from hytrain.step.shared import SharedMatrices
from hytrain.step.uses import Uses
from hytrain.step.verdict import Verdicts
from protocol.messages import (
    Message,
    Plan,
    PositionsLearned,
    Reassign,
    SaveCheckpoint,
    SetGpuMemory,
    TraceNext,
    WeightsReady,
)
from protocol.rules import Hyper

FAILURE_GRACE_S: Final = 2.0

_SUMS: Final = (
    "the norm of a step's gradients was asked for between its backwards, where torch would clip the sums so far: clip "
    "after the step's last backward, as with Accelerate `if accelerator.sync_gradients:`"
)

_log = logging.getLogger(__name__)


def _waits_for_visits(options: Options) -> bool:
    """What awaits a verdict is planned for layer by layer, and without overlap nothing waits."""
    return options.overlap and not options.awaits_verdict


class Engine:
    """The layers of one model, and what happens to them in a step.

    `renew`: asked when the model is entered between steps, whether another engine has taken over.
    """

    _steps_before, _is_asked_to_save = 0, False

    renew: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(
        self,
        layers: list[TrainedLayer],
        parameters: list[TrainedParameter],
        *,
        link: Link,
        plans: PlanBook,
        transfers: Transfers,
        host: Backend | None,
        read_groups: Callable[[], tuple[Hyper, ...]],
        memory: GpuMemory,
        host_room: HostRoom,
        hold_bytes: int,
        accumulation: Accumulation,
        options: Options,
        ranks: Ranks,
        counted: Set[int],
        trace: TraceWriter,
        lending: Lending,
        activations: Activations | None = None,
        check: SelfCheck | None = None,
        shared: SharedMatrices | None = None,
        blocks: Sequence[OffloadedBlock] = (),
        is_stage: bool = False,
        updater: str = "the optimizer process",
        hang_timeout_s: float = math.inf,
    ) -> None:
        self._layers, self._parameters, self._link, self._transfers = layers, parameters, link, transfers
        self._activations, self._accumulation, self._memory, self._lending = activations, accumulation, memory, lending
        self._health, self._kept = Health(accumulation.timing, updater, hang_timeout_s), KeptGradients()
        numels, names = [layer.spec.numel for layer in layers], [layer.name for layer in layers]
        self._meter = Meter(transfers.clock, numels, is_stage=is_stage, trace=trace, names=names)
        self.verdicts = Verdicts(parameters, options, transfers, ranks=ranks, counted=counted)
        self._offload = Offload(blocks, transfers, hold_bytes=hold_bytes if _waits_for_visits(options) else 0)
        segments = [segment for layer in layers for segment in layer.spec.segments]
        self._visits = Visits(transfers, parameters[0].own.device, segments, hold_bytes=hold_bytes)
        common = Common(
            layers=layers,
            parameters=parameters,
            link=link,
            transfers=transfers,
            health=self._health,
            meter=self._meter,
            verdicts=self.verdicts,
            accumulation=accumulation,
            kept=self._kept,
            visits=self._visits,
            offload=self._offload,
            lending=lending,
            activations=activations,
            overlap=options.overlap,
            is_stage=is_stage,
        )
        self._device = device = DeviceUpdates(common, host, shared)
        self._trip = trip = RoundTrip(common, device) if check is None else CheckedTrip(common, device, check)
        planes = plane_sums(options, self.verdicts.takes_norms, transfers, trip.await_update)
        accumulation.begin_anew(partial(choose_sums, options.accumulate_on, parameters, transfers, memory.room), planes)
        self._blocks = Blocks(common, trip)
        self.reads = Reads(common, trip, self._blocks)
        self.uses = Uses(common, trip, self.reads, self._blocks)
        self.masters = masters = Masters(common, self.reads, self.uses)
        self._offload.heed(masters.import_written, masters.sample_freed)
        self._handover = Handover(common, trip, Arrivals(memory), host_room)
        self.evictions = Evictions(common, device, self._handover, plans, memory)
        self.reclaiming = Reclaiming(common, device, self._handover, self.evictions, memory.serving)
        self._boundary = Boundary(common, self._handover, plans, gpu_room=memory.room, host_free=host_room.free)
        self.parking = Parking(common, self._handover, self._boundary, self.import_written)
        self._commit = Commit(common, trip, self._device, masters, host=host, read_groups=read_groups)
        self.backward = Backward(common, trip, self._commit, self._boundary, self.reads)

    def start(self, plan: Plan) -> None:
        try:
            self._boundary.start(plan)
            self._offload.start()
        except ClusterError:
            with self._health.changed:  # the optimizer's own error, if it sends one, says more than a closed socket
                self._health.changed.wait_for(lambda: self._health.failure is not None, FAILURE_GRACE_S)
            self._health.check()
            raise

    def continue_from(self, before: Engine) -> None:
        """Take over the counts and flags of the engine that this one replaces."""
        self.steps = before.steps
        self.masters.state_was_loaded = before.masters.state_was_loaded
        self.reads.is_traced = before.reads.is_traced
        self.verdicts.continue_from(before.verdicts)

    def before_root(self) -> None:
        """The whole model is entered: wait for parameters that no other gate covers."""
        if not in_backward():
            self._health.check()
            idle = self._health.life.state is State.IDLE
            if idle and torch.is_grad_enabled() and self.renew():
                return
            if idle:
                self._meter.restart()
                self._handover.arenas.pin_visiting()
        self.reads.enter_root()

    @interrupts_held_back()
    def step(self) -> None:
        """End the step, whose updates began in backward. Does nothing if there was no gradient."""
        self._health.check()
        self.reclaiming.settle()
        self._meter.enter_boundary()
        self.backward.begin_by_hand()
        self.backward.end_outside()
        if in_backward() and self._health.life.state in IN_BACKWARD:
            raise UsageError(
                "step() was called in a backward of its own model: HyTrain's updates begin in backward by themselves, "
                "so call it once, after backward"
            )
        self._health.require(Event.STEP)
        self._commit.check()
        self.backward.begin_summed(by_step=True)
        if not self._commit.commit():
            return
        life, ended = self._health.life, self._health.life.step
        with self._health.undivided("the update of layers"):
            life.on(Event.STEP)
            self._accumulation.end_step()
            self._offload.end_step()
            if self.verdicts.loss_scale is not None:
                self.verdicts.loss_scale.end_step()
        self._trip.end_step()
        room = self._boundary.report(ended, self.steps)
        self._device.late.heed(room)
        self.reclaiming.end_step(room)
        self._visits.lent_bytes = self._offload.for_visits_bytes  # from the next step on
        if (positions := self.reads.learned_order()) is not None:
            self._device.positions = positions
            for role in ("optimizer", "coordinator"):
                self._link.post(role, PositionsLearned(positions=positions))
        self._boundary.begin_plan(life.step)
        self.reads.end_step()
        self._meter.leave_boundary()

    def norm_before_step(self) -> Tensor | None:
        """The norm of this step's gradients, 0 if there are none; None if norms are not computed.

        No more backwards come in this step, so the updates of those that only summed begin. Raises `UsageError` if more
        were announced.
        """
        self._health.check()
        life = self._health.life
        if life.state is State.SUMMED and self._accumulation.expects(life.ended):
            raise UsageError(_SUMS)
        self.backward.begin_by_hand()
        self.backward.end_outside()
        self.backward.begin_summed()
        if life.state is State.COMMITTED:
            return self._commit.norm()
        return torch.zeros((), device=self._parameters[0].own.device)

    def lend_weights(self, tensors: Mapping[str, Tensor]) -> Loan:
        """Wait for all updates, then lend what is in the model's `tensors`."""
        self.import_written()
        return self._lending.lend(self.steps, tensors)

    def drop_gradients(self) -> None:
        """Discard the sums of gradients. Raises `UsageError` if the step's updates have begun."""
        if self._health.failure is None and self._health.on(Event.DROP) is State.IDLE:
            self.backward.drop()

    def before_load(self, what: str) -> None:
        """Raise `UsageError` between a backward that updates and `step()`: in torch, the update comes after `what`."""
        self._health.require(Event.LOAD, what=what)

    def before_regroup(self, what: str) -> None:
        self._health.require(Event.REGROUP, what=what)

    def on_message(self, message: Message) -> None:
        match message:
            case WeightsReady():
                self._trip.on_weights_ready(message)
            case Plan():
                self._boundary.on_plan(message)
            case Reassign():
                self._boundary.on_reassign(message)
            case TraceNext():
                self._boundary.to_trace = message.steps
            case SetGpuMemory(nbytes=nbytes):
                self._memory.limit_to(nbytes)
            case SaveCheckpoint():
                self._is_asked_to_save = True
            case _:
                raise HyTrainError(f"a trainer has no use for {type(message).__name__}")

    def on_failure(self, error: HyTrainError) -> None:
        self._health.fail(error)

    def checkpoint_requested(self) -> bool:
        """Whether a monitor has asked for a checkpoint since the last call. The caller says with it that it saves."""
        asked, self._is_asked_to_save = self._is_asked_to_save, False
        self._boundary.loop_saves = True
        return asked

    @property
    def waits_for(self) -> str:
        return self._health.waits_for

    @property
    def statistics(self) -> Statistics:
        return self._boundary.statistics

    @property
    def between_steps(self) -> bool:
        """Whether no backward has run since the last step."""
        return self._health.life.state in BETWEEN

    @property
    def steps(self) -> int:
        """The last finished step's number: counted since training began, or as the loop counts in `opt.log`."""
        return self._steps_before + self._health.life.step

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps_before = steps - self._health.life.step

    def synchronize(self) -> None:
        """Return once every update has landed in the parameters (I6)."""
        step = self._health.life.step
        if not in_backward():
            self._health.require(Event.OUTSIDE)
            if self._commit.waits_for_step:
                raise UsageError("a stage's updates wait for the norm of all stages: call it after opt.step()")
        elif self.verdicts.awaited and any(layer.life.updated == step for layer in self._layers):
            raise UsageError("synchronize() in a backward whose updates wait for the norm: call it after opt.step()")
        self._health.check()
        self.reclaiming.settle()
        if not self.verdicts.awaited:
            self._device.update_held()  # in a backward, visits that are put off
        self.reads.synchronize()
        self._boundary.finish_plan()
        self._handover.await_copies()
        self.verdicts.count_last()

    def expose_state(self) -> None:
        """Return once the optimizer state can be read and written, wherever it is kept."""
        self.synchronize()
        self._handover.expose_state()

    def restore_weights(self) -> None:
        """Bring all weights to the GPU: this engine is about to be replaced."""
        self.synchronize()
        self._offload.restore()

    def import_written(self) -> None:
        """Make parameters that were written from outside the masters. Raises `UsageError` if one cannot be."""
        self.synchronize()
        self.masters.import_written()

    def import_weights(self, *, keep_remainder: bool = False) -> None:
        """Make all parameters' values the masters, with no remainders or those that still fit. The moments stay.

        Raises `UsageError` for a parameter that was written while its update was under way.
        """
        self.synchronize()
        self.masters.import_all(keep_remainder=keep_remainder)

    def end_in_child(self) -> bool:
        """Called in a forked child. Returns whether its model is complete: no update was under way at the fork."""
        under_way = (*IN_BACKWARD, State.COMMITTED, State.PARKED_WEIGHTS)
        whole = self._health.life.state not in under_way and all(layer.life.is_current for layer in self._layers)
        sentence = "this process was forked from the one that trains, and the optimizer is its parent's"
        if not self._offload.is_whole:
            whole = False
            sentence += "; so are offloaded weights: give the child model.state_dict()"
        elif not whole:
            sentence = (
                "this process was forked between a backward and opt.step(), or by another thread than the one that "
                "trains, while updates were running, and only its parent gets them: call opt.synchronize() before "
                "forking if the child uses the model"
            )
        error = UsageError(sentence)
        self._offload.end_in_child(error)
        self._health.end_in_child(error)
        return whole

    def close(self, error: HyTrainError) -> None:
        """Wait for the last updates, then leave the run. From then on, all calls raise `error`."""
        failure = self._health.failure
        if isinstance(failure, ClusterError):
            _log.warning("updates may be lost, so go on from a checkpoint: %s", failure)
        state, is_lost = self._health.life.state, self._commit.waits_for_step
        if failure is None and state is State.COMMITTED:
            what = "the last backward is lost" if is_lost else "weights are updated already, and gradients are gone"
            _log.warning("the optimizer is closed before step(): %s", what)
        try:
            if failure is None and not is_lost and state not in (*IN_BACKWARD, State.PARKED_WEIGHTS):
                self._end_last_step()
        finally:
            try:
                if not isinstance(self._health.failure, ClusterError):  # or else there is nobody to tell
                    self._link.leave(lambda: self._boundary.rejoin(self._health.life.step))
            finally:
                self._health.fail(error)
                self._link.close(self.release)

    def _end_last_step(self) -> None:
        """Raises `NonFiniteGradients` for the last step, since no later call can."""
        try:
            self.synchronize()
        except NonFiniteGradients:
            raise
        except UsageError as error:
            _log.error("the last updates did not reach the model: %s", error)
        except HyTrainError:
            pass  # the run has failed before, and the user has seen the error

    def release(self) -> None:
        """Free all planes, once no copy from or to them is under way."""
        with contextlib.suppress(RuntimeError):  # a device that has failed no longer copies anything
            self._transfers.drain()
        self.reclaiming.close()
        if not self._handover.close():
            return
        self._accumulation.close()  # some are in planes
        with contextlib.suppress(RuntimeError):
            self.parking.end()
            for layer in self._layers:
                if isinstance(layer.planes, ArenaPlanes):
                    layer.planes.free_state()  # some weights may need its memory
            self._offload.restore()
        for layer in self._layers:
            layer.close()
        if self._activations is not None:
            self._activations.close()
        for part in (self._visits, self._lending, self.verdicts, self._device, self._kept, self._meter):
            part.close()
