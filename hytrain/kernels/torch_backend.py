"""The AdamW update with torch's fused CPU kernel, for machines without a C++ compiler.

That kernel takes only fp32, so bf16 planes go through fp32 copies, in chunks that stay in the cache; the master of
fp16 weights is fp32 already. The kernel computes the last elements of an odd size in another order. Ranges are
therefore padded to `WIDTH`, and the results are the native backend's, however a segment is divided.

    planes at addresses -> tensors over them -> chunks -> (copy elsewhere) -> (join) -> _adamw -> (split, round)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from hytrain.kernels.backend import FIRST, Elements, Into, check_dtypes
from hytrain.kernels.rounding import more_random_bits, random_bits, rounded
from hytrain.kernels.scalars import Scalars
from hytrain.kernels.split import REMAINDERS, join, nearest_half, split
from hytrain.tensors import address

WIDTH = 128  # elements; a multiple of the width of the operators' vector loops
CHUNK_PER_THREAD = 128 * 1024  # elements; two fp32 copies of them are 1 MiB, the size of a core's own cache

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TorchBackend:
    """AdamW with torch's fused operator. `threads` sets torch's number of threads in this process."""

    name = "torch"

    def __init__(self, threads: int) -> None:
        self.threads = threads

    @property
    def threads(self) -> int:
        return self._threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self._threads, self._chunk_numel = threads, threads * CHUNK_PER_THREAD
        self._set_threads(threads)

    def _set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def update(
        self,
        *,
        weights: int,
        grads: int,
        remainder: int,
        exp_avg: int,
        exp_avg_sq: int,
        numel: int,
        weights_dtype: str,
        grads_dtype: str,
        scalars: Scalars,
        into: Into | None = None,
        state_dtype: str = "float32",
        elements: Elements = FIRST,
    ) -> None:
        check_dtypes(weights_dtype, grads_dtype, remainder, state_dtype)
        to = into or Into(weights=weights, remainder=remainder, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        planes = [
            (_over(weights, numel, _DTYPES[weights_dtype]), _over(to.weights, numel, _DTYPES[weights_dtype])),
            (_over(grads, numel, _DTYPES[grads_dtype]),) * 2,
            (_over(exp_avg, numel, _DTYPES[state_dtype]), _over(to.exp_avg, numel, _DTYPES[state_dtype])),
            (_over(exp_avg_sq, numel, _DTYPES[state_dtype]), _over(to.exp_avg_sq, numel, _DTYPES[state_dtype])),
        ]
        if remainder:
            dtype = REMAINDERS[_DTYPES[weights_dtype]]
            planes.append((_over(remainder, numel, dtype), _over(to.remainder, numel, dtype)))
        whole = numel - numel % WIDTH
        cuts = [*range(0, whole, self._chunk_numel), whole]
        for begin, end in pairwise(cuts):
            self._update_chunk(scalars, _from(elements, begin), *_moved(planes, begin, end))
        if whole < numel:
            self._update_tail(scalars, _from(elements, whole), _moved(planes, whole, numel))

    def touch(self, address: int, nbytes: int) -> None:
        _over(address, nbytes, torch.uint8).zero_()

    def _update_tail(self, scalars: Scalars, elements: Elements, planes: list[Tensor]) -> None:
        padded = [pad(plane, (0, WIDTH - plane.numel())) for plane in planes]
        self._update_chunk(scalars, elements, *padded)
        for index, (plane, result) in enumerate(zip(planes, padded, strict=True)):
            if index != 1:  # the gradients are only read
                plane.copy_(result[: plane.numel()])

    def _update_chunk(
        self,
        scalars: Scalars,
        elements: Elements,
        weights: Tensor,
        grads: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        remainder: Tensor | None = None,
    ) -> None:
        grads = grads.float()
        if scalars.scale != 1.0:
            grads = grads * scalars.scale
        moments = exp_avg.float(), exp_avg_sq.float()  # the planes themselves, if they are float32
        lone = remainder is None and weights.dtype is torch.bfloat16
        rounds = lone or exp_avg.dtype is torch.bfloat16
        random = random_bits(elements, weights.numel(), scalars.step) if rounds else None
        if remainder is None:
            master = weights.float()  # the plane itself, if it is float32
            self._adamw(master, grads, *moments, scalars)
            if lone and random is not None:
                weights.copy_(rounded(master, more_random_bits(random)))
        elif weights.dtype is torch.float16:
            self._adamw(remainder, grads, *moments, scalars)
            weights.copy_(nearest_half(remainder))
        else:
            master = join(weights, remainder)
            self._adamw(master, grads, *moments, scalars)
            upper, lower = split(master)
            weights.copy_(upper)
            remainder.copy_(lower)
        if exp_avg.dtype is torch.bfloat16 and random is not None:
            exp_avg.copy_(rounded(moments[0], random & 0xFFFF))
            exp_avg_sq.copy_(rounded(moments[1], random >> 16))

    def _adamw(self, master: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Scalars) -> None:
        """AdamW in place on fp32 tensors whose length is a multiple of `WIDTH`."""
        step = torch.tensor(float(scalars.step), dtype=torch.float32, device="cpu")
        options = asdict(scalars.hyper)
        torch._fused_adamw_([master], [grads], [exp_avg], [exp_avg_sq], [], [step], **options, amsgrad=False)


def _from(elements: Elements, begin: int) -> Elements:
    return elements._replace(first=elements.first + begin)


def _moved(planes: Sequence[tuple[Tensor, Tensor]], begin: int, end: int) -> list[Tensor]:
    """Elements [begin, end) of the written planes, with the values of the read planes."""
    chunks = []
    for read, written in planes:
        if address(read) != address(written):
            written[begin:end].copy_(read[begin:end])
        chunks.append(written[begin:end])
    return chunks


def _over(address: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor on memory that the caller keeps alive."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    buffer = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)
