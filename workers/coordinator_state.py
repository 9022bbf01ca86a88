"""What the coordinator knows: a pure state machine, messages and a time in, commands out.

    Hello, Ready, Goodbye ─▶ who takes part            LayerTable … ─▶ planning
    TrainerReport + Log of one step ─▶ one record: a line of metrics.jsonl, and the status that monitors get

One trainer after another; `planning` is about the present one. The worker around it (`coordinator`) owns sockets,
files and the clock.
"""

from __future__ import annotations

from protocol import messages as m
from protocol.handshake import RunHandshake
from workers.effects import Answer, Command, Note, Publish, Send, Write
from workers.planning import Planning
from workers.records import Records


class CoordinatorState:
    """The coordinator of one run, for one trainer after another."""

    def __init__(self, *, run_name: str, run_dir: str, pid: int, replan_every: int) -> None:
        self._run_name, self._run_dir, self._pid = run_name, run_dir, pid
        self._replan_every = replan_every
        self._handshake = RunHandshake(run_name=run_name, pid=pid)
        self._planning: Planning | None = None
        self._before: Planning | None = None  # the last trainer's
        self._records = Records()
        self._farewells: set[str] = set()
        self._waiting: m.Hello | None = None

    def handle(self, message: m.Message, now_s: float) -> list[Command]:
        """What follows from `message`. Raises `HandshakeError`, `OwnershipError`, `ValueError` for what cannot be."""
        commands = self._follow(message)
        if "trainer" in self._farewells:  # a plan under way is not for the next one
            commands = [known for known in commands if not (isinstance(known, Send) and known.role == "trainer")]
        return commands

    def inbox(self, role: str) -> str:
        """The name of a worker's inbox. Raises `KeyError` if nobody has joined in that role."""
        return self._handshake.inbox(role)

    def _follow(self, message: m.Message) -> list[Command]:
        match message:
            case m.Hello():
                return self._on_hello(message)
            case m.Ready():
                self._handshake.on_ready(message)
                return [Note(f"{message.role}-{message.rank} is ready: {message.detail}")]
            case m.LayerTable():
                self._planning = Planning(message, replan_every=self._replan_every)
                if message.continues and self._before is not None:
                    self._planning.continue_from(self._before)
                return self._planning.begin()
            case m.StatusRequest():
                return [Answer(self._status())]
            case m.Command():
                return self._on_command(message)
            case m.Goodbye():
                return self._on_goodbye(message)
            case m.SessionEnded():
                return self._on_left("optimizer")
            case m.Failure():
                return [Note(f"{message.role}-{message.rank} failed: {message.error}")]
        if self._planning is None:
            return [Note(f"{type(message).__name__} without a trainer: dropped")]
        return self._on_run(self._planning, message)

    def _on_run(self, planning: Planning, message: m.Message) -> list[Command]:
        match message:
            case m.Calibration():
                return planning.on_calibration(message)
            case m.RanksLearned(ranks=ranks):
                planning.on_ranks(ranks)
                return []
            case m.PlanAck():
                return planning.on_ack(message)
            case m.PlanApplied():
                return planning.on_applied(message)
            case m.OptimizerReport():
                planning.on_optimizer(message)
                return []
            case m.Verdict():
                planning.on_verdict(message)
                return []
            case m.TrainerReport():
                record = planning.record(message)
                if message.measured is not None:
                    number = message.number - message.step + message.measured
                    self._records.measured(number, message.stall_s)
                return self._write(self._records.add(record)) + planning.on_trainer(message)
            case m.Log(step=step, numbers=numbers):
                return self._write(self._records.log(step, numbers))
        raise ValueError(f"a coordinator has no use for {type(message).__name__}")

    def _on_command(self, command: m.Command) -> list[Command]:
        if self._planning is None:
            return [Answer(m.CommandReply(ok=False, text="no trainer is here"))]
        reply, commands = self._planning.command(command.name, command.value)
        return [Answer(reply), *commands]

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
        if self._planning is None:
            return [note, *self._admit_next()]
        return [*self._write(self._records.close()), note, *self._on_left("trainer")]

    def _on_left(self, role: str) -> list[Command]:
        """Trainer and optimizer have both ended the session, in whichever order: room for the next trainer."""
        self._farewells.add(role)
        if self._farewells != {"trainer", "optimizer"}:
            return []
        self._farewells.clear()
        self._before, self._planning = self._planning, None
        return self._admit_next()

    def _admit_next(self) -> list[Command]:
        """The trainer has left: another may join, who perhaps waits already."""
        self._handshake.leave("trainer", 0)
        waiting, self._waiting = self._waiting, None
        return [] if waiting is None else self._on_hello(waiting)

    # ------------------------------------------------------------ records and status

    def _write(self, lines: list[str]) -> list[Command]:
        """Lines for the file, and for monitors those that are the newest record."""
        commands: list[Command] = []
        for line in lines:
            commands.append(Write(line))
            if line == self._records.newest:
                commands.append(Publish(self._status()))
        return commands

    def _status(self) -> m.Status:
        processes = [
            m.Process(role=h.role, rank=h.rank, pid=h.pid, detail=self._handshake.detail(h.role, h.rank))
            for h in self._handshake.joined
        ]
        planning = self._planning
        layers = planning.table.layers if planning is not None else ()
        return m.Status(
            run_name=self._run_name,
            run_dir=self._run_dir,
            record=self._records.newest,
            processes=(m.Process(role="coordinator", rank=0, pid=self._pid, detail="plans and records"), *processes),
            layer_names=tuple(layer.name for layer in layers),
            layer_numels=tuple(layer.numel for layer in layers),
            layer_ranks=tuple(planning.ranks) if planning is not None else (),
            placements=planning.placements if planning is not None else (),
            policy=planning.policy if planning is not None else "",
            reason=planning.reason if planning is not None else "",
        )

    def check(self) -> None:
        self._handshake.check()
        if self._planning is not None:
            self._planning.check()
