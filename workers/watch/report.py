"""`hytrain-monitor report`: one HTML page about one or several runs, read from their folders, live or ended.

    the folder of each ─ story.read ─▶ Story ─┐
    its timeline ─ gantt ─────────────────────┼─▶ page ─▶ report.html
    pages/: style, script, uPlot ─────────────┘

The page needs nothing else: it can be mailed, or kept. Where there are no records of a metric, there is no chart.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from statistics import fmean, median
from string import Template
from typing import Any, Final

from hytrain.errors import ConfigError
from hytrain.readable import GIB, seconds
from protocol.metrics import BY_NAME
from workers import run_folder
from workers.watch import gantt
from workers.watch.bill import HEADS, bill
from workers.watch.story import LAST_STEPS, Story, read
from workers.watch.timeline import Timeline

PAGES: Final = Path(__file__).with_name("pages")
SCRIPTS: Final = ("uplot/uPlot.iife.min.js", "charts.js")
#: A page loads nothing, and runs only its own script: whatever a run's records hold, they cannot run any.
POLICY: Final = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
#: At most so many plans are listed; the newest ones.
MOST_PLANS: Final = 200


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart's title, its unit, the factor of its values, and its lines: metrics with their names.

    If it `cuts`, a few peaks may be higher than the chart: what most steps need is to be seen. A large one is as wide
    as the page, can be smoothed, and has a logarithmic axis if that is wanted.
    """

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    factor: float = 1.0
    cuts: bool = False
    is_large: bool = False


#: The first `MOST_SEEN` are seen at once; the others when they are asked for.
CHARTS: Final = (
    Chart("Loss", "nats", (("loss", "training"), ("validation_loss", "validation")), is_large=True),
    Chart("Step time", "s", (("step_s", "measured"), ("predicted_step_s", "predicted")), cuts=True),
    Chart("Tokens per second", "1/s", (("tokens_per_s", "tokens/s"),)),
    Chart("Waiting for weights or memory", "s", (("stall_s", "stall"),), cuts=True),
    Chart("The CPU's updates", "s", (("cpu_busy_s", "busy"),), cuts=True),
    Chart("k: share of parameters that the GPU owns", "", (("k", "k"),)),
    Chart(
        "Layers by placement",
        "layers",
        (("gpu_layers", "GPU owns"), ("visiting_layers", "state visits"), ("offloaded_layers", "weights offloaded")),
    ),
    Chart("Learning rate", "", (("lr", "learning rate"),)),
    Chart("Norm of the gradients", "", (("grad_norm", "norm"),), cuts=True),
    Chart("GPU memory", "GiB", (("gpu_peak_bytes", "peak"), ("predicted_gpu_bytes", "planned")), 1 / GIB),
    Chart("Copies per step", "GiB", (("to_device_bytes", "to the GPU"), ("to_host_bytes", "to the host")), 1 / GIB),
    Chart("Power", "W", (("gpu_watts", "GPU"), ("host_watts", "host"))),
    Chart("Time in which the GPU ran something", "", (("gpu_utilization", "share"),)),
    Chart("Host memory, as planned", "GiB", (("predicted_host_bytes", "planes, activations, processes"),), 1 / GIB),
)


MOST_SEEN: Final = 4


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


