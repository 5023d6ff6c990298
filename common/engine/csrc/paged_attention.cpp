// Attention alone: what a layer of a module calls. Through ctypes with plain pointers: no torch headers, so it builds in
// seconds, and it runs on torch's own OpenMP threads.

#include <atomic>
#include <cstdint>

#include "attention.h"

using namespace baton;

namespace {

template <class T>
void attend(const AttendArgs& args) {
    thread_local std::vector<float> partials;
    const AttentionPlan plan(args);
    const Attention<T> attention(args, plan, at_least(partials, plan.partial_floats(args.head_dim)));
    const int64_t merges = static_cast<int64_t>(plan.merges.size());
    std::atomic<int64_t> next_item{0};
#pragma omp parallel if (plan.work >= kSerialWork)
    {
        const Tiles tiles;
#pragma omp for schedule(static)
        for (int64_t token = 0; token < args.num_tokens; ++token) attention.write_token(token);
        take_items(plan.items, next_item, [&](const Item& item, const Item* next) { attention.attend(item, next); });
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t i = 0; i < merges; ++i) attention.merge(plan.merges[i]);
    }
}

}  // namespace

extern "C" void baton_attend(const AttendArgs* args) {
    if (args->is_bf16)
        attend<bf16>(*args);
    else
        attend<float>(*args);
}

extern "C" int64_t baton_attend_args_bytes() { return sizeof(AttendArgs); }
