"""The progress display: a bar on a terminal, else a plain line now and then, with the same numbers.

The journal calls `show` once per step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tqdm import tqdm

LINES = 20  # per run, if there is no bar


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one step. `mfu` is None if the device's peak is unknown."""

    tokens_per_s: float
    tflops: float
    mfu: float | None
    k: float
    stall_s: float

    def __str__(self) -> str:
        mfu = "" if self.mfu is None else f"MFU {self.mfu:.0%}, "
        speed = f"{self.tokens_per_s:,.0f} tok/s, {self.tflops:.3g} TFLOP/s, {mfu}"
        return f"{speed}k {self.k:.2f}, stall {self.stall_s * 1e3:.1f} ms"


class Progress:
    """A context that shows the steps from `start` to `end`, with a bar if `terminal`; nothing if it is not to speak."""

    def __init__(self, start: int, end: int, terminal: bool, speaks: bool = True) -> None:
        self._end = end
        self._speaks = speaks
        self._every = max(1, (end - start) // LINES)
        hidden = not (terminal and speaks)
        self._bar = tqdm(total=end, initial=start, unit="step", file=sys.stderr, dynamic_ncols=True, disable=hidden)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def show(self, step: int, loss: float, speed: Speed) -> None:
        """`step` steps are finished, the last with this loss."""
        if not self._bar.disable:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {speed}", refresh=False)
            self._bar.update(step - self._bar.n)
        elif step % self._every == 0 or step == self._end:
            self.say(f"step {step}/{self._end}: loss {loss:.4f}, {speed}")

    def say(self, line: str) -> None:
        if not self._speaks:
            return
        if self._bar.disable:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.write(line, file=sys.stderr)
