"""Co-training in a recipe: the CPU trains some parts of each batch beside the GPU (`train.cpu_parts`).

The loop calls `beside`; what it gives to `Optimizer.cotrain` is here, where the CPU trainer finds it, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from hytrain.cotraining.shares import CoTraining
from hytrain.optim import Optimizer
from hytrain.recipe import config, loss
from hytrain.recipe import model as models
from hytrain.recipe.batches import Batch
from hytrain.recipe.optimizer import TrainingOptimizer
from hytrain.recipe.progress import Progress
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


def beside(task: Task, opt: TrainingOptimizer, progress: Progress) -> CoTraining | None:
    """The co-training of a run, if its recipe asks for it. It ends with the optimizer."""
    train, lender = task.recipe.train, cast(object, opt)
    if train.cpu_parts == 0:
        return None
    assert isinstance(lender, Optimizer), "others have no weights to lend"
    loss_of = partial(share, autocast=task.recipe.model.autocast)
    cotraining = lender.cotrain(
        partial(build, **describe(task)), loss_of, parts=train.grad_accumulation, cpu_parts=train.cpu_parts
    )
    cotraining.say = progress.say
    return cotraining
