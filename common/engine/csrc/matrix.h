// y = x W^T for weights that were repacked once, in panels of 16 outputs: float32 [outputs / 16][inputs][16], bfloat16
// [outputs / 16][inputs / 2][16][2], the last panel padded with zeros. Small batches stream the weight once, at the
// speed of memory; large ones keep a few panels in the cache. Every output is one chain over the inputs whose order no
// other row changes, so a row's result does not depend, to the bit, on its batch.
//
// Bfloat16 goes to the processor's matrix units (AMX) where it has them, else to its dot products, else through floats:
// three orders of summation, of which one machine always uses the same.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

#if defined(__AVX512BF16__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace baton {

constexpr int64_t kPanel = 16;
constexpr int64_t kMostPanels = 4;  // that are taken side by side
constexpr int64_t kTileRows = 16;  // rows of a matrix unit's tile
constexpr int64_t kRowsReadable = 32;  // `multiply` may read rows of x up to the next multiple of this
constexpr int64_t kTileInputs = 32;  // inputs of one step of a matrix unit

// What one step over the inputs takes: one float, or a pair of bfloat16.
template <class T>
struct Step;

template <>
struct Step<float> {
    static constexpr int64_t kInputs = 1;
    typedef f32x16 Weights;
    static float factor(const float* x) { return *x; }
    static f32x16 add(f32x16 sum, f32x16 weights, float factor) { return sum + splat16(factor) * weights; }
};

template <>
struct Step<bf16> {
    static constexpr int64_t kInputs = 2;
    typedef u32x16 Weights;
    static uint32_t factor(const bf16* x) {
        uint32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return pair;
    }
    static f32x16 add(f32x16 sum, u32x16 weights, uint32_t factor) {
#ifdef __AVX512BF16__
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(factor)),
                                        (__m512bh)weights);
#else
        const uint32_t even = factor << 16, odd = factor & 0xffff0000u;
        float x_even, x_odd;
        std::memcpy(&x_even, &even, sizeof even);
        std::memcpy(&x_odd, &odd, sizeof odd);
        const u32x16 w_even = weights << 16, w_odd = weights & 0xffff0000u;
        sum += splat16(x_even) * (f32x16)w_even;
        return sum + splat16(x_odd) * (f32x16)w_odd;
#endif
    }
};

