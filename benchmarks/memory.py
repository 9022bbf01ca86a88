"""How far host memory grows, seen by a process of its own: `saving` uses it.

Growth ─ python -m benchmarks.memory ─▶ before ─▶ every 20 ms: the most? ─▶ growth, as JSON
"""

from __future__ import annotations

import json
from typing import Final

from benchmarks import host
from benchmarks.watcher import Watcher, ticks

TICK_S: Final = 0.02


class Growth(Watcher):
    """The most host memory within a `with` block, less that at its start, in bytes; known after the block.

    `used` is all that is not available, `programs` anonymous and shared pages alone. The file cache is in neither.
    """

    used = programs = 0

    def __init__(self) -> None:
        super().__init__("benchmarks.memory")

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.used, self.programs = self.told


def main() -> None:
    before = most = _now()
    for _ in ticks(TICK_S):
        most = [max(pair) for pair in zip(most, _now(), strict=True)]
    print(json.dumps([end - start for end, start in zip(most, before, strict=True)]))


def _now() -> list[int]:
    return [host.used_bytes(), host.program_bytes()]


if __name__ == "__main__":
    main()
