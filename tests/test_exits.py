"""How processes end, and what commands print."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hytrain.config import workers_environment
from workers.exits import how_it_ended


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (3, "ended with exit status 3"),
        (-9, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),  # a real-time one, without a name
    ],
)
def test_an_end_in_words(returncode: int, words: str) -> None:
    assert how_it_ended(returncode) == words


MONITOR, DOCTOR = "workers.watch.monitor", "workers.watch.doctor"
#: What needs no GPU, and prints more than a pipe holds in one write.
FORECAST = (DOCTOR, "--gpu", "RTX 4090", "--ram", "64GiB", "--cores", "8")


@pytest.mark.parametrize("command", [("workers.launch.launcher", "--help"), (MONITOR, "--help"), FORECAST], ids=str)
def test_letters_that_a_terminal_lacks_are_question_marks(command: Sequence[str]) -> None:
    environment = workers_environment() | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-P", "-m", *command], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


def test_whoever_reads_may_leave() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", *FORECAST],
        env=workers_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as doctor:
        assert doctor.stdout is not None and doctor.stderr is not None
        doctor.stdout.close()
        assert doctor.stderr.read() == b""
    assert doctor.returncode == 0


def test_a_full_device_is_a_sentence(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-P", "-m", *FORECAST]
        done = subprocess.run(command, env=workers_environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "No space left on device" in done.stderr and "Traceback" not in done.stderr
