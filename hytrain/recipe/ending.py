"""How a signal ends a recipe's run: at once, or, while steps are trained, after a step and with a checkpoint.

    signal ─▶ Ending ─ nothing is trained yet ─▶ Ended
                  └─── in the loop's steps ────▶ `number` ─▶ loop: all ranks end the same step and save it ─▶ Ended

Only the first signal counts. A batch system sends one to each process, and the launcher passes it on; the launcher
alone can tell a second one from such copies, and kills this process then. `workers.train.trainer` makes the `Ending`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Ended(KeyboardInterrupt):
    """A signal told the run to end. `how` begins the sentence about it."""

    def __init__(self, number: int, how: str = "interrupted") -> None:
        super().__init__(how)
        self.number, self.how = number, how


class Ending:
    """`number` is the signal after which the run is to end, or 0."""

    def __init__(self) -> None:
        self.number = 0
        self.at_once = False  # `Ended` was raised: code that it interrupted may have made another exception of it
        self._waits = False

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """The handler. Raises Ended unless steps are trained, or a signal came before."""
        if self.number == 0:
            self.number = number
            self.at_once = not self._waits
            if self.at_once:
                raise Ended(number)

    @contextmanager
    def after_a_step(self) -> Iterator[None]:
        """In this block, the loop asks for `number`, and signals do nothing else.

        Raises Ended if there was one before: code that it interrupted may have caught every exception.
        """
        self._waits = True
        try:
            if self.number:
                raise Ended(self.number)
            yield
        finally:
            self._waits = False
