"""How far host memory grows, seen by a process of its own: the one that is measured may hold Python's lock for seconds.

    Growth ─ python -m benchmarks.memory ─▶ before ─▶ every 20 ms: the most? ─▶ stdin is closed ─▶ growth, as JSON

`saving` uses it. The process ends with the one that started it.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Final, Self

from benchmarks import host

HOME: Final = Path(__file__).resolve().parent.parent
TICK_S: Final = 0.02


class Growth:
    """The most host memory within a `with` block, less that at its start, in bytes; known after the block.

    `used` is all that is not available, `programs` anonymous and shared pages alone. The file cache is in neither.
    """

    used = programs = 0

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.memory"]
        self._child = subprocess.Popen(command, cwd=HOME, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        self._child.stdout.readline()  # it has looked once
        return self

    def __exit__(self, *error: object) -> None:
        told, _ = self._child.communicate()
        self.used, self.programs = json.loads(told)


def main() -> None:
    before = most = _now()
    print("watching", flush=True)
    while not select.select([sys.stdin], [], [], TICK_S)[0]:
        most = [max(pair) for pair in zip(most, _now(), strict=True)]
    print(json.dumps([end - start for end, start in zip(most, before, strict=True)]))


def _now() -> list[int]:
    return [host.used_bytes(), host.program_bytes()]


if __name__ == "__main__":
    main()
