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


def apart() -> Nodes:
    """Of a job whose ranks are on a machine each."""
    ranks = Ranks.of_job()
    return Nodes(replace(ranks, node=(ranks.rank,)))


def status(record: str) -> RankStatus:
    return RankStatus(rank=dist.get_rank(), world=2, host="", record=record, cores="", gather_s=None)


def told() -> list[list[str]]:
    """What rank 0 hears, until it has heard the last that rank 1 tells, which is something else each time."""
    nodes, heard, found = apart(), queue.SimpleQueue[NodeStatus](), list[list[str]]()
    try:
        for record in ('{"step": 1}', '{"step": 2}'):
            nodes.tell(status(record), heard.put)
            while dist.get_rank() == 0 and [record] not in found:
                news = heard.get(timeout=DEADLINE_S).ranks
                assert all(rank.rank == 1 for rank in news)
                if (records := [rank.record for rank in news]) not in found:
                    found.append(records)
                nodes.tell(status(record), heard.put)
            dist.barrier()
        return found
    finally:
        nodes.close()


def test_the_first_rank_hears_of_the_others(two_ranks: RankGroup) -> None:
    """Their newest status counts; before there is one, they are not known."""
    first, second = two_ranks.run(told)
    assert [records for records in first if records] == [['{"step": 1}'], ['{"step": 2}']] and second == []


def lost() -> tuple[int, int]:
    """How many errors are told if the store is lost, however often a status is, and what is heard."""
    nodes, heard, errors = apart(), list[NodeStatus](), list[Exception]()
    try:
        nodes._store, nodes._fails = None, errors.append  # type: ignore[method-assign]
        assert nodes._thread is not None
        nodes.tell(status("{}"), heard.append)
        nodes._thread.join(DEADLINE_S)
        nodes.tell(status("{}"), heard.append)
        dist.barrier()
        return len(errors), len(heard)
    finally:
        nodes.close()


def test_a_lost_store_is_a_line_in_the_log(two_ranks: RankGroup) -> None:
    assert two_ranks.run(lost) == [(1, 0), (1, 0)]
