"""The trainer's two I/O threads, so that forward and backward do not wait for messages or copies out.

    sender     post() ──queue──▶ wait for the copy's event, if one is given ──▶ the listener's on_departure ──▶ outbox
    receiver   inbox, deaths ──▶ the listener's on_message, on_failure
    logs       of one step ──▶ one message, before the next one to the coordinator or when that pings

Each socket belongs to one thread, which closes it at its end; the last one closes ZeroMQ's context. The garbage
collector must not: it would wait in whatever thread it runs for sockets that are still open. The sender waits for a
copy before it sends the message posted with it, so a GradReady never overtakes its gradient. Messages leave in the
order in which they are posted.

If the coordinator dies, training goes on. Another one introduces itself, and gets, with `rejoin`, what the first one
knew: reports and logs are kept until they are recorded. At the end, `leave` waits until all are.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, TypeVar

from hytrain.config import Cluster
from hytrain.errors import ClusterError, ClusterTimeout, ConfigError, HyTrainError, WorkerDied
from hytrain.memory.arena import ArenaFile, arena_socket, receive_arena
from hytrain.memory.transfer import Transfer
from hytrain.run.cluster import PrivateCluster, await_end, has_ended
from hytrain.run.ownership import PlanBook
from hytrain.run.seats import Seat
from hytrain.state import manifest
from protocol.address import COORDINATOR, Address
from protocol.channel import Inbox, Incoming, Network, Outbox, PeerDied, PeerNotReading
from protocol.handles import ArenaLayout
from protocol.messages import (
    Calibration,
    Failure,
    Goodbye,
    Hello,
    Introduce,
    LayerTable,
    Log,
    Message,
    Ping,
    Plan,
    PlanesRefused,
    Pong,
    PositionsLearned,
    Ready,
    Reassign,
    Rejoin,
    TrainerReport,
    Welcome,
)
from protocol.placement import Places

#: At the end, copies that are under way end, and the last words are delivered. Only a hang takes longer.
CLOSE_TIMEOUT_S: Final = 60.0
#: The coordinator is heard at least once a second. After this long without it, it is called silent.
SILENCE_S: Final = 4.0
LOOK_S: Final = 1.0
THREAD_PREFIX: Final = "hytrain-link-"

_COORDINATOR: Final = "the coordinator process"
#: So many reports and logs are kept while nobody records them; then the oldest ones go.
KEPT: Final = 100_000
#: A message has a step's numbers up to so many bytes. More follow in another one.
LOG_BYTES: Final = 4 << 20
#: What a number takes, beside its name.
NUMBER_BYTES: Final = 16
RETRY_S: Final = 0.05
#: Another coordinator is there after a second, on a busy machine later.
START_TIMEOUT_S: Final = 60.0
#: At the end, what was said last is delivered within this time to those who live. A busy machine may need more than an
#: instant; who has been stopped may go on.
LINGER_S: Final = 10.0
#: An optimizer that has failed says so, and ends. Only a hang takes longer.
FAILED_END_S: Final = 60.0

_log = logging.getLogger(__name__)
M = TypeVar("M", Welcome, Plan, Reassign)


class Draft:
    """Posted in place of a message whose content is known only after a copy has finished."""

    __slots__ = ()


class _Asked(Exception):
    """Another coordinator has taken the place of the one that was to answer."""

    def __init__(self, asked: Introduce) -> None:
        super().__init__("the coordinator died and was replaced")
        self.by = asked


class Listener(Protocol):
    """Receives the link's events, on the link's threads."""

    def on_departure(self, draft: Draft) -> Message:
        """The draft's copy has finished: return the message to send."""

    def on_message(self, message: Message) -> None: ...

    def on_failure(self, error: HyTrainError) -> None: ...

    @property
    def steps(self) -> int:
        """How many steps have been trained."""
        ...

    @property
    def waits_for(self) -> str:
        """What training waits for, in words; empty if it does not wait."""
        ...


