"""Chooses the optimizer process's cores and pins it, before anything that starts threads is imported.

libgomp reads the affinity mask when it loads. A process that starts on one core and widens its mask later would run all
its threads on that core. So the only large import of this module is psutil.

    auto       the NUMA node of the GPU, or all nodes if it is unknown. With four cores or more, the trainer keeps
               two. With fewer, all processes share all cores, with half as many threads, and OpenMP waits passively
    node:0,1   the cores of these NUMA nodes
    2-15,18    these cores

Of several ranks on a machine, rank n trains on its n-th GPU. Ranks get equal and disjoint parts of the cores that they
have in common: with "auto", those whose GPUs are on one node, otherwise all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from hytrain.errors import ConfigError
from hytrain.readable import format_cores, format_threads

TRAINER_CORES: Final = 2
MOST_CORES: Final = 1 << 13  # of Linux's NR_CPUS
MIN_CORES_TO_SHARE_OUT: Final = 4
#: How often libgomp's threads look for work before they sleep. By default they spin for 10 ms after each call, which
#: takes power from other cores and time from other processes. With this number they spin for about 2 ms, the time
#: between two tiles.
SPIN_COUNT: Final = 20000
_NODES: Final = Path("/sys/devices/system/node")
_PCI: Final = Path("/sys/bus/pci/devices")
_NVIDIA: Final = "0x10de"
_DISPLAY_CLASSES: Final = ("0x0300", "0x0302")


@dataclass(frozen=True, slots=True)
class Pinning:
    """The optimizer process's cores and threads, whether it has the cores to itself, and why these."""

    cores: tuple[int, ...]
    threads: int
    exclusive: bool
    reason: str

    def describe(self) -> str:
        return f"{format_threads(self.threads)} {self.describe_place()}"

    def describe_place(self) -> str:
        return f"on cores {format_cores(self.cores)} ({self.reason})"


def choose(
    wish: str, threads: int | None, available: tuple[int, ...] | None = None, *, rank: int = 0, ranks: int = 1
) -> Pinning:
    """The pinning for the setting `wish`, of this rank of so many on this machine.

    Raises `ConfigError` for cores or nodes that this process may not use.
    """
    available = available or tuple(sorted(psutil.Process().cpu_affinity()))
    if wish != "auto":
        cores = parse_cores(wish.removeprefix("node:"))
        if wish.startswith("node:"):
            cores = tuple(sorted(core for node in cores for core in node_cores(node)))
        missing = sorted(set(cores) - set(available))
        if missing:
            raise ConfigError(f"cores {wish!r}: {format_cores(tuple(missing))} are not among {format_cores(available)}")
        return part(cores, threads, "as asked", rank, ranks, trainer_cores=0)
    nodes = [*gpu_nodes(), *[None] * ranks][:ranks]
    pools = [tuple(core for core in available if node is not None and core in node_cores(node)) for node in nodes]
    if not all(pools):
        return part(available, threads, "all nodes", rank, ranks, trainer_cores=TRAINER_CORES)
    peers = [other for other in range(ranks) if nodes[other] == nodes[rank]]
    where = f"NUMA node {nodes[rank]} of the GPU"
    return part(pools[rank], threads, where, peers.index(rank), len(peers), trainer_cores=TRAINER_CORES)


def part(
    cores: tuple[int, ...], threads: int | None, where: str, index: int, parts: int, *, trainer_cores: int
) -> Pinning:
    """One of several equal parts of `cores`, once each trainer has got its own; all of them if they are too few."""
    if len(cores) < parts * (MIN_CORES_TO_SHARE_OUT if trainer_cores else 1):
        whose = "the trainer" if parts == 1 else f"the trainers and optimizers of {parts} ranks"
        return Pinning(cores, threads or max(len(cores) // 2 // parts, 1), False, f"{where}, shared with {whose}")
    size = len(cores) // parts - trainer_cores
    left = trainer_cores * parts
    own = cores[left + index * size : left + (index + 1) * size]
    reason = where if parts == 1 else f"{where}, part {index + 1} of {parts}"
    if left:
        reason += f", {left} left for the trainer{'s' * (parts > 1)}"
    return Pinning(own, threads or size, True, reason)


def pin(pinning: Pinning) -> None:
    """Pin this process, and set OpenMP's environment. OpenMP must not be loaded yet."""
    psutil.Process().cpu_affinity(list(pinning.cores))
    os.environ["OMP_NUM_THREADS"] = str(pinning.threads)
    if pinning.exclusive:
        os.environ["OMP_PROC_BIND"] = "close"
        os.environ["OMP_PLACES"] = "{" + "},{".join(map(str, pinning.cores)) + "}"
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    else:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def gpu_nodes() -> list[int | None]:
    """The NUMA nodes of the NVIDIA GPUs that CUDA shows to this process, in their order; None where it is unknown."""
    nodes: list[int | None] = []
    for device in sorted(_PCI.glob("*")):
        vendor, kind = read_text(device / "vendor"), read_text(device / "class")
        if vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASSES):
            node = int(read_text(device / "numa_node") or -1)
            nodes.append(node if node >= 0 else None)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = [] if not visible else visible.split(",")
    if visible is None or not all(number.strip().isdecimal() for number in numbers):  # names of GPUs, or of their parts
        return nodes
    return [nodes[int(number)] for number in numbers if int(number) < len(nodes)]


def node_cores(node: int) -> tuple[int, ...]:
    """The cores of a NUMA node. Raises `ConfigError` if the machine has no such node."""
    text = read_text(_NODES / f"node{node}" / "cpulist")
    if not text:
        raise ConfigError(f"this machine has no NUMA node {node}")
    return parse_cores(text)


def parse_cores(text: str) -> tuple[int, ...]:
    """ "0-3,8" as (0, 1, 2, 3, 8). Raises `ConfigError` if `text` is not a core list."""
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            if int(last if dash else first) >= MOST_CORES:
                raise ConfigError(f"cores {text!r}: Linux has no core beyond {MOST_CORES - 1}")
            cores.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        cores.clear()
    if not cores:
        raise ConfigError(f'cores {text!r}: write "auto", "node:0", or a list such as "2-15,18"')
    return tuple(sorted(cores))


def read_text(path: Path) -> str:
    """What the system says in this file, without blanks around it; empty if it does not."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
