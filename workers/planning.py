"""Plans one trainer's run: measurements in, plans out; no clock, no I/O. A `TrainerSeat` calls it.

    LayerTable ─▶ Calibration ×2 ─▶ first plan ─▶ Plan to both ─ PlanAck ×2 ─▶ Reassign ─▶ PlanApplied
    TrainerReport, OptimizerReport ─▶ measurements ─▶ decide, every `replan_every` steps ─▶ the next plan
    Verdict ─▶ share of clipped steps ─▶ the mode, with every plan: update ahead of verdicts, or after them
    commands: k, policy, objective, threads ─▶ the next plan at once

Three kinds of steps are not measured. The first step warms up. Steps in which layers moved, or in which their memory
was prepared or freed, also copy state and keep the driver and the page tables busy. And in some, something else keeps
the host busy. If the number of threads changes in a step, its layers' times count, but the step's own times do not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

from hytrain import planner
from hytrain.planner import Infeasible, Limits, Profile
from hytrain.run.ownership import PlanLedger
from protocol import messages as m
from protocol.address import Address
from protocol.handles import Precision, layout
from protocol.placement import CPU, Placement, Places
from workers.effects import Command, Note, Send
from workers.plane_bytes import PlaneBytes

#: Steps that warm up. They are recorded, but the planner does not use their times.
WARM_UP_STEPS: Final = 1
HORIZON_STEPS: Final = 200
MIN_GAIN: Final = 0.01
#: After the number of threads was changed, a plan waits this many steps for new CPU times.
CPU_PATIENCE_STEPS: Final = 3
#: Measurements may arrive this many steps late.
OPEN_STEPS: Final = 16
#: The peak of a step with new placements is that of the second step, if they came in the middle of the first.
WHOLE_STEPS: Final = 2
#: The gradients of so many more layers may wait on the GPU in one step than in another.
WAITING_LAYERS: Final = 2
MAX_THREADS: Final = 9999
#: Why layers stay where they are, whatever they should do.
NO_PLAN, NO_ROOM = "no plan fits", "layers stay, since there is no room to move any"
#: Beside planes, a trainer with CUDA and its optimizer take so much host memory. Measured on an H200 host: 1.6 to
#: 2.2 GB in five of six runs, 0.2 in the other.
PROCESS_BYTES: Final = 1_800_000_000
#: Of the host's memory, other programs may take so much of what is left to them before planes give way.
MARGIN_TO_OTHERS: Final = 3 << 29
#: What is known of how far shares miss counts after so many steps, at most so much, and half after at least so many
#: more steps.
RESIDUAL_STEPS: Final = 3
MOST_RESIDUAL: Final = 100.0
#: By more than this fraction of a step, shares that were left must have been faster for that alone to bring them back.
MARGIN_TO_LEFT: Final = 0.05
FADING_STEPS: Final = 100
#: Beside training, the CPU's updates take so many times as long as in its calibration. Measured on H200 hosts: 1.2 to
#: 1.55. Until there are updates to measure, plans should not count on more.
BESIDE_TRAINING: Final = 1.35
#: On device "cpu", the trainer's own update stands in for the GPU's. It takes as long as the optimizer's.
CPU_RATES: Final = planner.Rates(d2h_s=4 / 5e9, h2d_s=4 / 5e9, cpu_update_s=1 / 5e8, gpu_update_s=1 / 5e8)
OF_LINK: Final = ("d2h_s", "h2d_s")
TIMES: Final = ("forward_s", "backward_s", *OF_LINK, "gpu_update_s", "visit_s")


@dataclass(slots=True)
class _Step:
    """What is known about one step."""

    duration_s: float | None = None
    places: Places = Places(())
    cpu_busy_s: float = 0.0
    updates: dict[int, float] = field(default_factory=dict)  # the CPU's times by LID, until they are taken in
    is_heeded: bool = False
    moved: bool = False  # layers moved, or their memory was prepared or freed
    threads_changed: bool = False


class _Wanted(NamedTuple):
    """What a plan is to bring: the layers that the GPU owns, the shares of visits and of offloaded weights."""

    gpu_lids: frozenset[int]
    shares: tuple[float, float]
    reason: str
    predicted_step_s: float | None


class Planning:
    """One trainer's layers: their placements, the measurements, and what the user wants."""

    def __init__(self, table: m.LayerTable, rank: int, *, replan_every: int) -> None:
        self.table = table
        segments = [segment for layer in table.layers for segment in layer.segments]
        lone = any(segment.master_dtype == "bfloat16" for segment in segments)
        self._precision = Precision(segments[0].state_dtype, "bfloat16" if lone else "float32")
        self._trainer, self._optimizer = Address("trainer", rank), Address("optimizer", rank)
        self.positions = [layer.position for layer in table.layers]
        self.policy, self.k, self.objective = table.policy, table.k, table.objective
        # The shares of visits and of offloaded weights that are in effect, and those of the last plan.
        self._shares = self._planned = (0.0, 0.0)
        # By shares that were in effect: measured steps, relative to simulated ones; in seconds; and the last of them.
        self._residuals: defaultdict[tuple[float, float], planner.Ewma] = defaultdict(planner.Ewma)
        self._steps_s: defaultdict[tuple[float, float], planner.Ewma] = defaultdict(planner.Ewma)
        self._tried_at: dict[tuple[float, float], int] = {}
        self._process_bytes = 0 if table.device == "cpu" else PROCESS_BYTES
        self._waiting_bytes = WAITING_LAYERS * max(layout(one).plane_nbytes["grads"] for one in table.layers)
        # Of GPU memory: the peak; what of it is not ours to place; and what we have placed, for how many more steps.
        self._needed_bytes = self._for_steps_bytes = 0
        self._placed_bytes: int | None = None
        self._has_ring = False  # for visits, on the GPU
        self._waited_bytes = 0  # gradients that waited for visits in a step that needed no more than `_for_steps_bytes`
        self._offloaded: frozenset[int] = frozenset()  # as last reported
        self._rest: _Wanted | None = None  # what was planned with it, and has no room before
        self._same_steps = WHOLE_STEPS
        self.reason = ""
        self._came: str | None = None  # the reason of a plan that has taken effect since the last record
        self.predicted_step_s: float | None = None
        self.moved = 0
        self.threads: int | None = None
        self.speculates, self._knows_mode = table.speculate is not False, True
        self._clipped = planner.ClippedShare()
        self.skipped = 0  # steps
        self._waits_from_plan: str | None = None  # why the CPU will wait for verdicts from the next plan on
        self._replan_every = replan_every
        self._facts = [facts(layer, table) for layer in table.layers]
        self._offloadable = frozenset(lid for block in table.blocks for lid in block)
        rates = CPU_RATES if table.device == "cpu" else None
        self._book = planner.MeasurementBook(
            self._facts, rates=rates, awaits_verdict=table.awaits_verdict, ranks=table.world
        )
        self._plane_bytes = PlaneBytes(table)
        self._limits = Limits(gpu_state_bytes=table.gpu_bytes, host_bytes=table.host_bytes)
        self._ledger = PlanLedger(Places((CPU.name,) * len(table.layers)))
        self._uncalibrated = {self._trainer, self._optimizer}
        self._step, self._first_measured = -1, WARM_UP_STEPS
        self._first_known = -1  # of earlier steps, what the CPU did is not known
        self._planned_at: int | None = None  # None: plan as soon as possible
        self._plan: m.Plan | None = None
        self._steps: defaultdict[int, _Step] = defaultdict(_Step)
        self._commanded_threads: int | None = None
        self._new_threads: tuple[int, int] | None = None  # the number commanded, and the step of the command

    @property
    def places(self) -> Places:
        """Those in effect. Weights rest where they did when that was last reported."""
        return self._ledger.places.offload(self._offloaded)

    @property
    def plan(self) -> m.Plan | None:
        """The newest plan, whether it is in effect or not."""
        return self._plan

    @property
    def plane_bytes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by plane in host memory, and on the trainer's device."""
        return self._plane_bytes.of(self.places)

    # ------------------------------------------------------------ before the first step

    def continue_from(self, before: Planning) -> None:
        """Continue the same training with other layers: keep its commands and its share of clipped steps."""
        self.policy, self.k, self.objective = before.policy, before.k, before.objective
        self._commanded_threads, self._clipped = before._commanded_threads, before._clipped
        self.skipped = before.skipped

    def rejoin(self, message: m.Rejoin) -> None:
        """Go on with a trainer that has trained before, under a coordinator that has died."""
        self._ledger = PlanLedger.after(message.plan, message.places, holds=message.holds)
        self._plan, self.reason, self.predicted_step_s = message.plan, message.plan.reason, None
        self.moved, self.skipped = message.moved, message.skipped
        self._planned, self._shares = self._shares_of(message.plan.places), self._shares_of(message.places)
        self._step, self._first_measured = message.step - 1, message.step + WARM_UP_STEPS
        self._first_known = message.step
        self._knows_mode = False
        self.on_calibration(self._trainer, message.calibration)

    def begin(self) -> list[Command]:
        """Forward the table to the optimizer, which needs it before the first plan."""
        return [Send(self._optimizer, replace(self.table, threads=self._commanded_threads))]

    def on_calibration(self, sender: Address, calibration: m.Calibration) -> list[Command]:
        """Once both have calibrated, propose the first plan, or send the trainer a `Failure` if none fits."""
        if self.table.device != "cpu" and calibration.cpu_update_s is not None:
            calibration = replace(calibration, cpu_update_s=BESIDE_TRAINING * calibration.cpu_update_s)
        self._book.calibrate(**asdict(calibration))
        self._uncalibrated.discard(sender)
        if self._uncalibrated or self._ledger.next_id:
            return []
        try:
            visit, offload = self._wanted
            if visit is None:  # which takes no host memory for gradients
                visit = float(sum(fact.host_bytes for fact in self._facts) > (self._limits.host_bytes or math.inf))
            shares = visit, 1.0 if offload is None else offload  # lean, until steps are measured
            window_bytes = self.table.window_bytes
            lids = planner.first_lids(
                self._facts,
                self._limits,
                self.k,
                visit=shares[0],
                offload=shares[1],
                window_bytes=window_bytes,
                for_visits_bytes=self._for_visits_bytes,
            )
        except Infeasible as error:
            failure = m.Failure(step=None, lid=None, error=str(error), traceback="")
            return [Note(f"{NO_PLAN}: {error}"), Send(self._trainer, failure)]
        return self._propose(_Wanted(lids, shares, "the first plan, before a step is measured", None), 0)

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
        self._step, self._offloaded, step = report.step, report.places.offloaded, self._steps[report.step]
        step.duration_s, step.places, step.moved = report.step_s, report.places, step.moved or report.moving
        for old in [number for number in self._steps if number <= report.step - OPEN_STEPS]:
            del self._steps[old]
        if report.measured is not None and self._counts(report.measured) and not is_late:
            self._measure(report, self._steps[report.measured])
        self._heed_activations(report.activation_bytes)
        self._heed_room(report)
        self._heed_host(report)
        return [] if is_late else self._replan()

    def _heed_room(self, report: m.TrainerReport) -> None:
        """Of the GPU's memory, what steps take beside state and weights is known: the rest is to be planned with.

        The peak of all steps is reported. If it has grown, it is this step's. If not, it may be of a time when more was
        placed on the GPU than now; or of state on its way there, which is counted by now, once whole steps have passed.
        """
        if report.gpu_usable_bytes is None or report.gpu_needed_bytes is None or report.step < self._first_measured:
            return
        if report.places.visiting and not self._has_ring:  # it stays from now on
            self._has_ring = True
            self._for_steps_bytes += self.table.ring_bytes
        placed = self._placed_on_gpu_bytes(report.places)
        rest = max(0, report.gpu_needed_bytes - placed)
        same = placed == self._placed_bytes or self._placed_bytes is None
        self._same_steps = self._same_steps + 1 if same else 0
        if report.gpu_needed_bytes > self._needed_bytes:
            self._for_steps_bytes, self._waited_bytes = rest, report.waited_bytes
        elif self._same_steps >= WHOLE_STEPS and rest <= self._for_steps_bytes:
            before = self._waited_bytes if rest == self._for_steps_bytes else 0
            self._for_steps_bytes, self._waited_bytes = rest, max(before, report.waited_bytes)
        self._needed_bytes, self._placed_bytes = report.gpu_needed_bytes, placed
        room = max(0, report.gpu_usable_bytes - self._for_steps_bytes - self._waiting_bytes)
        self._limits = Limits(gpu_state_bytes=room, host_bytes=self._limits.host_bytes)

    def _heed_activations(self, nbytes: int) -> None:
        """They take host memory that planes cannot have, and their time on the link."""
        grown_bytes, self._book.activation_bytes = nbytes - self._book.activation_bytes, nbytes
        if self._limits.host_bytes is not None:
            self._limits = replace(self._limits, host_bytes=max(0, self._limits.host_bytes - grown_bytes))

    def _heed_host(self, report: m.TrainerReport) -> None:
        """What planes may take is what they take now, and what is free besides: others may take memory or free it.

        A part of the margin is left to those who take memory for a while.
        """
        if report.host_free_bytes is None or report.moving or self._ledger.busy or self._same_steps < WHOLE_STEPS:
            return
        free = report.host_free_bytes
        free = 0 if -MARGIN_TO_OTHERS <= free < 0 else free
        planes_bytes = sum(map(_host_bytes, self._facts, report.places))
        self._limits = replace(self._limits, host_bytes=max(0, planes_bytes + free))

    @property
    def _for_visits_bytes(self) -> int:
        """What visits may take besides what steps were seen to need.

        That is the ring of slots, until it was made; and gradients and offloaded weights, of which more may wait than
        did then. What awaits a verdict is counted layer by layer.
        """
        ring_bytes = 0 if self._has_ring else self.table.ring_bytes
        hold_bytes = 0 if self.table.awaits_verdict else self.table.hold_bytes
        return ring_bytes + max(0, hold_bytes - self._waited_bytes)

    def _placed_on_gpu_bytes(self, *places: Places) -> int:
        """What we have placed on the GPU, with these placements at once.

        Gradients that wait for visits are not counted: those at the peak are part of what steps need.
        """
        offloaded = frozenset.intersection(*(each.offloaded for each in places))
        placed = sum(
            max(
                fact.gpu_state_bytes if placement.state == "gpu" else fact.held_bytes if placement.visits else 0
                for placement in each
            )
            for fact, *each in zip(self._facts, *places, strict=True)
        )
        placed += sum(self._facts[lid].weights_bytes for lid in self._offloadable - offloaded)
        return placed + (self.table.window_bytes if offloaded else 0)

    def _measure(self, report: m.TrainerReport, step: _Step) -> None:
        """Take in the times of the step that was measured. Its weights are back, so the CPU has finished it too.

        The simulation knows how visits and other copies share the link. So copies beside visits, which wait their turn,
        do not tell how fast it is.
        """
        names = [name for name in TIMES if not (step.places.visiting and name in OF_LINK)]
        times = {
            name: {t.lid: value for t in report.layers if (value := getattr(t, name)) is not None} for name in names
        }
        crowding = self._crowding(step.places)
        times["visit_s"] = {lid: visit_s / crowding.visits for lid, visit_s in times["visit_s"].items()}
        if step.duration_s is None or step.threads_changed:
            self._heed_updates(step)
            self._book.observe_trainer(**times)
            return
        is_usual = self._book.observe_contention(
            work_s=sum(times["forward_s"].values()) + sum(times["backward_s"].values()),
            stall_s=report.stall_s,
            cpu_busy_s=step.cpu_busy_s,
            starved=report.starved,
            places=step.places,
            crowding=crowding,
            cpu_update_s=step.updates,
        )
        if not is_usual:
            step.updates.clear()
            return
        self._heed_updates(step)
        self._book.observe_trainer(**times)
        self._book.observe_step(
            step_s=step.duration_s,
            stall_s=report.stall_s,
            exposed_s=report.exposed_s,
            gpu_lids=step.places.gpu,
            middle_s=report.middle_s,
        )
        self._note_residual(step)

    def _note_residual(self, step: _Step) -> None:
        """How long the step took, relative to what is simulated for it, if that is for what is in effect now.

        The CPU's pace in this step is known, so that it is simulated with that.
        What the simulation does not know makes some shares look better than they are. Each that was tried is judged by
        its own steps, so that plans do not change to and fro.
        """
        profile = self._profile()
        if profile is None or step.places != self.places:
            return
        usual_s = planner.simulate(profile, step.places.gpu).cpu_busy_s
        pace = step.cpu_busy_s / usual_s if usual_s and step.cpu_busy_s else 1.0
        simulated_s = self._simulated_s(profile.with_cpu(pace), step.places.gpu)
        if step.duration_s and simulated_s:
            self._residuals[self._shares].add(min(step.duration_s / simulated_s, MOST_RESIDUAL))
            self._steps_s[self._shares].add(step.duration_s)
            self._tried_at[self._shares] = self._step

    @property
    def _known_residuals(self) -> dict[tuple[float, float], float]:
        """Those with enough steps. What was tried long ago counts less: the machine may be another by now.

        It counts longer, the later in the run that was: so it is tried again less and less often. Steps scatter, so
        the mean is known to about half of the spread. By that much, shares that were left must have been faster.
        """
        known = {
            shares: found.value + (0.0 if shares == self._shares else found.spread / 2)
            for shares, found in self._residuals.items()
            if found.count >= RESIDUAL_STEPS and found.value is not None
        }
        usual = known.get(self._shares, 1.0)
        at = {shares: self._tried_at[shares] for shares in known}
        halvings = {shares: (self._step - at[shares]) / max(FADING_STEPS, at[shares]) for shares in known}
        return {shares: usual + (value - usual) * 0.5 ** halvings[shares] for shares, value in known.items()}

    @property
    def _known_steps(self) -> dict[tuple[float, float], float]:
        """How long steps are with the present shares, and were with those left not long ago, these with a margin.

        What the simulation believes of others may be wrong since something else is measured. So a plan that was clearly
        faster is known to be.
        """
        return {
            shares: found.value if shares == self._shares else (1 + MARGIN_TO_LEFT) * (found.value + found.spread / 2)
            for shares, found in self._steps_s.items()
            if found.value is not None
            and found.count >= RESIDUAL_STEPS
            and self._step - self._tried_at[shares] <= FADING_STEPS
        }

    def on_optimizer(self, report: m.OptimizerReport) -> None:
        """Take in what the CPU did in a step. Ignore a report from before the last change of threads."""
        if self._new_threads is not None:
            threads, since = self._new_threads
            if report.threads != threads and report.step <= since + 1:
                return
        self.threads = report.threads
        step = self._steps[report.step]
        step.cpu_busy_s += report.busy_s
        step.updates |= {update.lid: update.update_s for update in report.updates}
        if step.is_heeded:
            self._heed_updates(step)

    def _heed_updates(self, step: _Step) -> None:
        """Take in the CPU's times as they would be without visits beside them: now, and those that come later."""
        step.is_heeded = True
        if step.updates:
            self._new_threads = None
        longer = self._crowding(step.places).cpu
        times_s, step.updates = {lid: update_s / longer for lid, update_s in step.updates.items()}, {}
        self._book.observe_optimizer(cpu_update_s=times_s)

    def _crowding(self, places: Places) -> planner.Crowding:
        """What the CPU's updates and visits cost each other, as far as is known of the layers' times."""
        profile = self._book.profile() if places.visiting else None
        return planner.Crowding() if profile is None else profile.crowding(places)

    def on_verdict(self, verdict: m.Verdict) -> None:
        """Count whether the step was clipped or skipped, so that early updates had to be undone."""
        self._clipped.add(clipped=verdict.skipped or verdict.scale != 1.0)
        self.skipped += verdict.skipped

    def _counts(self, step: int) -> bool:
        return step >= self._first_measured and not self._steps[step].moved

    # ------------------------------------------------------------ plans

    def _replan(self) -> list[Command]:
        """Decide again, if it is time and no plan is being agreed on."""
        every = 1 if self.policy == "random" else self._replan_every
        due = self._planned_at is None or self._rest is not None or self._step - self._planned_at >= every
        profile = self._profile() if due and not self._ledger.busy else None
        if profile is None or self._uncalibrated or self._awaits_cpu_times():
            return []
        if self._same_steps < WHOLE_STEPS and self.policy != "random":
            return []  # what steps need beside what has just been placed is not known yet
        self._planned_at = self._step
        rest, self._rest = self._rest, None
        if rest is not None:
            return self._propose(rest, self._step + 2)
        current = self.places.gpu
        plan = partial(
            planner.decide,
            self.policy,
            limits=self._limits,
            fixed_k=self.k,
            current=current,
            horizon_steps=HORIZON_STEPS,
            min_gain=MIN_GAIN,
            objective=self.objective,
            visit=self._wanted[0],
            offload=self._wanted[1],
            residuals=self._known_residuals,
            steps_s=self._known_steps,
            seed=self._step,
        )
        try:
            speculates, why = self._wanted_mode(profile, plan)
            decision = plan(self._in_mode(profile, speculates))
        except Infeasible as error:
            return self._told(NO_PLAN, str(error))
        commands: list[Command] = []
        if decision.changed and self._keeps_ahead(speculates, profile, current):
            self._waits_from_plan = why
        else:
            self._waits_from_plan = None
            commands += self._set_mode(speculates, why)
        self.predicted_step_s = self._simulated_s(profile, current)
        if not decision.changed:
            self.reason = decision.reason
            return commands
        shares = decision.visit, decision.offload
        wanted = _Wanted(decision.gpu_lids, shares, decision.reason, decision.predicted_step_s)
        return commands + self._propose(wanted, self._step + 2)

    def _told(self, what: str, why: str) -> list[Command]:
        """Layers stay, for this reason: a note, unless the last attempt had it too."""
        was_told, self.reason = self.reason.startswith(what), f"{what}: {why}"
        return [] if was_told else [Note(self.reason)]

    @property
    def _wanted(self) -> tuple[float | None, float | None]:
        """The shares of visits and of offloaded weights that the user has asked for; None if they are to be chosen."""
        if self.policy == "deadline" and self.table.visit is None:
            return None, self.table.offload_weights
        return self.table.visit or 0.0 if self.policy == "fixed" else 0.0, self.table.offload_weights

    def _shares_of(self, places: Places) -> tuple[float, float]:
        numel = sum(fact.numel for fact in self._facts)
        visiting, resting = (
            sum(self._facts[lid].numel for lid in lids) / numel for lids in (places.visiting, places.offloaded)
        )
        return visiting, resting

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
            for_visits_bytes=self._for_visits_bytes,
            hold_bytes=self.table.hold_bytes,
        )

    def _wanted_mode(self, profile: Profile, plan: Callable[[Profile], planner.Decision]) -> tuple[bool, str]:
        """Whether the CPU should update ahead of verdicts, given the layers that the GPU would then own, and why."""
        if self.table.speculate is not None:
            return self.speculates, "as asked"
        if self.policy == "random":
            return planner.drawn(self._step), f"drawn at random from seed {self._step}"
        share = self._clipped.value
        decision = plan(planner.ahead(profile, share))
        there = replace(profile, visit=decision.visit, offload=decision.offload)
        gained = planner.gain(there, decision.gpu_lids, share)
        why = f"{share:.0%} of the steps are clipped, updating ahead saves {gained:.1%} of a step"
        return planner.is_worth_it(gained, now=self.speculates), why

    def _keeps_ahead(self, speculates: bool, profile: Profile, gpu_lids: frozenset[int]) -> bool:
        """Whether to keep updating ahead until the new plan is in effect: it still pays with the current layers."""
        ends = self.speculates and not speculates and self.policy != "random"
        return ends and planner.is_worth_it(planner.gain(profile, gpu_lids, self._clipped.value), now=True)

    def _set_mode(self, speculates: bool, why: str) -> list[Command]:
        if self._knows_mode and speculates == self.speculates:
            return []
        self.speculates, self._knows_mode = speculates, True
        return [Note(f"mode {self._mode}: {why}"), Send(self._optimizer, m.SetMode(speculate=speculates))]

    @property
    def _mode(self) -> str | None:
        """What happens to gradients before the verdict; None if there is no verdict."""
        mode = "speculate" if self.speculates else "defer"
        return mode if self.table.awaits_verdict and self._knows_mode else None

    def _in_mode(self, profile: Profile, speculates: bool) -> Profile:
        return planner.ahead(profile, self._clipped.value) if speculates else profile

    def _awaits_cpu_times(self) -> bool:
        """Whether threads were changed so recently that new CPU times should arrive before the next plan."""
        if self._new_threads is None or len(self.places.gpu) == len(self._facts):
            return False
        return self._step <= self._new_threads[1] + CPU_PATIENCE_STEPS

    def _propose(self, wanted: _Wanted, step: int) -> list[Command]:
        gpu_lids, shares, reason, predicted_s = wanted
        now, whole = self.places, self._placed(gpu_lids, *shares, step)
        has_room = partial(self._has_room_beside, now)
        places = whole if self._plan is None else planner.first_part(self._facts, now, whole, has_room)
        self._rest = None
        if places != whole:
            if places == now:
                return self._told(NO_ROOM, reason)
            self._rest = None if self.policy == "random" else wanted
            predicted_s = None
            reason = f"first what there is room for; {reason}"
        is_as_wanted = self.policy != "random" and places == whole
        self._planned = shares if is_as_wanted else self._shares_of(places)
        plan = self._plan = self._ledger.propose(
            m.Plan(
                plan_id=self._ledger.next_id,
                step=step,
                places=places,
                k=places.gpu_fraction([layer.numel for layer in self.table.layers]),
                policy=self.policy,
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
        order = planner.Order(facts)
        if self.policy == "random" and self.table.offload_weights is None:
            offloaded = planner.drawn_offloads(facts, gpu_lids, step)
        else:
            offloaded = order.offloaded(gpu_lids, offload)
        if self.policy == "random":
            visiting = planner.drawn_visits(facts, gpu_lids, step)
        else:
            visiting = order.visiting(gpu_lids, offloaded, visit)
        return Places.chosen(len(facts), gpu_lids, visiting, offloaded)

    def _has_room_beside(self, now: Places, then: Places) -> bool:
        """Whether there is memory for both at once, or they take no more of it than `now` alone."""
        limits = self._limits.gpu_state_bytes, self._limits.host_bytes
        taken = zip(self._bytes_of(now, then), self._bytes_of(now), limits, strict=True)
        return all(limit is None or both <= max(limit, alone) for both, alone, limit in taken)

    def _bytes_of(self, *places: Places) -> tuple[int, int]:
        """What these placements take on the GPU and on the host, at once."""
        on_gpu = self._placed_on_gpu_bytes(*places)
        on_gpu += self._for_visits_bytes if any(each.visiting for each in places) else 0
        on_host = sum(
            max(_host_bytes(fact, placement) for placement in each)
            for fact, *each in zip(self._facts, *places, strict=True)
        )
        return on_gpu, on_host

    def on_ack(self, sender: Address, ack: m.PlanAck) -> list[Command]:
        reassign = self._ledger.on_ack(sender.role, ack)
        if not ack.accepted:
            self._rest = None
        if reassign is not None:
            return [Send(self._trainer, reassign)]
        return [] if ack.accepted else [Note(f"{sender} refuses plan {ack.plan_id}: {ack.reason}")]

    def on_applied(self, applied: m.PlanApplied) -> list[Command]:
        self._ledger.on_applied(applied)
        as_planned = self._plan is not None and applied.places == self._plan.places  # it had room
        self._shares = self._planned if as_planned else self._shares_of(applied.places)
        self._rest = self._rest if as_planned else None
        self.moved += applied.moved
        if self._plan is not None and self._plan.plan_id == applied.plan_id:
            self._came = self._plan.reason
        self._steps[applied.step].moved |= applied.moved > 0
        waited = f"the loop waited {applied.handover_s * 1e3:.1f} ms"
        note = Note(
            f"plan {applied.plan_id} in effect from step {applied.step} on: moved {applied.moved} layers, {waited}"
        )
        why, self._waits_from_plan = self._waits_from_plan, None
        mode = self._set_mode(False, why) if why is not None and as_planned else []
        self.predicted_step_s = self._predicted(applied.places)
        return [note, *mode]

    def _predicted(self, places: Places) -> float | None:
        """The predicted step time. The placements differ from the plan's if the GPU had no room for all of it."""
        if self._plan is not None and places == self._plan.places:
            return self._plan.predicted_step_s
        profile = self._profile()
        return None if profile is None else self._simulated_s(profile, places.gpu)

    def _simulated_s(self, profile: Profile, gpu_lids: frozenset[int]) -> float:
        return planner.simulate(self._in_mode(profile, self.speculates), gpu_lids).step_s

    # ------------------------------------------------------------ commands

    def command(self, name: str, value: str) -> tuple[m.CommandReply, list[Command]]:
        """Carry out one of `COMMANDS`: the reply, and what follows from it. A refusal changes nothing."""
        try:
            if name not in COMMANDS:
                raise ValueError(f"unknown command {name!r}; known: {', '.join(COMMANDS)}")
            commands = COMMANDS[name](self, value)
        except ValueError as error:
            return m.CommandReply(ok=False, text=str(error)), []
        self._planned_at = self._rest = None
        return m.CommandReply(ok=True, text=f"{name}={value} from the next plan on"), commands

    def _set_k(self, value: str) -> list[Command]:
        if value == "auto":
            self.k, self.policy = None, "deadline" if self.policy == "fixed" else self.policy
            return []
        try:
            k = float(value)
        except ValueError:
            k = math.nan
        if not 0.0 <= k <= 1.0:
            raise ValueError(f'k is {value!r}: give a number in [0, 1], or "auto"')
        self.k, self.policy = k, "fixed"
        return []

    def _set_policy(self, value: str) -> list[Command]:
        if value not in m.POLICIES:
            raise ValueError(f"policy {value!r} is unknown; known: {', '.join(m.POLICIES)}")
        if value == "fixed" and self.k is None:
            raise ValueError('policy "fixed" needs a k: set k instead, as in k=0.3')
        self.policy, self.k = value, self.k if value == "fixed" else None
        return []

    def _set_objective(self, value: str) -> list[Command]:
        if value not in m.OBJECTIVES:
            raise ValueError(f"objective {value!r} is unknown; known: {', '.join(m.OBJECTIVES)}")
        self.objective = value
        return []

    def _set_threads(self, value: str) -> list[Command]:
        """Scale the CPU's times at once by the speedup that this many threads usually bring, then measure again."""
        if not value.isdecimal() or len(value) > len(str(MAX_THREADS)) or int(value) < 1:
            raise ValueError(f"threads is {value!r}: give a number from 1 to {MAX_THREADS}")
        threads = int(value)
        before = self._new_threads[0] if self._new_threads is not None else self.threads
        if before is not None and before != threads:
            self._book.cpu_changed(threads / before)
            self._residuals.clear()
            self._steps_s.clear()
            for step in self._steps.values():
                step.updates.clear()
                step.threads_changed = True
        self._commanded_threads = threads
        self._new_threads = threads, self._step
        self._steps[self._step + 1].threads_changed = True
        return [Send(self._optimizer, m.SetThreads(threads=threads))]

    def record(self, report: m.TrainerReport) -> dict[str, Any]:
        """A step's record for metrics.jsonl. `cpu_busy_s` is of the step before: the CPU may still work on this one."""
        several = {} if self.table.world == 1 else {"rank": self.table.rank, "gather_s": report.gather_s}
        news, self._came = {} if self._came is None else {"reason": self._came}, None
        return {
            **several,
            "step": report.number,
            "wall_time": report.wall_time,
            "at_s": report.at_s,
            "step_s": report.step_s,
            "stall_s": report.stall_s,
            "cpu_busy_s": self._steps[report.step - 1].cpu_busy_s if report.step > self._first_known else None,
            "threads": self.threads,
            "k": report.k,
            "gpu_layers": len(report.places.gpu),
            "visiting_layers": len(report.places.visiting),
            "offloaded_layers": len(report.places.offloaded),
            "to_device_bytes": report.to_device_bytes,
            "to_host_bytes": report.to_host_bytes,
            "moved": self.moved,
            **news,
            "policy": self.policy,
            "objective": self.objective,
            "mode": self._mode,
            **self._precision._asdict(),
            "predicted_step_s": self.predicted_step_s,
            **({"skipped_steps": self.skipped} if self.table.awaits_verdict else {}),
            **_shared(report.cotrained),
            "gpu_peak_bytes": report.gpu_needed_bytes,
            "predicted_gpu_bytes": self._predicted_gpu_bytes(report),
            "predicted_host_bytes": self._process_bytes
            + report.activation_bytes
            + sum(map(_host_bytes, self._facts, report.places)),
        }

    def _predicted_gpu_bytes(self, report: m.TrainerReport) -> int | None:
        """What steps like this one take at most: what is placed on the GPU, and what else was seen to be needed."""
        if self._placed_bytes is None:
            return None
        return self._for_steps_bytes + self._placed_on_gpu_bytes(report.places)

    def check(self) -> None:
        self._ledger.check()
        self._book.check()
        self._clipped.check()
        assert self.table.speculate in (None, self.speculates), "a requested mode is kept"
        assert len(self._steps) <= 2 * OPEN_STEPS, "old steps are forgotten"


#: The commands that a monitor may send.
COMMANDS: Final[dict[str, Callable[[Planning, str], list[Command]]]] = {
    "k": Planning._set_k,
    "policy": Planning._set_policy,
    "objective": Planning._set_objective,
    "threads": Planning._set_threads,
}


def _host_bytes(fact: planner.LayerFacts, placement: Placement) -> int:
    """What the layer takes of host memory in this placement."""
    if placement.state == "gpu":
        return 0
    return fact.host_bytes - (fact.grads_bytes if placement.visits else 0)


def facts(layer: m.Layer, table: m.LayerTable) -> planner.LayerFacts:
    placed, one_bank = layout(layer, table.banks), layout(layer)
    held_bytes = placed.plane_nbytes["grads"] if table.awaits_verdict else 0
    block = next((lids[0] for lids in table.blocks if layer.lid in lids), -1)
    return planner.LayerFacts(
        lid=layer.lid,
        position=layer.position,
        numel=layer.numel,
        gpu_state_bytes=held_bytes + placed.state_nbytes,
        host_bytes=placed.nbytes,
        grads_bytes=placed.plane_nbytes["grads"],
        held_bytes=held_bytes,
        spare_bytes=placed.nbytes - one_bank.nbytes,
        weights_bytes=one_bank.plane_nbytes["weights"] if block >= 0 else 0,
        block=block,
        must_visit=layer.stays_on_device,
    )


def _shared(cotrained: m.CoTrained | None) -> dict[str, Any]:
    """What a record has of how the batch was shared."""
    if cotrained is None:
        return {}
    times = {"gpu_part_s": cotrained.gpu_part_s, "cpu_part_s": cotrained.cpu_part_s}
    return {"cpu_parts": cotrained.cpu_parts, **{name: value for name, value in times.items() if value is not None}}
