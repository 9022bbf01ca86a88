// The updates on host memory: one pass, in place or into other planes, in fp32 for all types of planes.
//
// native.py compiles this file and calls it through ctypes, so the interface is plain C. Every operation rounds once,
// in an order that is part of the contract: triton_update.py and torch's CPU optimizers have the same. So there is no
// fast-math and no contraction, and fused operations are explicit calls of `fused`.
//
//   weights   bf16: the upper half of an fp32 master whose lower half is `remainder`, or, without one, the master
//             itself, rounded stochastically; fp32: the master itself;
//             fp16: the master rounded half to even, only written: the whole master is in `remainder`
//   grads     bf16, fp16 or fp32, only read
//   moments   what the rule keeps from step to step: fp32; or bf16, or 8-bit floats, to which they are rounded
//             stochastically
//
// Rounding to the nearest bf16 would lose small changes: at beta2 = 0.999 the second moment would stand still, and so
// would a weight that changes by less than 1/512 of itself. So sixteen random bits are added below the bits that are
// kept, as rounding.py says. float8.py describes the 8-bit floats.
//
// All NaNs are written as the same bit pattern. The payload that survives an operation depends on the processor and on
// the compiler's operand order, and would be the only difference between two devices.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __SSE2__
#include <immintrin.h>
#endif

// Prefetch distance in elements. 0 turns prefetching off; the benchmark measures its effect that way.
#ifndef HYTRAIN_PREFETCH
#define HYTRAIN_PREFETCH 512
#endif

// Whether to use the processor's fp16 conversions. A test sets 0.
#ifndef HYTRAIN_F16C
#ifdef __F16C__
#define HYTRAIN_F16C 1
#else
#define HYTRAIN_F16C 0
#endif
#endif

// Whether operations are fused. torch fuses none on processors that cannot, or if it is told not to use AVX2.
#ifndef HYTRAIN_FUSES
#define HYTRAIN_FUSES 1
#endif

// With as many kernels in one file, GCC's budget ends before all loops are inlined. Out of line, bf16 moments took five
// times as long.
#define HYTRAIN_INLINE inline __attribute__((always_inline))

namespace {

// Bit patterns.
enum bf16 : uint16_t {};
enum lone_bf16 : uint16_t {};  // of weights that have no remainder
enum fp16 : uint16_t {};
enum float8 : uint8_t {};

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

constexpr uint32_t infinity = 0x7f800000u, one_nan = 0x7fc00000u;

inline uint32_t canonical(uint32_t u) { return (u & 0x7fffffffu) > infinity ? one_nan : u; }

inline float wide(float x) { return x; }
inline float wide(bf16 x) { return real(static_cast<uint32_t>(x) << 16); }
inline float wide(lone_bf16 x) { return real(static_cast<uint32_t>(x) << 16); }

struct Elements {  // in the order of native.py's _Elements: the first one's index, and the seeds
    uint32_t first, before, within;

