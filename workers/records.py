"""The records of a run: one line of metrics.jsonl per step, written once the loop's own numbers have arrived.

    TrainerReport ─ add ─▶ open record ─┬─ log ─▶ with the loop's numbers ─▶ line
                 (measured: its stall)  │
                                        └─ some steps later, without ─────▶ line

Reading a loss at once would make the GPU wait for the CPU, so loops log late or not at all. JSON has no NaN or
infinity, so such a number becomes null: for example, the norm of a step whose scaled gradients overflowed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Final

#: A record waits this many steps for the loop's own numbers.
LOG_PATIENCE_STEPS: Final = 4


@dataclass(slots=True)
class Records:
    """The records that are not written yet, by the user's step number. `newest` is the last line written."""

    newest: str = "{}"
    _open: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> list[str]:
        """Add a finished step's record; return the lines of records that have waited long enough."""
        self._open[record["step"]] = record
        return self._close(through=record["step"] - LOG_PATIENCE_STEPS)

    def measured(self, step: int, stall_s: float) -> None:
        """Set a step's stall, which is measured after its end. If its line is already written, nothing changes."""
        if step in self._open:
            self._open[step]["stall_s"] = stall_s

    def log(self, step: int, numbers: dict[str, float]) -> list[str]:
        """Add the loop's numbers; return all lines up to this step. If its line is written, they get their own line."""
        if step not in self._open:
            return [_line({"step": step, **numbers})]
        self._open[step].update(numbers)
        return self._close(through=step)

    def close(self) -> list[str]:
        """The lines of all open records."""
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
