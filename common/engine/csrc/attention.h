// Attention over paged KV for packed ragged batches, in pieces that any thread may take.
//
// Decode and prefill take the same path: scores against panels of keys (pages.h) and weighted values are small products
// over the (query, head of the group) pairs. What is computed for a query depends on its own row alone: blocks and spans
// lie at absolute positions, so neither the other rows, nor the chunk a query came in, nor the number of threads, nor how
// a page is laid out changes a bit of its result. Rows that decode over the same pages (a common prompt) read those once.
//
// Keys before the window of an item's first query may lie in dead pages (page id 0). Their scores are overwritten and
// their values take no part in a sum: whatever lies there, a NaN even, changes nothing.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention_pairs.h"
#include "attention_tiles.h"
#include "memory.h"
#include "pages.h"
#include "product.h"
#include "quantised_kv.h"

namespace baton {

constexpr int64_t kKeyBlock = 128;  // keys per block
constexpr int64_t kSpan = 512;  // keys whose softmax is summed apart and joined to the spans before it
constexpr int64_t kQueryRows = 144;  // (query, head of the group) pairs per work item, at most
constexpr int64_t kSerialWork = 1 << 18;  // multiply-adds below which waking threads costs more than it brings
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// Mirrored by `_AttendArgs` in kernels.py. Strides count elements.
struct AttendArgs {
    int64_t is_bf16;
    void* pool;  // pages.h
    int64_t page_layout;  // PageLayout
    int64_t num_layers, layer, kv_heads, page_size, head_dim, q_heads;
    int64_t num_rows, num_tokens;
    int64_t max_queries;  // rows with more only get their K and V written
    const int64_t* slots;
    const int32_t *q_offsets, *kv_lens, *page_offsets, *page_ids;
    const void *query, *key, *value;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    void* out;  // [tokens][q_heads][head_dim], dense
    double scale, softcap;
    int64_t window;
    const float* sinks;  // [q_heads] or null

    int64_t first_visible(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }

    template <class T>
    Pages<T> pages() const {
        return {static_cast<PageLayout>(page_layout), static_cast<T*>(pool), num_layers, layer, kv_heads, page_size,
                head_dim};
    }

    QuantisedPages quantised_pages() const {
        return {static_cast<PageLayout>(page_layout), static_cast<uint8_t*>(pool), num_layers, layer, kv_heads, page_size,
                head_dim};
    }
};

// One unit of work: queries [q_begin, q_end) of a row (positions in the sequence), one kv head, and keys [key_begin,
// key_end) from a block boundary on. `partial` is where the result of one span goes, -1 when it is the whole.
//
// With `sharers` >= 0 the keys are a span that many rows see all of, in the same pages: the queries are those of the
// plan's sharers from there on, one each, and stand for positions behind the span.
struct Item {
    int32_t row;
    int32_t kv_head;
    int64_t q_begin, q_end;
    int64_t key_begin, key_end;
    int64_t partial;
    int64_t sharers = -1;
};

// exp(score - maximum) in place; returns the sum. `padded` is a multiple of 16.
inline float exponentiate(float* scores, int64_t padded, float maximum) {
    f32x16 total = {};
    for (int64_t j = 0; j < padded; j += 16) {
        const f32x16 weight = exp16(load16(scores + j) - maximum);
        store16(scores + j, weight);
        total += weight;
    }
    return sum_of(total);
}

// Memory of one thread.
inline std::vector<float>& floats_of_thread() {
    thread_local std::vector<float> memory;
    return memory;
}

template <class T>
inline std::vector<const T*>& pointers_of_thread() {
    thread_local std::vector<const T*> memory;
    return memory;
}

// What is to be computed for a step's rows. Depends on the rows, the heads and the window: the same for all layers that
// share those.
struct AttentionPlan {
    struct Merge {
        int32_t row, kv_head;
        int64_t first, count;  // partial results
    };

    struct Sharer {
        int32_t row;
        int64_t partial;
    };

