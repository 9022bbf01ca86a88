"""Checks a file against the rules of the Trace Event format, as far as HyTrain uses it: phases X, i, C and M.

The rules: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

#: What an event of each phase has to have besides name, ph, pid and tid, and what it may have.
FIELDS = {
    "X": ({"ts", "dur"}, {"args"}),
    "i": ({"ts", "s"}, {"args"}),
    "C": ({"ts", "args"}, set()),
    "M": ({"args"}, set()),
}
METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}
#: Times are rounded to a thousandth of a microsecond.
ROUNDED_US = 0.0021

Event = dict[str, Any]


def check(path: Path) -> list[Event]:
    """The file's events. Raises `AssertionError` if it breaks a rule."""
    whole = json.loads(path.read_text(), parse_constant=_refuse)
    assert whole.keys() == {"displayTimeUnit", "traceEvents"} and whole["displayTimeUnit"] in ("ms", "ns")
    check_events(whole["traceEvents"])
    return list(whole["traceEvents"])


def check_lines(path: Path) -> list[Event]:
    """The events of one process, of which each has a line of its own."""
    events = [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines() if line]
    check_events(events)
    return events


def check_events(events: list[Event]) -> None:
    for event in events:
        _check_event(event)
    named = {kind: {_place(e, kind) for e in events if e["name"] == kind} for kind in ("process_name", "thread_name")}
    spans: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            assert (event["pid"],) in named["process_name"], f"of a process without a name: {event}"
        if event["ph"] in "Xi":
            assert (event["pid"], event["tid"]) in named["thread_name"], f"on a track without a name: {event}"
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track in spans.values():
        _check_nested(track)


def _check_event(event: Event) -> None:
    assert event["ph"] in FIELDS, event
    needed, allowed = FIELDS[event["ph"]]
    usual = {"name", "ph", "pid", "tid"}
    assert usual | needed <= event.keys() <= usual | needed | allowed, event
    assert isinstance(event["name"], str) and event["name"], event
    assert all(type(event[name]) is int and event[name] >= 0 for name in ("pid", "tid")), event
    for name in event.keys() & {"ts", "dur"}:
        assert type(event[name]) in (int, float) and math.isfinite(event[name]) and event[name] >= 0, event
    assert isinstance(event.get("args", {}), dict), event
    if event["ph"] == "i":
        assert event["s"] in ("g", "p", "t"), event
    if event["ph"] == "C":
        assert event["args"] and all(type(value) in (int, float) for value in event["args"].values()), event
    if event["ph"] == "M":
        kind = METADATA[event["name"]]
        assert event["args"].keys() == {kind} and type(event["args"][kind]) is (str if kind == "name" else int), event


def _check_nested(spans: list[tuple[float, float]]) -> None:
    """Complete events of one track lie beside each other, or one inside of another."""
    around: list[float] = []
    for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1] <= began + ROUNDED_US:
            around.pop()
        assert not around or ended <= around[-1] + ROUNDED_US, f"{began} to {ended} begins in a span until {around[-1]}"
        around.append(ended)


def _place(event: Event, kind: str) -> tuple[int, ...]:
    return (event["pid"],) if kind == "process_name" else (event["pid"], event["tid"])


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
