"""The AdamW update for layers that the GPU owns: the arithmetic of adamw.cpp on device tensors.

The trainer calls `update` on the stream of its choice as soon as a gradient is there. Every bit is the native
backend's, so a layer may change owners in the middle of a run. Triton is imported at the first call.

    1-D CUDA tensors + Scalars  ->  integer views where bits count  ->  triton_adamw.adamw_kernel
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hytrain.errors import BackendUnavailable
from hytrain.kernels.backend import check_dtypes
from hytrain.kernels.scalars import Scalars
from hytrain.kernels.split import REMAINDERS

BLOCK = 1024  # elements a program

# Contraction would fuse roundings, and reflected "flush to zero" would lose subnormals in library functions.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False, "enable_reflect_ftz": False}


def update(
    *,
    weights: Tensor,
    grads: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Scalars,
    verdict: Tensor | None = None,
) -> None:
    """Update one segment in place, on the current device and stream.

    `verdict` is a float32 scalar on the device that the gradient is multiplied by; below 0, nothing is updated.

    All tensors are contiguous and have one shape, [numel]; `remainder` is int16 for bfloat16 weights, the float32
    master of float16 weights. Raises ValueError for planes that do not belong together, BackendUnavailable without
    Triton.
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
    adamw_kernel[((numel + BLOCK - 1) // BLOCK,)](
        _bits(weights),
        _bits(grads),
        weights if remainder is None else remainder,
        exp_avg,
        exp_avg_sq,
        numel,
        scalars.factor,
        scalars.mix1,
        scalars.mix2,
        scalars.beta2,
        scalars.decay,
        scalars.neg_step_size,
        scalars.sqrt_bias2,
        scalars.eps,
        exp_avg if verdict is None else verdict,
        JUDGED=verdict is not None,
        BLOCK=BLOCK,
        **OPTIONS,
    )


@cache
def _check_dtypes(weights: torch.dtype, grads: torch.dtype, remainder: bool) -> None:
    check_dtypes(str(weights).removeprefix("torch."), str(grads).removeprefix("torch."), remainder)


def _bits(plane: Tensor) -> Tensor:
    """bfloat16 as its bit patterns: conversions are then shifts, here as in C++."""
    return plane.view(torch.int16) if plane.dtype == torch.bfloat16 else plane


def _check(weights: Tensor, grads: Tensor, remainder: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """A few microseconds: this runs for each parameter, while the device may be waiting for the next launch."""
    _check_dtypes(weights.dtype, grads.dtype, remainder is not None)
    shape = weights.shape
    for plane in (weights, grads, exp_avg, exp_avg_sq, weights if remainder is None else remainder):
        if plane.shape != shape or len(shape) != 1 or not plane.is_contiguous():
            raise ValueError("an update wants contiguous one-dimensional planes of one length")
    if exp_avg.dtype != torch.float32 or exp_avg_sq.dtype != torch.float32:
        raise ValueError(f"moments are float32, not {exp_avg.dtype} and {exp_avg_sq.dtype}")
    if remainder is not None and remainder.dtype != REMAINDERS[weights.dtype]:
        raise ValueError(f"the remainder of {weights.dtype} weights is not {remainder.dtype}")
