"""A network without sockets, for tests of the state machines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from protocol.address import Address
from protocol.channel import Incoming
from protocol.codec import decode, encode
from protocol.messages import Message


class MemoryNetwork:
    """Inboxes by name. Encodes, decodes and refuses messages like `channel.Network`."""

    def __init__(self, *, token: str = "token") -> None:
        self._token = token
        self._queues: dict[str, deque[tuple[str, bytes]]] = {}
        self._last_seq: dict[tuple[str, str], int] = {}
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
        assert envelope.seq > self._last_seq.get((receiver, sender), -1), "numbers increase"
        self._last_seq[receiver, sender] = envelope.seq
        return Incoming(sender, envelope.sender, envelope.message)

    def lose(self, receiver: str, *, first: int = 0, last: int = 0) -> None:
        """Some of the first and of the last messages never arrive."""
        queue = self._queues.setdefault(receiver, deque())
        self._queues[receiver] = deque([*queue][first : len(queue) - last])

    def pending(self, receivers: Iterable[str]) -> list[str]:
        """The `receivers` that have a message waiting."""
        return [name for name in receivers if self._queues.get(name)]
