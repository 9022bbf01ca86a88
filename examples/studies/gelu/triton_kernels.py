"""Bias + GELU in Triton, with the formula of bias_gelu.cpp. Only bias_gelu.py imports it.

    forward    a tile of rows and columns per program, one pass
    backward   the same, which also adds up its rows; then _total adds up these sums, of all tiles of a column

Every sum has an order that depends on the shape alone, so the gradient of the bias is the same in each run. The lengths
of rows are integers that Triton specialises for multiples of 16: only then are masked loads vectorised.
"""

# Triton's functions have types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

COLS: Final = 256  # of a tile: a warp reads 512 consecutive bytes of a row of 16-bit numbers
FORWARD_ROWS: Final = 16  # of a tile
BACKWARD_ROWS: Final = 8  # less, because backward needs twice the registers
STEPS: Final = 8  # tiles that a backward program takes, one below the other, before it writes their sum
SUM_ROWS: Final = 32
SUM_COLS: Final = 32
WARPS: Final = 4

LOG2_E: Final = tl.constexpr(1.4426950408889634)
SLOPE: Final = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
CUBIC: Final = tl.constexpr(0.044715)
BOUND: Final = tl.constexpr(64.0)  # above it, GELU is the identity


def forward(x: Tensor, bias: Tensor) -> Tensor:
    """GELU(x + bias) of x [rows, cols] and bias [cols], both contiguous."""
    rows, cols = x.shape
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        _forward[(triton.cdiv(rows, FORWARD_ROWS) * triton.cdiv(cols, COLS),)](
            x, bias, y, rows, cols, ROWS=FORWARD_ROWS, COLS=COLS, num_warps=WARPS
        )
    return y


def backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x [rows, cols] and of bias [cols]; dy is contiguous and of x's shape."""
    rows, cols = x.shape
    blocks = triton.cdiv(rows, BACKWARD_ROWS * STEPS)
    dx, dbias = torch.empty_like(x), torch.empty_like(bias)
    sums = torch.empty(blocks, cols, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _backward[(blocks * triton.cdiv(cols, COLS),)](
            dy, x, bias, dx, sums, rows, cols, ROWS=BACKWARD_ROWS, COLS=COLS, STEPS=STEPS, num_warps=WARPS
        )
        _total[(triton.cdiv(cols, SUM_COLS),)](sums, dbias, blocks, cols, ROWS=SUM_ROWS, COLS=SUM_COLS, num_warps=WARPS)
    return dx, dbias


@triton.jit
def _logistics(h, square, REFINED: tl.constexpr):
    """The greater and the lesser of s and 1 - s, for the logistic function s of bias_gelu.cpp."""
    r = tl.exp2(-tl.abs(h * ((-LOG2_E * SLOPE * CUBIC) * square - LOG2_E * SLOPE)))
    root = tl.rsqrt(1.0 + r)  # with its square two instructions, where a division takes five
    q = root * root
    if REFINED:  # 16-bit numbers would not show the difference
        q = tl.fma(q, tl.fma(-q, r, 1.0 - q), q)
    return q, r * q


@triton.jit
def _forward(x, bias, y, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    col_tiles = tl.cdiv(cols, COLS)
    col = tl.program_id(0) % col_tiles * COLS + tl.arange(0, COLS)
    row = tl.program_id(0) // col_tiles * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    h = tl.load(x + at, mask=inside).to(tl.float32) + tl.load(bias + col, mask=col < cols).to(tl.float32)[None, :]
    _, lesser = _logistics(h, h * h, x.dtype.element_ty == tl.float32)
    result = tl.maximum(h, 0.0) - tl.abs(tl.minimum(h, BOUND)) * lesser
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy, x, bias, dx, sums, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    col_tiles = tl.cdiv(cols, COLS)
    block = tl.program_id(0) // col_tiles
    col = tl.program_id(0) % col_tiles * COLS + tl.arange(0, COLS)
    b = tl.load(bias + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for step in range(STEPS):
        row = (block * STEPS + step) * ROWS + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * cols + col[None, :]
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b
        square = h * h
        greater, lesser = _logistics(h, square, x.dtype.element_ty == tl.float32)
        d = tl.where(h > 0, greater, lesser) + greater * lesser * h * ((3.0 * SLOPE * CUBIC) * square + SLOPE)
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32) * d  # 0 outside
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
        total += g
    tl.store(sums + block.to(tl.int64) * cols + col, tl.sum(total, 0), mask=col < cols)


@triton.jit
def _total(sums, dbias, blocks, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * cols + col[None, :]
        total += tl.load(sums + at, mask=(row < blocks)[:, None] & (col < cols)[None, :], other=0.0)
    tl.store(dbias + col, tl.sum(total, 0).to(dbias.dtype.element_ty), mask=col < cols)
