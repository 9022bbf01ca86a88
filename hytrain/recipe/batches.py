"""Batches of token sequences. They depend on the seed and the step alone, so a resumed run sees the same ones.

`task` gets the training batch of each step and, once, the fixed validation batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
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


class Batches:
    """Endless batches: in epochs, each in an order of its own, or at random places. `rows`: the sequences of an epoch.

    A sequence begins at each of its `places`; those `stride` apart do not overlap.
    """

    def __init__(self, sequences: Sequences, seed: int, batch_size: int, *, in_epochs: bool) -> None:
        self._sequences, self._seed, self._size, self._in_epochs = sequences, seed, batch_size, in_epochs
        self._epoch, self._order = -1, np.zeros(0, np.int64)
        self.rows = _apart(sequences)

    def at(self, step: int) -> Batch:
        """The batch of one step (from 0). In epochs, one at the end of an epoch goes on with the next."""
        if self._in_epochs:
            numbers = range(step * self._size, (step + 1) * self._size)
            places = self._sequences.stride * np.array([*map(self._shuffled, numbers)])
        else:
            places = _generator(self._seed, step).integers(self._sequences.places, size=self._size)
        return self._sequences.batch(places)

    def _shuffled(self, number: int) -> int:
        epoch, place = divmod(number, self.rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, _generator(self._seed, epoch).permutation(self.rows)
        return int(self._order[place])


class RandomBatches:
    """Uniformly random tokens, for measuring speed: there is no end to them."""

    rows = None

    def __init__(self, vocab_size: int, seed: int, batch_size: int, sequence_length: int) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.shape = (batch_size, sequence_length)

    def at(self, step: int) -> Batch:
        tokens = torch.from_numpy(_generator(self.seed, step).integers(self.vocab_size, size=self.shape))
        return Batch(tokens, tokens)


class Windows:
    """Windows of a text."""

    def __init__(self, tokens: Tensor, length: int, part: str = "training") -> None:
        if len(tokens) < length:
            raise ConfigError(
                f"The {part} text has {len(tokens)} tokens, less than one window of {length}; "
                "give more text or a smaller data.sequence_length."
            )
        self.tokens, self.stride, self.places = tokens, length, len(tokens) - length + 1

    def batch(self, places: Any) -> Batch:
        windows = self.tokens[torch.as_tensor(places)[:, None] + torch.arange(self.stride)].long()
        return Batch(windows, windows)


class Rows:
    """Examples in sequences: one in each, or packed."""

    stride = 1

    def __init__(self, examples: Sequence[Example], sequence_length: int, packing: bool, pad: int) -> None:
        self.examples = examples
        self.length = sequence_length
        self.packing = packing
        self.pad = pad
        lengths = [len(example.tokens) for example in examples]
        self.rows = pack(lengths, sequence_length) if packing else [[i] for i in range(len(lengths))]
        self.places = len(self.rows)

    def batch(self, places: Any) -> Batch:
        """Packed rows have `sequence_length` tokens, others as many as the longest of them."""
        members = [[self.examples[i] for i in self.rows[row]] for row in places]
        width = self.length if self.packing else max(len(example.tokens) for [example] in members)
        tokens = np.full((len(members), width), self.pad, np.int64)
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


def steps_of(epochs: float, rows: int, batch_size: int) -> int:
    """The steps that see every row `epochs` times. Rows of a further epoch fill the last batch."""
    return max(1, math.ceil(epochs * rows / batch_size))


def spread(sequences: Sequences, count: int, batch_size: int) -> Iterator[Batch]:
    """At most `count` batches of sequences spread evenly over all.

    A short text gives fewer, because windows do not overlap, except where their positions are rounded.
    """
    chosen = min(count * batch_size, _apart(sequences))
    places = np.linspace(0, sequences.places - 1, chosen).astype(np.int64)
    for first in range(0, chosen, batch_size):
        yield sequences.batch(places[first : first + batch_size])


def _apart(sequences: Sequences) -> int:
    """How many sequences there are that do not overlap."""
    return (sequences.places - 1) // sequences.stride + 1


Sequences = Windows | Rows


def _generator(seed: int, step: int) -> np.random.Generator:
    return np.random.default_rng((seed, step))
