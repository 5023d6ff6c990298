// The invariants of a pool in one walk: the twin of checker.py and audit.py, for checks after every event. Trusts
// nothing that the tree counts: all of it is counted again from the nodes and from the leases that are held. Says which
// rule was broken; checker.py, which then looks again, says where.
#pragma once

#include "page_tree.h"

namespace baton {

constexpr int64_t kNoCopy = -1;  // `record.NO_COPY`

// What stays where it is while a pool lives. Mirrored by `_Pool` in compiled_checker.py. Null or 0 of a component that
// the layout lacks.
struct Pool {
    const Id* stack[3];  // free ids
    const uint8_t* is_free[3];  // by id
    int64_t total[3];
    const Id* full_rows;  // [max_rows, max_pages]
    const Id* swa_rows;
    int64_t max_rows, max_pages, max_context_len;
};

// One `ReqKvInfo`, field for field as compiled_checker.py writes it. `node`: its lease's, 0 without one.
struct Record {
    int64_t row, protected_len, committed, allocated, evict_floor, evicted, promised, state_slot, state_source;
    int64_t node, leased;
};

struct Lease {
    int64_t node, length;
};

// What changes from call to call; `free`: how many ids of each stack are free.
struct Now {
    int64_t free[3];
    int64_t promised;
    int64_t records, copying;
};

class Audit {
public:
    Audit(PageTree& tree, const Pool& pool) : tree_(tree), layout_(tree.layout), pool_(pool), page_(layout_.page_size) {}

    // `numbers`: a `Now`, its records, then the leases of those who copy. `taken`: of each row, whether it is.
    void check(const int64_t* numbers, const uint8_t* taken) {
        const auto& now = *reinterpret_cast<const Now*>(numbers);
        const auto* records = reinterpret_cast<const Record*>(numbers + sizeof(Now) / sizeof(int64_t));
        const auto* copying = reinterpret_cast<const Lease*>(records + now.records);
        rows_ = std::vector<uint8_t>(taken, taken + pool_.max_rows);
        for (int component : {kFull, kSwa, kState}) seen_[component].assign(pool_.total[component] + 1, 0);
        held_.clear();
        free_ids(now);
        int64_t promised = 0;
        for (int64_t at = 0; at < now.records; ++at) {
            record(records[at]);
            promised += records[at].promised;
        }
        require(std::count(rows_.begin(), rows_.end(), 1) == 0, "C4: a row is taken by nobody");
        require(!layout_.window || (promised == now.promised && promised <= pool_.total[kSwa]),
                "C6: promises do not add up");
        for (int64_t at = 0; at < now.copying; ++at) lease(copying[at]);
        nodes();
        locks();
        queues();
        for (int component : {kFull, kSwa, kState}) {
            const std::vector<uint8_t>& seen = seen_[component];
            require(std::count(seen.begin() + 1, seen.end(), 1) == pool_.total[component], "C1: an id has no owner");
        }
    }

private:
    bool has(int component) const {
        return component == kFull ? layout_.full : component == kSwa ? layout_.window > 0 : layout_.state;
    }

    void own(int component, Id id, const char* what) {
        require(id >= 1 && id <= pool_.total[component] && !seen_[component][id]++, what);
    }

    void free_ids(const Now& now) {
        for (int component : {kFull, kSwa, kState}) {
            if (!has(component)) continue;
            const int64_t total = pool_.total[component];
            require(now.free[component] >= 0 && now.free[component] <= total, "C1: free ids are counted wrong");
            for (int64_t at = 0; at < now.free[component]; ++at) {
                const Id id = pool_.stack[component][at];
                own(component, id, "C1: an id is free twice");
                require(pool_.is_free[component][id], "C1: free list and free marks disagree");
            }
            const uint8_t* marks = pool_.is_free[component];
            require(!marks[0] && std::count(marks, marks + total + 1, 1) == now.free[component],
                    "C1: free list and free marks disagree");
        }
    }

    int64_t whole(int64_t tokens) const { return tokens / page_; }
    int64_t pages(int64_t tokens) const { return (tokens + page_ - 1) / page_; }

