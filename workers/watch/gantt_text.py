"""Draws some steps of a timeline with characters, below what they waited for in words; as wide as the terminal.

    Timeline of each rank ─▶ gantt.lanes ─▶ Drawing, which rich draws

`screen` shows it. A trainer's kinds of work have characters of their own; the bars of the other rows are as high as the
share of the time in which that part works. So nothing needs colours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from workers.watch import timeline
from workers.watch.bill import Row, bill
from workers.watch.gantt import ROWS, Lanes, lanes
from workers.watch.status_text import BARS
from workers.watch.timeline import KINDS, Kind, Span, Timeline, union

#: So many characters, at least, are for a step, if more than the fewest steps are shown.
STEP_COLUMNS: Final = 45
FEWEST_STEPS: Final = 2
#: So many waits are told.
MOST_WAITS: Final = 3


class Drawing:
    """The steps of a timeline, for rich. Only for timelines that have steps."""

    def __init__(self, timelines: Mapping[int, Timeline]) -> None:
        self._timelines = timelines
        self._bills = {rank: bill(one) for rank, one in timelines.items()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self._words()
        margin = max(map(len, ROWS)) + (len("rank 0: ") if len(self._timelines) > 1 else 0) + 2
        columns = max(options.max_width - margin, 1)
        found = lanes(self._timelines, max(columns // STEP_COLUMNS, FEWEST_STEPS))
        yield Text(" " * margin + _head(found, columns), no_wrap=True)
        for label, spans in found.rows:
            yield Text.assemble(f"{label:<{margin}}", _row(spans, found.window, columns), no_wrap=True)
        yield _legend({span.kind for _, spans in found.rows for span in spans})

    def _words(self) -> Table:
        """How many steps there are, how long they are, and the most costly waits of all ranks, with advice."""
        words = Table.grid(padding=(0, 2))
        words.add_column(style="bold")
        words.add_column(overflow="fold")
        rank, first = next(iter(self._bills.items()))
        words.add_row("timeline", f"{first}; {self._whose(rank)}computing {first.computing:.1%}")
        worst = dict[str, tuple[float, int, Row]]()  # of each part, on the rank where it is largest
        for rank, found in self._bills.items():
            for row in found.waits:
                share = found.share(row)
                if row.key not in worst or share > worst[row.key][0]:
                    worst[row.key] = share, rank, row
        for share, rank, row in sorted(worst.values(), key=lambda wait: -wait[0])[:MOST_WAITS]:
            about = f"{row.part.title}{f' (mostly {row.mostly})' if row.mostly else ''}"
            told = f"{self._whose(rank)}{row.cells[0]} {share:.1%}  {about}"
            advice = f": {row.part.advice}" if self._bills[rank].is_costly(row) else ""
            words.add_row("waits", Text(told + advice))
        return words

    def _whose(self, rank: int) -> str:
        return f"rank {rank}: " if len(self._bills) > 1 else ""


def _head(found: Lanes, columns: int) -> str:
    """The number of each step where it begins."""
    began, ended = found.window
    head = ""
    for step in found.steps:
        if step in found.first.steps:
            at = round((found.first.steps[step][0] - began) / (ended - began) * columns)
            head = f"{head[:at]:<{at}}│step {step + found.first.offset}"
    return head[:columns]


def _row(spans: Sequence[Span], window: tuple[float, float], columns: int) -> Text:
    """A character for each part of the window."""
    taken = _taken(spans, window, columns)
    if all(KINDS[kind].mark for kind in taken):
        return _marks(taken, columns)
    [(kind, shares)] = taken.items()
    bars = (BARS[min(int(share * len(BARS)), len(BARS) - 1)] if share > 0 else " " for share in shares)
    return Text("".join(bars), KINDS[kind].colour)


def _taken(spans: Sequence[Span], window: tuple[float, float], columns: int) -> dict[str, list[float]]:
    """For each kind, the share of each column's time."""
    began, ended = window
    width = (ended - began) / columns
    intervals = defaultdict[str, list[timeline.Interval]](list)
    for span in spans:
        intervals[span.kind].append(span.interval)
    taken = {kind: [0.0] * columns for kind in intervals}
    for kind, its in intervals.items():
        for start, end in union(its):
            first, last = (int((at - began) / width) for at in (start, end))
            for column in range(max(first, 0), min(last + 1, columns)):
                left = began + column * width
                taken[kind][column] += max(min(end, left + width) - max(start, left), 0.0) / width
    return taken


def _marks(taken: Mapping[str, Sequence[float]], columns: int) -> Text:
    """A kind's mark in as many columns as it takes time: what is too short for a column counts in the next one."""
    row, owed = Text(), dict[str, float]()
    for column in range(columns):
        here = {kind: shares[column] for kind, shares in taken.items() if shares[column] > 0}
        here[""] = max(1.0 - sum(here.values()), 0.0)  # neither work nor a wait that has a mark
        owed = {kind: owed.get(kind, 0.0) + share for kind, share in here.items()}
        most = max(owed, key=lambda kind: owed[kind])
        owed[most] -= 1.0
        drawn = KINDS.get(most, Kind(mark=" "))
        row.append(drawn.mark, drawn.colour)
    return row


def _legend(kinds: set[str]) -> Text:
    parts = [f"{kind.mark} {kind.label}" for name, kind in KINDS.items() if kind.mark and name in kinds]
    if not all(KINDS[name].mark for name in kinds):
        parts.append(f"{BARS[0]}{BARS[3]}{BARS[-1]} share of the time that a part is busy")
    return Text("   ".join(parts))
