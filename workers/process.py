"""Starts the processes of a run and hears of their end; the child's side of the same.

    launcher: Child.start ─ pipe "ready" ◀── READY ── worker, last line of a successful construction
                          ─ pipe "life"  ──  held open; its closing tells the worker that the launcher is gone
                          ─ pidfd        ──  tells the launcher that the worker is gone

Death is never inferred from a pipe of the dying process: a child that it forked may hold the other end.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hytrain.errors import ClusterTimeout, WorkerDied
from protocol.address import Address

LOG_TAIL_LINES: Final = 20
_PR_SET_PDEATHSIG: Final = 1


@dataclass(slots=True)
class Child:
    """A process that the launcher started."""

    address: Address
    process: subprocess.Popen[bytes]
    pidfd: int
    log: Path
    ready: int | None
    life: int | None

    @property
    def name(self) -> str:
        return str(self.address)

    def close(self) -> None:
        """Close this side's descriptors; the worker leaves when its `life` pipe closes."""
        for descriptor in (self.ready, self.life):
            if descriptor is not None:
                os.close(descriptor)
        self.ready = self.life = None


def start_worker(
    address: Address, module: str, arguments: Sequence[str], *, log_dir: Path, environment: dict[str, str]
) -> Child:
    """Start `python -P -m module` with its two pipes; its output goes to its log."""
    ready_read, ready_write = os.pipe()
    life_read, life_write = os.pipe()
    command = [sys.executable, "-P", "-m", module, *arguments]
    command += ["--ready-fd", str(ready_write), "--life-fd", str(life_read)]
    log = log_dir / f"{address}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=(ready_write, life_read),
            start_new_session=True,
        )
    os.close(ready_write)
    os.close(life_read)
    return Child(address, process, os.pidfd_open(process.pid), log, ready_read, life_write)


def start_program(command: Sequence[str], *, log: Path, environment: dict[str, str], stdout: int, stderr: int) -> Child:
    """Start the trainer: the user's program, in the foreground, which dies with the launcher.

    The descriptors `stdout` and `stderr` become its own, and are closed here.
    """
    process = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, preexec_fn=_die_with_parent)
    os.close(stdout)
    os.close(stderr)
    return Child(Address("trainer", 0), process, os.pidfd_open(process.pid), log, None, None)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def await_ready(child: Child, others: Iterable[Child], *, timeout_s: float) -> str:
    """Wait until `child` is ready; what it says of itself.

    Raises `WorkerDied` with the end of its log if it, or one of `others`, ends first, and `ClusterTimeout`.
    """
    deadline = time.monotonic() + timeout_s
    assert child.ready is not None
    watched = {child.pidfd: child, **{other.pidfd: other for other in others}}
    said = b""
    while not said.endswith(b"\n"):
        remaining = deadline - time.monotonic()
        readable, _, _ = select.select([child.ready, *watched], [], [], max(remaining, 0.0))
        if child.ready in readable:
            chunk = os.read(child.ready, 4096)
            said += chunk
            if chunk:
                continue
        for pidfd in watched.keys() & set(readable):
            raise WorkerDied(describe_end(watched[pidfd]))
        if remaining <= 0:
            raise ClusterTimeout(f"{child.name} was not ready within {timeout_s:.0f} s{log_tail(child.log)}")
    return said.decode().strip()


def describe_end(child: Child) -> str:
    """Who ended, with what status or signal, and the end of its log."""
    status = child.process.wait()
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    return f"{child.name} (process {child.process.pid}) {how}{log_tail(child.log)}"


def log_tail(log: Path) -> str:
    """The last lines of a log, for people."""
    try:
        lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        lines = []
    return f"\nthe end of {log}:\n" + "\n".join(f"  {line}" for line in lines) if lines else f"\n({log} is empty)"


def stop(children: Iterable[Child], *, grace_s: float) -> None:
    """End all `children`: a worker leaves when its `life` pipe closes, a program is asked to. Then insist."""
    children = list(children)
    for child in children:
        if child.life is None and child.process.poll() is None:
            child.process.terminate()
        child.close()
    deadline = time.monotonic() + grace_s
    for child in children:
        # Popen.wait with a time limit looks every 50 ms; the descriptor tells at once.
        if not select.select([child.pidfd], [], [], max(deadline - time.monotonic(), 0.0))[0]:
            child.process.kill()
        child.process.wait()
        os.close(child.pidfd)


# ---------------------------------------------------------------- the child's side


def worker_logging() -> None:
    """Log to standard error, which the launcher has made this process's log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def say_ready(descriptor: int, detail: str) -> None:
    """The last line of a successful construction."""
    os.write(descriptor, f"{detail}\n".encode())
    os.close(descriptor)


def ignore_terminal_signals() -> None:
    """Ctrl-C is the trainer's to handle: workers leave when it, or the launcher, is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def read_token(socket_dir: str) -> str:
    """The run's secret, which only this user can read."""
    return (Path(socket_dir) / "token").read_text()
