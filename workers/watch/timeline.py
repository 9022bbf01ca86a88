"""Reads a run's timeline, and says what each trainer waited for: `hytrain-monitor trace RUN`.

    trace.json ─▶ Timeline of a rank ─┬─▶ shares ─▶ as_text, report.py's table
                                      └─▶ report.py's chart, benchmarks.timeline

A trainer's track `compute` is what its device (on a CPU run: its cores) did and waited for. A wait for weights has a
cause of its own for each part of it, found in what the other tracks show at that time.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from hytrain.errors import ConfigError
from hytrain.readable import seconds
from hytrain.run.trace import FILE, identity
from workers import run_folder

#: (start, end)
Interval = tuple[float, float]
#: A cheaper cause is not worth a change.
WORTH: Final = 0.01
SEEN: Final = 0.001
#: So many layers are named that waited longest.
MOST_LAYERS: Final = 3
#: A GPU that waits for launches counts as computing. In so many backwards that is worth a word.
MOST_STARVED: Final = 0.1
#: A larger file is for a viewer only: a page would need too much memory to read it.
MOST_BYTES: Final = 64 << 20
WORK: Final = ("forward", "backward", "update", "micro-batches")


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a trainer's device did not compute: a name, and what can be done."""

    title: str
    advice: str


CAUSES: Final = {
    "cpu": Cause(
        "weights that the CPU still updated",
        "let the GPU own more layers (--set-k), or give the optimizer more cores (--set-threads, cores=).",
    ),
    "link": Cause(
        "copies between host and GPU",
        "a higher k copies less; `hytrain-cluster doctor` tells whether the link is as fast as it should be.",
    ),
    "memory": Cause(
        "memory on the GPU: offloaded weights, visits",
        "leave the GPU more memory: a smaller batch, a lower offload_weights= or visit=, or a higher gpu_memory_limit.",
    ),
    "ranks": Cause(
        "other ranks",
        "hytrain-monitor names the slowest rank: look at what that one waits for, and at its share of the data.",
    ),
    "loop": Cause(
        "the loop between steps",
        "load data ahead of time in other processes (DataLoader's num_workers), and log and validate less often.",
    ),
    "after": Cause(
        "between backward and step()",
        "this is the gradients' norm, the last copies, and what the loop does there, such as loss.item(): "
        "do that after opt.step().",
    ),
    "boundary": Cause(
        "step()",
        "layers that change places make it longer: if plans follow each other, set k (--set-k).",
    ),
}
#: What spans of a trainer's track mean that are no work, but for stalls.
OF_KIND: Final = {
    "waits for all-gather": "ranks",
    "between steps": "loop",
    "after backward": "after",
    "step()": "boundary",
}


@dataclass(frozen=True)
class Span:
    """Work of one kind, or a wait, of a layer if `lid` is one; milliseconds from the trace's first step."""

    kind: str
    lid: int | None
    step: int
    began_ms: float
    ended_ms: float
    name: str = ""

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
        starved = [event["args"]["starved"] for event in steps if "starved" in event["args"]]
        #: The share of layers' backwards in which the device ran out of queued work; None if that is not known.
        self.starved: float | None = sum(starved) / len(starved) if starved else None
        self.steps: dict[int, Interval] = {event["args"]["step"]: interval(event) for event in steps}
        own = trainers | {pid for name, pid in names if name == f"optimizer-{rank}"}
        works = [(e["args"], e) for e in events if e["pid"] in own and "kind" in e.get("args", {})]
        self.spans = [
            Span(args["kind"], args.get("lid"), args["step"], *interval(event), name=event["name"])
            for args, event in works
        ]

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


# ---------------------------------------------------------------- what was waited for


@dataclass(frozen=True, slots=True)
class Share:
    """The time of a cause, or of a kind of work: milliseconds per step, and the layers that took most of it."""

    key: str
    ms: float
    layers: tuple[str, ...] = ()

    @property
    def cause(self) -> Cause:
        return CAUSES[self.key]

    @property
    def mostly(self) -> str:
        """The layers that a cause is about; some causes are about none."""
        return ", ".join(filter(None, self.layers)) if self.key in ("cpu", "link", "memory", "ranks") else ""


@dataclass(frozen=True, slots=True)
class Shares:
    """A rank's steps: how many, from which on, how long they are, and what they consist of, both most first."""

    first: int
    steps: int
    step_ms: float
    work: tuple[Share, ...]
    waits: tuple[Share, ...]
    starved: float | None

    @property
    def busy(self) -> float:
        return sum(share.ms for share in self.work) / self.step_ms

    @property
    def seen(self) -> list[Share]:
        """The waits that are worth a line."""
        return [share for share in self.waits if share.ms >= SEEN * self.step_ms]

    @property
    def rows(self) -> list[tuple[str, float, str, str]]:
        """For a table: computing and the waits, each with its milliseconds per step, what is most of it, and advice."""
        work = ", ".join(f"{share.key} {seconds(share.ms / 1e3)}" for share in self.work)
        waits = [
            (share.cause.title, share.ms, share.mostly, share.cause.advice if self.is_costly(share) else "")
            for share in self.seen
        ]
        return [("computing", self.busy * self.step_ms, work, ""), *waits]

    def is_costly(self, wait: Share) -> bool:
        """Whether it is worth a change."""
        return wait.ms >= WORTH * self.step_ms

    def __str__(self) -> str:
        """The steps and how long they are."""
        many = f"{self.steps} steps from step {self.first} on" if self.steps > 1 else f"step {self.first}"
        return f"{many}, {seconds(self.step_ms / 1e3)} each"


