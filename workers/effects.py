"""The commands that the coordinator's state machines return. The coordinator process carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from protocol import messages as m
from protocol.address import Address
from protocol.placement import Places


class Send(NamedTuple):
    """A message to a process."""

    to: Address
    message: m.Message


class Answer(NamedTuple):
    """A message to the sender of the message being handled."""

    message: m.Message


class Write(NamedTuple):
    """A line to the metrics of the trainer of this rank."""

    line: str
    rank: int


class Amend(NamedTuple):
    """Numbers that belong to a line which was written."""

    step: int
    numbers: dict[str, float | None]
    rank: int


class Publish(NamedTuple):
    """A status to monitors."""

    status: m.Status


class Note(NamedTuple):
    """A line to the coordinator's log."""

    text: str


class Abort(NamedTuple):
    """End this worker, which does not answer."""

    worker: Address
    pid: int


class Keep(NamedTuple):
    """What commands to the trainer of this rank have come to, for a coordinator that takes this one's place."""

    rank: int
    wishes: Mapping[str, Any] | None


class Remember(NamedTuple):
    """The placements that the next run of this table begins with, and the shares of `workers.planning.last`."""

    table: m.LayerTable
    places: Places
    shares: tuple[float, float]


class Draw(NamedTuple):
    """Forget the timeline that was drawn before, and draw; or draw no more, and write trace.json."""

    begins: bool


Command = Send | Answer | Write | Amend | Publish | Note | Abort | Keep | Remember | Draw
