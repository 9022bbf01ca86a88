"""What the coordinator knows and decides: a pure state machine, messages and a time in, commands out.

    LayerTable ─▶ first plan ─▶ Plan to both ─ PlanAck ×2 ─▶ Reassign ─▶ PlanApplied
    TrainerReport, OptimizerReport ─▶ measurements ─▶ decide, every so many steps ─▶ the next plan
    TrainerReport + Log of one step ─▶ one record: a line of metrics.jsonl, and the status that monitors get

The worker around it (`coordinator`) owns sockets, files and the clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from hytrain.ownership import PlanLedger, fraction
from hytrain.planner import Infeasible, LayerFacts, Limits, MeasurementBook, Rates, decide
from hytrain.planner.formulas import prefix_for
from hytrain.planner.profile import LayerProfile, Profile
from protocol import messages as m
from protocol.handles import layout
from protocol.handshake import RunHandshake

#: k before anything has been measured: a few layers on the GPU, since with none the first layer always stalls.
FIRST_K: Final = 0.1
#: Steps whose times are those of warming up: they are recorded, and not planned from.
WARM_UP_STEPS: Final = 2
HORIZON_STEPS: Final = 200
MIN_GAIN: Final = 0.01
#: Steps that a record waits for the loop's own numbers; they come late, since reading a loss at once would stall.
LOG_PATIENCE_STEPS: Final = 4
#: On device "cpu" the "GPU's" update is the trainer's own and takes as long as the optimizer's.
CPU_RATES: Final = Rates(d2h_s=4 / 5e9, h2d_s=4 / 5e9, cpu_update_s=1 / 5e8, gpu_update_s=1 / 5e8)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a role."""

    role: str
    message: m.Message


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer the sender of the message at hand."""

    message: m.Message


@dataclass(frozen=True, slots=True)
class Write:
    """Append a record to metrics.jsonl."""

    line: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish a status to monitors."""

    status: m.Status


@dataclass(frozen=True, slots=True)
class Note:
    """Write a line to the coordinator's log."""

    text: str


Command = Send | Answer | Write | Publish | Note


@dataclass(slots=True)
class _Session:
    """One trainer's run: its layers, who owns them, what was measured."""

    table: m.LayerTable
    ranks: list[int]
    book: MeasurementBook
    limits: Limits
    ledger: PlanLedger = field(default_factory=PlanLedger)
    policy: str = ""
    k: float | None = None
    reason: str = ""
    predicted_step_s: float | None = None
    step: int = -1
    planned_at: int = -1
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    cpu_busy_s: dict[int, float] = field(default_factory=dict)
    moved: int = 0

    @property
    def numels(self) -> list[int]:
        return [layer.numel for layer in self.table.layers]


