"""environment.json in a run's folder: with what each of its processes trained. The session writes it at its start.

A list, newest last: a resumed run adds an entry. It is written atomically, and at most once per process and folder.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil
import torch

ENVIRONMENT_FILE: Final = "environment.json"
#: Only a hang takes longer, such as that of a network's file system.
GIT_TIMEOUT_S: Final = 30.0
#: Their versions are written down if the program has imported them.
LIBRARIES: Final = ("hytrain", "torch", "numpy", "transformers", "accelerate", "peft", "trl", "lightning")

_log = logging.getLogger(__name__)


def gpu_uuid(device: torch.device) -> str:
    """The GPU's UUID, as NVML has it; empty if the device is none."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


def write(folder: Path, device: torch.device, launcher: int | None) -> None:
    """Add an entry for this process. `launcher`: the process that was given the command line, if it was not this one.

    If the file cannot be written, training goes on, and the log says so.
    """
    path, entries = folder / ENVIRONMENT_FILE, list[dict[str, Any]]()
    with suppress(OSError, ValueError):
        entries = json.loads(path.read_text())
    started = _started(os.getpid())
    if entries and (entries[-1].get("pid"), entries[-1].get("started")) == (os.getpid(), started):
        return
    entry = {
        "started": started,
        "pid": os.getpid(),
        "host": platform.node(),
        "command": _command(os.getpid() if launcher is None else launcher),
        "folder": os.getcwd(),
        "commit": commit(os.getcwd()),
        "versions": versions(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps([*entries, entry], indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        _log.warning("%s was not written: %s", path, error)


@cache
def commit(folder: str) -> str | None:
    """The commit that git has checked out in `folder`, with "-dirty" if files differ; None without one."""
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GIT_TIMEOUT_S)
        return asked.stdout.strip() or None
    return None


def versions() -> dict[str, str]:
    """Of Python and of those of `LIBRARIES` that are imported."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        if (version := getattr(sys.modules.get(name), "__version__", None)) is not None:
            found[name] = str(version)
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _command(pid: int) -> list[str]:
    with suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return sys.orig_argv


def _started(pid: int) -> str:
    """When the process was started, in local time."""
    return datetime.fromtimestamp(psutil.Process(pid).create_time()).astimezone().isoformat(timespec="seconds")


@cache
def cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
