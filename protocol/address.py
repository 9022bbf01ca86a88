"""Who a process of a run is: its role and its rank. Messages name their sender so; inboxes and logs have that name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

ROLES: Final = ("coordinator", "optimizer", "trainer", "monitor", "launcher")


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A trainer of rank r is served by the optimizer of rank r, and all of a node by one coordinator."""

    role: str
    rank: int

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"unknown role {self.role!r}")
        if self.rank < 0:
            raise ValueError(f"rank {self.rank} is negative")

    def __str__(self) -> str:
        return f"{self.role}-{self.rank}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The address that `str` wrote. Raises `ValueError` for any other text."""
        role, dash, rank = text.partition("-")
        if not (dash and rank.isascii() and rank.isdecimal()):
            raise ValueError(f"{text!r} is no address such as optimizer-0")
        return cls(role, int(rank))


COORDINATOR: Final = Address("coordinator", 0)
