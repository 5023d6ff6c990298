// The nodes of the prefix tree, their locks and their eviction, with the books always in balance. The twin of
// page_tree.py, step for step: the order in which things are queued decides the order in which they are evicted.
#pragma once

#include "node.h"

namespace baton {

enum Component { kFull, kSwa, kState };

// Gauges and counters. Mirrored by `Books` in compiled.py.
struct Books {
    Counts of[3];
    int64_t nodes;
    int64_t leases;
    int64_t work;  // nodes, places of the table and queue entries looked at since start: what all calls have cost
};

// A set of ids that is being put together.
struct Parts {
    std::vector<Id> full, swa, state;
};

inline int64_t count_live(Ints& ids) { return ids.size() - std::count(ids.begin(), ids.end(), 0); }

inline int64_t append_live(std::vector<Id>& to, const Id* from, const Id* until) {
    const size_t before = to.size();
    std::copy_if(from, until, std::back_inserter(to), [](Id id) { return id != 0; });
    return static_cast<int64_t>(to.size() - before);
}

// The pages of a span, or null when the layout lacks the component.
struct Given {
    const Id* full;
    const Id* swa;
};

class PageTree {
public:
    PageTree(const Layout& layout, uint64_t seed)
        : layout(layout),
          full(full_is_current, nodes, books.of[kFull], books.work),
          swa(swa_is_current, nodes, books.of[kSwa], books.work),
          state(state_is_current, nodes, books.of[kState], books.work),
          children(layout.page_size, seed, books.work) {}

    // The node and those above it, without the root, until `visit` says false. It may split or remove the node.
    template <class Visit>
    void path_up(Node* node, Visit visit) {
        while (Node* above = node->parent) {
            ++books.work;
            if (!visit(node)) return;
            node = above;
        }
    }

    // The nodes below `node` along `tokens`, and the position until which they agree with it; the last may do so only
    // in part.
    int64_t descend(Node* node, const Id* tokens, int64_t pages, std::vector<Node*>& path) {
        path.clear();
        const int64_t first = node->end;
        int64_t end = first;
        while (end < first + pages) {
            const Id* at = tokens + (end - first) * layout.page_size;
            Node* child = children.find(node, at);
            if (!child) break;
            path.push_back(child);
            const int64_t common = common_pages(child, at, first + pages - end);
            end += common;
            if (common < child->size) break;
            node = child;
        }
        return end;
    }

    // Whether sliding layers, if there are any, can go on from `end`, which lies in `node` or above.
    bool window_is_live(Node* node, int64_t end) {
        if (!layout.window) return true;
        const int64_t first = layout.first_live(end);
        bool live = true;
        path_up(node, [&](Node* part) {
            if (part->end <= first) return false;
            if (part->swa_live < part->size) {
                const int64_t from = std::max<int64_t>(0, first - part->start());
                const int64_t until = std::min(part->size, std::max<int64_t>(0, end - part->start()));
                for (int64_t page = from; page < until; ++page) live &= part->swa[page] != 0;
            }
            return live;
        });
        return live;
    }

    // ---------------------------------------------------------------------------------------- growing

    // Puts the first pages into a new node above this one: this node keeps its end, and with it its checkpoint and the
    // leases that end here. Returns the new node.
    Node* split(Node* node, int64_t pages_above) {
        require(node->parent && 0 < pages_above && pages_above < node->size, "a split at the edge of a node");
        Node* upper = nodes.add();
        children.remove(node);
        upper->parent = node->parent;
        upper->key = node->key.take_front(pages_above * layout.page_size);
        upper->full = node->full.take_front(pages_above);
        upper->swa = node->swa.take_front(pages_above);
        upper->size = pages_above;
        upper->end = node->start() + pages_above;
        upper->children = 1;
        upper->locks = node->locks;
        upper->last_use = node->last_use;
        upper->swa_live = count_live(upper->swa);
        upper->swa_locks = node->swa_locks;
        upper->swa_use = node->swa_use;
        node->parent = upper;
        node->size -= pages_above;
        node->swa_live -= upper->swa_live;
        children.add(upper);
        children.add(node);
        ++books.nodes;
        if (upper->swa_live && !upper->swa_locks) swa.push(upper->swa_use, upper, books.nodes);
        return upper;
    }

