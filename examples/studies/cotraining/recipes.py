"""Co-training of a recipe: the CPU trains some parts of each batch beside the GPU.

`train` has `recipe.loop` train, with a backward in which parts are shared. The functions that the CPU trainer calls are
here, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from examples.studies.cotraining.shares import CoTraining, cotrain
from hytrain.errors import UnsupportedError
from hytrain.optim import Optimizer
from hytrain.recipe import config, loop, loss
from hytrain.recipe import model as models
from hytrain.recipe.batches import Batch
from hytrain.recipe.optimizer import Factory
from hytrain.recipe.report import Summary
from hytrain.recipe.task import Task

_CPU = torch.device("cpu")


def describe(task: Task) -> dict[str, Any]:
    """The task's model as JSON, for `build`."""
    return {
        "fields": json.loads(task.model.config.to_json_string(use_diff=False)),
        "model": task.recipe.model.model_dump(mode="json"),
        "loss_chunks": task.recipe.train.loss_chunks,
    }


def build(*, fields: Mapping[str, Any], model: Mapping[str, Any], loss_chunks: int) -> nn.Module:
    """The model that was described, without memory."""
    kind = fields["model_type"]
    hf = AutoConfig.for_model(kind, **{name: value for name, value in fields.items() if name != "model_type"})
    module = models.build_empty(config.Model.model_validate(model), hf)
    if loss_chunks > 1:
        loss.in_chunks(module, loss_chunks)
    return cast(nn.Module, module)


def micro_batch(part: Batch, divisor: float, device: torch.device = _CPU) -> dict[str, Any]:
    """A part of a batch on the device, and what its loss is divided by."""
    return {"inputs": part.inputs(device), "divisor": divisor}


def share(model: Any, batch: Mapping[str, Any], *, autocast: bool) -> Tensor:
    """The loss of a micro-batch, divided, shape ()."""
    with torch.autocast(batch["inputs"]["input_ids"].device.type, torch.bfloat16, enabled=autocast):
        return cast(Tensor, model(**batch["inputs"]).loss / batch["divisor"])


class Beside:
    """A recipe's backward, in which the CPU trains `cpu_parts` of a batch's parts. It begins with the first step."""

    def __init__(self, cpu_parts: int | str) -> None:
        self._cpu_parts = cpu_parts
        self._cotraining: CoTraining | None = None

    def __call__(self, task: Task, opt: Optimizer, parts: Iterable[tuple[Batch, float]]) -> Tensor:
        if self._cotraining is None:
            loss_of = partial(share, autocast=task.recipe.model.autocast)
            build_it, count = partial(build, **describe(task)), task.recipe.train.grad_accumulation
            self._cotraining = cotrain(opt, task.model, build_it, loss_of, parts=count, cpu_parts=self._cpu_parts)
            self._cotraining.say = lambda sentence: print(sentence, file=sys.stderr, flush=True)
        losses = self._cotraining.backward([micro_batch(*part) for part in parts])
        opt.log(opt.statistics().step + 1, **self._cotraining.numbers)
        return cast(Tensor, sum(losses, torch.zeros((), device=task.device)))

    def close(self) -> None:
        if self._cotraining is not None:
            self._cotraining.close()


def train(
    recipe: config.Recipe, run_dir: Path, cpu_parts: int | str, optimizer_factory: Factory | None = None
) -> Summary:
    """Train the recipe in the folder, with plain lines in place of a progress bar.

    Raises what `recipe.loop.train` and `cotrain` raise, and `UnsupportedError` for a recipe that cannot be shared.
    """
    if recipe.lora is not None or recipe.train.compile is not None or recipe.parallel.context > 1:
        raise UnsupportedError(
            "co-training supports neither lora, whose frozen weights are only on the GPU, nor train.compile, nor "
            "parallel.context, where each rank trains a part of the same sequences"
        )
    with closing(Beside(cpu_parts)) as backward:
        return loop.train(recipe, run_dir, optimizer_factory, terminal=False, backward=backward)
