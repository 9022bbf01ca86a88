"""Co-training in a recipe: the CPU trains some parts of each batch beside the GPU (`train.cpu_parts`).

    part      0    1    …  n-2-c   n-1-c  …  n-2   n-1
    who      GPU  GPU   …   GPU     CPU   …  CPU   GPU        c parts for the CPU; the last one starts the updates
                ▲ all updates have ended: the CPU trainer gets the weights and its parts

The gradients are summed in the order of the parts, whoever computed them, so who did changes no bit that the two of
them compute alike. Each part has a seed of its own, so dropout does not depend on it either. If the CPU trainer is
lost, the trainer computes its parts.

The loop calls `CoTraining`, the CPU trainer calls `Work`.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, Final, Self, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from hytrain.cotraining.partner import ADDRESS
from hytrain.errors import CapacityError
from hytrain.memory.capacity import host_bound
from hytrain.memory.clock import Clock, CudaClock, HostClock, Mark, Span
from hytrain.optim import Optimizer
from hytrain.planner.cpu_parts import CpuPartsPlanner, Step
from hytrain.recipe import config, loss
from hytrain.recipe import model as models
from hytrain.recipe.batches import Batch
from hytrain.recipe.optimizer import Process, TrainingOptimizer
from hytrain.recipe.progress import Progress
from hytrain.recipe.task import Task

#: `auto` has the CPU compute a part that is not used, to see how long it takes: after 1, 2, 4, 8, … steps.
FIRST_TRIAL: Final = 1
#: The times of a `Step` that are recorded.
RECORDED: Final = ("gpu_part_s", "cpu_part_s")
_NONE: Final = 0  # no job has this number


@dataclass(frozen=True, slots=True)
class Work:
    """What the CPU trainer computes: a recipe's model, over memory that it is lent."""

    model: Any
    autocast: bool

    @classmethod
    def of(cls, described: Mapping[str, Any], parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Self:
        """The model that `describe` describes. Raises ConfigError if it cannot be built over these tensors."""
        source = config.Model.model_validate(described["model"])
        fields = dict(described["config"])
        hf = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = models.build_over(source, hf, parameters, buffers)
        if described["loss_chunks"] > 1:
            loss.in_chunks(model, described["loss_chunks"])
        return cls(model, source.autocast)

    def backward(self, inputs: Mapping[str, Tensor], divisor: float) -> float:
        """Forward and backward of one part: its loss, divided. The gradients are in `p.grad`."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            share = self.model(**inputs, use_cache=False).loss / divisor
        share.backward()
        return float(share.detach())


def describe(task: Task) -> dict[str, Any]:
    """The task's model as JSON, for `Work.of`."""
    return {
        "config": json.loads(task.model.config.to_json_string(use_diff=False)),
        "model": task.recipe.model.model_dump(mode="json"),
        "loss_chunks": task.recipe.train.loss_chunks,
    }


class CoTraining:
    """The batches of a run, of each of which the CPU trains some parts.

    `train_part` computes a part on the trainer's device, forward and backward, and returns its loss, divided, shape ().
    """

    def __init__(
        self,
        task: Task,
        opt: TrainingOptimizer,
        train_part: Callable[[Batch, float], Tensor],
        progress: Progress,
        most: int,
    ) -> None:
        """Start the CPU trainer, for at most so many parts. Raises `ClusterError` if it does not start."""
        lender = cast(object, opt)
        assert isinstance(lender, Optimizer), "others have no weights to lend"
        recipe = task.recipe
        self._count, self._seed, wanted = recipe.train.grad_accumulation, recipe.run.seed, recipe.train.cpu_parts
        self._planner = CpuPartsPlanner(self._count, most) if wanted == "auto" else None
        self._cpu_parts: int = 0 if wanted == "auto" else wanted
        self._train_part, self._say, self._device = train_part, progress.say, task.device
        cores: Sequence[int] = sorted(os.sched_getaffinity(0))
        threads = recipe.run.threads
        if task.device.type == "cuda":
            cores = next(cores for role, _, cores in lender.processes() if role == "optimizer")
            threads = len(cores)
        self._partner = lender.cotrain(
            describe(task),
            slots=most,
            input_bytes=4 * 8 * recipe.data.batch_size // self._count * recipe.data.sequence_length,
            cores=cores,
            threads=threads,
        )
        self.process: Process = (ADDRESS.role, self._partner.pid, cores)
        self.numbers: dict[str, float] = {}  # for the last step's record; times are of the last step that was read
        self._clock: Clock = CudaClock(task.device) if task.device.type == "cuda" else HostClock()
        self._ended: _Ended | None = None  # the last step, whose time is known once the next one begins
        self._unread = deque[tuple[_Ended, float]]()  # steps that may still run on the device, and their seconds
        self._began_s = 0.0
        self._steps, self._next_trial, self._trial = 0, FIRST_TRIAL, _NONE
        self._is_there, self._is_warm = True, False

    def step(self, step: int, batch: Batch) -> Tensor:
        """All backwards of step `step` (from 0). Returns the batch's mean loss, shape ()."""
        parts = list(batch.parts(self._count))
        self._begin(step, parts[0])
        last = self._count - 1
        first = last - self._cpu_parts
        total, own, adds = torch.zeros((), device=self._device), dict[int, Span](), list[Span]()
        began = self._clock.mark()

        def train(index: int) -> None:
            before = self._clock.mark()
            torch.manual_seed(self._seed_of(step, index))
            total.add_(self._train_part(*parts[index]))
            own[index] = before, self._clock.mark()

        for index in range(first)[:1]:
            train(index)
        jobs = self._hand_over(step, {index: parts[index] for index in range(first, last)})
        for index in range(first)[1:]:
            train(index)
        seconds = list[float]()
        for slot, (index, job) in enumerate(jobs.items()):
            if (computed := self._partner.receive(job)) is None:
                train(index)
                continue
            before = self._clock.mark()
            self._partner.add(slot, computed)
            total.add_(computed.loss)
            adds.append((before, self._clock.mark()))
            seconds.append(computed.seconds)
        train(last)
        self._ended = _Ended(
            cpu_part_s=fmean(seconds) if seconds else None,
            cpu_parts=self._cpu_parts,
            part=own[first - 1 if first else last],
            gap=(own[first - 1][1] if first else began, own[last][0]),
            adds=adds,
            marks=[began, *chain(*own.values(), *adds)],
        )
        self.numbers["cpu_parts"] = len(seconds)
        return total

    def _hand_over(self, step: int, parts: Mapping[int, tuple[Batch, float]]) -> dict[int, int]:
        """Give parts to the CPU trainer, by their places in the batch. Returns their jobs."""
        if parts:
            self._partner.lend()
        return {
            index: self._partner.compute(slot, _inputs(part), divisor, self._seed_of(step, index))
            for slot, (index, (part, divisor)) in enumerate(parts.items())
        }

    def _seed_of(self, step: int, part: int) -> int:
        return int(np.random.SeedSequence((self._seed, step, part)).generate_state(1, np.uint64)[0])

    def _begin(self, step: int, part: tuple[Batch, float]) -> None:
        """A step begins: read what is known of those before, and choose the parts of this one."""
        now_s = time.monotonic()
        if self._ended is not None:
            self._unread.append((self._ended, now_s - self._began_s))
        self._began_s, self._steps = now_s, self._steps + 1
        while self._unread and all(map(self._clock.passed, self._unread[0][0].marks)):
            ended = self._read(*self._unread.popleft())
            self.numbers = {name: value for name in RECORDED if (value := getattr(ended, name)) is not None}
            if self._planner is not None:
                self._planner.observe(ended)
        if self._partner.lost and self._is_there:
            self._is_there, self._cpu_parts = False, 0
            lost = f"the CPU trainer (process {self._partner.pid}) is lost: {self._partner.lost}"
            self._say(f"step {step + 1}: {lost}; from here on, all parts are trained without it")
        if self._is_there and self._planner is not None:
            self._choose(self._planner, step, part)

    def _choose(self, planner: CpuPartsPlanner, step: int, part: tuple[Batch, float]) -> None:
        """Plan, unless the CPU is trying out how long a part takes. That is a part of this step, computed twice."""
        if self._trial == _NONE and self._cpu_parts == 0 and self._steps == self._next_trial:
            self._next_trial *= 2
            [self._trial] = self._hand_over(step, {0: part}).values()
        if self._trial != _NONE:
            if (computed := self._partner.receive(self._trial, wait=False)) is None:
                return
            self._trial = _NONE
            if not self._is_warm:
                self._is_warm = True
                [self._trial] = self._hand_over(step, {0: part}).values()
                return
            planner.observe_cpu(computed.seconds)
        if planner.decide():
            self._cpu_parts = planner.cpu_parts
            self._say(
                f"step {step + 1}: the CPU trains {self._cpu_parts} of {self._count} parts of each batch, since "
                f"{planner.why}"
            )

    def _read(self, ended: _Ended, step_s: float) -> Step:
        adds_s = [self._clock.seconds(span) for span in ended.adds]
        step = Step(
            cpu_parts=ended.cpu_parts,
            step_s=step_s,
            gpu_part_s=self._clock.seconds(ended.part),
            cpu_part_s=ended.cpu_part_s,
            add_s=fmean(adds_s) if adds_s else 0.0,
            idle_s=max(self._clock.seconds(ended.gap) - sum(adds_s), 0.0),
        )
        self._clock.recycle(ended.marks)
        return step

    def close(self) -> None:
        self._partner.close()


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step whose backwards are launched. Spans are on the trainer's device.

    `part`: one of its parts. `adds`: the CPU's gradients came into the sums. `gap`: between the other parts and the
    last one. `marks`: all of the step.
    """

    cpu_parts: int
    cpu_part_s: float | None
    part: Span
    gap: Span
    adds: list[Span]
    marks: list[Mark]


def _inputs(part: Batch) -> dict[str, Tensor]:
    return {name: value for name, value in part.inputs(torch.device("cpu")).items() if isinstance(value, Tensor)}


@contextmanager
def beside(
    task: Task, opt: TrainingOptimizer, train_part: Callable[[Batch, float], Tensor], progress: Progress
) -> Iterator[CoTraining | None]:
    """The co-training of a run, if its recipe asks for it. Ends it at the end of the block.

    Raises `CapacityError` if host memory has no room for the gradients, and what `CoTraining` raises. With
    `cpu_parts: auto` and no room for those of one part, there is none.
    """
    count, wanted = task.recipe.train.grad_accumulation, task.recipe.train.cpu_parts
    if wanted == 0:
        yield None
        return
    slot_bytes = sum(parameter.nbytes for parameter in task.model.parameters())
    room = host_bound(None) // slot_bytes
    if wanted != "auto" and wanted > room:
        raise CapacityError(
            f"train.cpu_parts: {wanted} needs {wanted * slot_bytes / 1e9:.2f} GB of host memory for gradients, and "
            f"there is room for {room * slot_bytes / 1e9:.2f} GB"
        )
    most = min(count - 1, room) if wanted == "auto" else wanted
    if not most:
        progress.say(f"the CPU trains no part: the gradients of one need {slot_bytes / 1e9:.2f} GB of host memory")
        yield None
        return
    with closing(CoTraining(task, opt, train_part, progress, most)) as cotraining:
        yield cotraining
