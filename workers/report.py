"""`hytrain-monitor report`: one HTML page about one or several runs, read from their folders, live or ended.

    metrics.jsonl ─ every record once ─▶ Story: lines for charts, plans, sums ┐
    trace.json ─ timeline, gantt ─────────────────────────────────────────────┤
    environment.json, recipe.yaml ────────────────────────────────────────────┼─▶ page ─▶ report.html
    pages/: style, script, uPlot ─────────────────────────────────────────────┘

The page needs nothing else: it can be mailed, or kept. Charts have at most `POINTS` points per line, each the mean of
as many steps. Where there are no records of a metric, there is no chart.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from string import Template
from typing import Any, Final

from hytrain.errors import ConfigError
from hytrain.readable import GIB, seconds
from protocol.handles import Precision
from protocol.metrics import BY_NAME, parsed
from workers import gantt, run_folder, timeline
from workers.timeline import Timeline

PAGES: Final = Path(__file__).with_name("pages")
SCRIPTS: Final = ("uplot/uPlot.iife.min.js", "charts.js")
POINTS: Final = 500
#: The last so many steps are those of "at the end".
LAST_STEPS: Final = 50
#: The first steps are slow, and belong to no median.
WARM_UP_STEPS: Final = 5
#: At most so many plans are listed; the newest ones.
MOST_PLANS: Final = 200


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart's title, its unit, the factor of its values, and its lines: metrics with their names.

    If it `cuts`, a few peaks may be higher than the chart: what most steps need is to be seen.
    """

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    factor: float = 1.0
    cuts: bool = False


CHARTS: Final = (
    Chart("Loss", "nats", (("loss", "training"), ("validation_loss", "validation"))),
    Chart("Step time", "s", (("step_s", "measured"), ("predicted_step_s", "predicted")), cuts=True),
    Chart("Waiting for weights or memory", "s", (("stall_s", "stall"),), cuts=True),
    Chart("The CPU's updates", "s", (("cpu_busy_s", "busy"),), cuts=True),
    Chart("k: share of parameters that the GPU owns", "", (("k", "k"),)),
    Chart(
        "Layers by placement",
        "layers",
        (("gpu_layers", "GPU owns"), ("visiting_layers", "state visits"), ("offloaded_layers", "weights offloaded")),
    ),
    Chart("Tokens per second", "1/s", (("tokens_per_s", "tokens/s"),)),
    Chart("Learning rate", "", (("lr", "learning rate"),)),
    Chart("Norm of the gradients", "", (("grad_norm", "norm"),), cuts=True),
    Chart("GPU memory", "GiB", (("gpu_peak_bytes", "peak"), ("predicted_gpu_bytes", "planned")), 1 / GIB),
    Chart("Copies per step", "GiB", (("to_device_bytes", "to the GPU"), ("to_host_bytes", "to the host")), 1 / GIB),
    Chart("Power", "W", (("gpu_watts", "GPU"), ("host_watts", "host"))),
    Chart("Time in which the GPU ran something", "", (("gpu_utilization", "share"),)),
    Chart("Host memory, as planned", "GiB", (("predicted_host_bytes", "planes, activations, processes"),), 1 / GIB),
)
DRAWN: Final = tuple(dict.fromkeys(name for chart in CHARTS for name, _ in chart.lines))


@dataclass(slots=True)
class Plan:
    """A plan that took effect in `step`: what it expected, and how long its steps were."""

    step: int
    k: float
    visiting: int
    offloaded: int
    reason: str
    at: float | None = None  # seconds since 1970
    expected_s: float | None = None
    steps_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True)
class Rank:
    """One of several ranks on this machine: its medians, and its last k."""

    rank: int
    step_s: float
    stall_s: float
    gather_s: float | None
    k: float


