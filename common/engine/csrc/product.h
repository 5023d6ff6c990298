// Small dense products, the inner loops of attention. Each element of a result is one chain of multiply-adds, in the
// order of dimensions or of keys, so its bits depend neither on how many rows or columns are computed along with it nor
// on who computes them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "matrix_vectors.h"

namespace baton {

constexpr int kSums = kManyRegisters ? 24 : 6;  // of 16 floats each, that registers hold beside what goes into them
constexpr int kStripRows = 6;
constexpr int64_t kLine = 64;  // bytes of the cache that are fetched at once

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

// C[R][V * 16] += A[R][depth] times the rows that `b` points to, from column `col` on. Meanwhile the same of the rows of
// `ahead` is fetched.
template <int R, int V, class T>
void product_tile(const float* a, int64_t a_stride, const T* const* b, const T* const* ahead, int64_t col,
                  int64_t depth, float* c, int64_t c_stride) {
    constexpr int kParts = V * kPanelParts;
    Lanes sum[R][kParts];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < kParts; ++p) sum[r][p] = load_lanes(c + r * c_stride + p * kLanes);
    for (int64_t k = 0; k < depth; ++k) {
        for (int64_t i = 0; i < V * 16; i += kLine / sizeof(T)) __builtin_prefetch(ahead[k] + col + i);
        Lanes row[kParts];
        for (int p = 0; p < kParts; ++p) row[p] = load_lanes(b[k] + col + p * kLanes);
        for (int r = 0; r < R; ++r) {
            const float factor = a[r * a_stride + k];
            for (int p = 0; p < kParts; ++p) sum[r][p] += factor * row[p];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < kParts; ++p) {
            const Lanes one = sum[r][p];  // as in multiply_rows
            std::memcpy(c + r * c_stride + p * kLanes, &one, sizeof one);
        }
}

// C[rows][columns] += A[rows][depth] B[depth][columns]; `b` points to B's rows; columns is a multiple of 16. `ahead`:
// as many rows that will be read next.
template <class T>
void product(const float* a, int64_t a_stride, const T* const* b, const T* const* ahead, int64_t rows, int64_t depth,
             int64_t columns, float* c, int64_t c_stride) {
    by_strips(rows, [&](auto strip, int64_t r) {
        constexpr int R = decltype(strip)::value;
        by_vectors<kAbreast<R>>(columns / 16, 0, [&](auto abreast, int64_t v) {
            product_tile<R, decltype(abreast)::value>(a + r * a_stride, a_stride, b, r ? b : ahead, v * 16, depth,
                                                      c + r * c_stride + v * 16, c_stride);
        });
    });
}

// scores [rows][16 * count] (rows `stride` apart) of queries [rows][dim] and `count` panels of keys (pages.h). `ahead`:
// as many panels that will be read next.
template <class X, class T>
void score(const X* query, int64_t dim, int64_t rows, const T* const* panels, const T* const* ahead, int64_t count,
           float* scores, int64_t stride) {
    by_strips(rows, [&](auto strip, int64_t r) {
        constexpr int R = decltype(strip)::value;
        by_vectors<kPanelsAbreast<R, X, T>>(count, 0, [&](auto abreast, int64_t first) {
            multiply_rows<R, decltype(abreast)::value, T>(
                query + r * dim, dim, [&](int v) { return panels[first + v]; },
                [&](int v) { return r ? panels[first + v] : ahead[first + v]; }, scores + r * stride + first * kPanel,
                stride);
        });
    });
}

}  // namespace baton
