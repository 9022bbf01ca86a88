"""The parts of a run that a recipe describes, except the optimizer: device, data, tokenizer and model.

    recipe ─▶ device
          ├─▶ text ─▶ split ─▶ tokenizer ─▶ batches, validation windows
          └─▶ model: new, from model.path, or from the checkpoint that is resumed

The loop calls `assemble` once. Its errors are ConfigErrors, raised before any process is started.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from hytrain.recipe import model as models
from hytrain.recipe import text, tokenizer
from hytrain.recipe.batches import RandomBatches, Source, TextBatches, validation_batches
from hytrain.recipe.config import Recipe
from hytrain.recipe.model import Cost
from hytrain.recipe.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Corpus:
    """The source of batches. Random tokens have no tokenizer and no validation part."""

    tokenizer: TextTokenizer | None
    training: Source
    validation: tuple[Tensor, ...] = ()
    bytes_per_token: float | None = None  # of the validation text


@dataclass(frozen=True, slots=True)
class Task:
    """All parts of a run except the optimizer."""

    recipe: Recipe
    device: torch.device
    model: Any  # a Hugging Face model for causal language modelling
    corpus: Corpus
    cost: Cost
    peak_tflops: float | None

    def batch(self, step: int) -> Tensor:
        """The step's tokens on the device: int64, (batch, sequence)."""
        tokens = self.corpus.training.at(step)
        if self.device.type == "cpu":
            return tokens
        return tokens.pin_memory().to(self.device, non_blocking=True)  # a pageable copy would wait for the GPU

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.model.autocast)


def assemble(recipe: Recipe, checkpoint: Path | None) -> Task:
    """Builds every part. A checkpoint's model and tokenizer replace the recipe's. Raises ConfigError."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of loading and saving: it would break the training's bar
    device = models.device(recipe.train.device)
    if device.type == "cpu":
        torch.set_num_threads(recipe.run.threads)
    source = recipe.model
    if checkpoint is not None:
        source = source.model_copy(update={"path": checkpoint, "config": None})
    torch.manual_seed(recipe.run.seed)
    if recipe.data.kind == "random":
        hf = models.configuration(source, None, recipe.data.sequence_length)
        corpus = Corpus(None, RandomBatches(hf.get_text_config().vocab_size, *_shape(recipe)))
    else:
        corpus, vocab_size = _read_corpus(recipe, checkpoint)
        hf = models.configuration(source, vocab_size, recipe.data.sequence_length)
    model = models.build(source, hf, device)
    cost = models.cost(model, hf, recipe.data.sequence_length)
    return Task(recipe, device, model, corpus, cost, models.peak_tflops(device))


def _read_corpus(recipe: Recipe, checkpoint: Path | None) -> tuple[Corpus, int]:
    data = recipe.data
    parts = text.split(text.read(data.paths), data.validation)
    words = (
        tokenizer.load(checkpoint) if checkpoint else tokenizer.build(recipe.tokenizer, recipe.model.path, parts.train)
    )
    held_out = words.encode(parts.validation)
    windows = validation_batches(held_out, recipe.train.eval_batches, data.batch_size, data.sequence_length)
    corpus = Corpus(
        tokenizer=words,
        training=TextBatches(words.encode(parts.train), *_shape(recipe)),
        validation=tuple(windows),
        bytes_per_token=len(parts.validation) / len(held_out),
    )
    return corpus, words.vocab_size


def _shape(recipe: Recipe) -> tuple[int, int, int]:
    return recipe.run.seed, recipe.data.batch_size, recipe.data.sequence_length
