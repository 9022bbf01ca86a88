"""How numbers and tables are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

MISSING: Final = "–"
NOTHING: Final = "Not measured yet."


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table; `NOTHING` if it has no rows."""
    body = list(body)
    if not body:
        return NOTHING
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in body)])


def number(value: float | None, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def share(value: float | None, digits: int = 1) -> str:
    return MISSING if value is None else f"{value * 100:.{digits}f} %"
