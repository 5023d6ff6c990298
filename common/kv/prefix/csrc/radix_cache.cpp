// The compiled prefix cache: matches, leases and what is worth keeping. The twin of tree.py, whose invariants hold here.
// Called through ctypes with plain pointers; compiled.py has the other side of each function. Lengths are in pages.
//
// Whoever calls holds handles of nodes, never pointers. A lease's handle is good while the lease lives (Python sees to
// that); a match's may be of a node that was split, cut or removed since, and is recognised.

#include <string>

#include "audit.h"
#include "page_tree.h"

using namespace baton;

// What a call answers. Mirrored by `Reply` in compiled.py. `ids` holds `lengths[0]` ids of the first kind, then
// `lengths[1]` of the second and so on; which kinds, each function says.
struct Reply {
    int64_t node, end;
    int64_t known, state_taken, state;
    int64_t counts[3];
    int64_t lengths[6];
    int64_t total;
    const Id* ids;
    int64_t numbers;  // how many there are in `table`
    const int64_t* table;
    const char* error;
};

namespace {

constexpr int64_t kFields = 17;  // of a node in a dump
constexpr size_t kKeptIds = 1 << 16;  // an answer larger than this gives its memory back before the next

class RadixCache {
public:
    RadixCache(const Layout& layout, uint64_t seed) : tree(layout, seed) {}

    // node, end.
    void match(const Id* tokens, int64_t pages) {
        const int64_t known = tree.descend(tree.nodes.root(), tokens, pages, path_);
        const int64_t end = usable_end(known);
        while (!path_.empty() && path_.back()->start() >= end) path_.pop_back();
        reply.node = path_.empty() ? 0 : path_.back()->handle;
        reply.end = end;
    }

    // counts.
    void evictable_in(int64_t handle, int64_t match_end) {
        int64_t full = 0, swa = 0, state = 0;
        const int64_t first = tree.layout.first_live(match_end);
        if (Node* last = tree.nodes.find(handle)) {
            tree.path_up(last, [&](Node* node) {
                const int64_t start = node->start(), end = std::min(match_end, node->end);
                if (node->locks && end <= first) return false;
                if (!node->locks) full += std::min(node->full.size(), std::max<int64_t>(0, end - start));
                if (!node->swa_locks)
                    for (int64_t page = std::max(start, first); page < end && tree.layout.window; ++page)
                        swa += node->swa[page - start] != 0;
                return true;
            });
            state = last->end == match_end && last->state && !last->state_locks;
        }
        reply.counts[kFull] = full;
        reply.counts[kSwa] = swa;
        reply.counts[kState] = state;
    }

    // node: the lease's, or 0.
    void lock(int64_t handle, int64_t end) {
        reply.node = 0;
        Node* node = tree.nodes.find(handle);
        if (end == 0 || !node || node->end < end) return;  // it was evicted since, or its tail was
        while (node->start() >= end) node = node->parent;  // split since: the match ends in a node above
        if (!tree.window_is_live(node, end)) return;
        if (tree.layout.state && !(node->end == end && node->state)) return;
        if (node->end > end) node = tree.split(node, end - node->start());
        tree.path_up(node, [&](Node* above) {
            tree.add_lock(above);
            return true;
        });
        tree.hold_end(node);
        ++tree.books.leases;
        reply.node = node->handle;
    }

    void unlock(int64_t handle, bool used) {
        Node* node = leased(handle);
        --tree.books.leases;
        tree.now += used;
        tree.release_end(node, used);
        tree.path_up(node, [&](Node* above) {
            tree.drop_lock(above, used);
            return true;
        });
    }

    // ids: FULL, SWA (0 before the live window); state: the checkpoint's slot, or 0.
    void pages(int64_t handle) {
        reset();
        put_pages(tree.nodes.root(), leased(handle));
    }

