// Products of rows with panels (panel.h) on vector registers. Every output is one chain of multiply-adds over the inputs
// in their order, or over pairs of them where the processor takes dot products of bfloat16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "memory.h"
#include "panel.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace baton {

constexpr int64_t kVectorRows = 6;  // rows that are taken together
constexpr int64_t kFewRows = 12;
#ifdef __AVX512F__
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

// What one step over the inputs takes. T: what rows consist of, W: what panels do. kMostSums: rows times panels (of more
// than one) whose sums leave registers for what goes into them.
template <class T, class W>
struct Step;

template <>
struct Step<float, float> {
    static constexpr int64_t kInputs = 1;
    static constexpr int kMostSums = kManyRegisters ? 24 : 4;
    typedef Lanes Weights;
    typedef float Factor;
    static Lanes load(const float* from) {
        Lanes weights;
        std::memcpy(&weights, from, sizeof weights);
        return weights;
    }
    static float factor(const float* x) { return *x; }
    static Lanes add(Lanes sum, Lanes weights, float factor) { return sum + factor * weights; }
};

template <>
struct Step<float, int8_t> : Step<float, float> {
    static constexpr int kMostSums = kManyRegisters ? 24 : 2;
    static Lanes load(const int8_t* from) { return widened(from); }
};

#ifdef __AVX512BF16__

constexpr bool kDotsOfBf16 = true;

template <>
struct Step<bf16, bf16> {
    static constexpr int64_t kInputs = 2;
    static constexpr int kMostSums = kManyRegisters ? 24 : 4;
    typedef LaneBits Weights;
    typedef int32_t Factor;
    static LaneBits load(const bf16* from) { return load_pairs(from); }
    static int32_t factor(const bf16* x) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return pair;
    }
    static Lanes add(Lanes sum, LaneBits weights, int32_t factor) {
        return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(factor), (__m512bh)weights);
    }
};

template <>
struct Step<bf16, int8_t> : Step<bf16, bf16> {
    static LaneBits load(const int8_t* from) {
        return (LaneBits)widened(from) >> 16 | (LaneBits)widened(from + kPanel);  // an int8 is a bfloat16, exactly
    }
};

#else

constexpr bool kDotsOfBf16 = false;

#endif

template <>
struct Step<float, bf16> {
    static constexpr int64_t kInputs = 2;
    static constexpr int kMostSums = kManyRegisters ? 24 : 4;
    typedef LaneBits Weights;
    struct Factor {
        float even, odd;
    };
    static LaneBits load(const bf16* from) { return load_pairs(from); }
    static Factor factor(const float* x) { return {x[0], x[1]}; }
    static Lanes add(Lanes sum, LaneBits weights, Factor factor) {
        sum += factor.even * widened_even(weights);
        return sum + factor.odd * widened_odd(weights);
    }
};

// Panels whose sums for R rows registers hold side by side.
template <int R, class T, class W>
constexpr int kPanelsAbreast = std::min<int>(kMostPanels, std::max(1, Step<T, W>::kMostSums / R));

