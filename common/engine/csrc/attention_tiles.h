// The products of attention on the processor's matrix units: bfloat16 in, float out, 16 rows at a time. Each element of
// a result is one chain in the order of its keys or of its dimensions, whatever is computed along with it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "matrix.h"

namespace baton {

constexpr int64_t kTilePairs = 16;  // pairs of bfloat16 in a tile's row
constexpr int64_t kTileElements = kTileRows * 2 * kTilePairs;

// 2^x for x <= 0, to what bfloat16 can tell (a relative 2^-14); 0 below -126. Taylor's polynomial on [-1/2, 1/2].
inline Lanes exp2_of(Lanes x) {
    const Lanes clamped = max_of_both(splat(-126.0f), x);  // a NaN stays one
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Lanes n = (clamped + magic) - magic;
    const Lanes r = clamped - n;
    Lanes p = r * 9.6181291e-3f + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    const LaneIntegers exponent = __builtin_convertvector(n, LaneIntegers) << 23;
    return x < -126.0f ? Lanes{} : (Lanes)((LaneIntegers)p + exponent);
}

inline f32x16 exp2_16(const f32x16& x) { return each(x, exp2_of); }

// Rows that will be read next. They lie in pages anywhere, so the hardware does not foresee them; and asking for many at
// once would wait for the first ones, so they are asked for one by one between other work.
struct Ahead {
    const bf16* const* rows;
    int64_t count;
    int64_t per_pair;  // how many while a pair of keys is worked on

    void fetch(int64_t pair, int64_t dim) const {
        for (int64_t row = pair * per_pair; row < (pair + 1) * per_pair && row < count; ++row)
            for (int64_t d = 0; d < dim; d += 32) __builtin_prefetch(rows[row] + d);
    }
};

// Of two rows of numbers, as many as a register holds.
inline LaneBits pairs_of(const bf16* even, const bf16* odd) {
    return (LaneBits)load_lanes(even) >> 16 | (LaneBits)load_lanes(odd);
}

// V of keys [first, count) as right factors: for each 32 keys and each 16 dimensions one tile, [pairs of
// keys][dimensions][2]. All other keys, up to the next multiple of 32, are zero.
inline void pack_values(const bf16* const* values, int64_t first, int64_t count, int64_t dim, bf16* to,
                        const Ahead& ahead) {
    alignas(64) static const bf16 zeros[kTileRows] = {};
    const auto row = [&](int64_t key) { return key >= first && key < count ? values[key] : nullptr; };
    const int64_t step = dim / kTileRows * kTileElements;
    for (int64_t j = 0; j < count; j += 2 * kTilePairs, to += step)
        for (int64_t pair = 0; pair < kTilePairs; ++pair) {
            const bf16 *even = row(j + 2 * pair), *odd = row(j + 2 * pair + 1);
            bf16* place = to + pair * 2 * kTilePairs;
            ahead.fetch(j / 2 + pair, dim);
            for (int64_t d = 0; d < dim; d += kTileRows, place += kTileElements)
                for (int64_t i = 0; i < kTileRows; i += kLanes) {
                    const LaneBits pairs = pairs_of(even ? even + d + i : zeros, odd ? odd + d + i : zeros);
                    std::memcpy(place + 2 * i, &pairs, sizeof pairs);
                }
        }
}

#ifdef __AMX_BF16__

// scores [16][16 * count] (rows `stride` apart) of 16 queries [16][dim] and `count` panels of keys (pages.h), each of
// which is a row of tiles.
inline void score_tiles(const bf16* query, int64_t dim, const bf16* const* panels, int64_t count, float* scores,
                        int64_t stride) {
    int64_t j = 0;
    for (; j + 2 <= count; j += 2) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t d = 0; d < dim; d += 2 * kTilePairs) {
            _tile_loadd(4, query + d, dim * 2);
            _tile_loadd(5, panels[j] + d * kTileRows, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, panels[j + 1] + d * kTileRows, 64);
            _tile_dpbf16ps(1, 4, 6);
        }
        _tile_stored(0, scores + j * kTileRows, stride * 4);
        _tile_stored(1, scores + (j + 1) * kTileRows, stride * 4);
    }
    if (j == count) return;
    _tile_zero(0);
    for (int64_t d = 0; d < dim; d += 2 * kTilePairs) {
        _tile_loadd(4, query + d, dim * 2);
        _tile_loadd(5, panels[j] + d * kTileRows, 64);
        _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, scores + j * kTileRows, stride * 4);
}

// sums [16][dim] += weights [16][keys] (rows `stride` apart) times packed values; `keys` is a multiple of 32.
inline void value_tiles(const bf16* weights, int64_t stride, const bf16* packed, int64_t keys, float* sums,
                        int64_t dim) {
    const int64_t step = dim / kTileRows * kTileElements;  // what 32 keys take
    int64_t d = 0;
    for (; d + 2 * kTileRows <= dim; d += 2 * kTileRows, packed += 2 * kTileElements) {
        _tile_loadd(0, sums + d, dim * 4);
        _tile_loadd(1, sums + d + kTileRows, dim * 4);
        for (int64_t j = 0, at = 0; j < keys; j += 2 * kTilePairs, at += step) {
            _tile_loadd(4, weights + j, stride * 2);
            _tile_loadd(5, packed + at, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, packed + at + kTileElements, 64);
            _tile_dpbf16ps(1, 4, 6);
        }
        _tile_stored(0, sums + d, dim * 4);
        _tile_stored(1, sums + d + kTileRows, dim * 4);
    }
}

#else

inline void score_tiles(const bf16*, int64_t, const bf16* const*, int64_t, float*, int64_t) {}
inline void value_tiles(const bf16*, int64_t, const bf16*, int64_t, float*, int64_t) {}

#endif

}  // namespace baton
