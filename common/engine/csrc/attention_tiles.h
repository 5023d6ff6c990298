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
inline f32x16 exp2_16(f32x16 x) {
    const f32x16 clamped = max16(splat16(-126.0f), x);  // a NaN stays one
    const f32x16 magic = splat16(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 n = (clamped + magic) - magic;
    const f32x16 r = clamped - n;
    f32x16 p = splat16(9.6181291e-3f);
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    const i32x16 exponent = __builtin_convertvector(n, i32x16) << 23;
    i32x16 bits;
    std::memcpy(&bits, &p, sizeof bits);
    bits += exponent;
    std::memcpy(&p, &bits, sizeof p);
    return x < -126.0f ? f32x16{} : p;
}

// Rows that will be read next. They lie in pages anywhere, so the hardware does not foresee them; and asking for many at
// once would wait for the first ones, so they are asked for one by one between other work.
struct Ahead {
    const bf16* const* rows;
    int64_t count;

    void fetch(int64_t row, int64_t dim) const {
        if (row >= count) return;
        for (int64_t d = 0; d < dim; d += 32) __builtin_prefetch(rows[row] + d);
    }
};

// K of `count` keys as right factors of scores: for each 16 keys and each 32 dimensions one tile, [pairs of
// dimensions][keys][2]. Keys up to the next multiple of 16 are zero.
inline void pack_keys(const bf16* const* keys, int64_t count, int64_t dim, bf16* to, const Ahead& ahead) {
    for (int64_t j = 0; j < count; j += kTileRows) {
        for (int64_t i = 0; i < kTileRows; ++i) ahead.fetch(j + i, dim);
        for (int64_t d = 0; d < dim; d += 2 * kTilePairs, to += kTileElements) {
            f32x16 tile[16];  // pairs, moved as if they were floats
            for (int64_t i = 0; i < kTileRows; ++i) {
                tile[i] = f32x16{};
                if (j + i < count) std::memcpy(&tile[i], keys[j + i] + d, sizeof tile[i]);
            }
            transpose16(tile);
            std::memcpy(to, tile, sizeof tile);
        }
    }
}

// V of keys [first, count) as right factors: for each 32 keys and each 16 dimensions one tile, [pairs of
// keys][dimensions][2]. All other keys, up to the next multiple of 32, are zero.
inline void pack_values(const bf16* const* values, int64_t first, int64_t count, int64_t dim, bf16* to,
                        const Ahead& ahead) {
    alignas(64) static const bf16 zeros[2 * kTilePairs] = {};
    const auto wide = [](const bf16* from) {
        u16x16 half;
        std::memcpy(&half, from, sizeof half);
        return __builtin_convertvector(half, u32x16);
    };
    const auto row = [&](int64_t key) { return key >= first && key < count ? values[key] : nullptr; };
    const int64_t tiles = dim / kTileRows;
    for (int64_t j = 0; j < count; j += 2 * kTilePairs, to += tiles * kTileElements)
        for (int64_t pair = 0; pair < kTilePairs; ++pair) {
            const bf16 *even = row(j + 2 * pair), *odd = row(j + 2 * pair + 1);
            bf16* place = to + pair * 2 * kTilePairs;
            ahead.fetch(j + 2 * pair, dim);
            ahead.fetch(j + 2 * pair + 1, dim);
            for (int64_t d = 0; d < dim; d += kTileRows, place += kTileElements) {
                const u32x16 both = wide(even ? even + d : zeros) | (wide(odd ? odd + d : zeros) << 16);
                std::memcpy(place, &both, sizeof both);
            }
        }
}

#ifdef __AMX_BF16__

// scores [16][keys] (rows `stride` apart) of 16 queries [16][dim] and packed keys; `keys` is a multiple of 16.
inline void score_tiles(const bf16* query, int64_t dim, const bf16* packed, int64_t keys, float* scores,
                        int64_t stride) {
    const int64_t column = dim / (2 * kTilePairs) * kTileElements;  // what 16 keys take
    int64_t j = 0;
    for (; j + 2 * kTileRows <= keys; j += 2 * kTileRows, packed += 2 * column) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t d = 0, at = 0; d < dim; d += 2 * kTilePairs, at += kTileElements) {
            _tile_loadd(4, query + d, dim * 2);
            _tile_loadd(5, packed + at, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, packed + column + at, 64);
            _tile_dpbf16ps(1, 4, 6);
        }
        _tile_stored(0, scores + j, stride * 4);
        _tile_stored(1, scores + j + kTileRows, stride * 4);
    }
    if (j == keys) return;
    _tile_zero(0);
    for (int64_t d = 0; d < dim; d += 2 * kTilePairs, packed += kTileElements) {
        _tile_loadd(4, query + d, dim * 2);
        _tile_loadd(5, packed, 64);
        _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, scores + j, stride * 4);
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

inline void score_tiles(const bf16*, int64_t, const bf16*, int64_t, float*, int64_t) {}
inline void value_tiles(const bf16*, int64_t, const bf16*, int64_t, float*, int64_t) {}

#endif

}  // namespace baton
