"""Validation: loss and accuracy over the held-out data, in units that are comparable across tokenizers.

The loop calls `evaluate` between two steps and at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


@torch.no_grad()
def evaluate(task: Task) -> Validation | None:
    """Runs the model over all validation batches; None if there are none. The sums are read from the device once."""
    if task.corpus.bytes_per_token is None:
        return None
    task.model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=task.device)
    hits = torch.zeros((), dtype=torch.int64, device=task.device)
    predicted = 0
    for batch in task.corpus.validation:
        inputs = batch.inputs(task.device)
        with task.autocast():
            output = task.model(**inputs)
        nats += output.loss.double() * batch.learnt
        hits += (output.logits[:, :-1].argmax(-1) == inputs["labels"][:, 1:]).sum()  # no token is -100
        predicted += batch.learnt
    task.model.train()
    per_token = float(nats) / predicted
    return Validation(per_token, per_token / task.corpus.bytes_per_token, int(hits) / predicted)