    explicit AttentionPlan(const AttendArgs& args) : group(args.q_heads / args.kv_heads) {
        const int64_t block = std::max<int64_t>(1, kQueryRows / group);
        std::vector<Whole> whole;
        for (int32_t row = 0; row < args.num_rows; ++row) {
            const int64_t end = args.kv_lens[row], begin = end - (args.q_offsets[row + 1] - args.q_offsets[row]);
            work += (end - begin) * (end - args.first_visible(begin)) * args.q_heads * args.head_dim;
            if (end - begin > args.max_queries) continue;
            if (end - begin == 1) {
                plan_spans(args, row, end, whole);
                continue;
            }
            for (int32_t head = 0; head < args.kv_heads; ++head)
                for (int64_t q_end = end; q_end > begin; q_end -= block) {  // from the end: the costly ones come first
                    const int64_t q_begin = std::max(begin, q_end - block);
                    items.push_back({row, head, q_begin, q_end, first_block(args, q_begin), q_end, -1});
                }
        }
        share_spans(args, whole, block);
    }

    int64_t partial_floats(int64_t head_dim) const { return num_partials * group * (head_dim + 2); }

    std::vector<Item> items;
    std::vector<Merge> merges;
    std::vector<Sharer> sharers;
    int64_t num_partials = 0, work = 0;
    const int64_t group;

  private:
    // A span that a decode row sees all of. The results of its heads lie `stride` apart.
    struct Whole {
        int64_t span;
        int32_t row;
        int64_t partial, stride;
        const int32_t *pages, *pages_end;

        bool same_keys(const Whole& other) const {
            return span == other.span && std::equal(pages, pages_end, other.pages, other.pages_end);
        }

        bool operator<(const Whole& other) const {
            if (span != other.span) return span < other.span;
            const auto [mine, theirs] = std::mismatch(pages, pages_end, other.pages);
            return mine == pages_end ? row < other.row : *mine < *theirs;
        }
    };

    // A row of one query has too little work for the threads unless its spans of keys are shared out.
    void plan_spans(const AttendArgs& args, int32_t row, int64_t end, std::vector<Whole>& whole) {
        const int64_t begin = first_block(args, end - 1), first = begin / kSpan, last = (end - 1) / kSpan;
        const int64_t count = last - first + 1, partial = num_partials;
        if (count > 1) num_partials += count * args.kv_heads;
        for (int32_t head = 0; head < args.kv_heads && count > 1; ++head)
            merges.push_back({row, head, partial + head * count, count});
        const int32_t* pages = args.page_ids + args.page_offsets[row];
        for (int64_t span = first; span <= last; ++span) {
            const int64_t key_begin = std::max(begin, span * kSpan), key_end = std::min(end, (span + 1) * kSpan);
            if (span < last && !args.window) {
                whole.push_back({span, row, partial + span - first, count, pages + key_begin / args.page_size,
                                 pages + (key_end - 1) / args.page_size + 1});
                continue;
            }
            for (int32_t head = 0; head < args.kv_heads; ++head)
                items.push_back({row, head, end - 1, end, key_begin, key_end,
                                 count > 1 ? partial + head * count + span - first : -1});
        }
    }

    // Items of at most `most` rows each.
    void share_spans(const AttendArgs& args, std::vector<Whole>& whole, int64_t most) {
        std::sort(whole.begin(), whole.end());
        for (auto first = whole.begin(), end = first; first != whole.end(); first = end) {
            while (end != whole.end() && end - first < most && end->same_keys(*first)) ++end;
            const int64_t key_begin = first->span * kSpan, key_end = key_begin + kSpan;
            for (int32_t head = 0; head < args.kv_heads; ++head) {
                items.push_back({first->row, head, key_end, key_end + (end - first), key_begin, key_end, -1,
                                 static_cast<int64_t>(sharers.size())});
                for (auto one = first; one != end; ++one) sharers.push_back({one->row, one->partial + head * one->stride});
            }
        }
    }

    static int64_t first_block(const AttendArgs& args, int64_t position) {
        return args.first_visible(position) / kKeyBlock * kKeyBlock;
    }
};

// Takes items from a counter, one ahead, until none are left: what comes next can be fetched meanwhile.
template <class Work>
void take_items(const std::vector<Item>& items, std::atomic<int64_t>& counter, const Work& work) {
    const int64_t count = static_cast<int64_t>(items.size());
    for (int64_t i = counter++, next; i < count; i = next) {
        next = counter++;
        work(items[i], next < count ? &items[next] : nullptr);
    }
}

template <class T>
class Attention {
  public:
    // `partials`: memory for what the plan's partial results take.
    Attention(const AttendArgs& args, const AttentionPlan& plan, float* partials)
        : a_(args),
          plan_(plan),
          group_(args.q_heads / args.kv_heads),
          dim_(args.head_dim),
          pages_(args.pages<T>()),
          quantised_(args.quantised_pages()),
          partials_(partials),
          tiled_(!quantised_.are_there() && for_matrix_units(pages_.pool, dim_)),
          paired_(tiled_ || (!quantised_.are_there() && for_dots_of_pairs(pages_.pool, dim_))) {}

