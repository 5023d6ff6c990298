"""`PageTree`: the nodes of the prefix tree, their locks and their eviction, with the books always in balance.

Owns the nodes and one `Ledger` per component; every change of a node's pages or locks is made here, together with the
count of it. Knows no tokens beyond the keys, no leases and no matches: those are `tree.UnifiedRadixCache`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.interface import I32, NO_IDS, GroupCounts, GroupPages
from baton.common.kv.prefix.node import (
    TOKEN_BYTES,
    Ledger,
    Node,
    Parts,
    first_live,
    full_is_current,
    live_ids,
    path_up,
    state_is_current,
    swa_is_current,
)


class PageTree:
    """`now` is the counter of uses that a use is stamped with; the owner of the tree moves it on."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.page_bytes = layout.page_size * TOKEN_BYTES
        self.root = Node(b"", 0, None, NO_IDS, NO_IDS)
        self.nodes = 0
        self.now = 0
        self.full = Ledger(full_is_current)  # its queue holds leaves
        self.swa = Ledger(swa_is_current)
        self.state = Ledger(state_is_current)

    @property
    def evictable(self) -> GroupCounts:
        return GroupCounts(self.full.evictable, self.swa.evictable, self.state.evictable)

    @property
    def locked(self) -> GroupCounts:
        return GroupCounts(self.full.locked, self.swa.locked, self.state.locked)

    @property
    def ledgers(self) -> dict[Component, Ledger]:
        return {Component.FULL: self.full, Component.SWA: self.swa, Component.STATE: self.state}

    def walk(self) -> Iterator[Node]:
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    # ------------------------------------------------------------------------------------------ growing

    def split(self, node: Node, pages_above: int) -> Node:
        upper = node.split(pages_above, self.page_bytes)
        self.nodes += 1
        if upper.swa_live and not upper.swa_locks:
            self.swa.push(upper.swa_use, upper, self.nodes)
        return upper

    def merge(
        self, node: Node, path: list[Node], until: int, given: GroupPages, taken: Parts, duplicate: Parts
    ) -> Node:
        """Locks what is known already of the way from `node` along `path` until `until`, and revives with `given` what
        was lost of it. Returns the node that ends there."""
        first = node.end
        for known in path:
            if node.end == until:
                break
            node = known if known.end <= until else self.split(known, until - known.start)
            if self.layout.window:
                self._revive(node, given.swa[node.start - first : node.end - first], taken, duplicate)
            self.add_lock(node)
        if node.end > first:
            duplicate.full.append(given.full[: node.end - first])
        return node

    def _revive(self, node: Node, given: I32, taken: Parts, duplicate: Parts) -> None:
        if node.swa_live == node.size:
            duplicate.swa.append(live_ids(given))
            return
        dead = node.swa == 0
        revived = dead & (given != 0)
        taken.swa.append(given[revived])
        duplicate.swa.append(live_ids(given[~dead]))
        count = len(taken.swa[-1])
        assert not count or not node.swa_locks, "a tombstone under a lock"
        node.swa[revived] = taken.swa[-1]
        node.swa_live += count
        self.swa.evictable += count

    def grow(self, parent: Node, key: bytes, given: GroupPages, taken: Parts) -> Node:
        """A new leaf for `key`, whose pages are `given`, with a lock."""
        leaf = Node(key, len(key) // self.page_bytes, parent, given.full.copy(), given.swa.copy())
        parent.children[key[: self.page_bytes]] = leaf
        self.nodes += 1
        taken.full.append(given.full)
        taken.swa.append(live_ids(given.swa))
        self.full.evictable += len(leaf.full)  # until the lock takes it out again
        self.swa.evictable += leaf.swa_live
        self.add_lock(leaf)
        return leaf

    def place_state(self, node: Node, slot: int, taken: Parts, duplicate: Parts) -> None:
        """A checkpoint at the end of `node`, unless one is there."""
        if node.state:
            duplicate.state.append(slot)
            return
        node.state, node.state_use = slot, 0
        self.state.evictable += 1
        taken.state.append(slot)

    # ------------------------------------------------------------------------------------------ locks and uses

    def add_lock(self, node: Node) -> None:
        if node.locks == 0:
            self.full.lock(len(node.full))
        node.locks += 1

    def drop_lock(self, node: Node, *, used: bool) -> None:
        node.locks -= 1
        if used:
            node.last_use = self.now
        if node.locks == 0:
            self.full.unlock(len(node.full))
            self._settle(node)

    def hold_end(self, node: Node) -> None:
        """Locks what is needed at the end of `node` beyond the path: the live window, split off to begin with a node,
        and the checkpoint."""
        for above in self._window(node):
            first = first_live(self.layout, node.end)
            if above.start < first:
                self.split(above, first - above.start)
            if above.swa_locks == 0:
                self.swa.lock(above.swa_live)
            above.swa_locks += 1
        if node.state:
            if node.state_locks == 0:
                self.state.lock(1)
            node.state_locks += 1

    def release_end(self, node: Node, *, used: bool) -> None:
        """Takes back what `hold_end` did, and stamps it when it was used."""
        for above in self._window(node):
            above.swa_locks -= 1
            if above.swa_locks == 0:
                self.swa.unlock(above.swa_live)
            self._used_swa(above, self.now if used else above.swa_use)
        if node.state:
            node.state_locks -= 1
            if used:
                node.state_use = self.now
            if node.state_locks == 0:
                self.state.unlock(1)
                self.state.push(node.state_use, node, self.nodes)

    def passed(self, node: Node, first: int) -> None:
        """Stamps the sliding pages of the path to `node`, from position `first` on, as used."""
        if self.layout.window:
            for above in path_up(node):
                if above.end <= first:
                    break
                self._used_swa(above, self.now)

    def _used_swa(self, node: Node, use: int) -> None:
        node.swa_use = use
        if node.swa_live and not node.swa_locks:
            self.swa.push(node.swa_use, node, self.nodes)

    def _window(self, node: Node) -> Iterator[Node]:
        """The nodes that hold the live window at the end of `node`; the topmost may begin before it."""
        if not self.layout.window:
            return
        first = first_live(self.layout, node.end)
        for above in path_up(node):
            if above.end <= first:
                break
            yield above

    # ------------------------------------------------------------------------------------------ evicting

    def coldest(self, count: int) -> list[Node]:
        """The leaves that `_evict_full` would take from now."""
        return self.full.coldest(count)

    def evict(self, component: Component, count: int, gone: Parts) -> None:
        match component:
            case Component.FULL:
                self._evict_full(count, gone)
            case Component.SWA:
                self._evict_swa(count, gone)
            case Component.STATE:
                self._evict_state(count, gone)

    def _evict_full(self, count: int, gone: Parts) -> None:
        while count > 0 and (leaf := self.full.pop()) is not None:
            keep = max(0, leaf.size - count)
            count -= leaf.size - keep
            gone.full.append(leaf.full[keep:])
            self.full.gave_up(leaf.size - keep)
            if leaf.swa_live:
                gone.swa.append(live_ids(leaf.swa[keep:]))
                self.swa.gave_up(len(gone.swa[-1]))
            if leaf.state:
                gone.state.append(leaf.state)
                self.state.gave_up(1)
            if keep:
                leaf.cut(keep, self.page_bytes)
                self.full.push(leaf.last_use, leaf, self.nodes)
            else:
                self._settle(self._remove(leaf))

    def _evict_swa(self, count: int, gone: Parts) -> None:
        while count > 0 and (node := self.swa.pop()) is not None:
            at = np.flatnonzero(node.swa)[:count]
            gone.swa.append(node.swa[at])
            node.swa[at] = 0
            node.swa_live -= len(at)
            self.swa.gave_up(len(at))
            count -= len(at)
            if node.swa_live:
                self.swa.push(node.swa_use, node, self.nodes)
            else:
                self._prune(node)

    def _evict_state(self, count: int, gone: Parts) -> None:
        while count > 0 and (node := self.state.pop()) is not None:
            gone.state.append(node.state)
            node.state = 0
            self.state.gave_up(1)
            count -= 1
            self._prune(node)

    def _settle(self, node: Node) -> None:
        """The node lost its last lock or a child: perhaps it can go now."""
        if not self.layout.full:
            self._prune(node)
        elif node.parent is not None and not node.children and not node.locks:
            self.full.push(node.last_use, node, self.nodes)

    def _prune(self, node: Node) -> None:
        """Without FULL pages a node goes when nothing is left of it: nothing else would ever evict it."""
        while node.parent is not None and not (
            self.layout.full or node.children or node.locks or node.swa_live or node.state
        ):
            node = self._remove(node)

    def _remove(self, leaf: Node) -> Node:
        """Returns what was above it."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self.page_bytes]]
        leaf.parent = None
        self.nodes -= 1
        return parent
