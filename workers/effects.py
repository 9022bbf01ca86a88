"""The commands that the coordinator's state machines return. The coordinator process carries them out.

Send      a message to a process
Answer    a message to the sender of the message being handled
Write     a line to the metrics of the trainer of this rank
Amend     numbers that belong to a line which was written
Publish   a status to monitors
Note      a line to the coordinator's log
Abort     end this worker, which does not answer
Keep      what commands to the trainer of this rank have come to, for a coordinator that takes this one's place
BeginTrace   forget the timeline that was drawn before, and draw
EndTrace     draw no more, and write trace.json
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol import messages as m
from protocol.address import Address


@dataclass(frozen=True, slots=True)
class Send:
    to: Address
    message: m.Message


@dataclass(frozen=True, slots=True)
class Answer:
    message: m.Message


@dataclass(frozen=True, slots=True)
class Write:
    line: str
    rank: int


@dataclass(frozen=True, slots=True)
class Amend:
    step: int
    numbers: dict[str, float | None]
    rank: int


@dataclass(frozen=True, slots=True)
class Publish:
    status: m.Status


@dataclass(frozen=True, slots=True)
class Note:
    text: str


@dataclass(frozen=True, slots=True)
class Abort:
    worker: Address
    pid: int


@dataclass(frozen=True, slots=True)
class Keep:
    rank: int
    wishes: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class BeginTrace:
    pass


@dataclass(frozen=True, slots=True)
class EndTrace:
    pass


Command = Send | Answer | Write | Amend | Publish | Note | Abort | Keep | BeginTrace | EndTrace