    // `tokens` and `given` are those of [end of the lease, whole); slot: of a state at `whole`, or 0.
    // node, end: of the new lease. known: until where FULL pages are duplicates. state_taken. ids: SWA taken,
    // duplicate, tail (from `end` on, of all that was given), then the pages to read instead as `pages` has them.
    void insert(int64_t handle, const Id* tokens, int64_t pages, Given given, int64_t given_swa, Id slot) {
        reset();
        Node* old = handle ? leased(handle) : tree.nodes.root();
        const int64_t first = old->end, whole = first + pages;
        const int64_t agreed = tree.descend(old, tokens, pages, path_);
        const int64_t end = end_to_keep(agreed, first, whole, given, slot);
        Parts taken, duplicate, tail;
        Node* node = tree.merge(old, path_, std::min(agreed, end), given, taken, duplicate);
        reply.known = node->end;
        if (node->end < end) {
            const int64_t from = node->end - first;
            const Given grown{given.full + from, given.swa + from};
            node = tree.grow(node, tokens + from * tree.layout.page_size, end - node->end, grown, taken);
        }
        reply.state_taken = slot && end > 0 && end == whole && tree.place_state(node, slot);
        if (given_swa > end - first) append_live(tail.swa, given.swa + (end - first), given.swa + given_swa);
        put(taken.swa);
        put(duplicate.swa);
        put(tail.swa);
        advance(handle, old, node);
        put_pages(old, node);
        reply.node = node->handle;
        reply.end = node->end;
    }

    // table: (handle, end) of each; ids: the tokens of each until its end.
    void coldest(int64_t count) {
        reset();
        for (Node* leaf : tree.full.coldest(count)) {
            table_.insert(table_.end(), {leaf->handle, leaf->end});
            const size_t from = ids_.size();
            ids_.resize(from + leaf->end * tree.layout.page_size);
            tree.path_up(leaf, [&](Node* node) {
                const int64_t at = node->start() * tree.layout.page_size;
                std::copy(node->key.begin(), node->key.end(), ids_.begin() + from + at);
                return true;
            });
        }
    }

    // ids: FULL, SWA, STATE.
    void evict(Component component, int64_t count) {
        reset();
        Parts gone;
        tree.evict(component, count, gone);
        put(gone);
    }

    // ids: evictable FULL, SWA, STATE, then those that are locked.
    void cached() {
        reset();
        Parts evictable, locked;
        tree.nodes.each([&](Node* node) {
            std::vector<Id>& full = (node->locks ? locked : evictable).full;
            full.insert(full.end(), node->full.begin(), node->full.end());
            append_live((node->swa_locks ? locked : evictable).swa, node->swa.begin(), node->swa.end());
            if (node->state) (node->state_locks ? locked : evictable).state.push_back(static_cast<Id>(node->state));
        });
        put(evictable);
        put(locked);
    }

    // Everything, for the audit. table: the number of nodes, how many of them the parents' table holds, how many are
    // queued of each component; then of each node the fields below; then of each entry its handle and use. ids: of each
    // node its key, full and swa.
    void dump() {
        reset();
        const Ledger* ledgers[] = {&tree.full, &tree.swa, &tree.state};
        int64_t count = 0;
        tree.nodes.each([&](Node*) { ++count; });
        table_ = {count, tree.children.size()};
        for (const Ledger* ledger : ledgers) table_.push_back(static_cast<int64_t>(ledger->entries().size()));
        tree.nodes.each([&](Node* node) {
            Node* found = tree.children.find(node->parent, node->key.begin());
            table_.insert(table_.end(),
                          {node->handle, node->parent->handle, found ? found->handle : 0, node->key.size(),
                           node->full.size(), node->swa.size(), node->size, node->end, node->children, node->locks,
                           node->last_use, node->swa_live, node->swa_locks, node->swa_use, node->state,
                           node->state_locks, node->state_use});
            for (Ints* ints : {&node->key, &node->full, &node->swa}) ids_.insert(ids_.end(), ints->begin(), ints->end());
        });
        for (const Ledger* ledger : ledgers)
            for (const Entry& entry : ledger->entries()) table_.insert(table_.end(), {entry.handle, entry.use});
    }

    // Takes over, into a tree that is new, what `dump` has written of another, whose handles count from 1; `found` is 0
    // where the parent does not find the node, `parent` -1 where it has none. `counted`: the other's evictable and
    // locked ids of each component, its nodes and its leases. Believes all of it, so that an audit finds what is wrong.
    void load(const int64_t* counted, const int64_t* table, const Id* ids) {
        for (Counts& counts : tree.books.of) {
            counts.evictable = *counted++;
            counts.locked = *counted++;
        }
        tree.books.nodes = counted[0];
        tree.books.leases = counted[1];
        const int64_t count = table[0], *queued = table + 2, *at = queued + 3;
        for (int64_t handle = 1; handle <= count; ++handle) tree.nodes.add();
        for (int64_t handle = 1; handle <= count; ++handle, at += kFields) {
            Node* node = tree.nodes.find(at[0]);
            node->parent = tree.nodes.find(at[1]);
            node->key = Ints(ids, at[3]);
            node->full = Ints(ids + at[3], at[4]);
            node->swa = Ints(ids + at[3] + at[4], at[5]);
            ids += at[3] + at[4] + at[5];
            node->size = at[6];
            node->end = at[7];
            node->children = at[8];
            node->locks = at[9];
            node->last_use = at[10];
            node->swa_live = at[11];
            node->swa_locks = at[12];
            node->swa_use = at[13];
            node->state = at[14];
            node->state_locks = at[15];
            node->state_use = at[16];
            if (node->parent && at[2] == at[0]) tree.children.add(node);
        }
        for (Ledger* ledger : {&tree.full, &tree.swa, &tree.state})
            for (int64_t left = *queued++; left > 0; --left, at += 2) ledger->push(at[1], tree.nodes.find(at[0]), count);
    }

