"""The project's demo text as tokens of a byte-level BPE, for GPT-2: windows to train on, and what was learned.

The first job tokenizes and leaves the tokens in the temporary folder, since that takes seconds.
"""

from __future__ import annotations

import lzma
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from benchmarks.parts import SHAPES, Job

TEXT: Final = Path(__file__).resolve().parent.parent / "examples" / "data" / "sotu.txt.xz"
#: The end of the text is held out: this share of its bytes.
HELD_OUT: Final = 0.05
HELD_OUT_BATCHES: Final = 4


def tokens(vocabulary: int) -> tuple[Tensor, Tensor]:
    """The tokens to train on and those held out; the vocabulary is learned from the first."""
    path = Path(tempfile.gettempdir()) / f"benchmarks-text-{vocabulary}.pt"
    if not path.exists():
        from hytrain.recipe import config, tokenizer

        text = lzma.decompress(TEXT.read_bytes())
        cut = text.index(b"\n", int((1 - HELD_OUT) * len(text)))
        words = tokenizer.build(config.Tokenizer(kind="bpe", vocab_size=vocabulary), None, text[:cut])
        own = path.with_suffix(f".{os.getpid()}")
        torch.save((words.encode(text[:cut]), words.encode(text[cut:])), own)
        own.rename(path)
    train, held_out = torch.load(path)
    return train, held_out


def windows(job: Job, batch: int, *, count: int, seed: int, held: bool = False) -> list[Tensor]:
    """`count` batches on the device, (batch, sequence + 1) each, from anywhere in the text."""
    source = tokens(SHAPES[job.shape].vocabulary)[held].long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(source) - job.sequence, (count, batch, 1), generator=generator)
    return list(source[starts + torch.arange(job.sequence + 1)].to(job.device))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Of each next token; `batch` as from `windows`."""
    logits: Tensor = model(input_ids=batch[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def held_out(model: nn.Module, job: Job, batch: int) -> dict[str, Any]:
    """Loss, and the share of tokens that the model predicts, of a part of the text that it does not train on."""
    losses, hits = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for each in windows(job, batch, count=HELD_OUT_BATCHES, seed=0, held=True):
            logits = model(input_ids=each[:, :-1]).logits
            whole = (logits.full_tensor() if isinstance(logits, DTensor) else logits).flatten(0, 1).float()
            losses.append(cross_entropy(whole, each[:, 1:].flatten()))
            hits.append((whole.argmax(-1) == each[:, 1:].flatten()).float().mean())
    return {
        "held_out_loss": round(float(sum(losses)) / len(losses), 4),
        "accuracy": round(float(sum(hits)) / len(hits), 4),
    }
