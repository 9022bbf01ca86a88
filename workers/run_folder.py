"""A run's folder. It has one run at a time, and a fresh run of a recipe does not mix with an earlier run's files.

claim ─▶ a lock until the process ends      set_aside ─▶ NAME.1, NAME.2, …      nothing was trained ─▶ bring_back
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Final

from hytrain.errors import ConfigError

LOCK: Final = ".lock"
#: The progress of a run that has not completed a step.
NOTHING: Final = 0, frozenset[str]()
#: What a run writes into its folder, as patterns.
CONTENTS: Final = (
    "recipe.yaml",
    "metrics*.jsonl",
    "loss.png",
    "trace.json",
    "traces",
    "checkpoints",
    "logs",
    "tensorboard",
    "wandb",
)


def default(run_name: str) -> Path:
    """The folder for logs and metrics of a run that was given none."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "hytrain" / "runs" / f"{run_name}-{os.getpid()}"


def claim(folder: Path) -> int:
    """Lock the folder until this process ends; return the lock's descriptor.

    Raises `ConfigError` if another run uses the folder, or if it cannot be written to.
    """
    descriptor = _lock(folder)
    if descriptor is None:
        raise ConfigError(f"another run is using {folder}: give this one another --run-dir, or run.name")
    return descriptor


def claim_or_beside(folder: Path) -> Path:
    """Lock the folder until this process ends, or NAME-2, NAME-3, … next to it if a run uses it; return its path.

    Raises `ConfigError` if it cannot be written to.
    """
    number, free = 1, folder
    while _lock(free) is None:
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def unwritable(folder: Path, error: OSError) -> str:
    """What to tell the user if `error` keeps a run from writing to its folder."""
    return f"the run's folder {folder} cannot be written to: {error.strerror}; choose another"


def _lock(folder: Path) -> int | None:
    """The lock's descriptor, or None if another process has the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(unwritable(folder, error)) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass  # a file system without locks
    return descriptor


def set_aside(folder: Path) -> Path | None:
    """Move an earlier run's files to a new folder next to it; return its path, or None if there was no run."""
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
    """A run's progress: the bytes of its records, and the names of its checkpoints."""
    metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    names = frozenset(path.name for path in checkpoints.iterdir()) if checkpoints.is_dir() else frozenset()
    return metrics.stat().st_size if metrics.exists() else 0, names


def bring_back(folder: Path, aside: Path) -> bool:
    """Move the files back if nothing has been trained since. Returns whether they were."""
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
