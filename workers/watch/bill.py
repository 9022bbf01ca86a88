"""What a step's time went to, by resource, beside the least that each resource needs: `hytrain-monitor trace RUN`.

    Timeline of a rank ─▶ bill ─▶ rows ─▶ as_text, report.py's table, gantt_text

A trainer's track `compute` is what its device (on a CPU run: its cores) did and waited for, so its parts add up to the
step. A wait for weights has a cause of its own for each part of it, found in what the other tracks show at that time.
Other resources work beside that track. Their bound is the time that their work takes at the rate that was calibrated
before the first step, or that was reached in these steps if that is faster. The bound of a part of the track is its
shortest time in any of the steps. These parts follow each other, so a step takes the sum of their bounds at least.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from hytrain.errors import ConfigError
from hytrain.readable import seconds
from hytrain.run.trace import FILE
from workers import run_folder
from workers.watch.timeline import KINDS, Interval, Kind, Span, Timeline, divide, of_ranks, read, union

#: A cheaper row is not worth a change, or a line.
WORTH: Final = 0.01
SEEN: Final = 0.001
#: So many layers are named that waited longest.
MOST_LAYERS: Final = 3
HEADS: Final = ("of a step", "busy", "bound")


@dataclass(frozen=True, slots=True)
class Part:
    """What a step's time goes to: its name, and advice on how to make it shorter, if there is any."""

    title: str
    advice: str = ""


