"""The records of a run: one line of metrics.jsonl per step, written once the loop's own numbers have arrived.

    TrainerReport ─ add ─▶ open record ─┬─ log ─▶ with the loop's numbers ─▶ line
                 (measured: its stall)  │
                                        └─ some steps later, without ─────▶ line
    log before the step has ended ─▶ kept for its record        log after its line ─▶ added to the line

Reading a loss at once would make the GPU wait for the CPU, so loops log late or not at all. JSON has no NaN or
infinity, so such a number becomes null: for example, the norm of a step whose scaled gradients overflowed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Final

from protocol import messages as m
from protocol.metrics import BY_NAME
from workers.effects import Amend, Write

#: A record waits this many steps for the loop's own numbers.
LOG_PATIENCE_STEPS: Final = 4
#: The records that a status shows, one of each rank, take so much together, however many numbers a loop logs.
SHOWN_BYTES: Final = 1 << 18


@dataclass(slots=True)
class Records:
    """A rank's records that are not written yet, by the user's step number. `newest` is the last line written."""

    rank: int
    newest: str = "{}"
    _open: dict[int, dict[str, Any]] = field(default_factory=dict)
    _early: dict[int, dict[str, float]] = field(default_factory=dict)  # numbers of steps that have not ended
    _last: int | None = None  # the step of this trainer's last line

    def add(self, record: dict[str, Any]) -> list[Write]:
        """Add a finished step's record; return the lines of records that have waited long enough."""
        step = record["step"]
        again = self._close() if step <= max(self._open, default=step - 1) else []  # the loop went back
        self._open[step] = {**self._early.pop(step, {}), **record}  # its own numbers go before the loop's
        return again + self._close(through=step - LOG_PATIENCE_STEPS)

    def measured(self, step: int, **times: float) -> None:
        """Set a step's times that are measured after its end. If its line is already written, nothing changes."""
        if step in self._open:
            self._open[step] |= times

    def log(self, log: m.Log) -> list[Write | Amend]:
        """Add the loop's numbers; return all lines up to this step, or the numbers if its line is written."""
        if log.renames is not None:
            self._renumber(log.step - log.renames, ahead=log.ahead)
        if log.ahead:
            self._early.setdefault(log.step, {}).update(log.numbers)
            return []
        if log.step not in self._open:
            return [Amend(log.step, _finite(log.numbers), self.rank)] if log.numbers else []
        self._open[log.step] = {**log.numbers, **self._open[log.step]}
        return [*self._close(through=log.step)]

    def close(self) -> list[Write | Amend]:
        """The lines of all open records. The last one gets the numbers of steps that never ended."""
        early = {name: value for numbers in self._early.values() for name, value in numbers.items()}
        lines: list[Write | Amend] = [*self._close()]
        if early and self._last is not None:
            lines.append(Amend(self._last, _finite(early), self.rank))
        self._early.clear()
        self._last = None
        return lines

    def _renumber(self, by: int, *, ahead: bool) -> None:
        """The loop has another count. If it logs a finished step, the open ones before it get its numbers, too."""
        if not ahead:
            self._open = {step + by: {**record, "step": step + by} for step, record in self._open.items()}
        self._early = {step + by: numbers for step, numbers in self._early.items()}

    def _close(self, *, through: float = math.inf) -> list[Write]:
        steps = [step for step in sorted(self._open) if step <= through]
        lines = [Write(json.dumps(_finite(self._open.pop(step))), self.rank) for step in steps]
        if lines:
            self.newest, self._last = lines[-1].line, steps[-1]
        return lines


def shown(line: str, nbytes: int = SHOWN_BYTES) -> str:
    """A record for monitors: if it is longer than this, with those numbers alone that have a known meaning."""
    if len(line) <= nbytes:
        return line
    return json.dumps({name: value for name, value in json.loads(line).items() if name in BY_NAME})


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
