"""The result set: JSON lines, one a row, in `rows*.jsonl` of a folder; and the questions that tables ask of it.

Only rows of one host and one commit are ever put beside each other: `Rows.of_part` picks the pair, and the rest works
on what it gives.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

Row = dict[str, Any]
FILE: Final = "rows.jsonl"


def append(folder: Path, row: Row) -> None:
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(row) + "\n")


def key(row: Row) -> tuple[Any, ...]:
    """As `Job.key`: rows with one key, of one host and commit, are repeats."""
    return tuple(row[name] for name in ("system", "shape", "batch", "sequence", "dtype", "clip", "label"))


def group(row: Row) -> tuple[str, str]:
    """What two rows must share to be compared."""
    return row["host"], row["commit"]


class Rows:
    """Some rows, in the order in which they were measured."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)

    @classmethod
    def read(cls, *folders: Path) -> Rows:
        """All rows of these folders, each once, however often the same file was copied."""
        lines: dict[str, None] = {}
        for folder in folders:
            for path in sorted(folder.glob("rows*.jsonl")):
                lines.update(dict.fromkeys(filter(None, path.read_text().splitlines())))
        return cls(sorted((json.loads(line) for line in lines), key=lambda row: str(row["at"])))

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, **fields: Any) -> Rows:
        """Those with these values; a value may be a tuple of several."""
        wanted = {name: value if isinstance(value, tuple) else (value,) for name, value in fields.items()}
        return Rows(row for row in self._rows if all(row.get(name) in values for name, values in wanted.items()))

    def of_part(self, part: str) -> Rows:
        """A part's rows of one host and commit: the pair with most rows that did not fail, of several the newest."""
        mine = self.where(part=part)
        newest = {group(row): row["at"] for row in mine}
        good = {pair: sum(group(row) == pair and "error" not in row for row in mine) for pair in newest}
        best = max(good, key=lambda pair: (good[pair], newest[pair]), default=None)
        return Rows(row for row in mine if group(row) == best)

    def beside(self, all_rows: Rows) -> Rows:
        """These, and all else that was measured on their host at their commit."""
        groups = {group(row) for row in self._rows}
        return Rows(row for row in all_rows if group(row) in groups)

    def values(self, field: str) -> list[float]:
        return [row[field] for row in self._rows if row.get(field) is not None]

    def median(self, field: str) -> float | None:
        """Of the rows that have it; None if none has."""
        values = self.values(field)
        return statistics.median(values) if values else None

    def systems(self) -> list[str]:
        """In the order of their first appearance."""
        return list(dict.fromkeys(row["system"] for row in self._rows))

    def labels(self) -> list[str]:
        return list(dict.fromkeys(row["label"] for row in self._rows))

    def last(self) -> Row | None:
        return self._rows[-1] if self._rows else None

    def error(self) -> str | None:
        """The last failure, if nothing but failures is here."""
        errors = [row.get("error") for row in self._rows]
        return errors[-1] if errors and all(errors) else None


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
