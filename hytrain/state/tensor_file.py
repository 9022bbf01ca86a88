"""Writes safetensors files from where the tensors lie: nothing is copied but what is on the GPU, a piece at a time.

    name, dtype, shape of each ─▶ header ─▶ file ◀─ pieces of the tensors, in the same order

`safetensors.torch.save_file` copies all tensors of a file to host memory before it writes the first one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import _TYPES
from torch import Tensor

#: What safetensors calls each dtype, and the other way round.
NAMED: Final[dict[str, Any]] = _TYPES
DTYPES: Final = {dtype: name for name, dtype in NAMED.items()}
#: How many files are written at once, at most. Each takes a piece of pinned memory, for what is on the GPU.
WRITERS: Final = 8
PIECE_BYTES: Final = 32 << 20
ALIGNMENT: Final = 8

#: What a file says of each of its tensors: its name, with the dtype and the shape.
Described = Mapping[str, tuple[torch.dtype, Sequence[int]]]


def write(path: Path, described: Described, tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file. `tensors` are the described ones, in their order; each is let go before the next is taken.

    Raises OSError if that fails; the file is then incomplete. Nobody waits for the disk. The tensors' values have to be
    there: `await_devices`.
    """
    with path.open("wb", buffering=0) as file:
        _put(file, _header(described, metadata))
        for (name, (dtype, shape)), tensor in zip(described.items(), tensors, strict=True):
            assert (tensor.dtype, [*tensor.shape]) == (dtype, [*shape]), f"{name} is not what the header says"
            for piece in _pieces(tensor):
                _put(file, piece.numpy())


def await_devices(tensors: Iterable[Tensor]) -> None:
    """Wait until their values are there: files are written from streams that wait for no other."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _put(file: Any, piece: Any) -> None:
    left = memoryview(piece)
    while left:  # a single write takes at most 2 GiB
        left = left[file.write(left) :]


def _header(described: Described, metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    end = 0
    for name, (dtype, shape) in described.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor's bytes: views of what is in host memory, and one copy after another of what is on the GPU.

    The copies are made in one piece of pinned memory: into new memory, a copy is slower than a disk. What lies in
    another order than the file's is put into that order some rows at a time.
    """
    if not tensor.numel():
        return
    tensor = tensor.detach()
    if tensor.is_contiguous():
        parts: Sequence[Tensor] = tensor.reshape(-1).view(torch.uint8).split(PIECE_BYTES)
    else:
        parts = tensor.split(max(1, PIECE_BYTES // tensor[0].nbytes))
    if not tensor.is_cuda:
        yield from (part.reshape(-1).view(torch.uint8) for part in parts)
        return
    room = torch.empty(max(part.nbytes for part in parts), dtype=torch.uint8, pin_memory=True)  # torch keeps the pool
    stream = torch.cuda.Stream(tensor.device)  # so that it does not wait for training
    for part in parts:
        with torch.cuda.device(tensor.device), torch.cuda.stream(stream):  # or else torch goes back to the first GPU
            room[: part.nbytes].copy_(part.reshape(-1).view(torch.uint8))
        yield room[: part.nbytes]
