"""The updates of GPU-owned layers: the arithmetic of update.cpp on device tensors.

The trainer calls `update` on a stream of its choice once a gradient is ready. The bits are the native backend's, so a
layer may change owners during a run. Triton is imported at the first call.

    1-D CUDA tensors + Scalars  ->  integer views of bf16  ->  triton_update.update_kernel

At each launch Triton looks up the compiled kernel for the arguments, which takes several times as long as the launch.
This module caches compiled kernels by the properties that matter for this kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from hytrain.errors import BackendUnavailable
from hytrain.kernels.backend import FIRST, Elements, check_dtypes, seeds
from hytrain.kernels.scalars import Scalars
from hytrain.kernels.split import REMAINDERS
from hytrain.tensors import address
from protocol.rules import MOMENTS

BLOCK = 1024  # elements per program

# Contraction would skip roundings, and "flush to zero" would lose subnormals in library functions.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False, "enable_reflect_ftz": False}

#: So many moments and scalars the kernel takes. Rules with fewer leave the last ones out.
MOST_MOMENTS: Final = max(map(len, MOMENTS.values()))
MOST_SCALARS: Final = 9

_MASK = 0xFFFFFFFF
ALIGNMENT = 16  # bytes; for multiples of it, Triton compiles a separate kernel with wider loads
_compiled: dict[tuple[object, ...], Any] = {}


def update(
    *,
    weights: Tensor,
    grads: Tensor,
    remainder: Tensor | None,
    moments: Sequence[Tensor],
    scalars: Scalars,
    verdict: Tensor | None = None,
    elements: Elements = FIRST,
) -> None:
    """Update one segment in place, on the current device and stream.

    All tensors are contiguous and have one shape, [numel]. `remainder` is int16 for bfloat16 weights, or None if they
    are their own masters; the float32 master for float16 weights. `moments` are those of the rule of `scalars`, in
    float32, bfloat16 or, as float8.py's codes, uint8. `verdict` is a float32 scalar on the device: the gradient is
    multiplied by it, and nothing is updated if it is below 0.
    Raises ValueError for planes that do not fit together, BackendUnavailable without Triton.
    """
    kernel = scalars.kernel
    _check(weights, grads, remainder, moments, kernel)
    numel = weights.numel()
    if numel == 0:
        return
    try:
        from hytrain.kernels.triton_update import update_kernel
    except ImportError as error:
        raise BackendUnavailable(
            "the GPU's update needs Triton, which comes with torch's CUDA builds: pip install triton, "
            "or let the CPU own every layer with k=0"
        ) from error
    rest = weights if remainder is None else remainder
    given = (*moments, *(rest,) * (MOST_MOMENTS - len(moments)))  # the kernel ignores those that the rule does not have
    planes = (_bits(weights), _bits(grads), *map(_bits, (rest, *given)))
    which = (elements.in_vectors(numel), elements.first & _MASK, *seeds(elements.key, scalars.step))
    numbers = (*which, *scalars.values, *(0.0,) * (MOST_SCALARS - len(scalars.values)))
    judge, judged = planes[0] if verdict is None else verdict, verdict is not None
    lone = remainder is None and weights.dtype == torch.bfloat16
    grid = (numel + BLOCK - 1) // BLOCK
    aligned = tuple(address(plane) % ALIGNMENT == 0 for plane in (*planes, judge))
    constants = {"RULE": kernel, "JUDGED": judged, "LONE": lone, "FUSES": elements.fuses, "BLOCK": BLOCK}
    kind = (weights.device, *constants.values(), weights.dtype, grads.dtype, given[0].dtype, aligned)
    if (compiled := _compiled.get(kind)) is not None:
        compiled[grid, 1, 1](*planes, numel, *numbers, judge, *constants.values())
        return
    _compiled[kind] = update_kernel[(grid,)](*planes, numel, *numbers, judge, **constants, **OPTIONS)


@cache
def _check_dtypes(weights: torch.dtype, grads: torch.dtype, remainder: bool, state: torch.dtype, kernel: str) -> None:
    weights_dtype, grads_dtype, state_dtype = (str(dtype).removeprefix("torch.") for dtype in (weights, grads, state))
    state_dtype = "float8" if state is torch.uint8 else state_dtype
    check_dtypes(weights_dtype, grads_dtype, remainder, state_dtype, kernel)


def _bits(plane: Tensor) -> Tensor:
    """bfloat16 as bit patterns, so conversions are shifts, as in C++."""
    return plane.view(torch.int16) if plane.dtype == torch.bfloat16 else plane


def _check(weights: Tensor, grads: Tensor, remainder: Tensor | None, moments: Sequence[Tensor], kernel: str) -> None:
    """Must take only a few microseconds: the device may be waiting for the launch."""
    state = moments[0].dtype if moments else torch.float32
    _check_dtypes(weights.dtype, grads.dtype, remainder is not None, state, kernel)
    shape = weights.shape
    for plane in (weights, grads, *moments, weights if remainder is None else remainder):
        if plane.shape != shape or len(shape) != 1 or not plane.is_contiguous():
            raise ValueError("an update wants contiguous one-dimensional planes of one length")
    if any(moment.dtype != state for moment in moments):
        raise ValueError(f"all moments have one dtype, not {', '.join(str(moment.dtype) for moment in moments)}")
    if remainder is not None and remainder.dtype != REMAINDERS[weights.dtype]:
        raise ValueError(f"the remainder of {weights.dtype} weights is not {remainder.dtype}")