    // Locks what is known already of the way from `node` along `path` until `until`, and revives with `given` what was
    // lost of it. Returns the node that ends there.
    Node* merge(Node* node, const std::vector<Node*>& path, int64_t until, Given given, Parts& taken,
                Parts& duplicate) {
        const int64_t first = node->end;
        for (Node* known : path) {
            if (node->end == until) break;
            node = known->end <= until ? known : split(known, until - known->start());
            if (layout.window) revive(node, given.swa + (node->start() - first), taken, duplicate);
            add_lock(node);
        }
        return node;
    }

    // A new leaf for `pages` pages of tokens, with a lock.
    Node* grow(Node* parent, const Id* key, int64_t pages, Given given, Parts& taken) {
        Node* leaf = nodes.add();
        leaf->parent = parent;
        leaf->key = Ints(key, pages * layout.page_size);
        if (layout.full) leaf->full = Ints(given.full, pages);
        if (layout.window) leaf->swa = Ints(given.swa, pages);
        leaf->size = pages;
        leaf->end = parent->end + pages;
        leaf->swa_live = append_live(taken.swa, leaf->swa.begin(), leaf->swa.end());
        children.add(leaf);
        ++parent->children;
        ++books.nodes;
        full.gained(leaf->full.size());  // until the lock takes it out again
        swa.gained(leaf->swa_live);
        add_lock(leaf);
        return leaf;
    }

    // A checkpoint at the end of `node`, unless one is there; says whether it was placed.
    bool place_state(Node* node, Id slot) {
        if (node->state) return false;
        node->state = slot;
        node->state_use = 0;
        state.gained(1);
        return true;
    }

    // ---------------------------------------------------------------------------------------- locks and uses

    void add_lock(Node* node) {
        if (node->locks++ == 0) full.lock(node->full.size());
    }

    void drop_lock(Node* node, bool used) {
        require(node->locks > 0, "a lock that was dropped already");
        if (used) node->last_use = now;
        if (--node->locks == 0) {
            full.unlock(node->full.size());
            settle(node);
        }
    }

    // Locks what is needed at the end of `node` beyond the path: the live window, split off to begin with a node, and
    // the checkpoint.
    void hold_end(Node* node) {
        const int64_t first = layout.first_live(node->end);
        window(node, first, [&](Node* above) {
            if (above->start() < first) split(above, first - above->start());
            if (above->swa_locks++ == 0) swa.lock(above->swa_live);
        });
        if (node->state && node->state_locks++ == 0) state.lock(1);
    }

    // Takes back what `hold_end` did, and stamps it when it was used.
    void release_end(Node* node, bool used) {
        window(node, layout.first_live(node->end), [&](Node* above) {
            require(above->swa_locks > 0, "a lock of a window that was dropped already");
            if (--above->swa_locks == 0) swa.unlock(above->swa_live);
            used_swa(above, used ? now : above->swa_use);
        });
        if (!node->state) return;
        require(node->state_locks > 0, "a lock of a state that was dropped already");
        if (used) node->state_use = now;
        if (--node->state_locks == 0) {
            state.unlock(1);
            state.push(node->state_use, node, books.nodes);
        }
    }

    // Stamps the sliding pages of the path to `node`, from position `first` on, as used.
    void passed(Node* node, int64_t first) {
        window(node, first, [&](Node* above) { used_swa(above, now); });
    }

    // ---------------------------------------------------------------------------------------- evicting

    void evict(Component component, int64_t count, Parts& gone) {
        switch (component) {
            case kFull: return evict_full(count, gone);
            case kSwa: return evict_swa(count, gone);
            case kState: return evict_state(count, gone);
        }
    }

    const Layout layout;
    Books books{};
    Nodes nodes;
    int64_t now = 0;  // the counter of uses that a use is stamped with; the owner of the tree moves it on
    Ledger full, swa, state;
    Children children;

private:
    int64_t common_pages(Node* node, const Id* tokens, int64_t pages) {
        const int64_t count = std::min(node->size, pages) * layout.page_size;
        const Id* ours = node->key.begin();
        if (!std::memcmp(ours, tokens, count * sizeof(Id))) return count / layout.page_size;
        return (std::mismatch(ours, ours + count, tokens).first - ours) / layout.page_size;
    }

