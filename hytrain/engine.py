"""The trainer's engine: takes each gradient from its hook to the weights of the next forward.

    backward ─ on_gradient ─ layer full ─┬─ the CPU's: gradients_out ─ GradReady ─▶ optimizer
                                         └─ the GPU's: update on the device, now
    optimizer ─ WeightsReady ─ weights_in ─ before_forward waits for exactly this ─▶ next forward

`hooks` call in from the user's threads, `link` from its own two; `lifecycle` says what each event means for a layer;
`transfer`, `planes` and `handover` do the moving. No step ends with a barrier.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

import torch
from torch.utils.checkpoint import CheckpointFunction

from hytrain.errors import ClusterError, ClusterTimeout, HyTrainError, StaleReadError, UsageError
from hytrain.handover import Handover
from hytrain.kernels.backend import Backend
from hytrain.kernels.scalars import Hyper, scalars
from hytrain.lifecycle import Command, Event, State
from hytrain.link import Link
from hytrain.measure import Meter
from hytrain.ownership import PlanBook, fraction
from hytrain.planes import Gate, TrainedLayer, TrainedParameter
from hytrain.statistics import Statistics
from hytrain.transfer import Transfers
from protocol.messages import (
    GradReady,
    GroupHyper,
    LayerTimes,
    Message,
    Plan,
    PlanApplied,
    RanksLearned,
    Reassign,
    StepBegin,
    TrainerReport,
    WeightsReady,
)

UPDATE_TIMEOUT_S: Final = 600.0
FAILURE_GRACE_S: Final = 1.0
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
        host: Backend,
        read_groups: Callable[[], Groups],
        free_gpu_bytes: Callable[[], int | None],
    ) -> None:
        self.layers, self.parameters = layers, parameters
        self.step_index = 0
        self._steps_before = 0
        self.statistics = Statistics()
        self._link, self._transfers, self._host = link, transfers, host
        self._read_groups, self._free_gpu_bytes = read_groups, free_gpu_bytes
        self._numels = [layer.spec.numel for layer in layers]
        self._meter = Meter(transfers.clock, self._numels)
        self._handover = Handover(layers, link=link, transfers=transfers)
        self._plans = PlanBook("trainer", len(layers))
        self._changed = threading.Condition()
        self._failure: HyTrainError | None = None
        self._groups: Groups | None = None
        self._hypers: list[Hyper] = []
        self._backward: int | None = None
        self._backward_done = False
        self._written = False
        self._entered: dict[int, None] = {}
        self._root = Gate(())
        self._synchronized = -1
        self._ranks_known = False
        self._stepped_s = time.monotonic()

    # ------------------------------------------------------------ forward

    def before_root(self) -> None:
        """The whole model is entered: what was written from outside counts, and what no module's gate covers waits."""
        self._enter(self._root)
        if _graph_task() == -1:
            self._import_written()

    def before_forward(self, gate: Gate) -> None:
        """The current stream may read the gate's layers after this. Idempotent, also inside backward."""
        self._enter(gate)

    def _enter(self, gate: Gate) -> None:
        if self._failure is not None:
            raise self._failure
        inside_backward = _graph_task() != -1
        if self._backward is not None and not inside_backward:
            self._poison("the last backward ended with an exception")
        gate.step = self.step_index
        if not gate.layers:
            return
        arrived = self._transfers.clock.mark()
        for layer in gate.layers:
            if not layer.life.is_current:
                self._await(layer, inside_backward)
        if not inside_backward:
            lids = tuple(layer.lid for layer in gate.layers)
            self._meter.forward(lids, (arrived, self._transfers.clock.mark()))
            if not self._ranks_known:
                self._entered.update(dict.fromkeys(lids))

    def _await(self, layer: TrainedLayer, inside_backward: bool) -> None:
        """Wait until the layer's new weights are on their way in, and let the stream wait for their arrival."""
        if inside_backward and layer.life.updated == self.step_index:
            self._poison(f"layer {layer.name} is used again in the backward that has already updated it")
        with self._changed:
            landing = self._changed.wait_for(
                lambda: self._failure is not None or layer.life.state in (State.LANDING, State.CURRENT),
                UPDATE_TIMEOUT_S,
            )
        if self._failure is not None:
            raise self._failure
        if not landing:
            raise ClusterTimeout(f"layer {layer.name} was not updated within {UPDATE_TIMEOUT_S:.0f} s")
        if layer.life.state is State.LANDING:
            assert layer.landing is not None
            self._transfers.land(layer.landing)
            layer.landing = None
            layer.life.on(Event.AWAITED, layer.life.updated)

    # ------------------------------------------------------------ backward

    def on_gradient(self, parameter: TrainedParameter) -> None:
        """A parameter's gradient is complete: take it, and send its layers off as they fill."""
        tensor = parameter.parameter
        if self._failure is not None:
            raise self._failure
        if tensor.grad is None:
            return
        self._check_gradient(parameter, tensor.grad)
        if self._groups is None:
            self._begin_step()
        if self._backward is None:
            self._begin_backward(parameter)
        if parameter.step == self.step_index:
            self._poison(f"a second gradient of {parameter.name} in one step")
        if all(gate.step != self.step_index for gate in parameter.gates):
            self._meet_uncovered(parameter)
        parameter.step = self.step_index
        parameter.count += 1
        for layer, index in parameter.places:
            layer.filled[index] = layer.segments[index].gradient()
        tensor.grad = parameter.consumed
        for layer, _ in parameter.places:
            if len(layer.filled) == len(layer.segments):
                self._dispatch(layer)

    def _meet_uncovered(self, parameter: TrainedParameter) -> None:
        """A gradient of a parameter whose module was not called: from now on the root waits for its layers (I1)."""
        for layer, _ in parameter.places:
            waited = self._synchronized == self.step_index or (
                layer in self._root.layers and self._root.step == self.step_index
            )
            if layer.life.owner == "cpu" and layer.life.updated >= 0 and not waited:
                self.on_failure(
                    StaleReadError(
                        f"{parameter.name} was read without its module being called, while its update may have been "
                        "under way: call the module, or opt.synchronize() before forward"
                    )
                )
                raise self._failure or AssertionError
            if layer not in self._root.layers:
                self._root.layers = (*self._root.layers, layer)

    def _check_gradient(self, parameter: TrainedParameter, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            self._poison(f"the gradient of {parameter.name} is sparse: use sparse=False in its embedding")
        if gradient.requires_grad:
            self._poison("backward(create_graph=True) needs gradients that HyTrain has consumed")
        if parameter.parameter.data_ptr() != parameter.address:
            self._poison(
                f"the storage of {parameter.name} was replaced after hytrain.AdamW was made: "
                "move or convert the model first, then make the optimizer"
            )

    def _begin_step(self) -> None:
        self._import_written()
        self._groups = self._read_groups()
        self._hypers = [Hyper(**{name: getattr(g, name) for name in GroupHyper.__slots__}) for g in self._groups]
        self._link.post("optimizer", StepBegin(step=self.step_index, groups=self._groups))

    def _begin_backward(self, parameter: TrainedParameter) -> None:
        if self._backward_done:
            self._poison(
                f"a backward reached {parameter.name} before step() was called for the last one: call opt.step() "
                "after each backward; gradient accumulation is not supported yet"
            )
        if _inside_reentrant_checkpoint():
            self._poison("reentrant activation checkpointing: pass use_reentrant=False to checkpoint()")
        self._backward = _graph_task()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """Called by autograd when the whole backward has succeeded: layers without all gradients leave too (I5)."""
        self._backward, self._backward_done = None, True
        self._flush()

    def _flush(self) -> None:
        for layer in self.layers:
            if layer.filled:
                self._dispatch(layer)

    def _dispatch(self, layer: TrainedLayer) -> None:
        """The layer's gradients are all there: to the optimizer, or straight into the device's update."""
        step, counts = self.step_index, layer.counts()
        self._meter.backward(layer.lid)
        if layer.life.on(Event.FILLED, step) is Command.UPDATE_ON_DEVICE:
            self._update_on_device(layer, counts)
            return
        departure = self._transfers.gradients_out(layer.outgoing())
        layer.filled.clear()
        self._meter.span("d2h_s", layer.lid, departure.span)

        layer.sent = counts
        self._link.post(
            "optimizer",
            GradReady(step=step, lid=layer.lid, counts=counts),
            after=departure,
            before_sending=lambda: layer.life.on(Event.COPIED, step),
        )

    def _update_on_device(self, layer: TrainedLayer, counts: tuple[int, ...]) -> None:
        began = self._transfers.clock.mark()
        for index, gradient in layer.filled.items():
            segment = layer.segments[index]
            layer.device.update(
                index, segment, gradient, scalars(self._hypers[segment.spec.group], counts[index]), self._host
            )
        layer.filled.clear()
        self._meter.span("gpu_update_s", layer.lid, (began, self._transfers.clock.mark()))

    # ------------------------------------------------------------ the step's boundary

    def step(self) -> None:
        """Mark the boundary: everything was sent when it appeared. Does nothing if there was no gradient."""
        if self._failure is not None:
            raise self._failure
        if self._backward is not None:
            self._poison("the last backward ended with an exception")
        if self._groups is None:
            return
        if self._read_groups() != self._groups:
            self._poison(
                "a parameter group's hyperparameters changed between backward and step(): HyTrain reads them at "
                "the step's first gradient, so call the scheduler after opt.step()"
            )
        self._flush()
        self._groups, self._backward_done = None, False
        self._report(self._meter.end_step(self.step_index))
        self.step_index += 1
        if not self._ranks_known:
            self._learn_ranks()
        self._apply_plan()

    def _report(self, times: tuple[LayerTimes, ...]) -> None:
        now_s = time.monotonic()
        gpu_lids = self.gpu_lids
        self.statistics = Statistics(
            step=self.steps + 1,
            step_s=now_s - self._stepped_s,
            stall_s=self._meter.stall_s,
            k=fraction(gpu_lids, self._numels),
            gpu_layers=gpu_lids,
            moved=self.statistics.moved,
        )
        self._stepped_s = now_s
        report = TrainerReport(
            step=self.step_index,
            number=self.statistics.step,
            at_s=now_s,
            step_s=self.statistics.step_s,
            stall_s=self.statistics.stall_s,
            k=self.statistics.k,
            gpu_lids=gpu_lids,
            gpu_free_bytes=self._free_gpu_bytes(),
            layers=times,
        )
        self._link.post("coordinator", report)

    def _learn_ranks(self) -> None:
        """Order the layers as the first forward entered them; what it did not enter keeps the table's order."""
        self._ranks_known = True
        place = {lid: index for index, lid in enumerate(self._entered)}
        place.update((layer.lid, -1) for layer in self._root.layers)
        order = sorted(range(len(self.layers)), key=lambda lid: (place.get(lid, len(place)), lid))
        ranks = [0] * len(order)
        for rank, lid in enumerate(order):
            ranks[lid] = rank
        for role in ("optimizer", "coordinator"):
            self._link.post(role, RanksLearned(ranks=tuple(ranks)))

    def _apply_plan(self) -> None:
        """Hand layers over if an agreed plan is due before the step that begins now (I3)."""
        plan = self._plans.due(self.step_index)
        if plan is None:
            return
        began_s = time.monotonic()
        late = plan.step < self.step_index
        moved = 0 if late else self._hand_over(plan)
        self._plans.settle()
        self.statistics.moved += moved
        self._applied(plan, applied=not late, moved=moved, began_s=began_s)

    def _applied(self, plan: Plan, *, applied: bool, moved: int, began_s: float) -> None:
        message = PlanApplied(
            plan_id=plan.plan_id,
            step=self.step_index,
            applied=applied,
            moved=moved,
            handover_s=time.monotonic() - began_s,
        )
        for role in ("optimizer", "coordinator"):
            self._link.post(role, message)

    def _hand_over(self, plan: Plan) -> int:
        gpu = frozenset(plan.gpu_lids)
        leaving = [layer for layer in self.layers if layer.life.owner == "gpu" and layer.lid not in gpu]
        coming = [layer for layer in self.layers if layer.life.owner == "cpu" and layer.lid in gpu]
        self._import_written()
        for layer in coming:
            if not layer.life.is_current:
                self._await(layer, inside_backward=False)
        self._handover.to_cpu(leaving, self.step_index)
        self._handover.to_gpu(coming, self.step_index)
        return len(leaving) + len(coming)

    def start(self, plan: Plan) -> None:
        """Give every layer its first owner, by the coordinator's first plan. Raises `ClusterError`, `CapacityError`."""
        self._plans.plan = plan
        try:
            self._handover.start(frozenset(plan.gpu_lids))
        except ClusterError as error:
            with self._changed:  # the optimizer's own words, if it has any, say more than a closed socket
                self._changed.wait_for(lambda: self._failure is not None, FAILURE_GRACE_S)
            raise self._failure or error from error
        self._applied(plan, applied=True, moved=0, began_s=time.monotonic())

    # ------------------------------------------------------------ what arrives (link's threads)

    def on_message(self, message: Message) -> None:
        match message:
            case WeightsReady(lid=lid, step=step):
                self._on_weights_ready(self.layers[lid], step)
            case Plan():
                self._link.post("coordinator", self._plans.on_plan(message))
            case Reassign():
                self._plans.on_reassign(message)
            case _:
                raise HyTrainError(f"a trainer has no use for {type(message).__name__}")

    def _on_weights_ready(self, layer: TrainedLayer, step: int) -> None:
        with self._changed:
            layer.life.on(Event.WEIGHTS_READY, step)
            landing = self._transfers.weights_in(layer.incoming())
            layer.landing = landing
            self._changed.notify_all()
        self._meter.span("h2d_s", layer.lid, landing.span)

    def on_failure(self, error: HyTrainError) -> None:
        """From now on every call raises `error`."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    # ------------------------------------------------------------ from outside

    @property
    def steps(self) -> int:
        """Steps finished since the beginning of training, those before a resumption among them."""
        return self._steps_before + self.step_index

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps_before = steps - self.step_index

    @property
    def gpu_lids(self) -> tuple[int, ...]:
        return tuple(layer.lid for layer in self.layers if layer.life.owner == "gpu")

    def synchronize(self) -> None:
        """Return once every update has landed in the parameters (I6)."""
        if self._failure is not None:
            raise self._failure
        if self._backward is not None and _graph_task() == -1:
            self._poison("the last backward ended with an exception")
        for layer in self.layers:
            if not layer.life.is_current:
                self._await(layer, inside_backward=False)
        self._synchronized = self.step_index

    def weights_were_written(self) -> None:
        """Parameters were written from outside: they become the masters before the next update."""
        self._written = True

    def import_weights(self) -> None:
        """Make the parameters' values the master weights, with no remainder; the moments stay."""
        self.synchronize()
        self._handover.import_weights()

    def _import_written(self) -> None:
        if self._written:
            self._written = False
            self.import_weights()

    def close(self) -> None:
        """Leave the run. Nothing works after this."""
        self.on_failure(UsageError("this hytrain.AdamW is closed"))
        self._link.close()
        for layer in self.layers:
            layer.close()

    # ------------------------------------------------------------ what goes wrong

    def _poison(self, sentence: str) -> None:
        """Refuse everything from now on: some updates of this step have been made, others have not (I8)."""
        self.on_failure(
            UsageError(f"{sentence} (training cannot go on: make the optimizer anew and load a checkpoint)")
        )
        assert self._failure is not None
        raise self._failure


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
