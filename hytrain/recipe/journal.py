"""The record of a run: one entry per step, for the optimizer's log, the progress display and the history.

    loop ─ note(step, loss) ─▶ Readout ─ a step later ─▶ opt.log ─▶ metrics.jsonl
                                                    ├──▶ Progress, TensorBoard, W&B
                                                    └──▶ History ─▶ curve, summary

A step's entry is written once its loss has been read, together with the gradients' norm and the loss scale after the
step, if there are any. A validation of the same step is added to it, and once training has diverged, the step at which
that was seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from hytrain.optimizer import Optimizer
from hytrain.recipe import config
from hytrain.recipe.parallel import Job
from hytrain.recipe.progress import Progress, Speed
from hytrain.recipe.task import Task
from hytrain.recipe.validation import Validation
from hytrain.tensors import local
from hytrain.trackers import Trackers
from protocol.metrics import records

SKIPPED_IN_A_ROW = 20


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


class Divergence:
    """Whether training has diverged: a loss, a validation loss or weights that are not finite.

    `step` is the first step that shows it, counted from 1, or None; `sign` says what was seen. Where steps whose
    gradients are not finite are skipped, one such step may be that of a bad batch, and float16 begins with some. Then
    it takes many of them in a row. The loop has the weights checked before it saves them, and stops.
    """

    step: int | None = None
    sign = ""

    def __init__(self, train: config.Train) -> None:
        self._skips = train.on_nonfinite == "skip" or train.loss_scale is not None
        self._in_a_row = 0

    def look_at_step(self, step: int, loss: float, grad_norm: float) -> None:
        """`grad_norm` is any finite number if it is not known."""
        if not self._skips:
            if not math.isfinite(loss):
                self._note(step, f"the loss of step {step} is {loss}")
            return
        self._in_a_row = 0 if math.isfinite(loss) and math.isfinite(grad_norm) else self._in_a_row + 1
        if self._in_a_row == SKIPPED_IN_A_ROW:
            self._note(
                step, f"the last {SKIPPED_IN_A_ROW} steps until step {step} had a loss or gradients with inf or NaN"
            )

    def look_at_validation(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            self._note(step, f"the validation loss after step {step} is {loss}")

    @torch.no_grad()
    def look_at_weights(self, step: int, model: nn.Module, job: Job) -> bool:
        """Whether all parameters are finite, on all ranks. Waits for the device."""
        weights = [shard for shard in map(local, model.parameters()) if shard.numel()]
        finite = all(job.ranks.gather(bool(get_total_norm(weights, norm_type=math.inf).isfinite())))
        if not finite:
            self._note(step, f"the weights after step {step} are not finite")
        return finite

    def _note(self, step: int, sign: str) -> None:
        if self.step is None:
            self.step, self.sign = step, sign


class Readout:
    """Reads a step's numbers from tensors without waiting for the GPU: those of one step with the next step's copy.

    At most one step's numbers are pending. On a CPU they are tensors that are read later.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._slots = [torch.zeros(0, dtype=torch.float32), torch.zeros(0, dtype=torch.float32)]
        self._event: torch.cuda.Event | None = None
        self._names: tuple[str, ...] | None = None

    def swap(self, numbers: Mapping[str, Tensor]) -> dict[str, float] | None:
        """Starts reading `numbers`, scalars of any dtype, and returns the previous ones, or None."""
        values = torch.stack([number.detach().float() for number in numbers.values()])
        if self._slots[1].shape != values.shape:
            self._slots[1] = torch.zeros(values.shape, dtype=torch.float32, device="cpu", pin_memory=self._on_gpu)
        slot, event = self._slots[1], None
        slot.copy_(values, non_blocking=self._on_gpu)
        if self._on_gpu:
            event = torch.cuda.Event(blocking=True)
            event.record()
        previous = self.take()
        self._slots.reverse()
        self._event, self._names = event, tuple(numbers)
        return previous

    def take(self) -> dict[str, float] | None:
        """The pending numbers, or None if there are none. Waits for their copy."""
        if self._names is None:
            return None
        if self._event is not None:
            self._event.synchronize()
        names, self._names = self._names, None
        return dict(zip(names, self._slots[0].tolist(), strict=True))


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
