"""Copies the output of trainers to the launcher's own and to their logs.

trainer ─ pipe ──▶ Tee ─▶ terminal
rank r ── fifo ──▶     └▶ logs/trainer-r.log
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO


class Tee:
    """The open pipes, each with its log and the descriptor that its content is copied to."""

    def __init__(self) -> None:
        self.pipes: dict[int, tuple[IO[bytes], int]] = {}
        self._unwritable: set[str] = set()
        self._logs: list[IO[bytes]] = []

    def add_pipes(self, log: Path) -> tuple[int, int]:
        """Standard output and error for a process."""
        out, stdout = os.pipe()
        err, stderr = os.pipe()
        self._add(out, err, log)
        return stdout, stderr

    def add_fifos(self, socket_dir: str, rank: int, log: Path) -> None:
        """The same for the processes of a rank, which open them by name."""
        pipes = rank_pipes(socket_dir, rank)
        for pipe in pipes:
            os.mkfifo(pipe, 0o600)
        # Open for writing too: there is no end of file between two processes of this rank.
        out, err = [os.open(pipe, os.O_RDWR | os.O_CLOEXEC) for pipe in pipes]
        self._add(out, err, log)

    def _add(self, out: int, err: int, log: Path) -> None:
        copy = log.open("ab", buffering=0)
        self._logs.append(copy)
        self.pipes |= {out: (copy, sys.stdout.fileno()), err: (copy, sys.stderr.fileno())}

    def pass_on(self, readable: Iterable[int]) -> bool:
        """Copy what has arrived on our pipes among `readable`. Returns False if nothing has."""
        return any([self._pass_on(pipe) for pipe in readable if pipe in self.pipes])

    def _pass_on(self, pipe: int) -> bool:
        chunk = os.read(pipe, 65536)
        copy, target = self.pipes[pipe]
        try:
            copy.write(chunk)
        except OSError as error:
            if copy.name not in self._unwritable:
                self._unwritable.add(copy.name)
                with suppress(OSError):  # it may go to a file on the same disk
                    print(f"{copy.name} lacks output from here on: {error.strerror}", file=sys.stderr)
        try:
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(target, rest) :]
        except OSError:
            pass  # the reader is gone or the terminal is closed; the log is complete
        if not chunk:
            os.close(pipe)
            del self.pipes[pipe]
        return bool(chunk)

    def drain(self) -> None:
        """Copy what was written before the end, without waiting: a process that is left may hold the pipes."""
        while self.pass_on(select.select([*self.pipes], [], [], 0)[0]):
            pass

    def close(self) -> None:
        for pipe in self.pipes:
            os.close(pipe)
        for log in self._logs:
            log.close()


def rank_pipes(socket_dir: str, rank: int) -> tuple[str, str]:
    """Where a rank writes its standard output and error."""
    return os.path.join(socket_dir, f"out-{rank}"), os.path.join(socket_dir, f"err-{rank}")
