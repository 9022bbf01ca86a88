"""A rank's shards of the state as safetensors files: written from where the arrays lie, and read on any other mesh.

    arrays ─ write ─▶ one file for each layer; its header says which part of an array each shard is
    files  ─ Shards ─▶ which arrays are whole ─ read ─▶ what overlaps a rank's own shards, into these

The header says it as torch's `HuggingFaceStorageWriter` does. Nothing is copied but what is on the GPU, in pieces
(`tensor_file`); several files are written at once; and nobody waits for the disk. `folders` does that later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from hytrain.errors import ConfigError
from hytrain.state import tensor_file
from hytrain.state.saver import each
from hytrain.tensors import Spans, local, spans

#: Of which save a file is, and which part of an array each of its shards is.
SAVE, OFFSETS = "HYTRAIN_SAVE", "DCP_SHARDING_INFO"


@dataclass(frozen=True, slots=True)
class Array:
    """This rank's part of one array of the state, distributed as `like` is, which may have another dtype.

    It is in this rank's file number `file`. What `read` has returned and others have changed is handed to `write`.
    """

    like: Tensor
    dtype: torch.dtype
    file: int
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None] = lambda values: None


Arrays = dict[str, Array]


def write(folder: Path, rank: int, arrays: Arrays, *, save: str, in_parallel: bool) -> None:
    """Write what this rank has of `arrays` into files with the name of the `save`."""

    def write_file(number: int) -> None:
        own = {name: array for name, array in arrays.items() if array.file == number}
        offsets = {name: {"saved_offsets": [at for at, _ in spans(array.like)]} for name, array in own.items()}
        tensor_file.write(
            folder / f"shard-{rank + 1:05d}-model-{number:05d}-of-{max(numbers):05d}.safetensors",
            {name: (array.dtype, local(array.like).shape) for name, array in own.items()},
            (array.read() for array in own.values()),
            {OFFSETS: json.dumps(offsets), SAVE: save},
        )

    numbers = {array.file for array in arrays.values()}
    each(write_file, numbers, tensor_file.WRITERS, in_parallel=in_parallel)


class _Shard(NamedTuple):
    path: Path
    dtype: torch.dtype
    spans: Spans


class Shards:
    """What all ranks' `write` has written."""

    def __init__(self, folder: Path, files: Sequence[Path], save: str) -> None:
        self.folder = folder
        self._of: dict[str, list[_Shard]] = {}
        for path in files:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get(SAVE) != save:
                    raise ConfigError(f"{path} is not of the same save as index.json: load another checkpoint")
                offsets = json.loads(metadata[OFFSETS])
                for name in file.keys():  # noqa: SIM118
                    found = file.get_slice(name)
                    at = zip(offsets[name]["saved_offsets"], found.get_shape(), strict=True)
                    shard = _Shard(
                        path, tensor_file.NAMED[found.get_dtype()], tuple((begin, begin + size) for begin, size in at)
                    )
                    self._of.setdefault(name, []).append(shard)

    def dtype(self, name: str, like: Tensor) -> torch.dtype | None:
        """The dtype of an array; None if it is not whole, or has another shape than `like`."""
        shards = self._of.get(name, [])
        ends = [tuple(end for _, end in shard.spans) for shard in shards]
        if not shards or tuple(map(max, zip(*ends, strict=True))) != tuple(like.shape):
            return None
        is_whole = sum(prod(end - begin for begin, end in shard.spans) for shard in shards) == like.numel()
        return shards[0].dtype if is_whole else None

    def read(self, arrays: Arrays) -> None:
        """Read what this rank has of `arrays`."""
        for name, array in arrays.items():
            values, own = array.read(), spans(array.like)
            for path, _, theirs in self._of[name]:
                both = [(max(a, b), min(end, last)) for (a, end), (b, last) in zip(own, theirs, strict=True)]
                if all(begin < end for begin, end in both):
                    here, there = (
                        tuple(slice(begin - at, end - at) for (begin, end), (at, _) in zip(both, whose, strict=True))
                        for whose in (own, theirs)
                    )
                    with safe_open(path, framework="pt") as file:
                        values[here].copy_(file.get_slice(name)[there])
            array.write(values)