@dataclass(frozen=True, slots=True)
class _Job:
    to: str
    what: Message | Draft
    after: Transfer | None


class Link:
    """The trainer's connection to optimizer and coordinator. `join` it, `agree`, `start`, `post`, `leave`, `close`."""

    def __init__(self, place: PrivateCluster | Seat, *, timeout_s: float) -> None:
        """`place` is the trainer's place in its cluster."""
        self._place, self._timeout_s = place, timeout_s
        cluster, rank = place.cluster, place.rank
        self._cluster = cluster
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # The name is unique: a second optimizer in this process must not receive messages meant for the first.
        self.address: Final = Address("trainer", rank)
        self.name: Final = f"{self.address}-{secrets.token_hex(4)}"
        self._outboxes: dict[str, Outbox] = {}
        self._arenas = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._network = Network(cluster.socket_dir, token=cluster.token, address=self.address, name=self.name)
        try:
            self._inbox: Inbox = self._network.inbox()
            self._stop_read, self._stop_write = os.pipe()
        except BaseException:
            self._network.close()
            self._arenas.close()
            raise
        self._inbox.admit(str(COORDINATOR), str(Address("optimizer", rank)))
        self._threads: dict[str, threading.Thread] = {}
        self._closed = False
        self.coordinator_pid = cluster.coordinator_pid
        self._has_coordinator = self._is_known = False  # and it knows us
        self._hello: Hello | None = None
        self._ready: Ready | None = None
        self._introduction: Callable[..., Rejoin] = Rejoin  # with what the coordinator was told
        self._positions: PositionsLearned | None = None
        self._keeping = threading.Lock()
        self._unrecorded: deque[TrainerReport | Log] = deque(maxlen=KEPT)
        self._recorded_s = -math.inf
        self._log: Log | None = None  # the numbers of a step that have not been sent yet
        self._log_bytes = 0
        self._told = 0  # the coordinator that has our Goodbye
        self._dismissed = threading.Event()  # it has recorded everything
        self._unsent = 0  # messages that the coordinator did not read in time
        #: Another coordinator wants to know what the first one knew.
        self.is_asked = False

    def join(self) -> None:
        """Shake hands with the coordinator. Raises `ClusterError` if it or the optimizer is dead, or on a timeout."""
        try:
            self._inbox.watch("the optimizer process", self._cluster.optimizer_pids[self.address.rank])
            self._watch_coordinator()
            peers = {"optimizer": Address("optimizer", self.address.rank), "coordinator": COORDINATOR}
            self._outboxes = {role: self._network.outbox(to, linger_s=LINGER_S) for role, to in peers.items()}
            self._hello = Hello(pid=self._pid, inbox=self.name)
            self._outboxes["coordinator"].send(self._hello)
            self._await_welcome()
            self._is_known = True
        except PeerDied as death:
            raise self._worker_died(death) from None

    def agree(self, table: LayerTable, calibration: Calibration, book: PlanBook) -> Plan:
        """Send the layer table and the calibration, and agree in `book` on the first plan."""
        try:
            self._arenas.settimeout(self._timeout_s)
            self._arenas.connect(arena_socket(self._cluster.socket_dir, self.address.rank))
        except OSError as error:
            raise ClusterError(f"cannot reach the optimizer process: {error}") from None
        try:
            self._outboxes["coordinator"].send(table)
            self._outboxes["coordinator"].send(calibration)
            self._introduction = partial(Rejoin, table=table, calibration=calibration)
            plan = self._expect(Plan)
            self._outboxes["coordinator"].send(book.on_plan(plan))
            book.on_reassign(self._expect(Reassign))
        except PeerDied as death:
            raise self._worker_died(death) from None
        except _Asked as asked:
            raise ClusterError(f"{asked} while the first plan was agreed on") from None
        return plan

    def _watch_coordinator(self) -> None:
        """Raises `PeerDied` if there is none. If one has just died, the launcher starts another one."""
        ends_s = time.monotonic() + START_TIMEOUT_S
        while not self._has_coordinator:
            with contextlib.suppress(ConfigError):
                self.coordinator_pid = Cluster.read(self._cluster.socket_dir).coordinator_pid
            try:
                self._inbox.watch(_COORDINATOR, self.coordinator_pid)
                self._has_coordinator = True
            except PeerDied:
                if time.monotonic() >= ends_s or has_ended(self._cluster.launcher_pid):
                    raise
                time.sleep(RETRY_S)

    def _await_welcome(self) -> None:
        """Another coordinator, if this one dies, has not got the Hello."""
        while True:
            try:
                self._expect(Welcome)
                return
            except PeerDied as death:
                if death.name != _COORDINATOR:
                    raise
                self._lose_coordinator()
            except _Asked as asked:
                self._outboxes["coordinator"].send(self._find_coordinator(asked.by))

    def _worker_died(self, noticed: PeerDied, way_on: str = "") -> WorkerDied:
        """The error that says who died first, and how, where that can be found out."""
        try:
            first = self._place.first_death() if self._ends_the_run(noticed) else ""
        except Exception:  # what was noticed must be told, whatever the launcher said
            first = ""
        first += ", as the kernel does when memory runs out" if "SIGKILL" in first else ""
        return WorkerDied(f"{first or noticed}; its log is in {self._cluster.run_dir}/logs{way_on}")

    def _ends_the_run(self, death: PeerDied) -> bool:
        """Whether the launcher ends after this death. In the place of a coordinator, it starts another one."""
        ends_s = time.monotonic() + START_TIMEOUT_S
        while death.name == _COORDINATOR and not has_ended(self._cluster.launcher_pid):
            with contextlib.suppress(ConfigError):
                if Cluster.read(self._cluster.socket_dir).coordinator_pid != self.coordinator_pid:
                    return False
            if time.monotonic() >= ends_s:
                return False
            time.sleep(RETRY_S)
        return True

    def _failure(self, incoming: Incoming, failure: Failure) -> str:
        """A worker's failure as text. An optimizer ends after it, and is waited for.

        Who ends because of it must not end before it: the launcher looks which of its processes has ended.
        """
        if incoming.address.role == "optimizer":
            self._await_optimizer()
        return describe_failure(incoming.address, failure)

    def _await_optimizer(self) -> None:
        await_end(self._cluster.optimizer_pids[self.address.rank], FAILED_END_S)

    def _expect(self, kind: type[M]) -> M:
        """The next message, which must be a `kind`. Raises `ClusterError` if it is not, or if it reports a failure."""
        incoming = self._inbox.receive(self._timeout_s)
        if incoming is None:
            raise ClusterTimeout(f"no {kind.__name__} from the coordinator within {self._timeout_s:.0f} s")
        if isinstance(incoming.message, Introduce):
            raise _Asked(incoming.message)
        if isinstance(incoming.message, Failure):
            raise ClusterError(self._failure(incoming, incoming.message))
        if not isinstance(incoming.message, kind):
            raise ClusterError(f"expected {kind.__name__}, got {type(incoming.message).__name__}")
        return incoming.message

    def start(self, listener: Listener) -> None:
        """Start the threads. From now on, messages reach `listener`."""
        self._inbox.watch_descriptor("stop", self._stop_read, last_words_s=0.0)
        for name, run in (("sender", self._send), ("receiver", self._receive)):
            thread = threading.Thread(target=run, args=(listener,), name=THREAD_PREFIX + name, daemon=True)
            thread.start()
            self._threads[name] = thread

    def ready(self, detail: str) -> None:
        """Tell the coordinator that construction has succeeded."""
        self._ready = Ready(detail=detail)
        self.post("coordinator", self._ready)

    def post(self, to: str, what: Message | Draft, *, after: Transfer | None = None) -> None:
        """Send a message to role `to` once `after` has finished. A draft is turned into one by `on_departure`."""
        if to == "coordinator":
            self._send_log()
        if isinstance(what, TrainerReport):
            self._keep(what)
        elif isinstance(what, PositionsLearned):
            self._positions = what
        self._jobs.put(_Job(to, what, after))

    def log(self, log: Log) -> None:
        """Tell the coordinator the loop's numbers, those of one step together. The caller hands `log` over.

        A loop may log each number by itself, and thousands of them in a step.
        """
        nbytes = log_bytes(log.numbers)
        with self._keeping:
            known = self._log
            if known is not None and log.renames is None and (known.step, known.ahead) == (log.step, log.ahead):
                if self._log_bytes + nbytes <= LOG_BYTES:
                    for name, number in log.numbers.items():
                        if log.ahead or name not in known.numbers:  # as `coordinate.records` takes them
                            known.numbers[name] = number
                    self._log_bytes += nbytes
                    return
            self._post_log()
            self._log, self._log_bytes = log, nbytes

    def _send_log(self) -> None:
        with self._keeping:
            self._post_log()

    def _post_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            self._unrecorded.append(log)
            self._jobs.put(_Job("coordinator", log, None))

    def _keep(self, report: TrainerReport) -> None:
        """Keep a report until it is recorded. Logs are kept until the next report is."""
        with self._keeping:
            self._unrecorded.append(report)
            while (first := self._first_report()) is not None and first.at_s <= self._recorded_s:
                while self._unrecorded.popleft() is not first:
                    pass

    def _first_report(self) -> TrainerReport | None:
        return next((message for message in self._unrecorded if isinstance(message, TrainerReport)), None)

    def rejoin(
        self, *, plan: Plan, holds: bool, places: Places, step: int, moved: int, skipped: int, draws: bool
    ) -> None:
        """Tell another coordinator what the first one knew, between two steps. The arguments are `Rejoin`'s."""
        self.is_asked = False
        rejoin = self._introduction(
            plan=plan, holds=holds, places=places, step=step, moved=moved, skipped=skipped, draws=draws
        )
        with self._keeping:
            for message in (rejoin, self._positions, *self._unrecorded):
                if message is not None:
                    self._jobs.put(_Job("coordinator", message, None))

    def leave(self, rejoin: Callable[[], None]) -> None:
        """Say Goodbye to the coordinator, and return once it has recorded everything, and said Goodbye, too.

        If it dies before, another one is waited for, as long as there is somebody to start one; `rejoin` tells that
        one everything.
        """
        seen: object = None
        ends_s = math.inf
        while not self._dismissed.wait(RETRY_S if seen else 0.0):
            dead, now_s = has_ended(self.coordinator_pid) or not self._is_known, time.monotonic()
            if not dead and (self._told != self.coordinator_pid or self.is_asked):
                rejoin()
                self._told = self.coordinator_pid
                self.post("coordinator", Goodbye())
            if seen != (seen := (dead, self.coordinator_pid, self._recorded_s)):
                ends_s = now_s + (START_TIMEOUT_S if dead else LINGER_S)
            if now_s >= ends_s or (dead and has_ended(self._cluster.launcher_pid)):
                with self._keeping:
                    reports = [message for message in self._unrecorded if isinstance(message, TrainerReport)]
                lost = sum(report.at_s > self._recorded_s for report in reports)
                who = "there is no other coordinator yet" if dead else "the coordinator does not answer"
                _log.warning("%s: the records of up to %d steps are lost", who, lost)
                return

    def receive_arena(self, layouts: dict[int, ArenaLayout]) -> ArenaFile | PlanesRefused:
        """The next arena from the optimizer, or why there is none for a layer.

        Raises `ClusterError` if nothing comes, or if it does not match.
        """
        try:
            return receive_arena(self._arenas, layouts, token=self._cluster.token)
        except TimeoutError:
            raise ClusterTimeout(f"no arena from the optimizer within {self._timeout_s:.0f} s") from None
        except (EOFError, OSError, ValueError) as error:
            if isinstance(error, EOFError | ConnectionError) and not self._closed:
                self._await_optimizer()  # its end of the connection closes before its own end can be seen
            raise ClusterError(f"the optimizer process sent no arena: {error}") from None

    def close(self, release: Callable[[], None] = lambda: None) -> None:
        """Say goodbye and stop the threads, then `release` the memory that their copies use.

        Does nothing in a forked child: the link belongs to the parent.
        """
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        for role, outbox in self._outboxes.items():
            if "sender" in self._threads:
                if role != "coordinator" or self._told != self.coordinator_pid:
                    self.post(role, Goodbye())
            else:  # construction has failed before
                outbox.send(Goodbye())
        self._jobs.put(None)
        with contextlib.suppress(BrokenPipeError):  # the receiver has ended already
            os.write(self._stop_write, b"stop")  # close() alone wakes nobody while a forked child holds the pipe
        os.close(self._stop_write)
        if "sender" not in self._threads:
            self._leave_outboxes()
        if "receiver" not in self._threads:
            os.close(self._stop_read)  # otherwise the inbox closes it
            self._network.leave([self._inbox])
        ends_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads.values():
            thread.join(max(ends_s - time.monotonic(), 0.0))
        with contextlib.suppress(OSError):
            self._arenas.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an arena
        self._arenas.close()
        hang = [thread for thread in self._threads.values() if thread.is_alive()]
        if not hang:
            return release()

        def follow() -> None:
            for thread in hang:
                thread.join()
            release()

        _log.error("%s hangs in a copy or a call, and keeps memory until that ends", " and ".join(t.name for t in hang))
        threading.Thread(target=follow, name=THREAD_PREFIX + "end", daemon=True).start()

    def _leave_outboxes(self) -> None:
        pids = {"optimizer": self._cluster.optimizer_pids[self.address.rank], "coordinator": self.coordinator_pid}
        for role, outbox in self._outboxes.items():
            if has_ended(pids[role]) or has_ended(self._cluster.launcher_pid):
                outbox.linger_s = 0.0  # nobody is left to hear it, or will be in a moment
        self._network.leave(self._outboxes.values())

    def _send(self, listener: Listener) -> None:
        """The sender thread."""
        try:
            self._send_all(listener)
        finally:
            self._leave_outboxes()

    def _receive(self, listener: Listener) -> None:
        """The receiver thread."""
        try:
            self._receive_all(listener)
        finally:
            self._network.leave([self._inbox])

    def _send_all(self, listener: Listener) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                if job.after is not None:
                    job.after.synchronize()
                message = listener.on_departure(job.what) if isinstance(job.what, Draft) else job.what
                try:
                    self._outboxes[job.to].send(message)
                except PeerNotReading as full:
                    if job.to != "coordinator":
                        raise
                    if not self._unsent:
                        _log.warning(
                            "the coordinator does not read: records will be missing; training goes on: %s", full
                        )
                    self._unsent += isinstance(message, TrainerReport | Log)
                del job
            if self._unsent:
                _log.warning("the coordinator did not read %d reports and logs: records are missing", self._unsent)
        except Exception as error:
            listener.on_failure(_as_hytrain_error(error, "sending"))

    def _lose_coordinator(self) -> None:
        self._inbox.unwatch(_COORDINATOR)
        self._has_coordinator = self._is_known = False
        _log.warning("the coordinator (process %d) died; training goes on, and waits for no plan", self.coordinator_pid)

    def _find_coordinator(self, asked: Introduce) -> Hello:
        """Another coordinator has been started. Returns the Hello that answers it."""
        assert self._hello is not None, "nobody asks who has not joined"
        pid, self._hello = asked.coordinator_pid, replace(self._hello, attempt=asked.attempt)
        is_news = pid != self.coordinator_pid
        self._inbox.unwatch(_COORDINATOR)
        self._has_coordinator = self._is_known = False
        try:
            self._inbox.watch(_COORDINATOR, pid)
        except PeerDied:
            return self._hello  # and so there will be another one
        self._has_coordinator = True
        if self._ready is not None:
            self._jobs.put(_Job("coordinator", self._hello, None))
        self.coordinator_pid = pid
        if is_news:
            _log.warning("another coordinator (process %d) has been started", pid)
        return self._hello

    def _on_welcome(self, welcome: Welcome) -> None:
        """Another coordinator has taken our answer: from here on it takes what we know."""
        if welcome.coordinator_pid == self.coordinator_pid and self._ready is not None:
            self._jobs.put(_Job("coordinator", self._ready, None))
            self.is_asked = self._is_known = True

    def _receive_all(self, listener: Listener) -> None:
        silence = _Silence()
        try:
            while True:
                try:
                    incoming = self._inbox.receive(LOOK_S)
                except PeerDied as death:
                    if death.name != _COORDINATOR:
                        raise
                    self._lose_coordinator()
                    continue
                if self._ready is not None and self._has_coordinator and silence.passes():
                    _log.warning(
                        "the coordinator (process %d) has not been heard for %.0f s; training goes on",
                        self.coordinator_pid,
                        SILENCE_S,
                    )
                if incoming is None:
                    continue
                if isinstance(incoming.message, Ping):
                    if silence.ends():
                        _log.warning("the coordinator is heard again")
                    self._recorded_s = incoming.message.recorded_s or self._recorded_s
                    self._send_log()
                    self._inbox.reply(incoming.sender, _pong(listener))
                elif isinstance(incoming.message, Introduce):
                    self._find_coordinator(incoming.message)
                    silence.ends()
                elif isinstance(incoming.message, Welcome):
                    self._on_welcome(incoming.message)
                elif isinstance(incoming.message, Goodbye):
                    self._dismissed.set()
                elif isinstance(incoming.message, Failure):
                    listener.on_failure(WorkerDied(self._failure(incoming, incoming.message)))
                else:
                    listener.on_message(incoming.message)
        except PeerDied as death:
            if death.name != "stop":
                way_on = f". That was after step {listener.steps}: start the program again, from its last checkpoint"
                listener.on_failure(self._worker_died(death, way_on))
        except Exception as error:
            listener.on_failure(_as_hytrain_error(error, "receiving"))