    void write_token(int64_t token) const {
        const T *key = static_cast<const T*>(a_.key) + token * a_.key_token,
                *value = static_cast<const T*>(a_.value) + token * a_.value_token;
        for (int64_t head = 0; head < a_.kv_heads; ++head) {
            write(a_.slots[token], kKeys, head, key + head * a_.key_head);
            write(a_.slots[token], kValues, head, value + head * a_.value_head);
        }
    }

    // All queries of an item against its spans of keys, one after the other. `next`: what this thread will take then, if
    // that is known.
    void attend(const Item& item, const Item* next) const {
        const int64_t rows = (item.q_end - item.q_begin) * group_;
        const Work work = work_memory(rows);
        load_queries(item, work);
        clear(work.stats, work.values, rows);
        for (int64_t key = item.key_begin; key < item.key_end;) {
            const int64_t stop = std::min(item.key_end, (key / kSpan + 1) * kSpan);
            clear(work.span_stats, work.span_values, rows);
            for (int64_t block = key; block < stop; block += kKeyBlock)
                attend_block(item, next, work, block, std::min(kKeyBlock, stop - block));
            for (int64_t r = 0; r < rows; ++r)
                join(work.stats + 2 * r, work.values + r * dim_, work.span_stats + 2 * r, work.span_values + r * dim_);
            key = stop;
        }
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t g = r % group_, at = partial_of(item, r / group_);
            if (at < 0) {
                finish(item.row, item.q_begin + r / group_, item.kv_head * group_ + g, work.stats + 2 * r,
                       work.values + r * dim_);
                continue;
            }
            float* partial = partials_ + (at * group_ + g) * (dim_ + 2);
            std::copy_n(work.span_stats + 2 * r, 2, partial);
            std::copy_n(work.span_values + r * dim_, dim_, partial + 2);
        }
    }

    // Joins the spans of a decode row, first to last, as `attend` does for the rows that it walks alone.
    void merge(const AttentionPlan::Merge& merge) const {
        float *stats = at_least(floats_of_thread(), dim_ + 2), *values = stats + 2;
        for (int64_t g = 0; g < group_; ++g) {
            clear(stats, values, 1);
            for (int64_t i = 0; i < merge.count; ++i) {
                const float* partial = partials_ + ((merge.first + i) * group_ + g) * (dim_ + 2);
                join(stats, values, partial, partial + 2);
            }
            finish(merge.row, a_.kv_lens[merge.row] - 1, merge.kv_head * group_ + g, stats, values);
        }
    }

  private:
    // Memory of one work item: for each (query, head of the group) the query, its scores against one block, and what is
    // summed so far, of this span and of all spans before it.
    struct Work {
        float *query, *scores, *values_block;
        T *pair_query, *pair_weights, *pair_values;  // in the place of the above
        T* keys;  // panels of a block
        float *span_stats, *span_values, *stats, *values;  // stats: maximum and sum
    };

    // Rows [first_row, last_row) of an item, from query q_first on, see something of a block; its first `unseen` keys are
    // seen by none.
    struct Seen {
        int64_t q_first, first_row, last_row, unseen;
    };

    void write(int64_t slot, int64_t kind, int64_t head, const T* numbers) const {
        if (!quantised_.are_there()) {
            pages_.write(slot, kind, head, numbers);
            return;
        }
        float* wide = at_least(floats_of_thread(), dim_);
        for (int64_t d = 0; d < dim_; d += 16) store16(wide + d, load16(numbers + d));
        quantised_.write(slot, kind, head, wide);
    }

    int64_t first_visible(int64_t position) const { return a_.first_visible(position); }

    const int32_t* page_ids_of(int32_t row) const { return a_.page_ids + a_.page_offsets[row]; }

    int64_t token_at(int32_t row, int64_t position) const {
        return a_.q_offsets[row + 1] - a_.kv_lens[row] + position;
    }

