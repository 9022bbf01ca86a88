"""One trainer's run as the coordinator plans it: measurements in, plans out; no clock, no I/O.

    LayerTable ─▶ Calibration ×2 ─▶ first plan ─▶ Plan to both ─ PlanAck ×2 ─▶ Reassign ─▶ PlanApplied
    TrainerReport, OptimizerReport ─▶ measurements ─▶ decide, every so many steps ─▶ the next plan
    Verdict ─▶ share of clipped steps ─▶ the mode: update ahead of verdicts or after them, with every plan
    commands: k, policy, objective, threads ─▶ the next plan at once

Left out of the measurements are the first step, which warms up, and steps in which layers moved, or memory was made
ready for that or given back: copies of state went beside their own, the driver and the page tables were busy. A step
in which the CPU got other threads counts for its layers, not as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from hytrain.planner import (
    POLICIES,
    ClippedShare,
    Decision,
    Infeasible,
    LayerFacts,
    Limits,
    MeasurementBook,
    Profile,
    Rates,
    ahead,
    decide,
    drawn,
    first_lids,
    gain,
    is_worth_it,
    simulate,
)
from hytrain.run.ownership import PlanLedger
from protocol import messages as m
from protocol.address import Address
from protocol.handles import layout
from protocol.placement import CPU, GPU, PLACEMENTS, gpu_fraction
from workers.effects import Command, Note, Send

#: Steps whose times are those of warming up: they are recorded, and not planned from.
WARM_UP_STEPS: Final = 1
HORIZON_STEPS: Final = 200
MIN_GAIN: Final = 0.01
#: Steps that a plan waits for the CPU's first times with another number of threads.
CPU_PATIENCE_STEPS: Final = 3
#: Steps whose measurements may still come.
OPEN_STEPS: Final = 16
MAX_THREADS: Final = 9999
#: On device "cpu" the "GPU's" update is the trainer's own and takes as long as the optimizer's.
CPU_RATES: Final = Rates(d2h_s=4 / 5e9, h2d_s=4 / 5e9, cpu_update_s=1 / 5e8, gpu_update_s=1 / 5e8)
TIMES: Final = ("forward_s", "backward_s", "d2h_s", "h2d_s", "gpu_update_s")


class Planning:
    """One trainer's layers: where they are placed, what was measured, what is wanted."""

    def __init__(self, table: m.LayerTable, rank: int, *, replan_every: int) -> None:
        self.table = table
        self._trainer, self._optimizer = Address("trainer", rank), Address("optimizer", rank)
        self.positions = [layer.position for layer in table.layers]
        self.policy, self.k, self.objective = table.policy, table.k, table.objective
        self.reason = ""
        self.predicted_step_s: float | None = None
        self.moved = 0
        self.threads: int | None = None
        self.speculates = table.speculate is not False
        self._clipped = ClippedShare()
        self._waits_from_plan: str | None = None  # why the CPU is to wait for verdicts once the plan under way holds
        self._replan_every = replan_every
        self._facts = [_facts(layer, table) for layer in table.layers]
        self._numels = [layer.numel for layer in table.layers]
        rates = CPU_RATES if table.device == "cpu" else None
        self._book = MeasurementBook(self._facts, rates=rates, awaits_verdict=table.awaits_verdict)
        self._limits = Limits(gpu_state_bytes=table.gpu_bytes, host_bytes=table.host_bytes)
        self._ledger = PlanLedger((CPU.name,) * len(table.layers))
        self._uncalibrated = {self._trainer, self._optimizer}
        self._step = -1
        self._planned_at: int | None = None  # None asks for a plan as soon as there can be one
        self._plan: m.Plan | None = None
        self._steps: dict[int, tuple[float, frozenset[int]]] = {}  # duration, layers on the GPU
        self._cpu_busy_s: dict[int, float] = {}  # by step
        self._moved_in: set[int] = set()  # steps in which a plan moved layers or worked on their memory
        self._commanded_in: set[int] = set()  # steps in which the CPU got other threads
        self._commanded_threads: int | None = None
        self._new_threads: tuple[int, int] | None = None  # commanded, and in which step

    @property
    def placements(self) -> tuple[str, ...]:
        return self._ledger.placements

    # ------------------------------------------------------------ before the first step

    def continue_from(self, before: Planning) -> None:
        """The same training with other layers: what it was commanded to holds on, and how often it is clipped."""
        self.policy, self.k, self.objective = before.policy, before.k, before.objective
        self._commanded_threads, self._clipped = before._commanded_threads, before._clipped

    def begin(self) -> list[Command]:
        """The optimizer needs the table before it gets a plan."""
        return [Send(self._optimizer, replace(self.table, threads=self._commanded_threads))]

    def on_calibration(self, sender: Address, calibration: m.Calibration) -> list[Command]:
        """What trainer or optimizer measured. With both, the first plan; a `Failure` for the trainer if none fits."""
        rates = {name: getattr(calibration, name) for name in ("d2h_s", "h2d_s", "cpu_update_s", "gpu_update_s")}
        self._book.calibrate(**rates)
        self._uncalibrated.discard(sender)
        if self._uncalibrated or self._ledger.next_id:
            return []
        try:
            lids = first_lids(self._facts, self._limits, self.k)
        except Infeasible as error:
            failure = m.Failure(step=None, lid=None, error=str(error), traceback="")
            return [Note(f"no plan fits: {error}"), Send(self._trainer, failure)]
        return self._propose(lids, 0, "the first plan, before a step is measured", None)

    # ------------------------------------------------------------ measurements

    def on_positions(self, positions: tuple[int, ...]) -> None:
        self.positions = list(positions)
        self._book.reorder(dict(enumerate(positions)))

    def on_trainer(self, report: m.TrainerReport) -> list[Command]:
        """A step is over; what was measured in it or in one before is taken in."""
        self._step = report.step
        self._steps[report.step] = report.step_s, _gpu_lids(report.placements)
        if report.moving:
            self._moved_in.add(report.step)
        self._forget(through=report.step - OPEN_STEPS)
        if report.measured is not None and self._counts(report.measured):
            self._measure(report, report.measured)
        if report.gpu_free_bytes is not None and report.step >= WARM_UP_STEPS:
            owned = sum(self._facts[lid].gpu_state_bytes for lid in _gpu_lids(report.placements))
            self._limits = Limits(gpu_state_bytes=report.gpu_free_bytes + owned, host_bytes=self._limits.host_bytes)
        return self._replan()

    def _measure(self, report: m.TrainerReport, measured: int) -> None:
        """What the report says of step `measured`, with which the CPU is done by now: its weights came back."""
        times = {
            name: {t.lid: value for t in report.layers if (value := getattr(t, name)) is not None} for name in TIMES
        }
        duration_s, gpu_lids = self._steps.get(measured, (None, frozenset()))
        if duration_s is None or measured in self._commanded_in:
            self._book.observe_trainer(**times)
            return
        self._book.observe_contention(
            work_s=sum(times["forward_s"].values()) + sum(times["backward_s"].values()),
            stall_s=report.stall_s,
            cpu_busy_s=self._cpu_busy_s.get(measured, 0.0),
            starved=report.starved,
            gpu_lids=gpu_lids,
        )
        self._book.observe_trainer(**times)
        self._book.observe_step(step_s=duration_s, stall_s=report.stall_s, gpu_lids=gpu_lids, middle_s=report.middle_s)

    def on_optimizer(self, report: m.OptimizerReport) -> None:
        """What the CPU did in a step. Of a number of threads that it works with no longer, it says nothing."""
        if self._new_threads is not None:
            threads, since = self._new_threads
            if report.threads != threads and report.step <= since + 1:
                return
            self._new_threads = None
        self.threads = report.threads
        self._cpu_busy_s[report.step] = self._cpu_busy_s.get(report.step, 0.0) + report.busy_s
        if self._counts(report.step):
            self._book.observe_optimizer(cpu_update_s={update.lid: update.update_s for update in report.updates})

    def on_verdict(self, verdict: m.Verdict) -> None:
        """Whether a step's updates held that were made before it."""
        self._clipped.add(clipped=verdict.skipped or verdict.scale != 1.0)

    def _counts(self, step: int) -> bool:
        return step >= WARM_UP_STEPS and step not in self._moved_in

    def _forget(self, *, through: int) -> None:
        self._steps = {step: known for step, known in self._steps.items() if step > through}
        self._cpu_busy_s = {step: busy_s for step, busy_s in self._cpu_busy_s.items() if step > through}
        self._moved_in = {step for step in self._moved_in if step > through}
        self._commanded_in = {step for step in self._commanded_in if step > through}

    # ------------------------------------------------------------ plans

    def _replan(self) -> list[Command]:
        """Decide anew, if it is time and no plan is under way."""
        every = 1 if self.policy == "random" else self._replan_every
        due = self._planned_at is None or self._step - self._planned_at >= every
        profile = self._book.profile() if due and not self._ledger.busy else None
        if profile is None or self._awaits_cpu_times():
            return []
        self._planned_at = self._step
        current = _gpu_lids(self.placements)
        plan = partial(
            decide,
            self.policy,
            limits=self._limits,
            fixed_k=self.k,
            current=current,
            horizon_steps=HORIZON_STEPS,
            min_gain=MIN_GAIN,
            objective=self.objective,
            seed=self._step,
        )
        try:
            speculates, why = self._wanted_mode(profile, plan)
            decision = plan(self._in_mode(profile, speculates))
        except Infeasible as error:
            return [Note(f"no plan fits: {error}")]
        commands: list[Command] = []
        if decision.changed and self._had_better_wait(speculates, profile, current):
            self._waits_from_plan = why
        else:
            self._waits_from_plan = None
            commands += self._set_mode(speculates, why)
        self.predicted_step_s = simulate(self._in_mode(profile, self.speculates), current).step_s
        self.reason = decision.reason
        if decision.changed:
            commands += self._propose(decision.gpu_lids, self._step + 2, decision.reason, decision.predicted_step_s)
        return commands

    def _wanted_mode(self, profile: Profile, plan: Callable[[Profile], Decision]) -> tuple[bool, str]:
        """Whether the CPU is to be ahead of verdicts, judged with the layers that it would then leave to the GPU."""
        if self.table.speculate is not None:
            return self.speculates, "as asked"
        if self.policy == "random":
            return drawn(self._step), f"drawn at random from seed {self._step}"
        share = self._clipped.value
        gained = gain(profile, plan(ahead(profile, share)).gpu_lids, share)
        why = f"{share:.0%} of the steps are clipped, being ahead saves {gained:.1%} of a step"
        return is_worth_it(gained, now=self.speculates), why

    def _had_better_wait(self, speculates: bool, profile: Profile, gpu_lids: frozenset[int]) -> bool:
        """Whether being ahead is to end, and with the layers that the GPU owns until then is worth it still."""
        if speculates or not self.speculates or self.policy == "random":
            return False
        return is_worth_it(gain(profile, gpu_lids, self._clipped.value), now=True)

    def _set_mode(self, speculates: bool, why: str) -> list[Command]:
        if speculates == self.speculates:
            return []
        self.speculates = speculates
        return [Note(f"mode {self._mode}: {why}"), Send(self._optimizer, m.SetMode(speculate=speculates))]

    @property
    def _mode(self) -> str | None:
        """What becomes of gradients until the verdict; None where there is none."""
        if not self.table.awaits_verdict:
            return None
        return "speculate" if self.speculates else "defer"

    def _in_mode(self, profile: Profile, speculates: bool) -> Profile:
        return ahead(profile, self._clipped.value) if speculates else profile

    def _awaits_cpu_times(self) -> bool:
        """Threads were changed a moment ago: what the CPU does with them is known better when it has been seen."""
        if self._new_threads is None or len(_gpu_lids(self.placements)) == len(self._facts):
            return False
        return self._step <= self._new_threads[1] + CPU_PATIENCE_STEPS

    def _propose(self, gpu_lids: frozenset[int], step: int, reason: str, predicted_s: float | None) -> list[Command]:
        placements = _placements(gpu_lids, len(self._facts))
        plan = self._plan = self._ledger.propose(
            m.Plan(
                plan_id=self._ledger.next_id,
                step=step,
                placements=placements,
                k=gpu_fraction(placements, self._numels),
                policy=self.policy,
                reason=reason,
                predicted_step_s=predicted_s,
            )
        )
        self.reason = reason
        note = Note(f"plan {plan.plan_id} for step {step}: k={plan.k:.3f}, {len(gpu_lids)} layers on the GPU: {reason}")
        return [note, Send(self._trainer, plan), Send(self._optimizer, plan)]

    def on_ack(self, sender: Address, ack: m.PlanAck) -> list[Command]:
        reassign = self._ledger.on_ack(sender.role, ack)
        if reassign is not None:
            return [Send(self._trainer, reassign)]
        return [] if ack.accepted else [Note(f"{sender} refuses plan {ack.plan_id}: {ack.reason}")]

    def on_applied(self, applied: m.PlanApplied) -> list[Command]:
        self._ledger.on_applied(applied)
        self.moved += applied.moved
        if applied.moved:
            self._moved_in.add(applied.step)
        waited = f"the loop waited {applied.handover_s * 1e3:.1f} ms"
        note = Note(f"plan {applied.plan_id} holds from step {applied.step} on: {applied.moved} layers, {waited}")
        why, self._waits_from_plan = self._waits_from_plan, None
        as_planned = self._plan is not None and applied.placements == self._plan.placements  # the GPU had room for it
        mode = self._set_mode(False, why) if why is not None and as_planned else []
        self.predicted_step_s = self._predicted(applied.placements)
        return [note, *mode]

    def _predicted(self, placements: tuple[str, ...]) -> float | None:
        """A step with the placements that the trainer named; a GPU without room did not take all of the plan."""
        if self._plan is not None and placements == self._plan.placements:
            return self._plan.predicted_step_s
        profile = self._book.profile()
        if profile is None:
            return None
        return simulate(self._in_mode(profile, self.speculates), _gpu_lids(placements)).step_s

    # ------------------------------------------------------------ commands

    def command(self, name: str, value: str) -> tuple[m.CommandReply, list[Command]]:
        """One of `COMMANDS`, with what follows from it. A refusal changes nothing."""
        if name not in COMMANDS:
            known = ", ".join(COMMANDS)
            return m.CommandReply(ok=False, text=f"unknown command {name!r}; known: {known}"), []
        try:
            commands = COMMANDS[name](self, value)
        except ValueError as error:
            return m.CommandReply(ok=False, text=str(error)), []
        self._planned_at = None
        return m.CommandReply(ok=True, text=f"{name}={value} from the next plan on"), commands

    def _set_k(self, value: str) -> list[Command]:
        if value == "auto":
            self.k, self.policy = None, "deadline" if self.policy == "fixed" else self.policy
            return []
        sentence = f'k is {value!r}: a number in [0, 1], or "auto"'
        try:
            k = float(value)
        except ValueError:
            raise ValueError(sentence) from None
        if not 0.0 <= k <= 1.0:
            raise ValueError(sentence)
        self.k, self.policy = k, "fixed"
        return []

    def _set_policy(self, value: str) -> list[Command]:
        if value not in POLICIES:
            raise ValueError(f"policy {value!r} is unknown; known: {', '.join(POLICIES)}")
        if value == "fixed" and self.k is None:
            raise ValueError('policy "fixed" needs a k: give that instead, as in k=0.3')
        self.policy, self.k = value, self.k if value == "fixed" else None
        return []

    def _set_objective(self, value: str) -> list[Command]:
        if value not in m.OBJECTIVES:
            raise ValueError(f"objective {value!r} is unknown; known: {', '.join(m.OBJECTIVES)}")
        self.objective = value
        return []

    def _set_threads(self, value: str) -> list[Command]:
        """The CPU's times are scaled at once by what so many threads usually bring, and measured anew."""
        if not value.isdecimal() or len(value) > len(str(MAX_THREADS)) or int(value) < 1:
            raise ValueError(f"threads is {value!r}: a number from 1 to {MAX_THREADS}")
        threads = int(value)
        before = self._new_threads[0] if self._new_threads is not None else self.threads
        if before is not None and before != threads:
            self._book.cpu_changed(threads / before)
        self._commanded_threads = threads
        self._new_threads = threads, self._step
        self._commanded_in.add(self._step + 1)
        return [Send(self._optimizer, m.SetThreads(threads=threads))]

    def record(self, report: m.TrainerReport) -> dict[str, Any]:
        """One step, for metrics.jsonl. The CPU may be at work on it still, and is done with the one before."""
        return {
            "step": report.number,
            "at_s": report.at_s,
            "step_s": report.step_s,
            "stall_s": report.stall_s,
            "cpu_busy_s": self._cpu_busy_s.get(report.step - 1, 0.0),
            "threads": self.threads,
            "k": report.k,
            "gpu_layers": len(_gpu_lids(report.placements)),
            "moved": self.moved,
            "policy": self.policy,
            "objective": self.objective,
            "mode": self._mode,
            "predicted_step_s": self.predicted_step_s,
        }

    def check(self) -> None:
        self._ledger.check()
        self._book.check()
        self._clipped.check()
        assert self.table.speculate in (None, self.speculates), "a mode that was asked for is kept"
        for kept in (self._steps, self._cpu_busy_s, self._moved_in, self._commanded_in):
            assert len(kept) <= 2 * OPEN_STEPS, "old steps are forgotten"


