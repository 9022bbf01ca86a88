"""Channels between the processes of a run. The only module that imports ZeroMQ.

Each process binds one inbox, `ipc://<socket folder>/<name>`, and connects an outbox to each peer that it sends to. A
worker's inbox is named by its address. Each trainer's inbox has a new name, which its Hello contains, so a late message
for one trainer cannot reach the next one. The coordinator also publishes `Status` to all subscribed monitors.

    trainer-0 ──Outbox──▶ optimizer-0 (Inbox)           ROUTER bound, DEALER connected: the connection names
    trainer-0-1f… (Inbox) ◀──Outbox── optimizer-0       its sender, so sequence numbers are checked per sender
    coordinator-0 ──Publisher──▶ Subscriber …           PUB/SUB: a slow monitor loses frames, nobody waits

Anything that is not a message of this run, from a process that may send it, is logged with the reason and dropped. No
flood of it keeps a wait from ending, with a message, a peer's death or a deadline. A socket may be used by one thread
only.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import zmq

from protocol.address import Address
from protocol.codec import MAX_FRAME_BYTES, Envelope, WireError, decode, encode
from protocol.messages import Message
from protocol.quiet import rate_limited

HIGH_WATER_MARK: Final = 100_000
MONITOR_HIGH_WATER_MARK: Final = 64
#: So many replies wait at each end of a connection for who has asked. More are dropped, so that one who asks and does
#: not read takes little memory.
REPLIES_HIGH_WATER_MARK: Final = 8
#: The name of the feed that the coordinator publishes.
STATUS: Final = "status"
#: libzmq closes a connection that sends a larger frame. Frames between the two limits are logged and dropped here.
SOCKET_FRAME_BYTES: Final = 4 * MAX_FRAME_BYTES
MAX_IPC_PATH_BYTES: Final = 107
#: A dead peer's last messages may still be passing through ZeroMQ's own thread when its death is noticed.
LAST_WORDS_S: Final = 0.05
#: What has arrived by then is heard first, but for a flood that would never end.
LAST_WORDS: Final = 10_000

_log = rate_limited(__name__)


class PeerDied(RuntimeError):
    """The watched process `name` ended while this one waited for a message."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} died")
        self.name = name


class PeerNotReading(RuntimeError):
    """An outbox is full: its reader has stopped reading, or never started."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message, the connection that it came through (for a reply), and its sender's address."""

    sender: str
    address: Address
    message: Message


def endpoint(socket_dir: str, name: Address | str) -> str:
    """ZeroMQ's address of an inbox. Raises `ValueError` if the path is too long for a socket."""
    path = os.path.join(socket_dir, str(name))
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ValueError(f"socket path {path} is longer than {MAX_IPC_PATH_BYTES} bytes; set a shorter TMPDIR")
    return f"ipc://{path}"


class _Socket:
    """One ZeroMQ socket of a `Network`, which closes it."""

    #: How long `close` waits until what was sent is delivered.
    linger_s = 0.0

    def __init__(self, network: Network, kind: int, name: str, *, high_water_mark: int = HIGH_WATER_MARK) -> None:
        # A process that takes another's place has larger numbers than that one had.
        self._network, self._seq = network, time.monotonic_ns()
        self._where = endpoint(network.socket_dir, name)
        self._socket = network.context.socket(kind)
        network.sockets.append(self)
        self._socket.setsockopt(zmq.MAXMSGSIZE, SOCKET_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, high_water_mark)
        self._socket.setsockopt(zmq.RCVHWM, high_water_mark)

    def _encode(self, message: Message, seq: int) -> bytes:
        return encode(message, token=self._network.token, sender=self._network.address, seq=seq)

    def close(self) -> None:
        self._socket.close(linger=int(self.linger_s * 1e3))


