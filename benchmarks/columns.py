"""How numbers, columns and tables are written, in Markdown. Used by everything here that prints a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from benchmarks.rows import Rows, ratio

MISSING: Final = "–"
NOTHING: Final = "Not measured yet."


def number(value: float | None, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def share(value: float | None, digits: int = 1) -> str:
    return MISSING if value is None else f"{value * 100:.{digits}f} %"


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; `NOTHING` if it has no lines."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *body)]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]]) if body else NOTHING


#: A column: its head, and its cell for the rows that a line of the table is made of.
Column = tuple[str, Callable[[Rows], str]]


def table(lines: Iterable[Rows], *columns: Column) -> str:
    return markdown([head for head, _ in columns], [[cell(mine) for _, cell in columns] for mine in lines])


def last(head: str, field: str) -> Column:
    return head, lambda mine: str(MISSING if (value := mine.last(field)) is None else value)


def median(head: str, field: str, digits: int) -> Column:
    return head, lambda mine: number(mine.median(field), digits)


def computed(head: str, value: Callable[[Rows], float | None], write: Callable[[float | None], str] = number) -> Column:
    return head, lambda mine: write(value(mine))


def of(head: str, system: str, field: str, digits: int) -> Column:
    """The median of one of the systems that share a line."""
    return head, lambda mine: number(mine.where(system=system).median(field), digits)


def relative(here: Rows, *same: str, field: str = "step_s", **base: Any) -> Callable[[Rows], float | None]:
    """A line's median relative to its base's: the rows of `here` with these values, and the line's own of `same`."""

    def value(mine: Rows) -> float | None:
        alike = {name: mine.last(name) for name in same}
        return ratio(mine.median(field), here.where(**alike, **base).median(field))

    return value


def step_s(mine: Rows) -> str:
    error = mine.error()
    return f"failed: {error}" if error else number(mine.median("step_s"), 4)


def host_gb(mine: Rows) -> str:
    steady = mine.median("host_gb")
    return number(mine.median("host_peak_gb") if steady is None else steady, 1)


def gb(field: str, mine: Rows) -> str:
    nbytes = mine.median(field)
    return number(None if nbytes is None else nbytes / 1e9, 1)


HOST: Final = (last("host", "host"), last("commit", "commit"))
SYSTEM, BATCH = last("system", "system"), last("batch", "batch")
K, STEP, PREDICTED = median("k", "k", 2), ("s/step", step_s), median("predicted s/step", "predicted_step_s", 4)
MEMORY: Final = (median("GPU peak GB", "gpu_peak_gb", 1), ("host GB", host_gb))
PREDICTED_MEMORY: Final = (
    ("predicted GPU GB", partial(gb, "predicted_gpu_bytes")),
    ("predicted host GB", partial(gb, "predicted_host_bytes")),
)
PLAN: Final = (K, STEP, PREDICTED, *MEMORY)
