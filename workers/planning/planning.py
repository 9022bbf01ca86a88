"""One trainer's plans: what is measured and agreed on, and what follows from it.

LayerTable ─▶ Calibration ×2 ─▶ first plan ─▶ Plan to both ─ PlanAck ×2 ─▶ Reassign ─▶ PlanApplied
TrainerReport, OptimizerReport ─▶ measurements ─▶ decide, every `replan_every` steps ─▶ the next plan
commands: k, policy, objective, threads ─▶ the next plan at once
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

from hytrain.planner.book import MeasurementBook, Rates
from hytrain.planner.ladder import Infeasible
from hytrain.planner.moves import first_part
from hytrain.planner.policies import Decision, drawn_offloads, drawn_visits, first_lids
from hytrain.planner.profile import SAME_SPEED, LayerFacts, Order, Profile, Question
from hytrain.planner.simulate import simulate
from hytrain.run.ownership import PlanLedger
from protocol import messages as m
from protocol.address import Address
from protocol.handles import Precision
from protocol.placement import CPU, Places
from workers.effects import Command, Note, Send
from workers.planning.commands import Wishes
from workers.planning.last import Last, LastPlan
from workers.planning.measured import Evictions, Measured
from workers.planning.mode import Mode
from workers.planning.room import Room, facts, sizes_of
from workers.planning.steady import Steady
from workers.planning.tried import Tried

#: Why layers stay where they are, whatever they should do.
NO_PLAN: Final = "no plan fits"
#: Beside training, the CPU's updates take so many times as long as in its calibration. Measured on H200 hosts: 1.2 to
#: 1.55. Until there are updates to measure, plans should not count on more.
BESIDE_TRAINING: Final = 1.35
#: On device "cpu", the trainer's own update stands in for the GPU's. It takes as long as the optimizer's.
CPU_RATES: Final = Rates(d2h_s=4 / 5e9, h2d_s=4 / 5e9, cpu_update_s=1 / 5e8, gpu_update_s=1 / 5e8)


class Planning:
    """One trainer's layers: their placements, the measurements, and what the user wants."""

    def __init__(self, table: m.LayerTable, rank: int, *, replan_every: int, last: LastPlan | None = None) -> None:
        """`last`: the plan with which the last run of this table ended, if that is known."""
        self.table, self._last = table, Last(table, last)
        self._trainer, self._optimizer = Address("trainer", rank), Address("optimizer", rank)
        self._replan_every = replan_every
        self.positions = [layer.position for layer in table.layers]
        self._offloadable = frozenset(lid for block in table.blocks for lid in block)
        rates = CPU_RATES if table.device == "cpu" else None
        sizes = sizes_of(table)
        self._facts = [facts(layer, table, sizes) for layer in table.layers]
        told = {"awaits_verdict": table.awaits_verdict, "in_step": table.in_step}
        self._book = MeasurementBook(self._facts, rates=rates, ranks=table.world, **told)
        self.measured = Measured(self._book)
        self._ledger = PlanLedger(Places((CPU.name,) * len(table.layers)))
        self.wishes, self.mode = Wishes(table), Mode(table, self._optimizer)
        self.room, self._tried, self._steady = Room(table, sizes), Tried(), Steady()
        self._shares = self._planned = (0.0, 0.0)  # those that are in effect, and those of the last plan
        self._offloaded: frozenset[int] = frozenset()  # as last reported
        self._uncalibrated = {self._trainer, self._optimizer}
        self._step = -1
        self._planned_at: int | None = None  # None: plan as soon as possible
        self.plan: m.Plan | None = None  # the newest, whether it is in effect or not
        self._rest: Decision | None = None  # what was planned with it, and has no room before
        self.reason = ""
        self._evicted, self._since_eviction = Evictions(), 0  # and the first plan that knows of the last one
        self._came: str | None = None  # the reason of a plan that has taken effect since the last record
        self.predicted_step_s: float | None = None
        self.moved = 0

    @property
    def places(self) -> Places:
        """Those in effect. Weights rest where they did when that was last reported."""
        return self._ledger.places.offload(self._offloaded)

    @property
    def told(self) -> str:
        """The reason beside a status's k: that of a plan which is not in effect yet has its own k."""
        comes = self.plan is not None and self.plan.plan_id > 0 and self._ledger.busy
        return f"next k={self.plan.k:.2f}: {self.reason}" if comes and self.plan is not None else self.reason

    # ------------------------------------------------------------ before the first step

    def rejoin(self, message: m.Rejoin) -> list[Command]:
        """Go on with a trainer that has trained before, under a coordinator that has died."""
        self._ledger = PlanLedger.after(message.plan, message.places, holds=message.holds)
        self.plan, self.reason, self.predicted_step_s = message.plan, message.plan.reason, None
        self.moved, self.mode.skipped = message.moved, message.skipped
        self._planned, self._shares = _shares(self._facts, message.plan.places), _shares(self._facts, message.places)
        self._step = message.step - 1
        self.measured.rejoin(message.step)
        self.mode.is_told = False
        self.on_calibration(self._trainer, message.calibration)
        self.room.limit_host(self.wishes.limits.get("host_memory_limit"))
        return self._change_threads(self.wishes.threads) if self.wishes.threads else []

    def begin(self) -> list[Command]:
        """Forward the table to the optimizer, which needs it before the first plan."""
        self.room.limit_host(self.wishes.limits.get("host_memory_limit"))
        return [Send(self._optimizer, replace(self.table, threads=self.wishes.threads))]

    def on_calibration(self, sender: Address, calibration: m.Calibration) -> list[Command]:
        """Once both have calibrated, propose the first plan, or send the trainer a `Failure` if none fits."""
        if self.table.device != "cpu" and calibration.cpu_update_s is not None:
            calibration = replace(calibration, cpu_update_s=BESIDE_TRAINING * calibration.cpu_update_s)
        self._book.calibrate(**asdict(calibration))
        self._uncalibrated.discard(sender)
        if self._uncalibrated or self._ledger.next_id:
            return []
        if (last := self._last.begins_with(self.wishes, self.room)) is not None:
            self._planned_at = 0  # so first some steps are measured
            return self._propose(last.decision, 0, last.places)
        try:
            limits, (visit, offload) = self.room.limits, self.wishes.shares
            if visit is None:  # which takes no host memory for gradients
                visit = float(sum(fact.host_bytes for fact in self._facts) > (limits.host_bytes or math.inf))
            offload = 1.0 if offload is None else offload  # lean, until steps are measured
            lids = first_lids(
                self._facts,
                limits,
                self.wishes.k,
                visit=visit,
                offload=offload,
                window_bytes=self.table.window_bytes,
                for_visits_bytes=self.room.for_visits_bytes,
            )
        except Infeasible as error:
            failure = m.Failure(step=None, lid=None, error=f"{NO_PLAN}: {error}", traceback="")
            return [Note(failure.error), Send(self._trainer, failure)]
        why = "the first plan, before a step is measured"
        return self._propose(Decision(gpu_lids=lids, visit=visit, offload=offload, reason=why), 0)

    # ------------------------------------------------------------ measurements

    def on_positions(self, positions: tuple[int, ...]) -> None:
        self.positions = list(positions)
        self._book.reorder(dict(enumerate(positions)))

    def on_trainer(self, report: m.TrainerReport, *, is_late: bool = False) -> list[Command]:
        """A step is over: take in what was measured, in this step or an earlier one.

        If the report is late, nothing is planned from it: the coordinator has to catch up, and a plan would come late.
        """
        if len(report.places) != len(self._facts) or not self._offloadable.issuperset(report.places.offloaded):
            raise ValueError(f"a report on {len(report.places)} layers, where there are {len(self._facts)}")
        if report.in_step is not self.table.in_step:
            self._begin_updates(report.places, in_step=report.in_step)
        self._step, self._offloaded = report.step, report.places.offloaded
        usual = self.measured.on_trainer(report, is_late=is_late)
        if usual is not None and usual.places == self.places and (profile := self._profile()) is not None:
            self._tried.note_step(profile, usual, self._step, self.mode.of)
        self._book.activation_bytes = report.activation_bytes  # which take their time on the link
        is_moving = report.moving or self._ledger.busy
        if not is_moving:
            self._steady.note(report.step_s, self.measured.cpu_busy_s(report.step - 1) or 0.0)
        self.room.heed(report, is_warm=self.measured.is_warm(report.step), is_moving=is_moving)
        rests = not self._ledger.busy and self._rest is None
        kept = self._last.keeps(self._step, self.wishes, self.places, self._shares) if rests else []
        return kept if is_late else kept + self._replan()

    def _begin_updates(self, places: Places, *, in_step: bool) -> None:
        """They begin in `step()` from now on, or in backward: plan for that."""
        self.table = replace(self.table, in_step=in_step)
        sizes = sizes_of(self.table)
        self.room.resize(sizes, places)
        self._facts = [facts(layer, self.table, sizes) for layer in self.table.layers]
        self._planned_at = None
        self._steady.changed()
        self._book.begin_updates(in_step=in_step, layers=self._facts)
        self._tried.forget()

    # ------------------------------------------------------------ plans

    def _replan(self) -> list[Command]:
        """Decide again, if it is time and no plan is being agreed on."""
        every = 1 if self.wishes.policy == "random" else self._replan_every
        due = self._planned_at is None or self._rest is not None or self._step - self._planned_at >= every
        profile = self._profile() if due and not self._ledger.busy else None
        if profile is None or self._uncalibrated:
            return []
        if self.places.cpu and self.measured.awaits_cpu_times(self._step):
            return []
        if not self.room.is_known and self.wishes.policy != "random":
            return []
        self._planned_at = self._step
        rest, self._rest = self._rest, None
        if rest is not None:
            return self._propose(rest, self._step + 2)
        current, (visit, offload), now = self.places.gpu, self.wishes.shares, profile.split(self.places.gpu)
        self.predicted_step_s = self._simulated_s(profile, current)
        limits, is_for_speed = self.room.limits, self.wishes.are_found and self.wishes.objective == "speed"
        if is_for_speed and limits.beside_visits(profile).allow(profile, current):
            if self._steady.lasts(limits.gpu_state_bytes or 0, limits.host_bytes or 0, 1 + self.mode.clipped):
                return []
        asked = Question(
            policy=self.wishes.policy,
            limits=self.room.limits,
            fixed_k=self.wishes.k,
            current=current,
            objective=self.wishes.objective,
            visit=visit,
            offload=offload,
            tried=self._tried.known(now, self._step),
            seed=self._step,
            min_gain=max(SAME_SPEED, self._tried.scatter(now)),
        )
        try:
            decision, commands = self.mode.decide(asked, profile)
        except Infeasible as error:
            self._steady.changed()
            return self._told(NO_PLAN, str(error))
        if not decision.changed:
            self.reason = decision.reason
            return commands
        self._steady.changed()  # also if it cannot come into effect
        return commands + self._propose(decision, self._step + 2)

    def _told(self, what: str, why: str) -> list[Command]:
        """Layers stay, for this reason: a note, unless the last attempt had it too."""
        was_told, self.reason = self.reason.startswith(what), f"{what}: {why}"
        return [] if was_told else [Note(self.reason)]

    def _profile(self) -> Profile | None:
        """The book's, with the present shares."""
        profile, (visit, offload) = self._book.profile(), self._shares
        if profile is None:
            return None
        return replace(
            profile,
            visit=visit,
            offload=offload,
            window_bytes=self.table.window_bytes,
            for_visits_bytes=self.room.for_visits_bytes,
            hold_bytes=self.table.hold_bytes,
        )

    def _propose(self, wanted: Decision, step: int, whole: Places | None = None) -> list[Command]:
        """Plan what is wanted: `whole`, or the placements that follow from it."""
        reason, predicted_s, shares = wanted.reason, wanted.predicted_step_s, (wanted.visit, wanted.offload)
        now, whole = self.places, whole or self._placed(wanted.gpu_lids, *shares, step)
        has_room = partial(self.room.is_enough_for, now)
        places = whole if self.plan is None else first_part(self._facts, now, whole, has_room)
        self._rest = None
        if places != whole:
            if places == now:
                return self._told("layers stay, since there is no room to move any", reason)
            self._rest = None if self.wishes.policy == "random" else wanted
            predicted_s = None
            reason = f"first what there is room for; {reason}"
        is_as_wanted = self.wishes.policy != "random" and places == whole
        self._planned = shares if is_as_wanted else _shares(self._facts, places)
        plan = self.plan = self._ledger.propose(
            m.Plan(
                plan_id=self._ledger.next_id,
                step=step,
                places=places,
                k=places.gpu_fraction([layer.numel for layer in self.table.layers]),
                policy=self.wishes.policy,
                reason=reason,
                predicted_step_s=predicted_s,
            )
        )
        self.reason = reason
        count = len(places.gpu)
        note = Note(f"plan {plan.plan_id} for step {step}: k={plan.k:.3f}, {count} layers on the GPU: {reason}")
        return [note, Send(self._trainer, plan), Send(self._optimizer, plan)]

    def _placed(self, gpu_lids: frozenset[int], visit: float, offload: float, step: int) -> Places:
        """The GPU owns these layers. The CPU updates the others, except for those that visit the GPU."""
        facts = [replace(fact, position=self.positions[fact.lid]) for fact in self._facts]
        order = Order(facts)
        if self.wishes.policy != "random":
            return order.places(gpu_lids, visit, offload)
        draws_offloads = self.table.offload_weights is None
        offloaded = drawn_offloads(facts, gpu_lids, step) if draws_offloads else order.offloaded(gpu_lids, offload)
        return Places.chosen(len(facts), gpu_lids, drawn_visits(facts, gpu_lids, step), offloaded)

    def on_ack(self, sender: Address, ack: m.PlanAck) -> list[Command]:
        reassign = self._ledger.on_ack(sender.role, ack)
        if not ack.accepted:
            self._rest = None
        if reassign is not None:
            return [Send(self._trainer, reassign)]
        return [] if ack.accepted else [Note(f"{sender} refuses plan {ack.plan_id}: {ack.reason}")]

    def on_applied(self, applied: m.PlanApplied) -> list[Command]:
        self._ledger.on_applied(applied)
        as_planned = self.plan is not None and applied.places == self.plan.places  # it had room
        self._shares = self._planned if as_planned else _shares(self._facts, applied.places)
        self._rest = self._rest if as_planned else None
        self._last.changed(applied.step)
        self._steady.changed()
        self.moved += applied.moved
        if self.plan is not None and self.plan.plan_id == applied.plan_id:
            self._came = self.plan.reason
            if not as_planned and applied.plan_id >= self._since_eviction:
                self.room.lacked(self.plan.places, applied.places)
        if applied.moved:
            self.measured.moved(applied.step)
        waited = f"the loop waited {applied.handover_s * 1e3:.1f} ms"
        note = Note(
            f"plan {applied.plan_id} in effect from step {applied.step} on: moved {applied.moved} layers, {waited}"
        )
        mode = self.mode.on_applied(as_planned=as_planned)
        self.predicted_step_s = self._predicted(applied.places)
        return [note, *mode]

    def _predicted(self, places: Places) -> float | None:
        """The predicted step time. The placements differ from the plan's if the GPU had no room for all of it."""
        if self.plan is not None and places == self.plan.places:
            return self.plan.predicted_step_s
        profile = self._profile()
        return None if profile is None else self._simulated_s(profile, places.gpu)

    def _simulated_s(self, profile: Profile, gpu_lids: frozenset[int]) -> float:
        return simulate(self.mode.of(profile), gpu_lids).step_s

    def on_evicted(self, evicted: m.Evicted) -> list[Command]:
        """The trainer has moved a layer alone. What was to move beside it may have no room."""
        self._ledger.on_evicted(evicted.lid)
        self._since_eviction = self._ledger.next_id
        self._shares, self._rest, self._planned_at = _shares(self._facts, self.places), None, None
        self._last.changed(evicted.step)
        self._steady.changed()
        self.measured.moved(evicted.step)
        self.room.evicted()
        self.reason = self._evicted.add(evicted)
        return [Note(f"{self.reason}: {self.table.layers[evicted.lid].name}")]

    # ------------------------------------------------------------ commands

    def command(self, name: str, value: str) -> tuple[m.CommandReply, list[Command]]:
        """Carry out one of `COMMANDS`: the reply, and what follows from it. A refusal changes nothing."""
        try:
            self.wishes.set(name, value)
        except ValueError as error:
            return m.CommandReply(ok=False, text=str(error)), []
        self._planned_at = self._rest = None
        self._steady.changed()
        commands = self._change_threads(self.wishes.threads) if name == "threads" and self.wishes.threads else []
        if name == "gpu_memory_limit":
            commands += [Send(self._trainer, m.SetGpuMemory(nbytes=self.wishes.limits[name]))]
        elif name == "host_memory_limit":
            self.room.limit_host(self.wishes.limits[name])
        return m.CommandReply(ok=True, text=f"{name}={value} from the next plan on"), commands

    def _change_threads(self, threads: int) -> list[Command]:
        if self.measured.change_threads(threads, self._step):
            self._tried.forget()
        return [Send(self._optimizer, m.SetThreads(threads=threads))]

    def record(self, report: m.TrainerReport) -> dict[str, Any]:
        """A step's record for metrics.jsonl. `cpu_busy_s` is of the step before: the CPU may still work on this one."""
        as_reported = ("wall_time", "at_s", "step_s", "stall_s", "starved", "k", "to_device_bytes", "to_host_bytes")
        several = {} if self.table.world == 1 else {"rank": self.table.rank, "gather_s": report.gather_s}
        news, self._came = self._evicted.take(self._came), None
        return {
            **several,
            "step": report.number,
            **{name: getattr(report, name) for name in as_reported},
            "cpu_busy_s": self.measured.cpu_busy_s(report.step - 1),
            "unexplained_s": self._tried.unexplained_s,
            "threads": self.measured.threads,
            "gpu_layers": len(report.places.gpu),
            "visiting_layers": len(report.places.visiting),
            "offloaded_layers": len(report.places.offloaded),
            "moved": self.moved,
            **news,
            "policy": self.wishes.policy,
            "objective": self.wishes.objective,
            "mode": self.mode.name,
            **_precision(self.table),
            "predicted_step_s": self.predicted_step_s,
            **({"skipped_steps": self.mode.skipped} if self.table.awaits_verdict else {}),
            "gpu_peak_bytes": report.gpu_needed_bytes,
            **self.room.predicted(report),
        }

    def check(self) -> None:
        self._ledger.check()
        self.measured.check()
        self.mode.check()


def _shares(layers: Sequence[LayerFacts], places: Places) -> tuple[float, float]:
    """Those of visits and of offloaded weights."""
    numel = sum(layer.numel for layer in layers)
    visiting, resting = (sum(layers[lid].numel for lid in lids) / numel for lids in (places.visiting, places.offloaded))
    return visiting, resting


def _precision(table: m.LayerTable) -> dict[str, Any]:
    segments = [segment for layer in table.layers for segment in layer.segments]
    lone = any(segment.master_dtype == "bfloat16" for segment in segments)
    return Precision(segments[0].state_dtype, "bfloat16" if lone else "float32")._asdict()
