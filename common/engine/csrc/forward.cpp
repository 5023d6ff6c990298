// A whole step of a dense decoder (the Llama family) in one call: all layers inside one parallel region, over the same
// packed weights and the same pages that the layers of a module use one by one.
//
// A step is a sequence of phases. In each, threads take items until none are left, and meet before the next. What lies
// between two products of a layer is done on the way, while it is in the cache: norms of heads, rotation and the write
// into the pages behind the products for Q, K and V; the gate behind those of the feed-forward block; the residual sum
// behind the others. The residual stream is float32, what products read is of the model's type.
//
// Every number is one chain of operations whose order is fixed by positions alone: not by the batch, the chunking or
// the number of threads.

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <omp.h>
#include <utility>
#include <vector>

#include "activation.h"
#include "attention.h"
#include "matrix.h"
#include "memory.h"

using namespace baton;

// The structures below are mirrored in fused/arguments.py, field for field.

struct Weight {
    const void* packed;  // panel.h
    const float* scales;  // of int8 weights, else null
    const float* bias;  // or null
    int64_t outputs;
};

// y = x / sqrt(mean(x^2) + eps) * weight; a null weight: no norm.
struct RowNorm {
    const float* weight;
    double eps;
};

struct LayerArgs {
    Weight query, key, value, output, gate, up, down;
    RowNorm before_attention, of_query, of_key, after_attention, before_mlp, after_mlp;
    const float *cosines, *sines;  // [positions][head_dim / 2]
    void* pool;  // pages.h
    int64_t pool_layers, pool_layer;
    int64_t table;  // of StepArgs
    int64_t window;  // 0: none
    double scale, softcap;  // of scores; softcap 0: none
};

struct ModelArgs {
    int64_t is_bf16, num_layers, hidden, inner, q_heads, kv_heads, head_dim, vocabulary, page_size;
    int64_t page_layout;  // PageLayout
    int64_t gelu;  // 0: SiLU
    const LayerArgs* layers;
    const void* embedding;  // [vocabulary][hidden]
    double embedding_scale;
    RowNorm last_norm;
    Weight head;
    double logits_softcap;  // 0: none
};

struct TableArgs {
    const int64_t* slots;
    const int32_t *page_offsets, *page_ids;
};

struct StepArgs {
    const ModelArgs* model;
    int64_t num_tokens, num_rows, num_asked;
    const int64_t *input_ids, *positions;
    const int32_t *q_offsets, *kv_lens;
    const int64_t* asked;  // [num_asked] places among the tokens whose logits are wanted
    TableArgs tables[2];
    const int64_t* reports;  // [num_layers], or null: what to tell `report` when a layer's K and V are in the pages; 0: nothing
    void (*report)(int64_t);  // called by the calling thread
    void* workspace;  // baton_forward_workspace_bytes()
    float* logits;  // [num_asked][vocabulary]
    int64_t* part_ns;  // [kStepParts], added to: what each part took
};

namespace {

// Where the time of a step goes; in the order of fused/arguments.py. kRest: norms, sums, copies.
enum Part { kProjections, kAttention, kOutput, kGate, kDown, kHead, kRest, kStepParts };

constexpr int64_t kRowBlock = 192;  // rows per item: what a product reads and writes stays in the second-level cache
constexpr int64_t kWideRowBlock = 96;  // the same for items of twice the width and more
constexpr int64_t kTokensPerItem = 8;  // of what is done token by token

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t padded_rows(int64_t rows) { return divided_up(rows, kRowsReadable) * kRowsReadable; }

// Where a step keeps what passes from phase to phase. Rows are padded to what `multiply` may read.
template <class T>
struct Workspace {
    Workspace(const ModelArgs& model, int64_t tokens, int64_t asked, char* memory) : next_(memory) {
        const int64_t rows = padded_rows(tokens), wide = model.q_heads * model.head_dim;
        residual = take<float>(rows * model.hidden);
        branch = take<float>(rows * model.hidden);
        normed = take<T>(rows * model.hidden);
        query = take<T>(rows * wide);
        attended = take<T>(rows * wide);
        inner = take<T>(rows * model.inner);
        asked_residual = take<float>(padded_rows(asked) * model.hidden);
        asked_attended = take<T>(padded_rows(asked) * wide);
    }

