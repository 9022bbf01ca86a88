"""One cluster for the ranks of a machine: started by the first rank, or by `hytrain-cluster` together with torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from forks import Forked
from helpers import DEADLINE_S
from programs import CLUSTER, SCRIPTS, read_until, run, started
from ranks import RankGroup

from hytrain.config import CLUSTER_VARIABLE, ClusterConfig
from hytrain.errors import ConfigError
from hytrain.run.cluster import PrivateCluster, find_or_start
from hytrain.run.link import Link
from hytrain.run.nodes import Nodes
from hytrain.run.ranks import Ranks

SHARDED = SCRIPTS / "sharded.py"


def the_first_rank_leaves_first() -> tuple[str, int, tuple[int, ...], list[bool]]:
    """The place of this rank, and whether the cluster's processes live once the first rank, then all have left."""
    os.environ.pop(CLUSTER_VARIABLE, None)  # the run that the ranks of most tests join
    place = find_or_start(ClusterConfig.resolve(), Ranks.of_job())
    link = Link(place, Nodes(Ranks()), timeout_s=DEADLINE_S)
    link.join()
    workers = [psutil.Process(pid) for pid in (*place.cluster.optimizer_pids, place.cluster.coordinator_pid)]
    launcher = psutil.Process(place.cluster.launcher_pid)
    link.close()
    alive = []
    if place.rank == 0:
        place.close()
    dist.barrier()
    alive.append(all(worker.is_running() for worker in workers))
    dist.barrier()
    if place.rank == 1:
        place.close()
        psutil.wait_procs([launcher, *workers], DEADLINE_S)
        alive.append(any(worker.is_running() for worker in workers))
    return type(place).__name__, place.rank, place.cluster.optimizer_pids, alive


def test_a_private_cluster_lasts_until_the_last_rank_has_left(two_ranks: RankGroup) -> None:
    first, second = two_ranks.run(the_first_rank_leaves_first)
    assert first[:2] == (PrivateCluster.__name__, 0) and second[:2] == ("Seat", 1)
    assert first[2] == second[2] and len(set(first[2])) == 2, "an optimizer for each"
    assert first[3] == [True] and second[3] == [True, False]


def impossible(cores: str, joined: str | None) -> str:
    os.environ.pop(CLUSTER_VARIABLE, None)
    if joined is not None and dist.get_rank() == 1:
        os.environ[CLUSTER_VARIABLE] = joined
    try:
        find_or_start(ClusterConfig(cores=cores), Ranks.of_job())
    except ConfigError as error:
        return str(error)
    return ""


def test_an_error_of_one_rank_is_raised_on_all(two_ranks: RankGroup, tmp_path: Path) -> None:
    for said in two_ranks.run(impossible, "4096", None):
        assert "cores '4096': 4096 are not among" in said
    for said in two_ranks.run(impossible, "auto", str(tmp_path)):
        assert f"no HyTrain run has its sockets in {tmp_path}" in said


@pytest.mark.parametrize(("ranks", "how"), [(1, subprocess.Popen), (2, Forked)])
def test_a_program_under_torchrun(ranks: int, how: type[subprocess.Popen[str]], run_dir: Path) -> None:
    """Two ranks that are no forks: tests/integration/test_nodes.py."""
    ran = run(sys.executable, CLUSTER, "--nproc-per-node", str(ranks), SHARDED, "12", how=how)
    assert ran.returncode == 0, ran.stderr
    assert sorted(re.findall(r"rank . is done", ran.stdout)) == [f"rank {rank} is done" for rank in range(ranks)]
    for rank, metrics in enumerate(("metrics.jsonl", "metrics-1.jsonl")[:ranks]):
        steps = [json.loads(line)["step"] for line in (run_dir / metrics).read_text().splitlines()]
        assert steps == list(range(1, 13))
        said = (run_dir / "logs" / f"trainer-{rank}.log").read_text()
        assert f"rank {rank} is done" in said and f"rank {1 - rank}" not in said
    [launched] = json.loads((run_dir / "environment.json").read_text())
    assert launched["command"][1] == str(CLUSTER), "written by the first rank alone"


def test_a_killed_rank_ends_all_and_is_named(run_dir: Path) -> None:
    """The first time, the last rank kills itself, and all are started again, once."""
    command = (sys.executable, CLUSTER, "--nproc-per-node", "2", "--max-restarts", "1", SHARDED, "0", "--fail")
    with started(*command, stderr=subprocess.PIPE) as launcher:
        process_of_rank_1(launcher)
        pid = process_of_rank_1(launcher)
        for rank in range(2):
            assert (run_dir / "logs" / f"optimizer-{rank}.log").read_text().count("plan 0 holds") == 2
        family = psutil.Process(launcher.pid).children(recursive=True)
        psutil.Process(pid).kill()
        _, alive = psutil.wait_procs(family, DEADLINE_S)
        assert alive == []
        assert launcher.wait(DEADLINE_S) == 128 + signal.SIGKILL
        assert launcher.stderr is not None
        log = run_dir / "logs" / "trainer-1.log"
        named = f"hytrain-cluster: rank 1 (process {pid}) was killed by SIGKILL; its log is {log}"
        assert named in launcher.stderr.read()


def process_of_rank_1(launcher: subprocess.Popen[str]) -> int:
    """Its number, once both ranks have said theirs."""
    said = [read_until(launcher, "rank ") for _ in range(2)]
    [pid] = [int(line.split()[3].strip(":")) for line in said if line.startswith("rank 1")]
    return pid
