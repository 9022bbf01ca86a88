"""Draws some steps of a timeline for a page: a row for each part of the machine that works at the same time.

    Timeline of each rank ─▶ lanes ─┬─▶ figure ─▶ HTML with an SVG, whose colours and patterns are in pages/page.css
                                    └─▶ gantt_text, for terminals

`report` calls it. The figure needs no script. A kind of work differs from the others of its row also without colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Final

from hytrain.readable import seconds
from workers.watch.bill import bill
from workers.watch.timeline import KINDS, Span, Timeline

#: Of each rank, from top to bottom.
ROWS: Final = tuple(dict.fromkeys(kind.row for kind in KINDS.values() if kind.row))
MOST_STEPS: Final = 4
MOST_RANKS: Final = 8
#: Sizes in pixels.
STEP_WIDTH, ROW, BAR, HEAD = 420, 26, 18, 22
#: What takes a smaller part of the picture is not seen.
FINEST: Final = 1 / 4000
#: The fewest pixels between two labels of the axis.
TICK_WIDTH: Final = 80

Rows = list[tuple[str, list[Span]]]


@dataclass(frozen=True, slots=True)
class Lanes:
    """What a picture shows: some steps of `first` and of other ranks, `window` in milliseconds, and labelled rows."""

    timelines: Mapping[int, Timeline]
    steps: range
    window: tuple[float, float]
    rows: Rows

    @property
    def first(self) -> Timeline:
        return next(iter(self.timelines.values()))

    @property
    def title(self) -> str:
        """The steps' numbers, as the loop counts."""
        began, last = self.first.first, self.first.first + len(self.steps) - 1
        return f"steps {began} to {last}" if last > began else f"step {last}"


def lanes(timelines: Mapping[int, Timeline], most_steps: int = MOST_STEPS) -> Lanes:
    """The rows of the first whole steps of a run, by rank, of which there is at least one."""
    shown = dict(list(timelines.items())[:MOST_RANKS])
    first = next(iter(shown.values()))
    steps = range(min(first.steps), min(first.steps) + min(len(first.steps), most_steps))
    windows = [timeline.within(steps) for timeline in shown.values() if timeline.steps.keys() & set(steps)]
    window = min(began for began, _ in windows), max(ended for _, ended in windows)
    rows = [row for rank, timeline in shown.items() for row in _rows(rank, timeline, window, len(timelines) > 1)]
    return Lanes(shown, steps, window, rows)


def figure(name: str, timelines: Mapping[int, Timeline]) -> str:
    """A figure of the first whole steps of a run, which is called `name`, by rank; nothing without any."""
    if not timelines:
        return ""
    found = lanes(timelines)
    kinds = {span.kind for _, spans in found.rows for span in spans}
    title = f"Timeline of {name}: {found.title}"
    labels = "".join(f"<li>{escape(label)}</li>" for label, _ in found.rows)
    return (
        f'<figure class="gantt"><figcaption>{escape(title)}</figcaption>{_legend(kinds)}'
        f'<div class="lanes"><ul aria-hidden="true">{labels}</ul>'
        f'<div class="box" tabindex="0" role="region" aria-label="{escape(title)}">'
        f"{_svg(found, _told(title, found.timelines))}</div></div></figure>"
    )


def _rows(
    rank: int, timeline: Timeline, window: tuple[float, float], is_one_of_several: bool
) -> Iterator[tuple[str, list[Span]]]:
    """The rows of a rank that have anything in the window; the device's row always."""
    finest_ms = (window[1] - window[0]) * FINEST
    for label in ROWS:
        spans = [
            span
            for span in timeline.of_kind(*(name for name, kind in KINDS.items() if kind.row == label))
            if span.began_ms < window[1] and span.ended_ms > window[0] and span.ended_ms - span.began_ms >= finest_ms
        ]
        if spans or label == ROWS[0]:
            yield f"rank {rank}: {label}" if is_one_of_several else label, spans


def _legend(kinds: Iterable[str]) -> str:
    """Each style that is drawn, once, with its name."""
    known = {kind.style: kind.label for name, kind in KINDS.items() if name in kinds}
    items = (
        f'<li><svg width="22" height="14" aria-hidden="true"><rect class="g-{style}" width="22" height="14"/></svg>'
        f"{escape(label)}</li>"
        for style, label in known.items()
    )
    return f'<ul class="legend" aria-label="Colours and patterns">{"".join(items)}</ul>'


def _told(title: str, timelines: Mapping[int, Timeline]) -> str:
    """What the picture shows, for those who do not see it; the table beside it tells more."""
    told = [f"{title}."]
    for rank, found in ((rank, bill(timeline)) for rank, timeline in timelines.items()):
        waits = [f"{row.part.title} {found.share(row):.1%}" for row in found.waits]
        told.append(f"Rank {rank}: computing {found.computing:.1%} of a step; {', '.join(waits) or 'no waits'}.")
    return " ".join(told)


def _svg(found: Lanes, told: str) -> str:
    rows, window, first, steps = found.rows, found.window, found.first, found.steps
    width, height = STEP_WIDTH * len(steps), HEAD + ROW * len(rows) + HEAD
    scale = width / (window[1] - window[0])

    def x(at_ms: float) -> float:
        return round((min(max(at_ms, window[0]), window[1]) - window[0]) * scale, 2)

    parts = [
        f'<svg role="img" width="{width}" height="{height}" aria-label="{escape(told)}">',
        *_patterns(),
    ]
    for index, (_, spans) in enumerate(rows):
        y = HEAD + ROW * index
        parts.append(f'<path class="g-line" d="M0 {y + ROW}H{width}"/>')
        for span in spans:
            began, ended, took = x(span.began_ms), x(span.ended_ms), seconds((span.ended_ms - span.began_ms) / 1e3)
            what = f"{span.name or span.kind}: {took}, step {span.step + first.offset}"
            parts.append(
                f'<rect class="g-{KINDS[span.kind].style}" x="{began}" y="{y + (ROW - BAR) // 2}" '
                f'width="{max(round(ended - began, 2), 0.4)}" height="{BAR}"><title>{escape(what)}</title></rect>'
            )
    for step in steps:
        if step in first.steps:
            at = x(first.steps[step][0])
            parts.append(f'<path class="g-step" d="M{at} 0V{height - HEAD}"/>')
            parts.append(f'<text x="{at + 4}" y="15">step {step + first.offset}</text>')
    tick_ms = _round(TICK_WIDTH / scale)
    for tick in range(int((width - TICK_WIDTH / 2) / scale / tick_ms) + 1):
        at = tick * tick_ms * scale
        parts.append(f'<path class="g-line" d="M{at:.1f} {height - HEAD}v6"/>')
        parts.append(f'<text x="{at + 3:.1f}" y="{height - 6}">{tick * tick_ms:.6g} ms</text>')
    return "".join(parts) + "</svg>"


def _round(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20 … and of their parts that is no less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= least)


def _patterns() -> Iterator[str]:
    """What kinds of one row are told apart with, besides colours."""
    lines = {"stall": "M0 6L6 0M-1 1L1 -1M5 7L7 5", "ranks": "M0 0L6 6M-1 5L1 7M5 -1L7 1", "gpu": "M0 3H6"}
    for style, path in lines.items():
        yield (
            f'<pattern id="p-{style}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<rect class="p-{style}" width="6" height="6"/><path class="p-ink" d="{path}"/></pattern>'
        )
