"""A run's timeline in numbers: reads the `trace.json` that a traced run leaves. `pictures` draws it.

    python -m benchmarks.timeline RUN/trace.json … [--steps A:B] [--json]

    D2H ──▶ (GradReady) ──▶ taken in ─ waiting ─ CPU update ──▶ (WeightsReady) ──▶ H2D
         └─ latency out ─┘                                   └─ latency in ─┘

A message also waits while its receiver is at work: the optimizer looks at its inbox between two tiles, and a copy into
the GPU begins when the one before has ended. So messages whose receiver was free are also counted alone. Device times
are tied to the host's clock to some 0.1 ms.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.columns import markdown
from benchmarks.idle import Interval, union

#: Steps at the beginning that are left out of the numbers: they warm up.
WARM_UP_STEPS: Final = 2
PERCENTILE: Final = 0.99


@dataclass(frozen=True)
class Span:
    """A layer's work of one kind; milliseconds from the trace's first step."""

    kind: str
    lid: int
    step: int
    began_ms: float
    ended_ms: float


@dataclass(frozen=True)
class Latency:
    """Over messages, in ms: all of them, and those whose receiver was free."""

    messages: int
    median_ms: float | None
    p99_ms: float | None
    free_messages: int
    free_median_ms: float | None
    free_p99_ms: float | None

    @classmethod
    def of(cls, latencies: Sequence[tuple[float, bool]]) -> Self:
        """Out of (ms, whether the receiver was free)."""
        everything, free = [ms for ms, _ in latencies], [ms for ms, was_free in latencies if was_free]
        return cls(len(everything), *_median_and_p99(everything), len(free), *_median_and_p99(free))


def _median_and_p99(values: list[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    p99 = sorted(values)[math.ceil(PERCENTILE * len(values)) - 1]
    return round(statistics.median(values), 4), round(p99, 4)


class Timeline:
    """The events of one trainer's run. `steps` are the steps' intervals, `sent_ms` when each WeightsReady went out."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        """Raises `ValueError` where there is no trainer's step, or there are several trainers."""
        events = list(events)
        tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        trainers = {e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "trainer-0"}
        steps = [e for e in events if e["ph"] == "X" and tracks.get((e["pid"], e["tid"])) == "step"]
        if len(trainers) != 1 or not steps:
            raise ValueError(
                f"a timeline of one trainer's steps is wanted: {len(trainers)} trainers, {len(steps)} steps"
            )
        zero_us = min(event["ts"] for event in steps)

        def interval(event: dict[str, Any]) -> Interval:
            began_ms = (event["ts"] - zero_us) / 1e3
            return began_ms, began_ms + event.get("dur", 0.0) / 1e3

        self.steps: dict[int, Interval] = {event["args"]["step"]: interval(event) for event in steps}
        self.spans: list[Span] = []
        self.sent_ms: dict[tuple[int, int], float] = {}
        self.touching: list[Interval] = []
        for event in events:
            args = event.get("args", {})
            if "kind" in args:
                self.spans.append(Span(args["kind"], args["lid"], args["step"], *interval(event)))
            elif event["name"].startswith("WeightsReady"):
                self.sent_ms[args["step"], args["lid"]] = interval(event)[0]
            elif event["name"].startswith("touch"):
                self.touching.append(interval(event))

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(json.loads(path.read_text())["traceEvents"])

    def of_kind(self, kind: str) -> list[Span]:
        return [span for span in self.spans if span.kind == kind]

    def within(self, steps: range) -> Interval:
        """From the first step's beginning to the last one's end. Raises `ValueError` without any of them."""
        intervals = [self.steps[step] for step in steps if step in self.steps]
        if not intervals:
            raise ValueError(f"no step of {steps.start}:{steps.stop} is in the timeline, which has {len(self.steps)}")
        return intervals[0][0], intervals[-1][1]

    def positions(self) -> dict[int, int]:
        """Each layer's place in the forward order; layers without a forward of their own are behind it."""
        order = [span.lid for span in sorted(self.of_kind("forward"), key=lambda span: span.began_ms)]
        order += sorted(span.lid for span in self.spans)
        return {lid: position for position, lid in enumerate(dict.fromkeys(order))}


# ---------------------------------------------------------------- numbers


def numbers(timeline: Timeline, steps: range) -> dict[str, Any]:
    """The control plane's part of these steps, and how busy both sides were."""
    window = timeline.within(steps)
    counted = [step for step in steps if step in timeline.steps]
    step_ms = statistics.median(ended - began for began, ended in (timeline.steps[step] for step in counted))
    out, back = latencies_out(timeline, counted), latencies_in(timeline, counted)
    a_step = (out.messages + back.messages) / len(counted)
    both_ms = (out.free_median_ms or 0.0) + (back.free_median_ms or 0.0)
    return {
        "steps": len(counted),
        "step_ms": round(step_ms, 3),
        "out": asdict(out),
        "in": asdict(back),
        "messages_a_step": round(a_step, 2),
        "share_of_one_gradient": round(both_ms / step_ms, 6),
        "share_one_after_the_other": round(both_ms * a_step / 2 / step_ms, 6),
        "cpu_busy_share": round(_share(timeline.of_kind("CPU update"), window), 5),
        "stall_share": round(_share(timeline.of_kind("stall"), window), 5),
    }