    Elements at(int64_t i) const { return {first + static_cast<uint32_t>(i), before, within}; }
};

inline uint32_t random_bits(Elements elements, int64_t i) {
    uint32_t x = elements.at(i).first ^ elements.before;
    x = (x ^ x >> 16) * 0x7feb352du ^ elements.within;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// Sixteen more, for the weight.
inline uint32_t more_random_bits(uint32_t random) { return (random * 0x9e3779b1u) >> 16; }

// `random` has as many bits as are cut off. Of infinities and the one NaN these are zeros, so nothing is carried.
template <class T>
inline T rounded(float x, uint32_t random) {
    return static_cast<T>((bits(x) + random) >> 16);
}

constexpr int most_moments = 2;

// The 8-bit floats of a rule's moments: the number that is added to the magnitude, the largest code, the sign's bit.
struct Format {
    float added;
    uint32_t largest, sign;
};
constexpr Format formats[most_moments] = {{0x1p-28f, 0x7e, 0x80}, {0x1p-56f, 0xfe, 0}};

constexpr int cut = 21;  // of a float's bits, all but two of the mantissa's

HYTRAIN_INLINE float widened(bf16 x, int) { return wide(x); }
HYTRAIN_INLINE float widened(float8 code, int moment) {
    const Format format = formats[moment];
    const uint32_t sign = code & format.sign, magnitude = code ^ sign;
    const float exact = real(bits(format.added) + (magnitude << cut)) - format.added;
    return real(sign << 24 | (magnitude > format.largest ? one_nan : bits(exact)));
}

// `random` has sixteen bits: the upper ones of the 21 that are added. The lower ones are their mean.
HYTRAIN_INLINE void round_moment(float x, uint32_t random, int, bf16 &to) { to = rounded<bf16>(x, random); }
HYTRAIN_INLINE void round_moment(float x, uint32_t random, int moment, float8 &to) {
    const Format format = formats[moment];
    const uint32_t magnitude = bits(x) & 0x7fffffffu, sign = bits(x) >> 24 & format.sign;
    const uint32_t kept = bits(real(magnitude) + format.added) - bits(format.added);
    uint32_t code = (kept + (random << 5 | 1u << 4)) >> cut;
    code = code < format.largest ? code : format.largest;
    if (!format.sign) code = code == 0 && magnitude != 0 ? 1 : code;
    to = static_cast<float8>(magnitude < infinity ? sign | code : format.largest + 1);
}

// The type of `remainder` for each type of weights.
template <class Weight>
struct Rest {
    using type = std::conditional_t<std::is_same<Weight, fp16>::value, float, int16_t>;  // float: the master
    static constexpr bool exists = !std::is_same<Weight, float>::value && !std::is_same<Weight, lone_bf16>::value;
};

// `join` reads the master and `split` writes it. fp16 weights are converted and then treated as fp32.
inline float join(const float *weights, const int16_t *, int64_t i) { return weights[i]; }
inline float join(const bf16 *weights, const int16_t *remainder, int64_t i) {
    return real((static_cast<uint32_t>(weights[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(remainder[i])));
}

inline void split(float master, float *weights, int16_t *, int64_t i) { weights[i] = real(canonical(bits(master))); }
inline void split(float master, bf16 *weights, int16_t *remainder, int64_t i) {
    const uint32_t u = canonical(bits(master));
    const uint32_t hi = (u + 0x8000u) >> 16;  // round half up, so the difference always fits in 16 bits
    weights[i] = static_cast<bf16>(hi);
    remainder[i] = static_cast<int16_t>(static_cast<uint16_t>(u - (hi << 16)));
}

// a * b + c
inline float fused(float a, float b, float c) { return HYTRAIN_FUSES ? std::fma(a, b, c) : a * b + c; }

// A rule is its scalars, in the order of scalars.py, and its arithmetic. `step` reads the moments of element i from one
// place, writes them to the same or another, and returns the new master; `p` is the old one, `g` the gradient times
// `factor`. `Tail` computes the elements that fill no vector of torch's.
template <class Rule, class Moment>
using Moments = std::array<Moment *, Rule::moments>;

// Adam adds `l2` times the weight to the gradient, AdamW multiplies the weight by `decay`.
template <bool tail>
struct Adam {
    static constexpr int moments = 2;  // exp_avg, exp_avg_sq
    using Tail = Adam<true>;
    float factor, mix1, mix2, beta2, decay, neg_step_size, sqrt_bias2, eps, l2;

    HYTRAIN_INLINE float step(float p, float g, const Moments<Adam, float> &from, const Moments<Adam, float> &to,
                              int64_t i) const {
        g = l2 == 0.0f ? g : fused(l2, p, g);
        const bool from_average = std::fabs(mix1) < 0.5f;  // torch's lerp starts at the nearer end
        const float m_old = from[0][i];
        const float far = tail ? -(1.0f - mix1) : mix1 - 1.0f;  // without momentum these are two zeros
        const float m = fused(from_average ? mix1 : far, g - m_old, from_average ? m_old : g);
        const float v_old = from[1][i], squared = mix2 * g;
        const float v = tail ? fused(v_old, beta2, squared * g) : fused(squared, g, v_old * beta2);
        const float denominator = std::sqrt(v) / sqrt_bias2 + eps;
        to[0][i] = real(canonical(bits(m)));
        to[1][i] = real(canonical(bits(v)));
        return p * decay + neg_step_size * m / denominator;
    }
};

struct SGD {
    static constexpr int moments = 0;
    using Tail = SGD;
    float factor, weight_decay, neg_lr;

    float decayed(float p, float g) const { return weight_decay == 0.0f ? g : fused(weight_decay, p, g); }
    HYTRAIN_INLINE float step(float p, float g, const Moments<SGD, float> &, const Moments<SGD, float> &,
                              int64_t) const {
        return fused(neg_lr, decayed(p, g), p);
    }
};

struct SGDMomentum : SGD {
    static constexpr int moments = 1;  // momentum_buffer
    using Tail = SGDMomentum;
    float keep, mix, ahead;

    HYTRAIN_INLINE float step(float p, float g, const Moments<SGDMomentum, float> &from,
                              const Moments<SGDMomentum, float> &to, int64_t i) const {
        const float d = decayed(p, g);
        const float b = keep == 0.0f ? d : fused(mix, d, from[0][i] * keep);
        to[0][i] = real(canonical(bits(b)));
        return fused(neg_lr, ahead == 0.0f ? b : fused(ahead, b, d), p);
    }
};

struct Lion {
    static constexpr int moments = 1;  // exp_avg
    using Tail = Lion;
    float factor, beta1, mix1, beta2, mix2, decay, neg_lr;

    HYTRAIN_INLINE float step(float p, float g, const Moments<Lion, float> &from, const Moments<Lion, float> &to,
                              int64_t i) const {
        const float m_old = from[0][i];
        const float c = m_old * beta1 + g * mix1;
        const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : 0.0f;  // torch's sign of a NaN is 0, too
        to[0][i] = real(canonical(bits(fused(mix2, g, m_old * beta2))));
        return fused(neg_lr, sign, p * decay);
    }
};

// The planes that an update changes. It reads one `State` and writes the same or another.
template <class Rule, class Weight, class Moment>
struct State {
    Weight *weights;
    typename Rest<Weight>::type *remainder;
    Moments<Rule, Moment> moments;

    State at(int64_t i) const {
        State moved{weights + i, remainder ? remainder + i : nullptr, moments};
        for (Moment *&moment : moved.moments) moment += i;
        return moved;
    }
    State<Rule, float, Moment> master() const { return {remainder, nullptr, moments}; }  // of fp16 weights
};

struct Planes {  // a State as passed through the C interface, in the order of native.py's _Planes
    void *weights, *remainder, *moments[most_moments];

    template <class Rule, class Weight, class Moment>
    State<Rule, Weight, Moment> as() const {
        State<Rule, Weight, Moment> state{static_cast<Weight *>(weights),
                                          static_cast<typename Rest<Weight>::type *>(remainder), {}};
        for (int j = 0; j < Rule::moments; ++j) state.moments[j] = static_cast<Moment *>(moments[j]);
        return state;
    }
};

// Each element is read before it is written. `from` and `to` may be the same, but must not overlap otherwise.
template <class Rule, class Weight, class Grad>
HYTRAIN_INLINE void update_strip(State<Rule, Weight, float> from, const Grad *grads, State<Rule, Weight, float> to,
                                 int64_t numel, Rule rule, Elements) {
#pragma omp simd
    for (int64_t i = 0; i < numel; ++i) {
        const float g = rule.factor * wide(grads[i]);
        const float p = rule.step(join(from.weights, from.remainder, i), g, from.moments, to.moments, i);
        split(p, to.weights, to.remainder, i);
    }
}

constexpr int64_t strip = 64;  // elements; a multiple of each plane's cache lines

inline float wide(fp16 half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
    const uint32_t normal = magnitude + (112u << 23);  // the difference of the exponents' biases
    const uint32_t subnormal = bits(real(magnitude + (113u << 23)) - real(113u << 23));  // 2^-14 + x - 2^-14
    const uint32_t special = magnitude + (224u << 23);
    return real(sign | (magnitude < (1u << 23) ? subnormal : magnitude < (31u << 23) ? normal : special));
}

inline fp16 nearest(float x) {
    const uint32_t u = bits(x), magnitude = u & 0x7fffffffu, sign = (u >> 16) & 0x8000u;
    const uint32_t rebased = magnitude - (112u << 23);
    const uint32_t normal = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;  // may carry, up to infinity
    const uint32_t subnormal = bits(real(magnitude) + 0.5f) - (126u << 23);     // the last place of 0.5 is the least fp16
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    return static_cast<fp16>(magnitude > 0x7f800000u ? 0x7e00u : sign | (magnitude < (143u << 23) ? finite : 0x7c00u));
}

// The processor's own conversions give the same results: `narrow` gets only the one NaN pattern.
inline void widen(const fp16 *halves, float *floats, int64_t numel) {
    int64_t i = 0;
#if HYTRAIN_F16C
    for (; i + 8 <= numel; i += 8)
        _mm256_storeu_ps(floats + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(halves + i))));
#endif
    for (; i < numel; ++i) floats[i] = wide(halves[i]);
}

inline void narrow(const float *floats, fp16 *halves, int64_t numel) {
    int64_t i = 0;
#if HYTRAIN_F16C
    for (; i + 8 <= numel; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(halves + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(floats + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < numel; ++i) halves[i] = nearest(floats[i]);
}

inline fp16 product(float factor, fp16 x) { return nearest(real(canonical(bits(factor * wide(x))))); }
inline bf16 product(float factor, bf16 x) {
    const uint32_t u = canonical(bits(factor * wide(x)));
    return static_cast<bf16>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);  // to the nearest, ties to even; infinities stay
}
inline float product(float factor, float x) { return factor * x; }

// The gradients times `factor`, which are gradients again; themselves if it is 1.
template <class Grad>
HYTRAIN_INLINE const Grad *multiplied(const Grad *grads, float factor, Grad *into, int64_t numel) {
    if (factor == 1.0f) return grads;
#pragma omp simd
    for (int64_t i = 0; i < numel; ++i) into[i] = product(factor, grads[i]);
    return into;
}

// Updates at most one strip of fp16 weights: their masters are updated and stay in the L1 cache.
template <class Rule>
HYTRAIN_INLINE void update_strip(State<Rule, fp16, float> from, const fp16 *grads, State<Rule, fp16, float> to,
                                 int64_t numel, Rule rule, Elements elements) {
    alignas(64) float wider[strip];
    widen(grads, wider, numel);
    update_strip(from.master(), static_cast<const float *>(wider), to.master(), numel, rule, elements);
    narrow(to.remainder, to.weights, numel);
}

// Updates at most one strip of weights that are their own masters, which are in fp32 in the L1 cache meanwhile.
template <class Rule, class Grad>
HYTRAIN_INLINE void update_strip(State<Rule, lone_bf16, float> from, const Grad *grads,
                                 State<Rule, lone_bf16, float> to, int64_t numel, Rule rule, Elements elements) {
    alignas(64) float master[strip];
#pragma omp simd
    for (int64_t i = 0; i < numel; ++i) master[i] = wide(from.weights[i]);
    const State<Rule, float, float> read{master, nullptr, from.moments};
    const State<Rule, float, float> written{master, nullptr, to.moments};
    update_strip(read, grads, written, numel, rule, elements);
#pragma omp simd
    for (int64_t i = 0; i < numel; ++i)
        to.weights[i] = rounded<lone_bf16>(master[i], more_random_bits(random_bits(elements, i)));
}

// Updates at most one strip with moments that are rounded, which are in fp32 in the L1 cache meanwhile.
template <class Rule, class Weight, class Moment, class Grad>
HYTRAIN_INLINE std::enable_if_t<!std::is_same<Moment, float>::value> update_strip(
    State<Rule, Weight, Moment> from, const Grad *grads, State<Rule, Weight, Moment> to, int64_t numel, Rule rule,
    Elements elements) {
    alignas(64) float exact[Rule::moments][strip];
    Moments<Rule, float> moments;
    for (int j = 0; j < Rule::moments; ++j) {
        moments[j] = exact[j];
#pragma omp simd
        for (int64_t i = 0; i < numel; ++i) exact[j][i] = widened(from.moments[j][i], j);
    }
    const State<Rule, Weight, float> read{from.weights, from.remainder, moments};
    const State<Rule, Weight, float> written{to.weights, to.remainder, moments};
    update_strip(read, grads, written, numel, rule, elements);
#pragma omp simd
    for (int64_t i = 0; i < numel; ++i) {
        const uint32_t random = random_bits(elements, i);
        for (int j = 0; j < Rule::moments; ++j)
            round_moment(exact[j][i], random >> 16 * j & 0xffffu, j, to.moments[j][i]);
    }
}

template <class T>
inline void prefetch(const T *plane, int64_t at) {
    for (size_t line = 0; line < strip * sizeof(T); line += 64)
        __builtin_prefetch(reinterpret_cast<const char *>(plane + at) + line);
}

// Writes whole cache lines past the cache. An ordinary store first reads the line that it replaces. In place the line is
// cached already; elsewhere that would add twelve bytes to the twenty-six per bf16 parameter.
inline void stream(void *to, const void *from, size_t nbytes) {
#ifdef __SSE2__
    if (reinterpret_cast<uintptr_t>(to) % 64 == 0) {
        auto *out = static_cast<char *>(to);
        auto *in = static_cast<const char *>(from);
        for (size_t at = 0; at < nbytes; at += 64) {
#ifdef __AVX512F__
            _mm512_stream_si512(reinterpret_cast<__m512i *>(out + at), _mm512_load_si512(in + at));
#else
            for (size_t part = at; part < at + 64; part += 16)
                _mm_stream_si128(reinterpret_cast<__m128i *>(out + part),
                                 _mm_load_si128(reinterpret_cast<const __m128i *>(in + part)));
#endif
        }
        return;
    }
#endif
    std::memcpy(to, from, nbytes);
}

// From here on, other threads and devices see the streamed stores.
inline void settle() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

// A strip's results are computed in the L1 cache and written as whole lines.
template <class Rule, class Weight, class Moment, class Grad>
HYTRAIN_INLINE void update_strip_elsewhere(State<Rule, Weight, Moment> from, const Grad *grads,
                                           State<Rule, Weight, Moment> to, Rule rule, Elements elements) {
    alignas(64) Weight weights[strip];
    alignas(64) typename Rest<Weight>::type remainder[strip];
    alignas(64) Moment moments[Rule::moments][strip];
    State<Rule, Weight, Moment> here{weights, remainder, {}};
    for (int j = 0; j < Rule::moments; ++j) here.moments[j] = moments[j];
    update_strip(from, grads, here, strip, rule, elements);
    stream(to.weights, weights, sizeof weights);
    if (Rest<Weight>::exists) stream(to.remainder, remainder, sizeof remainder);
    for (int j = 0; j < Rule::moments; ++j) stream(to.moments[j], moments[j], sizeof moments[j]);
}

// AdamW reads five planes and writes four, presumably more than hardware prefetchers follow well. Prefetching each strip
// raises 6.25 G elements/s to 7.07 (bf16, 14 threads of a Xeon with AVX-512), whether 512 or 2048 elements ahead. A
// prefetch cannot fault, so the last ones may reach beyond the planes.
template <class Rule, class Weight, class Moment, class Grad>
void update_range(State<Rule, Weight, Moment> from, const Grad *grads, State<Rule, Weight, Moment> to, int64_t numel,
                  Rule rule, Elements elements) {
    const bool in_place = from.weights == to.weights;
    int64_t at = 0;
    for (; at + strip <= numel; at += strip) {
        if (HYTRAIN_PREFETCH) {
            prefetch(from.weights, at + HYTRAIN_PREFETCH);
            prefetch(grads, at + HYTRAIN_PREFETCH);
            if (Rest<Weight>::exists) prefetch(from.remainder, at + HYTRAIN_PREFETCH);
            for (const Moment *moment : from.moments) prefetch(moment, at + HYTRAIN_PREFETCH);
        }
        if (in_place)
            update_strip(from.at(at), grads + at, from.at(at), strip, rule, elements.at(at));
        else
            update_strip_elsewhere(from.at(at), grads + at, to.at(at), rule, elements.at(at));
    }
    if (at < numel) update_strip(from.at(at), grads + at, to.at(at), numel - at, rule, elements.at(at));
    if (!in_place) settle();
}

// How a thread treats denormal numbers, and how it rounds: as backend.py says. torch.set_flush_denormal changes
// it for the thread that calls it, and each thread that begins later has that of the thread that has made it.
#if defined(__SSE2__)
constexpr unsigned modes = 0xe040;
inline unsigned float_mode() {
    const unsigned state = _mm_getcsr();
    return (state >> 15 & 1) | (state >> 6 & 1) << 1 | (state >> 13 & 3) << 2;
}
inline void set_float_mode(unsigned mode) {
    _mm_setcsr((_mm_getcsr() & ~modes) | (mode & 1) << 15 | (mode >> 1 & 1) << 6 | (mode >> 2 & 3) << 13);
}
#elif defined(__aarch64__)
constexpr uint64_t modes = 0x1c00000;  // one bit flushes both; the two bits of the rounding are the other way round
inline unsigned swapped(unsigned rounding) { return (rounding & 1) << 1 | rounding >> 1; }
inline unsigned float_mode() {
    uint64_t state;
    asm volatile("mrs %0, fpcr" : "=r"(state));
    return (state >> 24 & 1 ? 3 : 0) | swapped(state >> 22 & 3) << 2;
}
inline void set_float_mode(unsigned mode) {
    uint64_t state;
    asm volatile("mrs %0, fpcr" : "=r"(state));
    state = (state & ~modes) | static_cast<uint64_t>(mode & 3 ? 1 : 0) << 24;
    state |= static_cast<uint64_t>(swapped(mode >> 2 & 3)) << 22;
    asm volatile("msr fpcr, %0" : : "r"(state) : "memory");
}
#else
inline unsigned float_mode() { return 0; }
inline void set_float_mode(unsigned) {}
#endif

class AsCaller {  // a thread of OpenMP computes as the thread does that calls
public:
    explicit AsCaller(unsigned mode) : before(float_mode()), differs(mode != before) {
        if (differs) set_float_mode(mode);
    }
    ~AsCaller() {
        if (differs) set_float_mode(before);
    }

private:
    const unsigned before;
    const bool differs;
};

// Threads take whole blocks, so no two threads write to the same cache line of an aligned plane.
constexpr int64_t block = 4096;

template <class Rule, class Weight, class Grad, class Moment>
void update(const Planes *from, const void *grads, float by, const Planes *to, int64_t numel, int64_t in_vectors,
            const void *scalars, const Elements *elements, int threads) {
    using Tail = typename Rule::Tail;
    const int64_t all = numel;
    if (!std::is_same<Rule, Tail>::value) numel = in_vectors;
    Grad last[strip];
    for (int64_t at = numel; at < all; at += strip) {
        const int64_t some = at + strip < all ? strip : all - at;
        update_strip(from->as<Tail, Weight, Moment>().at(at),
                     multiplied(static_cast<const Grad *>(grads) + at, by, last, some),
                     to->as<Tail, Weight, Moment>().at(at), some, *static_cast<const Tail *>(scalars),
                     elements->at(at));
    }
    const Rule rule = *static_cast<const Rule *>(scalars);
    const int64_t blocks = (numel + block - 1) / block;
    const unsigned mode = float_mode();
#pragma omp parallel num_threads(threads) if (blocks > 1)
    {
        const AsCaller computes(mode);
        alignas(64) Grad products[block];
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t begin = b * block;
            const int64_t end = begin + block < numel ? begin + block : numel;
            const Grad *const given =
                multiplied(static_cast<const Grad *>(grads) + begin, by, products, end - begin);
            update_range(from->as<Rule, Weight, Moment>().at(begin), given,
                         to->as<Rule, Weight, Moment>().at(begin), end - begin, rule, elements->at(begin));
        }
    }
}

}  // namespace

extern "C" {

#define HYTRAIN_UPDATE(name, Rule, Weight, Grad, Moment)                                                  \
    void hytrain_##name(const Planes *from, const void *grads, float by, const Planes *to, int64_t numel, \
                        int64_t in_vectors, const void *scalars, const Elements *elements, int threads) { \
        update<Rule, Weight, Grad, Moment>(from, grads, by, to, numel, in_vectors, scalars, elements, threads); \
    }
#define HYTRAIN_STATES(name, Rule, Weight, Grad)                    \
    HYTRAIN_UPDATE(name##_float32, Rule, Weight, Grad, float)       \
    HYTRAIN_UPDATE(name##_bfloat16, Rule, Weight, Grad, bf16)       \
    HYTRAIN_UPDATE(name##_float8, Rule, Weight, Grad, float8)
#define HYTRAIN_RULE(name, Rule)                                            \
    HYTRAIN_STATES(name##_bfloat16_bfloat16, Rule, bf16, bf16)              \
    HYTRAIN_STATES(name##_lone_bfloat16_bfloat16, Rule, lone_bf16, bf16)    \
    HYTRAIN_STATES(name##_float16_float16, Rule, fp16, fp16)                \
    HYTRAIN_STATES(name##_float32_bfloat16, Rule, float, bf16)              \
    HYTRAIN_STATES(name##_float32_float32, Rule, float, float)
HYTRAIN_RULE(adamw, Adam<false>)
HYTRAIN_RULE(sgd, SGD)
HYTRAIN_RULE(sgd_momentum, SGDMomentum)
HYTRAIN_RULE(lion, Lion)

unsigned hytrain_float_mode() { return float_mode(); }
void hytrain_set_float_mode(unsigned mode) { set_float_mode(mode); }

}  // extern "C"
