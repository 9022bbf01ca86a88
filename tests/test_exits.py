"""How processes end, and what commands print."""

from __future__ import annotations

import errno
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from hytrain.config import workers_environment
from hytrain.errors import ConfigError
from workers.exits import how_it_ended, printing


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
FORECAST = (sys.executable, "-P", "-m", DOCTOR, "--gpu", "RTX 4090", "--ram", "64GiB", "--cores", "8")


@pytest.mark.parametrize("command", ["workers.launch.launcher", MONITOR])
def test_letters_that_a_terminal_lacks_are_question_marks(command: str) -> None:
    environment = workers_environment() | {"PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-P", "-m", command, "--help"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "?" in done.stdout


def test_whoever_reads_may_leave() -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(FORECAST, env=workers_environment(), **pipes) as doctor:
        assert doctor.stdout is not None and doctor.stderr is not None
        doctor.stdout.close()
        assert doctor.stderr.read() == b""
    assert doctor.returncode == 0


def test_a_full_device_is_a_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(FORECAST, env=workers_environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == "hytrain-cluster: output: No space left on device\n"


def test_nothing_need_be_there_to_print_to() -> None:
    words = ["sh", "-c", 'exec "$@" >&-', "sh", *FORECAST]
    done = subprocess.run(words, env=workers_environment(), stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_path_that_is_none_is_a_sentence_and_other_errors_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where standard output is no file, too, as in a notebook."""
    monkeypatch.setattr(sys, "stdout", StringIO())
    with pytest.raises(ConfigError, match="^/etc: Is a directory"), printing():
        Path("/etc").read_text()
    with pytest.raises(ConnectionRefusedError), printing():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    with printing():
        raise BrokenPipeError