#: What a monitor may ask for.
COMMANDS: Final[dict[str, Callable[[Planning, str], list[Command]]]] = {
    "k": Planning._set_k,
    "policy": Planning._set_policy,
    "objective": Planning._set_objective,
    "threads": Planning._set_threads,
}


def _gpu_lids(placements: Iterable[str]) -> frozenset[int]:
    """The layers whose state is held by the GPU: what the planner reckons with."""
    return frozenset(lid for lid, name in enumerate(placements) if PLACEMENTS[name].state == "gpu")


def _placements(gpu_lids: frozenset[int], layers: int) -> tuple[str, ...]:
    """What the planner has decided, as messages say it."""
    return tuple(GPU.name if lid in gpu_lids else CPU.name for lid in range(layers))


def _facts(layer: m.Layer, table: m.LayerTable) -> LayerFacts:
    placed, one_bank = layout(layer, table.banks), layout(layer)
    held_bytes = placed.plane_nbytes["grads"] if table.awaits_verdict else 0
    return LayerFacts(
        lid=layer.lid,
        position=layer.position,
        numel=layer.numel,
        gpu_state_bytes=held_bytes + placed.state_nbytes,
        host_bytes=placed.nbytes,
        held_bytes=held_bytes,
        spare_bytes=placed.nbytes - one_bank.nbytes,
    )