_COPIES: Final = "a higher k copies less; `hytrain-cluster doctor` tells whether the link is as fast as it should be."
#: In the order of a bill.
PARTS: Final = {
    "computing": Part("computing"),
    "launches": Part(
        "launches of kernels",
        "a larger batch, torch.compile, or a faster core for the trainer.",
    ),
    "cpu": Part(
        "updates on the CPU",
        "let the GPU own more layers (--set-k), or give the optimizer more cores (--set-threads, cores=).",
    ),
    "out": Part("copies to the host", _COPIES),
    "in": Part("copies to the GPU", _COPIES),
    "host": Part("host memory"),
    "memory": Part(
        "GPU memory: offloaded weights, visits",
        "leave the GPU more memory: a smaller batch, a lower offload_weights= or visit=, or a higher gpu_memory_limit.",
    ),
    "ranks": Part(
        "other ranks",
        "hytrain-monitor names the slowest rank: look at what that one waits for, and at its share of the data.",
    ),
    "loop": Part(
        "the loop between steps",
        "load data ahead of time in other processes (DataLoader's num_workers), and log and validate less often.",
    ),
    "after": Part(
        "between backward and step()",
        "this is the gradients' norm, the last copies, and what the loop does there, such as loss.item(): "
        "do that after opt.step().",
    ),
    "boundary": Part(
        "step()",
        "layers that change places make it longer: if plans follow each other, set k (--set-k).",
    ),
    "rest": Part("not measured"),
}
#: What the trainer is busy with itself: nothing else can go on at the same time on its track.
OWN: Final = ("computing", "launches", "loop", "after", "boundary")
#: Kinds of spans during which a resource that works beside the track is busy.
BESIDE: Final = {
    "cpu": ("CPU update",),
    "out": ("D2H", "visit"),
    "in": ("H2D", "visit"),
    "host": ("CPU update", "D2H", "H2D", "visit"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a bill, in milliseconds per step. `mostly`: the layers, or kinds of work, that took most of `ms`.

    `ms`: the part of the step; None for what nothing waits for by itself. `busy_ms`: how long the resource worked, also
    while the trainer computed; None for what is no work. `bound_ms`: the least time for that, None if it is not known.
    `at_most`: the bound may be lower, as the resource may be faster than anybody has seen.
    """

    key: str
    ms: float | None
    busy_ms: float | None = None
    bound_ms: float | None = None
    mostly: str = ""
    at_most: bool = False

    @property
    def part(self) -> Part:
        return PARTS[self.key]

    @property
    def cells(self) -> tuple[str, str, str]:
        """Under `HEADS`."""
        of_step, busy, bound = (
            "" if ms is None else seconds(ms / 1e3) for ms in (self.ms, self.busy_ms, self.bound_ms)
        )
        return of_step, busy, f"≤ {bound}" if self.at_most and bound else bound


@dataclass(frozen=True, slots=True)
class Bill:
    """A rank's steps: how many, from which on, how long they are, and the rows, whose parts of a step add up to it."""

    first: int
    steps: int
    step_ms: float
    rows: tuple[Row, ...]

    @property
    def seen(self) -> list[Row]:
        """The rows that are worth a line, and what was not measured, however little it is."""
        least_ms = SEEN * self.step_ms
        return [row for row in self.rows if row.key == "rest" or max(row.ms or 0.0, row.busy_ms or 0.0) >= least_ms]

    @property
    def waits(self) -> list[Row]:
        """What the device did other than computing, most first."""
        waits = [row for row in self.seen if row.part.advice and self.share(row) >= SEEN]
        return sorted(waits, key=lambda row: -self.share(row))

    def share(self, row: Row) -> float:
        """Of the step."""
        return (row.ms or 0.0) / self.step_ms

    def is_costly(self, row: Row) -> bool:
        """Whether it is worth a change."""
        return bool(row.part.advice) and self.share(row) >= WORTH

    @property
    def computing(self) -> float:
        """The share of the step."""
        return sum(self.share(row) for row in self.rows if row.key == "computing")

    @property
    def limit(self) -> str:
        """A sentence: what needs most time, however well everything else overlaps with it.

        What the trainer does itself, it does one after the other.
        """
        known = {row.part.title: row.bound_ms for row in self.rows if row.bound_ms and not row.at_most}
        own = {PARTS[key].title: known.pop(PARTS[key].title) for key in OWN if PARTS[key].title in known}
        alone = [([title], bound_ms) for title, bound_ms in known.items()]
        named = sorted((title for title in own if own[title] >= WORTH * self.step_ms), key=lambda title: -own[title])
        titles, bound_ms = max([(named or list(own), sum(own.values())), *alone], key=lambda bound: bound[1])
        if not bound_ms:
            return "the limit is not known"
        what = " and ".join([", ".join(titles[:-1]), titles[-1]] if titles[1:] else titles)
        share = f"{bound_ms / self.step_ms:.0%} of what it took"
        return f"a step takes {seconds(bound_ms / 1e3)} or more, {share}: the time for {what}"

    def __str__(self) -> str:
        """The steps and how long they are."""
        many = f"{self.steps} steps from step {self.first} on" if self.steps > 1 else f"step {self.first}"
        return f"{many}, {seconds(self.step_ms / 1e3)} each"


# ---------------------------------------------------------------- the arithmetic


def bill(timeline: Timeline) -> Bill:
    """What the steps of a rank consist of, and what limits them."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    by_step: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for key, span, of_what, took_ms in _pieces(timeline):
        spent[key][of_what] += took_ms
        by_step[key][span.step] += took_ms
    count = len(timeline.steps)
    step_ms = sum(end - start for start, end in timeline.steps.values()) / count
    ms = {key: sum(whats.values()) / count for key, whats in spent.items()}
    ms["rest"] = step_ms - sum(ms.values())
    mostly = {key: _most(whats, count, timed=key == "computing") for key, whats in spent.items() if key not in OWN[1:]}
    rows = {key: Row(key, ms.get(key, 0.0), mostly=mostly.get(key, "")) for key in PARTS}
    for key in OWN:
        fastest_ms = min(by_step[key].get(step, 0.0) for step in timeline.steps)
        rows[key] = replace(rows[key], busy_ms=ms.get(key, 0.0), bound_ms=fastest_ms)
    for key, least_ms in _least_ms(timeline).items():
        spans = [span.interval for span in timeline.of_kind(*BESIDE[key]) if span.step in timeline.steps]
        busy_ms = sum(end - start for start, end in union(spans)) / count  # also where they go on in the next step
        rows[key] = replace(rows[key], busy_ms=busy_ms, bound_ms=min(busy_ms, least_ms) if least_ms else None)
    rows["host"] = replace(rows["host"], ms=None, at_most=True)
    return Bill(timeline.first, count, step_ms, tuple(rows.values()))


def _most(whats: dict[str, float], count: int, *, timed: bool) -> str:
    """The names that took most, with their times per step if they are asked for."""
    most = sorted((what for what in whats if what and whats[what] > 0), key=lambda what: -whats[what])[:MOST_LAYERS]
    return ", ".join(f"{what} {seconds(whats[what] / count / 1e3)}" if timed else what for what in most)


def _pieces(timeline: Timeline) -> Iterator[tuple[str, Span, str, float]]:
    """The parts of the trainer's track: key, span, kind or layer, milliseconds."""
    for span in timeline.spans:
        if span.step not in timeline.steps:
            continue
        part, ms = KINDS.get(span.kind, Kind()).part, span.ended_ms - span.began_ms
        if part == "computing":
            yield "launches" if span.is_dry else "computing", span, span.kind, ms
        elif part:
            yield part, span, span.layer, ms
    for span, key, parts in _stalls(timeline):
        yield key, span, span.layer, sum(end - start for start, end in parts)


def _least_ms(timeline: Timeline) -> dict[str, float]:
    """What `BESIDE` takes per step at calibrated rates; 0 where a rate is not known.

    Nobody knows how fast the host's memory is. It is at least as fast as the updates that were calibrated.
    """
    rates, numels = timeline.rates, timeline.rates.get("numels", ())
    updated = {(span.step, span.lid) for span in timeline.of_kind("CPU update") if span.step in timeline.steps}
    numel = sum(numels[lid] for _, lid in updated if lid is not None and lid < len(numels))
    update_s, update_bytes = rates.get("cpu_update_s") or 0.0, rates.get("update_bytes") or 1.0
    copied_bytes = timeline.to_host_bytes + timeline.to_device_bytes
    bounds_s = {
        "cpu": numel * update_s,
        "out": timeline.to_host_bytes * (rates.get("to_host_s") or 0.0),
        "in": timeline.to_device_bytes * (rates.get("to_device_s") or 0.0),
        "host": (numel * update_bytes + copied_bytes) * update_s / update_bytes,
    }
    return {key: bound_s * 1e3 / len(timeline.steps) for key, bound_s in bounds_s.items()}


def _stalls(timeline: Timeline) -> Iterator[tuple[Span, str, list[Interval]]]:
    """Each wait for weights or memory, in parts with their causes.

    A module's wait has the name of its first layer, and may be for another one's weights. So what happened to that
    layer comes first, and then what the CPU and the link did for others.
    """
    causes = (("cpu", ("CPU update", "waiting")), ("out", ("D2H",)), ("in", ("H2D",)), ("memory", ("visit",)))
    by_step, by_layer = defaultdict[int, list[Span]](list), defaultdict[tuple[int, int | None], list[Span]](list)
    for span in timeline.of_kind(*(kind for _, kinds in causes for kind in kinds)):
        by_step[span.step].append(span)
        by_layer[span.step, span.lid].append(span)

    def busy(spans: Sequence[Span]) -> list[tuple[str, list[Interval]]]:
        return [(cause, union(span.interval for span in spans if span.kind in kinds)) for cause, kinds in causes]

    @cache
    def busy_for_others(step: int) -> list[tuple[str, list[Interval]]]:
        return busy(by_step[step - 1] + by_step[step])

    for stall in timeline.of_kind("stall"):
        if stall.step not in timeline.steps:
            continue
        own = by_layer[stall.step - 1, stall.lid] + by_layer[stall.step, stall.lid]
        copies = [(cause, taken) for cause, taken in busy(own) if cause in ("out", "in")]
        rest = [stall.interval]
        for cause, taken in (*copies, *busy_for_others(stall.step)):
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
        description="Say what the steps in a run's timeline, trace.json, consist of, and which resource limits them.",
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
    """The bill of each rank, what limits it, and advice in the order of cost. `ConfigError` if it is no timeline."""
    ranks = of_ranks(read(path))
    if not ranks:
        raise ConfigError(f"{path} has no whole step of a trainer")
    return "\n\n".join("\n".join(_lines(rank, bill(one), len(ranks) > 1)) for rank, one in ranks.items())


def _lines(rank: int, found: Bill, is_one_of_several: bool) -> Iterator[str]:
    yield f"{f'rank {rank}: ' if is_one_of_several else ''}{found}"
    yield ""
    of_step, busy, bound = HEADS
    yield f"{'':<38}{of_step:>17}{busy:>11}{bound:>13}"
    for row in found.seen:
        of_step, busy, bound = row.cells
        share = "" if row.ms is None else f"{found.share(row):z.1%}"
        yield f"{row.part.title:<38}{of_step:>10}{share:>7}{busy:>11}{bound:>13}   {row.mostly}".rstrip()
    yield ""
    yield found.limit
    costly = [row for row in found.waits if found.is_costly(row)]
    for row in costly:
        yield f"{row.part.title}: {row.part.advice}"
    if not costly:
        yield f"besides computing, nothing takes {WORTH:.0%} of a step"
