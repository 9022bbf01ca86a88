"""Goals: what was wanted, what was measured, and whether that is met. `report` and `several` list theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from benchmarks.columns import MISSING
from benchmarks.rows import Rows

HEAD: Final = ("goal", "bar", "measured", "met?")


class NotMeasured(Exception):
    """No rows for this goal; the text is what the table says of it."""


class Verdict(NamedTuple):
    text: str
    met: bool | None
    word: str


#: What was measured, in words, and whether it meets the bar. Raises `NotMeasured`.
Judge = Callable[[Rows], tuple[str, bool]]


@dataclass(frozen=True)
class Goal:
    """`each_host`: some hosts meet it and others miss it, so all that measured it count, the newest first."""

    what: str
    bar: str
    judge: Judge
    each_host: bool = False

    def verdict(self, rows: Rows) -> Verdict:
        found, missing = list[tuple[str, bool]](), "not measured"
        for here in reversed(rows.by_host()) if self.each_host else [rows]:
            try:
                found.append(self.judge(here))
            except NotMeasured as reason:
                missing = str(reason) or missing
        if not found:
            return Verdict(missing, None, MISSING)
        good, text = sum(met for _, met in found), "; ".join(text for text, _ in found)
        word = "yes" if good == len(found) else f"on {good} of {len(found)} hosts" if good else "**no**"
        return Verdict(text, good == len(found), word)


def known(value: Any) -> Any:
    if value is None:
        raise NotMeasured
    return value


def judged(goals: Iterable[Goal], rows: Rows) -> list[tuple[str, ...]]:
    """A line of a table for each goal, under `HEAD`."""
    return [(goal.what, goal.bar, verdict.text, verdict.word) for goal in goals for verdict in [goal.verdict(rows)]]