@dataclass(slots=True)
class Story:
    """What a run's folder tells. `lines` has, for each metric, steps and means."""

    run: run_folder.Run
    starts: list[dict[str, Any]]
    recipe: str | None
    ranks: list[Rank] = field(default_factory=list)
    timelines: dict[int, Timeline] = field(default_factory=dict)  # by rank
    lines: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    steps: int = 0  # records
    first: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    newest: dict[str, float] = field(default_factory=dict)  # the last value of each metric
    step_s: array[float] = field(default_factory=lambda: array("d"))
    missed: array[float] = field(default_factory=lambda: array("d"))  # measured steps relative to predicted ones
    tokens_per_s: array[float] = field(default_factory=lambda: array("d"))
    losses: list[float] = field(default_factory=list)
    stall_s: float = 0.0
    joules: dict[str, list[float]] = field(default_factory=dict)  # of each counter, with the tokens meanwhile
    diverged_at: float | None = None


def main(argv: Sequence[str]) -> int:
    """The command line of `hytrain-monitor report`. Raises `ConfigError` for a folder without records."""
    parser = argparse.ArgumentParser(
        prog="hytrain-monitor report", description="Write one HTML page about runs, live or ended."
    )
    parser.add_argument("run", nargs="+", help="a run's folder, or the name of a run of a program")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (report.html in the first folder)")
    asked = parser.parse_args(argv)
    folders = [_folder(wanted) for wanted in asked.run]
    out = asked.out or folders[0] / "report.html"
    text = page([read(folder) for folder in folders], datetime.now(UTC))
    try:
        out.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; choose another with --out") from None
    print(str(out).encode(errors="replace").decode())
    return 0


def _folder(wanted: str) -> Path:
    for folder in (Path(wanted), run_folder.default() / wanted):
        if (folder / "metrics.jsonl").is_file():
            return folder.resolve()
    raise ConfigError(f"{wanted} has no metrics.jsonl: give the folder of a run that has trained a step")


# ---------------------------------------------------------------- what a run's folder tells


def read(folder: Path) -> Story:
    """Read a run's folder. Lines that a crash has cut off are left out."""
    starts: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):
        known = json.loads((folder / "environment.json").read_text())
        starts = [one for one in known if isinstance(one, dict)] if isinstance(known, list) else []
    recipe = folder / "recipe.yaml"
    story = Story(run_folder.look(folder), starts, recipe.read_text() if recipe.is_file() else None)
    metrics = folder / "metrics.jsonl"
    with metrics.open("rb") as file:
        count = sum(1 for _ in file)
    means = _Means(max(1, math.ceil(count / POINTS)))
    with metrics.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                record = parsed(line)
                if isinstance(record.get("step"), int):
                    means.add(record)
                    _add(story, record)
    if not story.steps:
        raise ConfigError(f"{folder} has no record of a step: there is nothing to report")
    story.lines = means.lines()
    others = sorted(folder.glob("metrics-[0-9]*.jsonl"))
    if others := [path for path in others if not path.stem.endswith("replaced")]:
        story.ranks = [rank for path in (metrics, *others) if (rank := _rank(path)) is not None]
    story.timelines = timeline.of_run(folder)
    return story


def _rank(metrics: Path) -> Rank | None:
    """None for a rank without a step after the first slow ones."""
    found: dict[str, list[float]] = {"step_s": [], "stall_s": [], "gather_s": []}
    rank, k = 0, 0.0
    with metrics.open("rb") as file:
        for line in islice(file, WARM_UP_STEPS, None):
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                record = parsed(line)
                rank, k = record["rank"], record["k"]
                for name, values in found.items():
                    if (value := record.get(name)) is not None:
                        values.append(value)
    if not found["step_s"]:
        return None
    step_s, stall_s, gather_s = (median(values) if values else None for values in found.values())
    return Rank(rank, step_s or 0.0, stall_s or 0.0, gather_s, k)


