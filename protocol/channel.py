"""Channels between the processes of a run: the only module that knows ZeroMQ.

Each process binds one inbox, `ipc://<socket folder>/<name>`, and connects an outbox to each peer it writes to. A
worker's inbox is named by its address. A trainer's has a new name each time, and Hello tells it: what was meant
for the last trainer, and is late, cannot reach the next one. The coordinator also publishes `Status` to whatever
monitors subscribed.

    trainer-0 ──Outbox──▶ optimizer-0 (Inbox)           ROUTER bound, DEALER connected: the connection names
    trainer-0-1f… (Inbox) ◀──Outbox── optimizer-0       its sender, so sequence numbers are checked per sender
    coordinator-0 ──Publisher──▶ Subscriber …           PUB/SUB: a slow monitor loses frames, nobody waits

Whatever is not a message of this run is logged with its reason and dropped. Every wait ends on a message, a
peer's death or a deadline. Sockets belong to one thread each. `MemoryNetwork` is the twin for tests: the same
encoding and the same refusals, without sockets.
"""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

import zmq

from protocol.address import Address
from protocol.codec import MAX_FRAME_BYTES, WireError, decode, encode
from protocol.messages import Message

HIGH_WATER_MARK: Final = 100_000
MONITOR_HIGH_WATER_MARK: Final = 64
#: The name of the coordinator's feed.
STATUS: Final = "status"
#: Larger frames end their connection inside libzmq; those between the two limits are logged and dropped here.
SOCKET_FRAME_BYTES: Final = 4 * MAX_FRAME_BYTES
MAX_IPC_PATH_BYTES: Final = 107
#: What a peer sent before it died may still be on its way through ZeroMQ's own thread when its death is seen.
LAST_WORDS_S: Final = 0.05

_log = logging.getLogger(__name__)


class PeerDied(RuntimeError):
    """A watched process ended while this one waited for a message. `name` says which."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} died")
        self.name = name


class PeerNotReading(RuntimeError):
    """An outbox is full: its reader has stopped reading, or never came."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message, the connection that it came on (for a reply), and the address of its sender."""

    sender: str
    address: Address
    message: Message


def endpoint(socket_dir: str, name: Address | str) -> str:
    """Where an inbox is bound, as ZeroMQ writes it. Raises `ValueError` if the path is too long for a socket."""
    path = os.path.join(socket_dir, str(name))
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ValueError(f"socket path {path} is longer than {MAX_IPC_PATH_BYTES} bytes; set a shorter TMPDIR")
    return f"ipc://{path}"


