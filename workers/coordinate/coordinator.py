"""The coordinator process: the I/O around `coordinator_state`.

    inbox ─▶ CoordinatorState.handle ─▶ Send, Answer, Write, Publish, Note … ─▶ sockets, metrics.jsonl, log
                                                                                  └─▶ timeline, if it is drawn

It sleeps until its inbox has a message or a second has passed, and exits when the launcher is gone. A trainer that is
gone without a Goodbye leaves its place to another, as when torchrun starts failed ranks again.

If this process dies, the launcher starts another one, which asks all workers to introduce themselves. They know
everything that it has to know, but for the commands of monitors, which are kept in the socket folder.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final

import psutil

from hytrain.kernels.build import cpu
from hytrain.run.trace import EVERY_STEP, NO_STEP, TraceWriter, clear, merge
from protocol import messages as m
from protocol.address import COORDINATOR, Address
from protocol.channel import Inbox, Incoming, Network, Outbox, PeerDied, PeerNotReading, Publisher
from protocol.quiet import rate_limited
from workers.coordinate.coordinator_state import CoordinatorState
from workers.coordinate.fleet import Fleet
from workers.coordinate.gauges import Gauges
from workers.coordinate.last_plans import LastPlans
from workers.coordinate.members import BEAT_S, HandshakeError
from workers.coordinate.metrics_file import MetricsFile
from workers.effects import Abort, Amend, Answer, Command, Draw, Keep, Note, Publish, Remember, Send, Write
from workers.run_folder import metrics_file
from workers.worker import begin_worker, say_ready

#: How long to wait at the end for messages that were already sent: by a trainer that has not said Goodbye, and by the
#: optimizer, whose last report comes after the weights that the trainer waited for.
LAST_WORDS_S: Final = 1.0
LAST_REPORT_S: Final = 0.05
#: In the socket folder, for each rank: what the commands of monitors have come to.
WISHES: Final = "wishes-{}.json"

_log, _dropped = logging.getLogger("coordinator"), rate_limited("coordinator.dropped")


def main() -> int:
    """Run until the launcher is gone; return the process's exit status."""
    arguments = begin_worker(__doc__)
    kept = read_kept(Path(arguments.socket_dir)) if arguments.again else None
    place = f"{arguments.cores} {arguments.threads} {os.cpu_count()}"  # of updates
    last_plans = LastPlans(arguments.plans, b"\0".join((place.encode(), cpu())))
    state = CoordinatorState(
        run_name=arguments.run_name,
        run_dir=arguments.run_dir,
        pid=os.getpid(),
        host=socket.gethostname(),
        replan_every=arguments.replan_every,
        ranks=arguments.ranks,
        hang_timeout_s=arguments.hang_timeout_s,
        kept=kept,
        traces=arguments.trace,
        recall=last_plans.take,
    )
    with Network(arguments.socket_dir, token=arguments.token, address=COORDINATOR) as network:
        trace = TraceWriter(arguments.run_dir, COORDINATOR, EVERY_STEP if arguments.trace else NO_STEP)
        coordinator = Coordinator(network, state, Path(arguments.run_dir), trace, last_plans, life_fd=arguments.life_fd)
        say_ready(arguments.ready_fd)
        if arguments.again:
            coordinator.ask_all()
        status = coordinator.run()
    shutil.rmtree(arguments.socket_dir, ignore_errors=True)  # the launcher removes it too, unless it was killed
    return status


def read_kept(folder: Path) -> dict[int, dict[str, Any]]:
    """What a coordinator of this run has kept, by rank."""
    found = {}
    for path in folder.glob(WISHES.format("*")):
        try:
            found[int(path.stem.partition("-")[2])] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            _log.warning("commands that were given are lost: %s", error)
    return {rank: wishes for rank, wishes in found.items() if wishes is not None}


