"""What happens between two steps: the report to the coordinator, and the start of plans that are due.

engine.step ─▶ TrainerReport ─▶ if a plan is agreed on, due and prepared, its handovers begin
first gradient ─▶ the handovers finish ─▶ PlanApplied
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from hytrain.memory.capacity import Room
from hytrain.readable import gib
from hytrain.run.ownership import PlanBook
from hytrain.statistics import Statistics
from hytrain.step.common import Common
from hytrain.step.handover import Handover
from protocol.messages import Plan, PlanApplied, Reassign, Traced, TraceSteps, TrainerReport
from protocol.placement import GPU, Placement, Places
from protocol.sizes import on_gpu

_log = logging.getLogger(__name__)
#: What the host has is asked for once in so many steps: it takes half a millisecond.
HOST_EVERY: Final = 4


class Boundary:
    """The step boundaries of one model. `statistics` describes the last finished step."""

    def __init__(
        self,
        common: Common,
        handover: Handover,
        plans: PlanBook,
        *,
        gpu_room: Callable[[], Room | None],
        host_free: Callable[[], int | None],
    ) -> None:
        self.statistics = Statistics()
        self._layers, self._link, self._meter, self._health = common.layers, common.link, common.meter, common.health
        self._traffic, self._handover, self._plans, self._gpu_room = common.transfers.traffic, handover, plans, gpu_room
        self._is_stage, self._host_free, self._visits = common.is_stage, host_free, common.visits
        self._verdicts, self._activations = common.verdicts, common.activations
        self._accumulation, self._parameters = common.accumulation, common.parameters
        self._numels = [layer.spec.numel for layer in common.layers]
        self._placements, self._placed = list[Placement](), Places(())
        self._stepped_s = time.monotonic()
        self._handover_s = 0.0
        self._moves = threading.RLock()  # any thread of the user's that waits for all updates finishes a handover
        self._is_compared = False
        self.loop_saves = False  # checkpoints, when it is asked to
        self.to_trace: int | None = None  # steps whose timeline somebody asks for, 0 to end it

    @property
    def _planned(self) -> Places:
        return Places.of(layer.planned for layer in self._layers)

    def rejoin(self, step: int) -> None:
        """If another coordinator asks, tell it how things are after so many steps."""
        if self._link.is_asked:
            assert self._plans.plan is not None, "there is a first plan"
            self._link.rejoin(
                plan=self._plans.plan,
                holds=self._plans.holds,
                places=self._planned,
                step=step,
                moved=self.statistics.moved,
                skipped=self._verdicts.skipped_by_now(),
                draws=self._meter.draws,
            )

    def report(self, step: int, number: int) -> Room | None:
        """Report finished step `step` to the coordinator. `number` is the step's number for the user.

        Returns the device's memory, with which the report was made.
        """
        self.rejoin(step)
        has_drawn = self._meter.draws
        traffic = to_device_bytes, to_host_bytes = self._traffic.take()
        times = self._meter.end_step(step, number, traffic)  # first: it also sets the meter's numbers below
        now_s, places, room = time.monotonic(), self._places(), self._gpu_room()
        self._handover.arrivals.end_step()
        self.statistics = Statistics(
            step=number,
            step_s=now_s - self._stepped_s,
            stall_s=self._stall_s(now_s - self._stepped_s),
            moved=self.statistics.moved,
            moving=self._handover.has_worked(),
            **self._where(places),
        )
        self._stepped_s = now_s
        self._link.post(
            "coordinator",
            TrainerReport(
                step=step,
                number=number,
                at_s=now_s,
                wall_time=time.time(),
                step_s=self.statistics.step_s,
                measured=self._meter.measured,
                stall_s=self.statistics.stall_s,
                exposed_s=self._meter.exposed_s,
                middle_s=self._meter.middle_s,
                starved=self._meter.starved,
                gather_s=None if self._is_stage else self._meter.gather_s,  # stages gather different layers
                k=self.statistics.k,
                moving=self.statistics.moving,
                places=places,
                gpu_usable_bytes=None if room is None else room.usable,
                gpu_needed_bytes=None if room is None else room.needed,
                host_free_bytes=None if step % HOST_EVERY else self._host_free(),
                waited_bytes=self._visits.end_step(),
                activation_bytes=0 if self._activations is None else self._activations.host_bytes,
                to_device_bytes=to_device_bytes,
                to_host_bytes=to_host_bytes,
                layers=times,
                saves=self.loop_saves,
                in_step=self._accumulation.timing.in_step,
            ),
        )
        self._trace(step + 1, has_drawn)
        if room is not None and not self.statistics.moving:
            self._compare(room)
        return room

    def _stall_s(self, step_s: float) -> float:
        """As it was measured last. Steps that were not measured may be shorter than the one that was."""
        return self._meter.stall_s if self._meter.measured is not None else min(self._meter.stall_s, step_s)

    def _compare(self, room: Room) -> None:
        """Once: if the GPU has room for all that rests in host memory, say that little is saved here."""
        if self._is_compared:
            return
        self._is_compared = True
        more = 0
        for layer in self._layers:
            planes = layer.layout.plane_nbytes
            more += sum(on_gpu(planes, GPU, waits=True).values()) - sum(on_gpu(planes, layer.placement).values())
        if more <= room.free:
            _log.info(
                "this model fits on the GPU without HyTrain: all of it and its optimizer's state take %s of %s. "
                "What HyTrain can save here is GPU memory, up to %s",
                *map(gib, (room.needed + more, room.usable, more)),
            )

    def _places(self) -> Places:
        """All layers' placements, which seldom change from step to step."""
        placements = [layer.placement for layer in self._layers]
        if placements != self._placements:
            self._placements, self._placed = placements, Places.of(placements)
        return self._placed

    def _where(self, places: Places) -> dict[str, Any]:
        """What statistics say of placements."""
        return {
            "k": places.gpu_fraction(self._numels),
            "gpu_layers": tuple(sorted(places.gpu)),
            "visiting_layers": tuple(sorted(places.visiting)),
            "offloaded_layers": tuple(sorted(places.offloaded)),
        }

    def _trace(self, step: int, has_drawn: bool) -> None:
        """Begin the timeline that is asked for, with `step`. Say when all of it is drawn, or it was ended."""
        steps, self.to_trace = self.to_trace, None
        if steps is not None:
            self._meter.draw(range(step, step + steps))
            self._link.post("optimizer", TraceSteps(first=step, steps=steps))
        if (has_drawn or steps == 0) and not self._meter.draws:
            self._link.post("coordinator", Traced())

    def start(self, plan: Plan) -> None:
        """Give every layer its first placement. Raises `ClusterError` or `CapacityError`."""
        began_s = time.monotonic()
        self._handover.start(plan)
        self._plans.settle()
        self.statistics = Statistics(**self._where(self._planned))
        self._applied(plan, step=0, moved=0, handover_s=time.monotonic() - began_s)

    def on_plan(self, plan: Plan) -> None:
        """Acknowledge a proposed plan, unless it takes GPU memory that others may have taken. On the link's thread."""
        ack, arrivals = self._plans.on_plan(plan), self._handover.arrivals
        if ack.accepted:
            arrivals.lapsed()  # what the plan before would have brought
            if self._brings(plan) and not arrivals.claim():
                ack = replace(ack, accepted=False, reason="another optimizer brings state to the GPU")
        self._link.post("coordinator", ack)

    def _brings(self, plan: Plan) -> bool:
        """Whether state or weights of a layer are to come to the GPU."""
        moves = zip(self._layers, self._planned, plan.places, strict=False)
        planes = [(layer.layout.plane_nbytes, before, now) for layer, before, now in moves if before is not now]
        return any(on_gpu(each, now).keys() - on_gpu(each, before).keys() for each, before, now in planes)

    def on_reassign(self, reassign: Reassign) -> None:
        """Both processes have acknowledged the plan: prepare it. Called on the link's thread."""
        self._plans.on_reassign(reassign)
        assert self._plans.plan is not None, "what holds is a plan"
        self._handover.prepare(self._plans.plan)

    def begin_plan(self, step: int) -> None:
        """Begin the handovers of a plan that is due. A plan that is not prepared yet is postponed (I3)."""
        began_s = time.monotonic()
        with self._moves:
            if self._plans.due(step) is not None and self._handover.is_prepared:
                with self._health.undivided("a handover of layers"):
                    self._handover.begin(step)
                self._handover_s = time.monotonic() - began_s

    def park(self, step: int) -> None:
        """Nothing moves from now on. What is prepared for a plan moves first: nobody else gets its memory back."""
        self._handover.park()
        with self._moves:
            if self._handover.is_prepared and not self._handover.is_begun:
                with self._health.undivided("a handover of layers"):
                    self._handover.begin(step)
            self.finish_plan()
        self._handover.wait()

    def resume(self) -> None:
        """Plans may come again from here on. One that holds may have come meanwhile."""
        self._handover.resume()
        if self._plans.holds and self._plans.plan is not None:
            self._handover.prepare(self._plans.plan)

    def finish_plan(self) -> None:
        """Finish the handovers that `begin_plan` began, before the first gradient of this step."""
        with self._moves:
            if not self._handover.is_begun:
                return
            began_s, step = time.monotonic(), self._health.life.step
            self._accumulation.leave_planes(self._parameters)
            with self._health.undivided("a handover of layers"):
                plan, moved = self._handover.finish(step)
                self._plans.settle()
                self.statistics.moved += moved
                self._applied(plan, step=step, moved=moved, handover_s=self._handover_s + time.monotonic() - began_s)

    def _applied(self, plan: Plan, *, step: int, moved: int, handover_s: float) -> None:
        message = PlanApplied(plan_id=plan.plan_id, step=step, places=self._planned, moved=moved, handover_s=handover_s)
        for role in ("optimizer", "coordinator"):
            self._link.post(role, message)
