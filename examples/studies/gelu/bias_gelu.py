"""Bias and GELU in one pass, forward and backward, behind autograd and torch.compile.

`mlp` puts `bias_gelu` into GPT-2's MLPs, and any model may call it.

    bias_gelu ─▶ hytrain::bias_gelu ──────────▶ triton_kernels on a GPU
          autograd ─▶ hytrain::bias_gelu_backward ─▶ native on a CPU
                                                └─▶ torch's operators where there is no Triton or no compiler

For torch.compile both are operators whose inside it does not see. Everywhere the arithmetic is in float32 and rounds
once at its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from hytrain.errors import BackendUnavailable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_log = logging.getLogger(__name__)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU(x + bias) in the tanh form, 0.5 h (1 + tanh(sqrt(2 / pi) (h + 0.044715 h^3))) of h = x + bias.

    One pass over memory where PyTorch takes two or more. The sum, the GELU and their gradients are computed in float32
    and rounded once. So results differ in the last places from `gelu(x + bias, approximate="tanh")`, which rounds
    several times. Forward and backward have the same bits in each run on one machine. Backward keeps `x` and `bias`.

    Args:
        x: shape [..., cols]; float32, bfloat16 or float16, on a CPU or a GPU. Usually a projection without its bias.
        bias: shape [cols]; of x's dtype, or float32, as under autocast.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        ValueError: for other dtypes, or if `bias` does not fit the last dimension of `x`.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016 (arXiv:1606.08415), section 2.
    """
    if x.dtype not in DTYPES or bias.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"bias_gelu takes float32, bfloat16 or float16, and a bias of that dtype or float32, "
            f"not {x.dtype} and {bias.dtype}"
        )
    if bias.ndim != 1 or x.ndim < 1 or x.shape[-1] != bias.shape[0]:
        raise ValueError(f"bias_gelu needs a bias of shape [x.shape[-1]]: x is {[*x.shape]}, bias {[*bias.shape]}")
    result: Tensor = _forward(x, bias)
    return result


class _Kernels(NamedTuple):
    """The two passes, on contiguous tensors of the shapes [rows, cols] and [cols]."""

    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@torch.library.custom_op("hytrain::bias_gelu", mutates_args=(), schema="(Tensor x, Tensor bias) -> Tensor")
def _forward(x: Tensor, bias: Tensor) -> Tensor:
    if x.numel() == 0:
        return x.new_empty(x.shape)
    return _kernels(x.device.type).forward(_rows(x), bias.contiguous()).view(x.shape)


@torch.library.custom_op(
    "hytrain::bias_gelu_backward", mutates_args=(), schema="(Tensor dy, Tensor x, Tensor bias) -> (Tensor, Tensor)"
)
def _backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return x.new_empty(x.shape), torch.zeros_like(bias)
    dx, dbias = _kernels(x.device.type).backward(_rows(dy), _rows(x), bias.contiguous())
    return dx.view(x.shape), dbias


@_forward.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_backward.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    dx, dbias = _backward(dy, *ctx.saved_tensors)
    return dx, dbias


_forward.register_autograd(_gradients, setup_context=_save)


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


@cache
def _kernels(device: str) -> _Kernels:
    """Those of this kind of device, or torch's operators. The choice is made once, so a run never mixes them."""
    try:
        if device == "cuda":
            from examples.studies.gelu import triton_kernels

            return _Kernels(triton_kernels.forward, triton_kernels.backward)
        if device == "cpu":
            from examples.studies.gelu import native

            native.load()
            return _Kernels(native.forward, native.backward)
    except (ImportError, BackendUnavailable) as reason:
        _log.warning("bias + GELU on %s takes torch's operators: %s", device, reason)
    return _EAGER


def _eager_forward(x: Tensor, bias: Tensor) -> Tensor:
    return gelu(x.float() + bias.float(), approximate="tanh").to(x.dtype)


def _eager_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.ops.aten.gelu_backward(dy.float(), x.float() + bias.float(), approximate="tanh")
    return dx.to(x.dtype), dx.sum(0).to(bias.dtype)


_EAGER = _Kernels(_eager_forward, _eager_backward)