class _Means:
    """The means of each metric over so many records."""

    def __init__(self, size: int) -> None:
        self._size, self._count = size, 0
        self._open: dict[str, tuple[float, int]] = {}
        self._lines: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in DRAWN}
        self._step = 0

    def add(self, record: dict[str, Any]) -> None:
        self._step = record["step"]
        for name in DRAWN:
            if (value := _number(record, name)) is not None:
                total, count = self._open.get(name, (0.0, 0))
                self._open[name] = total + value, count + 1
        self._count += 1
        if self._count == self._size:
            self._close()

    def lines(self) -> dict[str, tuple[list[int], list[float]]]:
        self._close()
        return {name: line for name, line in self._lines.items() if line[0]}

    def _close(self) -> None:
        for name, (total, count) in self._open.items():
            self._lines[name][0].append(self._step)
            self._lines[name][1].append(total / count)
        self._open.clear()
        self._count = 0


def _add(story: Story, record: dict[str, Any]) -> None:
    story.first = story.first or record
    story.last = record
    story.steps += 1
    story.newest |= {name: value for name in BY_NAME if (value := _number(record, name)) is not None}
    if isinstance(reason := record.get("reason"), str):
        layers = record.get("visiting_layers", 0), record.get("offloaded_layers", 0)
        at = _number(record, "wall_time")
        story.plans.append(Plan(record["step"], _number(record, "k") or 0.0, *layers, reason, at))
    if (loss := _number(record, "loss")) is not None:
        story.losses = [*story.losses[1 - LAST_STEPS :], loss]
    if story.diverged_at is None:
        story.diverged_at = _number(record, "diverged_at")
    if (rate := _number(record, "tokens_per_s")) is not None:
        story.tokens_per_s.append(rate)
    step_s, predicted_s = _number(record, "step_s"), _number(record, "predicted_step_s")
    if not step_s or story.steps <= WARM_UP_STEPS:
        return
    story.step_s.append(step_s)
    story.stall_s += _number(record, "stall_s") or 0.0
    tokens = _number(record, "tokens") if "rank" not in record else None  # those of all ranks, on all GPUs
    for name in ("gpu_watts", "host_watts"):
        if (watts := _number(record, name)) is not None and tokens:
            total = story.joules.setdefault(name, [0.0, 0.0])
            total[0] += watts * step_s
            total[1] += tokens
    if predicted_s:
        story.missed.append(step_s / predicted_s)
    if story.plans:
        plan = story.plans[-1]
        plan.steps_s.append(step_s)
        plan.expected_s = plan.expected_s or predicted_s


def _number(record: dict[str, Any], name: str) -> float | None:
    """A number of a record; None for what is none."""
    value = record.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


# ---------------------------------------------------------------- the page


@dataclass(frozen=True, slots=True)
class Live:
    """A run whose page web.py keeps up to date: what the page has from the run's folder.

    `after`: so many records came before. `drawn`: which timeline is the newest; "" is none.
    """

    name: str
    after: int
    drawn: str


