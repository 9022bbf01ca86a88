"""The address of a process: its role and its rank. Messages, inboxes and logs use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ROLES: Final = ("coordinator", "optimizer", "trainer", "monitor", "launcher")


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """The optimizer of rank r serves the trainer of rank r. One coordinator serves all processes of a node."""

    role: str
    rank: int

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"unknown role {self.role!r}")
        if self.rank < 0:
            raise ValueError(f"rank {self.rank} is negative")

    def __str__(self) -> str:
        return f"{self.role}-{self.rank}"

    def owns(self, connection: str) -> bool:
        """Whether a connection has this address as its name, perhaps with a suffix that makes it unique."""
        return connection == str(self) or connection.startswith(f"{self}-")


COORDINATOR: Final = Address("coordinator", 0)
