"""The timeline of a run. Each process writes its events during the run, and the launcher merges them at the end.

    trainer (Meter) ─┐
    optimizer       ─┼─ TraceWriter ─▶ RUN/traces/ROLE-RANK.jsonl ─▶ merge ─▶ RUN/trace.json ─▶ ui.perfetto.dev
    coordinator     ─┘

All times are seconds of CLOCK_MONOTONIC, which the processes of a node share. In the file, each track of a process is
a thread. Overlapping spans of a track get separate lanes, because a viewer would nest them. Without tracing, None takes
the writer's place.
"""

from __future__ import annotations

import json
import logging
import math
import os
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


class TraceWriter:
    """One process's events. Not thread-safe. The file is open only during a write, so nothing leaks without `close`."""

    def __init__(self, run_dir: str | Path, address: Address) -> None:
        folder = Path(run_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._pid = folder / f"{address}.jsonl", os.getpid()
        self._lanes: dict[str, list[float]] = {track: [] for track in TRACKS}
        self._events: list[dict[str, Any]] = []
        self._lost = False
        self._metadata("process_name", 0, name=str(address))
        self._metadata("process_sort_index", 0, sort_index=address.rank * len(ROLES) + ROLES.index(address.role))

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

        If the disk is full, they are lost, and training goes on.
        """
        lines = "".join("\n" + json.dumps(event, separators=(",", ":")) for event in self._events)
        self._events.clear()
        try:
            with self._path.open("a") as file:
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
    for path in (run_dir / FOLDER).glob("*.jsonl"):
        path.unlink()


def merge(run_dir: Path) -> Path:
    """Merge the processes' events into one file, atomically, and return its path. Unfinished lines are left out."""
    target = run_dir / FILE
    temporary = target.with_suffix(".tmp")
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
    return target


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
