"""Tokenizers: text to token numbers and back. `AutoTokenizer` can load each from a checkpoint.

The trainer makes one at the start of a run, or loads the checkpoint's when it resumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hytrain.errors import ConfigError
from hytrain.recipe import config

_FAST: Any = PreTrainedTokenizerFast  # its constructor has no types
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")  # one is there
CHUNK_BYTES = 1 << 16  # large enough that cuts are rare, small enough to encode on all cores


class TextTokenizer:
    """A Hugging Face tokenizer over bytes, with a shortcut if a token is a byte.

    Attributes: `hf`, the tokenizer itself; `vocab_size`, with special tokens; `is_bytes`, whether a token is a byte.
    """

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.vocab_size: int = len(hf)
        self.is_bytes: bool = hf.get_vocab() == _byte_vocabulary()

    def encode(self, text: bytes) -> Tensor:
        """Token numbers, 1-D: uint8 if a token is a byte, else int32. No special tokens are added."""
        if self.is_bytes:
            return torch.from_numpy(np.frombuffer(text, np.uint8).copy())
        chunks = [chunk.decode("utf-8", errors="replace") for chunk in _chunks(text)]
        numbers = self.hf(chunks, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return torch.tensor([n for chunk in numbers["input_ids"] for n in chunk], dtype=torch.int32)

    def decode(self, tokens: Tensor) -> str:
        """The text of 1-D token numbers. Bytes that are not UTF-8 become replacement characters."""
        return str(self.hf.decode(tokens.tolist()))


def given(wanted: config.Tokenizer, model: Path | None) -> TextTokenizer | None:
    """The recipe's tokenizer, or None for `bpe`, which has to be trained. `model` is the folder of its model, if any.

    Raises ConfigError if the tokenizer would give the model's tokens another meaning.
    """
    if wanted.path is not None:
        return load(wanted.path)
    if model is not None and wanted.kind == "auto":
        return load(model)
    if model is not None and any((model / name).is_file() for name in FILES):
        own = load(model)
        if wanted.kind == "bytes" and own.is_bytes:
            return own
        raise ConfigError(
            f"The model in {model} was trained with the tokenizer in its folder, and tokenizer.kind: {wanted.kind} "
            "would give its tokens another meaning; leave tokenizer.kind out."
        )
    if wanted.kind == "bpe":
        return None
    return TextTokenizer(_FAST(tokenizer_object=_byte_level(models.BPE(vocab=_byte_vocabulary(), merges=[]))))


def build(wanted: config.Tokenizer, model: Path | None, training_text: bytes) -> TextTokenizer:
    """As `given`; `bpe` is trained here, deterministically."""
    if (words := given(wanted, model)) is not None:
        return words
    bpe = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=wanted.vocab_size, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    text = (chunk.decode("utf-8", errors="replace") for chunk in _chunks(training_text))
    bpe.train_from_iterator(text, trainer=trainer)
    return TextTokenizer(_FAST(tokenizer_object=bpe))


def load(folder: Path) -> TextTokenizer:
    """The tokenizer in a local folder. Raises ConfigError if there is none."""
    if not folder.is_dir():
        raise ConfigError(f"The tokenizer folder {folder} does not exist; correct tokenizer.path.")
    if not any((folder / name).is_file() for name in FILES):  # Transformers makes an empty one for some models
        raise ConfigError(f"The folder {folder} holds no tokenizer; name the folder of one as tokenizer.path.")
    try:
        return TextTokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"The folder {folder} holds no usable tokenizer: {reason}") from None


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    """The printable character that represents each byte, with the byte's value as its token number."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(rest)}


def _chunks(text: bytes) -> Iterator[bytes]:
    """The text in pieces that end at line ends, so no word is cut."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + CHUNK_BYTES)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end
