// K and V in pages as one byte per number and a scale for each token of each head: written once, read by blocks of keys
// as floats. Byte for byte what kv/quantised_pages.py says; the numbers read are the same floats as there.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "pages.h"
#include "simd.h"

namespace baton {

// Two's complement.
struct Int8Code {
    static constexpr float kLimit = 127;

    static Lanes decode(const uint8_t* codes) { return widened(reinterpret_cast<const int8_t*>(codes)); }

    static LaneIntegers encode(Lanes numbers) {
        const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, halves to even
        return __builtin_convertvector((numbers + magic) - magic, LaneIntegers);
    }
};

// e4m3: a sign, four bits of exponent (bias 7), three of mantissa; below 2^-6 multiples of 2^-9.
struct Fp8Code {
    static constexpr float kLimit = 448;
    static constexpr int32_t kShift = 20;  // between both mantissas' last bits
    static constexpr int32_t kBias = 127 - 7;

    static Lanes decode(const uint8_t* codes) {
        const LaneIntegers wide = widened(codes), size = wide & 0x7f;
        const Lanes normal = (Lanes)((size << kShift) + (kBias << 23));
        const Lanes small = (Lanes)((size << kShift) + ((kBias + 1) << 23)) - 0.015625f;
        const LaneIntegers magnitude = size < 8 ? (LaneIntegers)small : (LaneIntegers)normal;
        return (Lanes)(magnitude | ((wide & 0x80) << 24));
    }

    // Rounds to nearest, halves to even. Numbers are at most kLimit in size.
    static LaneIntegers encode(Lanes numbers) {
        const LaneIntegers bits = (LaneIntegers)numbers, size = bits & 0x7fffffff;
        const LaneIntegers normal = ((size + 0x7ffff + ((size >> kShift) & 1)) >> kShift) - (kBias << 3);
        const Lanes step = splat(16384.0f);  // adding it leaves multiples of 2^-9
        const LaneIntegers small = (LaneIntegers)((Lanes)size + step) - (LaneIntegers)step;
        return (size < (kBias + 1) << 23 ? small : normal) | ((bits >> 24) & 0x80);
    }
};

// One layer's stretches in the pages of a pool. Head sizes are multiples of 16.
struct QuantisedPages {
    PageLayout layout;
    uint8_t* pool;  // [pages][num_layers][2][kv_heads][page_size * (head_dim + 2)]
    int64_t num_layers, layer, kv_heads, page_size, head_dim;

    bool are_there() const { return layout == PageLayout::kInt8 || layout == PageLayout::kFp8; }

    // K or V of one token in one head.
    void write(int64_t slot, int64_t kind, int64_t head, const float* numbers) const {
        uint8_t* stretch = stretch_of(slot / page_size, kind, head);
        if (layout == PageLayout::kInt8)
            write_codes<Int8Code>(stretch, kind, slot % page_size, numbers);
        else
            write_codes<Fp8Code>(stretch, kind, slot % page_size, numbers);
    }

    // K of tokens [begin, begin + count) as panels (pages.h) of floats, one after the other. `begin` is a multiple of 16;
    // what the last panel has of tokens beyond is anything.
    void load_keys(const int32_t* pages, int64_t head, int64_t begin, int64_t count, float* to) const {
        if (layout == PageLayout::kInt8)
            load_key_codes<Int8Code>(pages, head, begin, count, to);
        else
            load_key_codes<Fp8Code>(pages, head, begin, count, to);
    }

    // V of tokens [begin, begin + count), in rows: to [count][head_dim].
    void load_values(const int32_t* pages, int64_t head, int64_t begin, int64_t count, float* to) const {
        if (layout == PageLayout::kInt8)
            load_value_codes<Int8Code>(pages, head, begin, count, to);
        else
            load_value_codes<Fp8Code>(pages, head, begin, count, to);
    }

    // Asks for K or V of these tokens to be brought near.
    void fetch(const int32_t* pages, int64_t kind, int64_t head, int64_t begin, int64_t end) const {
        for (int64_t page = begin / page_size; page * page_size < end; ++page) {
            const uint8_t* stretch = stretch_of(pages[page], kind, head);
            for (int64_t byte = 0; byte < stretch_bytes(); byte += 64) __builtin_prefetch(stretch + byte);
        }
    }

  private:
    int64_t stretch_bytes() const { return page_size * (head_dim + static_cast<int64_t>(sizeof(bf16))); }

    uint8_t* stretch_of(int64_t page, int64_t kind, int64_t head) const {
        return pool + (((page * num_layers + layer) * 2 + kind) * kv_heads + head) * stretch_bytes();
    }

    uint8_t* scales_of(uint8_t* stretch) const { return stretch + page_size * head_dim; }

