"""A run's folder. It has one run at a time, and a fresh run of a recipe does not mix with an earlier run's files.

claim ─▶ a lock until the process ends      set_aside ─▶ NAME.1, NAME.2, …      nothing was trained ─▶ bring_back
create ─▶ a program's own folder; old ones beyond `keep_runs` are pruned      find ─▶ the runs in a folder, for --list
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from hytrain.errors import ConfigError
from protocol.metrics import records

LOCK: Final = ".lock"
#: How long after locking a folder its owner may take to write the name of its job into the lock.
SETTLE_S: Final = 1.0
#: The progress of a run that has not completed a step.
NOTHING: Final = 0, frozenset[str]()
#: The files of records, which are cut and appended to. A link may lead to another run's, or to anything.
METRICS: Final = re.compile(r"metrics(-[0-9]+)?(-replaced)?\.jsonl")
#: What a run writes into its folder, as patterns.
CONTENTS: Final = (
    "recipe.yaml",
    "metrics*.jsonl",
    "environment.json",
    "loss.png",
    "report.html",
    "trace.json",
    "traces",
    "checkpoints",
    "logs",
    "tensorboard",
    "wandb",
)
#: How much of the end of a run's records is read to find its last step and loss.
TAIL_BYTES: Final = 1 << 16


def default() -> Path:
    """The folder that has the folders of the runs that were given none."""
    from hytrain.config import home  # of what the coordinator imports, nothing else needs pydantic

    state = Path(os.environ.get("XDG_STATE_HOME") or home() / ".local" / "state")
    return state / "hytrain" / "runs"


def containing(file: str, wanted: str) -> Path | None:
    """The folder `wanted` that has this file: a path, or the name of a run of a program; None if there is none."""
    return next((folder for folder in (Path(wanted), default() / wanted) if (folder / file).is_file()), None)


def create(run_name: str, keep_runs: int) -> Path:
    """Make and claim a new folder for a run that was given none, and prune old ones, so that `keep_runs` remain.

    Raises `ConfigError` if it cannot be written to.
    """
    try:
        default().mkdir(parents=True, exist_ok=True)
        for folder in _numbered(default() / run_name):
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise ConfigError(unwritable(default() / run_name, error)) from None
    claim(folder)
    if len(_folders(default())) > keep_runs:
        for run in find(default())[keep_runs:]:
            if run.prunable and not (run.folder / "checkpoints").exists():
                prune(run)
    return folder


def claim(folder: Path) -> int:
    """Lock the folder until this process ends; return the lock's descriptor.

    Raises `ConfigError` if another run uses the folder, or if it cannot be written to.
    """
    descriptor = _lock(folder)
    if descriptor is None:
        raise ConfigError(_in_use(folder))
    return descriptor


def claim_or_beside(folder: Path) -> Path:
    """Lock the folder until this process ends, or NAME-2, NAME-3, … next to it if a run uses it; return its path.

    Raises `ConfigError` if it cannot be written to.
    """
    return next(free for free in _numbered(folder) if _lock(free) is not None)


def _numbered(folder: Path) -> Iterator[Path]:
    """It, then NAME-2, NAME-3, … next to it."""
    yield folder
    yield from (folder.with_name(f"{folder.name}-{number}") for number in count(2))


def claim_for_node(folder: Path, job: str) -> Path:
    """Lock the folder until this process ends, or a folder for this machine in it; return which.

    The machines of one job, which has the name `job`, may see the same folder: the first one to come locks it. Raises
    `ConfigError` if another run uses the folder, or if it cannot be written to.
    """
    descriptor, ends_s = _lock(folder), time.monotonic() + SETTLE_S
    if descriptor is not None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, job.encode(), 0)
        return folder
    while (owner := (folder / LOCK).read_text()) != job and time.monotonic() < ends_s:
        time.sleep(0.1)  # it may have been locked just now
    if owner != job:
        raise ConfigError(_in_use(folder))
    return claim_or_beside(folder / f"node-{socket.gethostname()}")


def unwritable(folder: Path, error: OSError) -> str:
    """What to tell the user if `error` keeps a run from writing to its folder."""
    return f"the run's folder {folder} cannot be written to: {error.strerror}; choose another"


def _in_use(folder: Path) -> str:
    return f"another run is using {folder}: give this one another --run-dir, or run.name"


def _lock(folder: Path, *, even_without_locks: bool = True) -> int | None:
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
    except OSError:  # a file system without locks
        if not even_without_locks:
            os.close(descriptor)
            return None
    for path in folder.iterdir():
        if METRICS.fullmatch(path.name) and (path.is_symlink() or not path.is_file()):
            os.close(descriptor)
            raise ConfigError(f"{path} is not a file of this folder, so no records can be written: move it elsewhere")
    return descriptor


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, as `hytrain-monitor --list` shows it. `at_s`: when it was last written to, since 1970.

    `own`: whether everything in it is the run's. Folders with other files, such as a program's checkpoints, are kept.
    """

    folder: Path
    live: bool
    own: bool
    steps: int | None
    loss: float | None
    at_s: float
    nbytes: int

    @property
    def prunable(self) -> bool:
        return self.own and not self.live


