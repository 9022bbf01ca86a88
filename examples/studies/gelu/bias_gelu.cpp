// Bias + GELU in its tanh form on host memory, forward and backward, in fp32 for all types, rounded once.
//
// native.py compiles this file and calls it through ctypes, so the interface is plain C. The tanh form is a
// logistic function, and is computed as one: 1 + tanh(u) = 2 / (1 + exp(-2 u)).
//
//   h = x + bias,  z = 2 sqrt(2 / pi) (h + 0.044715 h^3),  s = 1 / (1 + exp(-z)),  z' = dz / dh
//   y = h s,       dx = dy (s + h s (1 - s) z')
//
// With r = exp(-|z|), the greater of s and 1 - s is q = 1 / (1 + r), and the lesser one is r q. Neither is a difference
// of nearly equal numbers, and no exponential overflows.
//
// The bias's gradient is the sum of dx over the rows: in fp32 within blocks of rows, then in fp64 over the blocks. The
// order depends on the shape alone, not on the number of threads.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

enum bf16 : uint16_t {};  // bit patterns

constexpr int64_t strip = 256;      // columns whose sums over the blocks one thread adds up
constexpr int64_t block_rows = 32;  // native.py's BLOCK_ROWS
constexpr float bound = 64.0f;      // above it, GELU is the identity, also for an infinity

constexpr double log2_e = 1.4426950408889634, slope = 1.5957691216057308, cubic = 0.044715;  // slope: 2 sqrt(2 / pi)
constexpr float exponent1 = static_cast<float>(-log2_e * slope), exponent3 = static_cast<float>(-log2_e * slope * cubic);
constexpr float slope0 = static_cast<float>(slope), slope2 = static_cast<float>(3 * slope * cubic);

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

inline float wide(float x) { return x; }
inline float wide(bf16 x) { return real(static_cast<uint32_t>(x) << 16); }

inline void round_to(float x, float *to) { *to = x; }
inline void round_to(float x, bf16 *to) {
    const uint32_t u = bits(x), nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    *to = static_cast<bf16>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
}

// 2^x for x <= 0, to the last place or so: compilers vectorise this, but no call of the library. A NaN stays one.
inline float exp2_of(float x) {
    const float bounded = x < -126.0f ? -126.0f : x;
    const float shifted = bounded + 0x1.8p23f;  // rounds to an integer, which its last bits then are
    const float f = bounded - (shifted - 0x1.8p23f);
    float power = 1.5252734e-05f;  // ln(2)^k / k!, from k = 7: at most 5e-9 is left out
    power = std::fma(power, f, 1.5403530e-04f);
    power = std::fma(power, f, 1.3333558e-03f);
    power = std::fma(power, f, 9.6181291e-03f);
    power = std::fma(power, f, 5.5504109e-02f);
    power = std::fma(power, f, 2.4022651e-01f);
    power = std::fma(power, f, 6.9314718e-01f);
    power = std::fma(power, f, 1.0f);
    return x < -126.0f ? 0.0f : power * real((bits(shifted) - bits(0x1.8p23f) + 127u) << 23);
}

struct Logistics {
    float greater, lesser;  // of s and 1 - s
};

inline Logistics logistics(float h, float square) {
    const float r = exp2_of(-std::fabs(h * std::fma(exponent3, square, exponent1)));
    const float rounded = 1.0f / (1.0f + r);  // twice: a step of Newton's method gets it right to the last place
    const float q = std::fma(rounded, std::fma(-rounded, r, 1.0f - rounded), rounded);
    return {q, r * q};
}

template <class T>
inline void forward_row(const T *x, const float *bias, T *y, int64_t cols) {
#pragma omp simd
    for (int64_t i = 0; i < cols; ++i) {
        const float h = wide(x[i]) + bias[i];
        const float below = std::fabs(h < bound ? h : bound) * logistics(h, h * h).lesser;
        round_to((h > 0.0f ? h : 0.0f) - below, y + i);
    }
}

template <class T>
inline void backward_row(const T *dy, const T *x, const float *bias, T *dx, float *sums, int64_t cols) {
#pragma omp simd
    for (int64_t i = 0; i < cols; ++i) {
        const float h = wide(x[i]) + bias[i], square = h * h;
        const Logistics part = logistics(h, square);
        const float slope_of_z = std::fma(slope2, square, slope0);
        const float d = std::fma(part.greater * part.lesser * h, slope_of_z, h > 0.0f ? part.greater : part.lesser);
        const float g = wide(dy[i]) * d;
        sums[i] += g;
        round_to(g, dx + i);
    }
}

template <class T>
void forward(const T *x, const float *bias, T *y, int64_t rows, int64_t cols, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) forward_row(x + row * cols, bias, y + row * cols, cols);
}

// `sums` is scratch: a row of columns for each block.
template <class T>
void backward(const T *dy, const T *x, const float *bias, T *dx, float *dbias, float *sums, int64_t rows, int64_t cols,
              int threads) {
    const int64_t blocks = (rows + block_rows - 1) / block_rows;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block) {
            float *sum = sums + block * cols;
            std::memset(sum, 0, static_cast<size_t>(cols) * sizeof *sum);
            const int64_t begin = block * block_rows, end = begin + block_rows;
            for (int64_t row = begin; row < (end < rows ? end : rows); ++row)
                backward_row(dy + row * cols, x + row * cols, bias, dx + row * cols, sum, cols);
        }
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < cols; begin += strip) {
            double total[strip] = {};
            const int64_t width = cols - begin < strip ? cols - begin : strip;
            for (int64_t block = 0; block < blocks; ++block)
                for (int64_t i = 0; i < width; ++i) total[i] += sums[block * cols + begin + i];
            for (int64_t i = 0; i < width; ++i) dbias[begin + i] = static_cast<float>(total[i]);
        }
    }
}

}  // namespace

extern "C" {

#define HYTRAIN_BIAS_GELU(name, T)                                                                             \
    void hytrain_bias_gelu_##name(const T *x, const float *bias, T *y, int64_t rows, int64_t cols,             \
                                  int threads) {                                                               \
        forward<T>(x, bias, y, rows, cols, threads);                                                           \
    }                                                                                                          \
    void hytrain_bias_gelu_backward_##name(const T *dy, const T *x, const float *bias, T *dx, float *dbias,    \
                                           float *sums, int64_t rows, int64_t cols, int threads) {             \
        backward<T>(dy, x, bias, dx, dbias, sums, rows, cols, threads);                                        \
    }
HYTRAIN_BIAS_GELU(float32, float)
HYTRAIN_BIAS_GELU(bfloat16, bf16)

}  // extern "C"
