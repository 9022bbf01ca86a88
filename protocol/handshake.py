"""How a process joins a run: Hello, Welcome, Ready. Two state machines without I/O.

    worker        NEW ──hello()──▶ GREETED ──Welcome──▶ WELCOMED ──ready()──▶ READY
    coordinator   absent ──Hello──▶ joined ──Ready──▶ ready            one entry for each (role, rank)

A step out of order is a `HandshakeError` that tells the story so far. READY is sent only by a worker whose
construction has succeeded, so whoever waits for it learns of a failed start from the worker's death.
"""

from __future__ import annotations

from enum import Enum, auto

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

    def __init__(self, *, role: str, rank: int, pid: int, inbox: str) -> None:
        self._role, self._rank, self._pid, self._inbox = role, rank, pid, inbox
        self.phase = Phase.NEW

    def hello(self) -> Hello:
        self._step(Phase.NEW, Phase.GREETED, "hello")
        return Hello(role=self._role, rank=self._rank, pid=self._pid, inbox=self._inbox)

    def on_welcome(self, welcome: Welcome) -> None:
        self._step(Phase.GREETED, Phase.WELCOMED, f"Welcome to {welcome.run_name!r}")

    def ready(self, detail: str) -> Ready:
        self._step(Phase.WELCOMED, Phase.READY, "ready")
        return Ready(role=self._role, rank=self._rank, detail=detail)

    def _step(self, before: Phase, after: Phase, event: str) -> None:
        if self.phase is not before:
            raise HandshakeError(f"{self._role}-{self._rank}: {event} while {self.phase.name}, needs {before.name}")
        self.phase = after


class RunHandshake:
    """The coordinator's side: who has joined, who is ready."""

    def __init__(self, *, run_name: str, pid: int) -> None:
        self._welcome = Welcome(run_name=run_name, coordinator_pid=pid)
        self._joined: dict[tuple[str, int], Hello] = {}
        self._ready: dict[tuple[str, int], Ready] = {}

    def on_hello(self, hello: Hello) -> Welcome:
        """The answer to a Hello. A role and rank can join once: a second process with them is refused."""
        key = (hello.role, hello.rank)
        known = self._joined.get(key)
        if known is not None:
            raise HandshakeError(f"{hello.role}-{hello.rank} joined as process {known.pid}, now {hello.pid} says Hello")
        self._joined[key] = hello
        return self._welcome

    def on_ready(self, ready: Ready) -> None:
        key = (ready.role, ready.rank)
        if key not in self._joined or key in self._ready:
            raise HandshakeError(f"{ready.role}-{ready.rank} says Ready without a Hello, or twice")
        self._ready[key] = ready

    def leave(self, role: str, rank: int) -> None:
        """The process said Goodbye: another may join with its role and rank."""
        self._joined.pop((role, rank), None)
        self._ready.pop((role, rank), None)

    def is_ready(self, role: str, rank: int = 0) -> bool:
        return (role, rank) in self._ready

    @property
    def joined(self) -> tuple[Hello, ...]:
        return tuple(self._joined.values())

    def inbox(self, role: str, rank: int = 0) -> str:
        """The name of the inbox that the process told of in its Hello. Raises `KeyError` if it has not joined."""
        return self._joined[role, rank].inbox

    def detail(self, role: str, rank: int = 0) -> str:
        """What the process told of itself when it became ready."""
        known = self._ready.get((role, rank))
        return known.detail if known else "starting"

    def check(self) -> None:
        assert self._ready.keys() <= self._joined.keys(), "ready without having joined"
