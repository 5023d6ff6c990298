// How a packed weight lies in memory: in panels of 16 outputs, the last one padded with zeros. Float32 and int8
// [outputs / 16][inputs][16], bfloat16 [outputs / 16][inputs / 2][16][2]. Int8 weights have a float scale per output.
//
// Also panels of one type made into those of another, exactly: an int8 has no more digits than a bfloat16, and that is
// the upper half of a float.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace baton {

constexpr int64_t kPanel = 16;
constexpr int64_t kMostPanels = 4;  // that are taken side by side

// As many floats as one register holds. Sums over all inputs are kept in these: longer vectors would live in memory.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr int64_t kPanelParts = kPanel / kLanes;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t LaneBits __attribute__((vector_size(4 * kLanes)));
typedef int32_t LaneIntegers __attribute__((vector_size(4 * kLanes)));
typedef int8_t LaneBytes __attribute__((vector_size(kLanes)));

inline Lanes widened(const int8_t* from) {
#if defined(__AVX512F__)
    const __m512i integers = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return (Lanes)_mm512_cvtepi32_ps(integers);
#elif defined(__AVX2__)  // compilers do not find this instruction
    const __m256i integers = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return (Lanes)_mm256_cvtepi32_ps(integers);
#else
    LaneBytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, LaneIntegers), Lanes);
#endif
}

// The first and the second of each pair of bfloat16.
inline Lanes widened_even(LaneBits pairs) { return (Lanes)(pairs << 16); }
inline Lanes widened_odd(LaneBits pairs) { return (Lanes)(pairs & 0xffff0000u); }

inline LaneBits load_pairs(const bf16* from) {
    LaneBits pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    return pairs;
}

// Each makes `inputs` times 16 elements of another type.
inline void widen(const int8_t* from, int64_t inputs, float* to) {
    for (int64_t i = 0; i < inputs * kPanel; i += kLanes) {
        const Lanes weights = widened(from + i);
        std::memcpy(to + i, &weights, sizeof weights);
    }
}

inline void widen(const bf16* from, int64_t inputs, float* to) {
    for (int64_t k = 0; k < inputs; k += 2)
        for (int64_t p = 0; p < kPanel; p += kLanes) {
            const LaneBits pairs = load_pairs(from + k * kPanel + 2 * p);
            const Lanes even = widened_even(pairs), odd = widened_odd(pairs);
            std::memcpy(to + k * kPanel + p, &even, sizeof even);
            std::memcpy(to + (k + 1) * kPanel + p, &odd, sizeof odd);
        }
}

inline void widen(const int8_t* from, int64_t inputs, bf16* to) {
    for (int64_t k = 0; k < inputs; k += 2)
        for (int64_t p = 0; p < kPanel; p += kLanes) {
            const LaneBits even = (LaneBits)widened(from + k * kPanel + p);
            const LaneBits odd = (LaneBits)widened(from + (k + 1) * kPanel + p);
            const LaneBits pairs = even >> 16 | odd;
            std::memcpy(to + k * kPanel + 2 * p, &pairs, sizeof pairs);
        }
}

}  // namespace baton