    int64_t bytes() const { return next_ - static_cast<char*>(nullptr); }

    float *residual, *branch, *asked_residual;
    T *normed, *query, *attended, *inner, *asked_attended;

  private:
    template <class E>
    E* take(int64_t count) {
        E* taken = reinterpret_cast<E*>(next_);
        next_ += divided_up(count * static_cast<int64_t>(sizeof(E)), 64) * 64;
        return taken;
    }

    char* next_;
};

struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
};

std::vector<float>& sums_of_thread() {
    thread_local std::vector<float> memory;
    return memory;
}

// x / rms(x) * weight, or x where there is no norm. `size` is a multiple of 16; `to` may be `x`.
template <class T>
void normalise(const float* x, int64_t size, const RowNorm& norm, T* to) {
    f32x16 squares = {};
    for (int64_t i = 0; i < size; i += 16) squares += load16(x + i) * load16(x + i);
    const float factor = 1.0f / std::sqrt(sum_of(squares) / size + static_cast<float>(norm.eps));
    for (int64_t i = 0; i < size; i += 16) store16(to + i, load16(x + i) * factor * load16(norm.weight + i));
}

// One head, by the two halves that turn together.
void rotate(float* head, int64_t dim, const float* cosines, const float* sines) {
    const int64_t half = dim / 2;
    for (int64_t d = 0; d < half; ++d) {
        const float a = head[d], b = head[d + half];
        head[d] = a * cosines[d] - b * sines[d];
        head[d + half] = b * cosines[d] + a * sines[d];
    }
}

template <class T>
class Forward {
  public:
    explicit Forward(const StepArgs& step)
        : s_(step),
          m_(*step.model),
          w_(m_, step.num_tokens, step.num_asked, static_cast<char*>(step.workspace)),
          counters_(m_.num_layers * 8 + 4) {
        plan_attention();
    }

    void run() {
        thread_local std::vector<float> partial_floats;
        int64_t floats = 0;
        for (const AttentionPlan& plan : plans_) floats = std::max(floats, plan.partial_floats(m_.head_dim));
        partials_ = at_least(partial_floats, floats);
#pragma omp parallel
        {
            const Tiles tiles;
            walk();
        }
    }

  private:
    // Layers with the same pages and the same window have the same work.
    void plan_attention() {
        std::vector<std::pair<int64_t, int64_t>> kinds;
        for (int64_t layer = 0; layer < m_.num_layers; ++layer) {
            const std::pair<int64_t, int64_t> kind(m_.layers[layer].table, m_.layers[layer].window);
            const auto found = std::find(kinds.begin(), kinds.end(), kind);
            plan_of_.push_back(found - kinds.begin());
            attend_args_.push_back(attend_args(m_.layers[layer]));
            if (found != kinds.end()) continue;
            kinds.push_back(kind);
            plans_.emplace_back(attend_args_.back());
        }
    }

    AttendArgs attend_args(const LayerArgs& layer) const {
        const TableArgs& table = s_.tables[layer.table];
        AttendArgs args = {};
        args.pool = layer.pool, args.page_layout = m_.page_layout;
        args.num_layers = layer.pool_layers, args.layer = layer.pool_layer;
        args.kv_heads = m_.kv_heads, args.q_heads = m_.q_heads, args.head_dim = m_.head_dim;
        args.page_size = m_.page_size;
        args.num_rows = s_.num_rows, args.num_tokens = s_.num_tokens, args.max_queries = s_.num_tokens;
        args.slots = table.slots, args.page_offsets = table.page_offsets, args.page_ids = table.page_ids;
        args.q_offsets = s_.q_offsets, args.kv_lens = s_.kv_lens;
        args.query = w_.query, args.query_token = m_.q_heads * m_.head_dim, args.query_head = m_.head_dim;
        args.out = w_.attended;
        args.scale = layer.scale, args.softcap = layer.softcap, args.window = layer.window;
        return args;
    }

    // What goes on from the attention of the last layer: the asked tokens alone, where those are not all.
    struct Stream {
        int64_t rows;
        float* residual;
        const T* attended;
    };