class _Peer(_Socket):
    """A socket whose other end is known."""

    def send(self, message: Message) -> None:
        """Send without waiting. Raises `PeerNotReading` if too much waits already."""
        frame = self._encode(message, self._seq)
        self._seq += 1
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise PeerNotReading(f"{self._where} does not read its messages") from None

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None after `timeout_s` seconds."""
        ends_s = time.monotonic() + timeout_s
        while self._socket.poll(_left_ms(ends_s)):
            try:
                return decode(self._socket.recv(), token=self._network.token).message
            except WireError as error:
                _log.warning("dropped a message from %s: %s", self._where, error)
        return None


class Inbox(_Socket):
    """The messages that other processes send to this one. It is bound by its network's name."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, zmq.ROUTER, network.name)
        self._last_seq: dict[str, int] = {}  # by connection
        self._admitted: frozenset[str] | None = None
        self._deaths: dict[int, tuple[str, float | None]] = {}  # by descriptor, with the time for last words
        self._dead: tuple[str, float] | None = None
        self._words_left = LAST_WORDS
        self._ends = select.poll()
        self._poller = zmq.Poller()
        self._socket.setsockopt(zmq.SNDHWM, REPLIES_HIGH_WATER_MARK)
        self._socket.bind(self._where)
        self._poller.register(self._socket, zmq.POLLIN)

    def admit(self, *connections: str) -> None:
        """From now on, drop messages that come through other connections than these."""
        self._admitted = frozenset(connections)

    def watch(self, name: str, pid: int) -> None:
        """End waits with `PeerDied(name)` when process `pid` ends. Raises `PeerDied` if it has already ended."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise PeerDied(name) from None
        self.watch_descriptor(name, descriptor)

    def unwatch(self, name: str) -> None:
        """Stop ending waits when this peer dies."""
        for descriptor in [known for known, (peer, _) in self._deaths.items() if peer == name]:
            if descriptor in self._poller:
                self._poller.unregister(descriptor)
            self._ends.unregister(descriptor)
            del self._deaths[descriptor]
            os.close(descriptor)
        if self._dead is not None and self._dead[0] == name:
            self._dead = None

    def watch_descriptor(self, name: str, descriptor: int, *, last_words_s: float | None = None) -> None:
        """Like `watch`, for a descriptor that becomes readable when the peer ends. Closes it later.

        The wait goes on for `last_words_s` then, `LAST_WORDS_S` by default.
        """
        self._deaths[descriptor] = name, last_words_s
        self._poller.register(descriptor, zmq.POLLIN)
        self._ends.register(descriptor, select.POLLIN)

    def receive(self, timeout_s: float | None) -> Incoming | None:
        """Wait for a message; None after `timeout_s` seconds. Raises `PeerDied`.

        A watched peer's death ends the wait after `LAST_WORDS_S`, once nothing is left that has arrived, or after
        `LAST_WORDS` messages.
        """
        ends_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            words_end_s = self._last_words_end_s()
            if frames := self._next_frames():
                if (incoming := self._open(frames)) is not None:
                    return incoming
            elif self._dead is not None and time.monotonic() >= words_end_s:
                raise PeerDied(self._dead[0])
            elif self._poller.poll(_left_ms(min(ends_s, words_end_s))):
                continue
            if time.monotonic() >= ends_s:
                return None

    def _last_words_end_s(self) -> float:
        """When a peer's death ends the wait; infinity while all live. Raises `PeerDied` in a flood."""
        if self._dead is None:
            for descriptor, _ in self._ends.poll(0):
                name, words_s = self._deaths[descriptor]
                ends_s = time.monotonic() + (LAST_WORDS_S if words_s is None else words_s)
                self._dead, self._words_left = (name, ends_s), LAST_WORDS
                self._poller.unregister(descriptor)  # it stays readable and would end every poll at once
                break
        if self._dead is None:
            return math.inf
        name, ends_s = self._dead
        self._words_left -= 1
        if self._words_left < 0:
            raise PeerDied(name)
        return ends_s

    def reply(self, sender: str, message: Message) -> None:
        """Reply on the connection that a message came through. Dropped if the peer is gone or does not read."""
        try:
            self._socket.send_multipart([sender.encode(), self._encode(message, seq=0)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.info("no reply to %s: %s", sender, error)

    def close(self) -> None:
        super().close()
        for descriptor in self._deaths:
            os.close(descriptor)
        self._deaths.clear()

    def _next_frames(self) -> list[bytes]:
        """What has arrived first; nothing if nothing has."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return []

    def _open(self, frames: list[bytes]) -> Incoming | None:
        sender = frames[0].decode("utf-8", "replace")
        try:
            if len(frames) != 2:
                raise WireError(f"{len(frames)} frames where 2 were expected")
            envelope = decode(frames[1], token=self._network.token)
            self._check_sender(sender, envelope)
            if envelope.seq <= (last := self._last_seq.get(sender, -1)):
                raise WireError(f"sequence number {envelope.seq} after {last}")
            self._last_seq[sender] = envelope.seq
        except WireError as error:
            _log.warning("dropped a message from %r: %s", sender, error)
            return None
        return Incoming(sender, envelope.sender, envelope.message)

    def _check_sender(self, connection: str, envelope: Envelope) -> None:
        kind = type(envelope.message).__name__
        if not envelope.sender.owns(connection):
            raise WireError(f"{kind} of {envelope.sender} over another's connection")
        if envelope.sender.role not in envelope.message.by:
            raise WireError(f"{kind} is for other roles than {envelope.sender.role} to send")
        if self._admitted is not None and connection not in self._admitted:
            raise WireError(f"{kind} of a process that is not part of this exchange")


class Outbox(_Peer):
    """This process's messages to one peer, and the replies on this connection (`Inbox.reply`)."""

    def __init__(self, network: Network, to: Address | str, linger_s: float, name: str) -> None:
        super().__init__(network, zmq.DEALER, str(to))
        self.linger_s = linger_s
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.RCVHWM, REPLIES_HIGH_WATER_MARK)
        self._socket.connect(self._where)


class Publisher(_Peer):
    """The coordinator's feed to monitors. A monitor that does not read loses frames; nobody waits for it."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, zmq.PUB, STATUS, high_water_mark=MONITOR_HIGH_WATER_MARK)
        self._socket.bind(self._where)


class Subscriber(_Peer):
    """A monitor's end of the feed."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, zmq.SUB, STATUS, high_water_mark=MONITOR_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(self._where)


class Network(AbstractContextManager["Network"]):
    """One process's ZeroMQ context. It creates the process's sockets, and closes the remaining ones at the end.

    `name` identifies the process's connections and its inbox; the default is its address. Two processes that connect
    with the same address need different names.
    """

    def __init__(self, socket_dir: str, *, token: str, address: Address, name: str | None = None) -> None:
        self.socket_dir, self.token, self.address = socket_dir, token, address
        self.name = name or str(address)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[_Socket] = []
        self._leaving = threading.Lock()

    def outbox(self, to: Address | str, *, linger_s: float = 0.3, name: str | None = None) -> Outbox:
        """Connect to an inbox, given its owner's address or its name. The default `name` is the process's."""
        return Outbox(self, to, linger_s, name or self.name)

    def leave(self, sockets: Iterable[_Socket]) -> None:
        """A thread ends, and closes its own sockets; the last one closes the context, too, as `close` does."""
        sockets = list(sockets)
        with self._leaving:
            self.sockets = [socket for socket in self.sockets if socket not in sockets]
            is_last = not self.sockets
        for socket in sockets:
            socket.close()
        if is_last:
            self.close()

    def drop(self, socket: Inbox | Outbox) -> None:
        """Close one socket before the others. Messages already sent are still delivered."""
        self.sockets.remove(socket)
        socket.close()

    def close(self) -> None:
        """Close all sockets. Messages already sent are still delivered, for at most each outbox's linger time."""
        for socket in self.sockets:
            socket.close()
        self.sockets.clear()
        # A signal, such as that of a DataLoader's worker which ends, would interrupt it in the main thread, for good.
        thread = threading.Thread(target=self.context.term, name="hytrain-term")
        try:
            thread.start()
        except RuntimeError:  # Python is ending: some versions start no threads any more
            self.context.term()
        else:
            thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()


def _left_ms(ends_s: float) -> int | None:
    """Milliseconds until `ends_s` of the monotonic clock, for a poll; None (no limit) if `ends_s` is infinity."""
    return None if ends_s == math.inf else max(0, math.ceil((ends_s - time.monotonic()) * 1e3))
