"""AdamW in Triton, with the same operations as adamw.cpp. Only gpu.py imports it.

bf16 planes are passed as int16 bit patterns. Moments in bf16, and weights without masters (`LONE`), are rounded as
rounding.py says. fp16 planes are passed as
they are: the device widens them exactly and rounds to nearest even, also subnormals. The caller turns contraction off.
Square root and division are correctly rounded, and only the two explicit fma operations are fused. Full blocks are
loaded without a mask, because masked loads are vectorised only if the compiler knows a divisor of the length.
"""

# Triton's functions have types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _canonical(u):
    """A float's bits, with the same pattern for all NaNs."""
    return tl.where((u & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, u)


@triton.jit
def _load_wide(pointer, mask):
    x = tl.load(pointer, mask=mask)
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _load_master(weights, remainder, mask, LONE: tl.constexpr):
    x = tl.load(remainder if weights.dtype.element_ty == tl.float16 else weights, mask=mask)
    if LONE:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.int16:
        lower = tl.load(remainder, mask=mask).to(tl.int32)
        return ((x.to(tl.int32) << 16) + lower).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def _store(pointer, x, mask):
    u = _canonical(x.to(tl.int32, bitcast=True))
    tl.store(pointer, u.to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def _random_bits(index, before, within):
    x = index ^ before
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ within
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _store_rounded(pointer, x, random, mask):
    """As bfloat16, with sixteen random bits below those that are kept. Infinities and the one NaN have zeros there."""
    u = _canonical(x.to(tl.int32, bitcast=True)) + random.to(tl.int32)
    tl.store(pointer, (u >> 16).to(tl.int16), mask=mask)


@triton.jit
def _store_moments(exp_avg, exp_avg_sq, m, v, random, mask):
    if exp_avg.dtype.element_ty == tl.int16:
        _store_rounded(exp_avg, m, random & 0xFFFF, mask)
        _store_rounded(exp_avg_sq, v, random >> 16, mask)
    else:
        _store(exp_avg, m, mask)
        _store(exp_avg_sq, v, mask)


@triton.jit
def _store_master(weights, remainder, master, random, mask, LONE: tl.constexpr):
    if LONE:
        _store_rounded(weights, master, (random * 0x9E3779B1) >> 16, mask)
    elif weights.dtype.element_ty == tl.int16:
        u = _canonical(master.to(tl.int32, bitcast=True))
        hi = (u + 0x8000) >> 16  # round half up: the difference always fits 16 bits
        tl.store(weights, hi.to(tl.int16), mask=mask)
        tl.store(remainder, (u - (hi << 16)).to(tl.int16), mask=mask)
    elif weights.dtype.element_ty == tl.float16:
        half = master.to(tl.float16).to(tl.int16, bitcast=True)
        half = tl.where(master != master, 0x7E00, half).to(tl.int16)  # the device's own NaN is 0x7fff
        tl.store(weights, half.to(tl.float16, bitcast=True), mask=mask)
        _store(remainder, master, mask)
    else:
        _store(weights, master, mask)


@triton.jit
def _update(
    weights, grads, remainder, exp_avg, exp_avg_sq, mask, index, before, within,
    factor, mix1, mix2, beta2, decay, neg_step_size, sqrt_bias2, eps, LONE: tl.constexpr,
):  # fmt: skip
    g = factor * _load_wide(grads, mask)
    m_old = _load_wide(exp_avg, mask)
    v_old = _load_wide(exp_avg_sq, mask)
    p_old = _load_master(weights, remainder, mask, LONE)

    # torch's lerp starts at the nearer end.
    from_average = tl.abs(mix1) < 0.5
    m = tl.fma(tl.where(from_average, mix1, mix1 - 1.0), g - m_old, tl.where(from_average, m_old, g))
    v = tl.fma(mix2 * g, g, v_old * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(v), sqrt_bias2) + eps
    p = p_old * decay + tl.div_rn(neg_step_size * m, denominator)

    random = _random_bits(index, before, within)  # left out by the compiler where nothing is rounded
    _store_moments(exp_avg, exp_avg_sq, m, v, random, mask)
    _store_master(weights, remainder, p, random, mask, LONE)


@triton.jit(do_not_specialize=["numel", "first", "before", "within"])
def adamw_kernel(
    weights, grads, remainder, exp_avg, exp_avg_sq,
    numel: tl.int64, first: tl.uint32, before: tl.uint32, within: tl.uint32,
    factor: tl.float32, mix1: tl.float32, mix2: tl.float32, beta2: tl.float32,
    decay: tl.float32, neg_step_size: tl.float32, sqrt_bias2: tl.float32, eps: tl.float32,
    verdict, JUDGED: tl.constexpr, LONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scalars' types are fixed and no value is specialised, so all steps use one compilation.

    If JUDGED, the gradient is multiplied by what `verdict` points at, and nothing is done if that is below 0.
    """
    if JUDGED:
        scale = tl.load(verdict)
        numel = tl.where(scale < 0, 0, numel)
        factor = factor * scale
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = begin + tl.arange(0, BLOCK)
    index = first + offsets.to(tl.uint32)
    weights += offsets
    grads += offsets
    remainder += offsets
    exp_avg += offsets
    exp_avg_sq += offsets
    if begin + BLOCK <= numel:
        _update(
            weights, grads, remainder, exp_avg, exp_avg_sq, None, index, before, within,
            factor, mix1, mix2, beta2, decay, neg_step_size, sqrt_bias2, eps, LONE,
        )  # fmt: skip
    else:
        _update(
            weights, grads, remainder, exp_avg, exp_avg_sq, offsets < numel, index, before, within,
            factor, mix1, mix2, beta2, decay, neg_step_size, sqrt_bias2, eps, LONE,
        )  # fmt: skip
