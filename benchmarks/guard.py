"""Runs one child under watch: the machine's memory, a time limit, and at the end its rows. `suite` calls it.

    Popen ─▶ every tenth of a second: memory left? time left? ─▶ the child's end, or its whole tree is ended ─▶ rows

A system that eats the memory is stopped before the machine is. Whatever a child leaves behind is ended with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks import host

TICK_S: Final = 0.1
GRACE_S: Final = 2.0
END_S: Final = 30.0
#: "SomeError: what went wrong", as the last line of a traceback
_EXCEPTION: Final = re.compile(r"^(?:\[\w+\]: ?)?(?:\w+\.)*((?:[A-Z]\w*)?(?:Error|Exception|Timeout|Unavailable)\b.*)$")
#: torchrun's own exception says only that a rank has failed.
_TORCHRUN: Final = "ChildFailedError"


@dataclass(frozen=True)
class Outcome:
    """The whole lines that it wrote, and how it ended: `error` is None if all is well.

    Memory is the most in use, above what was in use before.
    """

    lines: list[str]
    error: str | None
    host_peak_bytes: int
    took_s: float


@dataclass(frozen=True)
class Bounds:
    """When to stop a child: after seconds, or with fewer bytes of host memory left; `total` as in `host.left_bytes`."""

    timeout_s: float
    floor_bytes: int
    total: int | None = None


def watch(command: Sequence[str], bounds: Bounds, log: Path) -> Outcome:
    """Run `command` with `--rows-to FILE` appended; what it writes there are its lines, all else goes to `log`."""
    base, began_s, began_at = host.used_bytes(), time.monotonic(), log.stat().st_size if log.exists() else 0
    peak, stopped = base, None
    with tempfile.NamedTemporaryFile() as rows, log.open("ab") as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        child = subprocess.Popen([*command, "--rows-to", rows.name], start_new_session=True, **streams)
        try:
            while child.poll() is None and stopped is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(TICK_S)
                peak = max(peak, host.used_bytes())
                stopped = _reason_to_stop(bounds, time.monotonic() - began_s)
            took_s = time.monotonic() - began_s
        finally:
            _end(child)
        lines = [line.decode() for line in rows if line.endswith(b"\n")]
    error, told = stopped, log.read_bytes()[began_at:].decode(errors="replace")
    if stopped is None and child.returncode:
        error = last_meaningful_line(told) or f"exit status {child.returncode}"
    elif stopped is not None and (failed := last_exception(told)):  # and took the memory, or the time, while it ended
        error = f"{failed}; {stopped}"
    return Outcome(lines, error, peak - base, took_s)


def _reason_to_stop(bounds: Bounds, running_s: float) -> str | None:
    left = host.left_bytes(bounds.total)
    if left < bounds.floor_bytes:
        return f"stopped: host memory, {left / 1e9:.1f} GB were left"
    return f"stopped: took longer than {bounds.timeout_s:.0f} s" if running_s > bounds.timeout_s else None


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child's tree and its process group, and wait until they are gone: their memory is the next one's."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error, OSError):  # it may have ended, and been waited for
        # Or it starts another one after this look at its tree. Not the group: a child that was stopped before its exec
        # would hold its parent in vfork, where that cannot stop.
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        tree = psutil.Process(child.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    _, alive = psutil.wait_procs(tree, timeout=GRACE_S)  # HyTrain's launcher sees the death and tidies up
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=END_S)


def last_meaningful_line(text: str) -> str:
    """The last exception in a log, or else the last line, up to 200 characters."""
    return last_exception(text) or next((line.strip()[:200] for line in text.splitlines()[::-1] if line.strip()), "")


def last_exception(text: str) -> str:
    """The last exception in a log that is not torchrun's own, up to 200 characters; empty without one."""
    found = [match[1] for line in text.splitlines() if (match := _EXCEPTION.match(line.strip()))]
    own = [each for each in found if not each.startswith(_TORCHRUN)]
    return own[-1].removeprefix("Unavailable: ")[:200] if own else ""
