// y = x W^T + b for packed weights (matrix.h), alone: what the layers of a module call.

#include <atomic>
#include <cstdint>
#include <omp.h>
#include <vector>

#include "matrix.h"
#include "memory.h"

using namespace baton;

// Mirrored by `LinearArgs` in kernels.py.
struct LinearArgs {
    int64_t is_bf16, rows, inputs, outputs;
    const void* x;  // [rows][inputs], dense
    const void* packed;
    const float* scales;  // of int8 weights, else null
    const float* bias;  // [outputs] or null
    void* y;  // [rows][outputs], dense
};

namespace {

constexpr int64_t kRowBlock = 192;  // rows per work item: x and the panels of a weight share the second-level cache
constexpr int64_t kSerialWork = 1 << 15;  // weights below which waking threads costs more than it brings

template <class T>
class Linear {
  public:
    explicit Linear(const LinearArgs& args) : a_(args), x_(static_cast<const T*>(args.x)) {}

    void run() {
        const int64_t panels = (a_.outputs + kPanel - 1) / kPanel, blocks = (a_.rows + kRowBlock - 1) / kRowBlock;
        const bool serial = a_.inputs * a_.outputs < kSerialWork;
        const int64_t width = panels_per_item(panels, serial ? 1 : omp_get_max_threads());
        const int64_t groups = (panels + width - 1) / width;
        if (for_matrix_units(x_, a_.inputs)) copy_last_rows();
        std::atomic<int64_t> next{0};
#pragma omp parallel if (!serial)
        {
            const Tiles tiles;
            for (int64_t i = next++; i < groups * blocks; i = next++) {
                const int64_t first = i % groups * width, row = i / groups * kRowBlock;
                item(row, std::min(kRowBlock, a_.rows - row), first, std::min(width, panels - first));
            }
        }
    }

  private:
    // Matrix units read whole tiles: the last rows are read where there is something behind them.
    void copy_last_rows() {
        rest_ = a_.rows / kRowsReadable * kRowsReadable;
        if (rest_ == a_.rows) return;
        T* copy = at_least(last_rows(), kRowsReadable * a_.inputs);
        std::copy_n(x_ + rest_ * a_.inputs, (a_.rows - rest_) * a_.inputs, copy);
        copied_ = copy;
    }

    static std::vector<T>& last_rows() {
        thread_local std::vector<T> memory;
        return memory;
    }

    void item(int64_t row, int64_t rows, int64_t first, int64_t panels) const {
        const Packed matrix{a_.packed, a_.scales, a_.inputs};
        float* sums = at_least(sums_of_thread(), kRowBlock * kMostPanels * kPanel);
        const int64_t whole = copied_ ? std::min(rows, rest_ - row) : rows;
        if (whole) multiply(x_ + row * a_.inputs, whole, matrix, first, panels, sums, panels * kPanel);
        if (whole < rows)
            multiply(copied_, rows - whole, matrix, first, panels, sums + whole * panels * kPanel, panels * kPanel);
        store(row, rows, first * kPanel, panels * kPanel, sums);
    }

    static std::vector<float>& sums_of_thread() {
        thread_local std::vector<float> memory;
        return memory;
    }

    void store(int64_t row, int64_t rows, int64_t column, int64_t stride, float* sums) const {
        const int64_t width = std::min(stride, a_.outputs - column);
        for (int64_t r = 0; r < rows; ++r, sums += stride) {
            T* y = static_cast<T*>(a_.y) + (row + r) * a_.outputs + column;
            if (a_.bias)
                for (int64_t c = 0; c < width; ++c) sums[c] += a_.bias[column + c];
            int64_t c = 0;
            for (; c + 16 <= width; c += 16) store16(y + c, load16(sums + c));
            if (c == width) continue;
            T tail[16];
            store16(tail, load16(sums + c));
            std::copy_n(tail, width - c, y + c);
        }
    }

    const LinearArgs& a_;
    const T* const x_;
    const T* copied_ = nullptr;
    int64_t rest_ = 0;
};

}  // namespace

extern "C" void baton_linear(const LinearArgs* args) {
    if (args->is_bf16)
        Linear<bf16>(*args).run();
    else
        Linear<float>(*args).run();
}

extern "C" int64_t baton_linear_args_bytes() { return sizeof(LinearArgs); }

// What bfloat16 products use here.
extern "C" int64_t baton_has_matrix_units() { return matrix_units(); }
