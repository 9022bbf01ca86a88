"""A worker's side of its start: settings, logging, signals, READY. The launcher's side is `workers.launch.process`.

A worker gets two pipes: `ready`, through which it says READY once it was constructed successfully, and `life`, which
closes when the launcher is gone. The settings of all workers are in a file in the socket folder.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any, Final

from workers.exits import ENDINGS, FOR_PROGRAMS

#: In the socket folder: `hytrain.config.ClusterConfig`, the run's name and folder, the folder of last plans, how many
#: ranks share this machine, and the run's secret token. Only this user can read it.
SETTINGS: Final = "settings.json"


def write_settings(socket_dir: Path, **settings: Any) -> None:
    path = socket_dir / SETTINGS
    path.touch(mode=0o600)
    path.write_text(json.dumps(settings))


def begin_worker(doc: str) -> argparse.Namespace:
    """Read arguments and settings, set up logging, and leave signals to the trainer: workers exit after the launcher.

    A terminal sends Ctrl-C, and a batch system its warning and its SIGTERM, to every process of a run. The trainer
    needs the others to save what it has trained.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--socket-dir", required=True)
    for number in ("--rank", "--ready-fd", "--life-fd"):
        parser.add_argument(number, type=int, required=True)
    parser.add_argument("--again", action="store_true", help="take the place of a coordinator that has died")
    arguments = parser.parse_args()
    vars(arguments).update(json.loads(Path(arguments.socket_dir, SETTINGS).read_text()))
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


def say_ready(descriptor: int) -> None:
    """Tell the launcher that this worker was constructed successfully."""
    os.write(descriptor, b"\n")
    os.close(descriptor)
