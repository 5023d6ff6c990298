// The fake model's steps over pages: the compiled twin of fake_runner.py's array operations and of fake_model.py's
// formulas, to the bit. Called through ctypes with plain pointers; fake_kernels.py has the other side.
//
// A call does one component of one step: it writes what the step keeps of its tokens, then reads what the rows that want
// a token see. Answers 0, or 1 when a page or slot is not of the pool: nothing is read or written there.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

using U64 = uint64_t;

constexpr U64 kA = 0xD1342543DE82EF95, kB = 0x9FB21C651E98DF25, kStart = 0x9E3779B97F4A7C15;
constexpr U64 kWordStep = 0xBF58476D1CE4E5B8, kCheckStep = 0x94D049BB133111EA;
constexpr U64 kSalts[] = {0, 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D};  // full, sliding, state

U64 mix(U64 value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
    return value ^ (value >> 31);
}

}  // namespace

extern "C" {

// Mirrored by `_Memory` in fake_kernels.py. A page has `layers` stretches of `per_page` positions of `words` words.
struct Memory {
    U64* pages;
    int64_t num_pages, layers, per_page, words;
    int64_t component;  // 0 full, 1 sliding, 2 state
    int64_t window;
};

int64_t baton_fake_memory_bytes() { return sizeof(Memory); }
}

namespace {

class Pages {
public:
    explicit Pages(const Memory& memory) : memory_(memory) {
        for (U64 word = 1; word < static_cast<U64>(memory.layers * memory.words); ++word)
            scale_ += word * kWordStep * (word * kCheckStep + 1);
    }

    bool has(int64_t page) const { return page >= 0 && page < memory_.num_pages; }

    // Layers [begin, end) of the hash at a slot.
    void write(int64_t slot, U64 hash, int64_t begin, int64_t end) const {
        for (int64_t layer = begin; layer < end; ++layer) {
            U64* at = words(slot, layer);
            for (int64_t word = 0; word < memory_.words; ++word) {
                const U64 index = layer * memory_.words + word;
                at[word] = index ? hash * (index * kWordStep) : hash;
            }
        }
    }

    U64 read(int64_t slot) const {
        U64 first = 0, checked = 0;
        for (int64_t layer = 0; layer < memory_.layers; ++layer) {
            const U64* at = words(slot, layer);
            for (int64_t word = 0; word < memory_.words; ++word) {
                const U64 index = layer * memory_.words + word;
                if (index)
                    checked += at[word] * (index * kCheckStep + 1);
                else
                    first = at[word];
            }
        }
        return first + (checked - first * scale_);
    }

private:
    U64* words(int64_t slot, int64_t layer) const {
        const int64_t page = slot / memory_.per_page, place = slot % memory_.per_page;
        return memory_.pages + ((page * memory_.layers + layer) * memory_.per_page + place) * memory_.words;
    }

    const Memory& memory_;
    U64 scale_ = 0;
};

}  // namespace

extern "C" {

// Tokens are `q_offsets[row]` to `q_offsets[row + 1]`, `kv_lens[row]` is the length after the step. `slots` is where each
// token is written; of the state, where each row's is. `wanted`: rows whose digest (of the state, the state itself) goes
// to `out`. Layers [begin, end) are written; digests are of all.
int64_t baton_fake_step(const Memory* memory, int64_t rows, const int64_t* tokens, const int64_t* slots,
                        const int32_t* q_offsets, const int32_t* kv_lens, const int32_t* page_offsets,
                        const int32_t* page_ids, int64_t begin, int64_t end, int64_t wanted_rows,
                        const int64_t* wanted, U64* out) {
    const Pages pages(*memory);
    const int64_t per_page = memory->per_page, window = memory->window;
    const bool slides = memory->component == 1, recurs = memory->component == 2;
    const U64 salt = kSalts[memory->component];
    std::vector<U64> hashes(q_offsets[rows]);
    const auto slot_of = [&](int64_t row, int64_t position) {
        return page_ids[page_offsets[row] + position / per_page] * per_page + position % per_page;
    };
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t queries = q_offsets[row + 1] - q_offsets[row], first = kv_lens[row] - queries;
        if (recurs ? !pages.has(slots[row]) : page_offsets[row + 1] - page_offsets[row] < 1) return 1;
        U64* const hash = hashes.data() + q_offsets[row];
        const auto at = [&](int64_t position) {
            return position >= first ? hash[position - first] : pages.read(slot_of(row, position));
        };
        if (!recurs)
            for (int64_t page = page_offsets[row]; page < page_offsets[row + 1]; ++page)
                if (!pages.has(page_ids[page])) return 1;
        U64 previous = kStart;
        if (recurs)
            previous = pages.read(slots[row]);
        else if (!slides && first > 0)
            previous = at(first - 1);
        for (int64_t query = 0; query < queries; ++query) {
            const int64_t position = first + query;
            const U64 token = tokens[q_offsets[row] + query];
            U64 value = mix((token * kA + mix(static_cast<U64>(position) + kStart)) ^ salt);
            if (!slides) {
                value += kA * previous;
            } else if (window > 1) {
                if (position >= 1) value += kA * at(position - 1);
                if (position >= window - 1) value += kB * at(position - window + 1);
            }
            hash[query] = previous = value;
        }
    }
    if (recurs) {
        for (int64_t row = 0; row < rows; ++row) pages.write(slots[row], hashes[q_offsets[row + 1] - 1], begin, end);
        for (int64_t at = 0; at < wanted_rows; ++at) out[at] = hashes[q_offsets[wanted[at] + 1] - 1];
        return 0;
    }
    for (size_t query = 0; query < hashes.size(); ++query) {
        if (!pages.has(slots[query] / per_page)) return 1;
        pages.write(slots[query], hashes[query], begin, end);
    }
    for (int64_t at = 0; at < wanted_rows; ++at) {
        const int64_t row = wanted[at];
        U64 digest = 0;
        for (int64_t seen = slides ? std::max<int64_t>(0, kv_lens[row] - window) : 0; seen < kv_lens[row]; ++seen)
            digest += pages.read(slot_of(row, seen)) * (mix(static_cast<U64>(seen) + kStart) | 1);
        out[at] = digest;
    }
    return 0;
}
}
