"""Chooses the optimizer process's cores and pins it, before anything that starts threads is imported.

libgomp reads the affinity mask when it loads. A process that starts on one core and widens its mask later would run all
its threads on that core. So the only large import of this module is psutil.

    auto       the NUMA node of the GPU, or all nodes if it is unknown. With four cores or more, the trainer keeps
               two. With fewer, all processes share all cores, with half as many threads, and OpenMP waits passively
    node:0,1   the cores of these NUMA nodes
    2-15,18    these cores
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from hytrain.errors import ConfigError

TRAINER_CORES: Final = 2
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


def format_threads(threads: int) -> str:
    return f"{threads} thread{'s' * (threads != 1)}"


def choose(wish: str, threads: int | None, available: tuple[int, ...] | None = None) -> Pinning:
    """The pinning for the setting `wish`. Raises `ConfigError` for cores or nodes that this process may not use."""
    available = available or tuple(sorted(psutil.Process().cpu_affinity()))
    if wish != "auto":
        cores = parse_cores(wish.removeprefix("node:"))
        if wish.startswith("node:"):
            cores = tuple(sorted(core for node in cores for core in node_cores(node)))
        missing = sorted(set(cores) - set(available))
        if missing:
            raise ConfigError(f"cores {wish!r}: {format_cores(tuple(missing))} are not among {format_cores(available)}")
        return Pinning(cores, threads or len(cores), True, "as asked")
    node = gpu_node()
    cores = tuple(core for core in available if node is None or core in node_cores(node)) or available
    where = f"NUMA node {node} of the GPU" if node is not None else "all nodes"
    if len(cores) < MIN_CORES_TO_SHARE_OUT:
        return Pinning(cores, threads or max(len(cores) // 2, 1), False, f"{where}, shared with the trainer")
    kept = cores[TRAINER_CORES:]
    return Pinning(kept, threads or len(kept), True, f"{where}, {TRAINER_CORES} left for the trainer")


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


def gpu_node() -> int | None:
    """The NUMA node of the first NVIDIA GPU. None if there is no GPU, or if its node is unknown (-1)."""
    for device in sorted(_PCI.glob("*")):
        vendor, kind = _read(device / "vendor"), _read(device / "class")
        if vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASSES):
            node = int(_read(device / "numa_node") or -1)
            return node if node >= 0 else None
    return None


def node_cores(node: int) -> tuple[int, ...]:
    """The cores of a NUMA node. Raises `ConfigError` if the machine has no such node."""
    text = _read(_NODES / f"node{node}" / "cpulist")
    if not text:
        raise ConfigError(f"this machine has no NUMA node {node}")
    return parse_cores(text)


def parse_cores(text: str) -> tuple[int, ...]:
    """ "0-3,8" as (0, 1, 2, 3, 8). Raises `ConfigError` if `text` is not a core list."""
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            cores.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        cores.clear()
    if not cores:
        raise ConfigError(f'cores {text!r}: write "auto", "node:0", or a list such as "2-15,18"')
    return tuple(sorted(cores))


def format_cores(cores: tuple[int, ...]) -> str:
    """(0, 1, 2, 3, 8) as "0-3,8"."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