    int64_t token_of(const Item& item, int64_t q) const {
        if (item.sharers < 0) return token_at(item.row, q);
        return a_.q_offsets[plan_.sharers[item.sharers + q - item.q_begin].row];
    }

    // Where the result for an item's query goes, -1 when it is the whole.
    int64_t partial_of(const Item& item, int64_t number) const {
        return item.sharers < 0 ? item.partial : plan_.sharers[item.sharers + number].partial;
    }

    // The item's queries, head by head: scaled, as floats; for products of bfloat16 as they are, up to a whole tile of rows.
    void load_queries(const Item& item, const Work& work) const {
        for (int64_t q = item.q_begin; q < item.q_end; ++q) {
            const T* from = static_cast<const T*>(a_.query) + token_of(item, q) * a_.query_token;
            for (int64_t g = 0; g < group_; ++g) {
                const T* head = from + (item.kv_head * group_ + g) * a_.query_head;
                const int64_t at = ((q - item.q_begin) * group_ + g) * dim_;
                if (paired_) {
                    std::copy_n(head, dim_, work.pair_query + at);
                    continue;
                }
                for (int64_t d = 0; d < dim_; d += 16)
                    store16(work.query + at + d, load16(head + d) * static_cast<float>(a_.scale));
            }
        }
        const int64_t rows = (item.q_end - item.q_begin) * group_;
        if (tiled_) std::fill(work.pair_query + rows * dim_, work.pair_query + whole_tiles(rows) * dim_, T{});
    }

    static int64_t whole_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

    // Caps the scores, sets those outside [begin, end) to -inf, returns the maximum. `padded` is a multiple of 16.
    float mask(float* scores, int64_t begin, int64_t end, int64_t padded) const {
        if (a_.softcap != 0) {
            const float cap = static_cast<float>(a_.softcap);
            for (int64_t j = 0; j < padded; j += 16) store16(scores + j, cap * tanh16(load16(scores + j) / cap));
        }
        std::fill(scores, scores + begin, kNegInf);
        std::fill(scores + end, scores + padded, kNegInf);
        f32x16 top = load16(scores);
        for (int64_t j = 16; j < padded; j += 16) top = max16(top, load16(scores + j));
        return max_of(top);
    }

    // Divides by the sum and stores one head of one token. A sink takes its share of the sum and gives no value.
    void finish(int32_t row, int64_t position, int64_t q_head, const float* stats, const float* values) const {
        const float maximum = stats[0];
        float sum = stats[1], factor = 1;
        if (a_.sinks) {
            const float top = std::max(maximum, a_.sinks[q_head]);
            factor = std::exp(maximum - top);
            sum = sum * factor + std::exp(a_.sinks[q_head] - top);
        }
        factor /= sum;
        T* to = static_cast<T*>(a_.out) + (token_at(row, position) * a_.q_heads + q_head) * dim_;
        for (int64_t d = 0; d < dim_; d += 16) store16(to + d, load16(values + d) * factor);
    }

    Work work_memory(int64_t queries) const {
        const int64_t rows = whole_tiles(queries);
        Work work;
        work.query = at_least(floats_of_thread(), rows * (3 * dim_ + 2 * kKeyBlock + 4) + 2 * kKeyBlock * dim_);
        work.scores = work.query + rows * dim_;
        work.values_block = work.scores + 2 * rows * kKeyBlock;
        float* keys = work.values_block + kKeyBlock * dim_;
        work.span_values = keys + kKeyBlock * dim_;
        work.values = work.span_values + rows * dim_;
        work.span_stats = work.values + rows * dim_;
        work.stats = work.span_stats + 2 * rows;
        work.pair_query = reinterpret_cast<T*>(work.query);
        work.pair_weights = reinterpret_cast<T*>(work.scores + rows * kKeyBlock);
        work.pair_values = reinterpret_cast<T*>(work.values_block);
        work.keys = reinterpret_cast<T*>(keys);
        return work;
    }

    void clear(float* stats, float* values, int64_t rows) const {
        std::fill_n(values, rows * dim_, 0.0f);
        for (int64_t r = 0; r < rows; ++r) stats[2 * r] = kNegInf, stats[2 * r + 1] = 0;
    }

