"""The updates with torch's own operators, for machines without a C++ compiler.

They compute in fp32, so narrower planes go through fp32 copies, in chunks that stay in the cache; the master of
fp16 weights is fp32 already. torch's fused AdamW computes a parameter's last elements, which fill no vector, in another
order. Other ranges are therefore padded to `WIDTH`, and the results are the native backend's, however a segment is
divided. `vectors` finds out how that is on this CPU.

    planes at addresses -> tensors over them -> chunks -> (copy elsewhere) -> (join) -> _step -> (split, round)
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.sgd import sgd

from hytrain.kernels import float8
from hytrain.kernels.backend import Elements, Operands, check_dtypes
from hytrain.kernels.rounding import more_random_bits, random_bits, rounded
from hytrain.kernels.scalars import Scalars
from hytrain.kernels.scalars import scalars as make_scalars
from hytrain.kernels.split import REMAINDERS, join, nearest_half, split
from hytrain.tensors import DTYPES, address
from protocol.rules import AdamWHyper, LionHyper, MuonHyper, SGDHyper

WIDTH = 128  # elements; a multiple of the width of the operators' vector loops
CHUNK_PER_THREAD = 128 * 1024  # elements; two fp32 copies of them are 1 MiB, the size of a core's own cache


class Vectors(NamedTuple):
    """How torch's fused AdamW computes: vectors of so many `lanes`, with multiplications and additions fused or not."""

    lanes: int
    fuses: bool


@cache
def vectors() -> Vectors:
    """How torch computes on this CPU, which depends on its build, on the processor and on ATEN_CPU_CAPABILITY.

    So it is measured. Without momentum, a gradient of -0 becomes another zero in the tail. The second moment of the
    first element is that of separate operations where none are fused.
    """
    numel = 127  # is no multiple of a vector's length
    weights, grads, exp_avg, exp_avg_sq = (
        torch.full((numel,), x, dtype=torch.float32, device="cpu") for x in (0.0, -0.0, 0.0, 2.0)
    )
    grads[0], hyper = 2.1, AdamWHyper(lr=0.0, beta1=0.0, beta2=0.7, eps=1.0, weight_decay=0.0)
    rounded_apart = exp_avg_sq[0] * hyper.beta2 + grads[0] * (1 - hyper.beta2) * grads[0]
    _adamw(weights, grads, exp_avg, exp_avg_sq, make_scalars(hyper, 1))
    tail = exp_avg.signbit() != exp_avg.signbit()[1]
    return Vectors(int(tail[1:].sum()) + 1, not torch.equal(exp_avg_sq[0], rounded_apart))


def flushes_denormals() -> bool:
    """Whether this thread takes denormal numbers for 0: `torch.set_flush_denormal` cannot be asked."""
    return sys.float_info.min / 2 == 0.0


class TorchBackend:
    """The rules with torch's operators. `threads` sets torch's number of threads in this process."""

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

    @property
    def float_mode(self) -> int:
        """That of this thread, as torch knows it: it flushes, or it does not."""
        return 3 if flushes_denormals() else 0

    @float_mode.setter
    def float_mode(self, mode: int) -> None:
        torch.set_flush_denormal(bool(mode & 3))

    def update(self, of: Operands) -> None:
        scalars, elements, numel = of.scalars, of.elements, of.numel
        check_dtypes(of.weights_dtype, of.grads_dtype, of.remainder, of.state_dtype, scalars.kernel)
        to, weights, state = of.into or of, DTYPES[of.weights_dtype], DTYPES[of.state_dtype]
        planes = [
            _both(of.weights, to.weights, numel, weights),
            _both(of.grads, of.grads, numel, DTYPES[of.grads_dtype]),
            _both(of.remainder, to.remainder, numel, REMAINDERS[weights]) if of.remainder else None,
            *(_both(read, written, numel, state) for read, written in zip(of.moments, to.moments, strict=True)),
        ]
        in_vectors = elements.in_vectors(numel)
        whole = in_vectors - in_vectors % WIDTH
        cuts = [*range(0, whole, self._chunk_numel), whole]
        for begin, end in pairwise(cuts):
            self._update_chunk(scalars, _from(elements, begin), *_moved(planes, begin, end))
        if whole < in_vectors:
            self._update_padded(scalars, _from(elements, whole), _moved(planes, whole, in_vectors))
        if in_vectors < numel:
            self._update_chunk(scalars, _from(elements, in_vectors), *_moved(planes, in_vectors, numel))

    def _update_padded(self, scalars: Scalars, elements: Elements, planes: list[Tensor | None]) -> None:
        padded = [None if plane is None else pad(plane, (0, WIDTH - plane.numel())) for plane in planes]
        self._update_chunk(scalars, elements, *padded)
        for index, (plane, result) in enumerate(zip(planes, padded, strict=True)):
            if index != 1 and plane is not None and result is not None:  # the gradients are only read
                plane.copy_(result[: plane.numel()])

    def _update_chunk(
        self,
        scalars: Scalars,
        elements: Elements,
        weights: Tensor | None,
        grads: Tensor | None,
        remainder: Tensor | None,
        *moments: Tensor | None,
    ) -> None:
        assert weights is not None and grads is not None
        kept = [moment for moment in moments if moment is not None]
        grads = (grads if scalars.by == 1.0 else grads * scalars.by).float()
        if scalars.scale != 1.0:
            grads = grads * scalars.scale
        exact = [_exact(moment, index) for index, moment in enumerate(kept)]  # the planes themselves, if float32
        lone = remainder is None and weights.dtype is torch.bfloat16
        narrow = any(moment.dtype is not torch.float32 for moment in kept)
        random = random_bits(elements, weights.numel(), scalars.step) if lone or narrow else None
        if remainder is None:
            master = weights.float()  # the plane itself, if it is float32
            self._step(master, grads, exact, scalars)
            if lone and random is not None:
                weights.copy_(rounded(master, more_random_bits(random)))
        elif weights.dtype is torch.float16:
            self._step(remainder, grads, exact, scalars)
            weights.copy_(nearest_half(remainder))
        else:
            master = join(weights, remainder)
            self._step(master, grads, exact, scalars)
            upper, lower = split(master)
            weights.copy_(upper)
            remainder.copy_(lower)
        if narrow and random is not None:
            for index, (moment, values) in enumerate(zip(kept, exact, strict=True)):
                bits = (random >> 16 * index) & 0xFFFF
                coded = moment.dtype is torch.uint8
                moment.copy_(float8.rounded(values, bits, index) if coded else rounded(values, bits))

    def _step(self, master: Tensor, grads: Tensor, moments: Sequence[Tensor], scalars: Scalars) -> None:
        """The rule's step in place on fp32 tensors whose length is a multiple of `WIDTH`, or which are a tail."""
        _STEPS[scalars.kernel](master, grads, *moments, scalars=scalars)


