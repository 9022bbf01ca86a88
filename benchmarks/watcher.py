"""A process that looks at the machine beside one that is measured, which may hold Python's lock for seconds.

    with Watcher("benchmarks.memory") ─▶ python -m benchmarks.memory ─▶ a look each tick ─▶ stdin is closed ─▶ JSON

`memory` and `power` are such processes. They end with the one that started them.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

HOME: Final = Path(__file__).resolve().parent.parent


class Watcher:
    """Runs a module within a `with` block. `told`, after the block, is what it has printed."""

    told: Any = None

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]

    def __enter__(self) -> Self:
        self._child = subprocess.Popen(
            self._command, cwd=HOME, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        self._child.stdout.readline()  # it has looked once
        return self

    def __exit__(self, *error: object) -> None:
        told, _ = self._child.communicate()
        self.told = json.loads(told)


def ticks(tick_s: float) -> Iterator[None]:
    """In the module, after its first look: yields each tick until the block of `Watcher` has ended."""
    print("watching", flush=True)
    while not select.select([sys.stdin], [], [], tick_s)[0]:
        yield
