"""The commands that the coordinator's state machines return. The coordinator process carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from protocol import messages as m
from protocol.address import Address


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a process."""

    to: Address
    message: m.Message


@dataclass(frozen=True, slots=True)
class Answer:
    """Reply to the sender of the message being handled."""

    message: m.Message


@dataclass(frozen=True, slots=True)
class Write:
    """Append a line to the metrics of the trainer of this rank."""

    line: str
    rank: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish a status to monitors."""

    status: m.Status


@dataclass(frozen=True, slots=True)
class Note:
    """Write a line to the coordinator's log."""

    text: str


Command = Send | Answer | Write | Publish | Note
