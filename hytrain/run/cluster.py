"""Finds the cluster that this process belongs to, or starts a private one.

    under bin/hytrain-cluster   HYTRAIN_CLUSTER names the socket folder
    in a plain script           python -P -m workers.launch.launcher --attach   starts coordinator and optimizers,
                                and ends with the last trainer of this machine

Of several ranks on a machine, the first one starts the private cluster, and the others take seats in it. All ranks
call `find_or_start`, and the error of one is raised on all.

A private cluster starts while its trainer builds layers: `cluster` waits for it. It is executed. It is never forked,
nor spawned by multiprocessing, which would run the user's script again.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Final, TypeVar

from hytrain.config import Cluster, ClusterConfig, joined_cluster, workers_environment
from hytrain.errors import ClusterError, ClusterTimeout, ConfigError, HyTrainError
from hytrain.run.ranks import Ranks
from hytrain.run.seats import Seat, holder, seat_file

#: The launcher ends when it is told to, but first it waits for the records, and may write a timeline. Only a hang takes
#: longer than this.
STOP_TIMEOUT_S: Final = 60.0
#: When one of its processes has died, the launcher says which, and ends. Here, too, only a hang takes longer.
OBITUARY_S: Final = 60.0
#: The first line of what it says then.
_OBITUARY: Final = re.compile(rb"^\S+ \(process \d+\) .*(?=\n)", re.MULTILINE)

Place = TypeVar("Place", bound="PrivateCluster | Seat")


class PrivateCluster:
    """A launcher started by this process, and its cluster, in which this process has the place of rank 0."""

    rank: Final = 0

    def __init__(self, config: ClusterConfig, ranks: int = 1) -> None:
        """Start the cluster's processes, for so many ranks."""
        self._pid = os.getpid()
        self.settings = config
        self._ranks, self._seats = ranks, list[Path]()
        options = ["--attach", str(self._pid), "--name", program_name(), "--config", config.model_dump_json()]
        options += ["--ranks", str(ranks)]
        self._launcher = Popen(
            [sys.executable, "-P", "-m", "workers.launch.launcher", *options],
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=workers_environment(),
            start_new_session=True,
        )

    @cached_property
    def cluster(self) -> Cluster:
        """Waits until all are ready. Raises `ClusterError` with the launcher's output otherwise."""
        try:
            cluster = Cluster.read(self._read_socket_dir(self.settings.start_timeout_s))
        except BaseException:
            self.close()
            raise
        self._seats = [seat_file(cluster.socket_dir, rank) for rank in range(1, self._ranks)]
        return cluster

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

    def first_death(self) -> str:
        """How the first of the cluster's processes ended: the launcher says it before it ends, or was the first.

        Call it once a process has died whose death ends the launcher: it is waited for.
        """
        said, deadline = b"", time.monotonic() + OBITUARY_S
        assert self._launcher.stderr is not None
        pipe = self._launcher.stderr.fileno()
        while not _OBITUARY.search(said) and _becomes_readable(pipe, deadline - time.monotonic()):
            if not (chunk := os.read(pipe, 4096)):
                break
            said += chunk
        if found := _OBITUARY.search(said):
            return found[0].decode()
        self._await_launcher(deadline - time.monotonic())  # it closes the pipe before its end can be seen
        status = self._launcher.poll()
        how = (
            f"was killed by {signal.Signals(-status).name}" if status and status < 0 else f"ended with status {status}"
        )
        return "" if status is None else f"the launcher (process {self._launcher.pid}) {how}, and the others with it"

    def close(self) -> None:
        """End the launcher and its processes, which go on while other ranks have seats. Nothing in a forked child."""
        if os.getpid() != self._pid or (self._launcher.stderr and self._launcher.stderr.closed):
            return
        self._launcher.terminate()  # closing its input may not end it: a forked child may have it open too
        assert self._launcher.stdin and self._launcher.stdout and self._launcher.stderr
        self._launcher.stdin.close()
        self._launcher.stdout.close()
        if any(map(holder, self._seats)):
            self._launcher.stderr.close()
            threading.Thread(target=self._launcher.wait, name="hytrain-reaper", daemon=True).start()
            return
        if not self._await_launcher(STOP_TIMEOUT_S):
            self._launcher.kill()
        self._launcher.wait()
        with self._launcher.stderr as pipe:
            for line in pipe.read().decode(errors="replace").splitlines():
                if line.startswith("hytrain-cluster: "):
                    print(line, file=sys.stderr)

    def _await_launcher(self, timeout_s: float) -> bool:
        """Wait until the launcher has ended. Returns whether it has."""
        return self._launcher.returncode is not None or await_end(self._launcher.pid, timeout_s)


def find_or_start(config: ClusterConfig, ranks: Ranks) -> PrivateCluster | Seat:
    """The place of this rank in its machine's cluster, to be closed when leaving. All ranks call this together.

    Ranks that a cluster has started join it. If it has not enough places, or for a second optimizer of its run, all
    get private ones. The error of one rank is raised on all.
    """
    joined = joined_cluster()
    folders = ranks.gather(joined)
    peers = [rank for rank in ranks.node if folders[rank] == joined]
    rank = peers.index(ranks.rank)
    seat = _together(ranks, lambda: None if joined is None else Seat.take(Cluster.read(joined), rank))
    if all(ranks.gather(seat is not None)) and seat is not None:
        return seat
    if seat is not None:
        seat.close()
    private = _together(ranks, lambda: PrivateCluster(config, len(peers)) if rank == 0 else None)
    if ranks.world == 1 and private is not None:
        return private
    _together(ranks, lambda: private if private and private.cluster else None)  # once it is ready
    socket_dir = ranks.gather(private and private.cluster.socket_dir)[peers[0]]
    place = _together(ranks, lambda: private or Seat.take(Cluster.read(socket_dir), rank))
    assert place is not None, "a new cluster has a place for each"
    return place


def _together(ranks: Ranks, act: Callable[[], Place | None]) -> Place | None:
    """The place that `act` returns. If it raises on one rank, the others close theirs and raise the same error."""
    place: Place | None = None
    try:
        with ranks.together():
            try:
                place = act()
            except OSError as error:
                raise ClusterError(f"HyTrain's processes cannot be started or joined: {error}") from None
    except HyTrainError:
        if place is not None:
            place.close()
        raise
    return place


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


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie."""
    return await_end(pid, 0.0)


def await_end(pid: int, timeout_s: float) -> bool:
    """Wait until a process is gone, or a zombie. Returns whether it is."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return _becomes_readable(descriptor, timeout_s)
    finally:
        os.close(descriptor)
