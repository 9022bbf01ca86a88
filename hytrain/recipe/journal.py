"""The record of a run: one entry per step, for the optimizer's log, the progress display and the history.

    loop ─ note(step, loss) ─▶ Readout ─ a step later ─▶ opt.log ─▶ metrics.jsonl
                                                    ├──▶ Progress, TensorBoard, W&B
                                                    └──▶ History ─▶ curve, summary

A step's entry is written once its loss has been read, together with the gradients' norm and the loss scale after the
step, if there are any. A validation of the same step is added to it, and once training has diverged, the step at which
that was seen.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hytrain.optimizer import Optimizer
from hytrain.recipe.divergence import Divergence
from hytrain.recipe.progress import Progress, Speed
from hytrain.recipe.readout import Readout
from hytrain.recipe.task import Task
from hytrain.recipe.validation import Validation
from hytrain.trackers import Trackers
from protocol.metrics import records


@dataclass(slots=True)
class History:
    """The data of the curve: (step, loss, k) and (step, validation loss), losses in nats per token."""

    training: list[tuple[int, float, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def read(cls, metrics: Path, until: int) -> History:
        """The first `until` steps in a run's metrics file: the past of a resumed run."""
        history = cls()
        if not (until and metrics.is_file()):
            return history
        with metrics.open() as lines:
            for record in records(lines):
                history._add(record, until)
        return history

    def _add(self, record: dict[str, Any], until: int) -> None:
        step = record["step"]
        if step <= until and record.get("loss") is not None:
            self.training.append((step, record["loss"], record.get("k", 0.0)))
        if step <= until and record.get("validation_loss") is not None:
            self.validation.append((step, record["validation_loss"]))


class Journal:
    """Takes one `note` per step; `validated` writes the last entry."""

    def __init__(
        self,
        task: Task,
        opt: Optimizer,
        progress: Progress,
        history: History,
        trackers: Trackers,
    ) -> None:
        self.history = history
        self.tokens = 0
        self.seconds = 0.0  # spent in training steps
        self.divergence = Divergence(task.recipe.train)
        # Whether a rank wished to end, or to save a checkpoint, in a step that has been read.
        self.wishes_end = self.wishes_save = False
        self._task = task
        self._opt = opt
        self._progress = progress
        self._trackers = trackers
        self._readout = Readout(task.device)
        self._entry: tuple[int, dict[str, float], Speed, int] | None = None  # step, numbers, speed, tokens
        self._began = self._since = time.perf_counter()
        self._noted = 0  # steps

    def note(
        self,
        step: int,
        loss: Tensor,
        lr: float,
        tokens: int,
        wishes: Tensor | None = None,
    ) -> None:
        """Step number `step` (from 1) is done, with `tokens` tokens. Writes the entry of the step before.

        `wishes` is how many ranks wished to end, and to save; None on a single rank.
        """
        opt = self._opt
        end, save = (None, None) if wishes is None else wishes
        found = {"loss": loss, "grad_norm": opt.grad_norm, "loss_scale": opt.loss_scale, "end": end, "save": save}
        previous = self._readout.swap({name: number for name, number in found.items() if number is not None})
        if previous is not None:
            self._write(previous)
        self._noted += 1
        self._entry = step, {"lr": lr}, self._speed(tokens), tokens

    def validated(self, validation: Validation | None) -> None:
        """Writes the last step's entry together with its validation."""
        numbers = self._readout.take()
        if numbers is not None:
            self._write(numbers, validation)

    def restart_clock(self) -> None:
        """Leaves out the time since the last step, spent on saving or validation."""
        self._since = time.perf_counter()

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def _speed(self, tokens: int) -> Speed:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.tokens += tokens
        self.seconds += seconds
        rate, statistics = tokens / seconds, self._opt.statistics()
        cost = self._task.cost
        mfu = cost.mfu(rate, self._task.peak_tflops)
        return Speed(rate, cost.tflops(rate), mfu, statistics.k, statistics.stall_s)

    def _left(self, step: int) -> dict[str, float]:
        """How far the run has come: with all that it does between steps."""
        train = self._task.recipe.train
        steps = train.length if train.stop_at is None else train.stop_at
        pace_s = (time.perf_counter() - self._began) / self._noted
        return {"steps": steps, "remaining_s": pace_s * (steps - step)}

    def _write(self, read: dict[str, float], validation: Validation | None = None) -> None:
        assert self._entry is not None, "a loss arrived for which no step was noted"
        step, noted, speed, tokens = self._entry
        self.wishes_end |= read.pop("end", 0.0) > 0
        self.wishes_save |= read.pop("save", 0.0) > 0
        numbers = {**read, **noted, "tokens_per_s": speed.tokens_per_s, "tflops": speed.tflops}
        if speed.mfu is not None:
            numbers["mfu"] = speed.mfu
        if validation is not None:
            numbers["validation_loss"] = validation.nats_per_token
            numbers["validation_nats_per_byte"] = validation.nats_per_byte
            numbers["validation_accuracy"] = validation.accuracy
            self.history.validation.append((step, validation.nats_per_token))
            self.divergence.look_at_validation(step, validation.nats_per_token)
        self.divergence.look_at_step(step, read["loss"], read.get("grad_norm", 0.0))
        if self.divergence.step is not None:
            numbers["diverged_at"] = self.divergence.step
        if self._task.job.speaks:
            self._opt.log(step, **numbers, tokens=tokens, **self._left(step))
        self._trackers.write(step, {**numbers, "k": speed.k, "stall_s": speed.stall_s})
        self.history.training.append((step, read["loss"], speed.k))
        self._progress.show(step, read["loss"], speed)
