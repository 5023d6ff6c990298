// K and V in pages as one byte per number and a scale for each token of each head: written once, read by blocks of keys
// as floats. Byte for byte what kv/quantised_pages.py says; the numbers read are the same floats as there.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "pages.h"
#include "simd.h"

namespace baton {

typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

template <class To, class From>
inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Two's complement.
struct Int8Code {
    static constexpr float kLimit = 127;

    static f32x16 decode(const uint8_t* codes) {
        i8x16 narrow;
        std::memcpy(&narrow, codes, sizeof narrow);
        return __builtin_convertvector(__builtin_convertvector(narrow, i32x16), f32x16);
    }

    static void encode(f32x16 numbers, uint8_t* codes) {
        const f32x16 magic = splat16(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, halves to even
        const i8x16 narrow =
            __builtin_convertvector(__builtin_convertvector((numbers + magic) - magic, i32x16), i8x16);
        std::memcpy(codes, &narrow, sizeof narrow);
    }
};

// e4m3: a sign, four bits of exponent (bias 7), three of mantissa; below 2^-6 multiples of 2^-9.
struct Fp8Code {
    static constexpr float kLimit = 448;
    static constexpr int32_t kShift = 20;  // between both mantissas' last bits
    static constexpr int32_t kBias = 127 - 7;

    static f32x16 decode(const uint8_t* codes) {
        u8x16 narrow;
        std::memcpy(&narrow, codes, sizeof narrow);
        const i32x16 wide = __builtin_convertvector(narrow, i32x16), size = wide & 0x7f;
        const f32x16 normal = bits_of<f32x16>((size << kShift) + (kBias << 23));
        const f32x16 small = bits_of<f32x16>((size << kShift) + ((kBias + 1) << 23)) - 0.015625f;
        const i32x16 magnitude = bits_of<i32x16>(size < 8 ? small : normal);
        return bits_of<f32x16>(magnitude | ((wide & 0x80) << 24));
    }

    // Rounds to nearest, halves to even. Numbers are at most kLimit in size.
    static void encode(f32x16 numbers, uint8_t* codes) {
        const i32x16 bits = bits_of<i32x16>(numbers), size = bits & 0x7fffffff;
        const i32x16 normal = ((size + 0x7ffff + ((size >> kShift) & 1)) >> kShift) - (kBias << 3);
        const f32x16 step = splat16(16384.0f);  // adding it leaves multiples of 2^-9
        const i32x16 small = bits_of<i32x16>(bits_of<f32x16>(size) + step) - bits_of<i32x16>(step);
        const i32x16 code = (size < (kBias + 1) << 23 ? small : normal) | ((bits >> 24) & 0x80);
        const u8x16 narrow = __builtin_convertvector(code, u8x16);
        std::memcpy(codes, &narrow, sizeof narrow);
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
        i32x16 top = {};
        for (int64_t i = 0; i < count; i += 16) {
            const i32x16 size = bits_of<i32x16>(load16(numbers + i)) & 0x7fffffff;
            top = size > top ? size : top;
        }
        int32_t largest = 0;
        for (int64_t i = 0; i < 16; ++i) largest = std::max<int32_t>(largest, top[i]);
        const float wanted = std::max(bits_of<float>(std::min(largest, 0x7fc00000)) / Code::kLimit, 0x1p-126f);
        return {static_cast<uint16_t>((bits_of<uint32_t>(wanted) + 0xffff) >> 16)};
    }

    template <class Code>
    void write_codes(uint8_t* stretch, int64_t kind, int64_t offset, const float* numbers) const {
        const bf16 scale = scale_for<Code>(numbers, head_dim);
        std::memcpy(scales_of(stretch) + offset * sizeof scale, &scale, sizeof scale);
        const float factor = bits_of<float>(static_cast<uint32_t>(scale.bits) << 16);
        for (int64_t d = 0; d < head_dim; d += 16) {
            uint8_t codes[16];
            Code::encode(load16(numbers + d) / factor, codes);
            if (kind == kValues) {
                std::copy_n(codes, 16, stretch + offset * head_dim + d);
                continue;
            }
            for (int64_t i = 0; i < 16; ++i) stretch[(d + i) * page_size + offset] = codes[i];
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
        const f32x16 factors = load16(narrow);
        for (int64_t d = 0; d < head_dim; ++d)
            store16(panel + d * kPanelTokens, Code::decode(codes + d * page_size) * factors);
    }

    // One token of a panel.
    template <class Code>
    void load_column(const uint8_t* codes, const uint8_t* scale, float* column) const {
        const float factor = scale_at(scale);
        for (int64_t d = 0; d < head_dim; d += 16) {
            uint8_t gathered[16];
            for (int64_t i = 0; i < 16; ++i) gathered[i] = codes[(d + i) * page_size];
            const f32x16 numbers = Code::decode(gathered) * factor;
            for (int64_t i = 0; i < 16; ++i) column[(d + i) * kPanelTokens] = numbers[i];
        }
    }

    template <class Code>
    void load_value_codes(const int32_t* pages, int64_t head, int64_t begin, int64_t count, float* to) const {
        for (int64_t j = 0; j < count; ++j, to += head_dim) {
            uint8_t* stretch = stretch_of(pages[(begin + j) / page_size], kValues, head);
            const int64_t offset = (begin + j) % page_size;
            const float factor = scale_at(scales_of(stretch) + offset * sizeof(bf16));
            const uint8_t* codes = stretch + offset * head_dim;
            for (int64_t d = 0; d < head_dim; d += 16) store16(to + d, Code::decode(codes + d) * factor);
        }
    }

    static float scale_at(const uint8_t* place) {
        uint16_t bits;
        std::memcpy(&bits, place, sizeof bits);
        return bits_of<float>(static_cast<uint32_t>(bits) << 16);
    }
};

}  // namespace baton
