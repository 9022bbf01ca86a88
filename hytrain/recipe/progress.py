"""How the run goes, for the person who waits: a bar on a terminal, a plain line now and then in a log.

The loop's journal calls `show` once a step; both forms hold the same numbers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType

from tqdm import tqdm

LINES = 20  # a whole run, where there is no bar


@dataclass(frozen=True, slots=True)
class Speed:
    """What one step reached; `mfu` is None where the device's peak is unknown."""

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
    """A context that shows steps from `start` to `end`; `terminal` chooses the bar."""

    def __init__(self, start: int, end: int, terminal: bool) -> None:
        self._end = end
        self._every = max(1, (end - start) // LINES)
        self._bar = tqdm(
            total=end, initial=start, unit="step", file=sys.stderr, dynamic_ncols=True, disable=not terminal
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def show(self, step: int, loss: float, speed: Speed) -> None:
        """`step` steps are finished, the last one with this loss."""
        if not self._bar.disable:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {speed}", refresh=False)
            self._bar.update(step - self._bar.n)
        elif step % self._every == 0 or step == self._end:
            self.say(f"step {step}/{self._end}: loss {loss:.4f}, {speed}")

    def say(self, line: str) -> None:
        """A line that stays, above the bar if there is one."""
        if self._bar.disable:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.write(line, file=sys.stderr)
