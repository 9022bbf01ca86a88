"""What a recipe shows while it trains: a bar that fits the terminal, or a line now and then."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest

from hytrain.recipe import progress
from hytrain.recipe.progress import Progress, Speed, first_plan
from hytrain.statistics import Statistics

SPEED = Speed(tokens_per_s=12345.6, tflops=1.25, mfu=0.31, k=0.4, stall_s=0.0021)
COLUMNS = (80, 60)


def show(steps: int, terminal: bool) -> None:
    with Progress(0, steps, terminal) as shown:
        for step in range(1, steps + 1):
            shown.show(step, 1.5, SPEED)
            if step == steps // 2:
                shown.say("a line")


def main() -> None:
    """A trainer on a terminal whose window becomes narrower."""
    for columns in COLUMNS:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        show(4, terminal=True)
        print("---", file=sys.stderr)


def test_without_a_terminal_there_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every half minute, and for the first and the last step, however many steps there are."""
    clock = iter(range(10_000))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock) / 2))  # read once per step
    show(140, terminal=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if line != "a line"]
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert steps[0] == 1 and steps[-1] == 140 and 4 <= len(steps) <= 5
    numbers = "loss 1.5000, 12,346 tok/s, MFU 31%, k 0.40, 1.25 TFLOP/s, stall 2.1 ms"
    assert lines[-1] == f"step 140/140: {numbers}"
    assert re.fullmatch(rf"step 1/140, \d\d:\d\d left: {numbers}", lines[0])


def test_a_bar_is_one_line_of_the_terminal() -> None:
    """Its process has a terminal, but standard error leads to the launcher, through a pipe."""
    ours, theirs = pty.openpty()
    command = [sys.executable, __file__]
    ran = subprocess.run(
        command,
        stdin=theirs,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        check=True,
    )
    os.close(theirs)
    os.close(ours)
    for columns, bar in zip(COLUMNS, ran.stderr.decode().split("---\n")[:2], strict=True):
        lines = [line.split("\r") for line in bar.split("\n")]
        assert max(len(part) for parts in lines for part in parts) < columns
        assert [parts[-1].split(" |")[0] for parts in lines] == ["a line", "step 4/4", ""]
        assert ("loss 1.500, 12,346 tok/s, MFU 31%, k 0.40" in lines[1][-1]) is (columns == COLUMNS[0])


def test_the_first_plan_is_told_in_words() -> None:
    assert first_plan(Statistics()) == "first plan: k=0.00"
    planned = Statistics(k=0.25, gpu_layers=(0,), visiting_layers=(1, 2), offloaded_layers=(3,))
    assert first_plan(planned) == (
        "first plan: k=0.25, state that visits the GPU: 2 layers, weights in host memory: 1 layers"
    )


if __name__ == "__main__":
    main()