    // What each thread does.
    void walk() {
        const bool caller = omp_get_thread_num() == 0;
        auto since = std::chrono::steady_clock::now();
        const auto ends = [&](Part part) {  // of a phase, when all threads are through with it
#pragma omp barrier
            if (!caller) return;
            const auto now = std::chrono::steady_clock::now();
            s_.part_ns[part] += std::chrono::duration_cast<std::chrono::nanoseconds>(now - since).count();
            since = now;
        };
        int64_t place = 0;  // of the phase
        const auto phase = [&](Part part, int64_t items, auto&& work) {
            std::atomic<int64_t>& next = counters_[place++].next;
            for (int64_t i = next++; i < items; i = next++) work(i);
            ends(part);
        };
        Stream stream{s_.num_tokens, w_.residual, w_.attended};
        phase(kRest, divided_up(s_.num_tokens, kTokensPerItem), [&](int64_t i) { embed(i); });
        for (int64_t number = 0; number < m_.num_layers; ++number) {
            const LayerArgs& layer = m_.layers[number];
            const bool last = number + 1 == m_.num_layers;
            phase(kProjections, head_items(), [&](int64_t i) { heads(layer, attend_args_[number], i); });
            if (caller && s_.reports && s_.reports[number]) s_.report(s_.reports[number]);
            if (last && s_.num_asked == 0) return;
            const AttentionPlan& plan = plans_[plan_of_[number]];
            const Attention<T> attention(attend_args_[number], plan, partials_);
            take_items(plan.items, counters_[place++].next,
                       [&](const Item& item, const Item* next) { attention.attend(item, next); });
            ends(kAttention);
            if (!plan.merges.empty())
                phase(kAttention, plan.merges.size(), [&](int64_t i) { attention.merge(plan.merges[i]); });
            if (last && !all_asked()) {
                phase(kRest, s_.num_asked, [&](int64_t i) { keep_asked(i); });
                stream = {s_.num_asked, w_.asked_residual, w_.asked_attended};
            }
            add_product(phase, kOutput, layer.output, stream.attended, m_.q_heads * m_.head_dim, stream,
                        layer.after_attention, layer.before_mlp);
            phase(kGate, gate_items(stream.rows), [&](int64_t i) { gate(layer, stream.rows, i); });
            add_product(phase, kDown, layer.down, w_.inner, m_.inner, stream, layer.after_mlp,
                        last ? m_.last_norm : m_.layers[number + 1].before_attention);
        }
        phase(kHead, head_panel_items(), [&](int64_t i) { logits(i); });
    }

    bool all_asked() const {
        if (s_.num_asked != s_.num_tokens) return false;
        for (int64_t i = 0; i < s_.num_asked; ++i)
            if (s_.asked[i] != i) return false;
        return true;
    }

    void keep_asked(int64_t i) const {
        const int64_t wide = m_.q_heads * m_.head_dim;
        std::copy_n(w_.residual + s_.asked[i] * m_.hidden, m_.hidden, w_.asked_residual + i * m_.hidden);
        std::copy_n(w_.attended + s_.asked[i] * wide, wide, w_.asked_attended + i * wide);
    }

    void embed(int64_t item) const {
        const int64_t end = std::min(s_.num_tokens, (item + 1) * kTokensPerItem);
        for (int64_t token = item * kTokensPerItem; token < end; ++token) {
            const T* from = static_cast<const T*>(m_.embedding) + s_.input_ids[token] * m_.hidden;
            float* to = w_.residual + token * m_.hidden;
            for (int64_t i = 0; i < m_.hidden; i += 16)
                store16(to + i, load16(from + i) * static_cast<float>(m_.embedding_scale));
            normalise(to, m_.hidden, m_.layers[0].before_attention, w_.normed + token * m_.hidden);
        }
    }

    // ---- Q, K and V: one item is a head of a block of tokens.

    int64_t head_rows() const { return m_.head_dim > 128 ? kWideRowBlock : kRowBlock; }

    int64_t head_items() const {
        return (m_.q_heads + 2 * m_.kv_heads) * divided_up(s_.num_tokens, head_rows());
    }

