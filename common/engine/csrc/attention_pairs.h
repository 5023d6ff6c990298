// The weighted values of attention by dot products of pairs of bfloat16, where the processor has those and no matrix
// units. Each element of a result is one chain over pairs of keys in their order, whatever is computed along with it.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention_tiles.h"
#include "product.h"

namespace baton {

#ifdef __AVX512BF16__

// sums [R][V * 16] += weights [R][keys] times values; load(j, pairs) gives those of keys j and j + 1, V times 16 pairs.
template <int R, int V, class Load>
void value_strip(const bf16* weights, int64_t stride, int64_t keys, const Load& load, float* sums, int64_t dim) {
    typedef Step<bf16, bf16> S;
    Lanes sum[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = load_lanes(sums + r * dim + v * kPanel);
    for (int64_t j = 0; j < keys; j += 2) {
        S::Weights values[V];
        load(j, values);
        for (int r = 0; r < R; ++r) {
            const S::Factor factor = S::factor(weights + r * stride + j);
            for (int v = 0; v < V; ++v) sum[r][v] = S::add(sum[r][v], values[v], factor);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
            const Lanes one = sum[r][v];  // as in multiply_rows
            std::memcpy(sums + r * dim + v * kPanel, &one, sizeof one);
        }
}

// sums [rows][dim] += weights [rows][keys] (rows `stride` apart) times values, that were packed (pack_values).
inline void value_pairs(const bf16* weights, int64_t stride, int64_t rows, const bf16* packed, int64_t keys, float* sums,
                        int64_t dim) {
    const int64_t step = dim / kPanel * kTileElements;  // what 32 keys take
    by_strips(rows, [&](auto strip, int64_t r) {
        constexpr int R = decltype(strip)::value;
        by_vectors<kAbreast<R>>(dim / kPanel, 0, [&](auto abreast, int64_t first) {
            constexpr int V = decltype(abreast)::value;
            const bf16* from = packed + first * kTileElements;
            value_strip<R, V>(
                weights + r * stride, stride, keys,
                [=](int64_t j, LaneBits* pairs) {
                    const bf16* place = from + j / (2 * kTilePairs) * step + j % (2 * kTilePairs) * kPanel;
                    for (int v = 0; v < V; ++v) pairs[v] = load_pairs(place + v * kTileElements);
                },
                sums + r * dim + first * kPanel, dim);
        });
    });
}

// Which numbers of two rows of 32 each half of their pairs takes.
struct PairOrder {
    alignas(64) uint16_t from[2][32] = {};

    constexpr PairOrder() {
        for (uint16_t i = 0; i < 64; ++i) from[i / 32][i % 32] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    }
};

// Two rows of 32 numbers as two registers of pairs.
inline void interleave(const bf16* even, const bf16* odd, LaneBits* pairs) {
    static constexpr PairOrder kOrder;
    const __m512i evens = _mm512_loadu_si512(even), odds = _mm512_loadu_si512(odd);
    for (int half = 0; half < 2; ++half)
        pairs[half] = (LaneBits)_mm512_permutex2var_epi16(evens, _mm512_load_si512(kOrder.from[half]), odds);
}

// The same of values where they lie, for rows so few that packing them would cost more. All keys but [first, count) are
// taken for zeros. `ahead`: what is fetched meanwhile.
inline void value_pairs(const bf16* weights, int64_t stride, int64_t rows, const bf16* const* values, int64_t first,
                        int64_t count, float* sums, int64_t dim, const Ahead& ahead) {
    alignas(64) static const bf16 zeros[4 * kPanel] = {};
    const auto row = [&](int64_t j, int64_t d) { return j < first || j >= count ? zeros : values[j] + d; };
    by_strips(rows, [&](auto strip, int64_t r) {
        constexpr int R = decltype(strip)::value;
        by_vectors<kAbreast<R>>(dim / kPanel, 0, [&](auto abreast, int64_t at) {
            constexpr int V = decltype(abreast)::value;
            value_strip<R, V>(
                weights + r * stride, stride, count,
                [&](int64_t j, LaneBits* pairs) {
                    if (!r && !at) ahead.fetch(j / 2, dim);
                    const bf16 *even = row(j, at * kPanel), *odd = row(j + 1, at * kPanel);
                    for (int v = 0; v + 1 < V; v += 2)  // dim is a multiple of 32, and V even
                        interleave(even + v * kPanel, odd + v * kPanel, pairs + v);
                },
                sums + r * dim + at * kPanel, dim);
        });
    });
}

#else

inline void value_pairs(const bf16*, int64_t, int64_t, const bf16*, int64_t, float*, int64_t) {}
inline void value_pairs(const bf16*, int64_t, int64_t, const bf16* const*, int64_t, int64_t, float*, int64_t,
                        const Ahead&) {}

#endif

}  // namespace baton
