"""The timeline of a run, or of some of its steps. Each process writes its events, and then they are merged.

    trainer (Meter) ─┐
    optimizer       ─┼─ TraceWriter ─▶ RUN/traces/ROLE-RANK.jsonl ─▶ merge ─▶ RUN/trace.json ─▶ ui.perfetto.dev
    coordinator     ─┘

The coordinator merges once the steps that a monitor asked for are written, the launcher at the end of the run.

All times are seconds of CLOCK_MONOTONIC, which the processes of a node share. In the file, each track of a process is
a thread. Overlapping spans of a track get separate lanes, because a viewer would nest them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from protocol.address import Address

FOLDER: Final = "traces"
FILE: Final = "trace.json"
ROLES: Final = ("trainer", "optimizer", "coordinator")
#: In the viewer's order, from top to bottom.
TRACKS: Final = (
    "step",
    "all-gather",
    "compute",
    "D2H",
    "waiting",
    "CPU update",
    "messages",
    "planes",
    "H2D",
    "visits",
    "plans",
)
_log = logging.getLogger(__name__)

LANES: Final = 1000
BUFFERED_EVENTS: Final = 2048  # events that are buffered before they are written
MAX_FILE_BYTES: Final = 64 << 20  # of one process
#: Which steps are drawn: all from the start on, or none.
EVERY_STEP: Final = range(sys.maxsize)
NO_STEP: Final = range(0)


class TraceWriter:
    """One process's events. Not thread-safe. The file is open only during a write, so nothing leaks without `close`.

    `steps`: those whose events are drawn. Who draws asks before, since drawing takes time.
    """

    def __init__(self, run_dir: str | Path, address: Address, steps: range = EVERY_STEP) -> None:
        self._path, self._address, self._pid = Path(run_dir) / FOLDER / f"{address}.jsonl", address, os.getpid()
        self._events: list[dict[str, Any]] = []
        self.begin(steps)

    def begin(self, steps: range) -> None:
        """Draw these steps from now on, and write what was drawn before."""
        self.flush()
        self.steps, self._lost = steps, False
        self._lanes: dict[str, list[float]] = {track: [] for track in TRACKS}
        if steps:
            address = self._address
            self._metadata("process_name", 0, name=str(address))
            self._metadata("process_sort_index", 0, sort_index=address.rank * len(ROLES) + ROLES.index(address.role))

    @property
    def is_on(self) -> bool:
        return bool(self.steps)

    def draws(self, step: int) -> bool:
        return step in self.steps

    def span(self, track: str, name: str, began_s: float, ended_s: float, **args: Any) -> None:
        """Add an event with a duration. Spans of one track must come in the order of their ends."""
        tid = self._thread(track, began_s, ended_s)
        self._add("X", tid, name, began_s, args, dur=round(max(_us(ended_s) - _us(began_s), 0.0), 3))

    def instant(self, track: str, name: str, at_s: float, **args: Any) -> None:
        """Add an event without a duration."""
        self._add("i", self._thread(track, math.inf, -math.inf), name, at_s, args, s="t")

    def counter(self, name: str, at_s: float, **values: float) -> None:
        """Add numbers that hold from here on. The viewer draws them as one graph."""
        self._add("C", 0, name, at_s, values)

    def flush(self) -> None:
        """Write the buffered events. Each line begins with its newline, so an unfinished line damages no other.

        If the disk or the file is full, they are lost, and training goes on.
        """
        if not self._events:
            return
        lines = "".join("\n" + json.dumps(event, separators=(",", ":")) for event in self._events)
        self._events.clear()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                if file.tell() + len(lines) > MAX_FILE_BYTES:
                    raise OSError(f"{self._path.name} has {MAX_FILE_BYTES >> 20} MiB, the most that is written")
                file.write(lines)
        except OSError as error:
            if not self._lost:
                _log.warning("the timeline lacks events: %s", error)
            self._lost = True

    close = flush

    def _add(self, phase: str, tid: int, name: str, at_s: float, args: dict[str, Any], **more: Any) -> None:
        event = {"name": name, "ph": phase, "pid": self._pid, "tid": tid, "ts": _us(at_s), **more}
        self._events.append({**event, "args": args} if args else event)
        if len(self._events) >= BUFFERED_EVENTS:
            self.flush()

    def _thread(self, track: str, began_s: float, ended_s: float) -> int:
        """The thread number of the first lane of `track` that is free from `began_s` on; it is busy until `ended_s`."""
        lanes = self._lanes[track]
        lane = next((lane for lane, busy_until_s in enumerate(lanes) if busy_until_s <= began_s), len(lanes))
        tid = TRACKS.index(track) * LANES + lane + 1
        if lane == len(lanes):
            lanes.append(ended_s)
            self._metadata("thread_name", tid, name=f"{track} {lane + 1}" if lane else track)
            self._metadata("thread_sort_index", tid, sort_index=tid)
        lanes[lane] = max(lanes[lane], ended_s)
        return tid

    def _metadata(self, kind: str, tid: int, **args: Any) -> None:
        self._events.append({"name": kind, "ph": "M", "pid": self._pid, "tid": tid, "args": args})


def _us(time_s: float) -> float:
    return round(time_s * 1e6, 3)


def clear(run_dir: Path) -> None:
    """Remove the events of earlier timelines. What cannot be removed will be in the next one, too."""
    try:
        for path in (run_dir / FOLDER).glob("*.jsonl"):
            path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("the next timeline has events of an earlier one: %s", error)


def merge(run_dir: Path) -> Path:
    """Merge the processes' events into one file, atomically, and return its path. Unfinished lines are left out.

    Raises `OSError` if it cannot be written. The timeline before it stays.
    """
    target = run_dir / FILE
    temporary = target.with_suffix(".tmp")
    try:
        with temporary.open("w") as out:
            out.write('{"displayTimeUnit":"ms","traceEvents":[')
            separator = "\n"
            for path in sorted((run_dir / FOLDER).glob("*.jsonl")):
                with path.open() as lines:
                    for line in filter(_is_whole, lines):
                        out.write(separator + line.rstrip())
                        separator = ",\n"
            out.write("\n]}\n")
        temporary.replace(target)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    return target


def identity(run_dir: Path) -> tuple[int, int] | None:
    """Differs once another timeline is in the run's folder; None while there is none."""
    try:
        found = (run_dir / FILE).stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
