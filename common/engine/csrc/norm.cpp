// Root-mean-square normalisation of rows: y = x / sqrt(mean(x^2) + eps) * (shift + weight). Where torch takes eight
// passes over a small tensor, this takes two. Each row is summed in one order, whatever it is batched with.

#include <cmath>
#include <cstdint>

#include "simd.h"

using namespace baton;

// Mirrored by `NormArgs` in kernels.py.
struct NormArgs {
    int64_t is_bf16, rows, size;  // size is a multiple of 16
    const void* x;  // [rows][size], dense
    const float* weight;  // [size], with the shift added
    void* y;
    double eps;
    int64_t round_first;  // round x / rms to the output's type before the weight is applied
};

namespace {

constexpr int64_t kSerialWork = 1 << 15;  // elements below which waking threads costs more than it brings

template <class T>
f32x16 rounded(f32x16 value) {
    T stored[16];
    store16(stored, value);
    return load16(stored);
}

template <class T>
void normalise(const NormArgs& a) {
#pragma omp parallel for schedule(static) if (a.rows * a.size >= kSerialWork)
    for (int64_t row = 0; row < a.rows; ++row) {
        const T* x = static_cast<const T*>(a.x) + row * a.size;
        T* y = static_cast<T*>(a.y) + row * a.size;
        f32x16 squares = {};
        for (int64_t i = 0; i < a.size; i += 16) squares += load16(x + i) * load16(x + i);
        const float factor = 1.0f / std::sqrt(sum_of(squares) / a.size + static_cast<float>(a.eps));
        for (int64_t i = 0; i < a.size; i += 16) {
            const f32x16 scaled = load16(x + i) * factor;
            store16(y + i, (a.round_first ? rounded<T>(scaled) : scaled) * load16(a.weight + i));
        }
    }
}

}  // namespace

extern "C" void baton_norm(const NormArgs* args) { args->is_bf16 ? normalise<bf16>(*args) : normalise<float>(*args); }

extern "C" int64_t baton_norm_args_bytes() { return sizeof(NormArgs); }
