"""Copies the output of trainers to the launcher's own and to their logs.

trainer ─ pipe ──▶ Tee ─▶ terminal, of ranks in whole lines
rank r ── fifo ──▶     └▶ logs/trainer-r.log, without what was written over: progress bars
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from workers.launch.output import Output, output, say

#: A line that is longer is shown in parts.
LONGEST_LINE: Final = 1 << 20
#: A pipe holds no more than so many pieces of so much.
READ_BYTES: Final = 1 << 16
READS: Final = 16


@dataclass
class Pipe:
    """Where the content of a pipe goes."""

    log: IO[bytes]
    target: Output
    in_lines: bool
    #: The beginning of a line.
    rest: bytes = b""
    #: What follows a carriage return, as long as it may be written over: a log has no progress bars.
    passing: bytes = b""

    def keep(self, chunk: bytes, *, all_of_it: bool = False) -> None:
        """Write to the log what a terminal would go on showing."""
        *whole, last = (self.passing + chunk).split(b"\n")
        waits = b"\r" in last and not all_of_it
        self.passing = b"\r" + _visible(last) + b"\r" * last.endswith(b"\r") if waits else b""
        ready = b"".join(_visible(line) + b"\n" for line in whole) + (b"" if waits else _visible(last))
        if ready:
            self.log.write(ready)

    def show(self, chunk: bytes, *, all_of_it: bool = False) -> None:
        """Write to the terminal what is ready for it."""
        content = self.rest + chunk
        ends = max(content.rfind(b"\n"), content.rfind(b"\r")) + 1
        whole = not self.in_lines or all_of_it or len(content) - ends > LONGEST_LINE
        ready, self.rest = (content, b"") if whole else (content[:ends], content[ends:])
        self.target.write(ready)


class Tee:
    """The open pipes."""

    def __init__(self) -> None:
        self.pipes: dict[int, Pipe] = {}
        self._unwritable: set[str] = set()
        self._logs: list[IO[bytes]] = []

    def add_pipes(self, log: Path) -> tuple[int, int]:
        """Standard output and error for a process."""
        out, stdout = os.pipe()
        err, stderr = os.pipe()
        self._add(out, err, log, in_lines=False)
        return stdout, stderr

    def add_fifos(self, socket_dir: str, rank: int, log: Path) -> None:
        """The same for the processes of a rank, which open them by name."""
        pipes = rank_pipes(socket_dir, rank)
        for pipe in pipes:
            os.mkfifo(pipe, 0o600)
        # Open for writing too: there is no end of file between two processes of this rank.
        out, err = [os.open(pipe, os.O_RDWR | os.O_CLOEXEC) for pipe in pipes]
        self._add(out, err, log, in_lines=True)

    def _add(self, out: int, err: int, log: Path, *, in_lines: bool) -> None:
        copy = log.open("ab", buffering=0)
        self._logs.append(copy)
        for pipe, stream in ((out, sys.stdout), (err, sys.stderr)):
            self.pipes[pipe] = Pipe(copy, output(stream), in_lines)

    def pass_on(self, readable: Iterable[int]) -> bool:
        """Copy what has arrived on our pipes among `readable`. Returns False if nothing has."""
        return any([self._pass_on(pipe) for pipe in readable if pipe in self.pipes])

    def _pass_on(self, descriptor: int) -> bool:
        chunk = os.read(descriptor, READ_BYTES)
        pipe = self.pipes[descriptor]
        try:
            pipe.keep(chunk, all_of_it=not chunk)
        except OSError as error:
            if pipe.log.name not in self._unwritable:
                self._unwritable.add(pipe.log.name)
                say(f"{pipe.log.name} lacks output from here on: {error.strerror}")
        pipe.show(chunk, all_of_it=not chunk)
        if not chunk:
            os.close(descriptor)
            del self.pipes[descriptor]
        return bool(chunk)

    def drain(self) -> None:
        """Copy what was written before the end, without waiting: a process that is left may go on writing."""
        for _ in range(READS):
            if not self.pass_on(select.select([*self.pipes], [], [], 0)[0]):
                break
        for pipe in self.pipes.values():
            pipe.show(b"", all_of_it=True)
            with suppress(OSError):
                pipe.keep(b"", all_of_it=True)

    def close(self) -> None:
        for pipe in self.pipes:
            os.close(pipe)
        for log in self._logs:
            log.close()


def _visible(line: bytes) -> bytes:
    """What a terminal shows of a line in the end."""
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), b"") if b"\r" in line else line


def rank_pipes(socket_dir: str, rank: int) -> tuple[str, str]:
    """Where a rank writes its standard output and error."""
    return os.path.join(socket_dir, f"out-{rank}"), os.path.join(socket_dir, f"err-{rank}")