// R rows of x, `inputs` apart, against V panels, each `inputs` * 16 elements long. panel_of(v) says where one begins, and
// ahead_of(v) what is fetched meanwhile: as much again, from there on.
template <int R, int V, class W, class T, class PanelOf, class AheadOf>
void multiply_rows(const T* x, int64_t inputs, const PanelOf& panel_of, const AheadOf& ahead_of, float* out,
                   int64_t out_stride) {
    typedef Step<T, W> S;
    Lanes sum[R][V][kPanelParts];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            for (int p = 0; p < kPanelParts; ++p) sum[r][v][p] = Lanes{};
    for (int64_t k = 0; k < inputs; k += S::kInputs) {
        typename S::Weights weights[V][kPanelParts];
        for (int v = 0; v < V; ++v) {
            const W* from = panel_of(v) + k * kPanel;
            __builtin_prefetch(ahead_of(v) + k * kPanel);
            for (int p = 0; p < kPanelParts; ++p) weights[v][p] = S::load(from + p * S::kInputs * kLanes);
        }
        for (int r = 0; r < R; ++r) {
            const typename S::Factor factor = S::factor(x + r * inputs + k);
            for (int v = 0; v < V; ++v)
                for (int p = 0; p < kPanelParts; ++p) sum[r][v][p] = S::add(sum[r][v][p], weights[v][p], factor);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            for (int p = 0; p < kPanelParts; ++p) {
                const Lanes one = sum[r][v][p];  // stored from the array, they would be there all along
                std::memcpy(out + r * out_stride + v * kPanel + p * kLanes, &one, sizeof one);
            }
}

// R rows, as many panels side by side as registers hold the sums of.
template <int R, class T, class W>
void multiply_panels(const T* x, int64_t inputs, const W* panel, int64_t panels, float* out, int64_t out_stride) {
    constexpr int V = kPanelsAbreast<R, T, W>;
    constexpr int64_t kAhead = 1024 / sizeof(W);  // of all panels together: the hardware does not look far enough
    const auto panel_of = [&](int64_t v) { return panel + v * inputs * kPanel; };
    for (; panels >= V; panels -= V, panel += V * inputs * kPanel, out += V * kPanel)
        multiply_rows<R, V, W>(x, inputs, panel_of, [&](int64_t v) { return panel_of(v) + kAhead / V; }, out, out_stride);
    for (; panels; --panels, panel += inputs * kPanel, out += kPanel)
        multiply_rows<R, 1, W>(x, inputs, panel_of, [&](int64_t v) { return panel_of(v) + kAhead; }, out, out_stride);
}

// Up to kVectorRows rows.
template <class T, class W>
void multiply_few(const T* x, int64_t rows, int64_t inputs, const W* panel, int64_t panels, float* out,
                  int64_t out_stride) {
    switch (rows) {
        case 1: multiply_panels<1>(x, inputs, panel, panels, out, out_stride); break;
        case 2: multiply_panels<2>(x, inputs, panel, panels, out, out_stride); break;
        case 3: multiply_panels<3>(x, inputs, panel, panels, out, out_stride); break;
        case 4: multiply_panels<4>(x, inputs, panel, panels, out, out_stride); break;
        case 5: multiply_panels<5>(x, inputs, panel, panels, out, out_stride); break;
        default: multiply_panels<kVectorRows>(x, inputs, panel, panels, out, out_stride);
    }
}

// Rows as what a step takes.
template <class X, class T>
const X* as(const T* x, int64_t count) {
    if constexpr (std::is_same_v<X, T>) {
        return x;
    } else {
        thread_local std::vector<float> memory;
        float* to = at_least(memory, count);
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t bits = static_cast<uint32_t>(x[i].bits) << 16;
            std::memcpy(to + i, &bits, sizeof bits);
        }
        return to;
    }
}

// Panels as others, made in memory of this thread.
template <class X, class W>
const X* as_panels(const W* panel, int64_t panels, int64_t inputs) {
    if constexpr (std::is_same_v<X, W>) {
        return panel;
    } else {
        thread_local std::vector<X> memory;
        const int64_t length = inputs * kPanel;
        X* to = at_least(memory, panels * length);
        for (int64_t p = 0; p < panels; ++p) widen(panel + p * length, inputs, to + p * length);
        return to;
    }
}

template <class X, class T, class W>
void multiply_groups(const T* x, int64_t rows, int64_t inputs, const W* panel, int64_t panels, float* out,
                     int64_t out_stride) {
    for (int64_t r = 0; r < rows; r += kVectorRows) {
        const int64_t count = std::min(kVectorRows, rows - r);
        multiply_few(as<X>(x + r * inputs, count * inputs), count, inputs, panel, panels, out + r * out_stride,
                     out_stride);
    }
}

// Without dot products of bfloat16 all is done in floats, which panels of bfloat16 are made into for more than a few rows;
// int8 has less to be read, and its conversion costs nothing beside that. Dot products take bfloat16 alone, which int8 is
// made into as it is read for a few rows, and before for more.
template <class T, class W>
void multiply_vectors(const T* x, int64_t rows, int64_t inputs, const W* panel, int64_t panels, float* out,
                      int64_t out_stride) {
    constexpr bool kDots = kDotsOfBf16 && std::is_same_v<T, bf16>;
    typedef std::conditional_t<kDots, bf16, float> X;
    if constexpr (kDots ? std::is_same_v<W, int8_t> : std::is_same_v<W, bf16>) {
        if (rows > kFewRows) {
            multiply_groups<X>(x, rows, inputs, as_panels<X>(panel, panels, inputs), panels, out, out_stride);
            return;
        }
    }
    multiply_groups<X>(x, rows, inputs, panel, panels, out, out_stride);
}

}  // namespace baton
