"""Two machines, which are network namespaces of this one: one monitor sees the ranks of both."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import DEADLINE_S
from machines import Machine, NoMachines, two_machines
from programs import CLUSTER, ROOT, SCRIPTS, environment, read_until, run, started

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
