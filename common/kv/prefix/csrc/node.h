// What the compiled prefix tree is made of: nodes and who finds them, and the books that are kept per component. The
// twin of node.py; what is said there of nodes and ledgers holds here. Positions are counted in pages from the root.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <unordered_set>
#include <vector>

namespace baton {

using Id = int32_t;  // of a page or a state slot, or a token

// What must never be. Reaches Python as an InvariantViolation.
inline void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(what);
}

struct Layout {
    int64_t page_size;
    bool full;
    int64_t window;  // 0: no layer slides
    bool state;

    // `KvLayout.live_from` in pages; `end` itself when no layer slides, and the window is empty.
    int64_t first_live(int64_t end) const {
        return window ? std::max<int64_t>(0, end * page_size - window + 1) / page_size : end;
    }
};

// Ids or tokens of a node. Giving some in front away costs as much as they are many, not as those that stay.
class Ints {
public:
    Ints() = default;
    Ints(const Id* from, int64_t count) : data_(from, from + count) {}

    int64_t size() const { return static_cast<int64_t>(data_.size()) - gone_; }
    Id* begin() { return data_.data() + gone_; }
    Id* end() { return data_.data() + data_.size(); }
    Id& operator[](int64_t place) { return begin()[place]; }

    Ints take_front(int64_t count) {
        count = std::min(count, size());  // there is nothing to take of a component that the layout lacks
        Ints front(begin(), count);
        gone_ += count;
        if (gone_ > size()) *this = Ints(begin(), size());  // those before paid for it
        return front;
    }

    void keep_front(int64_t count) { *this = Ints(begin(), count); }

private:
    std::vector<Id> data_;
    int64_t gone_ = 0;
};

// `full` and `swa` have one id per page, or none when the layout lacks the component.
struct Node {
    int64_t handle = 0;
    Node* parent = nullptr;  // null: the root
    uint64_t hash = 0;  // of the parent and the first page of tokens
    Ints key, full, swa;
    int64_t size = 0, end = 0;
    int64_t children = 0;
    int64_t locks = 0, last_use = 0;
    int64_t swa_live = 0, swa_locks = 0, swa_use = 0;
    int64_t state = 0, state_locks = 0, state_use = 0;

    int64_t start() const { return end - size; }
};

// All nodes, by handle: a number that is never given to a second node, so that one that is out of date is recognised.
// The root's is 0.
class Nodes {
public:
    Nodes() { add(); }

    Node* root() { return slots_[0].node.get(); }

    Node* add() {
        if (free_.empty()) {
            free_.push_back(static_cast<uint32_t>(slots_.size()));
            slots_.emplace_back();
        }
        const uint32_t place = free_.back();
        free_.pop_back();
        Slot& slot = slots_[place];
        slot.node = std::make_unique<Node>();
        slot.node->handle = static_cast<int64_t>(slot.generation) << 32 | place;
        return slot.node.get();
    }

    void remove(Node* node) {
        const auto place = static_cast<uint32_t>(node->handle);
        free_.push_back(place);
        ++slots_[place].generation;
        slots_[place].node.reset();
    }

    Node* find(int64_t handle) {  // null: it was removed
        const auto place = static_cast<uint32_t>(handle);
        if (place >= slots_.size() || slots_[place].generation != static_cast<uint64_t>(handle) >> 32) return nullptr;
        return slots_[place].node.get();
    }

    template <class Visit>
    void each(Visit visit) {
        for (size_t place = 1; place < slots_.size(); ++place)
            if (slots_[place].node) visit(slots_[place].node.get());
    }

private:
    struct Slot {
        std::unique_ptr<Node> node;
        uint64_t generation = 0;  // below 2^31 for as long as a process lives
    };
    std::vector<Slot> slots_;
    std::vector<uint32_t> free_;
};

// Finds a child by its parent and its first page of tokens: open addressing, linear probing. The seed keeps whoever
// chooses tokens from choosing collisions; it changes nothing but how long a look-up takes.
class Children {
public:
    Children(int64_t page_size, uint64_t seed, int64_t& work)
        : page_size_(page_size), seed_(seed | 1), work_(work), places_(64) {}

    int64_t size() const { return size_; }

    Node* find(const Node* parent, const Id* page) { return *slot(parent, page, hash(parent, page)); }

    void add(Node* child) {
        if (2 * (size_ + 1) > static_cast<int64_t>(places_.size())) grow();
        child->hash = hash(child->parent, child->key.begin());
        Node** free = slot(child->parent, child->key.begin(), child->hash);
        require(!*free, "two children with the same first page");
        *free = child;
        ++size_;
    }

    void remove(Node* child) {
        Node** found = slot(child->parent, child->key.begin(), child->hash);
        require(*found == child, "a node that its parent does not find");
        size_t hole = found - places_.data();
        for (size_t place = next(hole); places_[place]; place = next(place)) {
            const size_t home = places_[place]->hash & (places_.size() - 1);
            if (((place - home) & (places_.size() - 1)) >= ((place - hole) & (places_.size() - 1))) {
                places_[hole] = places_[place];
                hole = place;
            }
        }
        places_[hole] = nullptr;
        --size_;
    }

private:
    size_t next(size_t place) const { return (place + 1) & (places_.size() - 1); }

