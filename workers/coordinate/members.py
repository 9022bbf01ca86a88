"""The workers of a run: who has joined, who is ready, and who still answers; pure. `CoordinatorState` asks.

    absent ──Hello──▶ joined ──Ready──▶ ready            one entry for each address
    beat ─▶ Ping ─▶ the optimizer's loop, or the trainer's receiver thread ─▶ Pong ─▶ answered
    silent for SILENT_S ─▶ the log and the monitors say so      for the limit ─▶ the run ends

A worker sends Ready only after it was constructed successfully. A process that waits for it notices a failed start by
the worker's death. Beats are counted, not seconds: while the coordinator itself is stopped, or the whole machine,
nobody becomes silent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from protocol.address import Address
from protocol.messages import Hello, Pong

BEAT_S: Final = 1.0
#: A process that has not answered for so long is called silent.
SILENT_S: Final = 4.0
#: Who has hung, and has not ended for it, is named again after this many beats.
AGAIN: Final = 60
#: What is known of a worker that has not been asked yet: it neither waits nor writes.
NO_ANSWER: Final = Pong()


class HandshakeError(RuntimeError):
    """A process sent a message that its phase of the handshake does not allow."""


@dataclass(slots=True)
class Member:
    """A worker that has joined: its Hello, what its Ready said, and its last answer."""

    hello: Hello
    detail: str | None = None
    cores: int = 0
    pong: Pong = NO_ANSWER
    missed: int = -1  # beats since it was asked, without an answer
    has_answered: bool = False  # since the last beat

    @property
    def silent_s(self) -> float:
        """How long it has not answered; 0 if it is not called silent."""
        silent_s = self.missed * BEAT_S
        return silent_s if silent_s >= SILENT_S else 0.0


class Members:
    """By address, in the order of joining."""

    def __init__(self, *, ranks: int, limit_s: float) -> None:
        self._ranks, self._limit = ranks, max(limit_s, SILENT_S) / BEAT_S
        self.joined: dict[Address, Member] = {}

    def join(self, sender: Address, hello: Hello) -> None:
        """Refuses a second process with the same address, and a rank that the run has not."""
        if sender.rank >= self._ranks:
            raise HandshakeError(f"{sender} says Hello, but the run has {self._ranks} ranks here")
        if (known := self.joined.get(sender)) is not None:
            raise HandshakeError(f"{sender} joined as process {known.hello.pid}, now {hello.pid} says Hello")
        self.joined[sender] = Member(hello)

    def ready(self, sender: Address, detail: str, cores: int = 0) -> None:
        if (member := self.joined.get(sender)) is None or member.detail is not None:
            raise HandshakeError(f"{sender} says Ready without a Hello, or twice")
        member.detail, member.cores = detail, cores

    def leave(self, address: Address) -> None:
        """The process said Goodbye. Another one may join with its address."""
        self.joined.pop(address, None)

    def is_joined(self, address: Address, connection: str) -> bool:
        """Whether the process with this address has joined, over this connection."""
        return (member := self.joined.get(address)) is not None and member.hello.inbox == connection

    def is_ready(self, address: Address) -> bool:
        return (member := self.joined.get(address)) is not None and member.detail is not None

    def detail(self, address: Address) -> str:
        """What the process said when it was ready, or "starting" before."""
        member = self.joined.get(address)
        return "starting" if member is None or member.detail is None else member.detail

    def cores(self, address: Address) -> int:
        """How many cores the process has for threads that a command may ask for; 0 if that is not known."""
        return 0 if (member := self.joined.get(address)) is None else member.cores

    def answered(self, address: Address, pong: Pong) -> None:
        if (member := self.joined.get(address)) is not None:
            member.has_answered, member.pong = True, pong

    def beat(self, asked: Collection[Address]) -> tuple[list[str], list[Address]]:
        """A beat has passed since these were asked, and is to begin anew. Returns news, and who is to be ended."""
        news, hung = list[str](), list[Address]()
        for address, member in self.joined.items():
            if address not in asked:
                member.missed, member.pong = -1, NO_ANSWER
        for address in asked:
            member = self.joined[address]
            before_s, member.missed = member.silent_s, 0 if member.has_answered else member.missed + 1
            member.has_answered = False
            if before_s and not member.silent_s:
                news.append(f"{address} answers again, after {before_s:.0f} s")
            elif member.silent_s and not before_s:
                news.append(f"{address} has not answered for {member.silent_s:.0f} s{self._waiting_for(address)}")
            beyond = member.missed - self._limit
            if beyond >= 0 and int(beyond) % AGAIN == 0:
                hung.append(address)
        return news, hung

    def _waiting_for(self, silent: Address) -> str:
        """What the trainer that this optimizer serves waits for."""
        trainer = self.joined.get(Address("trainer", silent.rank))
        what = trainer.pong.waits_for if trainer is not None and silent.role == "optimizer" else ""
        return f"; trainer-{silent.rank} waits for {what}" if what else ""
