"""Finds the cluster that this process belongs to, or starts a private one.

    under bin/hytrain-cluster   HYTRAIN_CLUSTER names the socket folder
    in a plain script           python -P -m workers.launcher --attach   starts coordinator and optimizer,
                                and ends with this process

A private cluster is executed. It is never forked, nor spawned by multiprocessing, which would run the user's script
again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Self

from hytrain.config import CLUSTER_VARIABLE, Cluster, ClusterConfig, joined_cluster
from hytrain.errors import ClusterError, ClusterTimeout, ConfigError

STOP_TIMEOUT_S: Final = 5.0


class PrivateCluster:
    """A launcher started by this process, and its cluster."""

    def __init__(self, config: ClusterConfig) -> None:
        """Wait until the cluster's processes are ready. Raises `ClusterError` with the launcher's output otherwise."""
        self._pid = os.getpid()
        options = ["--attach", str(self._pid), "--name", program_name(), "--config", config.model_dump_json()]
        self._launcher = subprocess.Popen(
            [sys.executable, "-P", "-m", "workers.launcher", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
        )
        try:
            self.cluster = Cluster.read(self._read_socket_dir(config.start_timeout_s))
        except BaseException:
            self.close()
            raise

    def _read_socket_dir(self, timeout_s: float) -> str:
        """The launcher's one line of output, which it writes when everything is ready."""
        assert self._launcher.stdout is not None and self._launcher.stderr is not None
        deadline = time.monotonic() + timeout_s + 10.0
        line = b""
        while not line.endswith(b"\n"):
            if not _becomes_readable(self._launcher.stdout.fileno(), deadline - time.monotonic()):
                raise ClusterTimeout(f"HyTrain's processes were not ready within {timeout_s:.0f} s")
            chunk = os.read(self._launcher.stdout.fileno(), 4096)
            if not chunk:
                status = self._launcher.wait(STOP_TIMEOUT_S)
                said = self._launcher.stderr.read().decode(errors="replace").strip()
                if status == 2:
                    raise ConfigError(said)
                raise ClusterError(f"HyTrain's processes did not start (exit status {status}):\n{said}")
            line += chunk
        socket_dir: str = json.loads(line)["socket_dir"]
        return socket_dir

    def close(self) -> None:
        """End the launcher and its processes. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._launcher.terminate()  # closing its input may not end it: a forked child may have it open too
        for pipe in (self._launcher.stdin, self._launcher.stdout, self._launcher.stderr):
            if pipe is not None:
                pipe.close()
        if self._launcher.returncode is None:
            pidfd = os.pidfd_open(self._launcher.pid)  # Popen.wait with a time limit polls every 50 ms
            if not _becomes_readable(pidfd, STOP_TIMEOUT_S):
                self._launcher.kill()
            os.close(pidfd)
        self._launcher.wait()


class Seat:
    """The trainer's place in a cluster. Only one optimizer can have it at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, socket_dir: str) -> Self | None:
        """The seat, or None if it is taken. It becomes free when its holder closes it or dies."""
        descriptor = os.open(Path(socket_dir) / "seat", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def close(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # forked children may have the descriptor open
        os.close(self._descriptor)


def find_or_start(config: ClusterConfig) -> tuple[Cluster, PrivateCluster | Seat]:
    """The cluster to join, and what to close when leaving it. A second optimizer of a run gets a private cluster."""
    socket_dir = joined_cluster()
    if socket_dir is not None and (seat := Seat.take(socket_dir)) is not None:
        return Cluster.read(socket_dir), seat
    private = PrivateCluster(config)
    return private.cluster, private


def program_name() -> str:
    """The name of this process's program, which names its run."""
    path = Path(sys.argv[0]) if sys.argv else Path()
    stem = path.absolute().parent.name if path.stem == "__main__" else path.stem
    return "notebook" if stem == "ipykernel_launcher" else re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "python"


def _becomes_readable(descriptor: int, timeout_s: float) -> bool:
    """Wait until a descriptor is readable. `select.select` cannot take descriptors above 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(timeout_s, 0.0) * 1e3))


def _environment() -> dict[str, str]:
    """This process's environment, with HyTrain's packages importable from where this process imported them."""
    environment = {key: value for key, value in os.environ.items() if key != CLUSTER_VARIABLE}
    home = str(Path(__file__).resolve().parents[2])
    paths = [home, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
