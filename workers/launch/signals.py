"""The signals that the launcher gets: the first that ends the run, a second one, and those for the program.

handler ─▶ `first`, `again`, `for_program` ─ a byte in `wake`, which ends a wait ─▶ supervisor
"""

from __future__ import annotations

import os
import select
import signal
import time
from types import FrameType
from typing import Final

from workers.exits import FOR_PROGRAMS, on_endings

#: A signal this soon after the first is its copy: `timeout` sends one to its child, then to the child's whole group.
COPY_S: Final = 0.5


class Signals:
    """What signals have said so far."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.again = False
        self.for_program: list[int] = []
        self._first_s = 0.0
        self.wake, self._wake_write = os.pipe()

    def listen(self) -> None:
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in FOR_PROGRAMS:
            signal.signal(number, lambda number, frame: self.for_program.append(number))
        on_endings(self.on_ending)

    def on_ending(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.first is None:
            self.first, self._first_s = number, now_s
        elif now_s - self._first_s > COPY_S:
            self.again = True

    def heard(self) -> None:
        """Empty `wake`. Before looking: a signal that comes then writes again."""
        os.read(self.wake, select.PIPE_BUF)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self.wake)
        os.close(self._wake_write)
