"""Batches of token sequences. They depend on the seed and the step alone, so a resumed run sees the same ones.

`task` gets the training batch of each step and, once, the fixed validation batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hytrain.errors import ConfigError
from hytrain.recipe.chat import Example
from hytrain.recipe.packing import pack
from hytrain.tensors import on_device

IGNORED = -100  # the label of a token that is not learnt, as in torch and Transformers


@dataclass(frozen=True, slots=True)
class Batch:
    """What a model's forward takes: int64, (batch, sequence) each, in host memory.

    Padding is at the ends of the rows. Packed rows have `positions` that begin anew with each example, others a `mask`
    that is 1 where no padding is.
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None
    padding: int = 0  # tokens

    @property
    def learnt(self) -> int:
        """How many tokens the loss is the mean of."""
        return int((self.labels[:, 1:] != IGNORED).sum())

    def parts(self, count: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[Batch, float]]:
        """One rank's share of each of `count` parts, and what to divide its mean loss by.

        The quotients' sum over the parts, averaged over the ranks, is the mean loss of the batch.
        """
        rows = len(self.tokens) // (count * ranks)
        for first in range(rank * rows, len(self.tokens), ranks * rows):
            part = self.rows(slice(first, first + rows))
            yield part, self.learnt / (part.learnt * ranks)

    def rows(self, which: slice) -> Batch:
        """Some of the sequences, as long as they are."""
        fields = (self.tokens, self.labels, self.mask, self.positions)
        return Batch(*(None if field is None else field[which] for field in fields))  # type: ignore[arg-type]

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """The arguments of the model's forward, on the device.

        Training needs no cache of keys and values: packed examples would mix in it, and compiled blocks would be
        compiled anew for each layer of it.
        """
        named = {"input_ids": self.tokens, "labels": self.labels, "attention_mask": self.mask}
        tensors = {
            name: on_device(tensor, device)
            for name, tensor in (named | {"position_ids": self.positions}).items()
            if tensor is not None
        }
        return {**tensors, "use_cache": False}


class Source(Protocol):
    """Training batches by step."""

    @property
    def rows(self) -> int | None:
        """The sequences of one epoch, or None if there is no end to them."""

    def at(self, step: int) -> Batch:
        """The batch of one step (from 0)."""


class Shuffled:
    """Endless epochs over `count` rows, each in an order of its own."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        self._epoch = -1
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)

    def at(self, step: int, size: int) -> list[int]:
        """The rows of a step's batch. A batch at the end of an epoch goes on with the next."""
        return [self._row(i) for i in range(step * size, (step + 1) * size)]

    def _row(self, i: int) -> int:
        epoch, place = divmod(i, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, _generator(self.seed, epoch).permutation(self.count)
        return int(self._order[place])


def steps_of(epochs: float, rows: int, batch_size: int) -> int:
    """The steps that see every row `epochs` times. Rows of a further epoch fill the last batch."""
    return max(1, math.ceil(epochs * rows / batch_size))


class TextBatches:
    """Windows of a text: at random positions or, in epochs, side by side in a random order."""

    def __init__(
        self, tokens: Tensor, seed: int, batch_size: int, sequence_length: int, in_epochs: bool = False
    ) -> None:
        _refuse_short(tokens, sequence_length, "training")
        self.tokens = tokens
        self.seed = seed
        self.shape = (batch_size, sequence_length)
        self.rows = len(tokens) // sequence_length
        self._order = Shuffled(self.rows, seed) if in_epochs else None

    def at(self, step: int) -> Batch:
        batch_size, length = self.shape
        if self._order is None:
            starts = _generator(self.seed, step).integers(len(self.tokens) - length + 1, size=batch_size)
        else:
            starts = np.array(self._order.at(step, batch_size)) * length
        return _windows(self.tokens, starts, length)


class RandomBatches:
    """Uniformly random tokens, for measuring speed."""

    rows = None

    def __init__(self, vocab_size: int, seed: int, batch_size: int, sequence_length: int) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.shape = (batch_size, sequence_length)

    def at(self, step: int) -> Batch:
        tokens = torch.from_numpy(_generator(self.seed, step).integers(self.vocab_size, size=self.shape))
        return Batch(tokens, tokens)


class Rows:
    """Examples in sequences: one in each, or packed."""

    def __init__(self, examples: Sequence[Example], sequence_length: int, packing: bool, pad: int) -> None:
        self.examples = examples
        self.length = sequence_length
        self.packing = packing
        self.pad = pad
        lengths = [len(example.tokens) for example in examples]
        self.rows = pack(lengths, sequence_length) if packing else [[i] for i in range(len(lengths))]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Packed rows have `sequence_length` tokens, others as many as the longest of them."""
        members = [[self.examples[i] for i in self.rows[row]] for row in rows]
        width = self.length if self.packing else max(len(example.tokens) for [example] in members)
        tokens = np.full((len(rows), width), self.pad, np.int64)
        labels = np.full_like(tokens, IGNORED)
        mask, positions = np.zeros_like(tokens), np.zeros_like(tokens)
        for row, examples in enumerate(members):
            end = 0
            for example in examples:
                start, end = end, end + len(example.tokens)
                tokens[row, start:end] = example.tokens
                labels[row, start:end] = np.where(example.learnt, example.tokens, IGNORED)
                positions[row, start:end] = np.arange(end - start)
            positions[row, end:] = np.arange(width - end)
            mask[row, :end] = 1
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            mask=None if self.packing else torch.from_numpy(mask),
            positions=torch.from_numpy(positions) if self.packing else None,
            padding=int((mask == 0).sum()),
        )


class ExampleBatches:
    """Rows of examples in epochs, each in an order of its own."""

    def __init__(self, rows: Rows, seed: int, batch_size: int) -> None:
        self.rows = len(rows.rows)
        self.batch_size = batch_size
        self._rows = rows
        self._order = Shuffled(self.rows, seed)

    def at(self, step: int) -> Batch:
        return self._rows.batch(self._order.at(step, self.batch_size))


def validation_windows(tokens: Tensor, count: int, batch_size: int, sequence_length: int) -> Iterator[Batch]:
    """At most `count` batches of windows spread evenly over the tokens.

    A short text gives fewer, because windows do not overlap, except where their positions are rounded.
    """
    _refuse_short(tokens, sequence_length, "validation")
    windows = min(count * batch_size, len(tokens) // sequence_length)
    starts = np.linspace(0, len(tokens) - sequence_length, windows).astype(np.int64)
    for first in range(0, windows, batch_size):
        yield _windows(tokens, starts[first : first + batch_size], sequence_length)


def validation_examples(rows: Rows, count: int, batch_size: int) -> Iterator[Batch]:
    """At most `count` batches of rows spread evenly over all."""
    chosen = np.linspace(0, len(rows.rows) - 1, min(count * batch_size, len(rows.rows))).astype(np.int64)
    for first in range(0, len(chosen), batch_size):
        yield rows.batch(chosen[first : first + batch_size].tolist())


def _generator(seed: int, step: int) -> np.random.Generator:
    return np.random.default_rng((seed, step))


def _windows(tokens: Tensor, starts: NDArray[np.int64], length: int) -> Batch:
    windows = tokens[torch.from_numpy(starts)[:, None] + torch.arange(length)].long()
    return Batch(windows, windows)


def _refuse_short(tokens: Tensor, length: int, part: str) -> None:
    if len(tokens) < length:
        raise ConfigError(
            f"The {part} text has {len(tokens)} tokens, less than one window of {length}; "
            "give more text or a smaller data.sequence_length."
        )
