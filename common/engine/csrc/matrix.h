// y = x W^T for weights that were packed once (panel.h). Small batches stream the weight once, at the speed of memory;
// large ones keep a few panels in the cache. Every output is one chain over the inputs whose order no other row changes,
// so a row's result does not depend, to the bit, on its batch.
//
// Bfloat16 goes to the processor's matrix units (AMX) where it has them, else to its dot products, else through floats:
// three orders of summation, of which one machine always uses the same. Int8 weights are multiplied as the integers that
// they are, on the same three ways; the sum is scaled.
#pragma once

#include <algorithm>
#include <cstdint>

#include "matrix_tiles.h"
#include "matrix_vectors.h"

namespace baton {

constexpr int64_t kRowsReadable = 32;  // `multiply` may read rows of x up to the next multiple of this

inline bool for_matrix_units(const float*, int64_t) { return false; }
inline bool for_matrix_units(const bf16*, int64_t inputs) { return inputs % kTileInputs == 0 && matrix_units(); }

// Dot products of pairs, where there are no matrix units.
inline bool for_dots_of_pairs(const float*, int64_t) { return false; }
inline bool for_dots_of_pairs(const bf16*, int64_t inputs) { return kDotsOfBf16 && inputs % kTileInputs == 0; }

// A packed weight: of the type of what it is multiplied with, or of int8.
struct Packed {
    const void* weights;
    const float* scales;  // [outputs up to whole panels] of int8, else null
    int64_t inputs;
};

template <class T, class W>
void multiply_as(const T* x, int64_t rows, int64_t inputs, const void* weights, int64_t first, int64_t panels,
                 float* out, int64_t out_stride) {
    const W* panel = static_cast<const W*>(weights) + first * kPanel * inputs;
    if constexpr (std::is_same_v<T, bf16>) {
        if (for_matrix_units(x, inputs)) {
            multiply_tiles(x, rows, inputs, as_panels<bf16>(panel, panels, inputs), panels, out, out_stride);
            return;
        }
    }
    multiply_vectors(x, rows, inputs, panel, panels, out, out_stride);
}

// out [rows up to a multiple of kRowsReadable][panels * 16] = x [rows][inputs] times `panels` (1 to 4) panels from number
// `first` on. Rows of x and of out beyond `rows`, up to that multiple, are read and written, whatever they hold. The
// calling thread has `Tiles`.
template <class T>
void multiply(const T* x, int64_t rows, const Packed& matrix, int64_t first, int64_t panels, float* out,
              int64_t out_stride) {
    if (!matrix.scales) {
        multiply_as<T, T>(x, rows, matrix.inputs, matrix.weights, first, panels, out, out_stride);
        return;
    }
    multiply_as<T, int8_t>(x, rows, matrix.inputs, matrix.weights, first, panels, out, out_stride);
    const float* scales = matrix.scales + first * kPanel;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < panels * kPanel; ++i) out[r * out_stride + i] *= scales[i];
}

// How many panels one work item takes, when `panels` are to be shared out among `threads`.
inline int64_t panels_per_item(int64_t panels, int64_t threads) {
    return threads == 1 ? kMostPanels : std::max<int64_t>(1, std::min(kMostPanels, panels / (8 * threads)));
}

}  // namespace baton