def find(folder: Path) -> list[Run]:
    """The runs in a folder, the newest first, or the run that the folder is."""
    runs = []
    for path in [folder] if _is_run(folder) else _folders(folder):
        with suppress(FileNotFoundError):  # pruned meanwhile
            runs.append(look(path))
    return sorted(runs, key=lambda run: (run.live, run.at_s), reverse=True)


def look(folder: Path) -> Run:
    """What a run's folder says about it. Raises `FileNotFoundError` if it is gone."""
    files = [folder.stat()]
    for above, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a live run removes temporary files
                files.append(os.lstat(Path(above, name)))
    last = _last_records(folder / "metrics.jsonl")
    of_run = {LOCK, *(path.name for pattern in CONTENTS for path in folder.glob(pattern))}
    return Run(
        folder=folder,
        live=_is_locked(folder),
        own={path.name for path in folder.iterdir()} <= of_run,
        steps=next((record["step"] for record in last if "step" in record), None),
        loss=next((record["loss"] for record in last if record.get("loss") is not None), None),
        at_s=max(file.st_mtime for file in files),
        nbytes=sum(file.st_blocks * 512 for file in files),
    )


def prune(run: Run) -> bool:
    """Delete a run's folder, unless a run uses it by now. Returns whether it did."""
    try:
        descriptor = _lock(run.folder, even_without_locks=False)
    except ConfigError:
        return False
    if descriptor is None:
        return False
    shutil.rmtree(run.folder, ignore_errors=True)
    os.close(descriptor)
    return not run.folder.exists()


def _folders(folder: Path) -> list[Path]:
    """The folders of runs in a folder."""
    try:
        return [path for path in folder.iterdir() if _is_run(path)]
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    return folder.is_dir() and ((folder / LOCK).is_file() or (folder / "metrics.jsonl").is_file())


def _is_locked(folder: Path) -> bool:
    """Whether a run uses the folder. On a file system without locks, every run counts as one that does."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _last_records(metrics: Path) -> list[dict[str, Any]]:
    """The last records of a run, the newest first."""
    with suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return list(records(reversed(file.read(TAIL_BYTES).splitlines())))
    return []


def metrics_file(folder: Path, rank: int) -> Path:
    """Where a rank's records are."""
    return folder / (f"metrics-{rank}.jsonl" if rank else "metrics.jsonl")


def recent_records(metrics: Path, steps: int, plans: int) -> list[dict[str, Any]]:
    """A rank's last `steps` records, after those of the last `plans` earlier steps in which a plan took effect."""
    last, planned = deque[bytes](maxlen=steps), deque[bytes](maxlen=plans)
    with suppress(OSError), metrics.open("rb") as file:
        for line in file:
            if len(last) == steps and b'"reason": "' in last[0]:
                planned.append(last[0])
            last.append(line)
    return list(records((*planned, *last)))


def last_step(folder: Path) -> int:
    """The step of a run's last record, or 0."""
    return next((record["step"] for record in _last_records(folder / "metrics.jsonl") if "step" in record), 0)


def set_aside(folder: Path) -> Path | None:
    """Move an earlier run's files to a new folder next to it; return its path, or None if there was no run."""
    left = [path for pattern in CONTENTS for path in folder.glob(pattern)]
    if not any(path.name in ("metrics.jsonl", "checkpoints") for path in left):
        return None
    for aside in (folder.with_name(f"{folder.name}.{number}") for number in count(1)):
        with suppress(FileExistsError):
            aside.mkdir()
            break
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