    // Runs `action`, and says in the reply what it left in the buffers; 0 unless a rule was broken.
    template <class Action>
    int64_t guarded(Action action) {
        try {
            action();
        } catch (const std::exception& error) {
            error_ = error.what();
            reply.error = error_.c_str();
            return 1;
        }
        reply.ids = ids_.data();
        reply.total = static_cast<int64_t>(ids_.size());
        reply.table = table_.data();
        reply.numbers = static_cast<int64_t>(table_.size());
        return 0;
    }

    PageTree tree;
    Reply reply{};

private:
    Node* leased(int64_t handle) {
        Node* node = tree.nodes.find(handle);
        require(node && node->locks, "a lease over a node without a lock");
        return node;
    }

    // The last position until `known` from which every component can go on; the way there is in `path_`.
    int64_t usable_end(int64_t known) {
        const Layout& layout = tree.layout;
        if (!layout.window && !layout.state) return known;
        if (layout.state) checkpoints(known);
        const int64_t last = !layout.state ? known : ends_.empty() ? 0 : ends_.back();
        if (!layout.window || last == 0 || tree.window_is_live(path_.back(), last)) return last;
        live_.clear();
        for (Node* node : path_)
            for (Id id : node->swa) live_.push_back(id != 0);
        live_.resize(known);
        return longest_usable(0);
    }

    // The last usable position until `whole` once what is given is merged: what lies behind it could never be matched,
    // so it is not taken. The caller's lease ends at `first`, so that is usable.
    int64_t end_to_keep(int64_t known, int64_t first, int64_t whole, Given given, Id slot) {
        const Layout& layout = tree.layout;
        if (whole == first) return first;
        if (layout.state) {
            checkpoints(known);
            if (slot && (ends_.empty() || ends_.back() != whole)) ends_.push_back(whole);
        }
        if (!layout.window) return !layout.state ? whole : ends_.empty() ? first : ends_.back();
        live_.resize(whole - first);
        for (int64_t page = 0; page < whole - first; ++page) live_[page] = given.swa[page] != 0;
        for (Node* node : path_)
            for (int64_t at = node->start(); at < std::min(node->end, known); ++at)
                live_[at - first] |= node->swa[at - node->start()] != 0;
        return longest_usable(first);
    }

    void checkpoints(int64_t known) {
        ends_.clear();
        for (Node* node : path_)
            if (node->state && node->end <= known) ends_.push_back(node->end);
    }

    // The largest position above `first` from which sliding layers can go on, or `first`: of `ends_` when there are
    // states. `live_[i]` is of page `first + i`; those before `first` are alive as far as a window reaches back.
    int64_t longest_usable(int64_t first) {
        int64_t best = first, last_dead = -1;
        auto checkpoint = ends_.begin();
        for (int64_t page = first; page < first + static_cast<int64_t>(live_.size()); ++page) {
            if (!live_[page - first]) last_dead = page;
            if (tree.layout.state) {
                if (checkpoint == ends_.end()) break;
                if (*checkpoint != page + 1) continue;
                ++checkpoint;
            }
            if (last_dead < tree.layout.first_live(page + 1)) best = page + 1;
        }
        return best;
    }

    // Moves a lease from `old` to `node`; every node between the two has its lock already.
    void advance(int64_t lease, Node* old, Node* node) {
        if (node == tree.nodes.root()) return;
        const int64_t first = old->end;
        ++tree.now;
        tree.hold_end(node);
        if (lease)
            tree.release_end(old, true);
        else
            ++tree.books.leases;
        tree.passed(node, first);
    }

