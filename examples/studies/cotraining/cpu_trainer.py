"""The CPU trainer: forward and backward of some parts of each batch, on the weights that the trainer lends it.

    settings on stdin ─▶ pin cores ─▶ the model, without weights of its own ─▶ Ready
    LendMemory, WeightsAt, TakeBack ─▶ the parameters become views of that memory
    Compute ─▶ forward, backward ─▶ each gradient into its slot ─▶ Computed

`partner` starts it. The trainer is the only one that it talks to, and takes it along when it
ends. Torch is imported once the cores are pinned, since OpenMP reads the affinity mask when it loads.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from typing import Any

from examples.studies.cotraining.wire import Failed, written
from hytrain.extras import importing
from workers.worker import settle

_log = logging.getLogger("cpu_trainer")


def main() -> int:
    """Compute until the trainer is gone; return the exit status."""
    settle()
    settings: dict[str, Any] = json.load(sys.stdin)
    end_with(settings["trainer"])
    os.sched_setaffinity(0, settings["cores"])
    with socket.socket(fileno=settings["socket"]) as trainer:
        try:
            with importing():
                from examples.studies.cotraining.cpu_parts import CpuParts

                parts = CpuParts(settings, trainer)  # which imports what the model is made of
            parts.serve()
        except (BrokenPipeError, ConnectionResetError):
            pass
        except Exception as error:
            _log.exception("cannot go on")
            trainer.send(written(Failed(error=f"{type(error).__name__}: {error}")))
            return 1
    _log.info("the trainer is gone, exiting")
    return 0


def end_with(pid: int) -> None:
    """From now on, this process is killed when the process `pid` has ended, whichever of its threads has started this.

    What computes or waits meanwhile lets a thread of Python's run.
    """
    ends = select.poll()
    ends.register(os.pidfd_open(pid), select.POLLIN)

    def follow() -> None:
        ends.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="end-with", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