    // The nodes that hold sliding pages from position `first` until the end of `node`; the topmost may begin before.
    template <class Visit>
    void window(Node* node, int64_t first, Visit visit) {
        if (!layout.window) return;
        path_up(node, [&](Node* above) {
            if (above->end <= first) return false;
            visit(above);
            return true;
        });
    }

    void revive(Node* node, const Id* given, Parts& taken, Parts& duplicate) {
        int64_t revived = 0;
        for (int64_t page = 0; page < node->size; ++page) {
            if (!given[page]) continue;
            if (node->swa[page]) {
                duplicate.swa.push_back(given[page]);
            } else {
                node->swa[page] = given[page];
                taken.swa.push_back(given[page]);
                ++revived;
            }
        }
        require(!revived || !node->swa_locks, "a tombstone under a lock");
        node->swa_live += revived;
        swa.gained(revived);
    }

    void used_swa(Node* node, int64_t use) {
        node->swa_use = use;
        if (node->swa_live && !node->swa_locks) swa.push(use, node, books.nodes);
    }

    void evict_full(int64_t count, Parts& gone) {
        while (count > 0) {
            Node* leaf = full.pop();
            if (!leaf) return;
            const int64_t keep = std::max<int64_t>(0, leaf->size - count);
            count -= leaf->size - keep;
            gone.full.insert(gone.full.end(), leaf->full.begin() + keep, leaf->full.end());
            full.gave_up(leaf->size - keep);
            if (leaf->swa_live) swa.gave_up(append_live(gone.swa, leaf->swa.begin() + keep, leaf->swa.end()));
            if (leaf->state) {
                gone.state.push_back(static_cast<Id>(leaf->state));
                state.gave_up(1);
            }
            if (keep) {
                cut(leaf, keep);
                full.push(leaf->last_use, leaf, books.nodes);
            } else {
                settle(remove(leaf));
            }
        }
    }

    void evict_swa(int64_t count, Parts& gone) {
        while (count > 0) {
            Node* node = swa.pop();
            if (!node) return;
            int64_t lost = 0;
            for (Id& id : node->swa) {
                if (lost == count) break;
                if (!id) continue;
                gone.swa.push_back(id);
                id = 0;
                ++lost;
            }
            node->swa_live -= lost;
            swa.gave_up(lost);
            count -= lost;
            if (node->swa_live)
                swa.push(node->swa_use, node, books.nodes);
            else
                prune(node);
        }
    }

    void evict_state(int64_t count, Parts& gone) {
        for (; count > 0; --count) {
            Node* node = state.pop();
            if (!node) return;
            gone.state.push_back(static_cast<Id>(node->state));
            node->state = 0;
            state.gave_up(1);
            prune(node);
        }
    }

    // Forgets the pages behind the first `keep`, and the checkpoint at what was the end.
    void cut(Node* leaf, int64_t keep) {
        leaf->key.keep_front(keep * layout.page_size);
        leaf->end -= leaf->size - keep;
        leaf->size = keep;
        leaf->full.keep_front(keep);
        if (layout.window) {
            leaf->swa.keep_front(keep);
            leaf->swa_live = count_live(leaf->swa);
        }
        leaf->state = 0;
    }

    // The node lost its last lock or a child: perhaps it can go now.
    void settle(Node* node) {
        if (!layout.full)
            prune(node);
        else if (node->parent && !node->children && !node->locks)
            full.push(node->last_use, node, books.nodes);
    }

    // Without FULL pages a node goes when nothing is left of it: nothing else would ever evict it.
    void prune(Node* node) {
        while (node->parent && !(layout.full || node->children || node->locks || node->swa_live || node->state))
            node = remove(node);
    }

    // Returns what was above it.
    Node* remove(Node* leaf) {
        require(!leaf->children && !leaf->locks, "a node in use is removed");
        Node* parent = leaf->parent;
        children.remove(leaf);
        nodes.remove(leaf);
        --parent->children;
        --books.nodes;
        return parent;
    }
};

}  // namespace baton
