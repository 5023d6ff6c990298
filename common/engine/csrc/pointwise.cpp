// What lies between the matrix products. Root-mean-square norm of rows: y = x / sqrt(mean(x^2) + eps) * (shift +
// weight), where torch takes eight passes over a small tensor; each row is summed in one order, whatever it is batched
// with. And SiLU, y = x / (1 + e^-x), alone or as the gate of another tensor.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "activation.h"
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

// Mirrored by `SiluArgs` in kernels.py.
struct SiluArgs {
    int64_t is_bf16, count;
    const void* x;
    const void* gated;  // what SiLU of x is multiplied with, or null; read before y is written
    void* y;  // may be x
};

namespace {

constexpr int64_t kSiluBlock = 4096;
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

// SiLU is rounded before it is multiplied: that is what two operations do.
template <class T>
void silu_to(const T* x, const T* gated, T* y) {
    const f32x16 value = silu16(load16(x));
    store16(y, gated ? rounded<T>(value) * load16(gated) : value);
}

template <class T>
void silu(const SiluArgs& a) {
    const T *x = static_cast<const T*>(a.x), *gated = static_cast<const T*>(a.gated);
    T* y = static_cast<T*>(a.y);
#pragma omp parallel for schedule(static) if (a.count >= kSerialWork)
    for (int64_t begin = 0; begin < a.count; begin += kSiluBlock) {
        const int64_t end = std::min(a.count, begin + kSiluBlock);
        int64_t i = begin;
        for (; i + 16 <= end; i += 16) silu_to(x + i, gated ? gated + i : nullptr, y + i);
        if (i == end) continue;
        T tail[16] = {}, gated_tail[16] = {};
        std::copy(x + i, x + end, tail);
        if (gated) std::copy(gated + i, gated + end, gated_tail);
        silu_to(tail, gated ? gated_tail : nullptr, tail);
        std::copy_n(tail, end - i, y + i);
    }
}

}  // namespace

extern "C" void baton_silu(const SiluArgs* args) { args->is_bf16 ? silu<bf16>(*args) : silu<float>(*args); }

extern "C" int64_t baton_silu_args_bytes() { return sizeof(SiluArgs); }

extern "C" void baton_norm(const NormArgs* args) { args->is_bf16 ? normalise<bf16>(*args) : normalise<float>(*args); }

extern "C" int64_t baton_norm_args_bytes() { return sizeof(NormArgs); }
