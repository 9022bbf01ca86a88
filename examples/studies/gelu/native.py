"""Bias + GELU in C++ and OpenMP: a ctypes wrapper of bias_gelu.cpp. Only bias_gelu.py imports it.

fp16 goes through fp32 copies, because CPUs seldom train in it. The library runs on the threads of torch's own OpenMP,
if that is installed as libgomp.so.1, as in torch's builds for CPUs.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hytrain.kernels.build import build
from hytrain.tensors import address

SOURCE: Final = Path(__file__).with_name("bias_gelu.cpp")
BLOCK_ROWS: Final = 32  # bias_gelu.cpp's block_rows: whose gradients of the bias are added up in fp32


def forward(x: Tensor, bias: Tensor) -> Tensor:
    """GELU(x + bias) of x [rows, cols] and bias [cols], both contiguous."""
    wide = _wide(x)
    y = torch.empty_like(wide)
    _call("hytrain_bias_gelu", wide, bias.float(), y, sizes=x.shape)
    return y.to(x.dtype)


def backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x [rows, cols] and of bias [cols]; dy is contiguous and of x's shape."""
    rows, cols = x.shape
    wide = _wide(x)
    dx, dbias = torch.empty_like(wide), torch.empty(cols, dtype=torch.float32)
    sums = torch.empty(-(-rows // BLOCK_ROWS), cols, dtype=torch.float32)
    _call("hytrain_bias_gelu_backward", _wide(dy), wide, bias.float(), dx, dbias, sums, sizes=x.shape)
    return dx.to(x.dtype), dbias.to(bias.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float16 else x


def _call(name: str, first: Tensor, *others: Tensor, sizes: torch.Size) -> None:
    """Calls the function for the first tensor's dtype with the addresses of all, then rows, columns and threads."""
    function = getattr(load(), f"{name}_{str(first.dtype).removeprefix('torch.')}")
    tensors = (first, *others)
    function.argtypes = (*[ctypes.c_void_p] * len(tensors), ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
    function(*map(address, tensors), *sizes, torch.get_num_threads())


@cache
def load() -> Any:
    """The library, built at first use. Raises BackendUnavailable."""
    return ctypes.CDLL(str(build(SOURCE)))
