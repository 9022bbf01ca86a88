// The memory traffic of the AdamW update without its arithmetic: what update.cpp is measured against.
//
// Same planes, same blocks, same static schedule, same prefetches. Each plane is read and written back with one bit
// flipped, the least that a compiler cannot leave out; a gradient's sign goes into a weight's last bit, so that
// gradients are read too.
// No value changes by more than its last bit, so updates may go on from the same planes.
//
//   read     grads 2, weights 2, remainder 2, exp_avg 4, exp_avg_sq 4 bytes an element
//   written  the same but grads

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef HYTRAIN_PREFETCH
#define HYTRAIN_PREFETCH 512
#endif

namespace {

// update.cpp's, like `prefetch`
constexpr int64_t block = 4096;
constexpr int64_t strip = 64;

template <class T>
inline void prefetch(const T *plane, int64_t at) {
    for (size_t line = 0; line < strip * sizeof(T); line += 64)
        __builtin_prefetch(reinterpret_cast<const char *>(plane + at) + line);
}

inline void flip(uint16_t *weights, const uint16_t *grads, uint16_t *remainder, uint32_t *exp_avg,
                 uint32_t *exp_avg_sq, int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
        weights[i] ^= grads[i] >> 15;
        remainder[i] ^= 1;
        exp_avg[i] ^= 1;
        exp_avg_sq[i] ^= 1;
    }
}

}  // namespace

extern "C" {

void hytrain_stream(uint16_t *weights, const uint16_t *grads, uint16_t *remainder, uint32_t *exp_avg,
                    uint32_t *exp_avg_sq, int64_t numel, int threads) {
    const int64_t blocks = (numel + block - 1) / block;
#pragma omp parallel for schedule(static) num_threads(threads) if (blocks > 1)
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t begin = b * block;
        const int64_t end = begin + block < numel ? begin + block : numel;
        int64_t at = begin;
        for (; at + strip <= end; at += strip) {
            if (HYTRAIN_PREFETCH) {
                prefetch(weights, at + HYTRAIN_PREFETCH);
                prefetch(grads, at + HYTRAIN_PREFETCH);
                prefetch(remainder, at + HYTRAIN_PREFETCH);
                prefetch(exp_avg, at + HYTRAIN_PREFETCH);
                prefetch(exp_avg_sq, at + HYTRAIN_PREFETCH);
            }
            flip(weights, grads, remainder, exp_avg, exp_avg_sq, at, at + strip);
        }
        flip(weights, grads, remainder, exp_avg, exp_avg_sq, at, end);
    }
}

// Each thread copies one contiguous range.
void hytrain_copy(char *target, const char *source, int64_t nbytes, int threads) {
    const int64_t share = ((nbytes + threads - 1) / threads + 63) / 64 * 64;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int thread = 0; thread < threads; ++thread) {
        const int64_t begin = thread * share;
        const int64_t end = begin + share < nbytes ? begin + share : nbytes;
        if (begin < end) std::memcpy(target + begin, source + begin, end - begin);
    }
}

}  // extern "C"