class _Silence:
    """For how long the coordinator has not been heard, without the time in which this process itself was stopped."""

    def __init__(self) -> None:
        self._looked_s, self._quiet_s, self._told = time.monotonic(), 0.0, False

    def passes(self) -> bool:
        """Time has passed. Whether it has been silent for so long that it is to be told; True only once."""
        now_s = time.monotonic()
        self._quiet_s += min(now_s - self._looked_s, LOOK_S)
        self._looked_s = now_s
        if self._told or self._quiet_s < SILENCE_S:
            return False
        self._told = True
        return True

    def ends(self) -> bool:
        """It is heard. Whether its silence had been told."""
        told, self._quiet_s, self._told = self._told, 0.0, False
        return told


def _pong(listener: Listener) -> Pong:
    writing = manifest.being_written()
    if writing is None:
        return Pong(waits_for=listener.waits_for)
    folder, writing_s = writing
    return Pong(waits_for=listener.waits_for, writing=str(folder), writing_s=writing_s)


def log_bytes(numbers: Mapping[str, float]) -> int:
    """About how much these take in a message."""
    return sum(len(name.encode(errors="backslashreplace")) + NUMBER_BYTES for name in numbers)


def describe_failure(sender: Address, failure: Failure) -> str:
    """A worker's failure as text: who, step, layer, error and traceback."""
    where = f" in step {failure.step}" if failure.step is not None else ""
    where += f" at layer {failure.lid}" if failure.lid is not None else ""
    return f"{sender} failed{where}: {failure.error}\n\n{failure.traceback}".rstrip()


def _as_hytrain_error(error: Exception, doing: str) -> HyTrainError:
    _log.error("the trainer's link failed while %s", doing, exc_info=error)
    if isinstance(error, HyTrainError):
        return error
    wrapped = ClusterError(f"the trainer's link failed while {doing}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