class CoordinatorState:
    """The coordinator of one run, for one trainer after another."""

    def __init__(self, *, run_name: str, run_dir: str, pid: int, replan_every: int) -> None:
        self._run_name, self._run_dir, self._pid = run_name, run_dir, pid
        self._replan_every = replan_every
        self._handshake = RunHandshake(run_name=run_name, pid=pid)
        self._session: _Session | None = None
        self._last_record = "{}"
        self._farewells: set[str] = set()
        self._waiting: m.Hello | None = None

    def handle(self, message: m.Message, now_s: float) -> list[Command]:
        """What follows from `message`. Raises `HandshakeError`, `OwnershipError`, `ValueError` for what cannot be."""
        match message:
            case m.Hello():
                return self._on_hello(message)
            case m.Ready():
                self._handshake.on_ready(message)
                return [Note(f"{message.role}-{message.rank} is ready: {message.detail}")]
            case m.LayerTable():
                return self._on_table(message)
            case m.StatusRequest():
                return [Answer(self._status())]
            case m.Command():
                return [Answer(self._on_command(message))]
            case m.Goodbye():
                return self._on_goodbye(message)
            case m.SessionEnded():
                return self._on_left("optimizer")
            case m.Failure():
                return [Note(f"{message.role}-{message.rank} failed: {message.error}")]
        if self._session is None:
            return [Note(f"{type(message).__name__} without a trainer: dropped")]
        return self._on_session(self._session, message)

    def _on_session(self, session: _Session, message: m.Message) -> list[Command]:
        match message:
            case m.RanksLearned(ranks=ranks):
                session.ranks = list(ranks)
                session.book.rerank(dict(enumerate(ranks)))
                return []
            case m.PlanAck():
                return self._on_ack(session, message)
            case m.PlanApplied():
                return self._on_applied(session, message)
            case m.TrainerReport():
                return self._on_trainer(session, message)
            case m.OptimizerReport():
                return self._on_optimizer(session, message)
            case m.Log():
                return self._on_log(session, message)
            case m.Calibration():
                return []
        raise ValueError(f"a coordinator has no use for {type(message).__name__}")

    # ------------------------------------------------------------ joining and leaving

    def _on_hello(self, hello: m.Hello) -> list[Command]:
        if hello.role == "trainer" and any(known.role == "trainer" for known in self._handshake.joined):
            self._waiting = hello
            return [Note("a trainer waits until the last one has left")]
        return [Send(hello.role, self._handshake.on_hello(hello))]

    def _on_goodbye(self, goodbye: m.Goodbye) -> list[Command]:
        note = Note(f"{goodbye.role}-{goodbye.rank} says goodbye")
        if goodbye.role != "trainer":
            self._handshake.leave(goodbye.role, goodbye.rank)
            return [note]
        if self._session is None:
            return [note, *self._admit_next()]
        commands = self._flush(self._session, through=max(self._session.records, default=0))
        return [*commands, note, *self._on_left("trainer")]

    def _on_left(self, role: str) -> list[Command]:
        """Trainer and optimizer have both ended the session, in whichever order: room for the next trainer."""
        self._farewells.add(role)
        if self._farewells != {"trainer", "optimizer"}:
            return []
        self._farewells.clear()
        self._session = None
        return self._admit_next()

    def _admit_next(self) -> list[Command]:
        """The trainer has left: another may join, who perhaps waits already."""
        self._handshake.leave("trainer", 0)
        waiting, self._waiting = self._waiting, None
        return [] if waiting is None else self._on_hello(waiting)

    def _on_table(self, table: m.LayerTable) -> list[Command]:
        facts = [
            LayerFacts(
                lid=layer.lid,
                rank=layer.rank,
                numel=layer.numel,
                gpu_state_bytes=sum(layout(layer).plane_nbytes[p] for p in ("remainder", "exp_avg", "exp_avg_sq")),
                host_bytes=layout(layer).nbytes,
            )
            for layer in table.layers
        ]
        book = MeasurementBook(facts, rates=CPU_RATES if table.device == "cpu" else None)
        limits = Limits(gpu_state_bytes=table.gpu_bytes, host_bytes=table.host_bytes)
        session = _Session(table, [layer.rank for layer in table.layers], book, limits)
        session.policy, session.k = table.policy, table.k
        self._session = session
        k = FIRST_K if table.k is None else table.k
        lids = prefix_for(k, _unmeasured(facts))
        forward = Send("optimizer", table)
        return [forward] + self._propose(
            session, tuple(sorted(lids)), 0, "the first plan, before anything is measured", None
        )

    # ------------------------------------------------------------ plans

    def _propose(
        self,
        session: _Session,
        gpu_lids: tuple[int, ...],
        step: int,
        reason: str,
        predicted_step_s: float | None,
    ) -> list[Command]:
        plan = session.ledger.propose(
            m.Plan(
                plan_id=session.ledger.next_id,
                step=step,
                gpu_lids=gpu_lids,
                k=fraction(gpu_lids, session.numels),
                policy=session.policy,
                reason=reason,
                predicted_step_s=predicted_step_s,
            )
        )
        session.reason = reason
        note = Note(f"plan {plan.plan_id} for step {step}: k={plan.k:.3f}, {len(gpu_lids)} layers on the GPU: {reason}")
        return [note, Send("trainer", plan), Send("optimizer", plan)]

    def _on_ack(self, session: _Session, ack: m.PlanAck) -> list[Command]:
        reassign = session.ledger.on_ack(ack)
        if reassign is not None:
            return [Send("trainer", reassign)]
        return [] if ack.accepted else [Note(f"{ack.role} refuses plan {ack.plan_id}: {ack.reason}")]

    def _on_applied(self, session: _Session, applied: m.PlanApplied) -> list[Command]:
        session.ledger.on_applied(applied)
        session.moved += applied.moved
        return [Note(f"plan {applied.plan_id} holds: {applied.moved} layers in {applied.handover_s * 1e3:.0f} ms")]

    def _replan(self, session: _Session) -> list[Command]:
        """Decide anew, if it is time and no plan is under way."""
        due = session.step - session.planned_at >= (1 if session.policy == "random" else self._replan_every)
        if session.ledger.busy or session.step < WARM_UP_STEPS or not due:
            return []
        profile = session.book.profile()
        if profile is None:
            return []
        session.planned_at = session.step
        current = frozenset(session.ledger.gpu_lids)
        try:
            decision = decide(
                session.policy,
                profile,
                session.limits,
                fixed_k=session.k,
                current=current,
                horizon_steps=HORIZON_STEPS,
                min_gain=MIN_GAIN,
                seed=session.step,
            )
        except Infeasible as error:
            return [Note(f"no plan fits: {error}")]
        session.predicted_step_s = decision.predicted_step_s
        if not decision.changed:
            session.reason = decision.reason
            return []
        gpu_lids = tuple(sorted(decision.gpu_lids))
        return self._propose(session, gpu_lids, session.step + 2, decision.reason, decision.predicted_step_s)

    def _on_command(self, command: m.Command) -> m.CommandReply:
        """The commands that a monitor may give: `k` with a number in [0, 1] or "auto"."""
        if command.name != "k":
            return m.CommandReply(ok=False, text=f"unknown command {command.name!r}; known: k")
        if self._session is None:
            return m.CommandReply(ok=False, text="no trainer is here")
        try:
            k = None if command.value == "auto" else float(command.value)
        except ValueError:
            k = -1.0
        if k is not None and not 0.0 <= k <= 1.0:
            return m.CommandReply(ok=False, text=f'k is {command.value!r}: a number in [0, 1], or "auto"')
        self._session.k, self._session.policy = k, "deadline" if k is None else "fixed"
        self._session.planned_at = -1
        return m.CommandReply(ok=True, text=f"k={command.value} from the next plan on")

    # ------------------------------------------------------------ measurements and records

    def _on_trainer(self, session: _Session, report: m.TrainerReport) -> list[Command]:
        session.step = report.step
        if report.step >= WARM_UP_STEPS:
            for name in ("forward_s", "backward_s", "d2h_s", "h2d_s", "gpu_update_s"):
                times = {t.lid: value for t in report.layers if (value := getattr(t, name)) is not None}
                session.book.observe_trainer(**{name: times})
        if report.gpu_free_bytes is not None and report.step >= WARM_UP_STEPS:
            owned = sum(
                layout(session.table.layers[lid]).nbytes - layout(session.table.layers[lid]).shared_nbytes
                for lid in report.gpu_lids
            )
            session.limits = Limits(gpu_state_bytes=report.gpu_free_bytes + owned, host_bytes=session.limits.host_bytes)
        session.records[report.number] = {
            "step": report.number,
            "at_s": report.at_s,
            "step_s": report.step_s,
            "stall_s": report.stall_s,
            "cpu_busy_s": session.cpu_busy_s.pop(report.step - 1, 0.0),
            "k": report.k,
            "gpu_layers": len(report.gpu_lids),
            "moved": session.moved,
            "policy": session.policy,
            "predicted_step_s": session.predicted_step_s,
        }
        return self._flush(session, through=report.number - LOG_PATIENCE_STEPS) + self._replan(session)

    def _on_optimizer(self, session: _Session, report: m.OptimizerReport) -> list[Command]:
        session.cpu_busy_s[report.step] = session.cpu_busy_s.get(report.step, 0.0) + report.busy_s
        if report.step >= WARM_UP_STEPS:
            session.book.observe_optimizer(cpu_update_s={u.lid: u.update_s for u in report.updates})
        return []

    def _on_log(self, session: _Session, log: m.Log) -> list[Command]:
        record = session.records.get(log.step)
        if record is None:
            return [Write(json.dumps({"step": log.step, **log.numbers}))]
        record.update(log.numbers)
        return self._flush(session, through=log.step)

    def _flush(self, session: _Session, *, through: int) -> list[Command]:
        """Records up to a step are complete: to the file and to the monitors."""
        commands: list[Command] = []
        for step in sorted(step for step in session.records if step <= through):
            self._last_record = json.dumps(session.records.pop(step))
            commands += [Write(self._last_record), Publish(self._status())]
        return commands

    def _status(self) -> m.Status:
        processes = [
            m.Process(role=h.role, rank=h.rank, pid=h.pid, detail=self._handshake.detail(h.role, h.rank))
            for h in self._handshake.joined
        ]
        session = self._session
        layers = session.table.layers if session is not None else ()
        return m.Status(
            run_name=self._run_name,
            run_dir=self._run_dir,
            record=self._last_record,
            processes=(m.Process(role="coordinator", rank=0, pid=self._pid, detail="plans and records"), *processes),
            layer_names=tuple(layer.name for layer in layers),
            layer_numels=tuple(layer.numel for layer in layers),
            layer_ranks=tuple(session.ranks) if session is not None else (),
            gpu_lids=session.ledger.gpu_lids if session is not None else (),
            policy=session.policy if session is not None else "",
            reason=session.reason if session is not None else "",
        )

    def check(self) -> None:
        self._handshake.check()
        if self._session is not None:
            self._session.ledger.check()
            self._session.book.check()


def _unmeasured(facts: list[LayerFacts]) -> Profile:
    """A profile of sizes alone, for choosing a prefix before anything has been measured."""
    times = dict.fromkeys(("forward_s", "backward_s", "d2h_s", "h2d_s", "cpu_update_s", "gpu_update_s"), 0.0)
    return Profile(
        layers=tuple(
            LayerProfile(
                lid=fact.lid,
                rank=fact.rank,
                numel=fact.numel,
                gpu_state_bytes=fact.gpu_state_bytes,
                host_bytes=fact.host_bytes,
                **times,
            )
            for fact in sorted(facts, key=lambda fact: fact.rank)
        )
    )