def _adamw(master: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Scalars) -> None:
    step = torch.tensor(float(scalars.step), dtype=torch.float32, device="cpu")
    options = asdict(cast(AdamWHyper, scalars.hyper))
    operator = torch._fused_adamw_ if options.pop("decoupled") else torch._fused_adam_
    operator([master], [grads], [exp_avg], [exp_avg_sq], [], [step], **options, amsgrad=False)


def _sgd(master: Tensor, grads: Tensor, *momentum_buffer: Tensor, scalars: Scalars) -> None:
    """With a momentum, the buffer of the first update is made of its gradient."""
    made: list[Tensor | None] = [momentum_buffer[0] if momentum_buffer and scalars.step > 1 else None]
    sgd([master], [grads], made, foreach=False, **asdict(cast(SGDHyper, scalars.hyper)))
    if momentum_buffer and scalars.step == 1 and made[0] is not None:
        momentum_buffer[0].copy_(made[0])


def _lion(master: Tensor, grads: Tensor, exp_avg: Tensor, scalars: Scalars) -> None:
    hyper = cast(LionHyper, scalars.hyper)
    grads = -grads if hyper.maximize else grads
    direction = (exp_avg * hyper.beta1 + grads * (1 - hyper.beta1)).sign_()
    master.mul_(1 - hyper.lr * hyper.weight_decay).add_(direction, alpha=-hyper.lr)
    exp_avg.mul_(hyper.beta2).add_(grads, alpha=1 - hyper.beta2)


def _muon(direction: Tensor, grads: Tensor, momentum_buffer: Tensor, scalars: Scalars) -> None:
    hyper = cast(MuonHyper, scalars.hyper)
    momentum_buffer.lerp_(grads, 1 - hyper.momentum)
    direction.copy_(grads.lerp(momentum_buffer, hyper.momentum) if hyper.nesterov else momentum_buffer)


def _muon_step(master: Tensor, orthogonal: Tensor, scalars: Scalars) -> None:
    _, decay, neg_lr = scalars.values
    master.mul_(decay).add_(orthogonal, alpha=neg_lr)


_STEPS: Final[dict[str, Callable[..., None]]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "sgd_momentum": _sgd,
    "lion": _lion,
    "muon": _muon,
    "muon_step": _muon_step,
}


def _exact(moment: Tensor, index: int) -> Tensor:
    return float8.widened(moment, index) if moment.dtype is torch.uint8 else moment.float()


def _from(elements: Elements, begin: int) -> Elements:
    return elements._replace(first=elements.first + begin)


def _both(read: int, written: int, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _over(read, numel, dtype), _over(written, numel, dtype)


def _moved(planes: Sequence[tuple[Tensor, Tensor] | None], begin: int, end: int) -> list[Tensor | None]:
    """Elements [begin, end) of the written planes, with the values of the read planes."""
    chunks: list[Tensor | None] = []
    for plane in planes:
        if plane is None:
            chunks.append(None)
            continue
        read, written = plane
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
