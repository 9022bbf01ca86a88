"""How processes of a run end: their exit statuses, and the signals that end them. All processes mean the same by these.

0    the run has come to its end                  75   out of time: to be started again (EX_TEMPFAIL of sysexits.h)
2    bad input, told in one sentence              128 + n   ended by signal n, or told to end by it
3    a recipe's training has diverged
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

from hytrain.errors import ConfigError

EXIT_USAGE: Final = 2
EXIT_DIVERGED: Final = 3
EXIT_AGAIN: Final = 75
EXIT_SIGNAL: Final = 128
#: Errors of a path: there is none, it is a folder, or in a file, or too long.
_OF_PATHS: Final = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)
#: Signals that end a run, in its program's own time.
ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Signals whose meaning is the user's program's, such as a batch system's warning that the time is up.
FOR_PROGRAMS: Final = (signal.SIGUSR1, signal.SIGUSR2)


def on_endings(handler: Callable[[int, FrameType | None], None], *others: signal.Signals) -> None:
    """Have this process's signals of `ENDINGS` handled, and others. Under nohup, SIGHUP stays ignored."""
    for number in (*ENDINGS, *others):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


@contextmanager
def printing() -> Iterator[None]:
    """What a command does and prints. `| head` may end it; what the terminal's encoding lacks becomes a question mark.

    Raises `ConfigError` for a path that was given and is none, and where standard output takes nothing.
    """
    out = sys.stdout  # None if it is closed
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")
    try:
        yield
        if out is not None:
            out.flush()
    except OSError as error:
        if error.errno in _OF_PATHS and error.filename is not None:
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        is_full = error.errno == errno.ENOSPC and error.filename is None
        if not (is_full or isinstance(error, BrokenPipeError)):
            raise
        with suppress(OSError, ValueError):  # or else Python's flush at exit fails, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_full:
            raise ConfigError(f"output: {error.strerror}") from None


def how_it_ended(returncode: int) -> str:
    """A return code of `subprocess` as words. Real-time signals have no names."""
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-returncode, f'signal {-returncode}')}"


def exit_status(returncode: int) -> int:
    """A return code of `subprocess` as a shell reports it."""
    return EXIT_SIGNAL - returncode if returncode < 0 else returncode
