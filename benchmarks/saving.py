"""What it costs to save the whole state while training goes on, and to load it again: the part "saving".

    baseline steps ─▶ save ─▶ steps until the state is whole ─▶ load ─▶ the same weights? ─▶ files removed

A stall is what the steps from the call on, until the state is whole, took longer than the baseline's median. `step`
calls `measure` behind a segment's measured steps.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import nn

from benchmarks import host
from benchmarks.checkpoints import Saving
from benchmarks.memory import Growth
from benchmarks.systems import Unavailable

#: Of each parameter, beside itself: the fp32 master and two moments. What one system can leave out another needs.
STATE_BYTES: Final = 12
SPARE: Final = 1.03
IN_MEMORY: Final = ("tmpfs", "ramfs")


class Steps(Protocol):
    """Steps with a mark at the start and after each, as `step.Steps`."""

    count: int

    def run(self) -> None: ...
    def times(self) -> list[float]: ...


def measure(
    model: nn.Module, saving: Saving, folder: Path, begin: Callable[[], Steps], step_s: float
) -> dict[str, Any]:
    """A row's fields for one save into `folder`, which is removed in the end, and for loading it again.

    `begin` makes steps with a mark at that moment; `step_s` is the baseline's median. Raises `Unavailable` if the state
    does not fit onto the disk.
    """
    parameters = list(model.parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    shutil.rmtree(folder, ignore_errors=True)  # of a run folder that is kept
    folder.mkdir(parents=True)
    try:
        _require_room(folder, numel * (parameters[0].element_size() + STATE_BYTES))
        row, sums = _save(model, saving, folder, begin, step_s)
        disk_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        row |= {"disk_bytes": disk_bytes, "disk_bytes_per_parameter": round(disk_bytes / numel, 3)}
        row["file_system"] = host.file_system(folder)
        began_s = time.perf_counter()
        try:
            saving.load(folder)
            saving.settle()
        except Exception as error:  # the save was measured all the same
            return row | {"resume_error": f"{type(error).__name__}: {error}"[:200]}
        _synchronize()
        resume_s = time.perf_counter() - began_s
        return row | {"resume_s": round(resume_s, 3), "restored": weights_sums(model) == sums}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _save(
    model: nn.Module, saving: Saving, folder: Path, begin: Callable[[], Steps], step_s: float
) -> tuple[dict[str, Any], list[int]]:
    """Save, and train until the state is whole. Also returns the sums of the weights that are saved.

    A save has to wait for the updates of the step before. The sums need that, too, so they are made after the clock has
    started, and their own time is taken out.
    """
    whole, whole_at_s = threading.Event(), list[float]()

    def is_whole(_: object) -> None:
        whole_at_s.append(time.perf_counter())
        whole.set()

    with Growth() as memory:
        _synchronize()  # the device's clock and the host's begin together
        steps, began_s = begin(), time.perf_counter()
        saving.settle()
        settled_s = time.perf_counter()
        sums = weights_sums(model)
        summing_s = time.perf_counter() - settled_s
        future = saving.save(folder)
        held_s = time.perf_counter() - began_s - summing_s
        future.add_done_callback(is_whole)
        steps.run()
        while not whole.is_set():
            steps.run()
        future.result()
        first_s, *others_s = steps.times()
    steps_s = [first_s - summing_s, *others_s]
    save_s = whole_at_s[0] - began_s - summing_s
    stall_s = max(sum(steps_s) - len(steps_s) * step_s, 0.0)
    row = {
        "saved_with": saving.how,
        "saved_is": saving.whole,
        "save_s": round(save_s, 3),
        "save_call_s": round(held_s, 3),
        "save_stall_s": round(stall_s, 3),
        "save_stall_share": round(stall_s / save_s, 4),
        "save_steps_s": [round(value, 5) for value in steps_s],
        "save_host_gb": round(memory.programs / 1e9, 2),
        "save_used_gb": round(memory.used / 1e9, 2),
    }
    return row, sums


def _require_room(folder: Path, state_bytes: int) -> None:
    kind, free, need = host.file_system(folder), shutil.disk_usage(folder).free, int(state_bytes * SPARE)
    if kind in IN_MEMORY:
        raise Unavailable(f"{folder} is in memory ({kind}): set TMPDIR or --runs to a folder on a disk")
    if free < need:
        raise Unavailable(
            f"the state takes up to {need / 1e9:.0f} GB, and {folder} has {free / 1e9:.0f} GB left: set TMPDIR or "
            "--runs to a folder on a larger disk"
        )


def weights_sums(model: nn.Module) -> list[int]:
    """Each parameter's bits as integers, summed: equal if the weights are."""
    kinds = {2: torch.int16, 4: torch.int32}
    with torch.no_grad():
        views = (parameter.detach().view(kinds[parameter.element_size()]) for parameter in model.parameters())
        sums = torch.stack([view.sum(dtype=torch.int64) for view in views])
    return [int(each) for each in sums.tolist()]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
