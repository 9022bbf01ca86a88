"""A recipe's folder: one run at a time, and a fresh one does not mix with what an earlier one left.

claim ─▶ a lock that goes with the process      set_aside ─▶ NAME.1, NAME.2, …
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from hytrain.errors import ConfigError

LOCK: Final = ".lock"
#: What a run leaves in its folder.
CONTENTS: Final = ("recipe.yaml", "metrics.jsonl", "loss.png", "trace.json", "traces", "checkpoints", "logs")


def claim(folder: Path) -> int:
    """Make the folder this process's own until it ends; the lock's descriptor. Raises `ConfigError` if it is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"a run is going on in {folder}: give this one another --run-dir, or run.name") from None
    except OSError:
        pass  # a file system without locks
    return descriptor


def set_aside(folder: Path) -> Path | None:
    """Move what an earlier run left into a folder beside; its path, or None if there was no run."""
    left = [path for name in CONTENTS if (path := folder / name).exists()]
    if not any(path.name in ("metrics.jsonl", "checkpoints") for path in left):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    aside.mkdir()
    for path in left:
        path.rename(aside / path.name)
    return aside
