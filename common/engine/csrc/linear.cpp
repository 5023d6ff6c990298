// y = x W^T + b in float32, the weight repacked in panels of 64 outputs: [outputs / 64][inputs][64], the last panel
// padded with zeros. Small batches stream the weight once, at the speed of memory; large ones keep a panel in the
// cache. Every output is one chain of multiply-adds over the inputs, so a row's result does not depend, to the bit, on
// its batch.

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "product.h"

using namespace baton;

// Mirrored by `_LinearArgs` in kernels.py.
struct LinearArgs {
    int64_t rows, inputs, outputs;
    const float* x;  // [rows][inputs], dense
    const float* packed;
    const float* bias;  // [outputs] or null
    float* y;  // [rows][outputs], dense
};

namespace {

constexpr int64_t kPanel = 64;
constexpr int64_t kRowBlock = 192;  // rows per work item: x and a panel of the weight share the second-level cache
constexpr int64_t kAhead = 16;  // inputs fetched ahead: the hardware does not look far enough while rows share a weight
constexpr int64_t kSerialWork = 1 << 15;  // weights below which waking threads costs more than it brings

// R rows of x against one panel; `bias` is null or has a panel's width.
template <int R>
void panel_rows(const float* x, int64_t inputs, const float* panel, const float* bias, float* y, int64_t y_stride) {
    f32x16 sum[R][4];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 4; ++v) sum[r][v] = bias ? load16(bias + v * 16) : f32x16{};
    for (int64_t k = 0; k < inputs; ++k, panel += kPanel) {
        for (int v = 0; v < 4; ++v) __builtin_prefetch(panel + kAhead * kPanel + v * 16);
        f32x16 weight[4];
        for (int v = 0; v < 4; ++v) weight[v] = load16(panel + v * 16);
        for (int r = 0; r < R; ++r) {
            const f32x16 factor = splat16(x[r * inputs + k]);
            for (int v = 0; v < 4; ++v) sum[r][v] += factor * weight[v];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 4; ++v) store16(y + r * y_stride + v * 16, sum[r][v]);
}

void panel_block(const float* x, int64_t rows, int64_t inputs, const float* panel, const float* bias, float* y,
                 int64_t y_stride) {
    for (; rows >= 6; rows -= 6, x += 6 * inputs, y += 6 * y_stride)
        panel_rows<6>(x, inputs, panel, bias, y, y_stride);
    switch (rows) {
        case 1: panel_rows<1>(x, inputs, panel, bias, y, y_stride); break;
        case 2: panel_rows<2>(x, inputs, panel, bias, y, y_stride); break;
        case 3: panel_rows<3>(x, inputs, panel, bias, y, y_stride); break;
        case 4: panel_rows<4>(x, inputs, panel, bias, y, y_stride); break;
        case 5: panel_rows<5>(x, inputs, panel, bias, y, y_stride); break;
        default: break;
    }
}

// The last panel of a layer whose outputs do not fill it: computed aside, and only what exists is stored.
void narrow_block(const float* x, int64_t rows, int64_t inputs, const float* panel, const float* bias, int64_t width,
                  float* y, int64_t y_stride) {
    float padded_bias[kPanel] = {}, aside[kRowBlock * kPanel];
    if (bias) std::copy_n(bias, width, padded_bias);
    panel_block(x, rows, inputs, panel, padded_bias, aside, kPanel);
    for (int64_t r = 0; r < rows; ++r) std::copy_n(aside + r * kPanel, width, y + r * y_stride);
}

}  // namespace

extern "C" void baton_linear(const LinearArgs* args) {
    const LinearArgs& a = *args;
    const int64_t panels = (a.outputs + kPanel - 1) / kPanel, blocks = (a.rows + kRowBlock - 1) / kRowBlock;
    std::atomic<int64_t> next{0};
#pragma omp parallel if (a.inputs * a.outputs >= kSerialWork)
    for (int64_t i = next++; i < panels * blocks; i = next++) {
        const int64_t column = i % panels * kPanel, width = std::min(kPanel, a.outputs - column);
        const int64_t row = i / panels * kRowBlock, rows = std::min(kRowBlock, a.rows - row);
        const float *x = a.x + row * a.inputs, *panel = a.packed + column * a.inputs;
        const float* bias = a.bias ? a.bias + column : nullptr;
        float* y = a.y + row * a.outputs + column;
        if (width == kPanel)
            panel_block(x, rows, a.inputs, panel, bias, y, a.outputs);
        else
            narrow_block(x, rows, a.inputs, panel, bias, width, y, a.outputs);
    }
}

extern "C" int64_t baton_linear_args_bytes() { return sizeof(LinearArgs); }
