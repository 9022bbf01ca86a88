"""Which runs are live: found by their socket folders, from outside. Monitors and `hytrain.weights` ask.

<tempdir>/hytrain-*/cluster.json ─▶ find ─▶ the run, while its coordinator lives
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from hytrain.config import CLUSTER_FILE, Cluster
from hytrain.errors import ConfigError
from hytrain.run.seats import FOLDER_PREFIX, temporary


def find(wanted: str | None = None, *, alone: bool = False) -> Cluster:
    """The wanted live run: by its name, its folder or its socket folder.

    None stands for the newest, or, with `alone`, for the only one.

    Raises:
        ConfigError: There is no such run; the message names the live runs.
    """
    runs = live_runs()
    names = ", ".join(f"{run.run_name} ({run.run_dir})" for run in runs) or "none"
    if wanted is None:
        if not runs:
            raise ConfigError(f"you have no live run: {temporary()} has no live socket folder")
        if alone and len(runs) > 1:
            raise ConfigError(f"several runs are live, name one of them: {names}")
        return runs[0]
    path = Path(wanted).resolve()
    for run in runs:
        if wanted == run.run_name or path in (Path(run.run_dir), Path(run.socket_dir).resolve()):
            return run
    if (elsewhere := _live(path)) is not None:  # a socket folder under another TMPDIR
        return elsewhere[1]
    if (path / "metrics.jsonl").is_file():
        raise ConfigError(f"the run in {path} is not live: hytrain-monitor report {wanted} writes a page about it")
    raise ConfigError(f"no live run is called {wanted!r}; live runs: {names}")


def live_runs() -> list[Cluster]:
    """This user's live runs, newest first."""
    folders = Path(temporary()).glob(f"{FOLDER_PREFIX}*")
    found = [live for folder in folders if (live := _live(folder)) is not None]
    return [run for _, run in sorted(found, key=lambda live: live[0], reverse=True)]


def _live(folder: Path) -> tuple[int, Cluster] | None:
    """The start time and the run whose sockets are in `folder`; None if it is not this user's or not live."""
    try:
        owner, started_ns = folder.lstat().st_uid, (folder / CLUSTER_FILE).stat().st_mtime_ns
        if owner != os.getuid():
            return None
        run = Cluster.read(str(folder))
        # The command line must name the folder: another process may have the PID of a dead coordinator.
        return (started_ns, run) if run.socket_dir in psutil.Process(run.coordinator_pid).cmdline() else None
    except (OSError, ConfigError, psutil.Error):
        return None