class _Sequence:
    """The running numbers of each sender: each must be above the last."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def check(self, sender: str, seq: int) -> None:
        last = self._last.get(sender, -1)
        if seq <= last:
            raise WireError(f"sequence number {seq} after {last}")
        self._last[sender] = seq


class Inbox:
    """The messages that others send to this process.

    `watch` adds a process to the deaths that end a wait; `receive` returns None at its deadline.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], where: str, *, token: str, address: Address) -> None:
        self._token, self._address = token, address
        self._sequence = _Sequence()
        self._deaths: dict[int, str] = {}
        self._dead: tuple[str, float] | None = None
        self._ends = select.poll()
        self._poller = zmq.Poller()
        self._socket = context.socket(zmq.ROUTER)
        _limit(self._socket)
        self._socket.bind(where)
        self._poller.register(self._socket, zmq.POLLIN)

    def watch(self, name: str, pid: int) -> None:
        """Let a wait end with `PeerDied(name)` when process `pid` ends. Raises `PeerDied` if it already has."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise PeerDied(name) from None
        self.watch_descriptor(name, descriptor)

    def unwatch(self, name: str) -> None:
        """Let waits no longer end with this peer's death."""
        for descriptor in [known for known, peer in self._deaths.items() if peer == name]:
            if descriptor in self._poller:
                self._poller.unregister(descriptor)
            self._ends.unregister(descriptor)
            del self._deaths[descriptor]
            os.close(descriptor)
        if self._dead is not None and self._dead[0] == name:
            self._dead = None

    def watch_descriptor(self, name: str, descriptor: int) -> None:
        """The same for any descriptor that becomes readable at the peer's end. Takes it over."""
        self._deaths[descriptor] = name
        self._poller.register(descriptor, zmq.POLLIN)
        self._ends.register(descriptor, select.POLLIN)

    def try_receive(self) -> Incoming | None:
        """The next message if one has arrived; never waits."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            incoming = self._open(frames)
            if incoming is not None:
                return incoming

    def receive(self, timeout_s: float | None) -> Incoming | None:
        """Wait for a message. None after `timeout_s` seconds; `PeerDied` once a dead peer has no more to say.

        Messages of others do not put a death off: it ends the wait after the time that last words may take.
        """
        ends_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            words_end_s = self._last_words_end_s()
            if (incoming := self.try_receive()) is not None:
                return incoming
            if not self._poller.poll(_left_ms(min(ends_s, words_end_s))) and time.monotonic() >= ends_s:
                return None

    def _last_words_end_s(self) -> float:
        """When the wait has to end since a peer is dead, infinity if none is. Raises `PeerDied` at that time."""
        if self._dead is None:
            for descriptor, _ in self._ends.poll(0):
                self._dead = (self._deaths[descriptor], time.monotonic() + LAST_WORDS_S)
                self._poller.unregister(descriptor)  # it stays readable, and would end every wait at once
                break
        if self._dead is None:
            return math.inf
        name, ends_s = self._dead
        if time.monotonic() >= ends_s:
            raise PeerDied(name)
        return ends_s

    def reply(self, sender: str, message: Message) -> None:
        """Answer the connection that a message came from; dropped if it has gone or does not read."""
        frame = encode(message, token=self._token, sender=self._address, seq=0)
        try:
            self._socket.send_multipart([sender.encode(), frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.info("no reply to %s: %s", sender, error)

    def close(self) -> None:
        self._socket.close(linger=0)
        for descriptor in self._deaths:
            os.close(descriptor)
        self._deaths.clear()

    def _open(self, frames: list[bytes]) -> Incoming | None:
        sender = frames[0].decode("utf-8", "replace")
        try:
            if len(frames) != 2:
                raise WireError(f"{len(frames)} frames where 2 were expected")
            envelope = decode(frames[1], token=self._token)
            self._sequence.check(sender, envelope.seq)
        except WireError as error:
            _log.warning("dropped a message from %r: %s", sender, error)
            return None
        return Incoming(sender, envelope.sender, envelope.message)


class Outbox:
    """This process's messages to one peer. Never waits: a full outbox raises `PeerNotReading`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        where: str,
        *,
        token: str,
        address: Address,
        name: str,
        linger_s: float = 0.3,
    ) -> None:
        self._token, self._address, self._where, self._linger_s = token, address, where, linger_s
        self._seq = 0
        self._socket = context.socket(zmq.DEALER)
        _limit(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.connect(where)

    def send(self, message: Message) -> None:
        frame = encode(message, token=self._token, sender=self._address, seq=self._seq)
        self._seq += 1
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise PeerNotReading(f"{self._where} does not read its messages") from None

    def receive(self, timeout_s: float) -> Message | None:
        """An answer on this connection (`Inbox.reply`), None after `timeout_s` seconds."""
        return _receive(self._socket, timeout_s, token=self._token, where=self._where)

    def close(self) -> None:
        self._socket.close(linger=int(self._linger_s * 1e3))


class Publisher:
    """The coordinator's feed to monitors: a monitor that does not read loses frames, and nothing else happens."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], where: str, *, token: str, address: Address) -> None:
        self._token, self._address, self._seq = token, address, 0
        self._socket = context.socket(zmq.PUB)
        _limit(self._socket, high_water_mark=MONITOR_HIGH_WATER_MARK)
        self._socket.bind(where)

    def publish(self, message: Message) -> None:
        frame = encode(message, token=self._token, sender=self._address, seq=self._seq)
        self._socket.send(frame, zmq.NOBLOCK)
        self._seq += 1

    def close(self) -> None:
        self._socket.close(linger=0)


class Subscriber:
    """A monitor's end of the feed."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], where: str, *, token: str) -> None:
        self._token, self._where = token, where
        self._socket = context.socket(zmq.SUB)
        _limit(self._socket, high_water_mark=MONITOR_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(where)

    def receive(self, timeout_s: float) -> Message | None:
        """The next message of the feed, None after `timeout_s` seconds."""
        return _receive(self._socket, timeout_s, token=self._token, where=self._where)

    def close(self) -> None:
        self._socket.close(linger=0)


S = TypeVar("S", Inbox, Outbox, Publisher, Subscriber)


class Network:
    """One process's ZeroMQ context: makes its sockets, and closes what is left of them at the end.

    `name` is what its connections are called. It must be new for each process that connects with the same address.
    """

    def __init__(self, socket_dir: str, *, token: str, address: Address, name: str | None = None) -> None:
        self._socket_dir, self._token, self._address = socket_dir, token, address
        self._name = name or str(address)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._closing: list[Inbox | Outbox | Publisher | Subscriber] = []

    def inbox(self) -> Inbox:
        """The process's own inbox, which has its connections' name."""
        where = endpoint(self._socket_dir, self._name)
        return self._keep(Inbox(self._context, where, token=self._token, address=self._address))

    def outbox(self, to: Address | str, *, linger_s: float = 0.3) -> Outbox:
        """Messages to the inbox of a worker, or to one with a name that was told."""
        where, name = endpoint(self._socket_dir, to), self._name
        return self._keep(
            Outbox(self._context, where, token=self._token, address=self._address, name=name, linger_s=linger_s)
        )

    def publisher(self) -> Publisher:
        where = endpoint(self._socket_dir, STATUS)
        return self._keep(Publisher(self._context, where, token=self._token, address=self._address))

    def subscriber(self) -> Subscriber:
        return self._keep(Subscriber(self._context, endpoint(self._socket_dir, STATUS), token=self._token))

    def _keep(self, socket: S) -> S:
        self._closing.append(socket)
        return socket

    def drop(self, socket: Inbox | Outbox) -> None:
        """Close one socket before the others; what was sent on it still leaves."""
        self._closing.remove(socket)
        socket.close()

    def close(self) -> None:
        """Close all sockets; what was sent still leaves, for at most each outbox's linger time."""
        for socket in self._closing:
            socket.close()
        self._closing.clear()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _limit(socket: zmq.Socket[bytes], *, high_water_mark: int = HIGH_WATER_MARK) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, SOCKET_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)


def _receive(socket: zmq.Socket[bytes], timeout_s: float, *, token: str, where: str) -> Message | None:
    ends_s = time.monotonic() + timeout_s
    while socket.poll(_left_ms(ends_s)):
        try:
            return decode(socket.recv(), token=token).message
        except WireError as error:
            _log.warning("dropped a message from %s: %s", where, error)
    return None


def _left_ms(ends_s: float) -> int | None:
    """How long to poll until a time of the monotonic clock; None, for ever, if that is infinity."""
    return None if ends_s == math.inf else max(0, math.ceil((ends_s - time.monotonic()) * 1e3))


class MemoryNetwork:
    """Inboxes without sockets, for tests of the state machines: encodes, decodes and refuses as the real one."""

    def __init__(self, *, token: str = "token") -> None:
        self._token = token
        self._queues: dict[str, deque[tuple[str, bytes]]] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._seq: dict[tuple[Address, str], int] = {}

    def send(self, sender: Address, receiver: str, message: Message) -> None:
        seq = self._seq.get((sender, receiver), 0)
        self._seq[sender, receiver] = seq + 1
        frame = encode(message, token=self._token, sender=sender, seq=seq)
        self._queues.setdefault(receiver, deque()).append((str(sender), frame))

    def try_receive(self, receiver: str) -> Incoming | None:
        queue = self._queues.setdefault(receiver, deque())
        if not queue:
            return None
        sender, frame = queue.popleft()
        envelope = decode(frame, token=self._token)
        self._sequences.setdefault(receiver, _Sequence()).check(sender, envelope.seq)
        return Incoming(sender, envelope.sender, envelope.message)

    def pending(self, receivers: Iterable[str]) -> list[str]:
        """Those of `receivers` that have a message waiting."""
        return [name for name in receivers if self._queues.get(name)]
