"""`RadixCache`: a radix tree over whole pages. Owns the pages of every prefix it keeps until they are evicted.

Invariants:
- A node holds one or more whole pages; the children of a node differ in their first page of tokens.
- `node.locks` is the number of live leases that end at the node or below it. A node with no locks has only unlocked
  descendants, so every unlocked page can be reached by evicting leaves.
- A split puts a new node *above*: the node a lease points to always ends where the lease ends.

Keys are the bytes of int32 tokens, so that comparing and hashing pages happens in C: a match costs time in proportion
to the bytes of the key, whatever the size of the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from baton.common.kv.errors import InvariantViolation, OwnershipError
from baton.common.kv.prefix.interface import I32, Inserted, PrefixLease, PrefixMatch, PrefixStats, Span
from baton.common.units import page_floor, whole_pages

_TOKEN_BYTES = 4
_NO_PAGES: I32 = np.empty(0, dtype=np.int32)
_NO_PAGES.flags.writeable = False


class _Node:
    """A run of pages. `key` is their tokens; `end` counts the pages from the root to the end of this node."""

    __slots__ = ("children", "end", "key", "last_use", "locks", "pages", "parent")

    def __init__(self, key: bytes, pages: I32, parent: _Node | None, end: int) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent  # None: the root, or a node that was evicted
        self.end = end
        self.children: dict[bytes, _Node] = {}
        self.locks = 0
        self.last_use = 0


class _RadixLease(PrefixLease):
    __slots__ = ("node",)

    def __init__(self, node: _Node, length: int) -> None:
        super().__init__(length)
        self.node = node


@dataclass(frozen=True, slots=True)
class _RadixMatch(PrefixMatch):
    node: _Node  # the deepest node touched; the match may end inside it
    end: int  # pages


class RadixCache:
    """Evicts the least recently used leaf first; a use is the end of a lease. Time is a counter of uses."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._page_bytes = page_size * _TOKEN_BYTES
        self._root = _Node(b"", _NO_PAGES, None, 0)
        self.evictable_pages = 0
        self.locked_pages = 0
        self._nodes = 0
        self._leases = 0
        self._evicted_total = 0
        self._uses = 0
        # (last_use, tie breaker, leaf). May hold stale entries; `_is_current` tells. Compacted when mostly stale.
        self._heap: list[tuple[int, int, _Node]] = []
        self._pushes = 0

    # ------------------------------------------------------------------------------------------ reading

    def match_prefix(self, tokens: I32) -> PrefixMatch:
        whole = page_floor(len(tokens), self._page_size)
        data = tokens[:whole].tobytes()
        node, offset = self._root, 0
        while offset < len(data):
            child = node.children.get(data[offset : offset + self._page_bytes])
            if child is None:
                break
            node = child
            common = self._common_bytes(child.key, data, offset)
            offset += common
            if common < len(child.key):
                break
        end = offset // self._page_bytes
        return _RadixMatch(length=end * self._page_size, node=node, end=end)

    def evictable_pages_in(self, match: PrefixMatch) -> int:
        assert isinstance(match, _RadixMatch)
        count, end = 0, match.end
        for node in self._path(match.node):
            start = node.end - len(node.pages)
            if node.locks:
                break
            count += max(0, end - start)
            end = min(end, start)
        return count

    def pages(self, lease: PrefixLease) -> I32:
        parts = [node.pages for node in self._path(self._node_of(lease))]
        parts.reverse()
        return np.concatenate(parts)

    def cached_pages(self) -> tuple[I32, I32]:
        evictable: list[I32] = [_NO_PAGES]
        locked: list[I32] = [_NO_PAGES]
        for node in self._walk():
            (locked if node.locks else evictable).append(node.pages)
        return np.concatenate(evictable), np.concatenate(locked)

    # ------------------------------------------------------------------------------------------ leases

    def lock(self, match: PrefixMatch) -> PrefixLease | None:
        assert isinstance(match, _RadixMatch)
        if match.end == 0:
            return None
        node = match.node
        if node.parent is None or node.end < match.end:
            return None  # it was evicted since, or its tail was; asking again is the caller's to do
        while node.end - len(node.pages) >= match.end:  # split since: the match ends in a node above
            assert node.parent is not None
            node = node.parent
        if node.end > match.end:
            node = self._split(node, len(node.pages) - (node.end - match.end))
        for above in self._path(node):
            self._add_lock(above)
        self._leases += 1
        return _RadixLease(node, match.length)

    def unlock(self, lease: PrefixLease) -> None:
        node = self._node_of(lease)
        lease.end()
        self._leases -= 1
        self._uses += 1
        for above in self._path(node):
            above.locks -= 1
            above.last_use = self._uses
            if above.locks == 0:
                self.evictable_pages += len(above.pages)
                self.locked_pages -= len(above.pages)
                if not above.children:
                    self._push(above)

    # ------------------------------------------------------------------------------------------ writing

    def insert(self, lease: PrefixLease | None, tokens: I32, pages: I32) -> Inserted:
        node = self._root if lease is None else self._node_of(lease)
        start = 0 if lease is None else lease.length
        whole = page_floor(len(tokens), self._page_size)
        count = whole_pages(whole, self._page_size) - node.end
        if count < 0 or len(pages) < count:
            raise OwnershipError(f"{len(pages)} pages offered for tokens [{start}, {len(tokens)})")
        data = tokens[start:whole].tobytes()
        offset = 0
        held: list[I32] = [_NO_PAGES]
        duplicate_end = whole
        while offset < len(data):
            first = data[offset : offset + self._page_bytes]
            child = node.children.get(first)
            if child is None:
                begin = offset // self._page_bytes
                child = _Node(data[offset:], pages[begin:count].copy(), node, node.end + count - begin)
                node.children[first] = child
                self._nodes += 1
                self.evictable_pages += len(child.pages)  # until the lock below takes it out again
                duplicate_end = start + begin * self._page_size
                offset = len(data)
            else:
                common = self._common_bytes(child.key, data, offset)
                if common < len(child.key):
                    child = self._split(child, common // self._page_bytes)
                offset += common
            self._add_lock(child)
            held.append(child.pages)
            node = child
        return Inserted(
            lease=self._advance(lease, node, whole),
            duplicate=Span(start, duplicate_end),
            locked=Span(duplicate_end, whole),
            tail=Span(whole, len(tokens)),
            pages=np.concatenate(held),
        )

    def evict(self, pages: int) -> I32:
        freed: list[I32] = [_NO_PAGES]
        missing = pages
        while missing > 0 and self._heap:
            last_use, _, leaf = heapq.heappop(self._heap)
            if not self._is_current(last_use, leaf):
                continue
            if len(leaf.pages) > missing:
                freed.append(self._trim(leaf, missing))
                missing = 0
            else:
                freed.append(leaf.pages)
                missing -= len(leaf.pages)
                self._remove(leaf)
        gone = np.concatenate(freed)
        self.evictable_pages -= len(gone)
        self._evicted_total += len(gone)
        return gone

    def clear(self) -> I32:
        return self.evict(self.evictable_pages)

    # ------------------------------------------------------------------------------------------ checks

    def check(self, leases: Iterable[PrefixLease]) -> None:
        ends_at: dict[int, int] = {}
        held = 0
        for lease in leases:
            node = self._node_of(lease)
            if not lease.live or node.end * self._page_size != lease.length or node.parent is None:
                raise InvariantViolation(f"a lease over {lease.length} tokens points to a node of {node.end} pages")
            ends_at[id(node)] = ends_at.get(id(node), 0) + 1
            held += 1
        if held != self._leases:
            raise InvariantViolation(f"{self._leases} leases were given out, {held} are held")
        evictable = locked = nodes = 0
        queued = {id(leaf) for last_use, _, leaf in self._heap if self._is_current(last_use, leaf)}
        for node in self._walk():
            self._check_node(node)
            expected = ends_at.get(id(node), 0) + sum(child.locks for child in node.children.values())
            if node.locks != expected:
                raise InvariantViolation(f"node with pages {node.pages.tolist()}: {node.locks} locks, not {expected}")
            if node.locks == 0 and not node.children and id(node) not in queued:
                raise InvariantViolation(f"leaf with pages {node.pages.tolist()} could never be evicted")
            nodes += 1
            if node.locks:
                locked += len(node.pages)
            else:
                evictable += len(node.pages)
        if (evictable, locked, nodes) != (self.evictable_pages, self.locked_pages, self._nodes):
            raise InvariantViolation(
                f"the tree has {evictable} evictable and {locked} locked pages in {nodes} nodes; counted were"
                f" {self.evictable_pages}, {self.locked_pages}, {self._nodes}"
            )

    def _check_node(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        whole = len(node.pages) > 0 and len(node.key) == len(node.pages) * self._page_bytes
        placed = parent.children.get(node.key[: self._page_bytes]) is node
        if not (whole and placed and node.end == parent.end + len(node.pages)):
            raise InvariantViolation(f"node with pages {node.pages.tolist()} does not fit below its parent")

    def stats(self) -> PrefixStats:
        return PrefixStats(
            nodes=self._nodes,
            leases=self._leases,
            evictable_pages=self.evictable_pages,
            locked_pages=self.locked_pages,
            eviction_queue=len(self._heap),
            evicted_pages_total=self._evicted_total,
        )

    # ------------------------------------------------------------------------------------------ inside

    def _node_of(self, lease: PrefixLease) -> _Node:
        if not isinstance(lease, _RadixLease) or not lease.live:
            raise OwnershipError(f"a lease over {lease.length} tokens is used after its end, or in another cache")
        return lease.node

    def _path(self, node: _Node) -> Iterator[_Node]:
        """The node and those above it, without the root."""
        while node.parent is not None:
            above = node.parent
            yield node
            node = above

    def _walk(self) -> Iterator[_Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def _common_bytes(self, key: bytes, data: bytes, offset: int) -> int:
        """Length of the common prefix of `key` and data[offset:], floored to whole pages."""
        if data.startswith(key, offset):
            return len(key)
        length = min(len(key), len(data) - offset)
        ours = np.frombuffer(key, dtype=np.int32, count=length // _TOKEN_BYTES)
        theirs = np.frombuffer(data, dtype=np.int32, count=length // _TOKEN_BYTES, offset=offset)
        differs = ours != theirs
        first = int(differs.argmax()) if differs.any() else len(differs)
        return whole_pages(first, self._page_size) * self._page_bytes

    def _split(self, node: _Node, pages_above: int) -> _Node:
        """Puts the first pages of `node` into a new node above it, which every lease through `node` passes too."""
        parent = node.parent
        assert parent is not None
        assert 0 < pages_above < len(node.pages)
        cut = pages_above * self._page_bytes
        upper = _Node(node.key[:cut], node.pages[:pages_above], parent, parent.end + pages_above)
        upper.locks = node.locks
        parent.children[node.key[: self._page_bytes]] = upper
        node.key = node.key[cut:]
        node.pages = node.pages[pages_above:]
        node.parent = upper
        upper.children[node.key[: self._page_bytes]] = node
        self._nodes += 1
        return upper

    def _add_lock(self, node: _Node) -> None:
        if node.locks == 0:
            self.evictable_pages -= len(node.pages)
            self.locked_pages += len(node.pages)
        node.locks += 1

    def _advance(self, lease: PrefixLease | None, node: _Node, length: int) -> PrefixLease | None:
        """The lease that replaces `lease`, at `node`; every node between the two has its lock already."""
        if node is self._root:
            return None
        if lease is None:
            self._leases += 1
        else:
            lease.end()
        return _RadixLease(node, length)

    def _is_current(self, last_use: int, leaf: _Node) -> bool:
        return leaf.parent is not None and not leaf.locks and not leaf.children and leaf.last_use == last_use

    def _push(self, leaf: _Node) -> None:
        if len(self._heap) > 4 * self._nodes + 64:
            unique = {id(entry[2]): entry for entry in self._heap if self._is_current(entry[0], entry[2])}
            self._heap = list(unique.values())
            heapq.heapify(self._heap)
        self._pushes += 1
        heapq.heappush(self._heap, (leaf.last_use, self._pushes, leaf))

    def _trim(self, leaf: _Node, count: int) -> I32:
        """Takes the last `count` pages off an unlocked leaf, which stays the next to be evicted."""
        keep = len(leaf.pages) - count
        gone = leaf.pages[keep:]
        leaf.pages = leaf.pages[:keep].copy()
        leaf.key = leaf.key[: keep * self._page_bytes]
        leaf.end -= count
        self._push(leaf)
        return gone

    def _remove(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._page_bytes]]
        leaf.parent = None
        self._nodes -= 1
        if parent.parent is not None and not parent.children and not parent.locks:
            self._push(parent)