    // What a lease on `node` protects of the path from `above` to it, and the checkpoint there.
    void put_pages(Node* above, Node* node) {
        const int64_t from = above->end, pages = node->end - from, first = tree.layout.first_live(node->end);
        const size_t full = room(tree.layout.full ? pages : 0), swa = room(tree.layout.window ? pages : 0);
        tree.path_up(node, [&](Node* part) {
            if (part->end <= from) return false;
            Id* at = ids_.data() + (part->start() - from);
            if (tree.layout.full) std::copy(part->full.begin(), part->full.end(), at + full);
            if (part->start() >= first) std::copy(part->swa.begin(), part->swa.end(), at + swa);
            return true;
        });
        reply.state = node->state;
    }

    void put(const std::vector<Id>& ids) {
        ids_.insert(ids_.end(), ids.begin(), ids.end());
        reply.lengths[parts_++] = static_cast<int64_t>(ids.size());
    }

    // Zeros for the next kind of ids; returns where they begin.
    size_t room(int64_t count) {
        const size_t start = ids_.size();
        ids_.resize(start + count);
        reply.lengths[parts_++] = count;
        return start;
    }

    void put(const Parts& parts) {
        put(parts.full);
        put(parts.swa);
        put(parts.state);
    }

    void reset() {
        if (ids_.capacity() > kKeptIds) std::vector<Id>().swap(ids_);
        if (table_.capacity() > kKeptIds) std::vector<int64_t>().swap(table_);
        ids_.clear();
        table_.clear();
        parts_ = 0;
    }

    std::vector<Node*> path_;
    std::vector<int64_t> ends_;
    std::vector<char> live_;
    std::vector<Id> ids_;
    std::vector<int64_t> table_;
    int parts_ = 0;
    std::string error_;
};

}  // namespace

extern "C" {

int64_t baton_radix_reply_bytes() { return sizeof(Reply); }
int64_t baton_radix_books_bytes() { return sizeof(Books); }

RadixCache* baton_radix_create(int64_t page_size, int64_t full, int64_t window, int64_t state, int64_t seed) {
    return new RadixCache({page_size, full != 0, window, state != 0}, static_cast<uint64_t>(seed));
}
void baton_radix_destroy(RadixCache* cache) { delete cache; }
const Reply* baton_radix_reply(RadixCache* cache) { return &cache->reply; }
const Books* baton_radix_books(RadixCache* cache) { return &cache->tree.books; }

int64_t baton_radix_match(RadixCache* cache, const Id* tokens, int64_t pages) {
    return cache->guarded([&] { cache->match(tokens, pages); });
}
int64_t baton_radix_evictable_in(RadixCache* cache, int64_t node, int64_t end) {
    return cache->guarded([&] { cache->evictable_in(node, end); });
}
int64_t baton_radix_lock(RadixCache* cache, int64_t node, int64_t end) {
    return cache->guarded([&] { cache->lock(node, end); });
}
int64_t baton_radix_unlock(RadixCache* cache, int64_t node, int64_t used) {
    return cache->guarded([&] { cache->unlock(node, used != 0); });
}
int64_t baton_radix_pages(RadixCache* cache, int64_t node) {
    return cache->guarded([&] { cache->pages(node); });
}
int64_t baton_radix_insert(RadixCache* cache, int64_t node, const Id* tokens, int64_t pages, const Id* full,
                           const Id* swa, int64_t swa_count, int64_t slot) {
    return cache->guarded([&] { cache->insert(node, tokens, pages, {full, swa}, swa_count, static_cast<Id>(slot)); });
}
int64_t baton_radix_coldest(RadixCache* cache, int64_t count) {
    return cache->guarded([&] { cache->coldest(count); });
}
int64_t baton_radix_evict(RadixCache* cache, int64_t component, int64_t count) {
    return cache->guarded([&] { cache->evict(static_cast<Component>(component), count); });
}
int64_t baton_radix_cached(RadixCache* cache) {
    return cache->guarded([&] { cache->cached(); });
}
int64_t baton_radix_dump(RadixCache* cache) {
    return cache->guarded([&] { cache->dump(); });
}
int64_t baton_radix_load(RadixCache* cache, const int64_t* counted, const int64_t* table, const Id* ids) {
    return cache->guarded([&] { cache->load(counted, table, ids); });
}
int64_t baton_radix_pool_bytes() { return sizeof(Pool); }
int64_t baton_radix_audit(RadixCache* cache, const Pool* pool, const int64_t* numbers, const uint8_t* taken) {
    return cache->guarded([&] { Audit(cache->tree, *pool).check(numbers, taken); });
}
}
