"""A worker's side of its start: arguments, logging, signals, READY. The launcher's side is `workers.launch.process`.

A worker gets two pipes: `ready`, through which it says READY once it was constructed successfully, and `life`, which
closes when the launcher is gone.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
from pathlib import Path

from workers.exits import ENDINGS, FOR_PROGRAMS


def worker_parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the arguments of every worker."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--socket-dir", required=True)
    parser.add_argument("--ranks", type=int, required=True, help="how many ranks share this machine")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--trace", action="store_true", help="draw the timeline of the whole run")
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--life-fd", type=int, required=True)
    return parser


def begin_worker(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments, set up logging, and leave signals to the trainer: workers exit after the launcher.

    A terminal sends Ctrl-C, and a batch system its warning and its SIGTERM, to every process of a run. The trainer
    needs the others to save what it has trained.
    """
    arguments = parser.parse_args()
    settle()
    return arguments


def settle() -> None:
    """Set up logging, and leave signals to the trainer."""
    worker_logging()
    faulthandler.enable()  # the stack of a process that crashes, or is ended since it does not answer, is in its log
    for number in (*ENDINGS, *FOR_PROGRAMS):
        signal.signal(number, signal.SIG_IGN)


def worker_logging() -> None:
    """Log to standard error, which the launcher redirects to this process's log file."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def say_ready(descriptor: int, detail: str) -> None:
    """Tell the launcher that this worker was constructed successfully."""
    os.write(descriptor, f"{detail}\n".encode())
    os.close(descriptor)


def read_token(socket_dir: str) -> str:
    """The run's secret token, in a file that only this user can read."""
    return (Path(socket_dir) / "token").read_text()