    Node** slot(const Node* parent, const Id* page, uint64_t hash) {
        size_t place = hash & (places_.size() - 1);
        for (;; place = next(place)) {
            ++work_;
            Node* node = places_[place];
            if (!node) break;
            if (node->hash == hash && node->parent == parent &&
                !std::memcmp(node->key.begin(), page, page_size_ * sizeof(Id)))
                break;
        }
        return &places_[place];
    }

    static uint64_t mix(uint64_t a, uint64_t b) {
        const auto product = static_cast<unsigned __int128>(a) * b;
        return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }

    uint64_t hash(const Node* parent, const Id* page) const {
        uint64_t sum = mix(static_cast<uint64_t>(parent->handle) ^ 0x9e3779b97f4a7c15, seed_);
        for (int64_t token = 0; token < page_size_; ++token)
            sum = mix(sum ^ static_cast<uint32_t>(page[token]), seed_ ^ 0xa0761d6478bd642f);
        return mix(sum, 0xe7037ed1a0b428db);
    }

    void grow() {
        std::vector<Node*> before(places_.size() * 2);
        before.swap(places_);
        for (Node* node : before) {
            if (!node) continue;
            size_t place = node->hash & (places_.size() - 1);
            while (places_[place]) place = next(place);
            places_[place] = node;
        }
    }

    int64_t page_size_;
    uint64_t seed_;
    int64_t& work_;
    std::vector<Node*> places_;
    int64_t size_ = 0;
};

// Mirrored by `_Counts` in compiled.py.
struct Counts {
    int64_t evictable, locked, evicted_total, queued;
};

struct Entry {
    int64_t use;
    int64_t push;  // of what was used at the same time, what was queued first goes first
    int64_t handle;

    bool operator>(const Entry& other) const {
        return use != other.use ? use > other.use : push > other.push;
    }
};

class Ledger {
public:
    using IsCurrent = bool (*)(const Node&, int64_t use);

    Ledger(IsCurrent is_current, Nodes& nodes, Counts& counts, int64_t& work)
        : is_current_(is_current), nodes_(nodes), counts_(counts), work_(work) {}

    const std::vector<Entry>& entries() const { return queue_; }
    int64_t evictable() const { return counts_.evictable; }

    void gained(int64_t count) { counts_.evictable += count; }

    void lock(int64_t count) {
        counts_.evictable -= count;
        counts_.locked += count;
    }

    void unlock(int64_t count) { lock(-count); }

    void gave_up(int64_t count) {
        counts_.evictable -= count;
        counts_.evicted_total += count;
    }

    // `nodes`: how many the tree has, which bounds the queue.
    void push(int64_t use, const Node* node, int64_t nodes) {
        if (static_cast<int64_t>(queue_.size()) > 4 * nodes + 64) tidy();
        put({use, ++pushes_, node->handle});
    }

    Node* pop() {
        while (!queue_.empty()) {
            const Entry first = take();
            if (Node* node = current(first)) return node;
        }
        return nullptr;
    }

    // The nodes that `pop` would give until there are so many pages. They keep their turn.
    std::vector<Node*> coldest(int64_t pages) {
        std::vector<Entry> first;
        std::vector<Node*> nodes;
        std::unordered_set<int64_t> seen;
        while (pages > 0 && !queue_.empty()) {
            const Entry entry = take();
            Node* node = current(entry);
            if (!node || !seen.insert(entry.handle).second) continue;
            first.push_back(entry);
            nodes.push_back(node);
            pages -= node->size;
        }
        for (const Entry& entry : first) put(entry);
        return nodes;
    }

private:
    Node* current(const Entry& entry) {
        Node* node = nodes_.find(entry.handle);
        return node && is_current_(*node, entry.use) ? node : nullptr;
    }

    void put(const Entry& entry) {
        queue_.push_back(entry);
        std::push_heap(queue_.begin(), queue_.end(), std::greater<>());
        counts_.queued = static_cast<int64_t>(queue_.size());
    }

    Entry take() {
        ++work_;
        std::pop_heap(queue_.begin(), queue_.end(), std::greater<>());
        const Entry first = queue_.back();
        queue_.pop_back();
        counts_.queued = static_cast<int64_t>(queue_.size());
        return first;
    }

    // Drops what is out of date, and of each node all but the first to go.
    void tidy() {
        work_ += static_cast<int64_t>(queue_.size());
        const auto by_node = [](const Entry& a, const Entry& b) {
            return a.handle != b.handle ? a.handle < b.handle : b > a;
        };
        const auto same = [](const Entry& a, const Entry& b) { return a.handle == b.handle; };
        const auto stale = [this](const Entry& entry) { return !current(entry); };
        queue_.erase(std::remove_if(queue_.begin(), queue_.end(), stale), queue_.end());
        std::sort(queue_.begin(), queue_.end(), by_node);
        queue_.erase(std::unique(queue_.begin(), queue_.end(), same), queue_.end());
        std::make_heap(queue_.begin(), queue_.end(), std::greater<>());
    }

    IsCurrent is_current_;
    Nodes& nodes_;
    Counts& counts_;
    int64_t& work_;
    std::vector<Entry> queue_;
    int64_t pushes_ = 0;
};

inline bool full_is_current(const Node& node, int64_t use) {
    return node.parent && !node.locks && !node.children && node.last_use == use;
}

inline bool swa_is_current(const Node& node, int64_t use) {
    return node.parent && !node.swa_locks && node.swa_live > 0 && node.swa_use == use;
}

inline bool state_is_current(const Node& node, int64_t use) {
    return node.parent && !node.state_locks && node.state > 0 && node.state_use == use;
}

}  // namespace baton