    // The largest divided by what a code can say, rounded up to a bfloat16: no quotient is beyond the limit. A NaN or an
    // infinity makes a scale that shows.
    template <class Code>
    static bf16 scale_for(const float* numbers, int64_t count) {
        LaneIntegers top = {};
        for (int64_t i = 0; i < count; i += kLanes) {
            const LaneIntegers size = (LaneIntegers)load_lanes(numbers + i) & 0x7fffffff;
            top = size > top ? size : top;
        }
        int32_t largest = 0;
        for (int64_t i = 0; i < kLanes; ++i) largest = std::max<int32_t>(largest, top[i]);
        const float wanted = std::max(bits_of<float>(std::min(largest, 0x7fc00000)) / Code::kLimit, 0x1p-126f);
        return {static_cast<uint16_t>((bits_of<uint32_t>(wanted) + 0xffff) >> 16)};
    }

    template <class Code>
    void write_codes(uint8_t* stretch, int64_t kind, int64_t offset, const float* numbers) const {
        const bf16 scale = scale_for<Code>(numbers, head_dim);
        std::memcpy(scales_of(stretch) + offset * sizeof scale, &scale, sizeof scale);
        const float factor = bits_of<float>(static_cast<uint32_t>(scale.bits) << 16);
        const int64_t first = kind == kValues ? offset * head_dim : offset, step = kind == kValues ? 1 : page_size;
        for (int64_t d = 0; d < head_dim; d += kLanes) {
            const LaneIntegers codes = Code::encode(load_lanes(numbers + d) / factor);
            for (int64_t i = 0; i < kLanes; ++i) stretch[first + (d + i) * step] = static_cast<uint8_t>(codes[i]);
        }
    }

    template <class Code>
    void load_key_codes(const int32_t* pages, int64_t head, int64_t begin, int64_t count, float* panel) const {
        for (int64_t token = begin; token < begin + count; token += kPanelTokens, panel += kPanelTokens * head_dim) {
            if (page_size % kPanelTokens == 0) {
                uint8_t* stretch = stretch_of(pages[token / page_size], kKeys, head);
                const int64_t offset = token % page_size;
                load_panel<Code>(stretch + offset, scales_of(stretch) + offset * sizeof(bf16), panel);
                continue;
            }
            for (int64_t i = 0; i < std::min(kPanelTokens, begin + count - token); ++i) {
                uint8_t* stretch = stretch_of(pages[(token + i) / page_size], kKeys, head);
                const int64_t offset = (token + i) % page_size;
                load_column<Code>(stretch + offset, scales_of(stretch) + offset * sizeof(bf16), panel + i);
            }
        }
    }

    // 16 tokens that follow one another in a page.
    template <class Code>
    void load_panel(const uint8_t* codes, const uint8_t* scales, float* panel) const {
        bf16 narrow[kPanelTokens];
        std::memcpy(narrow, scales, sizeof narrow);
        for (int64_t i = 0; i < kPanelTokens; i += kLanes) {
            const Lanes factors = load_lanes(narrow + i);
            for (int64_t d = 0; d < head_dim; ++d)
                store_lanes(panel + d * kPanelTokens + i, Code::decode(codes + d * page_size + i) * factors);
        }
    }

    // One token of a panel.
    template <class Code>
    void load_column(const uint8_t* codes, const uint8_t* scale, float* column) const {
        const float factor = scale_at(scale);
        for (int64_t d = 0; d < head_dim; d += kLanes) {
            uint8_t gathered[kLanes];
            for (int64_t i = 0; i < kLanes; ++i) gathered[i] = codes[(d + i) * page_size];
            const Lanes numbers = Code::decode(gathered) * factor;
            for (int64_t i = 0; i < kLanes; ++i) column[(d + i) * kPanelTokens] = numbers[i];
        }
    }

    template <class Code>
    void load_value_codes(const int32_t* pages, int64_t head, int64_t begin, int64_t count, float* to) const {
        for (int64_t j = 0; j < count; ++j, to += head_dim) {
            uint8_t* stretch = stretch_of(pages[(begin + j) / page_size], kValues, head);
            const int64_t offset = (begin + j) % page_size;
            const float factor = scale_at(scales_of(stretch) + offset * sizeof(bf16));
            const uint8_t* codes = stretch + offset * head_dim;
            for (int64_t d = 0; d < head_dim; d += kLanes) store_lanes(to + d, Code::decode(codes + d) * factor);
        }
    }

    static float scale_at(const uint8_t* place) {
        uint16_t bits;
        std::memcpy(&bits, place, sizeof bits);
        return bits_of<float>(static_cast<uint32_t>(bits) << 16);
    }
};

}  // namespace baton