    // `count` keys from `block` on, into span_stats and span_values.
    void attend_block(const Item& item, const Item* next, const Work& work, int64_t block, int64_t count) const {
        // The queries that see anything of this block follow one another.
        int64_t q_first = std::max(item.q_begin, block), q_last = item.q_end;
        while (q_last > q_first && first_visible(q_last - 1) >= block + count) --q_last;
        const Seen seen{q_first, (q_first - item.q_begin) * group_, (q_last - item.q_begin) * group_,
                        std::max<int64_t>(0, first_visible(item.q_begin) - block)};
        if constexpr (std::is_same_v<T, bf16>) {
            if (paired_) {
                attend_block_pairs(item, next, work, block, count, seen);
                return;
            }
        }
        const int32_t* pages = page_ids_of(item.row);
        const int64_t following = block + count, fetched = std::min(item.key_end, following + kKeyBlock);
        if (quantised_.are_there()) {
            quantised_.fetch(pages, kValues, item.kv_head, block, following);
            quantised_.fetch(pages, kKeys, item.kv_head, following, fetched);
            float* keys = reinterpret_cast<float*>(work.keys);
            quantised_.load_keys(pages, item.kv_head, block, count, keys);
            quantised_.load_values(pages, item.kv_head, block, count, work.values_block);
            const float** panels = at_least(pointers_of_thread<float>(), 2 * kKeyBlock), **values = panels + kKeyBlock;
            for (int64_t j = 0; j < count; j += kPanelTokens) panels[j / kPanelTokens] = keys + j * dim_;
            for (int64_t j = 0; j < count; ++j) values[j] = work.values_block + j * dim_;
            attend_numbers(item, work, seen, block, count, panels, panels, values, values);
            return;
        }
        const T** panels = at_least(pointers_of_thread<T>(), 4 * kKeyBlock);
        const T **values = panels + kKeyBlock, **keys_ahead = values + kKeyBlock, **values_ahead = keys_ahead + kKeyBlock;
        pages_.panels(pages, item.kv_head, block, count, work.keys, panels);
        pages_.locate(pages, kValues, item.kv_head, block, following, values);
        look_ahead(item, next, following, panels, values, count, keys_ahead, values_ahead);
        attend_numbers(item, work, seen, block, count, panels, keys_ahead, values, values_ahead);
    }

    // What the next block reads, which begins at `begin` or with the next item. Beyond its end, and where there is none:
    // what this block reads.
    void look_ahead(const Item& item, const Item* next, int64_t begin, const T* const* panels, const T* const* values,
                    int64_t count, const T** keys_ahead, const T** values_ahead) const {
        const Item* from = begin < item.key_end ? &item : next;
        int64_t there = 0;
        if (from) {
            if (from == next) begin = next->key_begin;
            const int64_t end = std::min(from->key_end, begin + kKeyBlock);
            const int32_t* pages = page_ids_of(from->row);
            pages_.locate(pages, kKeys, from->kv_head, begin, end, values_ahead);
            there = end - begin;
            for (int64_t j = 0; j < there; j += kPanelTokens) keys_ahead[j / kPanelTokens] = values_ahead[j];
            pages_.locate(pages, kValues, from->kv_head, begin, end, values_ahead);
        }
        for (int64_t j = (there + kPanelTokens - 1) / kPanelTokens; j * kPanelTokens < count; ++j) keys_ahead[j] = panels[j];
        for (int64_t j = there; j < count; ++j) values_ahead[j] = values[j];
    }

    // The same, of a block's panels of K and rows of V, and of as many that are fetched meanwhile. A few rows read them as
    // they are, many as floats, which are made once.
    template <class N>
    void attend_numbers(const Item& item, const Work& work, const Seen& seen, int64_t block, int64_t count,
                        const N* const* panels, const N* const* keys_ahead, const N* const* values,
                        const N* const* values_ahead) const {
        if constexpr (!std::is_same_v<N, float>) {
            if (seen.last_row - seen.first_row > kStripRows) {
                const float** wide = at_least(pointers_of_thread<float>(), kKeyBlock);
                for (int64_t j = 0; j < count; j += kPanelTokens) {
                    widen(panels[j / kPanelTokens], dim_, work.values_block + j * dim_);
                    wide[j / kPanelTokens] = work.values_block + j * dim_;
                }
                weigh_block<float>(item, work, seen, block, count, wide, wide);
                for (int64_t j = 0; j < count; ++j) {
                    float* to = work.values_block + j * dim_;
                    for (int64_t d = 0; d < dim_; d += 16) store16(to + d, load16(values[j] + d));
                    wide[j] = to;
                }
                add_values<float>(work, seen, count, wide, wide);
                return;
            }
        }
        weigh_block(item, work, seen, block, count, panels, keys_ahead);
        add_values(work, seen, count, values, values_ahead);
    }

