// Small dense products, the inner loops of attention. Each element of a result is one chain of multiply-adds, in the
// order of dimensions or of keys, so its bits depend neither on how many rows or columns are computed along with it nor
// on who computes them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace baton {

#ifdef __AVX512F__
constexpr int kSums = 24;  // of 16 floats each, that registers hold beside what goes into them
#else
constexpr int kSums = 6;
#endif
constexpr int kStripRows = 6;

// Vectors of 16 columns that are computed side by side for R rows.
template <int R>
constexpr int kAbreast = kSums >= 4 * R ? 4 : kSums >= 2 * R ? 2 : 1;

// Calls strip(R, first row) for strips of R rows, 6 and one of what is left.
template <class Strip>
void by_strips(int64_t rows, const Strip& strip) {
    int64_t r = 0;
    for (; r + kStripRows <= rows; r += kStripRows) strip(std::integral_constant<int, kStripRows>(), r);
    switch (rows - r) {
        case 1: strip(std::integral_constant<int, 1>(), r); break;
        case 2: strip(std::integral_constant<int, 2>(), r); break;
        case 3: strip(std::integral_constant<int, 3>(), r); break;
        case 4: strip(std::integral_constant<int, 4>(), r); break;
        case 5: strip(std::integral_constant<int, 5>(), r); break;
        default: break;
    }
}

// Calls tile(V, first vector) for `vectors` of them, at most `V` at a time.
template <int V, class Tile>
void by_vectors(int64_t vectors, int64_t first, const Tile& tile) {
    for (; first + V <= vectors; first += V) tile(std::integral_constant<int, V>(), first);
    if constexpr (V > 1) by_vectors<V / 2>(vectors, first, tile);
}

// C[R][V * 16] += A[R][depth] times the rows that `b` points to, from column `col` on.
template <int R, int V, class T>
void product_tile(const float* a, int64_t a_stride, const T* const* b, int64_t col, int64_t depth, float* c,
                  int64_t c_stride) {
    f32x16 sum[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = load16(c + r * c_stride + v * 16);
    for (int64_t k = 0; k < depth; ++k) {
        f32x16 row[V];
        for (int v = 0; v < V; ++v) row[v] = load16(b[k] + col + v * 16);
        for (int r = 0; r < R; ++r) {
            const f32x16 factor = splat16(a[r * a_stride + k]);
            for (int v = 0; v < V; ++v) sum[r][v] += factor * row[v];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store16(c + r * c_stride + v * 16, sum[r][v]);
}

// C[rows][columns] += A[rows][depth] B[depth][columns]; `b` points to B's rows; columns is a multiple of 16.
template <class T>
void product(const float* a, int64_t a_stride, const T* const* b, int64_t rows, int64_t depth, int64_t columns,
             float* c, int64_t c_stride) {
    by_strips(rows, [&](auto strip, int64_t r) {
        constexpr int R = decltype(strip)::value;
        by_vectors<kAbreast<R>>(columns / 16, 0, [&](auto abreast, int64_t v) {
            product_tile<R, decltype(abreast)::value>(a + r * a_stride, a_stride, b, v * 16, depth,
                                                      c + r * c_stride + v * 16, c_stride);
        });
    });
}

// The numbers of 16 words: floats, or the first and then the second of pairs.
inline void unpack(const float* words, f32x16 (&numbers)[1]) { numbers[0] = load16(words); }
inline void unpack(const bf16* words, f32x16 (&numbers)[2]) {
    u32x16 pairs;
    std::memcpy(&pairs, words, sizeof pairs);
    const u32x16 first = pairs << 16, second = pairs & 0xffff0000u;
    std::memcpy(&numbers[0], &first, sizeof first);
    std::memcpy(&numbers[1], &second, sizeof second);
}

template <int R, int V, class T>
void score_tile(const float* query, int64_t dim, const T* const* panels, float* scores, int64_t stride) {
    constexpr int kPerWord = 4 / sizeof(T);
    f32x16 sum[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = f32x16{};
    for (int64_t d = 0; d < dim; d += kPerWord) {
        f32x16 keys[V][kPerWord];
        for (int v = 0; v < V; ++v) unpack(panels[v] + d * 16, keys[v]);
        for (int i = 0; i < kPerWord; ++i)
            for (int r = 0; r < R; ++r) {
                const f32x16 factor = splat16(query[r * dim + d + i]);
                for (int v = 0; v < V; ++v) sum[r][v] += factor * keys[v][i];
            }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store16(scores + r * stride + v * 16, sum[r][v]);
}

// scores [rows][16 * count] (rows `stride` apart) of queries [rows][dim] and `count` panels of keys (pages.h).
template <class T>
void score(const float* query, int64_t dim, int64_t rows, const T* const* panels, int64_t count, float* scores,
           int64_t stride) {
    by_strips(rows, [&](auto strip, int64_t r) {
        constexpr int R = decltype(strip)::value;
        by_vectors<kAbreast<R>>(count, 0, [&](auto abreast, int64_t v) {
            score_tile<R, decltype(abreast)::value>(query + r * dim, dim, panels + v, scores + r * stride + v * 16,
                                                    stride);
        });
    });
}

}  // namespace baton