    // `KvLayout.live_from`, in whole pages.
    int64_t live_from(int64_t tokens) const {
        return layout_.window ? std::max<int64_t>(0, tokens - layout_.window + 1) / page_ : 0;
    }

    void record(const Record& one) {
        require(one.row >= 0 && one.row < pool_.max_rows && rows_[one.row] == 1, "C4: a row is not its record's alone");
        rows_[one.row] = 2;
        require(0 <= one.protected_len && one.protected_len <= one.committed && one.committed <= one.allocated &&
                    one.allocated <= pool_.max_context_len,
                "C2: the lengths of a record are out of order");
        require(one.protected_len % page_ == 0 && one.protected_len == one.leased,
                "C2: what is protected is not what is leased");
        Node* node = one.node ? lease({one.node, one.leased}) : nullptr;
        require(node || !one.leased, "C2: what is protected is not what is leased");
        if (layout_.full) {
            const Id* row = pool_.full_rows + one.row * pool_.max_pages;
            for (int64_t at = whole(one.protected_len); at < pages(one.allocated); ++at)
                own(kFull, row[at], "C1: a page of a record has another owner");
        }
        if (layout_.window) window(one);
        if (node) protects(one, node);
        if (layout_.state) {
            own(kState, static_cast<Id>(one.state_slot), "C1: a slot of a record has another owner");
            require(one.state_source == kNoCopy || one.state_source == (node ? node->state : 0),
                    "C7: a record would copy another state than it protects");
        }
    }

    // C3: the row has the tree's pages.
    void protects(const Record& one, Node* node) {
        const int64_t first = layout_.first_live(node->end);
        tree_.path_up(node, [&](Node* part) {
            const int64_t at = one.row * pool_.max_pages + part->start();
            if (layout_.full)
                require(std::equal(part->full.begin(), part->full.end(), pool_.full_rows + at),
                        "C3: a row has other pages than the tree");
            if (layout_.window) {
                const Id* row = pool_.swa_rows + at;
                const bool live = part->start() >= first;
                require(live ? std::equal(part->swa.begin(), part->swa.end(), row)
                             : std::count(row, row + part->size, 0) == part->size,
                        "C3: a row has other sliding pages than the tree");
            }
            return true;
        });
    }

    // C6, and the sliding part of C1.
    void window(const Record& one) {
        const Id* row = pool_.swa_rows + one.row * pool_.max_pages;
        const auto live = [row](int64_t first, int64_t end) {
            return end > first ? end - first - std::count(row + first, row + end, 0) : 0;
        };
        const int64_t needed = live_from(one.committed), committed = pages(one.committed);
        require(committed <= needed || live(needed, committed) == committed - needed, "C6: a window lacks pages");
        const int64_t dead_lo =
            one.evict_floor <= one.protected_len ? one.protected_len : pages(one.evict_floor) * page_;
        require(!live(whole(dead_lo), pages(std::max(one.evicted, dead_lo))), "C6: pages behind the cursor");
        require(!live(pages(one.allocated), pool_.max_pages), "C6: pages beyond what is allocated");
        const int64_t first = whole(one.protected_len), end = pages(one.allocated);
        require(live(live_from(one.protected_len), pages(one.protected_len)) + live(first, end) <= one.promised,
                "C6: a record holds more sliding pages than it was promised");
        for (int64_t at = first; at < end; ++at)
            if (row[at]) own(kSwa, row[at], "C1: a sliding page of a record has another owner");
    }

    Node* lease(const Lease& one) {
        Node* node = tree_.nodes.find(one.node);
        require(node && node->parent && node->end * page_ == one.length, "C5: a lease points to another node");
        require(tree_.window_is_live(node, node->end) && (!layout_.state || node->state),
                "C5: a lease does not protect what is needed there");
        held_.push_back(node);
        return node;
    }

    static size_t place(const Node* node) { return static_cast<uint32_t>(node->handle); }