    // Scores of a block's keys, then their weights.
    template <class N>
    void weigh_block(const Item& item, const Work& work, const Seen& seen, int64_t block, int64_t count,
                     const N* const* panels, const N* const* ahead) const {
        const int64_t width = (count + 15) / 16 * 16, active = seen.last_row - seen.first_row;
        score(work.query + seen.first_row * dim_, dim_, active, panels, ahead, width / 16, work.scores, kKeyBlock);
        for (int64_t r = 0; r < active; ++r) {
            const int64_t q = seen.q_first + r / group_, row = seen.first_row + r;
            weigh(work.scores + r * kKeyBlock, std::max<int64_t>(0, first_visible(q) - block),
                  std::min(count, q + 1 - block), width, work.span_stats + 2 * row, work.span_values + row * dim_);
        }
    }

    // Adds the weighted values of a block.
    template <class N>
    void add_values(const Work& work, const Seen& seen, int64_t count, const N* const* values,
                    const N* const* ahead) const {
        product(work.scores + seen.unseen, kKeyBlock, values + seen.unseen, ahead + seen.unseen,
                seen.last_row - seen.first_row, count - seen.unseen, dim_, work.span_values + seen.first_row * dim_, dim_);
    }

    // K and V that are wanted next: at most a block of them from `begin` on, or of the next item.
    int64_t locate_following(const Item& item, const Item* next, int64_t begin, const T** to) const {
        const Item* from = begin < item.key_end ? &item : next;
        if (!from) return 0;
        if (from == next) begin = next->key_begin;
        const int64_t end = std::min(from->key_end, begin + kKeyBlock), count = end - begin;
        pages_.locate(page_ids_of(from->row), kKeys, from->kv_head, begin, end, to);
        pages_.locate(page_ids_of(from->row), kValues, from->kv_head, begin, end, to + count);
        return 2 * count;
    }

    // The same in products of bfloat16. On matrix units 16 rows at a time: those of a tile that see nothing get weights
    // of zero.
    void attend_block_pairs(const Item& item, const Item* next, const Work& work, int64_t block, int64_t count,
                            const Seen& seen) const {
        const T** panels = at_least(pointers_of_thread<T>(), 5 * kKeyBlock);
        const T **values = panels + kKeyBlock, **keys_ahead = values + kKeyBlock, **following = keys_ahead + kKeyBlock;
        const int32_t* pages = page_ids_of(item.row);
        pages_.panels(pages, item.kv_head, block, count, work.keys, panels);
        pages_.locate(pages, kValues, item.kv_head, block, block + count, values);
        Ahead ahead{following, count, 2};  // K is fetched while scores are computed
        if (tiled_)
            ahead = {following, locate_following(item, next, block + count, following), 4};
        else
            look_ahead(item, next, block + count, panels, values, count, keys_ahead, following);
        const bool packed = tiled_ || seen.last_row - seen.first_row > kStripRows;
        if (packed) pack_values(values, seen.unseen, count, dim_, work.pair_values, ahead);
        const int64_t width = (count + 31) / 32 * 32;
        // Each pass over all rows: what a tile is loaded from has long been stored then.
        const int64_t begin = tiled_ ? seen.first_row / kTileRows * kTileRows : seen.first_row;
        const int64_t end = tiled_ ? whole_tiles(seen.last_row) : seen.last_row;
        score_pairs(work.pair_query + begin * dim_, end - begin, panels, keys_ahead, whole_tiles(count) / kPanelTokens,
                    work.scores + begin * kKeyBlock);
        for (int64_t row = begin; row < end; ++row) {
            T* weights = work.pair_weights + row * kKeyBlock;
            if (row < seen.first_row || row >= seen.last_row) {
                std::fill_n(weights, width, T{});
                continue;
            }
            const int64_t q = item.q_begin + row / group_;
            weigh_pairs(work.scores + row * kKeyBlock, std::max<int64_t>(0, first_visible(q) - block),
                        std::min(count, q + 1 - block), width, work.span_stats + 2 * row,
                        work.span_values + row * dim_, weights);
        }
        const T* weights = work.pair_weights + begin * kKeyBlock;
        float* sums = work.span_values + begin * dim_;
        if (!packed)
            value_pairs(weights, kKeyBlock, end - begin, values, seen.unseen, count, sums, dim_, ahead);
        else if (!tiled_)
            value_pairs(weights, kKeyBlock, end - begin, work.pair_values, width, sums, dim_);
        else
            for (int64_t row = 0; row < end - begin; row += kTileRows)
                value_tiles(weights + row * kKeyBlock, kKeyBlock, work.pair_values, width, sums + row * dim_, dim_);
    }

