"""The AdamW update of GPU-owned layers: the arithmetic of adamw.cpp on device tensors.

The trainer calls `update` on a stream of its choice once a gradient is ready. The bits are the native backend's, so a
layer may change owners during a run. Triton is imported at the first call.

    1-D CUDA tensors + Scalars  ->  integer views of bf16  ->  triton_adamw.adamw_kernel

At each launch Triton looks up the compiled kernel for the arguments, which takes several times as long as the launch.
This module caches compiled kernels by the properties that matter for this kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from hytrain.errors import BackendUnavailable
from hytrain.kernels.backend import FIRST, Elements, check_dtypes, seeds
from hytrain.kernels.scalars import Scalars, kernel_scalars
from hytrain.kernels.split import REMAINDERS
from hytrain.tensors import address

BLOCK = 1024  # elements per program

# Contraction would skip roundings, and "flush to zero" would lose subnormals in library functions.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False, "enable_reflect_ftz": False}

_MASK = 0xFFFFFFFF
ALIGNMENT = 16  # bytes; for multiples of it, Triton compiles a separate kernel with wider loads
_compiled: dict[tuple[object, ...], Any] = {}


def update(
    *,
    weights: Tensor,
    grads: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Scalars,
    verdict: Tensor | None = None,
    elements: Elements = FIRST,
) -> None:
    """Update one segment in place, on the current device and stream.

    All tensors are contiguous and have one shape, [numel]. `remainder` is int16 for bfloat16 weights, or None if they
    are their own masters; the float32 master for float16 weights. The moments are float32 or bfloat16. `verdict` is a
    float32 scalar on the device: the gradient is multiplied by it, and nothing is updated if it is below 0.
    Raises ValueError for planes that do not fit together, BackendUnavailable without Triton.
    """
    _check(weights, grads, remainder, exp_avg, exp_avg_sq)
    numel = weights.numel()
    if numel == 0:
        return
    try:
        from hytrain.kernels.triton_adamw import adamw_kernel
    except ImportError as error:
        raise BackendUnavailable(
            "the GPU's update needs Triton, which comes with torch's CUDA builds: pip install triton, "
            "or let the CPU own every layer with k=0"
        ) from error
    rest = weights if remainder is None else remainder
    planes = (_bits(weights), _bits(grads), rest, _bits(exp_avg), _bits(exp_avg_sq))
    which = (elements.first & _MASK, *seeds(elements.key, scalars.step))
    numbers = (*which, *kernel_scalars(scalars))
    judge, judged = planes[3] if verdict is None else verdict, verdict is not None
    lone = remainder is None and weights.dtype == torch.bfloat16
    grid = (numel + BLOCK - 1) // BLOCK
    aligned = tuple(address(plane) % ALIGNMENT == 0 for plane in (*planes, judge))
    kind = (weights.device, weights.dtype, grads.dtype, exp_avg.dtype, judged, lone, aligned)
    if (compiled := _compiled.get(kind)) is not None:
        compiled[grid, 1, 1](*planes, numel, *numbers, judge, judged, lone, BLOCK)
        return
    constants = {"JUDGED": judged, "LONE": lone, "BLOCK": BLOCK}
    compiled = adamw_kernel[(grid,)](*planes, numel, *numbers, judge, **constants, **OPTIONS)
    if _takes_all_arguments():
        _compiled[kind] = compiled


@cache
def _takes_all_arguments() -> bool:
    """Whether a compiled kernel is called with its constants too. Up to Triton 3.2 it is called without."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


@cache
def _check_dtypes(weights: torch.dtype, grads: torch.dtype, remainder: bool, state: torch.dtype) -> None:
    weights_dtype, grads_dtype, state_dtype = (str(dtype).removeprefix("torch.") for dtype in (weights, grads, state))
    check_dtypes(weights_dtype, grads_dtype, remainder, state_dtype)


def _bits(plane: Tensor) -> Tensor:
    """bfloat16 as bit patterns, so conversions are shifts, as in C++."""
    return plane.view(torch.int16) if plane.dtype == torch.bfloat16 else plane


def _check(weights: Tensor, grads: Tensor, remainder: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Must take only a few microseconds: the device may be waiting for the launch."""
    _check_dtypes(weights.dtype, grads.dtype, remainder is not None, exp_avg.dtype)
    shape = weights.shape
    for plane in (weights, grads, exp_avg, exp_avg_sq, weights if remainder is None else remainder):
        if plane.shape != shape or len(shape) != 1 or not plane.is_contiguous():
            raise ValueError("an update wants contiguous one-dimensional planes of one length")
    if exp_avg.dtype != exp_avg_sq.dtype:
        raise ValueError(f"both moments have one dtype, not {exp_avg.dtype} and {exp_avg_sq.dtype}")
    if remainder is not None and remainder.dtype != REMAINDERS[weights.dtype]:
        raise ValueError(f"the remainder of {weights.dtype} weights is not {remainder.dtype}")
