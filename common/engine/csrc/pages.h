// Where K and V of one layer's tokens lie in the pages of a pool, [pages][layers][2][kv_heads] planes of page_size
// tokens, in each layout of common/kv/page_layout.py.
//
// In panels, K of 16 tokens is a matrix of 32-bit words [words of a token][16]: a word is one float or a pair of
// bfloat16. That is what a packed weight's panel is (matrix.h), with tokens for outputs, and a row of tiles for matrix
// units.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace baton {

enum class PageLayout : int64_t { kCanonical = 0, kPanels = 1, kInt8 = 2, kFp8 = 3 };  // the last two: quantised_kv.h

constexpr int64_t kPanelTokens = 16;
constexpr int64_t kKeys = 0, kValues = 1;  // the planes of a head

template <class T>
struct Pages {
    static constexpr int64_t kPerWord = 4 / sizeof(T);

    PageLayout layout;
    T* pool;
    int64_t num_layers, layer, kv_heads, page_size, dim;

    // One head of K or V of a token, given as T or as floats, which are rounded.
    template <class From>
    void write(int64_t slot, int64_t kind, int64_t head, const From* numbers) const {
        const int64_t offset = slot % page_size;
        T* plane = plane_of(slot / page_size, kind, head);
        if (kind == kValues || layout == PageLayout::kCanonical) {
            for (int64_t d = 0; d < dim; d += 16) store16(plane + offset * dim + d, load16(numbers + d));
            return;
        }
        T* panel = plane + offset / kPanelTokens * kPanelTokens * dim + offset % kPanelTokens * kPerWord;
        for (int64_t d = 0; d < dim; d += 16) {
            T part[16];
            store16(part, load16(numbers + d));
            for (int64_t i = 0; i < 16; i += kPerWord)
                std::memcpy(panel + (d + i) * kPanelTokens, part + i, sizeof(uint32_t));
        }
    }

    // Addresses of V, or of K where that lies by tokens, of tokens [begin, end) of a row with these pages. Of K in
    // panels: stretches that hold the panels of these tokens between them.
    void locate(const int32_t* pages, int64_t kind, int64_t head, int64_t begin, int64_t end, const T** to) const {
        for (int64_t token = begin; token < end;) {
            const int64_t offset = token % page_size, stop = std::min(end, token - offset + page_size);
            const T* place = plane_of(pages[token / page_size], kind, head) + offset * dim;
            for (; token < stop; ++token, place += dim) *to++ = place;
        }
    }

    // Panels of K of tokens [begin, begin + count); `begin` is a multiple of 16. What the last one has of tokens beyond
    // is anything. Where K lies by tokens, it is turned into `memory` [count up to a multiple of 16][dim].
    void panels(const int32_t* pages, int64_t head, int64_t begin, int64_t count, T* memory, const T** to) const {
        if (layout == PageLayout::kCanonical) {
            const T* rows[kPanelTokens];
            for (int64_t j = 0; j < count; j += kPanelTokens, memory += kPanelTokens * dim) {
                const int64_t there = std::min(kPanelTokens, count - j);
                locate(pages, kKeys, head, begin + j, begin + j + there, rows);
                turn(rows, there, memory);
                *to++ = memory;
            }
            return;
        }
        for (int64_t token = begin; token < begin + count; token += kPanelTokens)
            *to++ = plane_of(pages[token / page_size], kKeys, head) + token % page_size * dim;
    }

  private:
    T* plane_of(int64_t page, int64_t kind, int64_t head) const {
        return pool + (((page * num_layers + layer) * 2 + kind) * kv_heads + head) * page_size * dim;
    }

    // `there` rows as a panel.
    void turn(const T* const* rows, int64_t there, T* panel) const {
        int64_t d = 0;
        for (; d + 16 * kPerWord <= dim; d += 16 * kPerWord) turn_words<16>(rows, there, d, panel);
        if (d < dim) turn_words<8>(rows, there, d, panel);  // half as many pairs
    }

    template <int W>
    static void turn_words(const T* const* rows, int64_t there, int64_t d, T* panel) {
        Row16 words[16];  // moved as if they were floats
        for (int64_t i = 0; i < 16; ++i) {
            words[i] = Row16{};
            std::memcpy(&words[i], rows[i < there ? i : 0] + d, W * 4);  // beyond them: anything
        }
        transpose16(words);
        for (int64_t w = 0; w < W; ++w) std::memcpy(panel + (d + w * kPerWord) * kPanelTokens, &words[w], sizeof words[w]);
    }
};

}  // namespace baton
