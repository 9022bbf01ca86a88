"""Monitors that are attached while steps are measured: the part "monitors".

Monitors(50) ─▶ python -m workers.watch.monitor RUN --follow --json, 50 times ─▶ each has read a record
            └▶ every second one is stopped, and reads nothing any more
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Final, Self

from benchmarks.systems import Unavailable
from benchmarks.watcher import HOME

PATIENCE_S: Final = 60.0
TICK_S: Final = 0.05


class Monitors:
    """So many monitors of the run in `run_dir` within a `with` block. The run has had a step."""

    def __init__(self, count: int, run_dir: Path) -> None:
        self._count, self._run_dir = count, run_dir
        self._all: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []

    def __enter__(self) -> Self:
        """Returns once all have read a record. Raises `Unavailable` if one does not."""
        command = [sys.executable, "-m", "workers.watch.monitor", str(self._run_dir), "--follow", "--json"]
        for _ in range(self._count):
            said = tempfile.TemporaryFile()
            self._all.append((subprocess.Popen(command, cwd=HOME, stdin=subprocess.DEVNULL, stdout=said), said))
        ends_s = time.monotonic() + PATIENCE_S
        while not all(self.read()):
            if time.monotonic() > ends_s or any(process.poll() is not None for process, _ in self._all):
                self.__exit__()
                raise Unavailable(f"not all of {self._count} monitors have attached")
            time.sleep(TICK_S)
        for process, _ in self._all[1::2]:
            process.send_signal(signal.SIGSTOP)
        return self

    def __exit__(self, *error: object) -> None:
        for process, said in self._all:
            process.kill()
            process.wait()
            said.close()

    def read(self) -> list[int]:
        """How many records each has read by now."""
        found = []
        for _, said in self._all:
            said.seek(0)
            found.append(said.read().count(b"\n"))
        return found
