"""Batches of token windows. They depend on the seed and the step alone, so a resumed run sees the same ones.

`task` gets the training batch of each step and, once, the fixed validation windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hytrain.errors import ConfigError


class Source(Protocol):
    """Training batches by step."""

    def at(self, step: int) -> Tensor:
        """The tokens of one step: int64, (batch, sequence), in host memory."""


class TextBatches:
    """Windows of a text at random positions."""

    def __init__(self, tokens: Tensor, seed: int, batch_size: int, sequence_length: int) -> None:
        _refuse_short(tokens, sequence_length, "training")
        self.tokens = tokens
        self.seed = seed
        self.shape = (batch_size, sequence_length)

    def at(self, step: int) -> Tensor:
        batch_size, length = self.shape
        starts = _generator(self.seed, step).integers(len(self.tokens) - length + 1, size=batch_size)
        return _windows(self.tokens, starts, length)


class RandomBatches:
    """Uniformly random tokens, for measuring speed."""

    def __init__(self, vocab_size: int, seed: int, batch_size: int, sequence_length: int) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.shape = (batch_size, sequence_length)

    def at(self, step: int) -> Tensor:
        return torch.from_numpy(_generator(self.seed, step).integers(self.vocab_size, size=self.shape))


def validation_batches(tokens: Tensor, count: int, batch_size: int, sequence_length: int) -> Iterator[Tensor]:
    """At most `count` batches of windows spread evenly over the tokens.

    A short text gives fewer, because windows do not overlap, except where their positions are rounded.
    """
    _refuse_short(tokens, sequence_length, "validation")
    windows = min(count * batch_size, len(tokens) // sequence_length)
    starts = np.linspace(0, len(tokens) - sequence_length, windows).astype(np.int64)
    for first in range(0, windows, batch_size):
        yield _windows(tokens, starts[first : first + batch_size], sequence_length)


def _generator(seed: int, step: int) -> np.random.Generator:
    return np.random.default_rng((seed, step))


def _windows(tokens: Tensor, starts: NDArray[np.int64], length: int) -> Tensor:
    return tokens[torch.from_numpy(starts)[:, None] + torch.arange(length)].long()


def _refuse_short(tokens: Tensor, length: int, part: str) -> None:
    if len(tokens) < length:
        raise ConfigError(
            f"The {part} text has {len(tokens)} tokens, less than one window of {length}; "
            "give more text or a smaller data.sequence_length."
        )
