"""Starts the processes of a run and notices their end. The worker's side of the start is `workers.worker`.

    launcher: start_worker ─ pipe "ready" ◀── READY ── worker, after it was constructed successfully
                           ─ pipe "life"  ──  held open; it closes when the launcher is gone, so the worker exits
                           ─ pidfd        ──  tells the launcher that the worker is gone

A process's death is never inferred from its end of a pipe: a child that it forked may hold that end open.

All are started by `Popen`, in whose place tests put one that forks a process in which torch is imported already.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Final

from hytrain.errors import ClusterTimeout, WorkerDied
from protocol.address import Address
from workers.exits import ENDINGS, FOR_PROGRAMS, exit_status, how_it_ended

#: What runs as a worker of each role.
MODULES: Final = {"coordinator": "workers.coordinate.coordinator", "optimizer": "workers.optimize.optimizer"}
LOG_TAIL_LINES: Final = 20
#: How often the launcher has started a program again. As TORCHELASTIC_RESTART_COUNT, torchrun would begin anew with it.
RESTARTS: Final = "HYTRAIN_RESTART_COUNT"
_PR_SET_PDEATHSIG: Final = 1


@dataclass(slots=True)
class Child:
    """A process that the launcher started."""

    name: str
    process: Popen[bytes]
    pidfd: int
    log: Path
    ready: int | None
    life: int | None

    def exit_status(self) -> int:
        """Wait for the process; its exit status as a shell reports it."""
        return exit_status(self.process.wait())

    def close(self) -> None:
        """Close this side's descriptors. The worker exits when its `life` pipe closes."""
        for descriptor in (self.ready, self.life):
            if descriptor is not None:
                os.close(descriptor)
        self.ready = self.life = None


def start_worker(address: Address, arguments: Sequence[str], *, log_dir: Path, environment: dict[str, str]) -> Child:
    """Start a worker with its two pipes. Its output goes to its log."""
    ready_read, ready_write = os.pipe()
    life_read, life_write = os.pipe()
    command = [sys.executable, "-P", "-m", MODULES[address.role], *arguments]
    command += ["--ready-fd", str(ready_write), "--life-fd", str(life_read)]
    log = log_dir / f"{address}.log"
    with log.open("ab") as output:
        process = Popen(
            command,
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=(ready_write, life_read),
            start_new_session=True,
        )
    os.close(ready_write)
    os.close(life_read)
    return Child(str(address), process, os.pidfd_open(process.pid), log, ready_read, life_write)


def start_program(
    name: str, command: Sequence[str], *, log: Path, environment: dict[str, str], stdout: int, stderr: int
) -> Child:
    """Start the user's program, or torchrun's agent. It ends with the launcher. Closes our `stdout` and `stderr`."""
    handled = (*ENDINGS, *FOR_PROGRAMS)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)

    def prepare() -> None:
        """A signal that comes now is the program's: this process has our handlers until it is executed."""
        end_with_parent()
        for number in handled:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        process = Popen(command, env=environment, stdout=stdout, stderr=stderr, preexec_fn=prepare)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(stdout)
    os.close(stderr)
    return Child(name, process, os.pidfd_open(process.pid), log, None, None)


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """From now on, the end of this process's parent sends it this signal, even once it runs another program.

    To the system, the parent is the thread that has started this process: it has to be one that ends last.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def await_ready(child: Child, others: Iterable[Child], *, timeout_s: float) -> None:
    """Wait until `child` is ready.

    Raises `WorkerDied` with the end of the log if `child` or one of `others` ends first, and `ClusterTimeout`.
    """
    deadline = time.monotonic() + timeout_s
    assert child.ready is not None
    watched = {child.pidfd: child, **{other.pidfd: other for other in others}}
    while True:
        remaining = deadline - time.monotonic()
        readable, _, _ = select.select([child.ready, *watched], [], [], max(remaining, 0.0))
        if child.ready in readable and os.read(child.ready, 1):
            return
        for pidfd in watched.keys() & set(readable):
            raise WorkerDied(describe_end(watched[pidfd]))
        if remaining <= 0:
            raise ClusterTimeout(f"{child.name} was not ready within {timeout_s:.0f} s{log_tail(child.log)}")


def describe_end(child: Child) -> str:
    """A text with the child's name, its exit status or signal, and the end of its log."""
    return f"{first_words(child)}{log_tail(child.log)}"


def first_words(child: Child) -> str:
    """Which process has ended, and how."""
    return f"{child.name} (process {child.process.pid}) {how_it_ended(child.process.wait())}"


def log_tail(log: Path) -> str:
    """The last lines of a log, indented, under a heading."""
    try:
        lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        lines = []
    return f"\nthe end of {log}:\n" + "\n".join(f"  {line}" for line in lines) if lines else f"\n({log} is empty)"


def stop(children: Iterable[Child], *, grace_s: Callable[[Child], float]) -> list[Child]:
    """End all `children`. Workers exit when their `life` pipe closes, programs get SIGTERM; later, both are killed.

    `grace_s` says how much later. Those that somebody has stopped go on for it. Returns who had to be killed.
    """
    children, killed = list(children), []
    for child in children:
        if child.life is None and child.process.poll() is None:
            child.process.terminate()
        child.close()
        child.process.send_signal(signal.SIGCONT)
    began_s = time.monotonic()
    for child in children:
        left_s = began_s + grace_s(child) - time.monotonic()
        # Popen.wait with a timeout polls every 50 ms; the descriptor becomes readable at once.
        if not select.select([child.pidfd], [], [], max(left_s, 0.0))[0]:
            child.process.kill()
            killed.append(child)
        child.process.wait()
        os.close(child.pidfd)
    return killed
