"""The result set: one JSON line per row, in `rows*.jsonl` of a folder; and the questions that tables ask of it.

Only rows of one host and one commit are compared with each other: `Rows.of_part` chooses the host and commit, and the
rest works on what it returns.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

Row = dict[str, Any]
FILE: Final = "rows.jsonl"
#: A state is steady if the medians of the measured steps and of this many before them differ by no more than STEADY.
STEADY_STEPS: Final = 6
STEADY: Final = 0.1


def append(folder: Path, row: Row) -> None:
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(row) + "\n")


def times_of(steps_s: list[float], measured: int) -> Row:
    """A row's fields for the seconds of all steps, of which the last `measured` count."""
    rounded = [round(value, 5) for value in steps_s]
    counting = rounded[-measured:]
    return {"step_s": round(statistics.median(counting), 5), "steps_s": counting, "settling_s": rounded[:-measured]}


def key(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """Rows with one key, of one host and commit, are repeats of each other. `fields`: a row, or a job and a segment."""
    names = ("system", "shape", "batch", "sequence", "dtype", "clip", "label")
    return (*(fields[name] for name in names), fields.get("ranks", 0), fields.get("cap_gib", 0.0))


class Rows(list[Row]):
    """Some rows, in the order in which they were measured."""

    @classmethod
    def read(cls, *folders: Path) -> Rows:
        """All rows of these folders."""
        paths = [path for folder in folders for path in sorted(folder.glob("rows*.jsonl"))]
        found = (json.loads(line) for path in paths for line in path.read_text().splitlines())
        return cls(sorted(found, key=lambda row: str(row["at"])))

    def where(self, **fields: Any) -> Rows:
        """Those with these values; a value may be a tuple of several."""
        wanted = {name: value if isinstance(value, tuple) else (value,) for name, value in fields.items()}
        return Rows(row for row in self if all(row.get(name) in values for name, values in wanted.items()))

    def by(self, *fields: str) -> list[Rows]:
        """Split by the values of these fields, in the order of their first appearance."""
        found: dict[tuple[Any, ...], Rows] = {}
        for row in self:
            found.setdefault(tuple(row[field] for field in fields), Rows()).append(row)
        return list(found.values())

    def each(self) -> list[Rows]:
        return [Rows([row]) for row in self]

    def on_ranks(self, wanted: bool) -> Rows:
        """Those of jobs on several ranks, or the others: one system may be in both, and is another thing there."""
        return Rows(row for row in self if bool(row.get("ranks")) == wanted)

    def by_host(self) -> list[Rows]:
        """Split into what may be compared: rows of one host and one commit."""
        return self.by("host", "commit")

    def of_part(self, part: str) -> Rows:
        """A part's rows of one host and commit: the pair with most rows that did not fail, of several the newest."""

        def fullest(rows: Rows) -> tuple[int, str]:
            return sum("error" not in row for row in rows), rows[-1]["at"]

        return max(self.where(part=part).by_host(), key=fullest, default=Rows())

    def filled(self, part: str, *fields: str) -> Rows:
        """`of_part`; for values of these fields that it lacks, the newest row of another host, compared with none."""
        found = self.of_part(part)
        have = {tuple(row[field] for field in fields) for row in found}
        more = (rows[-1] for rows in self.where(part=part).by(*fields))
        return Rows([*found, *(row for row in more if tuple(row[field] for field in fields) not in have)])

    def beside(self, everything: Rows) -> Rows:
        """All that was measured on these rows' host at their commit."""
        return Rows(row for here in self.by_host() for row in everything.where(**pair(here)))

    def values(self, field: str) -> list[float]:
        return [row[field] for row in self if row.get(field) is not None]

    def distinct(self, field: str) -> list[Any]:
        """The field's values in the order of their first appearance."""
        return list(dict.fromkeys(row[field] for row in self))

    def median(self, field: str) -> float | None:
        """Of the rows that have it; None if none has."""
        values = self.values(field)
        return statistics.median(values) if values else None

    def last(self, field: str) -> Any:
        """Of the newest row; None if it lacks the field, or there are no rows."""
        return self[-1].get(field) if self else None

    def error(self) -> str | None:
        """The last failure, if there is nothing but failures."""
        return self.last("error") if all("error" in row for row in self) else None

    # ------------------------------------------------------------ what goals, tables and pictures ask

    def named(self, name: str, batch: int = 8) -> Rows:
        """One system's rows at one batch size. `name`: the system, and behind a space its label if it has one."""
        system, _, label = name.partition(" ")
        return self.where(system=system, label=label, batch=batch)

    def ratio(self, above: str, below: str, batch: int = 8, field: str = "step_s") -> float | None:
        """Of two systems' medians at one batch size; names as in `named`."""
        return ratio(self.named(above, batch).median(field), self.named(below, batch).median(field))

    def best_static(self, prefix: str = "k=") -> float | None:
        """The shortest step of a sweep over k; each k counts with the median over its repeats."""
        each = (mine.median("step_s") for mine in self.by("label") if mine.last("label").startswith(prefix))
        return min((step_s for step_s in each if step_s is not None), default=None)

    def reaction(self, label: str) -> tuple[int, float, float] | None:
        """After a command: steps until five in a row are within 10 % of the best static k, k before, k after.

        If that never happened, the number of steps plus one.
        """
        here, best = self.where(label=label), self.best_static(f"{label}, k=")
        ks = here.last("ks")
        if best is None or not ks:
            return None
        times = [*here.last("settling_s"), *here.last("steps_s")]
        fives = (index for index in range(len(times) - 4) if statistics.median(times[index : index + 5]) <= 1.1 * best)
        return next(fives, len(times)) + 1, ks[0], ks[-1]

    def predicted(self) -> Rows:
        """Those with a prediction, of parts in which the planner had the time to settle."""
        settled = self.where(part=("main", "sweep", "batches", "policies"), policy="deadline")
        return Rows(row for row in settled if row.get("predicted_step_s"))


def pair(here: Rows) -> dict[str, str]:
    """What two rows must share to be compared."""
    return {name: here[-1][name] for name in ("host", "commit")}


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def is_steady(row: Row) -> bool:
    """Whether the steps just before the measured ones took as long: a prediction is made from those before."""
    before = row.get("settling_s", [])[-STEADY_STEPS:]
    return not before or abs(statistics.median(before) / row["step_s"] - 1) <= STEADY