class Coordinator:
    """Carries out the commands that the state returns."""

    def __init__(
        self,
        network: Network,
        state: CoordinatorState,
        folder: Path,
        trace: TraceWriter,
        last_plans: LastPlans,
        *,
        life_fd: int,
    ) -> None:
        self._network, self._state, self._folder, self._trace = network, state, folder, trace
        self._last_plans = last_plans
        self._metrics: dict[int, MetricsFile] = {}  # by rank
        self._failing = set[int]()  # the ranks whose records cannot be written
        self._write(0, lambda file: None)
        self._inbox = Inbox(network)
        self._inbox.watch_descriptor("the launcher", life_fd)
        self._publisher = Publisher(network)
        self._gauges = Gauges()
        self._writing_trace = Lock()
        self._asked = dict[str, Address]()  # to introduce themselves, by the names of their inboxes
        self._attempts = self._beats = 0
        self._outboxes: dict[str, tuple[Address, Outbox]] = {}  # by the names of the inboxes
        self._trainers: dict[str, Address] = {}  # by the names of their connections

    def ask_all(self) -> None:
        """Ask whoever has an inbox to introduce itself, as to a coordinator that it does not know yet."""
        for role in ("optimizer", "trainer"):
            for path in sorted(Path(self._network.socket_dir).glob(f"{role}-*")):
                rank = path.name.split("-")[1]
                if path.is_socket() and rank.isdecimal():
                    self._asked[path.name] = Address(role, int(rank))
        self._ask()

    def _ask(self) -> None:
        """Ask those who have not answered, over a new connection each time.

        An inbox ignores a connection that begins before it has been read to the end of the one before, for good.
        """
        self._attempts += 1
        if self._asked:
            _log.info("asks %s, attempt %d", ", ".join(self._asked), self._attempts)
        for inbox, address in self._asked.items():
            self._disconnect(inbox)
            self._outboxes[inbox] = address, self._network.outbox(inbox)
            self._outboxes[inbox][1].send(m.Introduce(coordinator_pid=os.getpid(), attempt=self._attempts))

    def run(self) -> int:
        """Handle messages until the launcher is gone."""
        beat_s = time.monotonic() + BEAT_S
        while True:
            if time.monotonic() >= beat_s:
                self._beat()
                beat_s = time.monotonic() + BEAT_S
            try:
                incoming = self._inbox.receive(max(beat_s - time.monotonic(), 0.0))
            except PeerDied as death:
                self._inbox.unwatch(death.name)
                if (trainer := self._trainers.pop(death.name, None)) is not None:
                    self._lose(trainer, death.name)
                    continue
                _log.info("%s is gone, exiting", death.name)
                self._finish()
                return 0
            if incoming is not None:
                self._handle(incoming)

    def _beat(self) -> None:
        self._write_late()  # first: the trainer is told below what is recorded, and forgets it
        self._beats += 1
        if self._beats.bit_count() == 1:  # after 1, 2, 4, 8 … beats: a busy machine's answer may take longer than one
            self._ask()
        for address, outbox in self._outboxes.values():
            while (answer := outbox.receive(0.0)) is not None:
                if isinstance(answer, m.Pong):
                    self._state.members.answered(address, answer)
        for command in self._state.beat():
            self._carry_out(command)
        gpus = {seat.trainer: seat.planning.table.gpu for seat in self._state.fleet.taken if seat.planning is not None}
        read = self._gauges.read(gpus.values(), time.monotonic()) if gpus else {}
        for seat in self._state.fleet.taken:
            seat.gauges = read[gpus[seat.trainer]]

    def _finish(self) -> None:
        """Handle the messages that were sent before the end: the last records."""
        for name in self._trainers:  # nobody takes their places any more
            self._inbox.unwatch(name)
        while (incoming := self._inbox.receive(self._patience_s())) is not None:
            self._handle(incoming)
        for name, trainer in list(self._trainers.items()):  # whose Goodbye is late: their records are whole without it
            self._lose(trainer, name)
        self._write_late()
        self._trace.close()

    def _patience_s(self) -> float:
        trains = any(to.role == "trainer" for to, _ in self._outboxes.values())
        return LAST_WORDS_S if trains else LAST_REPORT_S

    def _handle(self, incoming: Incoming) -> None:
        now_s = time.monotonic()
        if isinstance(incoming.message, m.Hello) and incoming.sender in self._asked:
            if incoming.message.attempt != self._attempts:
                return  # it has heard an earlier connection, and perhaps not this one
            del self._asked[incoming.sender]
        if not self._state.admits(incoming.message, incoming.address, incoming.sender):
            if isinstance(incoming.message, m.Goodbye) and incoming.sender in self._trainers:
                self._inbox.unwatch(incoming.sender)  # it has waited, and waits no longer
                self._lose(self._trainers.pop(incoming.sender), incoming.sender)
            else:
                kind = type(incoming.message).__name__
                _dropped.warning("dropped %s of %s over connection %s", kind, incoming.address, incoming.sender)
            return
        try:
            commands = self._state.handle(incoming.message, incoming.address, now_s)
        except HandshakeError as error:
            _dropped.warning("refused %s: %s", incoming.address, error)
            return
        is_leaving = isinstance(incoming.message, m.Goodbye) and incoming.address.role == "trainer"
        if is_leaving and self._trainers.pop(incoming.sender, None) is not None:
            self._inbox.unwatch(incoming.sender)
        for command in commands:
            if isinstance(command, Answer):
                self._inbox.reply(incoming.sender, command.message)
            else:
                self._carry_out(command)
        if is_leaving:
            self._write_late()
            if (known := self._outboxes.get(incoming.sender)) is not None:
                with suppress(PeerNotReading):
                    known[1].send(m.Goodbye())  # its records are whole
            self._disconnect(incoming.sender)
        if self._trace.is_on:
            _draw(self._trace, self._state.fleet, incoming, commands, now_s)
        if isinstance(incoming.message, m.Hello) and incoming.address.role == "trainer":
            self._watch(incoming.address, incoming.sender, incoming.message.pid)

    def _watch(self, trainer: Address, name: str, pid: int) -> None:
        self._inbox.unwatch(name)  # if it says Hello again
        try:
            self._inbox.watch(name, pid)
        except PeerDied:
            self._lose(trainer, name)
        else:
            self._trainers[name] = trainer

    def _lose(self, trainer: Address, name: str) -> None:
        """This trainer, or one that waits for its place, has died without a Goodbye."""
        if self._state.admits(m.Goodbye(), trainer, name):  # or else it has waited
            self._disconnect(name)
        for command in self._state.lose(trainer, name):
            self._carry_out(command)

    def _disconnect(self, inbox: str) -> None:
        """Nobody reads this inbox any more."""
        if known := self._outboxes.pop(inbox, None):
            self._network.drop(known[1])

    def _carry_out(self, command: Command) -> None:
        match command:
            case Send(to, message):
                inbox = self._state.inbox(to)
                if inbox not in self._outboxes:
                    self._outboxes[inbox] = to, self._network.outbox(inbox)
                with suppress(PeerNotReading) if isinstance(message, m.Ping) else nullcontext():
                    self._outboxes[inbox][1].send(message)
            case Write(line, rank):
                if self._write(rank, lambda file: file.append(line)):
                    self._failing.discard(rank)
            case Amend(step, numbers, rank):
                self._write(rank, lambda file: file.amend(step, numbers))
            case Publish(status):
                self._publisher.send(status)
            case Note(text):
                _log.info("%s", text)
            case Abort(worker, pid):
                self._abort(worker, pid)
            case Keep(rank, wishes):
                self._keep(rank, wishes)
            case Remember(table, places, shares):
                self._last_plans.keep(table, places, shares)
            case Draw(begins=True):
                self._state.no_timeline = ""
                clear(self._folder)
                self._trace.begin(EVERY_STEP)
            case Draw():
                self._trace.begin(NO_STEP)
                Thread(target=self._write_trace, name="trace", daemon=True).start()

    def _write(self, rank: int, act: Callable[[MetricsFile], object]) -> bool:
        """Have a rank's records changed. A disk that is full costs records, which are counted, but not the training."""
        try:
            if rank not in self._metrics:
                self._metrics[rank] = MetricsFile(metrics_file(self._folder, rank))
            act(self._metrics[rank])
        except OSError as error:
            if rank not in self._failing:
                _log.warning("records of rank %d cannot be written, training goes on: %s", rank, error)
            self._failing.add(rank)
            return False
        return True

    def _write_late(self) -> None:
        """Add numbers that came late to the records."""

        def write(file: MetricsFile) -> None:
            if steps := file.write_late():
                many, first = len(steps), min(steps)
                _log.warning("dropped the late numbers of %d steps, from %d on: they have no records", many, first)

        for rank in self._metrics:
            self._write(rank, write)

    def _write_trace(self) -> None:
        """On a thread: it may take seconds. The launcher does it again at the end of the run."""
        try:
            with self._writing_trace:
                merge(self._folder)
        except OSError as error:
            self._state.no_timeline = str(error)
            _log.warning("no timeline: %s", error)

    def _keep(self, rank: int, wishes: Mapping[str, Any] | None) -> None:
        path = Path(self._network.socket_dir) / WISHES.format(rank)
        try:
            path.with_suffix(".tmp").write_text(json.dumps(wishes))
            path.with_suffix(".tmp").replace(path)
        except OSError as error:
            _log.warning("another coordinator would not know the commands that were given: %s", error)

    def _abort(self, worker: Address, pid: int) -> None:
        """End a worker that has hung, and with it the run: an optimizer, or a trainer that the launcher has started.

        A trainer that somebody has stopped, with Ctrl-Z or a debugger, may go on later.
        """
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if worker.role == "trainer" and (
                os.getppid() not in {parent.pid for parent in process.parents()}
                or process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            ):
                return
            silent_s = self._state.members.joined[worker].silent_s
            _log.error("%s (process %d) has not answered for %.0f s: it is ended", worker, pid, silent_s)
            process.send_signal(signal.SIGABRT)  # its log gets its stack
            process.resume()


