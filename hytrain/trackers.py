"""TensorBoard and Weights & Biases: files in the run's folder, with the names of metrics.jsonl.

    opt.log, a recipe's journal ─▶ Trackers.write ─▶ queue, by steps ─▶ one thread ─▶ the trackers' own libraries

The thread has what a tracker costs and what goes wrong in it: training neither waits for it nor ends with it.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import threading
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Literal

from hytrain.errors import ConfigError
from hytrain.extras import needed

#: The numbers of so many steps may wait for a slow tracker. Those after them are in metrics.jsonl alone.
WAITING: Final = 1024
#: At its end, a run waits so long for trackers.
CLOSE_S: Final = 30.0
THREAD_NAME: Final = "hytrain-trackers"

_log = logging.getLogger(__name__)

Numbers = Mapping[str, float]


class _Waiting(queue.Queue[tuple[int, dict[str, float]] | bool]):
    """What the thread still has to write, and at last whether the run has failed.

    Numbers of one step wait together, however many calls have brought them. `missed` counts what found no room.
    """

    missed = 0

    def _put(self, item: tuple[int, dict[str, float]] | bool) -> None:
        last = self.queue[-1] if self.queue else None
        if isinstance(item, bool):
            self.queue.append(item)
        elif isinstance(last, tuple) and last[0] == item[0]:
            last[1].update(item[1])
        elif len(self.queue) < WAITING:
            self.queue.append(item)
        else:
            self.missed += len(item[1])


class _TensorBoard:
    def __init__(self, run_dir: Path, first_step: int, title: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides the steps that a resumed run repeats.
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def write(self, step: int, numbers: Numbers) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run_dir: Path, first_step: int, title: str, config: Mapping[str, Any]) -> None:
        import wandb

        mode: Literal["offline"] | None = None if "WANDB_MODE" in os.environ else "offline"
        self._run = wandb.init(dir=run_dir, name=title, config=dict(config), mode=mode)
        self._run.define_metric("*", step_metric="step")  # W&B's own count drops what a loop logs late
        self._end = wandb.teardown

    def write(self, step: int, numbers: Numbers) -> None:
        self._run.log({"step": step, **numbers})

    def close(self, *, failed: bool) -> None:
        try:
            self._run.finish(exit_code=int(failed))
        finally:
            self._end()  # ends the process that W&B has started


#: One library's files each. They are made on the thread, with the number of the first step that is written.
TRACKERS: Final[dict[str, type[_TensorBoard | _Wandb]]] = {"tensorboard": _TensorBoard, "wandb": _Wandb}


def check_trackers(names: Collection[str], option: str) -> None:
    """Raises ConfigError if `option` names no such trackers, and MissingPackage if a library is not installed."""
    for name in names:
        if isinstance(names, str) or name not in TRACKERS:
            raise ConfigError(f"{option} is {names!r}: a list of {' and '.join(TRACKERS)}, or of one of them")
        with needed(f"{option}: [{name}]", name):
            importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)


class Trackers(AbstractContextManager["Trackers"]):
    """The trackers of a run in the folder `run_dir`. `title` and `config` are what W&B tells of the run."""

    def __init__(
        self, names: Collection[str], run_dir: Path, title: str, config: Mapping[str, Any] | None = None
    ) -> None:
        self._given = _Waiting()
        self._said_full = False
        self._thread: threading.Thread | None = None
        if names:
            given = (dict.fromkeys(names), run_dir, title, config or {})
            self._thread = threading.Thread(target=self._write, args=given, name=THREAD_NAME, daemon=True)
            self._thread.start()

    def write(self, step: int, numbers: Numbers) -> None:
        """Add numbers of a step. Waits for nothing."""
        if self._thread is None or not numbers:
            return
        self._given.put((step, dict(numbers)))
        if self._given.missed and not self._said_full:
            self._said_full = True
            _log.warning("the trackers are too slow and miss numbers from step %d on; metrics.jsonl has them", step)

    def close(self, *, failed: bool = False) -> None:
        """Return once all numbers are written, or a tracker has kept the run's end waiting for `CLOSE_S`."""
        if self._thread is None:
            return
        self._given.put(failed)
        self._thread.join(CLOSE_S)
        if self._given.missed:
            _log.warning("the trackers have missed %d numbers", self._given.missed)
        if self._thread.is_alive():
            _log.warning("the trackers miss the last numbers: writing them has taken %.0f s", CLOSE_S)
        self._thread = None

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    def _write(self, names: Collection[str], run_dir: Path, title: str, config: Mapping[str, Any]) -> None:
        opened: dict[str, _TensorBoard | _Wandb] = {}
        failing: set[str] = set()

        def warn(name: str, error: BaseException) -> None:
            if name not in failing:
                _log.warning("%s gets no more numbers, training goes on: %s: %s", name, type(error).__name__, error)
            failing.add(name)

        while not isinstance(entry := self._given.get(), bool):
            step, numbers = entry
            for name in [name for name in names if name not in failing]:
                try:
                    if name not in opened:
                        opened[name] = TRACKERS[name](run_dir, step, title, config)
                    opened[name].write(step, numbers)
                except BaseException as error:  # a library may also exit
                    warn(name, error)
        for name, tracker in opened.items():
            try:
                tracker.close(failed=entry)
            except BaseException as error:  # a library may also exit
                warn(name, error)
