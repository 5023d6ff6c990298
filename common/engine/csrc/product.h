// A small dense product, the inner loop of attention. Each element of C is one chain of multiply-adds in the order of
// k, so its bits depend neither on how many rows or columns are computed along with it nor on who computes them.
#pragma once

#include <cstdint>

#include "simd.h"

namespace baton {

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

template <int V, class T>
void product_columns(const float* a, int64_t a_stride, const T* const* b, int64_t col, int64_t rows, int64_t depth,
                     float* c, int64_t c_stride) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6)
        product_tile<6, V>(a + r * a_stride, a_stride, b, col, depth, c + r * c_stride, c_stride);
    a += r * a_stride;
    c += r * c_stride;
    switch (rows - r) {
        case 1: product_tile<1, V>(a, a_stride, b, col, depth, c, c_stride); break;
        case 2: product_tile<2, V>(a, a_stride, b, col, depth, c, c_stride); break;
        case 3: product_tile<3, V>(a, a_stride, b, col, depth, c, c_stride); break;
        case 4: product_tile<4, V>(a, a_stride, b, col, depth, c, c_stride); break;
        case 5: product_tile<5, V>(a, a_stride, b, col, depth, c, c_stride); break;
        default: break;
    }
}

// C[rows][columns] += A[rows][depth] B[depth][columns]; `b` points to B's rows; columns is a multiple of 16.
template <class T>
void product(const float* a, int64_t a_stride, const T* const* b, int64_t rows, int64_t depth, int64_t columns,
             float* c, int64_t c_stride) {
    int64_t col = 0;
    for (; col + 64 <= columns; col += 64) product_columns<4>(a, a_stride, b, col, rows, depth, c + col, c_stride);
    if (col + 32 <= columns) {
        product_columns<2>(a, a_stride, b, col, rows, depth, c + col, c_stride);
        col += 32;
    }
    if (col < columns) product_columns<1>(a, a_stride, b, col, rows, depth, c + col, c_stride);
}

}  // namespace baton