// R rows of x against V panels, each `inputs` * 16 elements long.
template <class T, int R, int V>
void multiply_rows(const T* x, int64_t x_stride, int64_t inputs, const T* panel, float* out, int64_t out_stride) {
    constexpr int64_t kAhead = 4096 / 64;  // steps fetched ahead: the hardware does not look far enough
    typedef Step<T> S;
    f32x16 sum[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = f32x16{};
    const int64_t panel_length = inputs * kPanel;
    for (int64_t k = 0; k < inputs; k += S::kInputs, panel += S::kInputs * kPanel) {
        typename S::Weights weights[V];
        for (int v = 0; v < V; ++v) {
            __builtin_prefetch(panel + v * panel_length + kAhead * S::kInputs * kPanel / V);
            std::memcpy(&weights[v], panel + v * panel_length, sizeof weights[v]);
        }
        for (int r = 0; r < R; ++r) {
            const auto factor = S::factor(x + r * x_stride + k);
            for (int v = 0; v < V; ++v) sum[r][v] = S::add(sum[r][v], weights[v], factor);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store16(out + r * out_stride + v * kPanel, sum[r][v]);
}

template <class T, int V>
void multiply_panels(const T* x, int64_t x_stride, int64_t rows, int64_t inputs, const T* panel, float* out,
                     int64_t out_stride) {
    for (; rows >= 6; rows -= 6, x += 6 * x_stride, out += 6 * out_stride)
        multiply_rows<T, 6, V>(x, x_stride, inputs, panel, out, out_stride);
    switch (rows) {
        case 1: multiply_rows<T, 1, V>(x, x_stride, inputs, panel, out, out_stride); break;
        case 2: multiply_rows<T, 2, V>(x, x_stride, inputs, panel, out, out_stride); break;
        case 3: multiply_rows<T, 3, V>(x, x_stride, inputs, panel, out, out_stride); break;
        case 4: multiply_rows<T, 4, V>(x, x_stride, inputs, panel, out, out_stride); break;
        case 5: multiply_rows<T, 5, V>(x, x_stride, inputs, panel, out, out_stride); break;
        default: break;
    }
}

#ifdef __AMX_BF16__

// Whether the system lets this process use the matrix units; asked once.
inline bool matrix_units() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
    return granted;
}

// A thread's tiles, all 16 rows of 64 bytes, while this lives.
class Tiles {
  public:
    Tiles() {
        if (!matrix_units()) return;
        struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int tile = 0; tile < 8; ++tile) shape.row_bytes[tile] = 64, shape.rows[tile] = 16;
        _tile_loadconfig(&shape);
    }
    ~Tiles() {
        if (matrix_units()) _tile_release();
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// 16 rows against up to 4 panels: while a weight is streamed from memory, rows cost nothing.
template <int V>
void multiply_tiles_1(const bf16* x, int64_t x_stride, int64_t inputs, const bf16* panel, float* out,
                      int64_t out_stride) {
    const int64_t length = inputs * kPanel, x_bytes = x_stride * 2, out_bytes = out_stride * 4;
    _tile_zero(0);
    if (V > 1) _tile_zero(1);
    if (V > 2) _tile_zero(2);
    if (V > 3) _tile_zero(3);
    for (int64_t k = 0; k < inputs; k += kTileInputs, panel += kTileInputs * kPanel) {
        _tile_loadd(4, x + k, x_bytes);
        _tile_loadd(5, panel, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (V > 1) {
            _tile_loadd(6, panel + length, 64);
            _tile_dpbf16ps(1, 4, 6);
        }
        if (V > 2) {
            _tile_loadd(7, panel + 2 * length, 64);
            _tile_dpbf16ps(2, 4, 7);
        }
        if (V > 3) {
            _tile_loadd(5, panel + 3 * length, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, out, out_bytes);
    if (V > 1) _tile_stored(1, out + kPanel, out_bytes);
    if (V > 2) _tile_stored(2, out + 2 * kPanel, out_bytes);
    if (V > 3) _tile_stored(3, out + 3 * kPanel, out_bytes);
}

// 32 rows against up to 2 panels.
template <int V>
void multiply_tiles_2(const bf16* x, int64_t x_stride, int64_t inputs, const bf16* panel, float* out,
                      int64_t out_stride) {
    const int64_t length = inputs * kPanel, x_bytes = x_stride * 2, out_bytes = out_stride * 4;
    const bf16* x_low = x + kTileRows * x_stride;
    _tile_zero(0);
    _tile_zero(1);
    if (V > 1) _tile_zero(2);
    if (V > 1) _tile_zero(3);
    for (int64_t k = 0; k < inputs; k += kTileInputs, panel += kTileInputs * kPanel) {
        _tile_loadd(4, x + k, x_bytes);
        _tile_loadd(6, panel, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x_low + k, x_bytes);
        _tile_dpbf16ps(1, 5, 6);
        if (V > 1) {
            _tile_loadd(7, panel + length, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    float* out_low = out + kTileRows * out_stride;
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out_low, out_bytes);
    if (V > 1) _tile_stored(2, out + kPanel, out_bytes);
    if (V > 1) _tile_stored(3, out_low + kPanel, out_bytes);
}

inline void multiply_tiles(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs, const bf16* panel,
                           int64_t panels, float* out, int64_t out_stride) {
    const int64_t length = inputs * kPanel;
    for (int64_t p = 0; rows > kTileRows && p < panels; p += 2) {
        for (int64_t r = 0; r < rows; r += 2 * kTileRows) {
            const bf16* from = x + r * x_stride;
            float* to = out + r * out_stride + p * kPanel;
            if (p + 1 < panels)
                multiply_tiles_2<2>(from, x_stride, inputs, panel + p * length, to, out_stride);
            else
                multiply_tiles_2<1>(from, x_stride, inputs, panel + p * length, to, out_stride);
        }
    }
    if (rows > kTileRows) return;
    switch (panels) {
        case 1: multiply_tiles_1<1>(x, x_stride, inputs, panel, out, out_stride); break;
        case 2: multiply_tiles_1<2>(x, x_stride, inputs, panel, out, out_stride); break;
        case 3: multiply_tiles_1<3>(x, x_stride, inputs, panel, out, out_stride); break;
        default: multiply_tiles_1<4>(x, x_stride, inputs, panel, out, out_stride); break;
    }
}

#else

inline bool matrix_units() { return false; }

struct Tiles {
    Tiles() {}  // not trivial: it is declared only to live
};

inline void multiply_tiles(const bf16*, int64_t, int64_t, int64_t, const bf16*, int64_t, float*, int64_t) {}

#endif

inline bool for_matrix_units(const float*, int64_t) { return false; }
inline bool for_matrix_units(const bf16*, int64_t inputs) { return inputs % kTileInputs == 0 && matrix_units(); }
inline void multiply_tiles(const float*, int64_t, int64_t, int64_t, const float*, int64_t, float*, int64_t) {}

// out [rows up to a multiple of kRowsReadable][panels * 16] = x [rows] times `panels` (1 to 4) panels from `panel` on.
// Rows of x and of out beyond `rows`, up to that multiple, are read and written, whatever they hold. The calling thread
// has `Tiles`.
template <class T>
void multiply(const T* x, int64_t x_stride, int64_t rows, int64_t inputs, const T* panel, int64_t panels, float* out,
              int64_t out_stride) {
    if (for_matrix_units(x, inputs)) {
        multiply_tiles(x, x_stride, rows, inputs, panel, panels, out, out_stride);
        return;
    }
    switch (panels) {
        case 1: multiply_panels<T, 1>(x, x_stride, rows, inputs, panel, out, out_stride); break;
        case 2: multiply_panels<T, 2>(x, x_stride, rows, inputs, panel, out, out_stride); break;
        case 3: multiply_panels<T, 3>(x, x_stride, rows, inputs, panel, out, out_stride); break;
        default: multiply_panels<T, 4>(x, x_stride, rows, inputs, panel, out, out_stride); break;
    }
}

// How many panels one work item takes, when `panels` are to be shared out among `threads`.
inline int64_t panels_per_item(int64_t panels, int64_t threads) {
    return threads == 1 ? kMostPanels : std::max<int64_t>(1, std::min(kMostPanels, panels / (8 * threads)));
}

}  // namespace baton