    void heads(const LayerArgs& layer, const AttendArgs& attend, int64_t item) const {
        const Pages<T> pages = attend.template pages<T>();
        const QuantisedPages quantised = attend.quantised_pages();
        const int64_t all = m_.q_heads + 2 * m_.kv_heads, dim = m_.head_dim;
        const int64_t row = item / all * head_rows(), rows = std::min(head_rows(), s_.num_tokens - row);
        int64_t head = item % all, kind = 0;  // 0, 1, 2: Q, K, V
        for (; kind < 2 && head >= (kind ? m_.kv_heads : m_.q_heads); ++kind) head -= kind ? m_.kv_heads : m_.q_heads;
        const Weight& weight = kind == 0 ? layer.query : kind == 1 ? layer.key : layer.value;
        float* sums = at_least(sums_of_thread(), padded_rows(rows) * dim);
        product(weight, w_.normed + row * m_.hidden, m_.hidden, rows, head * dim / kPanel, dim / kPanel, sums, dim);
        for (int64_t r = 0; r < rows; ++r) {
            float* values = sums + r * dim;
            const int64_t token = row + r;
            if (weight.bias) add(values, weight.bias + head * dim, dim);
            if (kind < 2) {
                const RowNorm& norm = kind == 0 ? layer.of_query : layer.of_key;
                if (norm.weight) normalise(values, dim, norm, values);
                const int64_t at = s_.positions[token] * (dim / 2);
                rotate(values, dim, layer.cosines + at, layer.sines + at);
            }
            if (kind > 0) {
                const int64_t slot = s_.tables[layer.table].slots[token];
                if (quantised.are_there())
                    quantised.write(slot, kind - 1, head, values);
                else
                    pages.write(slot, kind - 1, head, values);
                continue;
            }
            T* to = w_.query + (token * m_.q_heads + head) * dim;
            for (int64_t d = 0; d < dim; d += 16) store16(to + d, load16(values + d));
        }
    }

    // ---- Products.

    // sums [padded rows][panels * 16] with rows `stride` apart.
    void product(const Weight& weight, const T* x, int64_t inputs, int64_t rows, int64_t first, int64_t panels,
                 float* sums, int64_t stride) const {
        const Packed matrix{weight.packed, weight.scales, inputs};
        for (int64_t p = 0; p < panels; p += kMostPanels)
            multiply(x, rows, matrix, first + p, std::min(kMostPanels, panels - p), sums + p * kPanel, stride);
    }

    static void add(float* to, const float* what, int64_t count) {
        for (int64_t i = 0; i < count; ++i) to[i] += what[i];
    }

    // How a product's outputs and rows are divided among items.
    struct Division {
        Division(int64_t outputs, int64_t rows, int64_t row_block)
            : panels(divided_up(outputs, kPanel)), width(panels_per_item(panels, omp_get_num_threads())),
              groups(divided_up(panels, width)), row_block(row_block), items(groups * divided_up(rows, row_block)) {}

        int64_t first(int64_t item) const { return item % groups * width; }
        int64_t count(int64_t item) const { return std::min(width, panels - first(item)); }
        int64_t row(int64_t item) const { return item / groups * row_block; }

        const int64_t panels, width, groups, row_block, items;
    };

    // residual += product [behind a norm of its own], then the norm before what follows.
    template <class Phase>
    void add_product(Phase& phase, Part part, const Weight& weight, const T* x, int64_t inputs, const Stream& stream,
                     const RowNorm& after, const RowNorm& next) const {
        const Division division(m_.hidden, stream.rows, kRowBlock);
        phase(part, division.items, [&](int64_t item) {
            const int64_t row = division.row(item), rows = std::min(kRowBlock, stream.rows - row);
            const int64_t column = division.first(item) * kPanel, count = division.count(item) * kPanel;
            float* sums = at_least(sums_of_thread(), kRowBlock * kMostPanels * kPanel);
            product(weight, x + row * inputs, inputs, rows, division.first(item), division.count(item), sums, count);
            for (int64_t r = 0; r < rows; ++r, sums += count) {
                if (weight.bias) add(sums, weight.bias + column, count);
                const int64_t at = (row + r) * m_.hidden + column;
                if (after.weight)
                    std::copy_n(sums, count, w_.branch + at);
                else
                    add(stream.residual + at, sums, count);
            }
        });
        phase(kRest, divided_up(stream.rows, kTokensPerItem), [&](int64_t item) {
            const int64_t end = std::min(stream.rows, (item + 1) * kTokensPerItem);
            for (int64_t row = item * kTokensPerItem; row < end; ++row) {
                float *residual = stream.residual + row * m_.hidden, *branch = w_.branch + row * m_.hidden;
                if (after.weight) {
                    normalise(branch, m_.hidden, after, branch);
                    add(residual, branch, m_.hidden);
                }
                normalise(residual, m_.hidden, next, w_.normed + row * m_.hidden);
            }
        });
    }