def shares(timeline: Timeline) -> Shares:
    """What the steps of a rank consist of."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in timeline.spans:
        if span.step not in timeline.steps:
            continue
        if span.kind in WORK or span.kind in OF_KIND:
            spent[OF_KIND.get(span.kind, span.kind)][span.layer] += span.ended_ms - span.began_ms
    for span, cause, parts in _stalls(timeline):
        spent[cause][span.layer] += sum(end - start for start, end in parts)
    count, names = len(timeline.steps), {*WORK, *CAUSES}
    found = [
        Share(key, sum(layers.values()) / count, tuple(sorted(layers, key=lambda name: -layers[name])[:MOST_LAYERS]))
        for key, layers in spent.items()
        if key in names and any(layers.values())
    ]
    found.sort(key=lambda share: -share.ms)
    whole_ms = sum(end - start for start, end in timeline.steps.values())
    return Shares(
        first=timeline.first,
        steps=count,
        step_ms=whole_ms / count,
        work=tuple(share for share in found if share.key in WORK),
        waits=tuple(share for share in found if share.key in CAUSES),
        starved=timeline.starved,
    )


def _stalls(timeline: Timeline) -> Iterator[tuple[Span, str, list[Interval]]]:
    """Each wait for weights or memory, in parts with their causes.

    A module's wait has the name of its first layer, and may be for another one's weights. So what happened to that
    layer comes first, and then what the CPU and the link did for others.
    """
    causes = (("cpu", ("CPU update", "waiting")), ("link", ("D2H", "H2D")), ("memory", ("visit",)))
    by_step, by_layer = defaultdict[int, list[Span]](list), defaultdict[tuple[int, int | None], list[Span]](list)
    for span in timeline.of_kind(*(kind for _, kinds in causes for kind in kinds)):
        by_step[span.step].append(span)
        by_layer[span.step, span.lid].append(span)

    @cache
    def busy(step: int) -> list[tuple[str, list[Interval]]]:
        then = by_step[step - 1] + by_step[step]
        return [(cause, union(span.interval for span in then if span.kind in kinds)) for cause, kinds in causes]

    for stall in timeline.of_kind("stall"):
        if stall.step not in timeline.steps:
            continue
        own = by_layer[stall.step - 1, stall.lid] + by_layer[stall.step, stall.lid]
        copies = union(span.interval for span in own if span.kind in ("D2H", "H2D"))
        rest = [stall.interval]
        for cause, taken in (("link", copies), *busy(stall.step)):
            parts, rest = divide(rest, taken)
            yield stall, cause, parts
        is_known = bool(by_step[stall.step - 1])  # or else the timeline begins with this step
        by_cpu = any(span.kind == "CPU update" and span.step < stall.step for span in own)
        yield stall, "cpu" if by_cpu or not is_known else "memory", rest  # messages about it; or there was no room


# ---------------------------------------------------------------- the text


def main(argv: Sequence[str]) -> int:
    """The command line of `hytrain-monitor trace`. Raises `ConfigError` without a timeline."""
    parser = argparse.ArgumentParser(
        prog="hytrain-monitor trace",
        description="Say what the trainers of a run waited for in the steps of its timeline, trace.json.",
        epilog="hytrain-monitor --trace N draws the next N steps of a run that is going on.",
    )
    parser.add_argument("run", help="a run's folder, the name of a run of a program, or a trace.json")
    path = _find(parser.parse_args(argv).run)
    print(as_text(path))
    return 0


def _find(wanted: str) -> Path:
    if (path := Path(wanted)).is_file():
        return path
    if (folder := run_folder.containing(FILE, wanted)) is not None:
        return folder / FILE
    raise ConfigError(f"{wanted} has no {FILE}: draw some steps with hytrain-monitor {wanted} --trace 8, while it runs")


def as_text(path: Path) -> str:
    """What each rank waited for, in the order of cost, with advice. Raises `ConfigError` if the file is no timeline."""
    ranks = of_ranks(read(path))
    if not ranks:
        raise ConfigError(f"{path} has no whole step of a trainer")
    return "\n\n".join("\n".join(_lines(rank, shares(one), len(ranks) > 1)) for rank, one in ranks.items())


def _lines(rank: int, found: Shares, is_one_of_several: bool) -> Iterator[str]:
    yield f"{f'rank {rank}: ' if is_one_of_several else ''}{found}"
    yield ""
    for title, ms, mostly, _ in found.rows:
        yield f"{title:<44} {seconds(ms / 1e3):>10} {ms / found.step_ms:6.1%}   {mostly}".rstrip()
    yield ""
    costly = [share for share in found.waits if found.is_costly(share)]
    for share in costly:
        yield f"{share.cause.title}: {share.cause.advice}"
    if found.starved is not None and found.starved >= MOST_STARVED:
        yield (
            f"launches: in {found.starved:.0%} of the layers' backwards the GPU had no queued work, which counts as "
            "computing: a larger batch, torch.compile, or a faster core for the trainer."
        )
    elif not costly:
        yield f"besides computing, nothing takes {WORTH:.0%} of a step"
