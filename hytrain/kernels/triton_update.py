"""The updates in Triton, with the same operations as update.cpp. Only gpu.py imports it.

bf16 planes are passed as int16 bit patterns. Moments in bf16 or 8 bits, and weights without masters (`LONE`), are
rounded as rounding.py and float8.py say. fp16 planes are passed as they are: the device widens them exactly and rounds
to nearest even, also subnormals. The caller turns contraction off. Square root and division are correctly rounded, and
only calls of `_fused` are fused, where torch's CPU fuses (`FUSES`). Full blocks are loaded without a mask, because
masked loads are vectorised only if the compiler knows a divisor of the length.
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
def _load_moment(pointer, mask, SECOND: tl.constexpr):
    if pointer.dtype.element_ty == tl.uint8:
        code = tl.load(pointer, mask=mask).to(tl.int32)
        magnitude = code if SECOND else code & 0x7F
        added = _added(SECOND)
        exact = ((magnitude << 21) + added).to(tl.float32, bitcast=True) - added.to(tl.float32, bitcast=True)
        u = tl.where(magnitude == (0xFF if SECOND else 0x7F), 0x7FC00000, exact.to(tl.int32, bitcast=True))
        return (u | ((code ^ magnitude) << 24)).to(tl.float32, bitcast=True)
    else:
        return _load_wide(pointer, mask)


@triton.jit
def _added(SECOND: tl.constexpr):
    """The bits of 2^-28 or 2^-56."""
    return tl.full([], (127 - 56) << 23 if SECOND else (127 - 28) << 23, tl.int32)


@triton.jit
def _store_moment(pointer, x, random, mask, SECOND: tl.constexpr):
    bits = ((random >> 16) if SECOND else (random & 0xFFFF)).to(tl.int32)
    if pointer.dtype.element_ty == tl.int16:
        _store_rounded(pointer, x, bits, mask)
    elif pointer.dtype.element_ty == tl.uint8:
        u = x.to(tl.int32, bitcast=True)
        magnitude = u & 0x7FFFFFFF
        added = _added(SECOND)
        exact = magnitude.to(tl.float32, bitcast=True) + added.to(tl.float32, bitcast=True)
        code = (exact.to(tl.int32, bitcast=True) - added + (bits << 5) + 16) >> 21
        code = tl.minimum(code, 0xFE if SECOND else 0x7E)
        if SECOND:
            code = tl.where((code == 0) & (magnitude != 0), 1, code)
        else:
            code |= (u >> 24) & 0x80
        code = tl.where(magnitude < 0x7F800000, code, 0xFF if SECOND else 0x7F)
        tl.store(pointer, code.to(tl.uint8), mask=mask)
    else:
        _store(pointer, x, mask)


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
def _fused(a, b, c, FUSES: tl.constexpr):
    return tl.fma(a, b, c) if FUSES else a * b + c


@triton.jit
def _lerp(start, end, mix, far, FUSES: tl.constexpr):
    # torch's lerp starts at the nearer end. `far` is mix - 1.
    from_start = tl.abs(mix) < 0.5
    return _fused(tl.where(from_start, mix, far), end - start, tl.where(from_start, start, end), FUSES)


@triton.jit
def _adamw(p, g, m_old, v_old, tail, mix1, mix2, beta2, decay, neg_step_size, sqrt_bias2, eps, l2, FUSES: tl.constexpr):
    g = tl.where(l2 == 0.0, g, _fused(l2, p, g, FUSES))
    far, v = mix1 - 1.0, _fused(mix2 * g, g, v_old * beta2, FUSES)
    if tail is not None:
        far = tl.where(tail, -(1.0 - mix1), far)  # without momentum these are two zeros
        v = tl.where(tail, _fused(v_old, beta2, mix2 * g * g, FUSES), v)
    m = _lerp(m_old, g, mix1, far, FUSES)
    denominator = tl.div_rn(tl.sqrt_rn(v), sqrt_bias2) + eps
    return p * decay + tl.div_rn(neg_step_size * m, denominator), m, v


@triton.jit
def _decayed(p, g, weight_decay, FUSES: tl.constexpr):
    return tl.where(weight_decay == 0.0, g, _fused(weight_decay, p, g, FUSES))


@triton.jit
def _sgd(p, g, weight_decay, neg_lr, FUSES: tl.constexpr):
    return _fused(neg_lr, _decayed(p, g, weight_decay, FUSES), p, FUSES)


@triton.jit
def _sgd_momentum(p, g, b_old, weight_decay, neg_lr, keep, mix, ahead, FUSES: tl.constexpr):
    d = _decayed(p, g, weight_decay, FUSES)
    b = tl.where(keep == 0.0, d, _fused(mix, d, b_old * keep, FUSES))
    return _fused(neg_lr, tl.where(ahead == 0.0, b, _fused(ahead, b, d, FUSES)), p, FUSES), b


@triton.jit
def _lion(p, g, m_old, beta1, mix1, beta2, mix2, decay, neg_lr, FUSES: tl.constexpr):
    c = m_old * beta1 + g * mix1
    sign = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, 0.0))
    return _fused(neg_lr, sign, p * decay, FUSES), _fused(mix2, g, m_old * beta2, FUSES)


@triton.jit
def _muon(g, b_old, mix, ahead, FUSES: tl.constexpr):
    b = _lerp(b_old, g, mix, mix - 1.0, FUSES)
    return tl.where(ahead == 0.0, b, _lerp(g, b, ahead, ahead - 1.0, FUSES)), b


@triton.jit
def _update(
    weights, grads, remainder, moment0, moment1, mask, tail, index, before, within,
    factor, s1, s2, s3, s4, s5, s6, s7, s8, RULE: tl.constexpr, LONE: tl.constexpr, FUSES: tl.constexpr,
):  # fmt: skip
    g = factor * _load_wide(grads, mask)
    p = _load_master(weights, remainder, mask, LONE)
    random = _random_bits(index, before, within)  # left out by the compiler where nothing is rounded
    if RULE == "adamw":
        m_old = _load_moment(moment0, mask, False)
        v_old = _load_moment(moment1, mask, True)
        p, m, v = _adamw(p, g, m_old, v_old, tail, s1, s2, s3, s4, s5, s6, s7, s8, FUSES)
        _store_moment(moment0, m, random, mask, False)
        _store_moment(moment1, v, random, mask, True)
    elif RULE == "sgd":
        p = _sgd(p, g, s1, s2, FUSES)
    elif RULE == "sgd_momentum":
        p, b = _sgd_momentum(p, g, _load_moment(moment0, mask, False), s1, s2, s3, s4, s5, FUSES)
        _store_moment(moment0, b, random, mask, False)
    elif RULE == "lion":
        p, m = _lion(p, g, _load_moment(moment0, mask, False), s1, s2, s3, s4, s5, s6, FUSES)
        _store_moment(moment0, m, random, mask, False)
    elif RULE == "muon":
        p, b = _muon(g, _load_moment(moment0, mask, False), s1, s2, FUSES)
        _store_moment(moment0, b, random, mask, False)
    elif RULE == "muon_step":
        p = _fused(s2, g, p * s1, FUSES)
    else:
        tl.static_assert(False, "a rule without arithmetic")
    _store_master(weights, remainder, p, random, mask, LONE)


@triton.jit
def _update_block(
    weights, grads, remainder, moment0, moment1, begin, numel, in_vectors, first, before, within,
    factor, s1, s2, s3, s4, s5, s6, s7, s8, verdict,
    RULE: tl.constexpr, JUDGED: tl.constexpr, LONE: tl.constexpr, FUSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Those of a segment's `numel` elements that one program updates, from `begin` on.

    From element `in_vectors` on, elements are the tail of torch's AdamW. If JUDGED, the gradient is multiplied by what
    `verdict` points at, and nothing is done if that is below 0. What Muon's last pass gets is no gradient any more: it
    is not multiplied.
    """
    if JUDGED:
        scale = tl.load(verdict)
        numel = tl.where(scale < 0, 0, numel)
        factor = factor if RULE == "muon_step" else factor * scale
    offsets = begin + tl.arange(0, BLOCK)
    index = first + offsets.to(tl.uint32)
    weights += offsets
    grads += offsets
    remainder += offsets
    moment0 += offsets
    moment1 += offsets
    if begin + BLOCK <= tl.minimum(in_vectors, numel):
        _update(
            weights, grads, remainder, moment0, moment1, None, None, index, before, within,
            factor, s1, s2, s3, s4, s5, s6, s7, s8, RULE, LONE, FUSES,
        )  # fmt: skip
    else:
        _update(
            weights, grads, remainder, moment0, moment1, offsets < numel, offsets >= in_vectors, index, before, within,
            factor, s1, s2, s3, s4, s5, s6, s7, s8, RULE, LONE, FUSES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["numel", "in_vectors", "first", "before", "within"])
