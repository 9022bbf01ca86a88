"""Becomes the program of one rank: `python -P -m workers.launch.rank PARENT SOCKET_DIR COMMAND…`.

Torchrun's agent starts it. The program ends when the agent (process PARENT) does, however that ends. Its output goes to
the launcher, which opened a pipe for each rank, so that the output of several ranks is not mixed.
"""

from __future__ import annotations

import os
import signal
import sys

from workers.launch.process import RESTARTS, end_with_parent
from workers.launch.tee import rank_pipes


def main() -> None:
    """Replace this process by the command."""
    parent, socket_dir, *command = sys.argv[1:]
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(1)  # the agent was gone before
    for target, pipe in enumerate(rank_pipes(socket_dir, int(os.environ["LOCAL_RANK"])), 1):
        descriptor = os.open(pipe, os.O_WRONLY)
        os.dup2(descriptor, target)
        os.close(descriptor)
    if (count := os.environ.get(RESTARTS)) is not None:  # the launcher has started torchrun again, too
        os.environ["TORCHELASTIC_RESTART_COUNT"] = count
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
