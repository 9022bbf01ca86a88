"""What every integration test gets: one thread for torch, the run's folder in its own temporary one, a leak check.

Three processes take about a second to start. So optimizers that would start the same ones join a run that lasts as
long as the tests do, as under `bin/hytrain-cluster`. With settings of its own, or beside another one, an optimizer
starts its own.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ranks import RankGroup

from hytrain.config import CLUSTER_VARIABLE, ClusterConfig
from hytrain.run import cluster as clusters
from hytrain.run.cluster import PrivateCluster
from hytrain.run.seats import Seat

GRACE_S = 60.0
#: Variables besides HYTRAIN_… that make other processes.
VARIABLES = ("CXX", "HYTRAIN_CACHE", "PATH", "PYTHONPATH")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.spawns)


#: By the name of their fixture. They live until the tests end.
_rank_groups: dict[str, RankGroup] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ranks that a failed test has ended are started anew, before the leak check of the next test begins."""
    for fixture, group in _rank_groups.items():
        if fixture in getattr(item, "fixturenames", ()):
            group.revive()


class RanksInRun(RankGroup):
    """Ranks whose optimizers join a run that lasts as long as the ranks do."""

    def __init__(self, world: int, folder: Callable[[], Path]) -> None:
        self._folder, self._run = folder, None
        super().__init__(world)

    def revive(self) -> None:
        super().revive()
        if self._run is None:
            config = ClusterConfig(threads=1, replan_every=1, run_dir=str(self._folder()))
            self._run = PrivateCluster(config, self.world)
            self.environment[CLUSTER_VARIABLE] = self._run.cluster.socket_dir

    def close(self) -> None:
        super().close()
        if self._run is not None:
            self._run.close()
            self._run = None


def _kept(fixture: str, group: RankGroup) -> Iterator[RankGroup]:
    _rank_groups[fixture] = group
    yield group
    del _rank_groups[fixture]
    group.close()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    yield from _kept("two_ranks", RanksInRun(2, lambda: tmp_path_factory.mktemp("ranks-run")))


@pytest.fixture(scope="session")
def failing_ranks() -> Iterator[RankGroup]:
    """Others than `two_ranks`, so that a test in which they end costs no more than their own CPU seconds."""
    yield from _kept("failing_ranks", RankGroup(2))


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankGroup]:
    """Their optimizers start a run of their own, as under torchrun."""
    yield from _kept("four_ranks", RankGroup(4))


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[RankGroup]:
    """For slow tests."""
    yield from _kept("eight_ranks", RankGroup(8))


@pytest.fixture(scope="session")
def two_gpus() -> Iterator[RankGroup]:
    """One rank on each of two GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has no two GPUs")
    yield from _kept("two_gpus", RankGroup(2, "cuda"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Gradients depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder, for whichever process starts the cluster."""
    monkeypatch.setenv("HYTRAIN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HYTRAIN_THREADS", "1")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def trl() -> Any:
    """Imported before a test's temporary folder is made: what it imports makes folders of its own."""
    imported = pytest.importorskip("trl")
    assert imported.SFTTrainer and imported.DPOTrainer, "both are imported at first use"
    return imported


class SharedRun:
    """A run that one optimizer after another joins. Its planner looks after each step, so that layers move soon."""

    def __init__(self, folder: Path) -> None:
        self.config = ClusterConfig(threads=1, replan_every=1, run_dir=str(folder))
        self._environment = self._variables()
        self._run = PrivateCluster(self.config)
        self.close = self._run.close

    def _variables(self) -> list[str | None]:
        return [os.environ.get(name) for name in VARIABLES]

    def place(self, config: ClusterConfig, run_dir: Path) -> Guest | None:
        """A place in it for whoever asks for such a run and no other folder; None if there is none."""
        own = {name: getattr(self.config, name) for name in ("run_dir", "replan_every", "check")}  # whatever is asked
        wanted = config.model_copy(update=own)
        if (wanted, config.run_dir, self._variables()) != (self.config, str(run_dir), self._environment):
            return None
        cluster = self._run.cluster
        if not all(map(runs, (cluster.launcher_pid, *cluster.optimizer_pids, cluster.coordinator_pid))):
            return None  # a test has ended it
        seat = Seat.take(cluster, 0)
        return None if seat is None else Guest(seat)

    def arenas(self) -> list[str]:
        """The layers' memory that its optimizer process holds."""
        found = []
        with suppress(FileNotFoundError):  # closed meanwhile, or the run has ended
            for descriptor in Path(f"/proc/{self._run.cluster.optimizer_pids[0]}/fd").iterdir():
                found.append(os.readlink(descriptor))
        return [target for target in found if "memfd:hytrain" in target]


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


class Guest:
    """In the place of a private cluster."""

    def __init__(self, seat: Seat) -> None:
        self.cluster, self.settings = seat.cluster, seat.settings
        self.rank, self.close = seat.rank, seat.close


@pytest.fixture(autouse=True, scope="session")
def all_forked(forked_workers: None) -> None:
    """Every test here has them."""


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedRun]:
    run = SharedRun(tmp_path_factory.mktemp("shared-run"))
    yield run
    run.close()


@pytest.fixture(autouse=True)
def joins(shared_run: SharedRun, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Optimizers of this process join the shared run where they can. Nothing of theirs stays there."""

    def start(config: ClusterConfig, ranks: int) -> PrivateCluster | Guest:
        return shared_run.place(config, run_dir) or PrivateCluster(config, ranks)

    monkeypatch.setattr(clusters, "PrivateCluster", start)
    yield
    deadline = time.monotonic() + GRACE_S
    while left := shared_run.arenas():
        assert time.monotonic() < deadline, f"left in the optimizer process: {left}"
        gc.collect()  # an optimizer that only a reference cycle holds is not left
        time.sleep(0.01)


@pytest.fixture
def own_run(joins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each optimizer starts a run of its own."""
    monkeypatch.setattr(clusters, "PrivateCluster", PrivateCluster)
