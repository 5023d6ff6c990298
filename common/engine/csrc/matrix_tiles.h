// Products on the processor's matrix units (AMX): rows of bfloat16 against panels of it (matrix.h), into floats. A panel
// is a row of tiles as it lies.
#pragma once

#include <cstdint>

#include "panel.h"

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace baton {

constexpr int64_t kTileRows = 16;  // rows of a matrix unit's tile
constexpr int64_t kTileInputs = 32;  // inputs of one step of a matrix unit

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
void multiply_tiles_1(const bf16* x, int64_t inputs, const bf16* panel, float* out,
                      int64_t out_stride) {
    const int64_t length = inputs * kPanel, x_bytes = inputs * 2, out_bytes = out_stride * 4;
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
void multiply_tiles_2(const bf16* x, int64_t inputs, const bf16* panel, float* out,
                      int64_t out_stride) {
    const int64_t length = inputs * kPanel, x_bytes = inputs * 2, out_bytes = out_stride * 4;
    const bf16* x_low = x + kTileRows * inputs;
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

inline void multiply_tiles(const bf16* x, int64_t rows, int64_t inputs, const bf16* panel,
                           int64_t panels, float* out, int64_t out_stride) {
    const int64_t length = inputs * kPanel;
    for (int64_t p = 0; rows > kTileRows && p < panels; p += 2) {
        for (int64_t r = 0; r < rows; r += 2 * kTileRows) {
            const bf16* from = x + r * inputs;
            float* to = out + r * out_stride + p * kPanel;
            if (p + 1 < panels)
                multiply_tiles_2<2>(from, inputs, panel + p * length, to, out_stride);
            else
                multiply_tiles_2<1>(from, inputs, panel + p * length, to, out_stride);
        }
    }
    if (rows > kTileRows) return;
    switch (panels) {
        case 1: multiply_tiles_1<1>(x, inputs, panel, out, out_stride); break;
        case 2: multiply_tiles_1<2>(x, inputs, panel, out, out_stride); break;
        case 3: multiply_tiles_1<3>(x, inputs, panel, out, out_stride); break;
        default: multiply_tiles_1<4>(x, inputs, panel, out, out_stride); break;
    }
}

#else

inline bool matrix_units() { return false; }

struct Tiles {
    Tiles() {}  // not trivial: it is declared only to live
};

inline void multiply_tiles(const bf16*, int64_t, int64_t, const bf16*, int64_t, float*, int64_t) {}

#endif

}  // namespace baton
