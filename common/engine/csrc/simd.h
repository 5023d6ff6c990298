// Sixteen numbers at a time, in as many registers as they take: one of AVX-512, two of AVX2, four of NEON and the like. In
// the compiler's own vector types: one source for all of them. A vector type longer than a register will not do instead:
// compilers keep those in memory.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace baton {

// As many numbers of 32 bits as one register holds.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr int kParts = 16 / kLanes;

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t LaneBits __attribute__((vector_size(4 * kLanes)));
typedef int32_t LaneIntegers __attribute__((vector_size(4 * kLanes)));
typedef uint16_t LaneHalves __attribute__((vector_size(2 * kLanes)));
typedef int8_t LaneBytes __attribute__((vector_size(kLanes)));

// bfloat16: the upper half of a float.
struct bf16 {
    uint16_t bits;
};

template <class To, class From>
inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// ---- One register.

inline Lanes load_lanes(const float* from) {
    Lanes numbers;
    std::memcpy(&numbers, from, sizeof numbers);
    return numbers;
}

// Compilers do not find these instructions, nor those below for bytes.
inline Lanes load_lanes(const bf16* from) {
#if defined(__AVX512F__)
    const LaneBits wide = (LaneBits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
    const LaneBits wide = (LaneBits)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    LaneHalves halves;
    std::memcpy(&halves, from, sizeof halves);
    const LaneBits wide = __builtin_convertvector(halves, LaneBits);
#endif
    return (Lanes)(wide << 16);
}

inline void store_lanes(float* to, Lanes numbers) { std::memcpy(to, &numbers, sizeof numbers); }

// Rounds to nearest even; a NaN stays one.
inline void store_lanes(bf16* to, Lanes numbers) {
#ifdef __AVX512BF16__
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)numbers);
#else
    const LaneBits bits = (LaneBits)numbers;
    const LaneBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const LaneBits quiet = (bits >> 16) | 0x40u;
    const LaneHalves halves =
        __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded, LaneHalves);
#endif
    std::memcpy(to, &halves, sizeof halves);
}

// Integers of a byte as floats.
inline Lanes widened(const int8_t* from) {
#if defined(__AVX512F__)
    const __m512i integers = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return (Lanes)_mm512_cvtepi32_ps(integers);
#elif defined(__AVX2__)
    const __m256i integers = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return (Lanes)_mm256_cvtepi32_ps(integers);
#else
    LaneBytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, LaneIntegers), Lanes);
#endif
}

// Bytes as integers.
inline LaneIntegers widened(const uint8_t* from) {
#if defined(__AVX512F__)
    return (LaneIntegers)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
    return (LaneIntegers)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, LaneIntegers);
#endif
}

inline Lanes splat(float v) { return v - Lanes{}; }

// `b` where one of them is no number.
inline Lanes max_of_both(Lanes a, Lanes b) { return a > b ? a : b; }

// Lane i gets lane (i + S) mod kLanes.
template <int S>
inline Lanes rotated(Lanes v) {
#if defined(__clang__)
    Lanes to;
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = v[(lane + S) % kLanes];
    return to;
#else
    LaneIntegers from;
    for (int lane = 0; lane < kLanes; ++lane) from[lane] = (lane + S) % kLanes;
    return __builtin_shuffle(v, from);
#endif
}

// e^x for x <= 0 and a little above (the range of a softmax), to about 1 ulp; 0 below -87. Splits x into n ln 2 + r
// with |r| <= ln 2 / 2 and evaluates the Taylor polynomial of e^r (its remainder there is below 2^-25 from degree 7).
inline Lanes exp_of(Lanes x) {
    const Lanes clamped = max_of_both(splat(-87.0f), x);  // a NaN stays one: what is broken must show
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Lanes n = (clamped * 1.44269504088896341f + magic) - magic;
    const Lanes r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    Lanes p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const LaneIntegers exponent = (__builtin_convertvector(n, LaneIntegers) + 127) << 23;
    return x < -87.0f ? Lanes{} : p * (Lanes)exponent;
}

inline Lanes tanh_of(Lanes x) {
    const Lanes size = max_of_both(x, -x);
    const Lanes e = exp_of(-2.0f * size);
    const Lanes large = (1.0f - e) / (1.0f + e);
    const Lanes square = x * x;  // near 0 the quotient cancels: the series is exact to a float there
    const Lanes small = x * (1.0f - square * (1.0f / 3 - square * (2.0f / 15 - square * (17.0f / 315))));
    return size < 0.1f ? small : (x < 0.0f ? -large : large);
}

