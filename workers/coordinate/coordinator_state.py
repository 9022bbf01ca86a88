"""The coordinator's state: a pure state machine, messages and a time in, commands out.

    Hello, Ready, Goodbye ─▶ members: who has joined      LayerTable … ─▶ fleet: one planning per trainer
    TrainerReport + Log of one step ─▶ one record: a line of metrics.jsonl, and the status that monitors get

`workers.coordinate.coordinator` calls it, and owns the sockets, the files and the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from protocol import messages as m
from protocol.address import COORDINATOR, Address
from protocol.placement import Places
from workers.coordinate.fleet import Fleet, Recall, TrainerSeat
from workers.coordinate.members import Members
from workers.coordinate.records import shown
from workers.coordinate.tracing import Tracing
from workers.effects import Abort, Answer, Command, Note, Publish, Send, Write

SAVES_ITSELF: Final = (
    "HyTrain cannot make this program's own loop save: recipes save on command, and so does a loop that "
    "calls opt.checkpoint_requested() after each step"
)


class CoordinatorState:
    """The coordinator of one run: members, fleet, status. `host` is this machine's name, which has so many ranks."""

    def __init__(
        self,
        *,
        run_name: str,
        run_dir: str,
        pid: int,
        host: str,
        replan_every: int,
        ranks: int,
        hang_timeout_s: float = math.inf,
        kept: Mapping[int, Mapping[str, Any]] | None = None,
        traces: bool = False,
        recall: Recall = lambda table: None,
    ) -> None:
        """`kept`: for a coordinator that takes another's place, what that one has kept. `traces`: the whole run.

        `recall`: the last plan of a table, with which its training begins.
        """
        self._run_name, self._run_dir, self._pid, self._host = run_name, run_dir, pid, host
        self.members = Members(ranks=ranks, limit_s=hang_timeout_s)
        self.fleet = Fleet(replan_every=replan_every, recall=recall)
        self._tracing = Tracing(is_on=traces)
        self.no_timeline = ""  # why the newest one could not be written
        self._ranks_here, self._elsewhere = ranks, tuple[m.RankStatus, ...]()
        self._takes_over = kept is not None
        for rank, wishes in (kept or {}).items():
            self.fleet.seat(rank).wishes = wishes

    def admits(self, message: m.Message, sender: Address, connection: str) -> bool:
        """Whether `sender` may send this over `connection`: a worker only over the one that it has joined with."""
        if isinstance(message, m.Hello):
            return message.inbox == connection
        return sender.role == "monitor" or self.members.is_joined(sender, connection)

    def handle(self, message: m.Message, sender: Address, now_s: float) -> list[Command]:
        """Handle `message`. Raises `HandshakeError`, `OwnershipError` or `ValueError` if it is not allowed now."""
        match message:
            case m.Hello():
                return self._on_hello(sender, message)
            case m.Ready():
                self.members.ready(sender, message.detail, message.cores)
                return [Note(f"{sender} is ready: {message.detail}")]
            case m.StatusRequest():
                return [Answer(self._status())]
            case m.Command() if sender.role == "monitor":
                return self._on_command(message)
            case m.Goodbye():
                return self._on_goodbye(sender)
            case m.NodeStatus(ranks=ranks):
                self._elsewhere = ranks
                return []
            case m.Traced():
                return self._tracing.has_drawn(sender)
            case m.Failure():
                return [Note(f"{sender} failed: {message.error}")]
        seat = self.fleet.seat(sender.rank)
        if isinstance(message, m.Rejoin) and message.draws:
            self._tracing.goes_on(sender)
        return self._published(seat, seat.handle(message, sender, now_s))

    def beat(self) -> list[Command]:
        """A second has passed. Ask the workers of each trainer that is ready; say who has not answered for long."""
        stay = [seat.trainer for seat in self.fleet.seats if seat.stays]
        ready = [trainer for trainer in stay if self.members.is_ready(trainer)]
        asked = [address for trainer in ready for address in (trainer, Address("optimizer", trainer.rank))]
        asked = [address for address in asked if self.members.is_ready(address)]  # or else about to join again
        news, hung = self.members.beat(asked)
        ends = [Abort(address, self.members.joined[address].hello.pid) for address in hung]
        pings = [Send(address, self._ping(address)) for address in asked]
        # Ends first: who reads the news may resume a stopped process, which must not be taken for one that hangs.
        return [*ends, *map(Note, news), *pings]

    def _ping(self, worker: Address) -> m.Ping:
        seat = self.fleet.seat(worker.rank)
        status = self._rank(seat) if worker == seat.trainer else None
        is_news = status is not None and status.world > self._ranks_here  # for the first of several machines
        return m.Ping(recorded_s=seat.recorded_s, status=status if is_news else None)

    def lose(self, trainer: Address, inbox: str) -> list[Command]:
        """A trainer is gone without a Goodbye: say it to its optimizer in its place."""
        seat = self.fleet.seat(trainer.rank)
        if not self.members.is_joined(trainer, inbox):  # it has waited, perhaps before another one that waits now
            seat.waiting = None if seat.waiting is not None and seat.waiting.inbox == inbox else seat.waiting
            return [Note(f"{trainer} is gone before its turn")]
        is_known = seat.planning is not None or self._takes_over  # to the optimizer
        told = [Send(Address("optimizer", trainer.rank), m.Goodbye())] if is_known else []
        return [Note(f"{trainer} is gone"), *told, *self._on_goodbye(trainer)]

    def inbox(self, address: Address) -> str:
        """The name of a worker's inbox: a trainer's from its Hello, an optimizer's always the same.

        Raises `KeyError` for a trainer that has not joined.
        """
        return self.members.joined[address].hello.inbox if address.role == "trainer" else str(address)

    def _on_command(self, command: m.Command) -> list[Command]:
        """Give a command to all trainers, up to the first refusal."""
        replies, commands = [m.CommandReply(ok=False, text="there is no trainer")], list[Command]()
        for seat in self.fleet.seats:
            if seat.planning is None and self.members.is_ready(seat.trainer):
                text = f"{seat.trainer} gets a new coordinator after its next step: try again then"
                return [Answer(m.CommandReply(ok=False, text=text))]
        if command.name in ORDERS and self.fleet.taken:
            reply, commands = ORDERS[command.name](self, command.value)
            replies.append(reply)
        elif (refusal := self._too_many(command)) is not None:
            replies.append(m.CommandReply(ok=False, text=refusal))
        else:
            for seat in self.fleet.taken:
                reply, more = seat.command(command.name, command.value)
                replies.append(reply)
                commands += more
                if not reply.ok:
                    break
        reply = replies[-1]
        if reply.ok and self._elsewhere:
            reply = replace(reply, text=f"{reply.text}, on this machine: give the command on each of the others, too")
        return [Answer(reply), *commands]

    def _too_many(self, command: m.Command) -> str | None:
        """What is said of more threads than an optimizer has cores."""
        known = [self.members.cores(Address("optimizer", seat.trainer.rank)) for seat in self.fleet.taken]
        most = min((cores for cores in known if cores), default=0)
        if command.name != "threads" or not command.value.isdecimal() or not 0 < most < int(command.value[:9]):
            return None
        return f"threads is {command.value[:9]}: at most {most}, one per core of the optimizer"

    def _trace(self, value: str) -> tuple[m.CommandReply, list[Command]]:
        try:
            told, commands = self._tracing.command(value, [seat.trainer for seat in self.fleet.taken if seat.stays])
        except ValueError as error:
            return m.CommandReply(ok=False, text=str(error)), []
        return m.CommandReply(ok=True, text=told), commands

    def _save(self, value: str) -> tuple[m.CommandReply, list[Command]]:
        if any(seat.saves is None for seat in self.fleet.taken):
            return m.CommandReply(ok=False, text="no step has ended yet: try again then"), []
        if not all(seat.saves for seat in self.fleet.taken):
            return m.CommandReply(ok=False, text=SAVES_ITSELF), []
        told: list[Command] = [Send(seat.trainer, m.SaveCheckpoint()) for seat in self.fleet.taken if seat.stays]
        return m.CommandReply(ok=True, text="a checkpoint is saved after one of the next steps"), told

    def _on_hello(self, sender: Address, hello: m.Hello) -> list[Command]:
        if self.members.is_joined(sender, hello.inbox):
            return []  # asked twice, it answers twice
        if sender.role == "trainer" and sender in self.members.joined:
            self.fleet.seat(sender.rank).waiting = hello
            return [Note(f"another {sender} waits until the current one has left")]
        self.members.join(sender, hello)
        return [Send(sender, m.Welcome(coordinator_pid=self._pid))]

    def _on_goodbye(self, sender: Address) -> list[Command]:
        note, seat = Note(f"{sender} says goodbye"), self.fleet.seat(sender.rank)
        if sender != seat.trainer:
            return [note, *self._on_end(seat, sender)]
        if seat.planning is None:
            return [note, *self._admit_next(seat)]
        return [*self._published(seat, [*seat.records.close()]), note, *self._on_end(seat, sender)]

    def _on_end(self, seat: TrainerSeat, sender: Address) -> list[Command]:
        drawn = self._tracing.has_left(sender)
        if not seat.ends(sender.role):
            return drawn
        if not self.fleet.taken:
            self._elsewhere = ()
        return [*drawn, *self._admit_next(seat)]

    def _admit_next(self, seat: TrainerSeat) -> list[Command]:
        """The trainer has left. Another may join, perhaps one that is already waiting."""
        self.members.leave(seat.trainer)
        waiting, seat.waiting = seat.waiting, None
        return [] if waiting is None else self._on_hello(seat.trainer, waiting)

    def _published(self, seat: TrainerSeat, commands: list[Command]) -> list[Command]:
        """The commands, with a status for monitors after each record of the shown trainer."""
        if seat is not self.fleet.shown:
            return commands
        found: list[Command] = []
        for command in commands:
            found.append(command)
            if isinstance(command, Write):
                found.append(Publish(replace(self._status(), record=shown(command.line))))
        return found

    def _status(self) -> m.Status:
        """The run's processes, and the first trainer's layers and newest record."""
        processes = [
            m.Process(
                address=address,
                pid=member.hello.pid,
                detail=self.members.detail(address),
                silent_s=member.silent_s,
                writing=member.pong.writing,
                writing_s=member.pong.writing_s,
            )
            for address, member in self.members.joined.items()
        ]
        planning = self.fleet.shown.planning
        layers = planning.table.layers if planning is not None else ()
        planes = planning.room.by_plane(planning.places) if planning is not None else ({}, {})
        return m.Status(
            run_name=self._run_name,
            run_dir=self._run_dir,
            record=shown(self.fleet.shown.records.newest),
            processes=(m.Process(address=COORDINATOR, pid=self._pid, detail="plans and records"), *processes),
            layer_names=tuple(layer.name for layer in layers),
            layer_numels=tuple(layer.numel for layer in layers),
            layer_positions=tuple(planning.positions) if planning is not None else (),
            places=planning.places if planning is not None else Places(()),
            host_planes=planes[0],
            device_planes=planes[1],
            plan=planning.plan if planning is not None else None,
            policy=planning.wishes.policy if planning is not None else "",
            reason=planning.told if planning is not None else "",
            ranks=self._ranks(),
            no_timeline=self.no_timeline,
        )

    def _ranks(self) -> tuple[m.RankStatus, ...]:
        found = [status for seat in self.fleet.taken if (status := self._rank(seat)) is not None]
        known = {status.rank: status for status in (*self._elsewhere, *found)} if found else {}
        return tuple(status for _, status in sorted(known.items()))

    def _rank(self, seat: TrainerSeat) -> m.RankStatus | None:
        return seat.status(self._host, self.members.detail(Address("optimizer", seat.trainer.rank)))

    def check(self) -> None:
        self.fleet.check()
        self._tracing.check()


#: The commands that change no plan. The others are `planning.COMMANDS`.
ORDERS: Final[dict[str, Callable[[CoordinatorState, str], tuple[m.CommandReply, list[Command]]]]] = {
    "trace": CoordinatorState._trace,
    "checkpoint": CoordinatorState._save,
}
