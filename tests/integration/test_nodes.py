"""Two machines, which are network namespaces of this one: one monitor sees the ranks of both."""

from __future__ import annotations

import json
import queue
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import DEADLINE_S
from machines import Machine, NoMachines, two_machines
from programs import CLUSTER, ROOT, SCRIPTS, environment, read_until, run, started
from ranks import RankGroup

from hytrain.run.nodes import Nodes
from hytrain.run.ranks import Ranks
from protocol.messages import NodeStatus, RankStatus

MONITOR = ROOT / "bin" / "hytrain-monitor"
PORT = "29400"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    try:
        with two_machines(tmp_path) as pair:
            yield pair
    except NoMachines as reason:
        pytest.skip(f"network namespaces cannot be made here: {reason}")


def test_the_first_machine_shows_all_ranks(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Each has a rank, a cluster and a folder for temporary files of its own."""
    first, second = machines
    commands, environments = [], []
    for node, machine in enumerate(machines):
        temporary = Path(tempfile.gettempdir()) / str(node)
        temporary.mkdir()
        environments.append(environment(TMPDIR=str(temporary), GLOO_SOCKET_IFNAME=machine.device))
        job = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--threads", "1"]
        meeting = ["--master-addr", first.address, "--master-port", PORT, "--run-dir", tmp_path / "run"]
        commands.append(machine.command(sys.executable, CLUSTER, *job, *meeting, SCRIPTS / "sharded.py", "0"))
    with started(*commands[0], env=environments[0]) as one, started(*commands[1], env=environments[1]) as other:
        read_until(one, "rank 0")
        with started(sys.executable, MONITOR, "--follow", "--json", env=environments[0]) as follower:
            assert follower.stdout is not None
            shown = next(
                record["ranks"]
                for record in map(json.loads, follower.stdout)
                if len(record["ranks"]) == 2 and all(rank.get("step", 0) > 5 for rank in record["ranks"])
            )
            follower.terminate()
        assert [(rank["rank"], rank["host"]) for rank in shown] == [(0, first.name), (1, second.name)]
        assert all(rank["waits_s"] is not None for rank in shown)
        commanded = run(sys.executable, MONITOR, "--set-k", "0.5", env=environments[0])
        assert "on this machine" in commanded.stdout, commanded.stderr
        for launcher in (one, other):
            launcher.terminate()
        for launcher in (one, other):
            launcher.wait(DEADLINE_S)
    for each in environments:
        Path(each["TMPDIR"]).rmdir()


def told(is_lost: bool) -> list[list[str]]:
    """What rank 0 hears of rank 1, which is on another machine; or nothing, if the store is lost meanwhile."""
    ranks = Ranks.of_job()
    nodes, heard = Nodes(replace(ranks, node=(ranks.rank,))), queue.SimpleQueue[NodeStatus]()
    try:
        dist.barrier()
        if is_lost:
            nodes._store = None
        found = list[list[str]]()
        for record in ('{"step": 1}', '{"step": 2}'):
            own = RankStatus(rank=ranks.rank, world=2, host="", record=record, cores="", gather_s=None)
            nodes.tell(own, heard.put)
            if is_lost:
                assert nodes._thread is not None
                nodes._thread.join(DEADLINE_S)  # it ends with a line in the log
            while ranks.rank == 0 and not is_lost and [record] not in found:
                if (news := [one.record for one in heard.get(timeout=DEADLINE_S).ranks]) not in found:
                    found.append(news)
                nodes.tell(own, heard.put)
            dist.barrier()
        assert all(rank.rank == 1 for news in iter_all(heard) for rank in news.ranks)
        return found
    finally:
        nodes.close()


def iter_all(heard: queue.SimpleQueue[NodeStatus]) -> Iterator[NodeStatus]:
    while not heard.empty():
        yield heard.get()


def test_the_first_rank_hears_of_the_others(two_ranks: RankGroup) -> None:
    """Their newest status counts; before there is one, they are not known."""
    first, second = two_ranks.run(told, False)
    assert [news for news in first if news] == [['{"step": 1}'], ['{"step": 2}']] and second == []


def test_a_lost_store_ends_nothing(two_ranks: RankGroup) -> None:
    assert two_ranks.run(told, True) == [[], []]
