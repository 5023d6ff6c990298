"""`UnifiedRadixCache`: one radix tree over whole pages for every kind of layer group. Owns the pages and state slots of
each prefix that it keeps until they are evicted.

Here: matches, leases and what is worth keeping. The nodes, their locks and their eviction are `page_tree.PageTree`'s.

Invariants:
- A node holds one or more whole pages; the children of a node differ in their first page of tokens.
- A lease ends at the end of a node, at a usable length. A split puts the new node *above*: the node that a lease
  points to always ends where the lease ends.
- FULL: a lease locks the whole path. A node without locks has only unlocked descendants, so every unlocked page can be
  reached by evicting leaves.
- SWA: a lease locks the nodes of the live window at its end, and one of them begins where the window does. Locked nodes
  have no tombstones. Unlocked pages become tombstones wherever they are, the first of a node first.
- STATE: a lease locks the checkpoint at its end.
- What is inserted ends at a usable length. Eviction may leave a leaf that does not: its FULL pages are the least
  recently used then, and go when pages are wanted (they count as evictable, so they are never in the way). In layouts
  without FULL, where keys cost no pages, a leaf goes with the last of what it held.

Keys are the bytes of int32 tokens, so that comparing and hashing pages happens in C: a match costs time in proportion
to the bytes of the key, whatever the size of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from baton.common.kv.errors import InvariantViolation, OwnershipError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.audit import audit
from baton.common.kv.prefix.interface import (
    I32,
    NO_IDS,
    GroupCounts,
    GroupPages,
    Inserted,
    PrefixLease,
    PrefixMatch,
    PrefixStats,
)
from baton.common.kv.prefix.node import (
    Node,
    Parts,
    descend,
    first_live,
    joined,
    live_ids,
    longest_usable,
    path_up,
    slots,
    window_is_live,
)
from baton.common.kv.prefix.offers import assert_adds_up, check_given
from baton.common.kv.prefix.page_tree import PageTree
from baton.common.units import page_floor, whole_pages


class _TreeLease(PrefixLease):
    __slots__ = ("node", "tree")

    def __init__(self, tree: PageTree, node: Node, length: int) -> None:
        super().__init__(length)
        self.tree = tree
        self.node = node


class _TreeMatch(PrefixMatch, frozen=True):
    tree: PageTree
    node: Node  # holds the last page of the match, which may end inside it
    end: int  # pages


class UnifiedRadixCache:
    """Evicts what was used longest ago. The end of a lease is a use of what it protected, unless whoever ends it says
    that it was none; an insertion is a use of the sliding pages it passes. Time is a counter of uses."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self._page_size = layout.page_size
        self._tree = PageTree(layout)
        self._leases = 0
        self.changes = 0  # calls that may have changed it

    # ------------------------------------------------------------------------------------------ reading

    @property
    def evictable(self) -> GroupCounts:
        return self._tree.evictable

    @property
    def locked(self) -> GroupCounts:
        return self._tree.locked

    @property
    def page_tree(self) -> PageTree:
        """For the compiled checks."""
        return self._tree

    def node_of(self, lease: PrefixLease) -> Node:
        """Where it ends. Raises OwnershipError for a lease that is not this cache's, or is over."""
        return self._node_of(lease)

    def match_prefix(self, tokens: I32) -> PrefixMatch:
        data = tokens[: page_floor(len(tokens), self._page_size)].tobytes()
        path, known = descend(self._tree.root, data, self._tree.page_bytes)
        end = self._usable_end(path, known)
        while path and path[-1].start >= end:
            path.pop()
        return _TreeMatch(end * self._page_size, self._tree, path[-1] if path else self._tree.root, end)

    def evictable_in(self, match: PrefixMatch) -> GroupCounts:
        assert isinstance(match, _TreeMatch)
        assert match.tree is self._tree, "a match of another cache"
        full = swa = 0
        first = first_live(self._layout, match.end)
        last = match.node
        if last.parent is None:
            return GroupCounts()  # it was removed since, or there is nothing to match
        for node in path_up(last):
            start, end = node.start, min(match.end, node.end)
            if node.locks and end <= first:
                break
            if not node.locks:
                full += len(node.full[: max(0, end - start)])
            if not node.swa_locks:
                swa += int(np.count_nonzero(node.swa[max(0, first - start) : max(0, end - start)]))
        state = int(last.end == match.end and last.state > 0 and not last.state_locks)
        return GroupCounts(full, swa, state)

    def pages(self, lease: PrefixLease) -> GroupPages:
        return self._pages_between(self._tree.root, self._node_of(lease))

    def coldest(self, count: int) -> list[tuple[I32, PrefixMatch]]:
        assert self._layout.only_full, self._layout
        return [
            (
                np.frombuffer(b"".join([above.key for above in path_up(leaf)][::-1]), dtype=np.int32),
                _TreeMatch(leaf.end * self._page_size, self._tree, leaf, leaf.end),
            )
            for leaf in self._tree.coldest(count)
        ]

    def cached_pages(self) -> tuple[GroupPages, GroupPages]:
        evictable, locked = Parts(), Parts()
        for node in self._tree.walk():
            (locked if node.locks else evictable).full.append(node.full)
            (locked if node.swa_locks else evictable).swa.append(live_ids(node.swa))
            if node.state:
                (locked if node.state_locks else evictable).state.append(node.state)
        return evictable.joined(), locked.joined()

    def check(self, leases: Iterable[PrefixLease]) -> None:
        held = []
        for lease in leases:
            if not isinstance(lease, _TreeLease) or lease.tree is not self._tree:
                raise InvariantViolation(f"a lease over {lease.length} tokens points to no node of this cache")
            held.append((lease, lease.node))
        queued = {component: ledger.queued() for component, ledger in self._tree.ledgers.items()}
        audit(self._layout, list(self._tree.walk()), held, self.stats(), queued)

    def stats(self) -> PrefixStats:
        full, swa, state = self._tree.full, self._tree.swa, self._tree.state
        return PrefixStats(
            nodes=self._tree.nodes,
            leases=self._leases,
            evictable=self.evictable,
            locked=self.locked,
            eviction_queue=GroupCounts(len(full), len(swa), len(state)),
            evicted_total=GroupCounts(full.evicted_total, swa.evicted_total, state.evicted_total),
        )

    # ------------------------------------------------------------------------------------------ leases

    def lock(self, match: PrefixMatch) -> PrefixLease | None:
        self.changes += 1
        assert isinstance(match, _TreeMatch)
        assert match.tree is self._tree, "a match of another cache"
        node, end = match.node, match.end
        if end == 0 or node.parent is None or node.end < end:
            return None  # nothing to lock, or it was evicted since, or its tail was; asking again is the caller's to do
        while node.start >= end:  # split since: the match ends in a node above
            assert node.parent is not None
            node = node.parent
        if not window_is_live(self._layout, node, end):
            return None
        if self._layout.state and not (node.end == end and node.state):
            return None
        if node.end > end:
            node = self._tree.split(node, end - node.start)
        for above in path_up(node):
            self._tree.add_lock(above)
        self._tree.hold_end(node)
        self._leases += 1
        return _TreeLease(self._tree, node, match.length)

    def unlock(self, lease: PrefixLease, *, used: bool = True) -> None:
        self.changes += 1
        node = self._node_of(lease)
        lease.end()
        self._leases -= 1
        self._tree.now += used
        self._tree.release_end(node, used=used)
        for above in path_up(node):
            self._tree.drop_lock(above, used=used)

    # ------------------------------------------------------------------------------------------ writing

    def insert(self, lease: PrefixLease | None, tokens: I32, given: GroupPages) -> Inserted:
        self.changes += 1
        tree, page_bytes = self._tree, self._tree.page_bytes
        old = tree.root if lease is None else self._node_of(lease)
        first, whole = old.end, whole_pages(len(tokens), self._page_size)
        check_given(self._layout, given, whole - first)
        data = tokens[first * self._page_size : whole * self._page_size].tobytes()
        path, known = descend(old, data, page_bytes)
        slot = given.state_slot if whole * self._page_size == len(tokens) else 0
        end = self._end_to_keep(path, known, first, whole, given.swa, slot)
        taken, duplicate = Parts(), Parts()
        new = tree.merge(old, path, min(known, end), given, taken, duplicate)
        if new.end < end:
            grown = slice(new.end - first, end - first)
            key = data[grown.start * page_bytes : grown.stop * page_bytes]
            new = tree.grow(new, key, GroupPages(given.full[grown], given.swa[grown]), taken)
        keeps_state = slot > 0 and 0 < end == whole
        if keeps_state:
            tree.place_state(new, slot, taken, duplicate)
        rest = slice(end - first, None)
        kept = Inserted(
            lease=self._advance(lease, old, new),
            taken=taken.joined(),
            duplicate=duplicate.joined(),
            tail=GroupPages(given.full[rest], live_ids(given.swa[rest]), NO_IDS if keeps_state else given.state),
            pages=self._pages_between(old, new),
        )
        assert_adds_up(given, kept)
        return kept

    def evict(self, component: Component, count: int) -> GroupPages:
        self.changes += 1
        gone = Parts()
        self._tree.evict(component, count, gone)
        return gone.joined()

    def clear(self) -> GroupPages:
        self.changes += 1
        gone = Parts()
        for component in self._layout.components:
            self._tree.evict(component, self.evictable.of(component), gone)
        return gone.joined()

    # ------------------------------------------------------------------------------------------ inside

    def _usable_end(self, path: list[Node], known: int) -> int:
        """The last position until `known` from which every component can go on."""
        layout = self._layout
        if not layout.window and not layout.state:
            return known
        ends = [node.end for node in path if node.state and node.end <= known] if layout.state else None
        last = known if ends is None else ends[-1] if ends else 0
        if not layout.window or last == 0 or window_is_live(layout, path[-1], last):
            return last
        live = np.concatenate([node.swa for node in path])[:known] != 0
        return longest_usable(layout, live, 0, ends)

    def _end_to_keep(self, path: list[Node], known: int, first: int, whole: int, given_swa: I32, slot: int) -> int:
        """The last usable position until `whole` once what is given is merged: what lies behind it could never be
        matched, so it is not taken. The caller's lease ends at `first`, so that is usable. `slot`: of a state at
        `whole`."""
        layout = self._layout
        if whole == first:
            return first
        ends: list[int] | None = None
        if layout.state:
            ends = [node.end for node in path if node.state and node.end <= known]
            if slot and whole not in ends[-1:]:
                ends.append(whole)
        if not layout.window:
            return whole if ends is None else ends[-1] if ends else first
        live = given_swa[: whole - first] != 0
        for node in path:
            start, end = node.start - first, min(node.end, known) - first
            live[start:end] |= node.swa[: end - start] != 0
        return longest_usable(layout, live, first, ends)

    def _advance(self, lease: PrefixLease | None, old: Node, new: Node) -> PrefixLease | None:
        """The lease that replaces `lease`, from `old` to `new`; every node between the two has its lock already."""
        if new is self._tree.root:
            return None
        first = old.end
        self._tree.now += 1
        self._tree.hold_end(new)
        if lease is None:
            self._leases += 1
        else:
            self._tree.release_end(old, used=True)
            lease.end()
        self._tree.passed(new, first)
        return _TreeLease(self._tree, new, new.end * self._page_size)

    def _node_of(self, lease: PrefixLease) -> Node:
        if not isinstance(lease, _TreeLease) or not lease.live or lease.tree is not self._tree:
            raise OwnershipError(f"a lease over {lease.length} tokens is used after its end, or in another cache")
        return lease.node

    def _pages_between(self, above: Node, node: Node) -> GroupPages:
        """What a lease on `node` protects of the path from `above` to it, and the checkpoint there."""
        full: list[I32] = []
        swa = np.zeros(node.end - above.end, dtype=np.int32) if self._layout.window else NO_IDS
        first = first_live(self._layout, node.end)
        for part in path_up(node):
            if part.end <= above.end:
                break
            full.append(part.full)
            if self._layout.window and part.start >= first:
                swa[part.start - above.end : part.end - above.end] = part.swa
        full.reverse()
        return GroupPages(joined(full), swa, slots([node.state] if node.state else []))
