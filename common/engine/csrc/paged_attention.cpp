// Attention over paged KV for packed ragged batches. Called through ctypes with plain pointers: no torch headers, so it
// builds in seconds, and it runs on torch's own OpenMP threads.
//
// Rows of one query token (decode) stream K and V of the row's pages once, split into fixed spans of keys; longer rows
// (prefill) go block by block, K transposed into the cache. What is computed for a query depends on its own row alone:
// spans and blocks lie at absolute positions, so neither the other rows, nor the chunk a query came in, nor the number
// of threads changes a bit of its result.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "simd.h"

using namespace baton;

namespace {

constexpr int64_t kKeyBlock = 64;  // keys per block of the prefill path
constexpr int64_t kQueryRows = 144;  // (query, head of the group) pairs per work item of the prefill path, at most
constexpr int64_t kDecodeSpan = 512;  // keys per work item of the decode path
constexpr int64_t kSerialWork = 1 << 18;  // multiply-adds below which waking threads costs more than it brings
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

}  // namespace

// Mirrored by `_AttendArgs` in paged_attention.py. Strides count elements.
struct AttendArgs {
    int64_t is_bf16;
    void* pool;  // [pages][layers][2][kv_heads][page_size][head_dim]
    int64_t num_layers, layer, kv_heads, page_size, head_dim, q_heads;
    int64_t num_rows, num_tokens;
    const int64_t* slots;
    const int32_t *q_offsets, *kv_lens, *page_offsets, *page_ids;
    const void *query, *key, *value;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    void* out;  // [tokens][q_heads][head_dim], dense
    double scale, softcap;
    int64_t window;
    const float* sinks;  // [q_heads] or null
};