    // Of `rows` queries with `count` panels; on matrix units whole tiles of rows.
    void score_pairs(const T* query, int64_t rows, const T* const* panels, const T* const* ahead, int64_t count,
                     float* scores) const {
        if (tiled_) {
            for (int64_t row = 0; row < rows; row += kTileRows)
                score_tiles(query + row * dim_, dim_, panels, count, scores + row * kKeyBlock, kKeyBlock);
        } else if constexpr (kDotsOfBf16) {
            score(query, dim_, rows, panels, ahead, count, scores, kKeyBlock);
        }
    }

    // Adds a span to what came before it. A span in which nothing is visible changes nothing.
    void join(float* stats, float* values, const float* span_stats, const float* span_values) const {
        if (span_stats[1] == 0) return;
        const float maximum = std::max(stats[0], span_stats[0]);
        const float before = std::exp(stats[0] - maximum), now = std::exp(span_stats[0] - maximum);
        stats[0] = maximum;
        stats[1] = stats[1] * before + span_stats[1] * now;
        for (int64_t d = 0; d < dim_; d += 16)
            store16(values + d, load16(values + d) * before + load16(span_values + d) * now);
    }

    // Turns a row's scores of one block into weights relative to the maximum so far; rescales what was summed before.
    void weigh(float* scores, int64_t begin, int64_t end, int64_t width, float* stats, float* values) const {
        const float maximum = std::max(stats[0], mask(scores, begin, end, width));
        raise(maximum, stats, values);
        stats[1] += exponentiate(scores, width, maximum);
    }

    // The same for scores that are not scaled yet, into weights of the model's type. `width` is a multiple of 32.
    void weigh_pairs(float* scores, int64_t begin, int64_t end, int64_t width, float* stats, float* values,
                     T* weights) const {
        float scale = static_cast<float>(a_.scale);
        if (a_.softcap != 0) {
            const float cap = static_cast<float>(a_.softcap);
            for (int64_t j = 0; j < width; j += 16) store16(scores + j, cap * tanh16(load16(scores + j) * scale / cap));
            scale = 1;
        }
        if (begin) std::fill(scores, scores + begin, kNegInf);
        std::fill(scores + end, scores + width, kNegInf);
        f32x16 top = load16(scores);
        for (int64_t j = 16; j < width; j += 16) top = max16(top, load16(scores + j));
        const float maximum = std::max(stats[0], max_of(top) * scale);
        raise(maximum, stats, values);
        constexpr float kLog2E = 1.44269504088896341f;
        f32x16 total = {};
        for (int64_t j = 0; j < width; j += 16) {
            const f32x16 weight = exp2_16(load16(scores + j) * (scale * kLog2E) - maximum * kLog2E);
            store16(weights + j, weight);
            total += weight;
        }
        stats[1] += sum_of(total);
    }

    // Relates what was summed before to a new maximum.
    void raise(float maximum, float* stats, float* values) const {
        if (maximum <= stats[0]) return;
        const float factor = std::exp(stats[0] - maximum);
        stats[0] = maximum;
        stats[1] *= factor;
        for (int64_t d = 0; d < dim_; d += 16) store16(values + d, load16(values + d) * factor);
    }

    const AttendArgs& a_;
    const AttentionPlan& plan_;
    const int64_t group_, dim_;
    const Pages<T> pages_;
    const QuantisedPages quantised_;  // instead, in those layouts
    float* const partials_;
    const bool tiled_;  // the products go to matrix units
    const bool paired_;  // they are of bfloat16: there, or as dot products of pairs
};

}  // namespace baton
