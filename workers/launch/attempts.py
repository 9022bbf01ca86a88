"""Whether a run that has failed is started again: `--max-restarts` on one machine. The launcher asks after a failure.

how it ended, where it had got to, who killed it ─▶ Attempts.refusal ─▶ None: again │ why not
"""

from __future__ import annotations

import signal
from collections.abc import Set
from typing import Final

from workers.exits import ENDINGS, EXIT_AGAIN, EXIT_DIVERGED, EXIT_SIGNAL, EXIT_USAGE

#: Exit statuses of a program that has ended as it wanted to: bad input, out of time, told to end by a signal.
DELIBERATE: Final = (0, EXIT_USAGE, EXIT_AGAIN, *(EXIT_SIGNAL + number for number in (*ENDINGS, signal.SIGUSR1)))
#: So many attempts in a row may end without anything new.
FRUITLESS: Final = 2


class Attempts:
    """`number` is that of the attempt that runs, from 1 to `most`."""

    def __init__(self, restarts: int, step: int, checkpoints: Set[str]) -> None:
        self.number, self.most = 1, restarts + 1
        self._step, self._checkpoints = step, checkpoints
        self._fruitless = 0

    def refusal(
        self, status: int, step: int, checkpoints: Set[str], *, is_recipe: bool, out_of_memory: bool
    ) -> str | None:
        """Why there is no further attempt, or None: then `number` is the next one's.

        `step` and `checkpoints` are those that the run has got to.
        """
        is_new = step > self._step or not checkpoints <= self._checkpoints
        self._step, self._checkpoints = max(step, self._step), checkpoints | self._checkpoints
        self._fruitless = 0 if is_new else self._fruitless + 1
        if status in DELIBERATE or (is_recipe and status == EXIT_DIVERGED):
            return "it has ended by itself"
        if out_of_memory:
            return "it would run out of memory again"
        if self.number == self.most:
            return f"this was attempt {self.number} of {self.most}"
        if is_recipe and self._fruitless == FRUITLESS:
            return f"{FRUITLESS} attempts in a row have reached no new step and no new checkpoint"
        self.number += 1
        return None
