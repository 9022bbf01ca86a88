"""metrics.jsonl: one line per step, in order. The coordinator process writes it.

append ─▶ a new step: at the end
      ├─▶ a step again, after a resume or a rollback: it and the lines after it move to metrics-replaced.jsonl
      └─▶ the same record again, for another coordinator: nothing
amend ──▶ numbers that come late ─ write_late, once a second ─▶ into the steps' lines, all in one go

If the disk is full, the file stays as it is, and training goes on: the next line that can be written has, as
`missing_records`, the number of lines that could not be.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

BLOCK_BYTES: Final = 1 << 16


class MetricsFile:
    """The records of one trainer's runs. Lines are unbuffered: what was written survives this process."""

    def __init__(self, path: Path) -> None:
        self._replaced = path.with_name(f"{path.stem}-replaced{path.suffix}")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._end = os.fstat(self._file).st_size
        self._last: float | None = None  # the last line's step; None: not read yet
        self._late: dict[int, dict[str, float | None]] = {}  # numbers of steps whose lines are written
        self.missing = 0  # lines that could not be written, since the last one that could

    def close(self) -> None:
        os.close(self._file)

    def append(self, line: str) -> None:
        """Add a step's line. Lines of this step and of later ones give way to it.

        Raises OSError if the disk is full. Then it counts as missing, and all lines in the file are whole.
        """
        step = _of(line)
        if self._late and step <= max(self._late):
            self.write_late()  # into the lines that give way
        if self.missing:
            line = json.dumps({**json.loads(line), "missing_records": self.missing})
        self.missing += 1
        if self._last is None or step <= self._last:
            start, lines = self._since(step)
            if lines and (ended_s := _of(line, "at_s")) < math.inf and _of(lines[0], "at_s") == ended_s:
                self._last = _of(lines[-1])
                self.missing -= 1
                return
            if lines:
                with self._replaced.open("ab") as replaced:
                    replaced.writelines(whole for whole in lines if _of(whole) < math.inf)
                os.ftruncate(self._file, start)
                self._end = start
        self._write(line.encode() + b"\n", self._end)
        self._last, self.missing = step, 0

    def amend(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Numbers for a step's line, which `write_late` adds."""
        known = self._late.setdefault(step, {})
        for name, number in numbers.items():
            known.setdefault(name, number)

    def write_late(self) -> list[int]:
        """Add late numbers to their lines, which keep those that they have. Returns the steps that have no line.

        The file is read and written from the first of these lines on, however many there are. Raises OSError if the
        disk is full: then the numbers wait for the next time.
        """
        if not self._late:
            return []
        start, lines = self._since(min(self._late))
        known = {_of(line): index for index, line in enumerate(lines)}
        amended = list(lines)
        for step, numbers in self._late.items():
            if (index := known.get(step)) is not None:
                record = json.loads(lines[index])
                amended[index] = json.dumps({**record, **numbers, **record}).encode() + b"\n"
        if amended != lines:
            self._write(b"".join(amended), start, before=b"".join(lines))
        late, self._late = self._late, {}
        return [step for step in late if step not in known]

    def _write(self, data: bytes, start: int, before: bytes = b"") -> None:
        """Write over what follows `start`, which is `before`; on a full disk, that is put back, which needs no room."""
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], start + written)
        except OSError:
            with suppress(OSError):
                os.pwrite(self._file, before, start)
                os.ftruncate(self._file, self._end)
            raise
        self._end = start + len(data)

    def _since(self, step: float) -> tuple[int, list[bytes]]:
        """Where the lines from `step` on begin, and these lines. A line that a crash has cut off is one of them."""
        size = BLOCK_BYTES
        while True:
            start = max(self._end - size, 0)
            lines = os.pread(self._file, self._end - start, start).splitlines(keepends=True)
            if start:  # in the middle of a line
                start += len(lines.pop(0))
            earlier = next((n for n in range(len(lines), 0, -1) if _of(lines[n - 1]) < step), 0)
            if earlier or size >= self._end:
                return start + sum(map(len, lines[:earlier])), lines[earlier:]
            size *= 4


def _of(line: str | bytes, name: str = "step") -> float:
    """A number of a line; infinity for a line that is not whole."""
    try:
        return float(json.loads(line)[name])
    except (ValueError, KeyError, TypeError):
        return math.inf
