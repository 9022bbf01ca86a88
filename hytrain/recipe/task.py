"""The parts of a run that a recipe describes, except the optimizer: device, data, tokenizer and model.

    recipe ─▶ device
          ├─▶ text ─▶ split ─▶ tokenizer ─▶ batches, validation windows
          ├─▶ rows ─▶ split ─▶ tokenizer ─▶ examples ─▶ batches, validation examples
          └─▶ model: new, from model.path, or from the checkpoint that is resumed; with adapters, if it has `lora`

The loop calls `assemble` once. Its errors are ConfigErrors, raised before any process is started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from hytrain.errors import ConfigError
from hytrain.recipe import adapters, chat, config, loss, packing, tables, text, tokenizer
from hytrain.recipe import model as models
from hytrain.recipe.batches import Batch, Batches, RandomBatches, Rows, Windows, spread, steps_of
from hytrain.recipe.config import Recipe
from hytrain.recipe.context import Context
from hytrain.recipe.model import Cost
from hytrain.recipe.parallel import Job
from hytrain.recipe.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Corpus:
    """The source of batches. Random tokens have no tokenizer and no validation part."""

    tokenizer: TextTokenizer | None
    training: Batches | RandomBatches
    validation: tuple[Batch, ...] = ()
    bytes_per_token: float | None = None  # of the validation text, or of its answers
    conversations: bool | None = None  # whether prompts are those of conversations; None: of a text that goes on

    def opening(self, prompt: str) -> tuple[list[int], str]:
        """The tokens that the model continues to answer a prompt, and the text that ends its answer, or ""."""
        assert self.tokenizer is not None, "random tokens have no text"
        if self.conversations is None:
            return self.tokenizer.encode(prompt.encode()).tolist(), ""
        return chat.opening(self.tokenizer, prompt, self.conversations)


@dataclass(frozen=True, slots=True)
class Task:
    """All parts of a run except the optimizer."""

    recipe: Recipe
    device: torch.device
    model: Any  # a Hugging Face model for causal language modelling
    corpus: Corpus
    cost: Cost
    peak_tflops: float | None  # of all ranks
    job: Job = field(default_factory=Job)

    def batch(self, step: int) -> Batch:
        """The step's batch, in host memory."""
        return self.corpus.training.at(step)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.model.autocast)


def assemble(
    recipe: Recipe, checkpoint: Path | None, tell: Callable[[str], None] = lambda line: None, *, deferred: bool = False
) -> Task:
    """Builds every part, and tells what it begins. A checkpoint's model and tokenizer replace the recipe's.

    With `deferred`, the model gets its values from `hytrain.AdamW`, unless something else needs them before.

    Several ranks call it together. Raises ConfigError, on all of them.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of loading and saving: it would break the training's bar
    device = models.device(recipe.train.device)
    job = Job.of(recipe, device)
    if device.type == "cpu":
        torch.set_num_threads(recipe.run.threads)
    source = recipe.model
    if checkpoint is not None and recipe.lora is None:
        source = source.model_copy(update={"path": checkpoint, "config": None})
    torch.manual_seed(recipe.run.seed)
    length = recipe.data.sequence_length
    with job.ranks.together():
        models.require_folder(source.path)
        if recipe.data.kind == "random":
            hf = models.configuration(source, None, length)
            vocab_size, data = hf.get_text_config().vocab_size, recipe.data
            corpus = Corpus(None, RandomBatches(vocab_size, recipe.run.seed, data.batch_size, data.sequence_length))
        else:
            tell(f"reading {', '.join(map(str, recipe.data.paths))}")
            corpus = (_read_text if recipe.data.kind == "text" else _read_examples)(recipe, checkpoint)
            assert corpus.tokenizer is not None
            hf = models.configuration(source, corpus.tokenizer.vocab_size, length)
        if recipe.train.epochs is not None:
            assert corpus.training.rows is not None, "refused with the recipe"
            steps = steps_of(recipe.train.epochs, corpus.training.rows, recipe.data.batch_size)
            recipe = config.in_steps(recipe, steps)
        tell("building the model")
        if job.mesh is not None:
            model = models.build_sharded(source, hf, device, job.mesh, length)
            torch.manual_seed(job.seed(recipe.run.seed))
        elif deferred and recipe.lora is None and not recipe.data.packing:
            model = models.build_deferred(source, hf, device, length)
        else:
            model = models.build(source, hf, device)
            if source.path is None:
                models.try_out(model, hf, length)
    if recipe.lora is not None:
        model = adapters.adapt(model, recipe.lora, checkpoint)
    if recipe.data.packing:
        packing.refuse_leaks(model, device)
    context = None if job.context is None else Context(job.context)
    if context is not None:
        context.check(model, device, length)
    if recipe.train.loss_chunks > 1 or context is not None:
        loss.in_chunks(model, recipe.train.loss_chunks, context)
    if recipe.train.compile is not None:
        with job.ranks.together():
            models.compile_blocks(model, device)
    cost, peak = models.cost(model, hf, length), models.peak_tflops(device)
    return Task(recipe, device, model, corpus, cost, None if peak is None else peak * job.ranks.world, job)


def _read_text(recipe: Recipe, checkpoint: Path | None) -> Corpus:
    data = recipe.data
    column = data.text_column
    found = text.read(data.paths) if column is None else text.joined(tables.column(data.paths, column), data.paths)
    seen, unseen = text.split(found, data.validation)
    words = _tokenizer(recipe, checkpoint, seen)
    held_out = words.encode(unseen)
    validation = spread(
        Windows(held_out, data.sequence_length, "validation"), recipe.train.eval_batches, data.batch_size
    )
    training = Windows(words.encode(seen), data.sequence_length)
    return Corpus(
        tokenizer=words,
        training=Batches(training, recipe.run.seed, data.batch_size, in_epochs=recipe.train.epochs is not None),
        validation=tuple(validation),
        bytes_per_token=len(unseen) / len(held_out),
    )


def _read_examples(recipe: Recipe, checkpoint: Path | None) -> Corpus:
    data = recipe.data
    rows = list(tables.rows(data.paths))
    cut = len(rows) - max(1, round(len(rows) * data.validation))
    if cut < 1:
        raise ConfigError(f"data.paths has {len(rows)} rows, but one to train on and one to hold out are needed.")
    said = (part.encode() for _, row in rows[:cut] for part in chat.texts(row))
    words = _tokenizer(recipe, checkpoint, text.DOCUMENT_GAP.join(said))
    training, held_out = (
        Rows(
            chat.examples(words, part, data.sequence_length),
            data.sequence_length,
            data.packing,
            words.hf.pad_token_id or 0,
        )
        for part in (rows[:cut], rows[cut:])
    )
    answers = [torch.from_numpy(example.tokens[example.learnt]) for example in held_out.examples]
    return Corpus(
        tokenizer=words,
        training=Batches(training, recipe.run.seed, data.batch_size, in_epochs=True),
        validation=tuple(spread(held_out, recipe.train.eval_batches, data.batch_size)),
        bytes_per_token=sum(len(words.decode(answer).encode()) for answer in answers) / sum(map(len, answers)),
        conversations=not isinstance(rows[0][1].get("prompt"), str),
    )


def _tokenizer(recipe: Recipe, checkpoint: Path | None, training_text: bytes) -> TextTokenizer:
    if checkpoint is not None:
        return tokenizer.load(checkpoint)
    words = tokenizer.build(recipe.tokenizer, recipe.model.path, training_text)
    chat.set_template(words, recipe.tokenizer.chat_template)
    return words
