"""Which checkpoints a run has, read without torch: the launcher says what a run can go on from.

A folder with `STATE_FILE`, which is written last, is a checkpoint. `HISTORY` has the folders that a run went through,
the newest last. `hytrain.recipe.checkpoint` writes them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from hytrain.state.locks import read

STATE_FILE: Final = "trainer_state.json"
HISTORY: Final = "history"
#: Marks in the folder of a run's sockets: training has begun, so a rank that starts again goes on from the newest
#: checkpoint; training has come to its end, whatever the ranks were told meanwhile.
BEGUN: Final = "begun"
FINISHED: Final = "finished"
STEP: Final = re.compile(r"step-(0|[1-9][0-9]*)")


def folder_of(run_dir: Path) -> Path:
    return run_dir.resolve() / "checkpoints"


def history(run_dir: Path) -> list[Path]:
    """The folders of this run's history that exist, the newest last; without a record, all by their steps."""
    own = folder_of(run_dir)
    try:
        lines = read(own / HISTORY).decode(errors="replace").splitlines()
        folders = [own / line for line in lines if STEP.fullmatch(line) or _is_elsewhere(line)]
    except OSError:
        steps = {int(match[1]): path for path in own.glob("step-*") if (match := STEP.fullmatch(path.name))}
        folders = [steps[step] for step in sorted(steps)]
    return [folder for folder in folders if folder.is_dir()]


def _is_elsewhere(line: str) -> bool:
    """Whether a line of the history names the checkpoint of another run, from which this one was resumed."""
    return os.path.isabs(line) and os.path.normpath(line) == line


def latest(run_dir: Path) -> Path | None:
    """The newest checkpoint in the history of a run's folder, or None."""
    return next((folder for folder in reversed(history(run_dir)) if (folder / STATE_FILE).is_file()), None)


def way_on(run_dir: Path) -> str:
    """How to resume the run, for the end of a sentence."""
    checkpoint = latest(run_dir)
    if checkpoint is None:
        return "there is no checkpoint to resume from: train.checkpoint_every=N saves one every N steps"
    return f"--set train.resume=latest resumes from {checkpoint}"


def mark(socket_dir: str | None, name: str) -> None:
    """Leave a mark for other processes of the run, or for this rank when it starts again."""
    if socket_dir is not None:
        (Path(socket_dir) / name).touch()