def page(stories: Sequence[Story | None], now: datetime, *, live: Sequence[Live] | None = None) -> str:
    """The whole page, of runs that have stories or are `live`."""
    is_live = live is not None
    folders = [story.run.folder for story in stories if story is not None]
    names = names_of(folders) if live is None else [one.name for one in live]
    title = ", ".join(names)
    kind = "A HyTrain report, written" if live is None else f"HyTrain, live: {_runs(len(names))}. The summary is of"
    so_far = {"after": [one.after for one in live or ()], "drawn": [one.drawn for one in live or ()]}
    data = {"runs": names, **so_far, "charts": list(_charts(stories, names, is_live=is_live))}
    parts = [_lives(names)] if is_live else []
    parts += [_summary(stories, names)] if any(stories) else []
    parts.append('<section aria-label="Charts" id="charts"></section>')
    for name, story in zip(names, stories, strict=True):
        parts.append(_plans(name, story, is_live=is_live))
        parts.append("" if story is None else _ranks(name, story))
        parts.append(f'<div class="timeline">{timelines(name, {} if story is None else story.timelines)}</div>')
        parts.append("" if story is None else _details(name, story))
    return Template((PAGES / "report.html").read_text()).substitute(
        title=escape(title),
        kind=f"{kind} {now:%Y-%m-%d %H:%M} UTC",
        style=(PAGES / "uplot" / "uPlot.min.css").read_text() + (PAGES / "page.css").read_text(),
        licence=escape((PAGES / "uplot" / "LICENSE").read_text().replace("--", "- -")),
        body="\n".join(part for part in parts if part),
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        script="".join((PAGES / one).read_text() for one in (*SCRIPTS, *(["live.js"] if is_live else []))),
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of their paths as tells them apart."""
    for depth in range(1, 9):
        names = ["/".join(path.parts[-depth:]) for path in folders]
        if len(set(names)) == len(set(folders)):
            return names
    return [str(path) for path in folders]


def _runs(count: int) -> str:
    return "one run" if count == 1 else f"{count} runs"


def _lives(names: Sequence[str]) -> str:
    """What live.js fills, for each run. A single one is named by the page's title."""
    parts, template = [], Template((PAGES / "live.html").read_text())
    for index, name in enumerate(names):
        heading = f'\n<h2><span class="mark run-{index % 6}"></span>{escape(name)}</h2>' if len(names) > 1 else ""
        parts.append(template.substitute(heading=heading, of=f" of {escape(name)}" if len(names) > 1 else ""))
    return f'<div id="lives">{"".join(parts)}</div>'


def _charts(stories: Sequence[Story | None], names: Sequence[str], *, is_live: bool) -> Iterator[dict[str, Any]]:
    """What charts.js draws. A live run's lines may be empty: numbers may come."""
    for chart in CHARTS:
        lines = []
        for index, (name, story) in enumerate(zip(names, stories, strict=True)):
            for style, (metric, label) in enumerate(chart.lines):
                steps, values = ([], []) if story is None else story.lines.get(metric, ([], []))
                if is_live or any(values):  # a line of zeros says nothing
                    own = label if len(names) == 1 else f"{name}: {label}"
                    scaled = [float(f"{value * chart.factor:.6g}") for value in values]
                    about = {"label": own, "metric": metric, "run": index, "style": style}
                    lines.append({**about, "steps": steps, "values": scaled})
        if lines:
            meanings = [f"{label}: {BY_NAME[metric].meaning}" for metric, label in chart.lines]
            top = None if is_live else _top(chart, lines)
            head = {"title": chart.title, "unit": chart.unit, "factor": chart.factor}
            yield {**head, "about": "; ".join(meanings), "top": top, "lines": lines}


def _top(chart: Chart, lines: Sequence[dict[str, Any]]) -> float | None:
    """Where to cut a chart off; None if all of it fits."""
    values = sorted(value for line in lines for value in line["values"])
    enough = 1.25 * values[math.ceil(0.98 * len(values)) - 1]
    return float(f"{enough:.3g}") if chart.cuts and values[-1] > 2 * enough > 0 else None


#: What the summary says of a run, and how: None where there is nothing to say.
FACTS: Final[tuple[tuple[str, Callable[[Story], str | None]], ...]] = (
    ("state", lambda it: _state(it)),
    ("steps", lambda it: _steps(it)),
    (f"loss, mean of the last {LAST_STEPS} steps", lambda it: f"{fmean(it.losses):.4f}" if it.losses else None),
    ("validation loss", lambda it: _newest(it, "validation_loss", "{:.4f}")),
    ("step time, median", lambda it: seconds(median(it.step_s)) if it.step_s else None),
    ("steps relative to the prediction, median", lambda it: f"{median(it.missed):.2f}" if it.missed else None),
    ("waiting for weights or memory", lambda it: f"{it.stall_s / sum(it.step_s):.1%}" if it.step_s else None),
    ("tokens per second, median", lambda it: f"{median(it.tokens_per_s):,.0f}" if it.tokens_per_s else None),
    ("MFU, last", lambda it: _newest(it, "mfu", "{:.1%}")),
    ("joules per token, GPU", lambda it: _joules(it, "gpu_watts")),
    ("joules per token, host", lambda it: _joules(it, "host_watts")),
    ("steps skipped", lambda it: _newest(it, "skipped_steps", "{:,.0f}")),
    ("k, last", lambda it: _newest(it, "k", "{:.3f}")),
    ("layers moved", lambda it: _newest(it, "moved", "{:,.0f}")),
    ("optimizer state", lambda it: _precision(it)),
    ("GPU", lambda it: _of_start(it, "gpu")),
    ("CPU", lambda it: _cpu(it)),
    ("torch", lambda it: _version(it, "torch")),
    ("HyTrain", lambda it: _version(it, "hytrain")),
    ("commit of its folder", lambda it: _of_start(it, "commit")),
)


def _summary(stories: Sequence[Story | None], names: Sequence[str]) -> str:
    head = "".join(
        f'<th scope="col"><span class="mark run-{i % 6}"></span>{escape(n)}</th>' for i, n in enumerate(names)
    )
    rows = []
    for name, tell in FACTS:
        told = [None if story is None else tell(story) for story in stories]
        if any(told):
            cells = "".join(f"<td>{escape(text or '–')}</td>" for text in told)
            rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return _table("Summary", f"<td></td>{head}", rows)


def _plans(name: str, story: Story | None, *, is_live: bool) -> str:
    heads = ("step", "k", "visiting", "offloaded", "expected", "measured", "ratio", "why")
    head = "".join(f'<th scope="col">{head}</th>' for head in heads)
    rows = []
    plans = [] if story is None else story.plans
    for plan in plans[-MOST_PLANS:]:
        steps_s = median(plan.steps_s) if plan.steps_s else None
        ratio = f"{steps_s / plan.expected_s:.2f}" if steps_s and plan.expected_s else "–"
        times = (seconds(one) if one else "–" for one in (plan.expected_s, steps_s))
        numbers = (str(plan.step), f"{plan.k:.3f}", str(plan.visiting), str(plan.offloaded), *times, ratio)
        cells = "".join(f"<td>{cell}</td>" for cell in numbers)
        rows.append(f'<tr data-at="{plan.at}">{cells}<td class="words">{escape(plan.reason)}</td></tr>')
    left = len(plans) - len(rows)
    title = f"Plans of {name}" + (f": the last {len(rows)}, after {left} others" if left else "")
    return f'<div class="plans">{_table(title, head, rows)}</div>' if rows or is_live else ""


def _ranks(name: str, story: Story) -> str:
    heads = ("rank", "step", "waiting for weights", "all-gathers", "k, last")
    rows = []
    for one in sorted(story.ranks, key=lambda one: one.rank):
        gather = "–" if one.gather_s is None else seconds(one.gather_s)
        cells = (str(one.rank), seconds(one.step_s), seconds(one.stall_s), gather, f"{one.k:.3f}")
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    title = f"Ranks of {name} on this machine, medians of steps"
    return _table(title, "".join(f'<th scope="col">{head}</th>' for head in heads), rows) if rows else ""


def timelines(name: str, of_ranks: Mapping[int, Timeline]) -> str:
    """The picture of a run's timeline, and what each rank waited for in its steps; nothing without any."""
    return "\n".join([gantt.figure(name, of_ranks), *_waits(name, of_ranks)])


def _waits(name: str, of_ranks: Mapping[int, Timeline]) -> Iterator[str]:
    """What each rank waited for in the steps of the timeline, in the order of cost."""
    head = "".join(f'<th scope="col">{head}</th>' for head in ("part", "per step", "share", "mostly", "what helps"))
    for rank, one in of_ranks.items():
        found = timeline.shares(one)
        work = ", ".join(f"{share.key} {seconds(share.ms / 1e3)}" for share in found.work)
        rows = [_cost("computing", found.busy * found.step_ms, found, work, "")]
        for share in (share for share in found.waits if share.ms >= timeline.SEEN * found.step_ms):
            cause = timeline.CAUSES[share.key]
            worth = share.ms >= timeline.WORTH * found.step_ms
            layers = ", ".join(filter(None, timeline.layers(share)))
            rows.append(_cost(cause.title, share.ms, found, layers, cause.advice if worth else ""))
        whose = f", rank {rank}" if len(of_ranks) > 1 else ""
        yield _table(f"What the {found.steps} steps in the timeline of {name}{whose} consist of", head, rows)


def _cost(title: str, ms: float, found: timeline.Shares, more: str, advice: str) -> str:
    cells = (seconds(ms / 1e3), f"{ms / found.step_ms:.1%}")
    numbers = "".join(f"<td>{cell}</td>" for cell in cells)
    words = f'<td class="some words">{escape(more)}</td><td class="words">{escape(advice)}</td>'
    return f'<tr><th scope="row">{escape(title)}</th>{numbers}{words}</tr>'


def _details(name: str, story: Story) -> str:
    parts = []
    for start in story.starts:
        versions = ", ".join(f"{package} {version}" for package, version in (start.get("versions") or {}).items())
        words = {
            "started": start.get("started"),
            "command": " ".join(map(str, start.get("command", ()))),
            "folder": start.get("folder"),
            "commit": start.get("commit"),
            "host": start.get("host"),
            "versions": versions,
        }
        items = "".join(f"<dt>{key}</dt><dd>{escape(str(value))}</dd>" for key, value in words.items() if value)
        parts.append(f"<details><summary>Start of {escape(name)}, {escape(str(words['started']))}</summary>")
        parts.append(f"<dl>{items}</dl></details>")
    if story.recipe is not None:
        text = f'<pre tabindex="0">{escape(story.recipe)}</pre>'
        parts.append(f"<details><summary>Recipe of {escape(name)}</summary>{text}</details>")
    return "\n".join(parts)


def _table(title: str, head: str, rows: Iterable[str]) -> str:
    """In a box that scrolls, so that a narrow window shows all columns."""
    whole = (
        f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
    return f'<div class="box" tabindex="0" role="region" aria-label="{escape(title)}">{whole}</div>'


# ---------------------------------------------------------------- facts


def _state(story: Story) -> str:
    if story.diverged_at is not None:
        return f"diverged at step {story.diverged_at:.0f}"
    return "live" if story.run.live else "ended"


def _steps(story: Story) -> str:
    wanted = story.newest.get("steps")
    return f"{story.last['step']:,}" + ("" if wanted is None else f" of {wanted:,.0f}")


def _newest(story: Story, name: str, text: str) -> str | None:
    value = story.newest.get(name)
    return None if value is None else text.format(value)


def _joules(story: Story, name: str) -> str | None:
    joules, tokens = story.joules.get(name, (0.0, 0.0))
    return f"{joules / tokens:.4g}" if tokens else None


def _precision(story: Story) -> str:
    precision = Precision(*(story.last.get(name, "float32") for name in Precision._fields))
    return "exact" if precision.is_exact else f"{precision}: not exact"


def _of_start(story: Story, name: str) -> str | None:
    value = story.starts[-1].get(name) if story.starts else None
    return None if value is None else str(value)


def _cpu(story: Story) -> str | None:
    cpu, cores = _of_start(story, "cpu"), _of_start(story, "cores")
    return None if cpu is None else f"{cpu}, {cores} cores"


def _version(story: Story, package: str) -> str | None:
    found = (story.starts[-1].get("versions") or {}).get(package) if story.starts else None
    return None if found is None else str(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