// ---- Sixteen numbers.

struct f32x16 {
    Lanes part[kParts];
};

inline f32x16 load16(const float* from) {
    f32x16 to;
    for (int p = 0; p < kParts; ++p) to.part[p] = load_lanes(from + p * kLanes);
    return to;
}

inline f32x16 load16(const bf16* from) {
    f32x16 to;
    for (int p = 0; p < kParts; ++p) to.part[p] = load_lanes(from + p * kLanes);
    return to;
}

template <class T>
inline void store16(T* to, const f32x16& numbers) {
    for (int p = 0; p < kParts; ++p) store_lanes(to + p * kLanes, numbers.part[p]);
}

#define BATON_ARITHMETIC(op)                                                     \
    inline f32x16 operator op(f32x16 a, const f32x16& b) {                       \
        for (int p = 0; p < kParts; ++p) a.part[p] = a.part[p] op b.part[p];     \
        return a;                                                                \
    }                                                                            \
    inline f32x16 operator op(f32x16 a, float b) {                               \
        for (int p = 0; p < kParts; ++p) a.part[p] = a.part[p] op b;             \
        return a;                                                                \
    }                                                                            \
    inline f32x16 operator op(float a, f32x16 b) {                               \
        for (int p = 0; p < kParts; ++p) b.part[p] = a op b.part[p];             \
        return b;                                                                \
    }
BATON_ARITHMETIC(+)
BATON_ARITHMETIC(-)
BATON_ARITHMETIC(*)
BATON_ARITHMETIC(/)
#undef BATON_ARITHMETIC

inline f32x16& operator+=(f32x16& a, const f32x16& b) { return a = a + b; }

template <class Function>
inline f32x16 each(f32x16 v, const Function& function) {
    for (int p = 0; p < kParts; ++p) v.part[p] = function(v.part[p]);
    return v;
}

inline f32x16 max16(f32x16 a, const f32x16& b) {
    for (int p = 0; p < kParts; ++p) a.part[p] = max_of_both(a.part[p], b.part[p]);
    return a;
}

inline f32x16 exp16(const f32x16& x) { return each(x, exp_of); }
inline f32x16 tanh16(const f32x16& x) { return each(x, tanh_of); }

// All sixteen joined, halves first.
template <int S, class Join>
inline float folded(Lanes v, const Join& join) {
    if constexpr (S == 0) {
        return v[0];
    } else {
        return folded<S / 2>(join(v, rotated<S>(v)), join);
    }
}

template <class Join>
inline float folded(f32x16 v, const Join& join) {
    for (int half = kParts / 2; half; half /= 2)
        for (int p = 0; p < half; ++p) v.part[p] = join(v.part[p], v.part[p + half]);
    return folded<kLanes / 2>(v.part[0], join);
}

inline float sum_of(const f32x16& v) {
    return folded(v, [](Lanes a, Lanes b) { return a + b; });
}
inline float max_of(const f32x16& v) { return folded(v, max_of_both); }

// ---- Sixteen rows.

typedef float Row16 __attribute__((vector_size(64)));
typedef int32_t RowPlaces __attribute__((vector_size(64)));

// Transposes 16 rows of 16 in registers: at each stage rows i and i + s swap the lanes whose bit s differs.
template <int S>
inline void transpose_stage(Row16 (&row)[16]) {
    RowPlaces low, high;  // lanes of the first source are 0..15, of the second 16..31
    for (int lane = 0; lane < 16; ++lane) {
        low[lane] = (lane & S) ? 16 + lane - S : lane;
        high[lane] = (lane & S) ? 16 + lane : lane + S;
    }
    for (int i = 0; i < 16; ++i) {
        if (i & S) continue;
        const Row16 a = row[i], b = row[i + S];
#if defined(__clang__)
        for (int lane = 0; lane < 16; ++lane) {
            row[i][lane] = (lane & S) ? b[lane - S] : a[lane];
            row[i + S][lane] = (lane & S) ? b[lane] : a[lane + S];
        }
#else
        row[i] = __builtin_shuffle(a, b, low);
        row[i + S] = __builtin_shuffle(a, b, high);
#endif
    }
}

inline void transpose16(Row16 (&row)[16]) {
    transpose_stage<1>(row);
    transpose_stage<2>(row);
    transpose_stage<4>(row);
    transpose_stage<8>(row);
}

}  // namespace baton
