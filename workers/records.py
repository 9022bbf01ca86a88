"""The records of a run: one line of metrics.jsonl a step, complete once the loop's own numbers have come.

    TrainerReport ─ add ─▶ open record ─┬─ log ─▶ with the loop's numbers ─▶ line
                 (measured: its stall)  │
                                        └─ some steps later, without ─────▶ line

Reading a loss at once would make the GPU wait for the CPU, so loops log late, or not at all. JSON has no NaN and no
infinity: such numbers, say the norm of a step whose scaled gradients overflowed, are null in a line.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Final

#: Steps that a record waits for the loop's own numbers.
LOG_PATIENCE_STEPS: Final = 4


@dataclass(slots=True)
class Records:
    """Records that are not complete yet, by the step's number as the user counts. `newest` is the last line."""

    newest: str = "{}"
    _open: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> list[str]:
        """A step is over; the lines of those that have waited long enough."""
        self._open[record["step"]] = record
        return self._close(through=record["step"] - LOG_PATIENCE_STEPS)

    def measured(self, step: int, stall_s: float) -> None:
        """The step's stall has become known after its end; too late, the line keeps the last one known before."""
        if step in self._open:
            self._open[step]["stall_s"] = stall_s

    def log(self, step: int, numbers: dict[str, float]) -> list[str]:
        """The loop's own numbers of a step, and with them all records up to it; too late, a line of their own."""
        if step not in self._open:
            return [_line({"step": step, **numbers})]
        self._open[step].update(numbers)
        return self._close(through=step)

    def close(self) -> list[str]:
        """The lines of all that are left."""
        return self._close(through=max(self._open, default=0))

    def _close(self, *, through: int) -> list[str]:
        lines = [_line(self._open.pop(step)) for step in sorted(self._open) if step <= through]
        self.newest = lines[-1] if lines else self.newest
        return lines


def _line(record: dict[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False)