    // ---- The gate of the feed-forward block.

    int64_t gate_items(int64_t rows) const { return Division(m_.inner, rows, kWideRowBlock).items; }

    void gate(const LayerArgs& layer, int64_t all_rows, int64_t item) const {
        const Division division(m_.inner, all_rows, kWideRowBlock);
        const int64_t row = division.row(item), rows = std::min(kWideRowBlock, all_rows - row);
        const int64_t first = division.first(item), panels = division.count(item);
        const int64_t column = first * kPanel, count = panels * kPanel;
        float* gates = at_least(sums_of_thread(), 2 * kWideRowBlock * kMostPanels * kPanel);
        float* ups = gates + kWideRowBlock * kMostPanels * kPanel;
        const T* x = w_.normed + row * m_.hidden;
        product(layer.gate, x, m_.hidden, rows, first, panels, gates, count);
        product(layer.up, x, m_.hidden, rows, first, panels, ups, count);
        for (int64_t r = 0; r < rows; ++r, gates += count, ups += count) {
            if (layer.gate.bias) add(gates, layer.gate.bias + column, count);
            if (layer.up.bias) add(ups, layer.up.bias + column, count);
            T* to = w_.inner + (row + r) * m_.inner + column;
            for (int64_t i = 0; i < count; i += 16) {
                const f32x16 value = load16(gates + i);
                store16(to + i, (m_.gelu ? gelu16(value) : silu16(value)) * load16(ups + i));
            }
        }
    }

    // ---- Logits.

    int64_t head_panel_items() const { return Division(m_.vocabulary, s_.num_asked, kRowBlock).items; }

    void logits(int64_t item) const {
        const Division division(m_.vocabulary, s_.num_asked, kRowBlock);
        const int64_t row = division.row(item), rows = std::min(kRowBlock, s_.num_asked - row);
        const int64_t column = division.first(item) * kPanel, stride = division.count(item) * kPanel;
        const int64_t width = std::min(stride, m_.vocabulary - column);  // the last panel may be padded
        float* sums = at_least(sums_of_thread(), kRowBlock * kMostPanels * kPanel);
        product(m_.head, w_.normed + row * m_.hidden, m_.hidden, rows, division.first(item), division.count(item), sums,
                stride);
        for (int64_t r = 0; r < rows; ++r, sums += stride) {
            if (m_.head.bias) add(sums, m_.head.bias + column, width);
            if (m_.logits_softcap != 0) {
                const float cap = static_cast<float>(m_.logits_softcap);
                for (int64_t i = 0; i < stride; i += 16) store16(sums + i, cap * tanh16(load16(sums + i) / cap));
            }
            std::copy_n(sums, width, s_.logits + (row + r) * m_.vocabulary + column);
        }
    }

    const StepArgs& s_;
    const ModelArgs& m_;
    const Workspace<T> w_;
    std::vector<Counter> counters_;
    std::vector<AttentionPlan> plans_;
    std::vector<int64_t> plan_of_;  // by layer
    std::vector<AttendArgs> attend_args_;  // by layer
    float* partials_ = nullptr;
};

}  // namespace

extern "C" void baton_forward(const StepArgs* args) {
    if (args->model->is_bf16)
        Forward<bf16>(*args).run();
    else
        Forward<float>(*args).run();
}

extern "C" int64_t baton_forward_args_bytes() { return sizeof(StepArgs); }
extern "C" int64_t baton_forward_model_bytes() { return sizeof(ModelArgs); }
extern "C" int64_t baton_forward_parts_bytes() { return kStepParts * sizeof(int64_t); }
extern "C" int64_t baton_forward_layer_bytes() { return sizeof(LayerArgs); }

extern "C" int64_t baton_forward_workspace_bytes(const StepArgs* args) {
    const ModelArgs& model = *args->model;
    if (model.is_bf16) return Workspace<bf16>(model, args->num_tokens, args->num_asked, nullptr).bytes();
    return Workspace<float>(model, args->num_tokens, args->num_asked, nullptr).bytes();
}
