// AdamW on host memory: one pass, in place, fp32 arithmetic whatever the planes' types.
//
// native.py compiles this file and calls it through ctypes, so the interface is plain C. Every operation rounds
// once, in an order that is part of the contract: gpu.py has the same one, and so has torch's fused CPU AdamW.
// Hence no fast-math and no contraction; where two roundings become one it is written as fma.
//
//   weights   bf16: the upper half of an fp32 master whose lower half is `remainder`; fp32: the master itself
//   grads     bf16 or fp32, read only
//   exp_avg, exp_avg_sq   fp32
//
// NaNs leave the kernel as one bit pattern: which payload survives an operation is up to the processor and to the
// operand order that a compiler picked, and would be the only difference between two devices.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

// How many elements ahead memory is asked for. With 0, for never, the benchmark measures what this brings.
#ifndef HYTRAIN_PREFETCH
#define HYTRAIN_PREFETCH 512
#endif

namespace {

using bf16 = uint16_t;  // bit pattern

struct Scalars {  // in the order of native.py's SCALARS
    float factor, mix1, mix2, beta2, decay, neg_step_size, sqrt_bias2, eps;
};

inline uint32_t bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    return u;
}

inline float real(uint32_t u) {
    float x;
    std::memcpy(&x, &u, sizeof x);
    return x;
}

inline uint32_t canonical(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : u; }

inline float gradient(float g) { return g; }
inline float gradient(bf16 g) { return real(static_cast<uint32_t>(g) << 16); }

// The two kinds of master behind one pair of names.
inline float join(float weight, const int16_t *, int64_t) { return weight; }
inline float join(bf16 weight, const int16_t *remainder, int64_t i) {
    return real((static_cast<uint32_t>(weight) << 16) + static_cast<uint32_t>(static_cast<int32_t>(remainder[i])));
}

inline void split(float master, float *weights, int16_t *, int64_t i) { weights[i] = real(canonical(bits(master))); }
inline void split(float master, bf16 *weights, int16_t *remainder, int64_t i) {
    const uint32_t u = canonical(bits(master));
    const uint32_t hi = (u + 0x8000u) >> 16;  // round half up: the difference always fits 16 bits
    weights[i] = static_cast<bf16>(hi);
    remainder[i] = static_cast<int16_t>(static_cast<uint16_t>(u - (hi << 16)));
}

template <class Weight, class Grad>
inline void update_strip(Weight *__restrict weights, const Grad *__restrict grads, int16_t *__restrict remainder,
                         float *__restrict exp_avg, float *__restrict exp_avg_sq, int64_t begin, int64_t end,
                         Scalars s) {
    // torch's lerp starts from the nearer end.
    const bool from_average = std::fabs(s.mix1) < 0.5f;
    const float mix1 = from_average ? s.mix1 : s.mix1 - 1.0f;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
        const float g = s.factor * gradient(grads[i]);
        const float m_old = exp_avg[i];
        const float m = std::fma(mix1, g - m_old, from_average ? m_old : g);
        const float v = std::fma(s.mix2 * g, g, exp_avg_sq[i] * s.beta2);
        const float denominator = std::sqrt(v) / s.sqrt_bias2 + s.eps;
        const float p = join(weights[i], remainder, i) * s.decay + s.neg_step_size * m / denominator;
        exp_avg[i] = real(canonical(bits(m)));
        exp_avg_sq[i] = real(canonical(bits(v)));
        split(p, weights, remainder, i);
    }
}

constexpr int64_t strip = 64;  // elements; whole cache lines of every plane

template <class T>
inline void prefetch(const T *plane, int64_t at) {
    for (size_t line = 0; line < strip * sizeof(T); line += 64)
        __builtin_prefetch(reinterpret_cast<const char *>(plane + at) + line);
}

// Five planes are read and four written back, presumably more than the processor's own prefetchers follow well: asking
// for each strip early makes 6.25 G elements/s into 7.07 (bf16, 14 threads of a Xeon with AVX-512), whether 512 or 2048
// elements ahead. A prefetch is a hint and cannot fault, so the last ones may reach beyond the planes.
template <class Weight, class Grad>
void update_range(Weight *__restrict weights, const Grad *__restrict grads, int16_t *__restrict remainder,
                  float *__restrict exp_avg, float *__restrict exp_avg_sq, int64_t begin, int64_t end, Scalars s) {
    int64_t at = begin;
    for (; at + strip <= end; at += strip) {
        if (HYTRAIN_PREFETCH) {
            prefetch(weights, at + HYTRAIN_PREFETCH);
            prefetch(grads, at + HYTRAIN_PREFETCH);
            if (sizeof(Weight) == 2) prefetch(remainder, at + HYTRAIN_PREFETCH);
            prefetch(exp_avg, at + HYTRAIN_PREFETCH);
            prefetch(exp_avg_sq, at + HYTRAIN_PREFETCH);
        }
        update_strip(weights, grads, remainder, exp_avg, exp_avg_sq, at, at + strip, s);
    }
    if (at < end) update_strip(weights, grads, remainder, exp_avg, exp_avg_sq, at, end, s);
}

// Threads take whole blocks, so no two of them write into one cache line of an aligned plane.
constexpr int64_t block = 4096;

template <class Weight, class Grad>
void update(void *weights, const void *grads, int16_t *remainder, float *exp_avg, float *exp_avg_sq, int64_t numel,
            const Scalars *scalars, int threads) {
    const int64_t blocks = (numel + block - 1) / block;
#pragma omp parallel for schedule(static) num_threads(threads) if (blocks > 1)
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t begin = b * block;
        const int64_t end = begin + block < numel ? begin + block : numel;
        update_range(static_cast<Weight *>(weights), static_cast<const Grad *>(grads), remainder, exp_avg, exp_avg_sq,
                     begin, end, *scalars);
    }
}

}  // namespace

extern "C" {

void hytrain_adamw_bfloat16_bfloat16(void *weights, const void *grads, int16_t *remainder, float *exp_avg,
                                     float *exp_avg_sq, int64_t numel, const Scalars *scalars, int threads) {
    update<bf16, bf16>(weights, grads, remainder, exp_avg, exp_avg_sq, numel, scalars, threads);
}

void hytrain_adamw_float32_bfloat16(void *weights, const void *grads, int16_t *remainder, float *exp_avg,
                                    float *exp_avg_sq, int64_t numel, const Scalars *scalars, int threads) {
    update<float, bf16>(weights, grads, remainder, exp_avg, exp_avg_sq, numel, scalars, threads);
}

void hytrain_adamw_float32_float32(void *weights, const void *grads, int16_t *remainder, float *exp_avg,
                                   float *exp_avg_sq, int64_t numel, const Scalars *scalars, int threads) {
    update<float, float>(weights, grads, remainder, exp_avg, exp_avg_sq, numel, scalars, threads);
}

// Writes a zero into every page of a fresh mapping: the kernel places it on the node of the thread that does.
void hytrain_touch(volatile char *address, int64_t nbytes, int64_t page, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t offset = 0; offset < nbytes; offset += page) address[offset] = 0;
    if (nbytes > 0) address[nbytes - 1] = 0;  // the range need not begin with a page
}

}  // extern "C"
