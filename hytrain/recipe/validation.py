"""Validation: loss and accuracy over the held-out data, in units that are comparable across tokenizers.

The loop calls `evaluate` between two steps and at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hytrain.recipe.loss import hits_of
from hytrain.recipe.sharding import inference
from hytrain.recipe.task import Task


@dataclass(frozen=True, slots=True)
class Validation:
    """Mean loss of the next token, per token and per byte of text, and the fraction predicted correctly.

    Nats per byte are nats per token divided by the mean bytes per token of the validation text.
    """

    nats_per_token: float
    nats_per_byte: float
    accuracy: float

    def __str__(self) -> str:
        return (
            f"loss {self.nats_per_byte:.4f} nats per byte ({self.nats_per_token:.4f} per token), "
            f"top-1 accuracy {self.accuracy:.1%}"
        )


def evaluate(task: Task) -> Validation | None:
    """Runs the model over all validation batches; None if there are none. The sums are read from the device once.

    Several ranks share the rows of each batch. One that gets none runs another's, since all call the model together.
    """
    if task.corpus.bytes_per_token is None:
        return None
    rank, ranks = task.job.data_rank, task.job.data_ranks
    nats = torch.zeros((), dtype=torch.float64, device=task.device)
    hits = torch.zeros((), dtype=torch.int64, device=task.device)
    predicted = 0
    with inference(task.model):
        for batch in task.corpus.validation:
            predicted += batch.learnt
            part = batch.rows(slice(rank % len(batch.tokens), None, ranks))
            inputs = part.inputs(task.device)
            with task.autocast():
                output = task.model(**inputs)
            if rank < len(batch.tokens):
                nats += output.loss.double() * part.learnt
                hits += hits_of(output, inputs["labels"])
    per_token = float(task.job.total(nats)) / predicted
    return Validation(per_token, per_token / task.corpus.bytes_per_token, int(task.job.total(hits)) / predicted)