def update_kernel(
    weights, grads, remainder, moment0, moment1,
    numel: tl.int64, in_vectors: tl.int64, first: tl.uint32, before: tl.uint32, within: tl.uint32,
    factor: tl.float32, s1: tl.float32, s2: tl.float32, s3: tl.float32,
    s4: tl.float32, s5: tl.float32, s6: tl.float32, s7: tl.float32, s8: tl.float32,
    verdict, RULE: tl.constexpr, JUDGED: tl.constexpr, LONE: tl.constexpr, FUSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One segment. `factor` and s1 to s8 are the rule's scalars, as scalars.py has them. Some rules ignore the last.

    The scalars' types are fixed and no value is specialised, so all steps of a rule use one compilation.
    """
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    _update_block(
        weights, grads, remainder, moment0, moment1, begin, numel, in_vectors, first, before, within,
        factor, s1, s2, s3, s4, s5, s6, s7, s8, verdict, RULE, JUDGED, LONE, FUSES, BLOCK,
    )  # fmt: skip


@triton.jit
def _plane(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    plane = tl.load(row + COLUMN).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(plane, 16) if ALIGNED else plane


@triton.jit
def update_rows_kernel(
    rows, row_of_program, factor: tl.float32, s1: tl.float32, s2: tl.float32, s3: tl.float32,
    s4: tl.float32, s5: tl.float32, s6: tl.float32, s7: tl.float32, s8: tl.float32,
    verdict, RULE: tl.constexpr, JUDGED: tl.constexpr, LONE: tl.constexpr, FUSES: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr, GRADS: tl.constexpr, REMAINDER: tl.constexpr, MOMENTS: tl.constexpr,
    ALIGNED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Several segments with the same scalars, each in a row of a table on the device: see `gpu.update_rows`."""
    program = tl.program_id(0)
    row = rows + tl.load(row_of_program + program).to(tl.int64) * COLUMNS
    weights = _plane(row, 0, WEIGHTS, ALIGNED)
    grads = _plane(row, 1, GRADS, ALIGNED)
    remainder = _plane(row, 2, REMAINDER, ALIGNED)
    moment0 = _plane(row, 3, MOMENTS, ALIGNED)
    moment1 = _plane(row, 4, MOMENTS, ALIGNED)
    numel, in_vectors = tl.load(row + 5), tl.load(row + 6)
    first, before, within = tl.load(row + 7), tl.load(row + 8), tl.load(row + 9)
    begin = (program - tl.load(row + 10)) * BLOCK
    _update_block(
        weights, grads, remainder, moment0, moment1, begin, numel, in_vectors,
        first.to(tl.uint32), before.to(tl.uint32), within.to(tl.uint32),
        factor, s1, s2, s3, s4, s5, s6, s7, s8, verdict, RULE, JUDGED, LONE, FUSES, BLOCK,
    )  # fmt: skip
