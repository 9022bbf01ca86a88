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
from workers.affinity import Pinning, choose, gpu_nodes

GPU = {"vendor": "0x10de", "class": "0x030200", "numa_node": "1"}


def say(folder: Path, **said: str) -> None:
    folder.mkdir(parents=True)
    for name, text in said.items():
        (folder / name).write_text(text + "\n")


@pytest.fixture(autouse=True)
def pci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a machine of two nodes the folder of its devices, of which there are none yet."""
    monkeypatch.setattr(affinity, "_NODES", tmp_path / "node")
    monkeypatch.setattr(affinity, "_PCI", tmp_path / "pci")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    say(tmp_path / "node" / "node0", cpulist="0-3,8-11")
    say(tmp_path / "node" / "node1", cpulist="4-7,12-15")
    return tmp_path / "pci"


ALL = tuple(range(16))


@pytest.mark.parametrize(
    ("count", "kept", "threads"), [(1, 0, 1), (2, 0, 1), (3, 0, 1), (4, 2, 2), (5, 2, 3), (16, 2, 14)]
)
def test_two_of_four_or_more_cores_stay_the_trainers_and_fewer_are_shared(count: int, kept: int, threads: int) -> None:
    reason = f"all nodes, {kept} left for the trainer" if kept else "all nodes, shared with the trainer"
    expected = Pinning(ALL[kept:count], threads, kept > 0, reason)
    assert choose("auto", None, ALL[:count]) == expected
    assert choose("auto", 1, ALL[:count]) == replace(expected, threads=1)


def test_the_first_gpus_node_comes_first(pci: Path) -> None:
    say(pci / "0000:82:00.0", **GPU | {"numa_node": "0"})
    assert gpu_nodes() == [0]
    say(pci / "0000:81:00.0", **GPU | {"class": "0x030000"})
    where = "NUMA node 1 of the GPU"
    pinning = choose("auto", None, ALL)
    assert pinning == Pinning((6, 7, 12, 13, 14, 15), 6, True, f"{where}, 2 left for the trainer")
    assert pinning.describe() == "6 threads on cores 6-7,12-15 (NUMA node 1 of the GPU, 2 left for the trainer)"
    assert choose("auto", None, ALL[:6]) == Pinning((4, 5), 1, False, f"{where}, shared with the trainer")
    assert choose("auto", None, ALL[:4]).cores == (2, 3), "none of the node's are allowed"


def places(wish: str, ranks: int, available: tuple[int, ...] = ALL) -> list[tuple[int, ...]]:
    """The cores of each rank, which has a thread for each and has them to itself."""
    pinnings = [choose(wish, None, available, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert all(pinning.exclusive and pinning.threads == len(pinning.cores) for pinning in pinnings)
    return [pinning.cores for pinning in pinnings]


def test_ranks_share_out_the_cores_of_their_own_gpus_nodes(pci: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 has cores 0-3 and 8-11, node 1 has 4-7 and 12-15."""
    for slot, node in (("01", "0"), ("41", "1"), ("81", "0"), ("c1", "1")):
        say(pci / f"0000:{slot}:00.0", **GPU | {"numa_node": node})
    assert places("auto", 4) == [(8, 9), (12, 13), (10, 11), (14, 15)]
    assert places("auto", 2) == [(2, 3, 8, 9, 10, 11), (6, 7, 12, 13, 14, 15)]
    reason = "NUMA node 1 of the GPU, part 2 of 2, 4 left for the trainers"
    assert choose("auto", 1, ALL, rank=3, ranks=4) == Pinning((14, 15), 1, True, reason)
    whose = "shared with the trainers and optimizers of 2 ranks"
    few = Pinning((0, 1, 2, 3), 1, False, f"NUMA node 0 of the GPU, {whose}")
    assert choose("auto", None, ALL[:8], rank=2, ranks=4) == few
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert places("auto", 2) == [(8, 9), (10, 11)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-of-a-name")
    assert gpu_nodes() == [0, 1, 0, 1], "names are not looked up"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_nodes() == []


def test_ranks_without_a_gpu_of_a_known_node_share_out_all_cores(pci: Path) -> None:
    assert places("auto", 4) == [(8, 9), (10, 11), (12, 13), (14, 15)]
    assert places("auto", 3) == [(6, 7, 8), (9, 10, 11), (12, 13, 14)]
    say(pci / "0000:01:00.0", **GPU)
    assert places("auto", 4) == [(8, 9), (10, 11), (12, 13), (14, 15)], "one GPU, four ranks"
    assert choose("auto", None, ALL[:2], rank=1, ranks=2).cores == (0, 1)


def test_ranks_share_out_the_cores_that_were_asked_for() -> None:
    assert places("2-9", 2) == [(2, 3, 4, 5), (6, 7, 8, 9)]
    assert places("node:0-1", 4)[3] == (12, 13, 14, 15)
    assert choose("5", None, ALL, rank=1, ranks=2) == Pinning(
        (5,), 1, False, "as asked, shared with the trainers and optimizers of 2 ranks"
    )


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
def test_without_a_gpus_node_all_nodes_count(pci: Path, said: dict[str, str]) -> None:
    say(pci / "0000:81:00.0", **said)
    assert set(gpu_nodes()) <= {None}
    assert choose("auto", None, ALL).cores == ALL[2:]


@pytest.mark.parametrize(
    ("wish", "cores"),
    [("2-4,7", (2, 3, 4, 7)), ("3,1,1-2", (1, 2, 3)), ("node:0", (0, 1, 2, 3, 8, 9, 10, 11)), ("node:0-1", ALL)],
)
def test_cores_and_nodes_as_asked(wish: str, cores: tuple[int, ...]) -> None:
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
def test_what_cannot_be_had(wish: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose(wish, None, ALL)


PIN = """
import os, sys
from workers import affinity
affinity.pin(affinity.Pinning((int(sys.argv[1]),), 1, sys.argv[2] == "True", ""))
print(os.sched_getaffinity(0), {k: v for k, v in sorted(os.environ.items()) if k.startswith(("OMP_", "GOMP_"))})
"""


@pytest.mark.parametrize(
    ("exclusive", "settings"),
    [
        (True, {"GOMP_SPINCOUNT": "20000", "OMP_NUM_THREADS": "1", "OMP_PLACES": "{%d}", "OMP_PROC_BIND": "close"}),
        (False, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_pinning_sets_the_mask_and_tells_openmp(exclusive: bool, settings: dict[str, str]) -> None:
    core = psutil.Process().cpu_affinity()[-1]
    said = {key: value % core if "%" in value else value for key, value in settings.items()}
    assert child(PIN, str(core), str(exclusive)) == f"{ {core} } {said}"


LOADED = """
import sys
import workers.optimize.optimizer
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
