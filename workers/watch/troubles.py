"""What is wrong with a run, in sentences: a stopped or silent process, a slow disk, other programs, a divergence.

    status ──────────────────────────┐
    processes and their use ─────────┼─▶ find ─▶ Trouble … ─▶ table, page, lines, JSON, alerts
    other programs on the run's cores┘

All views take their words from here. It reads no clock, file or socket: `observer` looks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hytrain.readable import format_cores
from protocol import messages as m

#: What psutil calls the states of a process.
STOPPED: Final = {"stopped": "is stopped by a signal or Ctrl-Z", "tracing-stop": "is stopped by a debugger"}
DISK_SLEEP: Final = "disk-sleep"
#: Writing to a disk that keeps up is done sooner. With the seconds until a monitor hears of it, fewer than 5.
SLOW_DISK_S: Final = 2.0
#: Of one core's time. Less does not slow an update down much.
TAKEN: Final = 0.2
#: So many other programs are named.
NAMED: Final = 3
#: What such a trouble is about: it stays after a run's end.
DIVERGENCE: Final = "divergence"
#: Numbers of a record that are null if they are not finite.
DIVERGING: Final = {
    "loss": "the loss",
    "validation_loss": "the validation loss",
    "grad_norm": "the norm of the gradients",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """A process's usage. `cpu_share` is 1.0 for one core that is always busy; `state` is psutil's word."""

    cores: tuple[int, ...]
    rss_bytes: int
    cpu_s: float
    cpu_share: float
    state: str = ""


@dataclass(frozen=True, slots=True)
class Stranger:
    """Another program on the optimizers' cores. `pid` 0: those that this machine shows no processes of."""

    pid: int
    name: str
    cpu_share: float


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong, in a sentence. `about` stays the same while it lasts: a process's address, or a word."""

    about: str
    text: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A status, each process's usage then, None for a process that was gone, and what is wrong.

    `loads`: for each core of this machine, the share of its time in which it was busy; empty if it is not known.
    """

    status: m.Status
    processes: tuple[tuple[m.Process, Usage | None], ...]
    troubles: tuple[Trouble, ...] = ()
    loads: tuple[float, ...] = ()


Processes = Iterable[tuple[m.Process, Usage | None]]


def find(status: m.Status, processes: Processes, strangers: Iterable[Stranger] = ()) -> tuple[Trouble, ...]:
    """All that is wrong now. `strangers`: those that take most first."""
    known = [*processes]
    troubles = [trouble for process, usage in known for trouble in _of_process(process, usage)]
    updating = [usage for process, usage in known if usage and process.address.role == "optimizer"]
    cores = sorted({core for usage in updating for core in usage.cores})
    taking = [stranger for stranger in strangers if stranger.cpu_share >= TAKEN][:NAMED]
    if cores and taking:
        troubles.append(_of_strangers(taking, cores))
    if status.no_timeline:
        troubles.append(Trouble("timeline", f"the timeline cannot be written: {status.no_timeline}"))
    return (*troubles, *_of_record(json.loads(status.record)))


def silence(process: m.Process) -> str:
    """What is said of a process that does not answer."""
    return f"has not answered for {process.silent_s:.0f} s"


def _of_process(process: m.Process, usage: Usage | None) -> Iterator[Trouble]:
    name, state = f"{process.address} (process {process.pid})", "" if usage is None else usage.state
    if state in STOPPED:
        words = f"{name} {STOPPED[state]}: kill -CONT {process.pid} resumes it"
        yield Trouble(str(process.address), words)
    elif process.silent_s:
        cause = ": it waits for the disk" if state == DISK_SLEEP else ""
        yield Trouble(str(process.address), f"{name} {silence(process)}{cause}")
    if process.writing_s >= SLOW_DISK_S:
        words = f"{name} has been writing {process.writing} for {process.writing_s:.0f} s: the disk is slow"
        yield Trouble(f"{process.address} writes", words)


def _of_strangers(strangers: Sequence[Stranger], cores: Iterable[int]) -> Trouble:
    """All in one sentence: a terminal has more to show."""
    parts = []
    for one in strangers:
        who = f"{one.name} (process {one.pid})" if one.pid else "programs that cannot be seen from here"
        share = f"{one.cpu_share:.0%} of a core" if one.cpu_share < 1.5 else f"{one.cpu_share:.1f} cores"
        parts.append(f"{who}: {share}")
    where = f"the optimizer's cores, {format_cores(tuple(cores))}"
    about = " ".join(str(one.pid) for one in strangers)
    return Trouble(f"programs {about}", f"updates take longer, since others use {where}: {', '.join(parts)}")


def _of_record(record: dict[str, Any]) -> Iterator[Trouble]:
    """A divergence that the recipe has seen, or a loss of one's own loop that is not finite."""
    diverged_at = record.get("diverged_at")
    names = [name for name in DIVERGING if name in record and record[name] is None]
    wrong = [DIVERGING[name] for name in names]
    seen = f"{' and '.join(wrong)} of step {record.get('step')} {'are' if len(wrong) > 1 else 'is'} not finite"
    if diverged_at is not None:
        because = f": {seen}" if wrong else ""
        yield Trouble(DIVERGENCE, f"training has diverged at step {diverged_at:.0f}{because}")
    elif "loss" in names and record.get("skipped_steps") is None:  # one that is skipped may be a bad batch's
        yield Trouble(DIVERGENCE, f"training diverges: {seen}")
