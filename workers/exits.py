"""How processes of a run end: their exit statuses, and the signals that end them. All processes mean the same by these.

0    the run has come to its end                  75   out of time: to be started again (EX_TEMPFAIL of sysexits.h)
2    bad input, told in one sentence              128 + n   ended by signal n, or told to end by it
3    a recipe's training has diverged
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Final

EXIT_USAGE: Final = 2
EXIT_DIVERGED: Final = 3
EXIT_AGAIN: Final = 75
#: Signals that end a run, in its program's own time.
ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Signals whose meaning is the user's program's, such as a batch system's warning that the time is up.
FOR_PROGRAMS: Final = (signal.SIGUSR1, signal.SIGUSR2)


def on_endings(handler: Callable[[int, FrameType | None], None]) -> None:
    """Have this process's signals of `ENDINGS` handled. Under nohup, SIGHUP stays ignored."""
    for number in ENDINGS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def how_it_ended(returncode: int) -> str:
    """A return code of `subprocess` as words."""
    return (
        f"was killed by {signal.Signals(-returncode).name}"
        if returncode < 0
        else f"ended with exit status {returncode}"
    )


def exit_status(returncode: int) -> int:
    """A return code of `subprocess` as a shell reports it."""
    return 128 - returncode if returncode < 0 else returncode
