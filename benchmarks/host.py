"""The machine under the benchmarks: its identity, its hardware, the memory that is left. Imports neither torch nor
hytrain, so that one `benchmarks` folder can measure several commits.

Machines of one kind differ by half in speed, and after a restart the machine may be another one. So every row has its
host's identity, and only rows of one identity are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

import psutil

GROUPS: Final = Path("/sys/fs/cgroup")
PACKAGES: Final = (
    "torch",
    "triton",
    "transformers",
    "deepspeed",
    "torchao",
    "bitsandbytes",
    "flashoptim",
    "accelerate",
    "numpy",
)
_QUERY: Final = "name,uuid,driver_version,memory.total"


def identity() -> str:
    """Twelve hex digits for this machine since its last start: processor, boot, GPU.

    Copies of one virtual machine share all of that, so a random mark in the temporary folder is part of it.
    """
    mark = Path(tempfile.gettempdir()) / f"benchmarks-host-{os.getuid()}"
    if not mark.exists():
        mark.write_text(secrets.token_hex(16))
    parts = [_text("/proc/sys/kernel/random/boot_id"), _text("/etc/machine-id"), cpu_model(), mark.read_text()]
    return hashlib.sha256("\n".join([*parts, *gpu().values()]).encode()).hexdigest()[:12]


def hardware() -> dict[str, Any]:
    """For people, and for a report's head."""
    cards = gpu()
    return {
        "gpu": cards.get("name", "none"),
        "gpu_memory": cards.get("memory.total", ""),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "host_memory_gb": round(psutil.virtual_memory().total / 1e9),
    }


def versions() -> dict[str, str]:
    """Python, the driver, and the packages that are installed."""
    found = {"python": platform.python_version(), "driver": gpu().get("driver_version", "")}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def commit() -> str:
    """The commit of the `hytrain` that Python finds, with a plus if tracked files differ; "unknown" without git."""
    found = util.find_spec("hytrain")
    home = str(Path(found.origin).parent) if found and found.origin else "."
    try:
        short = _run("git", "-C", home, "rev-parse", "--short", "HEAD")
        return short + ("+" if _run("git", "-C", home, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def gpu() -> dict[str, str]:
    """The first GPU as nvidia-smi describes it; empty without one."""
    try:
        first = _run("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader").splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip(_QUERY.split(","), (value.strip() for value in first.split(",")), strict=True))


def cpu_model() -> str:
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def optimizer_threads() -> int:
    """As many as HyTrain's optimizer process takes by itself."""
    cores = len(os.sched_getaffinity(0))
    return cores - 2 if cores >= 4 else max(cores // 2, 1)


# ---------------------------------------------------------------- memory


def used_bytes() -> int:
    """Host memory in use: what is not available. Shared and pinned memory count, the file cache does not."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available


def gpu_peak_bytes() -> int:
    """The most GPU memory that nobody else could have, since torch's peaks began; 0 without a GPU.

    `torch.cuda.max_memory_allocated` leaves out what was freed while a stream was still to pass it.
    """
    import torch  # most who need this module do without

    return int(torch.cuda.memory_stats().get("active_bytes.all.peak", 0))


def program_bytes() -> int:
    """Anonymous and shared pages: what programs hold, without files. Without that account, all that is in use."""
    lines = (line.partition(":") for line in _text("/proc/meminfo").splitlines())
    found = {name: int(size.split()[0]) * 1024 for name, _, size in lines if name in ("AnonPages", "Shmem")}
    return sum(found.values()) if len(found) == 2 else used_bytes()


def left_bytes(total: int | None = None) -> int:
    """What may still be taken, by the machine's account and by this process's control groups.

    `total`: the machine's real memory, where MemTotal grows with use.
    """
    left = psutil.virtual_memory().available if total is None else total - used_bytes()
    return min([left, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Bytes below each memory limit of this process's control groups; cached files count as left."""
    inner = Path(_text("/proc/self/cgroup").strip().removeprefix("0::/"))
    for group in (inner, *inner.parents):
        limit, usage, stat = (_text(GROUPS / group / f"memory.{name}").split() for name in ("max", "current", "stat"))
        if limit and usage and limit != ["max"]:
            lists = [name for name in ("inactive_file", "active_file") if name in stat]
            cached = sum(int(stat[stat.index(name) + 1]) for name in lists)
            yield int(limit[0]) - int(usage[0]) + cached


def file_system(path: Path) -> str:
    """The kind of the file system under a path, such as "ext4"."""
    mounts = [each for each in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(each.mountpoint)]
    return max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else ""


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
