"""How a process joins a run: Hello, Welcome, Ready. Two state machines without I/O.

    worker        NEW ──hello()──▶ GREETED ──Welcome──▶ WELCOMED ──ready()──▶ READY
    coordinator   absent ──Hello──▶ joined ──Ready──▶ ready            one entry for each address

A step out of order raises a `HandshakeError` that names the current phase. A worker sends READY only after it was
constructed successfully. A process that waits for READY notices a failed start by the worker's death.
"""

from __future__ import annotations

from enum import Enum, auto

from protocol.address import Address
from protocol.messages import Hello, Ready, Welcome


class HandshakeError(RuntimeError):
    """A process sent a message that its phase of the handshake does not allow."""


class Phase(Enum):
    NEW = auto()
    GREETED = auto()
    WELCOMED = auto()
    READY = auto()


class WorkerHandshake:
    """The joining process's side."""

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
    """The coordinator's side: which processes have joined, and which are ready."""

    def __init__(self, *, run_name: str, pid: int, ranks: int) -> None:
        self._ranks = ranks
        self._welcome = Welcome(run_name=run_name, coordinator_pid=pid)
        self._joined: dict[Address, Hello] = {}
        self._ready: dict[Address, Ready] = {}

    def on_hello(self, sender: Address, hello: Hello) -> Welcome:
        """The answer to a Hello. Refuses a second process with the same address, and a rank that the run has not."""
        if sender.rank >= self._ranks:
            raise HandshakeError(f"{sender} says Hello, but the run has {self._ranks} ranks here")
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
        """The process said Goodbye. Another one may join with its address."""
        self._joined.pop(address, None)
        self._ready.pop(address, None)

    @property
    def joined(self) -> dict[Address, Hello]:
        """The processes that have joined, with their Hello, in the order of joining."""
        return dict(self._joined)

    def is_joined(self, address: Address, connection: str) -> bool:
        """Whether the process with this address has joined, over this connection."""
        return (hello := self._joined.get(address)) is not None and hello.inbox == connection

    def detail(self, address: Address) -> str:
        """The `detail` of the process's Ready, or "starting" before it."""
        known = self._ready.get(address)
        return known.detail if known else "starting"

    def check(self) -> None:
        assert self._ready.keys() <= self._joined.keys(), "ready without having joined"
