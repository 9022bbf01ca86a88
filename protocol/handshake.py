"""How a process joins a run: Hello, Welcome, Ready. Two state machines without I/O.

    worker        NEW ──hello()──▶ GREETED ──Welcome──▶ WELCOMED ──ready()──▶ READY
    coordinator   absent ──Hello──▶ joined ──Ready──▶ ready            one entry for each address

A step out of order is a `HandshakeError` that tells the story so far. A worker sends READY only after its construction
has succeeded, so whoever waits for it learns of a failed start from the worker's death.
"""

from __future__ import annotations

from enum import Enum, auto

from protocol.address import Address
from protocol.messages import Hello, Ready, Welcome


class HandshakeError(RuntimeError):
    """A process said something that its place in the handshake does not allow."""


class Phase(Enum):
    NEW = auto()
    GREETED = auto()
    WELCOMED = auto()
    READY = auto()


class WorkerHandshake:
    """The side of the process that joins."""

    def __init__(self, address: Address, *, pid: int, inbox: str) -> None:
        self._address, self._pid, self._inbox = address, pid, inbox
        self.phase = Phase.NEW

    def hello(self) -> Hello:
        self._step(Phase.NEW, Phase.GREETED, "hello")
        return Hello(pid=self._pid, inbox=self._inbox)

    def on_welcome(self, welcome: Welcome) -> None:
        self._step(Phase.GREETED, Phase.WELCOMED, f"Welcome to {welcome.run_name!r}")

    def ready(self, detail: str) -> Ready:
        self._step(Phase.WELCOMED, Phase.READY, "ready")
        return Ready(detail=detail)

    def _step(self, before: Phase, after: Phase, event: str) -> None:
        if self.phase is not before:
            raise HandshakeError(f"{self._address}: {event} while {self.phase.name}, needs {before.name}")
        self.phase = after


class RunHandshake:
    """The coordinator's side: who has joined, who is ready."""

    def __init__(self, *, run_name: str, pid: int) -> None:
        self._welcome = Welcome(run_name=run_name, coordinator_pid=pid)
        self._joined: dict[Address, Hello] = {}
        self._ready: dict[Address, Ready] = {}

    def on_hello(self, sender: Address, hello: Hello) -> Welcome:
        """The answer to a Hello. An address can join once: a second process with it is refused."""
        known = self._joined.get(sender)
        if known is not None:
            raise HandshakeError(f"{sender} joined as process {known.pid}, now {hello.pid} says Hello")
        self._joined[sender] = hello
        return self._welcome

    def on_ready(self, sender: Address, ready: Ready) -> None:
        if sender not in self._joined or sender in self._ready:
            raise HandshakeError(f"{sender} says Ready without a Hello, or twice")
        self._ready[sender] = ready

    def leave(self, address: Address) -> None:
        """The process said Goodbye: another may join with its address."""
        self._joined.pop(address, None)
        self._ready.pop(address, None)

    def is_ready(self, address: Address) -> bool:
        return address in self._ready

    @property
    def joined(self) -> dict[Address, Hello]:
        """Who has joined, with what their Hello told, in the order in which they came."""
        return dict(self._joined)

    def detail(self, address: Address) -> str:
        """What the process told of itself when it became ready."""
        known = self._ready.get(address)
        return known.detail if known else "starting"

    def check(self) -> None:
        assert self._ready.keys() <= self._joined.keys(), "ready without having joined"