def latencies_out(timeline: Timeline, steps: Sequence[int]) -> Latency:
    """From the end of a gradient's copy until the optimizer has taken GradReady in."""
    taken_ms = {(span.step, span.lid): span.began_ms for span in timeline.of_kind("waiting")}
    at_work = union([*((s.began_ms, s.ended_ms) for s in timeline.of_kind("CPU update")), *timeline.touching])
    copies = [
        (span.ended_ms, taken_ms.get((span.step, span.lid))) for span in timeline.of_kind("D2H") if span.step in steps
    ]
    return Latency.of([(taken - ended, not _covers(at_work, ended)) for ended, taken in copies if taken is not None])


def latencies_in(timeline: Timeline, steps: Sequence[int]) -> Latency:
    """From WeightsReady until the copy of the weights begins."""
    copies = timeline.of_kind("H2D")
    under_way = union((span.began_ms, span.ended_ms) for span in copies)
    found = [(span, timeline.sent_ms.get((span.step, span.lid))) for span in copies if span.step in steps]
    return Latency.of(
        [(span.began_ms - sent, not _covers(under_way, sent)) for span, sent in found if sent is not None]
    )


def _covers(intervals: Sequence[Interval], moment_ms: float) -> bool:
    """Whether a moment lies inside one of disjoint, ordered intervals."""
    index = bisect_right(intervals, moment_ms, key=lambda interval: interval[0]) - 1
    return index >= 0 and moment_ms < intervals[index][1]


def _share(spans: Iterable[Span], window: Interval) -> float:
    """The part of the window in which one of the spans was under way."""
    clipped = [(max(span.began_ms, window[0]), min(span.ended_ms, window[1])) for span in spans]
    busy = union((began, ended) for began, ended in clipped if began < ended)
    return sum(ended - began for began, ended in busy) / (window[1] - window[0])


def table(found: dict[str, dict[str, Any]]) -> str:
    """One column for each timeline."""

    def latency(name: str, prefix: str) -> Callable[[dict[str, Any]], str]:
        def cell(result: dict[str, Any]) -> str:
            median_ms, p99_ms, count = (result[name][prefix + key] for key in ("median_ms", "p99_ms", "messages"))
            return "none" if median_ms is None else f"{median_ms:.3f}, {p99_ms:.3f} ({count})"

        return cell

    out, back = "D2H ended -> GradReady taken in", "WeightsReady sent -> H2D began"
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "steps": lambda result: str(result["steps"]),
        "ms per step, median": lambda result: f"{result['step_ms']:.2f}",
        f"{out}, receiver free: ms, p99 (messages)": latency("out", "free_"),
        f"{out}, all: ms, p99 (messages)": latency("out", ""),
        f"{back}, receiver free: ms, p99 (messages)": latency("in", "free_"),
        f"{back}, all: ms, p99 (messages)": latency("in", ""),
        "GradReady and WeightsReady per step": lambda result: f"{result['messages_a_step']:g}",
        "share of the step: one gradient's two messages": lambda result: f"{result['share_of_one_gradient']:.2%}",
        "share of the step: all, if none overlapped": lambda result: f"{result['share_one_after_the_other']:.2%}",
        "share of the time: CPU updates": lambda result: f"{result['cpu_busy_share']:.2%}",
        "share of the time: the GPU stalls": lambda result: f"{result['stall_share']:.2%}",
    }
    return markdown(["", *found], [[name, *map(cell, found.values())] for name, cell in cells.items()])


# ---------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__.splitlines()[0])
    parser.add_argument("timelines", nargs="+", metavar="[TITLE=]trace.json")
    parser.add_argument("--steps", type=steps_range, metavar="A:B", help="from step A up to B, as in Python")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args(argv)
    try:
        timelines = read_titled(arguments.timelines)
        found = {title: numbers(each, arguments.steps or _settled(each)) for title, each in timelines.items()}
    except (OSError, ValueError) as error:
        print(f"benchmarks.timeline: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1) if arguments.json else table(found))
    return 0


def read_titled(texts: Sequence[str]) -> dict[str, Timeline]:
    """By title: TITLE=PATH, or a path, whose run's folder is the title. Raises `ValueError` if two have the same."""
    titled: dict[str, Timeline] = {}
    for text in texts:
        title, equals, path = text.rpartition("=")
        title, path = (title, path) if equals else (Path(text).resolve().parent.name, text)
        if title in titled:
            raise ValueError(f"two timelines are called {title}: give each a title, as in before={path}")
        titled[title] = Timeline.read(Path(path))
    return titled


def steps_range(text: str) -> range:
    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal() or int(first) >= int(last):
        raise argparse.ArgumentTypeError(f"{text!r}: two steps, as in 4:6")
    return range(int(first), int(last))


def _settled(timeline: Timeline) -> range:
    return range(min(timeline.steps) + WARM_UP_STEPS, max(timeline.steps) + 1)


if __name__ == "__main__":
    sys.exit(main())
