"""The machine under the benchmarks: who it is, what is in it, how much memory is left. Imports no torch.

Machines of one kind differ by half in speed, and a machine that was started anew may be another. So every row bears
its host's identity, and only rows of one identity are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from hytrain.memory.host import left_in_groups

PACKAGES: Final = ("torch", "triton", "transformers", "deepspeed", "torchao", "numpy")
_QUERY: Final = "name,uuid,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"


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
        "pcie": f"gen {cards['pcie.link.gen.max']} x{cards['pcie.link.width.max']}" if cards else "",
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "host_memory_gb": round(_meminfo()["MemTotal"] / 1e9),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """Python, the driver, and the packages that are installed."""
    found = {"python": platform.python_version(), "driver": gpu().get("driver_version", "")}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def commit() -> str:
    """The checkout's commit, with a plus if tracked files differ from it; "unknown" where there is no git."""
    home = Path(__file__).resolve().parent
    try:
        short = _run("git", "-C", str(home), "rev-parse", "--short", "HEAD")
        return short + ("+" if _run("git", "-C", str(home), "status", "--porcelain", "-uno") else "")
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
    known = _meminfo()
    return known["MemTotal"] - known["MemAvailable"]


def left_bytes(total: int | None = None) -> int:
    """What may still be taken, by the machine's account and by this process's control groups.

    `total`: what the machine has in truth, where MemTotal grows with use.
    """
    known = _meminfo()
    left = known["MemAvailable"] if total is None else total - used_bytes()
    in_groups = left_in_groups()
    return left if in_groups is None else min(left, in_groups)


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in _text("/proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 2}


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
