"""The cluster of a run on this machine: coordinator and optimizers, which share a socket folder. `supervisor` runs it.

    coordinator, an optimizer per rank ─ all READY ─▶ cluster.json
    a coordinator has died ─▶ another one takes its place

Sockets are in a temporary folder, which is removed at the end. Until then its files are touched now and then: systems
remove from such folders what nobody has touched for days.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from hytrain.config import Cluster, ClusterConfig, plan_cache, workers_environment
from hytrain.errors import ConfigError
from hytrain.kernels.build import cache_folder
from hytrain.run import trace
from hytrain.run.seats import FOLDER_PREFIX, temporary
from protocol.address import COORDINATOR, Address
from workers import affinity, run_folder
from workers.launch import process
from workers.launch.output import say
from workers.launch.process import Child
from workers.worker import write_settings

#: Workers end within this time, and programs after a second signal, or they are killed.
STOP_GRACE_S: Final = 3.0
#: The coordinator has records to write, and on a busy machine it may not get a core for seconds.
RECORDS_GRACE_S: Final = 15.0
#: So many coordinators may die in a row, without a step between their deaths.
COORDINATORS: Final = 3
#: How often the files of the socket folder are touched. Systems remove files that are older than some days.
TOUCH_EVERY_S: Final = 3600.0


def _last_plans() -> str:
    """The folder of last plans; none without a cache."""
    if (folder := plan_cache()) is not None:
        return folder
    try:
        return str(cache_folder(os.environ) / "plans")
    except ConfigError:
        return ""


class RunningCluster:
    """Its processes and its socket folder, from one start to the next. `children` has the program, too."""

    def __init__(self, config: ClusterConfig, *, run_name: str, run_dir: Path, ranks: int) -> None:
        """Raises `ConfigError` for impossible cores."""
        affinity.choose(config.cores, config.threads, ranks=ranks)
        self._config, self._run_name, self._run_dir, self._ranks = config, run_name, run_dir, ranks
        self._log_dir = run_dir / "logs"
        self.children: list[Child] = []
        self.socket_dir = Path()
        self._touched_s = time.monotonic()
        self._cluster: Cluster | None = None
        self._deaths = (0, 0)  # the step after which coordinators have died, and how many

    def start(self) -> None:
        """Start all. Raises `ClusterError` if one does not become ready."""
        trace.clear(self._run_dir)
        try:
            self.socket_dir = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=temporary()))
        except OSError as error:
            raise ConfigError(f"there is no place for sockets: {error}; set another TMPDIR") from None
        token = secrets.token_hex(16)
        names = {"run_name": self._run_name, "run_dir": str(self._run_dir), "ranks": self._ranks, "token": token}
        write_settings(self.socket_dir, **{**self._config.model_dump(), **names, "plans": _last_plans()})
        addresses = [COORDINATOR, *(Address("optimizer", rank) for rank in range(self._ranks))]
        coordinator, *optimizers = started = [self._started(address) for address in addresses]
        self.children += started
        for child in started:
            process.await_ready(child, self.children, timeout_s=self._config.start_timeout_s)
        self._cluster = Cluster(
            run_name=self._run_name,
            run_dir=str(self._run_dir),
            socket_dir=str(self.socket_dir),
            token=token,
            launcher_pid=os.getpid(),
            coordinator_pid=coordinator.process.pid,
            optimizer_pids=tuple(optimizer.process.pid for optimizer in optimizers),
            config=self._config,
        )
        self._cluster.write()

    def _started(self, address: Address, *more: str) -> Child:
        arguments = ["--socket-dir", str(self.socket_dir), "--rank", str(address.rank), *more]
        return process.start_worker(address, arguments, log_dir=self._log_dir, environment=workers_environment())

    def replaces(self, ended: list[Child]) -> bool:
        """If a coordinator has died, and nobody else, start another one in its place, while training goes on.

        Returns False if it was something else, or if coordinators die without a step between their deaths.
        """
        if [child.name for child in ended] != [str(COORDINATOR)] or self._cluster is None:
            return False
        [dead], step = ended, run_folder.last_step(self._run_dir)
        self._deaths = (step, self._deaths[1] + 1 if step == self._deaths[0] else 1)
        if self._deaths[1] > COORDINATORS:
            say(f"\nhytrain-cluster: {self._deaths[1]} coordinators have died, without a step between")
            return False
        try:
            child = self._started(COORDINATOR, "--again")
        except OSError:
            return False
        self.children[self.children.index(dead)] = child
        at = f" after step {step}" if step else ""
        say(
            f"\nhytrain-cluster: {process.first_words(dead)}{at}; training goes on, and process {child.process.pid} "
            f"takes its place; its log is {dead.log}"
        )
        dead.close()
        os.close(dead.pidfd)
        self._cluster = self._cluster.model_copy(update={"coordinator_pid": child.process.pid})
        with suppress(OSError):  # a cleaner may have removed the folder
            self._cluster.write()
        return True

    @property
    def pidfds(self) -> list[int]:
        return [child.pidfd for child in self.children]

    def wait(self, descriptors: list[int], until_s: float = math.inf) -> list[int]:
        """Those that are readable, once one is, or none at `until_s`.

        Until then, keep the socket folder's files from looking abandoned.
        """
        while True:
            touch_s, now_s = self._touched_s + TOUCH_EVERY_S, time.monotonic()
            if now_s < touch_s:
                readable = select.select(descriptors, [], [], max(min(touch_s, until_s) - now_s, 0))[0]
                if readable or time.monotonic() >= until_s:
                    return readable
                continue
            self._touched_s = now_s
            for folder, _, names in os.walk(self.socket_dir):
                for name in (".", *names):
                    with suppress(FileNotFoundError):
                        os.utime(Path(folder, name))

    def stop(self) -> None:
        """End the processes of an attempt, and remove what they have shared."""
        coordinator = str(COORDINATOR)
        for child in process.stop(
            reversed(self.children),
            grace_s=lambda child: RECORDS_GRACE_S if child.name == coordinator else STOP_GRACE_S,
        ):
            if child.name == coordinator:
                say(
                    f"hytrain-cluster: {child.name} (process {child.process.pid}) hung and was killed: the last "
                    f"records are missing in {self._run_dir}"
                )
        self.children = []
        if any((self._run_dir / trace.FOLDER).glob("*.jsonl")):  # however the run ended
            try:
                trace.merge(self._run_dir)
            except OSError as error:
                say(f"hytrain-cluster: no timeline: {error}")
        if self.socket_dir != Path():
            shutil.rmtree(self.socket_dir, ignore_errors=True)
