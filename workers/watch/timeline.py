"""Reads a run's timeline.

trace.json ─▶ Timeline of a rank ─┬─▶ bill ─▶ what steps consist of, and what limits them
                                  └─▶ gantt, benchmarks.timeline
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from hytrain.errors import ConfigError
from hytrain.run.trace import FILE, identity


class Kind(NamedTuple):
    """A kind of spans: how it is drawn, if it is, and the part of a bill of what is neither a stall nor beside a step.

    `row`: it is the name of one. `style`: in pages/page.css. `label`: in legends. `mark`: the character of a trainer's
    kinds in a terminal. `colour`: there, too.
    """

    row: str = ""
    style: str = ""
    label: str = ""
    mark: str = ""
    colour: str = ""
    part: str = ""


#: In the order of rows, and of legends.
KINDS: Final = {
    "forward": Kind("trainer", "forward", "forward", "▒", "blue", "computing"),
    "backward": Kind("trainer", "backward", "backward", "█", "green", "computing"),
    "micro-batches": Kind("trainer", "batches", "earlier micro-batches", "▓", "", "computing"),
    "update": Kind("trainer", "gpu", "update on the GPU", "u", "magenta", "computing"),
    "stall": Kind("trainer", "stall", "waits for weights or memory", "x", "red"),
    "waits for all-gather": Kind("trainer", "ranks", "waits for other ranks", "=", "yellow", "ranks"),
    "between steps": Kind("trainer", "outside", "the loop between steps", ".", "", "loop"),
    "after backward": Kind(part="after"),
    "step()": Kind(part="boundary"),
    "D2H": Kind("gradients out", "copy", "copies"),
    "CPU update": Kind("CPU update", "cpu", "update on the CPU", colour="yellow"),
    "H2D": Kind("weights back", "copy", "copies"),
    "visit": Kind("visits", "visit", "state visits the GPU", colour="magenta"),
    "all-gather": Kind("all-gathers", "gather", "all-gather"),
}
#: (start, end)
Interval = tuple[float, float]
#: A larger file is for a viewer only: a page would need too much memory to read it.
MOST_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Span:
    """Work of one kind, or a wait, of a layer if `lid` is one; milliseconds from the trace's first step."""

    kind: str
    lid: int | None
    step: int
    began_ms: float
    ended_ms: float
    name: str = ""
    is_dry: bool = False  # the device waited for the launch of its last kernels

    @property
    def interval(self) -> Interval:
        return self.began_ms, self.ended_ms

    @property
    def layer(self) -> str:
        return self.name.removeprefix(f"{self.kind} ")


class Timeline:
    """The events of one rank's trainer and optimizer. `steps` are the steps' intervals, in milliseconds like spans."""

    def __init__(self, events: Iterable[dict[str, Any]], rank: int = 0) -> None:
        """Raises `ValueError` where the rank has no steps of one trainer."""
        events = list(events)
        tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        names = [(e["args"]["name"], e["pid"]) for e in events if e["name"] == "process_name"]
        trainers = {pid for name, pid in names if name == f"trainer-{rank}"}
        lanes = {place for place, name in tracks.items() if name.partition(" ")[0] == "step"}
        every = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) in lanes]
        steps = [event for event in every if event["pid"] in trainers]
        if len(trainers) != 1 or not steps:
            raise ValueError(f"needs the steps of one trainer {rank}: {len(trainers)} trainers, {len(steps)} steps")
        self.zero_us: float = min(event["ts"] for event in every)  # the same for all ranks of a run

        def interval(event: dict[str, Any]) -> Interval:
            began_ms = (event["ts"] - self.zero_us) / 1e3
            return began_ms, began_ms + event.get("dur", 0.0) / 1e3

        #: The first step's number as the loop counts, and by how much such numbers are larger.
        self.first: int = min(event["args"].get("number", event["args"]["step"] + 1) for event in steps)
        self.offset: int = self.first - min(event["args"]["step"] for event in steps)
        self.steps: dict[int, Interval] = {event["args"]["step"]: interval(event) for event in steps}
        own = trainers | {pid for name, pid in names if name == f"optimizer-{rank}"}
        works = [(e["args"], e) for e in events if e["pid"] in own and "kind" in e.get("args", {})]
        self.spans = [
            Span(args["kind"], args.get("lid"), args["step"], *interval(event), event["name"], args.get("dry", False))
            for args, event in works
        ]
        #: The bytes that were copied in all of the steps, and what `TrainerSeat.rates` says; 0 and nothing if unknown.
        self.to_device_bytes, self.to_host_bytes = (
            sum(event["args"].get(name, 0) for event in steps) for name in ("to_device_bytes", "to_host_bytes")
        )
        told = [event.get("args", {}) for event in events if event["name"] == f"rates of trainer-{rank}"]
        self.rates: dict[str, Any] = told[-1] if told else {}

    def of_kind(self, *kinds: str) -> list[Span]:
        return [span for span in self.spans if span.kind in kinds]

    def within(self, steps: range) -> Interval:
        """From the first step's beginning to the last one's end. Raises `ValueError` without any of them."""
        intervals = [self.steps[step] for step in steps if step in self.steps]
        if not intervals:
            raise ValueError(f"no step of {steps.start}:{steps.stop} is in the timeline, which has {len(self.steps)}")
        return intervals[0][0], intervals[-1][1]


def of_run(folder: Path) -> dict[int, Timeline]:
    """The timelines of a run's ranks, as far as there are any that can be read at once."""
    return _of_file(folder / FILE, identity(folder))


@lru_cache(maxsize=4)
def _of_file(path: Path, file: tuple[int, int] | None) -> dict[int, Timeline]:
    """It is read once, however many pages show it."""
    if file is None or path.stat().st_size > MOST_BYTES:
        return {}
    try:
        return of_ranks(read(path))
    except ConfigError:
        return {}


def read(path: Path) -> list[dict[str, Any]]:
    """A trace's events. Raises `ConfigError` if the file is none."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
        if not all(isinstance(event["name"], str) and isinstance(event["pid"], int) for event in events):
            raise ValueError("an event has no name or no process")
        return list(events)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigError(f"{path} is no timeline that can be read: {error}") from None


def of_ranks(events: Sequence[dict[str, Any]]) -> dict[int, Timeline]:
    """The timeline of each rank that has steps."""
    names = {str(event["args"]["name"]) for event in events if event["name"] == "process_name"}
    found = dict[int, Timeline]()
    for rank in sorted(int(name.removeprefix("trainer-")) for name in names if name.startswith("trainer-")):
        try:
            found[rank] = Timeline(events, rank)
        except ValueError:
            continue
    return found


# ---------------------------------------------------------------- intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order; those that touch become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def divide(intervals: Iterable[Interval], busy: Sequence[Interval]) -> tuple[list[Interval], list[Interval]]:
    """The parts of disjoint intervals that are in disjoint, ordered ones, and the parts outside of them."""
    inside, outside = [], list[Interval]()
    for start, end in intervals:
        for at in range(bisect_right(busy, start, key=lambda other: other[1]), len(busy)):
            other_start, other_end = busy[at]
            if other_start >= end:
                break
            if start < other_start:
                outside.append((start, other_start))
            inside.append((max(start, other_start), min(end, other_end)))
            start = min(end, other_end)
        if start < end:
            outside.append((start, end))
    return inside, outside
