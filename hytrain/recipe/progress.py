"""What a recipe says while it trains: a bar on a terminal, else a line every half minute, with the same numbers.

The trainer and the loop call `say` while the run starts. The journal calls `show` once per step.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from tqdm import tqdm

from hytrain.statistics import Statistics

#: How often a line is written if there is no bar. The first and the last step have one, too.
EVERY_S: Final = 30.0
#: Of a terminal that does not say how wide it is.
COLUMNS: Final = 80
BAR: Final = "step {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"


def say(line: str) -> None:
    """Tell the user, while there is no bar."""
    print(f"hytrain: {line}", file=sys.stderr, flush=True)


def first_plan(planned: Statistics) -> str:
    """What the planner begins with."""
    visiting, offloaded = len(planned.visiting_layers), len(planned.offloaded_layers)
    more = f", state that visits the GPU: {visiting} layers" if visiting else ""
    more += f", weights in host memory: {offloaded} layers" if offloaded else ""
    return f"first plan: k={planned.k:.2f}{more}"


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one step. `mfu` is None if the device's peak is unknown."""

    tokens_per_s: float
    tflops: float
    mfu: float | None
    k: float
    stall_s: float

    def __str__(self) -> str:
        return f"{self.short}, {self.tflops:.3g} TFLOP/s, stall {self.stall_s * 1e3:.1f} ms"

    @property
    def short(self) -> str:
        """As much as fits beside a bar in 80 columns."""
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.0%}"
        return f"{self.tokens_per_s:,.0f} tok/s{mfu}, k {self.k:.2f}"


class Progress(AbstractContextManager["Progress"]):
    """A context that shows the steps from `start` to `end`, with a bar if `terminal`; nothing if it is not to speak."""

    def __init__(self, start: int, end: int, terminal: bool, speaks: bool = True) -> None:
        self._start, self._end = start, end
        self._speaks = speaks
        self._began_s, self._next_s = time.monotonic(), 0.0
        hidden = not (terminal and speaks)
        self._bar = tqdm(total=end, initial=start, file=sys.stderr, bar_format=BAR, ncols=_columns(), disable=hidden)

    def __exit__(self, *error: object) -> None:
        if not self._bar.disable:
            self._bar.ncols = _columns()
        self._bar.close()

    def show(self, step: int, loss: float, speed: Speed) -> None:
        """`step` steps are finished, the last with this loss."""
        if not self._bar.disable:
            self._bar.ncols = _columns()
            self._bar.set_postfix_str(f"loss {loss:.3f}, {speed.short}", refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._speaks and (time.monotonic() >= self._next_s or step == self._end):
            now_s = time.monotonic()
            self._next_s = now_s + EVERY_S
            left_s = (now_s - self._began_s) / (step - self._start) * (self._end - step)
            left = f", {tqdm.format_interval(left_s)} left" if step < self._end else ""
            self.say(f"step {step}/{self._end}{left}: loss {loss:.4f}, {speed}")

    def say(self, line: str) -> None:
        """A line, above the bar if there is one."""
        if not self._speaks:
            return
        if self._bar.disable:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.write(line, file=sys.stderr)


def _columns() -> int:
    """How many columns a bar may have: one less than the terminal, which is asked each time, since it may change.

    Standard error leads to the launcher, so it can't be asked.
    """
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return (os.get_terminal_size(terminal.fileno()).columns or COLUMNS) - 1
    except OSError:
        return COLUMNS - 1
