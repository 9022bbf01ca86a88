"""The newest records, for monitors that ask for them: bounded, whatever a loop logs. `CoordinatorState` calls it.

Write ─▶ add ─┐
Amend ─ amend ┴▶ at most RECORDS of them, and NBYTES ─ sample(points) ─▶ evenly spaced, the newest one last
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from workers.records import shown

#: So many records are kept, unless they take more than so much.
RECORDS: Final = 4096
NBYTES: Final = 8 << 20
#: An answer takes at most so much.
ANSWER_BYTES: Final = 1 << 20


@dataclass(slots=True)
class History:
    """Lines of metrics.jsonl, which are ASCII, with their steps, in the order of the steps."""

    _lines: deque[tuple[int, str]] = field(default_factory=deque)
    _nbytes: int = 0

    def add(self, line: str) -> None:
        """Keep a record. As in the file, it replaces those from its step on, if the loop went back."""
        step, line = json.loads(line)["step"], shown(line, ANSWER_BYTES)
        while self._lines and self._lines[-1][0] >= step:
            self._nbytes -= len(self._lines.pop()[1])
        self._lines.append((step, line))
        self._nbytes += len(line)
        self._forget()

    def amend(self, step: int, numbers: dict[str, float | None]) -> None:
        """Add numbers to the record of this step, if it is kept. Its own numbers stay."""
        for index in range(len(self._lines) - 1, -1, -1):
            known, line = self._lines[index]
            if known == step:
                amended = shown(json.dumps({**numbers, **json.loads(line)}), ANSWER_BYTES)
                self._lines[index] = step, amended
                self._nbytes += len(amended) - len(line)
                self._forget()
                return

    def _forget(self) -> None:
        while len(self._lines) > RECORDS or self._nbytes > NBYTES:
            self._nbytes -= len(self._lines.popleft()[1])

    def sample(self, points: int) -> tuple[str, ...]:
        """At most so many records, evenly spaced from the oldest to the newest; fewer if these would take too much."""
        known = [line for _, line in self._lines]
        points = min(points, len(known))
        while points:
            lines = tuple(known[(index + 1) * len(known) // points - 1] for index in range(points))
            if sum(map(len, lines)) <= ANSWER_BYTES:
                return lines
            points //= 2
        return ()
