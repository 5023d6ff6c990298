// How a packed weight lies in memory: in panels of 16 outputs, the last one padded with zeros. Float32 and int8
// [outputs / 16][inputs][16], bfloat16 [outputs / 16][inputs / 2][16][2]. Int8 weights have a float scale per output.
//
// Also panels of one type made into those of another, exactly: an int8 has no more digits than a bfloat16, and that is
// the upper half of a float.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace baton {

constexpr int64_t kPanel = 16;
constexpr int64_t kMostPanels = 4;  // that are taken side by side

constexpr int64_t kPanelParts = kPanel / kLanes;

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
