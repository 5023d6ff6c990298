// Sixteen floats at a time, in the compiler's own vector types: one source for AVX-512, AVX2, NEON and anything else.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace baton {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));

// bfloat16: the upper half of a float.
struct bf16 {
    uint16_t bits;
};

inline f32x16 load16(const float* from) {
    f32x16 value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline f32x16 load16(const bf16* from) {
    u16x16 half;
    std::memcpy(&half, from, sizeof half);
    const u32x16 wide = __builtin_convertvector(half, u32x16) << 16;
    f32x16 value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

inline void store16(float* to, f32x16 value) { std::memcpy(to, &value, sizeof value); }

// Rounds to nearest even; a NaN stays one.
inline void store16(bf16* to, f32x16 value) {
#ifdef __AVX512BF16__
    const __m256bh half = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(to, &half, sizeof half);
#else
    u32x16 bits;
    std::memcpy(&bits, &value, sizeof bits);
    const u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const u32x16 quiet = (bits >> 16) | 0x40u;
    const u32x16 chosen = (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
    const u16x16 half = __builtin_convertvector(chosen, u16x16);
    std::memcpy(to, &half, sizeof half);
#endif
}

// Written out: adding to zero would cost an addition per use, and a broadcast from memory costs nothing.
inline f32x16 splat16(float v) { return f32x16{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }

// `b` where one of them is no number.
inline f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }

// Lane i gets lane (i + S) mod 16.
template <int S>
inline f32x16 rotated(f32x16 v) {
#if defined(__clang__)
    f32x16 to;
    for (int lane = 0; lane < 16; ++lane) to[lane] = v[(lane + S) % 16];
    return to;
#else
    i32x16 from;
    for (int lane = 0; lane < 16; ++lane) from[lane] = (lane + S) % 16;
    return __builtin_shuffle(v, from);
#endif
}

inline float sum_of(f32x16 v) {
    v += rotated<8>(v);
    v += rotated<4>(v);
    v += rotated<2>(v);
    v += rotated<1>(v);
    return v[0];
}

inline float max_of(f32x16 v) {
    v = max16(v, rotated<8>(v));
    v = max16(v, rotated<4>(v));
    v = max16(v, rotated<2>(v));
    return max16(v, rotated<1>(v))[0];
}

// e^x for x <= 0 and a little above (the range of a softmax), to about 1 ulp; 0 below -87. Splits x into n ln 2 + r
// with |r| <= ln 2 / 2 and evaluates the Taylor polynomial of e^r (its remainder there is below 2^-25 from degree 7).
inline f32x16 exp16(f32x16 x) {
    const f32x16 clamped = max16(splat16(-87.0f), x);  // a NaN stays one: what is broken must show
    const f32x16 magic = splat16(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 n = (clamped * 1.44269504088896341f + magic) - magic;
    const f32x16 r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    f32x16 p = splat16(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const i32x16 exponent = (__builtin_convertvector(n, i32x16) + 127) << 23;
    f32x16 power;
    std::memcpy(&power, &exponent, sizeof power);
    return x < -87.0f ? f32x16{} : p * power;
}

inline f32x16 tanh16(f32x16 x) {
    const f32x16 size = max16(x, -x);
    const f32x16 e = exp16(-2.0f * size);
    const f32x16 large = (1.0f - e) / (1.0f + e);
    const f32x16 square = x * x;  // near 0 the quotient cancels: the series is exact to a float there
    const f32x16 small = x * (1.0f - square * (1.0f / 3 - square * (2.0f / 15 - square * (17.0f / 315))));
    return size < 0.1f ? small : (x < 0.0f ? -large : large);
}

// Transposes 16 rows of 16 in registers: at each stage rows i and i + s swap the lanes whose bit s differs.
template <int S>
inline void transpose_stage(f32x16 (&row)[16]) {
    i32x16 low, high;  // lanes of the first source are 0..15, of the second 16..31
    for (int lane = 0; lane < 16; ++lane) {
        low[lane] = (lane & S) ? 16 + lane - S : lane;
        high[lane] = (lane & S) ? 16 + lane : lane + S;
    }
    for (int i = 0; i < 16; ++i) {
        if (i & S) continue;
        const f32x16 a = row[i], b = row[i + S];
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

inline void transpose16(f32x16 (&row)[16]) {
    transpose_stage<1>(row);
    transpose_stage<2>(row);
    transpose_stage<4>(row);
    transpose_stage<8>(row);
}

}  // namespace baton