    void nodes() {
        int64_t count = 0, evictable[3] = {}, locked[3] = {};
        found_.clear();
        tree_.nodes.each([&](Node* node) {
            ++count;
            require(node->parent, "C5: a removed node is still reached");
            if (found_.size() <= std::max(place(node), place(node->parent)))
                found_.resize(std::max(place(node), place(node->parent)) + 1);
            ++found_[place(node->parent)].children;
            require(node->size > 0 && node->key.size() == node->size * page_ &&
                        node->full.size() == node->size * layout_.full &&
                        node->swa.size() == node->size * (layout_.window > 0) &&
                        node->end == node->parent->end + node->size && (layout_.state || !node->state) &&
                        tree_.children.find(node->parent, node->key.begin()) == node,
                    "C5: a node does not fit below its parent");
            require(node->full.size() || node->swa_live || node->state || node->children || node->locks,
                    "C5: a node holds nothing");
            for (Id id : node->full) own(kFull, id, "C1: a page of the tree has another owner");
            int64_t live = 0;
            for (Id id : node->swa) {
                if (!id) continue;
                own(kSwa, id, "C1: a sliding page of the tree has another owner");
                ++live;
            }
            require(live == node->swa_live, "C5: a node counts its sliding pages wrong");
            if (node->state) own(kState, static_cast<Id>(node->state), "C1: a slot of the tree has another owner");
            (node->locks ? locked : evictable)[kFull] += node->full.size();
            (node->swa_locks ? locked : evictable)[kSwa] += live;
            (node->state_locks ? locked : evictable)[kState] += node->state != 0;
        });
        const Books& books = tree_.books;
        require(count == books.nodes && count == tree_.children.size(), "C5: nodes are counted wrong");
        for (int component : {kFull, kSwa, kState})
            require(evictable[component] == books.of[component].evictable &&
                        locked[component] == books.of[component].locked,
                    "C5: what can be evicted is counted wrong");
    }

    void locks() {
        require(static_cast<int64_t>(held_.size()) == tree_.books.leases, "C5: leases are given out and not held");
        for (Node* end : held_) {
            const int64_t first = layout_.first_live(end->end);
            found_[place(end)].state_locks += layout_.state;
            tree_.path_up(end, [&](Node* node) {
                ++found_[place(node)].locks;
                require(!(node->start() < first && first < node->end), "C5: a locked window begins inside a node");
                found_[place(node)].swa_locks += node->start() >= first;
                return true;
            });
        }
        tree_.nodes.each([&](Node* node) {
            const Found& found = found_[place(node)];
            require(found.locks == node->locks && found.swa_locks == node->swa_locks &&
                        found.state_locks == node->state_locks,
                    "C5: the locks of a node are not its leases");
            require(found.children == node->children, "C5: the children of a node are counted wrong");
        });
    }

    void queues() {
        queue(kFull, tree_.full, full_is_current, [](const Node* node) { return node->last_use; });
        if (layout_.window) queue(kSwa, tree_.swa, swa_is_current, [](const Node* node) { return node->swa_use; });
        if (layout_.state) queue(kState, tree_.state, state_is_current, [](const Node* node) { return node->state_use; });
    }

    template <class Use>
    void queue(int component, const Ledger& ledger, Ledger::IsCurrent is_current, Use use) {
        if (!has(component)) return;
        for (const Entry& entry : ledger.entries()) {
            const Node* node = tree_.nodes.find(entry.handle);
            if (node && is_current(*node, entry.use)) found_[place(node)].queued |= 1 << component;
        }
        tree_.nodes.each([&](Node* node) {
            require(!is_current(*node, use(node)) || found_[place(node)].queued & 1 << component,
                    "C5: a part of a node could never be evicted");
        });
    }

    struct Found {
        int64_t children = 0, locks = 0, swa_locks = 0, state_locks = 0;
        int queued = 0;
    };

    PageTree& tree_;
    const Layout& layout_;
    const Pool& pool_;
    const int64_t page_;
    std::vector<uint8_t> rows_, seen_[3];
    std::vector<Node*> held_;
    std::vector<Found> found_;
};

}  // namespace baton
