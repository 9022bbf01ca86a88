"""A run's folder: one run at a time, and a recipe's fresh run does not mix with what an earlier one left.

claim ─▶ a lock that goes with the process      set_aside ─▶ NAME.1, NAME.2, …      nothing was trained ─▶ bring_back
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Final

from hytrain.errors import ConfigError

LOCK: Final = ".lock"
#: The progress of a run that has not made a step.
NOTHING: Final = 0, frozenset[str]()
#: What a run leaves in its folder, as patterns.
CONTENTS: Final = ("recipe.yaml", "metrics*.jsonl", "loss.png", "trace.json", "traces", "checkpoints", "logs")


def claim(folder: Path) -> int:
    """Make the folder this process's own until it ends; the lock's descriptor.

    Raises `ConfigError` if it is taken, or cannot be written to.
    """
    descriptor = _lock(folder)
    if descriptor is None:
        raise ConfigError(f"a run is going on in {folder}: give this one another --run-dir, or run.name")
    return descriptor


def claim_or_beside(folder: Path) -> Path:
    """The folder, or if a run is going on in it NAME-2, NAME-3, … beside it; this process's own until it ends.

    Raises `ConfigError` if it cannot be written to.
    """
    number, free = 1, folder
    while _lock(free) is None:
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _lock(folder: Path) -> int | None:
    """The lock's descriptor, None if another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"the run's folder {folder} cannot be written to: {error.strerror}; give another") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass  # a file system without locks
    return descriptor


def set_aside(folder: Path) -> Path | None:
    """Move what an earlier run left into a folder beside; its path, or None if there was no run."""
    left = [path for pattern in CONTENTS for path in folder.glob(pattern)]
    if not any(path.name in ("metrics.jsonl", "checkpoints") for path in left):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    aside.mkdir()
    for path in left:
        path.rename(aside / path.name)
    return aside


def progress(folder: Path) -> tuple[int, frozenset[str]]:
    """What a run has brought: bytes of its records, names of its checkpoints."""
    metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    names = frozenset(path.name for path in checkpoints.iterdir()) if checkpoints.is_dir() else frozenset()
    return metrics.stat().st_size if metrics.exists() else 0, names


def bring_back(folder: Path, aside: Path) -> bool:
    """Put back what was set aside, if nothing has been trained since; whether that was so."""
    if progress(folder) != NOTHING:
        return False
    for path in [path for pattern in CONTENTS for path in folder.glob(pattern)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for path in aside.iterdir():
        path.rename(folder / path.name)
    aside.rmdir()
    return True