namespace {

// One unit of work: queries [q_begin, q_end) of a row (positions in the sequence) and one kv head. For decode rows,
// keys [key_begin, key_end) and the place of the partial result, or -1 when the row is one span.
struct Item {
    int32_t row;
    int32_t kv_head;
    int64_t q_begin, q_end;
    int64_t key_begin, key_end;
    int64_t partial;
};

// C[R][V * 16] += A[R][depth] times the rows that `b` points to, from column `col` on.
template <int R, int V, class T>
void product_tile(const float* a, int64_t a_stride, const T* const* b, int64_t col, int64_t depth, float* c,
                  int64_t c_stride) {
    f32x16 sum[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = load16(c + r * c_stride + v * 16);
    for (int64_t k = 0; k < depth; ++k) {
        f32x16 row[V];
        for (int v = 0; v < V; ++v) row[v] = load16(b[k] + col + v * 16);
        for (int r = 0; r < R; ++r) {
            const f32x16 factor = splat16(a[r * a_stride + k]);
            for (int v = 0; v < V; ++v) sum[r][v] += factor * row[v];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store16(c + r * c_stride + v * 16, sum[r][v]);
}

template <int V, class T>
void product_columns(const float* a, int64_t a_stride, const T* const* b, int64_t col, int64_t rows, int64_t depth,
                     float* c, int64_t c_stride) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) product_tile<6, V>(a + r * a_stride, a_stride, b, col, depth, c + r * c_stride, c_stride);
    a += r * a_stride;
    c += r * c_stride;
    switch (rows - r) {
        case 1: product_tile<1, V>(a, a_stride, b, col, depth, c, c_stride); break;
        case 2: product_tile<2, V>(a, a_stride, b, col, depth, c, c_stride); break;
        case 3: product_tile<3, V>(a, a_stride, b, col, depth, c, c_stride); break;
        case 4: product_tile<4, V>(a, a_stride, b, col, depth, c, c_stride); break;
        case 5: product_tile<5, V>(a, a_stride, b, col, depth, c, c_stride); break;
        default: break;
    }
}

// C[rows][columns] += A[rows][depth] B[depth][columns]; `b` points to B's rows; columns is a multiple of 16.
template <class T>
void product(const float* a, int64_t a_stride, const T* const* b, int64_t rows, int64_t depth, int64_t columns, float* c,
             int64_t c_stride) {
    int64_t col = 0;
    for (; col + 64 <= columns; col += 64) product_columns<4>(a, a_stride, b, col, rows, depth, c + col, c_stride);
    if (col + 32 <= columns) {
        product_columns<2>(a, a_stride, b, col, rows, depth, c + col, c_stride);
        col += 32;
    }
    if (col < columns) product_columns<1>(a, a_stride, b, col, rows, depth, c + col, c_stride);
}

// Scores of G heads of a group against each key.
template <int G, class T>
void dot_keys(const float* query, int64_t dim, const T* const* keys, int64_t count, float* scores, int64_t stride) {
    for (int64_t j = 0; j < count; ++j) {
        f32x16 sum[G] = {};
        for (int64_t d = 0; d < dim; d += 16) {
            const f32x16 key = load16(keys[j] + d);
            for (int g = 0; g < G; ++g) sum[g] += load16(query + g * dim + d) * key;
        }
        for (int g = 0; g < G; ++g) scores[g * stride + j] = sum_of(sum[g]);
    }
}

// exp(score - maximum) in place; returns the sum. `padded` is a multiple of 16.
float exponentiate(float* scores, int64_t padded, float maximum) {
    f32x16 total = {};
    for (int64_t j = 0; j < padded; j += 16) {
        const f32x16 weight = exp16(load16(scores + j) - maximum);
        store16(scores + j, weight);
        total += weight;
    }
    return sum_of(total);
}

// Memory of one thread; grows, never shrinks.
thread_local std::vector<float> floats;
thread_local std::vector<float> partial_floats;
template <class T>
thread_local std::vector<const T*> pointers;

template <class V>
auto* at_least(V& memory, int64_t count) {
    if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
    return memory.data();
}

template <class T>
class Attention {
  public:
    explicit Attention(const AttendArgs& args)
        : a_(args), group_(args.q_heads / args.kv_heads), dim_(args.head_dim), pool_(static_cast<T*>(args.pool)) {}

    void run() {
        plan();
        partials_ = at_least(partial_floats, num_partials_ * group_ * (dim_ + 2));
        const int64_t items = static_cast<int64_t>(items_.size()), merges = static_cast<int64_t>(merges_.size());
        std::atomic<int64_t> next_item{0};
#pragma omp parallel if (work_ >= kSerialWork)
        {
#pragma omp for schedule(static)
            for (int64_t token = 0; token < a_.num_tokens; ++token) write_token(token);
            for (int64_t i = next_item++; i < items; i = next_item++)
                is_decode(items_[i].row) ? decode(items_[i]) : prefill(items_[i]);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t i = 0; i < merges; ++i) merge(merges_[i]);
        }
    }

  private:
    struct Merge {
        int32_t row, kv_head;
        int64_t first, count;  // partial results
    };

    bool is_decode(int32_t row) const { return a_.q_offsets[row + 1] - a_.q_offsets[row] == 1; }

    int64_t first_visible(int64_t position) const {
        return a_.window ? std::max<int64_t>(0, position - a_.window + 1) : 0;
    }

    void plan() {
        const int64_t block = std::max<int64_t>(1, kQueryRows / group_);
        for (int32_t row = 0; row < a_.num_rows; ++row) {
            const int64_t end = a_.kv_lens[row], begin = end - (a_.q_offsets[row + 1] - a_.q_offsets[row]);
            work_ += (end - begin) * (end - first_visible(begin)) * a_.q_heads * dim_;
            for (int32_t head = 0; head < a_.kv_heads; ++head) {
                if (is_decode(row)) {
                    plan_decode(row, head, end);
                    continue;
                }
                for (int64_t q_end = end; q_end > begin; q_end -= block)  // from the end: the costly blocks come first
                    items_.push_back({row, head, std::max(begin, q_end - block), q_end, 0, 0, -1});
            }
        }
    }

    void plan_decode(int32_t row, int32_t head, int64_t end) {
        const int64_t begin = first_visible(end - 1);
        const int64_t first = begin / kDecodeSpan, last = (end - 1) / kDecodeSpan;
        if (first < last) merges_.push_back({row, head, num_partials_, last - first + 1});
        for (int64_t span = first; span <= last; ++span)
            items_.push_back({row, head, end - 1, end, std::max(begin, span * kDecodeSpan),
                              std::min(end, (span + 1) * kDecodeSpan), first < last ? num_partials_++ : -1});
    }

    T* place_in_pool(int64_t page, int64_t kind, int64_t head, int64_t offset) const {
        const int64_t plane = (page * a_.num_layers + a_.layer) * 2 + kind;
        return pool_ + ((plane * a_.kv_heads + head) * a_.page_size + offset) * dim_;
    }

    void write_token(int64_t token) const {
        const int64_t page = a_.slots[token] / a_.page_size, offset = a_.slots[token] % a_.page_size;
        for (int64_t head = 0; head < a_.kv_heads; ++head) {
            std::copy_n(static_cast<const T*>(a_.key) + token * a_.key_token + head * a_.key_head, dim_,
                        place_in_pool(page, 0, head, offset));
            std::copy_n(static_cast<const T*>(a_.value) + token * a_.value_token + head * a_.value_head, dim_,
                        place_in_pool(page, 1, head, offset));
        }
    }

    // Addresses of K (kind 0) or V (kind 1) for tokens [begin, end) of a row.
    void locate(int32_t row, int64_t kind, int64_t head, int64_t begin, int64_t end, const T** to) const {
        const int32_t* pages = a_.page_ids + a_.page_offsets[row];
        for (int64_t token = begin; token < end;) {
            const int64_t offset = token % a_.page_size, stop = std::min(end, token - offset + a_.page_size);
            const T* place = place_in_pool(pages[token / a_.page_size], kind, head, offset);
            for (; token < stop; ++token, place += dim_) *to++ = place;
        }
    }

    int64_t token_at(int32_t row, int64_t position) const {
        return a_.q_offsets[row + 1] - a_.kv_lens[row] + position;
    }

    // The group's query heads at one position, scaled, as floats.
    void load_query(int32_t row, int64_t position, int64_t kv_head, float* to) const {
        const T* from = static_cast<const T*>(a_.query) + token_at(row, position) * a_.query_token;
        for (int64_t g = 0; g < group_; ++g)
            for (int64_t d = 0; d < dim_; d += 16)
                store16(to + g * dim_ + d,
                        load16(from + (kv_head * group_ + g) * a_.query_head + d) * static_cast<float>(a_.scale));
    }

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
    void finish(int32_t row, int64_t position, int64_t q_head, float maximum, float sum, const float* values) const {
        float factor = 1;
        if (a_.sinks) {
            const float top = std::max(maximum, a_.sinks[q_head]);
            factor = std::exp(maximum - top);
            sum = sum * factor + std::exp(a_.sinks[q_head] - top);
        }
        factor /= sum;
        T* to = static_cast<T*>(a_.out) + (token_at(row, position) * a_.q_heads + q_head) * dim_;
        for (int64_t d = 0; d < dim_; d += 16) store16(to + d, load16(values + d) * factor);
    }

    void decode(const Item& item) const {
        const int64_t keys = item.key_end - item.key_begin, padded = (keys + 15) / 16 * 16;
        float* query = at_least(floats, group_ * (2 * dim_ + padded + 2));
        float *values = query + group_ * dim_, *scores = values + group_ * dim_, *stats = scores + group_ * padded;
        const T** rows = at_least(pointers<T>, keys);
        load_query(item.row, item.q_begin, item.kv_head, query);
        locate(item.row, 0, item.kv_head, item.key_begin, item.key_end, rows);
        std::fill_n(scores, group_ * padded, 0.0f);
        for (int64_t g = 0; g < group_; g += 4) {
            const float* q = query + g * dim_;
            switch (std::min<int64_t>(4, group_ - g)) {
                case 1: dot_keys<1>(q, dim_, rows, keys, scores + g * padded, padded); break;
                case 2: dot_keys<2>(q, dim_, rows, keys, scores + g * padded, padded); break;
                case 3: dot_keys<3>(q, dim_, rows, keys, scores + g * padded, padded); break;
                default: dot_keys<4>(q, dim_, rows, keys, scores + g * padded, padded); break;
            }
        }
        for (int64_t g = 0; g < group_; ++g) {
            stats[2 * g] = mask(scores + g * padded, 0, keys, padded);
            stats[2 * g + 1] = exponentiate(scores + g * padded, padded, stats[2 * g]);
        }
        locate(item.row, 1, item.kv_head, item.key_begin, item.key_end, rows);
        std::fill_n(values, group_ * dim_, 0.0f);
        product(scores, padded, rows, group_, keys, dim_, values, dim_);
        for (int64_t g = 0; g < group_; ++g) {
            if (item.partial < 0) {
                finish(item.row, item.q_begin, item.kv_head * group_ + g, stats[2 * g], stats[2 * g + 1],
                       values + g * dim_);
                continue;
            }
            float* partial = partials_ + (item.partial * group_ + g) * (dim_ + 2);
            std::copy_n(stats + 2 * g, 2, partial);
            std::copy_n(values + g * dim_, dim_, partial + 2);
        }
    }

    // Joins the spans of a decode row, first to last.
    void merge(const Merge& merge) const {
        float* values = at_least(floats, dim_);
        for (int64_t g = 0; g < group_; ++g) {
            const float* first = partials_ + (merge.first * group_ + g) * (dim_ + 2);
            const int64_t step = group_ * (dim_ + 2);
            float maximum = first[0], sum = 0;
            for (int64_t i = 1; i < merge.count; ++i) maximum = std::max(maximum, first[i * step]);
            std::fill_n(values, dim_, 0.0f);
            for (int64_t i = 0; i < merge.count; ++i) {
                const float* partial = first + i * step;
                const float factor = std::exp(partial[0] - maximum);
                sum += factor * partial[1];
                for (int64_t d = 0; d < dim_; ++d) values[d] += factor * partial[2 + d];
            }
            finish(merge.row, a_.kv_lens[merge.row] - 1, merge.kv_head * group_ + g, maximum, sum, values);
        }
    }

    void prefill(const Item& item) const {
        const int64_t rows = (item.q_end - item.q_begin) * group_;
        float* query = at_least(floats, rows * (2 * dim_ + kKeyBlock + 2) + 2 * kKeyBlock * dim_);
        float *values = query + rows * dim_, *scores = values + rows * dim_, *stats = scores + rows * kKeyBlock;
        float *keys_t = stats + 2 * rows, *value_block = keys_t + kKeyBlock * dim_;
        for (int64_t q = item.q_begin; q < item.q_end; ++q)
            load_query(item.row, q, item.kv_head, query + (q - item.q_begin) * group_ * dim_);
        std::fill_n(values, rows * dim_, 0.0f);
        for (int64_t r = 0; r < rows; ++r) stats[2 * r] = kNegInf, stats[2 * r + 1] = 0;
        const int64_t begin = first_visible(item.q_begin) / kKeyBlock * kKeyBlock;
        for (int64_t block = begin; block < item.q_end; block += kKeyBlock) {
            const int64_t count = std::min(kKeyBlock, item.q_end - block);
            const float* const* value_rows = load_block(item, block, count, keys_t, value_block);
            // The queries that see anything of this block follow one another.
            int64_t q_first = std::max(item.q_begin, block), q_last = item.q_end;
            while (q_last > q_first && first_visible(q_last - 1) >= block + count) --q_last;
            const int64_t skip = (q_first - item.q_begin) * group_, active = (q_last - q_first) * group_;
            std::fill_n(scores, active * kKeyBlock, 0.0f);
            product(query + skip * dim_, dim_, key_rows(keys_t), active, dim_, kKeyBlock, scores, kKeyBlock);
            for (int64_t r = 0; r < active; ++r) {
                const int64_t q = q_first + r / group_;
                weigh(scores + r * kKeyBlock, std::max<int64_t>(0, first_visible(q) - block),
                      std::min(count, q + 1 - block), stats + 2 * (skip + r), values + (skip + r) * dim_);
            }
            product(scores, kKeyBlock, value_rows, active, count, dim_, values + skip * dim_, dim_);
        }
        for (int64_t r = 0; r < rows; ++r)
            finish(item.row, item.q_begin + r / group_, item.kv_head * group_ + r % group_, stats[2 * r],
                   stats[2 * r + 1], values + r * dim_);
    }

    // Turns a row's scores of one block into weights, relative to the maximum so far; what was summed before is rescaled.
    void weigh(float* scores, int64_t begin, int64_t end, float* stats, float* values) const {
        const float maximum = std::max(stats[0], mask(scores, begin, end, kKeyBlock));
        if (maximum > stats[0]) {
            const float factor = std::exp(stats[0] - maximum);
            stats[0] = maximum;
            stats[1] *= factor;
            for (int64_t d = 0; d < dim_; d += 16) store16(values + d, load16(values + d) * factor);
        }
        stats[1] += exponentiate(scores, kKeyBlock, maximum);
    }

    // Transposes K of keys [block, block + count) into keys_t [head_dim][kKeyBlock]; returns the addresses of V as floats.
    const float* const* load_block(const Item& item, int64_t block, int64_t count, float* keys_t, float* value_block) const {
        const T** rows = at_least(pointers<T>, kKeyBlock);
        locate(item.row, 0, item.kv_head, block, block + count, rows);
        for (int64_t j = 0; j < kKeyBlock; j += 16)
            for (int64_t d = 0; d < dim_; d += 16) {
                f32x16 tile[16];
                for (int64_t i = 0; i < 16; ++i) tile[i] = j + i < count ? load16(rows[j + i] + d) : f32x16{};
                transpose16(tile);
                for (int64_t i = 0; i < 16; ++i) store16(keys_t + (d + i) * kKeyBlock + j, tile[i]);
            }
        locate(item.row, 1, item.kv_head, block, block + count, rows);
        return as_floats(rows, count, value_block);
    }

    const float* const* as_floats(const float** rows, int64_t, float*) const { return rows; }

    const float* const* as_floats(const bf16** rows, int64_t count, float* block) const {
        const float** converted = at_least(pointers<float>, kKeyBlock);
        for (int64_t j = 0; j < count; ++j) {
            for (int64_t d = 0; d < dim_; d += 16) store16(block + j * dim_ + d, load16(rows[j] + d));
            converted[j] = block + j * dim_;
        }
        return converted;
    }

    const float* const* key_rows(const float* keys_t) const {
        const float** rows = at_least(key_pointers_of_thread(), dim_);
        for (int64_t d = 0; d < dim_; ++d) rows[d] = keys_t + d * kKeyBlock;
        return rows;
    }

    static std::vector<const float*>& key_pointers_of_thread() {
        thread_local std::vector<const float*> memory;
        return memory;
    }

    const AttendArgs& a_;
    const int64_t group_, dim_;
    T* const pool_;
    std::vector<Item> items_;
    std::vector<Merge> merges_;
    float* partials_ = nullptr;
    int64_t num_partials_ = 0, work_ = 0;
};

}  // namespace

extern "C" void baton_attend(const AttendArgs* args) {
    if (args->is_bf16)
        Attention<bf16>(*args).run();
    else
        Attention<float>(*args).run();
}

extern "C" int64_t baton_args_bytes() { return sizeof(AttendArgs); }
