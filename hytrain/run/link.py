"""The trainer's two I/O threads, so that forward and backward do not wait for messages or copies out.

    sender     post() ──queue──▶ wait for the copy's event, if one is given ──▶ the message ──▶ outbox
    receiver   inbox, deaths ──▶ the listener's on_message, on_failure

Each socket belongs to one thread, which closes it at its end; the last one closes ZeroMQ's context. The garbage
collector must not: it would wait in whatever thread it runs for sockets that are still open. The sender waits for a
copy before it sends the message posted with it, so a GradReady never overtakes its gradient. Messages leave in the
order in which they are posted.

If the coordinator dies, training goes on. Another one introduces itself, and gets, with `rejoin`, what the first one
knew. At the end, `leave` waits until that has recorded everything.
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
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from hytrain.errors import ClusterError, ClusterTimeout, HyTrainError, WorkerDied
from hytrain.memory.arena import Arena, arena_socket, receive_arena, send_arena
from hytrain.memory.transfer import Transfer
from hytrain.run.cluster import PrivateCluster, await_end, has_ended
from hytrain.run.coordinator import LOOK_S, PROCESS, RETRY_S, START_TIMEOUT_S, Coordinator, Unrecorded
from hytrain.run.nodes import Nodes
from hytrain.run.ownership import PlanBook
from hytrain.run.seats import Seat
from hytrain.state import manifest
from protocol import messages as m
from protocol.address import COORDINATOR, Address
from protocol.channel import Inbox, Incoming, Network, Outbox, PeerDied, PeerNotReading
from protocol.handles import ArenaLayout

#: At the end, copies that are under way end, and the last words are delivered. Only a hang takes longer.
CLOSE_TIMEOUT_S: Final = 60.0
THREAD_PREFIX: Final = "hytrain-link-"

#: At the end, what was said last is delivered within this time to those who live. A busy machine may need more than an
#: instant; who has been stopped may go on.
LINGER_S: Final = 10.0
#: An optimizer that has failed says so, and ends. Only a hang takes longer.
FAILED_END_S: Final = 60.0

_log = logging.getLogger(__name__)
M = TypeVar("M", m.Welcome, m.Plan, m.Reassign)
#: To whom, what, and after which copy.
_Job = tuple[str, m.Message | Callable[[], m.Message], Transfer | None]


class Listener(Protocol):
    """Receives the link's events, on the link's threads."""

    def on_message(self, message: m.Message) -> None: ...

    def on_failure(self, error: HyTrainError) -> None: ...

    @property
    def steps(self) -> int:
        """How many steps have been trained."""

    @property
    def waits_for(self) -> str:
        """What training waits for, in words; empty if it does not wait."""


class Link:
    """The trainer's connection to optimizer and coordinator. `join` it, `agree`, `start`, `post`, `leave`, `close`."""

    def __init__(self, place: PrivateCluster | Seat, nodes: Nodes, *, timeout_s: float) -> None:
        """`place` is the trainer's place in its cluster."""
        self._place, self._nodes, self._timeout_s = place, nodes, timeout_s
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
            self._inbox = Inbox(self._network)
            self._stop_read, self._stop_write = os.pipe()
        except BaseException:
            self._network.close()
            self._arenas.close()
            raise
        self._inbox.admit(str(COORDINATOR), str(Address("optimizer", rank)))
        self._threads: dict[str, threading.Thread] = {}
        self._closed = False
        self.coordinator = Coordinator(cluster, self._inbox)
        self._hello: m.Hello | None = None
        self._ready: m.Ready | None = None
        self._introduction: Callable[..., m.Rejoin] = m.Rejoin  # with what the coordinator was told
        self._positions: m.PositionsLearned | None = None
        self._unrecorded = Unrecorded(lambda message: self._jobs.put(("coordinator", message, None)))
        self._told = 0  # the coordinator that has our Goodbye
        self._dismissed = threading.Event()  # it has recorded everything
        self._unsent = 0  # messages that the coordinator did not read in time
        #: Another coordinator wants to know what the first one knew.
        self.is_asked = False

    def join(self) -> None:
        """Shake hands with the coordinator. Raises `ClusterError` if it or the optimizer is dead, or on a timeout."""
        try:
            self._inbox.watch("the optimizer process", self._cluster.optimizer_pids[self.address.rank])
            self.coordinator.watch()
            peers = {"optimizer": Address("optimizer", self.address.rank), "coordinator": COORDINATOR}
            self._outboxes = {role: self._network.outbox(to, linger_s=LINGER_S) for role, to in peers.items()}
            self._hello = m.Hello(pid=self._pid, inbox=self.name)
            self._outboxes["coordinator"].send(self._hello)
            self._expect(m.Welcome)
            self.coordinator.is_known = True
        except PeerDied as death:
            raise self._worker_died(death) from None

    def agree(self, table: m.LayerTable, calibration: m.Calibration, book: PlanBook) -> m.Plan:
        """Send the layer table and the calibration, and agree in `book` on the first plan."""
        try:
            self._arenas.settimeout(self._timeout_s)
            self._arenas.connect(arena_socket(self._cluster.socket_dir, self.address.rank))
        except OSError as error:
            raise ClusterError(f"cannot reach the optimizer process: {error}") from None
        try:
            self._outboxes["coordinator"].send(table)
            self._outboxes["coordinator"].send(calibration)
            self._introduction = partial(m.Rejoin, table=table, calibration=calibration)
            plan = self._expect(m.Plan)
            self._outboxes["coordinator"].send(book.on_plan(plan))
            book.on_reassign(self._expect(m.Reassign))
        except PeerDied as death:
            raise self._worker_died(death) from None
        return plan

    def _follow(self, asked: m.Introduce) -> m.Hello:
        """Another coordinator has been started. Returns the Hello that answers it."""
        assert self._hello is not None, "nobody asks who has not joined"
        self._hello = replace(self._hello, attempt=asked.attempt)
        self.coordinator.follow(asked.coordinator_pid)
        return self._hello

    def _worker_died(self, noticed: PeerDied, way_on: str = "") -> WorkerDied:
        """The error that says who died first, and how, where that can be found out."""
        try:
            first = self._place.first_death() if self.coordinator.ends_the_run(noticed) else ""
        except Exception:  # what was noticed must be told, whatever the launcher said
            first = ""
        first += ", as the kernel does when memory runs out" if "SIGKILL" in first else ""
        return WorkerDied(f"{first or noticed}; its log is in {self._cluster.run_dir}/logs{way_on}")

    def _failure(self, incoming: Incoming, failure: m.Failure) -> str:
        """A failure as text. An optimizer ends after its own, and is waited for.

        Who ends because of it must not end before it: the launcher looks which of its processes has ended.
        """
        if incoming.address.role == "coordinator":
            return failure.error
        self._await_optimizer()
        where = f" in step {failure.step}" if failure.step is not None else ""
        where += f" at layer {failure.lid}" if failure.lid is not None else ""
        return f"{incoming.address} failed{where}: {failure.error}\n\n{failure.traceback}".rstrip()

    def _await_optimizer(self) -> None:
        await_end(self._cluster.optimizer_pids[self.address.rank], FAILED_END_S)

    def _expect(self, kind: type[M]) -> M:
        """The next message, which must be a `kind`. Raises `ClusterError` if it is not, or if it reports a failure.

        Another coordinator, in the place of one that dies before its Welcome, gets the Hello, too.
        """
        try:
            incoming = self._inbox.receive(self._timeout_s)
        except PeerDied as death:
            if death.name != PROCESS or kind is not m.Welcome:
                raise
            self.coordinator.lose()
            return self._expect(kind)
        if incoming is None:
            raise ClusterTimeout(f"no {kind.__name__} from the coordinator within {self._timeout_s:.0f} s")
        if isinstance(incoming.message, m.Introduce):
            if kind is not m.Welcome:
                raise ClusterError("the coordinator died and was replaced while the first plan was agreed on")
            self._outboxes["coordinator"].send(self._follow(incoming.message))
            return self._expect(kind)
        if isinstance(incoming.message, m.Failure):
            raise ClusterError(self._failure(incoming, incoming.message))
        if not isinstance(incoming.message, kind):
            raise ClusterError(f"expected {kind.__name__}, got {type(incoming.message).__name__}")
        return incoming.message

    def start(self, listener: Listener) -> None:
        """Start the threads. From now on, messages reach `listener`."""
        self._inbox.watch_descriptor("stop", self._stop_read, last_words_s=0.0)
        for name, run in (("sender", self._send_all), ("receiver", self._receive_all)):
            thread = threading.Thread(target=run, args=(listener,), name=THREAD_PREFIX + name, daemon=True)
            thread.start()
            self._threads[name] = thread

    def ready(self, detail: str) -> None:
        """Tell the coordinator that construction has succeeded."""
        self._ready = m.Ready(detail=detail)
        self.post("coordinator", self._ready)

    def post(self, to: str, what: m.Message | Callable[[], m.Message], *, after: Transfer | None = None) -> None:
        """Send a message to role `to` once `after` has finished. The sender thread then calls what makes it."""
        if to == "coordinator":
            self._unrecorded.flush()
        if isinstance(what, m.TrainerReport):
            self._unrecorded.keep(what)
        elif isinstance(what, m.PositionsLearned):
            self._positions = what
        self._jobs.put((to, what, after))

    def log(self, log: m.Log) -> None:
        """Tell the coordinator the loop's numbers, those of one step together. The caller hands `log` over."""
        self._unrecorded.add(log)

    def rejoin(self, **known: Any) -> None:
        """Tell another coordinator what the first one knew, between two steps. The arguments are `Rejoin`'s."""
        self.is_asked = False
        self._unrecorded.send_again(self._introduction(**known), self._positions)

    def leave(self, rejoin: Callable[[], None]) -> None:
        """Say Goodbye to the coordinator, and return once it has recorded everything, and said Goodbye, too.

        If it dies before, another one is waited for, as long as there is somebody to start one; `rejoin` tells that
        one everything.
        """
        coordinator, seen, ends_s = self.coordinator, None, math.inf
        while not self._dismissed.wait(RETRY_S if seen else 0.0):
            dead, now_s = has_ended(coordinator.pid) or not coordinator.is_known, time.monotonic()
            if not dead and (self._told != coordinator.pid or self.is_asked):
                rejoin()
                self._told = coordinator.pid
                self.post("coordinator", m.Goodbye())
            if seen != (seen := (dead, coordinator.pid, self._unrecorded.recorded_s)):
                ends_s = now_s + (START_TIMEOUT_S if dead else LINGER_S)
            if now_s >= ends_s or (dead and has_ended(self._cluster.launcher_pid)):
                who = "there is no other coordinator yet" if dead else "the coordinator does not answer"
                _log.warning("%s: the records of up to %d steps are lost", who, self._unrecorded.steps)
                return

    def receive_arena(self, layouts: dict[int, ArenaLayout]) -> Arena | m.PlanesRefused:
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

    def give_arena(self, file: Arena) -> None:
        """Send the optimizer an arena that was made here. The message that says so comes after it."""
        try:
            send_arena(self._arenas, file, token=self._cluster.token, sender=self.address)
        except OSError as error:
            raise ClusterError(f"the optimizer process takes no arena: {error}") from None

    def close(self, release: Callable[[], None] = lambda: None) -> None:
        """Say goodbye and stop the threads, then `release` the memory that their copies use.

        Does nothing in a forked child: the link belongs to the parent.
        """
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        for role, outbox in self._outboxes.items():
            if "sender" in self._threads:
                if role != "coordinator" or self._told != self.coordinator.pid:
                    self.post(role, m.Goodbye())
            else:  # construction has failed before
                outbox.send(m.Goodbye())
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
        pids = {"optimizer": self._cluster.optimizer_pids[self.address.rank], "coordinator": self.coordinator.pid}
        for role, outbox in self._outboxes.items():
            if has_ended(pids[role]) or has_ended(self._cluster.launcher_pid):
                outbox.linger_s = 0.0  # nobody is left to hear it, or will be in a moment
        self._network.leave([each for each in self._network.sockets if each is not self._inbox])  # if interrupted, more

    def _send_all(self, listener: Listener) -> None:
        """The sender thread."""
        try:
            while (job := self._jobs.get()) is not None:
                to, what, after = job
                if after is not None:
                    after.synchronize()
                message = what() if callable(what) else what
                try:
                    self._outboxes[to].send(message)
                except PeerNotReading as full:
                    if to != "coordinator":
                        raise
                    if not self._unsent:
                        _log.warning(
                            "the coordinator does not read: records will be missing; training goes on: %s", full
                        )
                    self._unsent += isinstance(message, m.TrainerReport | m.Log)
                del job, what, after
            if self._unsent:
                _log.warning("the coordinator did not read %d reports and logs: records are missing", self._unsent)
        except Exception as error:
            listener.on_failure(_as_hytrain_error(error, "sending"))
        finally:
            self._leave_outboxes()

    def _on_welcome(self, welcome: m.Welcome) -> None:
        """Another coordinator has taken our answer: from here on it takes what we know."""
        if welcome.coordinator_pid == self.coordinator.pid and self._ready is not None:
            self._jobs.put(("coordinator", self._ready, None))
            self.is_asked = self.coordinator.is_known = True

    def _receive_all(self, listener: Listener) -> None:
        """The receiver thread."""
        coordinator = self.coordinator
        try:
            while True:
                try:
                    incoming = self._inbox.receive(LOOK_S)
                except PeerDied as death:
                    if death.name != PROCESS:
                        raise
                    coordinator.lose()
                    continue
                if self._ready is not None and coordinator.is_there:
                    coordinator.look()
                if incoming is None:
                    continue
                if isinstance(incoming.message, m.Ping):
                    coordinator.hear()
                    self._unrecorded.recorded_s = incoming.message.recorded_s or self._unrecorded.recorded_s
                    self._unrecorded.flush()
                    self._inbox.reply(incoming.sender, _pong(listener))
                    if incoming.message.status is not None:
                        self._nodes.tell(incoming.message.status, partial(self.post, "coordinator"))
                elif isinstance(incoming.message, m.Introduce):
                    hello = self._follow(incoming.message)
                    if coordinator.is_there and self._ready is not None:
                        self._jobs.put(("coordinator", hello, None))
                elif isinstance(incoming.message, m.Welcome):
                    self._on_welcome(incoming.message)
                elif isinstance(incoming.message, m.Goodbye):
                    self._dismissed.set()
                elif isinstance(incoming.message, m.Failure):
                    listener.on_failure(WorkerDied(self._failure(incoming, incoming.message)))
                else:
                    listener.on_message(incoming.message)
        except PeerDied as death:
            if death.name != "stop":
                way_on = f". That was after step {listener.steps}: start the program again, from its last checkpoint"
                listener.on_failure(self._worker_died(death, way_on))
        except Exception as error:
            listener.on_failure(_as_hytrain_error(error, "receiving"))
        finally:
            self._network.leave([self._inbox])


def _pong(listener: Listener) -> m.Pong:
    writing = manifest.being_written()
    if writing is None:
        return m.Pong(waits_for=listener.waits_for)
    folder, writing_s = writing
    return m.Pong(waits_for=listener.waits_for, writing=str(folder), writing_s=writing_s)


def _as_hytrain_error(error: Exception, doing: str) -> HyTrainError:
    _log.error("the trainer's link failed while %s", doing, exc_info=error)
    if isinstance(error, HyTrainError):
        return error
    wrapped = ClusterError(f"the trainer's link failed while {doing}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
