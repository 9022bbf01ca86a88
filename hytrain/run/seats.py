"""The places of trainers in a cluster: one file per rank in the socket folder, which its holder locks.

trainer: Seat.take ─ lock, process number ─▶ seat-0, seat-1, … ◀─ holder ─ launcher, which waits until all are free
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Final, Self

import psutil

from hytrain.config import Cluster
from protocol.channel import endpoint

#: How the names of socket folders begin.
FOLDER_PREFIX: Final = "hytrain-"
#: Where they are if the path of a socket under TMPDIR would be longer than the kernel allows.
SHORT: Final = "/tmp"


class Seat:
    """A trainer's place in a cluster. Only one optimizer can have it at a time."""

    def __init__(self, cluster: Cluster, rank: int, descriptor: int) -> None:
        self.cluster, self.settings = cluster, cluster.config
        self.rank, self._descriptor = rank, descriptor

    @classmethod
    def take(cls, cluster: Cluster, rank: int) -> Self | None:
        """The seat of this rank, or None if it is taken. It becomes free when its holder closes it or dies."""
        if rank >= len(cluster.optimizer_pids):
            return None
        descriptor = os.open(seat_file(cluster.socket_dir, rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.pwrite(descriptor, f"{os.getpid()}".encode(), 0)
        return cls(cluster, rank, descriptor)

    def first_death(self) -> str:
        """The launcher tells the terminal, or the process that started it."""
        return ""

    def close(self) -> None:
        os.ftruncate(self._descriptor, 0)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # forked children may have the descriptor open
        os.close(self._descriptor)


def temporary() -> str:
    """Where this user's socket folders are."""
    folder = tempfile.gettempdir()
    try:
        endpoint(os.path.join(folder, f"{FOLDER_PREFIX}12345678"), "trainer-9999-12345678")
    except ValueError:
        return SHORT
    return folder


def seat_file(socket_dir: str, rank: int) -> Path:
    """The file that the holder of a seat locks, with the holder's process number."""
    return Path(socket_dir) / f"seat-{rank}"


def holder(seat: Path) -> int | None:
    """The process that has a seat, or None if it is free."""
    try:
        pid = int(seat.read_text())
    except (OSError, ValueError):
        return None
    return pid if psutil.pid_exists(pid) else None