def as_text(story: Story) -> str:
    """The summary for a terminal, and the last plan's reason."""
    told = [(name, tell(story)) for name, tell in FACTS]
    if story.plans:
        told.append(("the last plan", f"k={story.plans[-1].k:.2f}: {story.plans[-1].reason}"))
    rows = [("run", str(story.run.folder)), *((name, text) for name, text in told if text)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _folder(wanted: str) -> Path:
    if (folder := run_folder.containing("metrics.jsonl", wanted)) is not None:
        return folder.resolve()
    raise ConfigError(f"{wanted} has no metrics.jsonl: give the folder of a run that has trained a step")


# ---------------------------------------------------------------- the page


def page(
    stories: Sequence[Story | None], now: datetime, *, live: tuple[Sequence[str], Sequence[int]] | None = None
) -> str:
    """The whole page, of runs that have stories or are `live`: their names, and how many records came before.

    web.py keeps the page of live runs up to date.
    """
    is_live = live is not None
    folders = [story.run.folder for story in stories if story is not None]
    names, after = live or (names_of(folders), [])
    title = ", ".join(names)
    runs = "one run" if len(names) == 1 else f"{len(names)} runs"
    kind = f"A HyTrain report, written {now:%Y-%m-%d %H:%M} UTC" if live is None else f"HyTrain, live: {runs}"
    axes = [dict(zip(("steps", "tokens", "seconds"), ([], [], []) if one is None else one.axes)) for one in stories]
    data = {"runs": names, "axes": axes, "after": after, "charts": list(_charts(stories, names, is_live=is_live))}
    parts = [_lives(names)] if is_live else []
    parts.append('<section aria-label="Charts" id="charts"></section>')
    parts.append(f'<div id="summary">{summary([facts(story) for story in stories], names)}</div>')
    for index, (name, story) in enumerate(zip(names, stories, strict=True)):
        parts.append(f'<section class="run" aria-label="More of {escape(name)}">{_heading(names, index)}')
        parts.append(_folded_plans(name, story, is_live=is_live))
        parts.append(
            Template((PAGES / "processes.html").read_text()).substitute(of=_of(names, name)) if is_live else ""
        )
        parts.append("" if story is None else _ranks(name, story))
        parts.append(f'<div class="timeline">{timelines(name, {} if story is None else story.timelines)}</div>')
        parts.append("" if story is None else _details(name, story))
        parts.append("</section>")
    style = (PAGES / "uplot" / "uPlot.min.css").read_text() + (PAGES / "page.css").read_text()
    script = "".join((PAGES / one).read_text() for one in (*SCRIPTS, *(["live.js"] if is_live else [])))
    return Template((PAGES / "report.html").read_text()).substitute(
        title=escape(title),
        policy=f"{POLICY}; script-src {_hash(script)}; style-src {_hash(style)}",
        kind=kind,
        style=style,
        licence=escape((PAGES / "uplot" / "LICENSE").read_text().replace("--", "- -")),
        body="\n".join(part for part in parts if part),
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        script=script,
    )


def _hash(text: str) -> str:
    """How a page's policy names the one script, or the one style, that a browser may use."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def names_of(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of their paths as tells them apart."""
    for depth in range(1, 9):
        names = ["/".join(path.parts[-depth:]) for path in folders]
        if len(set(names)) == len(set(folders)):
            return names
    return [str(path) for path in folders]


def _lives(names: Sequence[str]) -> str:
    """What live.js fills, for each run."""
    template = Template((PAGES / "live.html").read_text())
    parts = (
        template.substitute(heading=_heading(names, index), of=_of(names, name)) for index, name in enumerate(names)
    )
    return f'<div id="lives">{"".join(parts)}</div>'


def _heading(names: Sequence[str], index: int) -> str:
    """Of one of several runs. A single one is named by the page's title."""
    return f"<h2>{_mark(index)}{escape(names[index])}</h2>" if len(names) > 1 else ""


def _of(names: Sequence[str], name: str) -> str:
    return f" of {escape(name)}" if len(names) > 1 else ""


def _mark(index: int) -> str:
    return f'<span class="mark run-{index % 6}"></span>'


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
            head = {"title": chart.title, "unit": chart.unit, "factor": chart.factor, "large": chart.is_large}
            head["folded"] = CHARTS.index(chart) >= MOST_SEEN
            yield {**head, "about": "; ".join(meanings), "top": top, "lines": lines}


def _top(chart: Chart, lines: Sequence[dict[str, Any]]) -> float | None:
    """Where to cut a chart off; None if all of it fits."""
    values = sorted(value for line in lines for value in line["values"])
    enough = 1.25 * values[math.ceil(0.98 * len(values)) - 1]
    return float(f"{enough:.3g}") if chart.cuts and values[-1] > 2 * enough > 0 else None


#: What the summary says of a run, and how: None where there is nothing to say.
FACTS: Final[tuple[tuple[str, Callable[[Story], str | None]], ...]] = (
    ("state", Story.state),
    ("steps", Story.steps_of),
    (f"loss, mean of the last {LAST_STEPS} steps", lambda it: f"{fmean(it.losses):.4f}" if it.losses else None),
    ("validation loss", lambda it: it.said("validation_loss", "{:.4f}")),
    ("step time, median", lambda it: seconds(median(it.step_s)) if it.step_s else None),
    ("steps relative to the prediction, median", lambda it: f"{median(it.missed):.2f}" if it.missed else None),
    ("waiting for weights or memory", lambda it: f"{sum(it.stall_s) / sum(it.step_s):.1%}" if it.step_s else None),
    ("tokens per second, median", lambda it: f"{median(it.tokens_per_s):,.0f}" if it.tokens_per_s else None),
    ("MFU, last", lambda it: it.said("mfu", "{:.1%}")),
    ("joules per token, GPU", lambda it: it.per_token("gpu_watts")),
    ("joules per token, host", lambda it: it.per_token("host_watts")),
    ("steps skipped", lambda it: it.said("skipped_steps", "{:,.0f}")),
    ("k, last", lambda it: it.said("k", "{:.3f}")),
    ("layers moved", lambda it: it.said("moved", "{:,.0f}")),
    ("optimizer state", Story.precision),
    ("GPU", lambda it: it.start.get("gpu")),
    ("CPU", lambda it: f"{it.start['cpu']}, {it.start.get('cores')} cores" if it.start.get("cpu") else None),
    ("torch", lambda it: it.version("torch")),
    ("HyTrain", lambda it: it.version("hytrain")),
    ("commit of its folder", lambda it: it.start.get("commit")),
)


def facts(story: Story | None) -> list[str | None]:
    """What the summary says of a run, in the order of `FACTS`."""
    return [None if story is None else tell(story) for _, tell in FACTS]


def summary(told: Sequence[Sequence[str | None]], names: Sequence[str]) -> str:
    """The table of the runs' facts; nothing where there are none."""
    heads = (f"{_mark(index)}{escape(name)}" for index, name in enumerate(names))
    rows = []
    for (name, _), texts in zip(FACTS, zip(*told, strict=True), strict=True):
        if any(texts):
            rows.append(_tr([escape(str(text or "–")) for text in texts], head=name))
    return _table("Summary", heads, rows, corner=True) if rows else ""


def _folded_plans(name: str, story: Story | None, *, is_live: bool) -> str:
    """The newest plan's reason, and the table of all when it is opened."""
    table = plans(name, story)
    if not (table or is_live):
        return ""
    reason = escape(f"k {story.plans[-1].k:.3f}: {story.plans[-1].reason}") if story and story.plans else ""
    head = f'<summary><strong>Plan</strong> <span class="reason">{reason}</span></summary>'
    return f'<details>{head}<div class="plans">{table}</div></details>'


def plans(name: str, story: Story | None) -> str:
    """What each plan has changed and why, and how its steps were; nothing without any."""
    rows, before = [], None
    for plan in [] if story is None else story.plans:
        steps_s = median(plan.steps_s) if plan.steps_s else None
        ratio = f"{steps_s / plan.expected_s:.2f}" if steps_s and plan.expected_s else "–"
        times = (seconds(one) if one else "–" for one in (plan.expected_s, steps_s))
        rows.append(_tr((str(plan.step), *times, ratio), words=[plan.changes(before), plan.reason]))
        before = plan
    shown = rows[-MOST_PLANS:]
    title = f"Plans of {name}" + (f": the last {len(shown)} of {len(rows)}" if len(shown) < len(rows) else "")
    return _table(title, ("step", "expected", "measured", "ratio", "what changed", "why"), shown) if rows else ""


def _ranks(name: str, story: Story) -> str:
    rows = []
    for one in sorted(story.ranks, key=lambda one: one.newest.get("rank", 0.0)):
        times = (seconds(median(values)) if values else "–" for values in (one.step_s, one.stall_s, one.gather_s))
        rows.append(_tr((f"{one.newest.get('rank', 0.0):.0f}", *times, f"{one.newest['k']:.3f}")))
    heads = ("rank", "step", "waiting for weights", "all-gathers", "k, last")
    return _table(f"Ranks of {name} on this machine, medians of steps", heads, rows) if rows else ""


def timelines(name: str, of_ranks: Mapping[int, Timeline]) -> str:
    """The picture of a run's timeline, and each rank's bill of its steps; nothing without any."""
    return "\n".join([gantt.figure(name, of_ranks), *_bills(name, of_ranks)])


def _bills(name: str, of_ranks: Mapping[int, Timeline]) -> Iterator[str]:
    """What the steps of the timeline consist of, on each rank, and what limits them."""
    for rank, one in of_ranks.items():
        found = bill(one)
        rows = []
        for row in found.seen:
            of_step, busy, bound = row.cells
            share = "" if row.ms is None else f"{found.share(row):z.1%}"
            advice = row.part.advice if found.is_costly(row) else ""
            more = f'<td class="some words">{escape(row.mostly)}</td>'
            rows.append(_tr((of_step, share, busy, bound), head=row.part.title, more=more, words=[advice]))
        whose = f", rank {rank}" if len(of_ranks) > 1 else ""
        title = f"What the {found.steps} steps in the timeline of {name}{whose} consist of"
        yield _table(title, ("part", HEADS[0], "share", *HEADS[1:], "mostly", "what helps"), rows)
        yield f"<p>{escape(found.limit)}</p>"


def _details(name: str, story: Story) -> str:
    parts = []
    for start in story.starts:
        versions = ", ".join(f"{package} {version}" for package, version in (start.get("versions") or {}).items())
        words = {"started": start.get("started"), "command": " ".join(map(str, start.get("command", ())))}
        words |= {key: start.get(key) for key in ("folder", "commit", "host")} | {"versions": versions}
        items = "".join(f"<dt>{key}</dt><dd>{escape(str(value))}</dd>" for key, value in words.items() if value)
        parts.append(f"<details><summary>Start of {escape(name)}, {escape(str(words['started']))}</summary>")
        parts.append(f"<dl>{items}</dl></details>")
    if story.recipe is not None:
        text = f'<pre tabindex="0">{escape(story.recipe)}</pre>'
        parts.append(f"<details><summary>Recipe of {escape(name)}</summary>{text}</details>")
    return "\n".join(parts)


def _table(title: str, heads: Iterable[str], rows: Iterable[str], *, corner: bool = False) -> str:
    """In a box that scrolls, so that a narrow window shows all columns. `corner`: rows have heads that need none."""
    head = "<td></td>" * corner + "".join(f'<th scope="col">{head}</th>' for head in heads)
    title = escape(title)
    whole = f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="box" tabindex="0" role="region" aria-label="{title}">{whole}</div>'


def _tr(cells: Iterable[str], *, head: str = "", more: str = "", words: Iterable[str] = ()) -> str:
    """A row: its head, if it has one, numbers, and what is said in words, which is escaped here."""
    first = f'<th scope="row">{escape(head)}</th>' if head else ""
    said = "".join(f'<td class="words">{escape(text)}</td>' for text in words)
    return f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells)}{more}{said}</tr>"
