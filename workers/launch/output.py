"""The launcher's own output, which somebody reads, or not: it waits for nobody.

    say, Tee ─ write ─▶ what is held ─ a thread ─▶ terminal, pipe or file
    the launcher's end ─ drain ─▶ the rest, as long as it is read

Ctrl-S, `less` or a connection that hangs may stop whoever writes to them, for ever. The launcher has signals and deaths
to look at.
"""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from threading import Condition, Thread
from typing import Final, TextIO

#: So much is held for a slow reader. What comes after that is in the logs alone.
HELD_BYTES: Final = 4 << 20
#: At the launcher's end, a reader that takes nothing is waited for so long.
PATIENCE_S: Final = 3.0
CHUNK_BYTES: Final = 1 << 16


class Output:
    """One descriptor, with what has still to be written to it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = Condition()
        self._held = bytearray()
        self._lost = self._written = 0
        self._ends = False
        self._thread = Thread(target=self._write_all, name="output", daemon=True)
        self._thread.start()

    def write(self, content: bytes) -> None:
        """Have it written. It is lost where too much waits already."""
        with self._changed:
            if self._lost or len(self._held) + len(content) > HELD_BYTES:
                self._lost += len(content)
            else:
                self._held += content
            self._changed.notify_all()

    def drain(self) -> None:
        """Return once all is written, or nothing of it is read any more. Nothing may be written afterwards."""
        with self._changed:
            while self._held:
                if not self._is_read(self._written):
                    return
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def _is_read(self, before: int) -> bool:
        return self._changed.wait_for(lambda: self._written != before, PATIENCE_S)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held or self._ends)
                if not self._held:
                    return
                chunk = bytes(self._held[:CHUNK_BYTES])
            try:
                written = os.write(self._descriptor, chunk)
            except BlockingIOError:  # somebody else has it so
                select.select([], [self._descriptor], [])
                continue
            except OSError:
                written = len(chunk)  # the reader is gone or the terminal is closed; the log is complete
            with self._changed:
                del self._held[:written]
                self._written += written
                if not self._held and self._lost:
                    self._held += (
                        f"\nhytrain-cluster: {self._lost} bytes were not read in time: see the logs\n".encode()
                    )
                    self._lost = 0
                self._changed.notify_all()


_outputs: dict[tuple[int, int], Output] = {}


def output(stream: TextIO) -> Output:
    """The output of a stream that has a descriptor. Streams to one place have one, or they would overtake each other.

    Raises OSError or ValueError if it has none.
    """
    status = os.fstat(stream.fileno())
    place = status.st_dev, status.st_ino
    if place not in _outputs:
        _outputs[place] = Output(stream.fileno())
    return _outputs[place]


def say(text: str) -> None:
    """Tell the user, who may have closed the terminal, or may not read: that ends nothing."""
    with suppress(OSError, ValueError):
        try:
            target = output(sys.stderr)
        except io.UnsupportedOperation:
            print(text, file=sys.stderr, flush=True)
        else:
            target.write(f"{text}\n".encode(errors="backslashreplace"))


def drain() -> None:
    """Write the rest: the launcher is about to end."""
    while _outputs:
        _outputs.popitem()[1].drain()
