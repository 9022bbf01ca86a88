"""Which cores the optimizer gets, on machines made of files; and that asking loads neither torch nor OpenMP."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hytrain.errors import ConfigError
from workers import affinity
from workers.affinity import Pinning, choose, gpu_node, node_cores

GPU = {"vendor": "0x10de", "class": "0x030200", "numa_node": "1"}


class Machine:
    """What a machine says of itself under /sys."""

    def __init__(self, root: Path) -> None:
        self.nodes, self.devices = root / "node", root / "pci"
        self.nodes.mkdir()
        self.devices.mkdir()

    def node(self, number: int, cores: str) -> None:
        (self.nodes / f"node{number}").mkdir()
        (self.nodes / f"node{number}" / "cpulist").write_text(cores + "\n")

    def device(self, address: str, **said: str) -> None:
        (self.devices / address).mkdir()
        for name, text in said.items():
            (self.devices / address / name).write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setattr(affinity, "_NODES", machine.nodes)
    monkeypatch.setattr(affinity, "_PCI", machine.devices)
    return machine


@pytest.fixture
def two_nodes(machine: Machine) -> Machine:
    machine.node(0, "0-3,8-11")
    machine.node(1, "4-7,12-15")
    return machine


ALL = tuple(range(16))


# ---------------------------------------------------------------- auto


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_below_four_cores_everybody_shares_with_half_the_threads(machine: Machine, cores: int) -> None:
    available = tuple(range(cores))
    assert choose("auto", None, available) == Pinning(available, 1, False, "all nodes, shared with the trainer")
    assert choose("auto", 3, available).threads == 3


@pytest.mark.parametrize("cores", [4, 5, 16])
def test_from_four_on_two_stay_the_trainers(machine: Machine, cores: int) -> None:
    available = tuple(range(cores))
    pinning = choose("auto", None, available)
    assert pinning == Pinning(available[2:], cores - 2, True, "all nodes, 2 left for the trainer")
    assert choose("auto", 1, available) == replace(pinning, threads=1)


def test_the_gpus_node_comes_first(two_nodes: Machine) -> None:
    two_nodes.device("0000:81:00.0", **GPU)
    pinning = choose("auto", None, ALL)
    assert pinning.cores == (6, 7, 12, 13, 14, 15) and pinning.exclusive
    assert pinning.reason == "NUMA node 1 of the GPU, 2 left for the trainer"
    assert pinning.describe() == "6 threads on cores 6-7,12-15 (NUMA node 1 of the GPU, 2 left for the trainer)"


def test_of_the_gpus_node_only_the_cores_that_are_allowed(two_nodes: Machine) -> None:
    two_nodes.device("0000:81:00.0", **GPU)
    assert choose("auto", None, (0, 1, 2, 3, 4, 5)) == Pinning(
        (4, 5), 1, False, "NUMA node 1 of the GPU, shared with the trainer"
    )
    assert choose("auto", None, (0, 1, 2, 3)).cores == (2, 3)  # none of the node's


@pytest.mark.parametrize(
    "said",
    [
        {**GPU, "numa_node": "-1"},
        {**GPU, "vendor": "0x8086"},
        {**GPU, "class": "0x010802"},
        {"vendor": "0x10de", "class": "0x030000"},
        {},
    ],
    ids=["machine does not say", "another vendor", "no display", "no node file", "empty"],
)
def test_without_a_gpus_node_all_nodes_count(two_nodes: Machine, said: dict[str, str]) -> None:
    two_nodes.device("0000:81:00.0", **said)
    assert gpu_node() is None
    assert choose("auto", None, ALL).cores == ALL[2:]


def test_the_first_gpu_counts(two_nodes: Machine) -> None:
    two_nodes.device("0000:82:00.0", **GPU)
    two_nodes.device("0000:10:00.0", **{**GPU, "numa_node": "0", "class": "0x030000"})
    assert gpu_node() == 0


# ---------------------------------------------------------------- as asked


@pytest.mark.parametrize(
    ("wish", "cores"),
    [
        ("2-4,7", (2, 3, 4, 7)),
        ("3,1,1-2", (1, 2, 3)),
        ("node:0", (0, 1, 2, 3, 8, 9, 10, 11)),
        ("node:0-1", ALL),
    ],
)
def test_cores_and_nodes_as_asked(two_nodes: Machine, wish: str, cores: tuple[int, ...]) -> None:
    assert choose(wish, None, ALL) == Pinning(cores, len(cores), True, "as asked")
    assert choose(wish, 3, ALL).threads == 3


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ("0-16", "cores '0-16': 16 are not among 0-15"),
        ("14-20,3", "16-20 are not among 0-15"),
        ("node:2", "this machine has no NUMA node 2"),
        ("node:", 'write "auto", "node:0", or a list such as "2-15,18"'),
        ("all", "cores 'all': write"),
        ("1,,2", "write"),
        ("-1", "write"),
        ("3-", "write"),
        ("5-3", "write"),
    ],
)
def test_what_cannot_be_had(two_nodes: Machine, wish: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose(wish, None, ALL)


def test_this_machine_can_be_asked() -> None:
    assert choose("auto", None).cores
    if (affinity._NODES / "node0").exists():
        assert node_cores(0)


# ---------------------------------------------------------------- setting it

PIN = """
import os, sys
from workers import affinity
affinity.pin(affinity.Pinning((int(sys.argv[1]),), 1, sys.argv[2] == "True", ""))
print(os.sched_getaffinity(0), {k: v for k, v in sorted(os.environ.items()) if k.startswith(("OMP_", "GOMP_"))})
"""


@pytest.mark.parametrize(
    ("exclusive", "settings"),
    [
        (
            True,
            {"GOMP_SPINCOUNT": "20000", "OMP_NUM_THREADS": "1", "OMP_PLACES": "{%d}", "OMP_PROC_BIND": "close"},
        ),
        (False, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_pinning_sets_the_mask_and_tells_openmp(exclusive: bool, settings: dict[str, str]) -> None:
    core = psutil.Process().cpu_affinity()[-1]
    said = {key: value % core if "%" in value else value for key, value in settings.items()}
    assert child(PIN, str(core), str(exclusive)) == f"{ {core} } {said}"


LOADED = """
import sys
import workers.optimizer
heavy = sorted({"torch", "numpy", "deepspeed"} & set(sys.modules))
with open("/proc/self/maps") as maps:
    heavy += sorted({name for line in maps for name in ("libgomp", "libiomp", "libomp") if name in line})
print(heavy)
"""


def test_the_optimizer_loads_no_openmp_before_it_is_pinned() -> None:
    """libgomp takes the mask that it finds when it is loaded."""
    assert child(LOADED) == "[]"


def child(code: str, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=240
    ).stdout.strip()