def _draw(trace: TraceWriter, fleet: Fleet, incoming: Incoming, commands: Sequence[Command], now_s: float) -> None:
    """Add a message and its commands to the timeline: rates, steps, and plans proposed and in effect."""
    message, rank = incoming.message, incoming.address.rank
    has_rates = fleet.taken if Draw(begins=True) in commands else []
    for seat in [fleet.seat(rank)] if isinstance(message, m.Calibration) else has_rates:
        trace.instant("plans", f"rates of {seat.trainer}", now_s, **seat.rates())
    whose = f" of trainer-{rank}" if rank else ""
    for command in commands:
        if isinstance(command, Send) and command.to.role == "trainer" and isinstance(plan := command.message, m.Plan):
            facts = {name: getattr(plan, name) for name in ("k", "reason", "policy", "predicted_step_s")}
            facts |= {"step": plan.step, "placements": plan.places.names}
            trace.instant("plans", f"plan {plan.plan_id}{whose} proposed", now_s, **facts)
    match message:
        case m.PlanApplied():
            facts = {name: getattr(message, name) for name in ("step", "moved", "handover_s")}
            facts["placements"] = message.places.names
            trace.instant("plans", f"plan {message.plan_id}{whose} in effect", now_s, **facts)
        case m.TrainerReport():
            trace.counter(f"k{whose}", message.at_s, k=message.k)
            trace.counter(f"step, ms{whose}", message.at_s, step=message.step_s * 1e3, stall=message.stall_s * 1e3)
            trace.flush()


if __name__ == "__main__":
    sys.exit(main())
