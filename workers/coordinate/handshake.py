"""Who has joined a run, and who is ready; pure. `CoordinatorState` asks.

    absent ──Hello──▶ joined ──Ready──▶ ready            one entry for each address

A worker sends Ready only after it was constructed successfully. A process that waits for it notices a failed start by
the worker's death.
"""

from __future__ import annotations

from protocol.address import Address
from protocol.messages import Hello, Ready, Welcome


class HandshakeError(RuntimeError):
    """A process sent a message that its phase of the handshake does not allow."""


class RunHandshake:
    """Which processes have joined, and which are ready."""

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

    def is_ready(self, address: Address) -> bool:
        return address in self._ready

    def detail(self, address: Address) -> str:
        """The `detail` of the process's Ready, or "starting" before it."""
        known = self._ready.get(address)
        return known.detail if known else "starting"

    def check(self) -> None:
        assert self._ready.keys() <= self._joined.keys(), "ready without having joined"
