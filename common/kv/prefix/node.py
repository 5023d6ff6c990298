"""What the prefix tree is made of: nodes, and the books that are kept per component. Knows no lease and no policy.

Owns: `Node` and how one is split, `Ledger` (how much of a component is evictable or locked, and what goes first), and
the arithmetic of usable lengths. Positions are counted in pages from the root.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from baton.common.kv.layout import KvLayout
from baton.common.kv.prefix.interface import I32, NO_IDS, GroupPages

TOKEN_BYTES = 4


class Node:
    """A run of whole pages of tokens, and what the cache has of them.

    `full` and `swa` have one page id per page, or are empty when the layout lacks the component. An entry 0 of `swa` is
    a tombstone: that page is gone while the node stays. `state` is the slot of a checkpoint at the node's end, or 0.
    The three counts of locks are of leases: `locks` of those that end here or below, `swa_locks` of those whose live
    window covers the node, `state_locks` of those that end here. All of a node's pages have been used at the same time.
    """

    __slots__ = (
        "children",
        "end",
        "full",
        "key",
        "last_use",
        "locks",
        "parent",
        "size",
        "state",
        "state_locks",
        "state_use",
        "swa",
        "swa_live",
        "swa_locks",
        "swa_use",
    )

    def __init__(self, key: bytes, size: int, parent: Node | None, full: I32, swa: I32) -> None:
        self.key = key  # the bytes of its tokens
        self.size = size  # pages
        self.parent: Node | None = parent  # None: the root, or a node that was removed
        self.end: int = size if parent is None else parent.end + size
        self.children: dict[bytes, Node] = {}  # by their first page of tokens
        self.locks = 0
        self.last_use = 0
        self.full = full
        self.swa = swa
        self.swa_live = int(np.count_nonzero(swa)) if len(swa) else 0
        self.swa_locks = 0
        self.swa_use = 0
        self.state = 0
        self.state_locks = 0
        self.state_use = 0

    @property
    def start(self) -> int:
        return self.end - self.size

    def split(self, above: int, page_bytes: int) -> Node:
        """Puts the first `above` pages into a new node above this one, which every lease through this node passes too:
        this node keeps its end, and with it its checkpoint and the leases that end here. Returns the new node."""
        parent = self.parent
        assert parent is not None
        assert 0 < above < self.size
        cut = above * page_bytes
        upper = Node(self.key[:cut], above, parent, self.full[:above], self.swa[:above])
        upper.locks, upper.last_use = self.locks, self.last_use
        upper.swa_locks, upper.swa_use = self.swa_locks, self.swa_use
        parent.children[self.key[:page_bytes]] = upper
        self.key = self.key[cut:]
        self.size -= above
        self.full = self.full[above:]
        self.swa = self.swa[above:]
        self.swa_live -= upper.swa_live
        self.parent = upper
        upper.children[self.key[:page_bytes]] = self
        return upper

    def cut(self, keep: int, page_bytes: int) -> None:
        """Forgets the pages behind the first `keep`, and the checkpoint at what was the end."""
        assert 0 < keep < self.size
        assert not self.children
        self.key = self.key[: keep * page_bytes]
        self.end -= self.size - keep
        self.size = keep
        self.full = self.full[:keep].copy()  # else the old array lives as long as the node
        if len(self.swa):
            self.swa = self.swa[:keep].copy()
            self.swa_live = int(np.count_nonzero(self.swa))
        self.state = 0

    def common_pages(self, data: bytes, offset: int, page_bytes: int) -> int:
        """How many of the node's pages of tokens are the same as in `data` from `offset` on."""
        if data.startswith(self.key, offset):
            return self.size
        length = min(len(self.key), len(data) - offset)
        ours = np.frombuffer(self.key, dtype=np.int32, count=length // TOKEN_BYTES)
        theirs = np.frombuffer(data, dtype=np.int32, count=length // TOKEN_BYTES, offset=offset)
        differs = ours != theirs
        first = int(differs.argmax()) if differs.any() else len(differs)
        return first * TOKEN_BYTES // page_bytes


def path_up(node: Node) -> Iterator[Node]:
    """The node and those above it, without the root. The node may be split or removed while it is looked at."""
    while (above := node.parent) is not None:
        yield node
        node = above


def descend(node: Node, data: bytes, page_bytes: int) -> tuple[list[Node], int]:
    """The nodes below `node` along `data`, and the position until which they agree with it; the last may do so only in
    part. Costs time in proportion to `data`."""
    path: list[Node] = []
    offset, end = 0, node.end
    while offset < len(data):
        child = node.children.get(data[offset : offset + page_bytes])
        if child is None:
            break
        common = child.common_pages(data, offset, page_bytes)
        path.append(child)
        offset += common * page_bytes
        end += common
        if common < child.size:
            break
        node = child
    return path, end


def first_live(layout: KvLayout, end: int) -> int:
    """`KvLayout.live_from` in pages; `end` itself when no layer slides, and the window is empty."""
    return layout.live_from(end * layout.page_size) // layout.page_size if layout.window else end


def window_is_live(layout: KvLayout, node: Node, end: int) -> bool:
    """Whether sliding layers, if there are any, can go on from `end`, which lies in `node` or above."""
    if not layout.window:
        return True
    first = first_live(layout, end)
    while node.end > first:
        if node.swa_live < node.size:
            start = node.start
            if not node.swa[max(0, first - start) : max(0, end - start)].all():
                return False
        assert node.parent is not None
        node = node.parent
    return True


def longest_usable(layout: KvLayout, live: npt.NDArray[np.bool_], first: int, ends: Sequence[int] | None) -> int:
    """The largest of `ends` (ascending, all above `first`) from which sliding layers can go on, or `first` when there
    is none; `ends` None: every position until that of the last page. `live[i]` is of page `first + i`; those before
    `first` are alive as far as a window reaches back."""
    last = first + len(live) if ends is None else ends[-1] if ends else first
    if live[max(0, first_live(layout, last) - first) : last - first].all():
        return last  # nearly always; without the arithmetic over all of `live`
    positions = np.arange(first, first + len(live), dtype=np.int32)
    last_dead = np.maximum.accumulate(np.where(live, np.int32(-1), positions))
    candidates = positions + 1 if ends is None else np.array(ends, dtype=np.int32)
    window_starts = np.maximum(candidates * layout.page_size - layout.window + 1, 0) // layout.page_size
    usable = np.flatnonzero(last_dead[candidates - 1 - first] < window_starts)
    return int(candidates[usable[-1]]) if len(usable) else first


class Ledger:
    """The books of one component: counts, and a queue of what can be evicted, least recently used first; of what was
    used at the same time, what was queued first.

    The queue may hold entries that are out of date: `is_current(node, use)` tells, and they are dropped when they come
    up, or all at once when there are many of them."""

    __slots__ = ("_is_current", "_pushes", "_queue", "evictable", "evicted_total", "locked")

    def __init__(self, is_current: Callable[[Node, int], bool]) -> None:
        self.evictable = 0
        self.locked = 0
        self.evicted_total = 0
        self._is_current = is_current
        self._queue: list[tuple[int, int, Node]] = []  # (use, tie breaker, node)
        self._pushes = 0

    def lock(self, count: int) -> None:
        self.evictable -= count
        self.locked += count

    def unlock(self, count: int) -> None:
        self.evictable += count
        self.locked -= count

    def gave_up(self, count: int) -> None:
        self.evictable -= count
        self.evicted_total += count

    def push(self, use: int, node: Node, nodes: int) -> None:
        """`nodes`: how many the tree has, which bounds the queue."""
        if len(self._queue) > 4 * nodes + 64:
            first: dict[int, tuple[int, int, Node]] = {}
            for entry in sorted(self._current()):
                first.setdefault(id(entry[2]), entry)
            self._queue = list(first.values())  # in order, and with that a heap
        self._pushes += 1
        heapq.heappush(self._queue, (use, self._pushes, node))

    def pop(self) -> Node | None:
        while self._queue:
            use, _, node = heapq.heappop(self._queue)
            if self._is_current(node, use):
                return node
        return None

    def coldest(self, pages: int) -> list[Node]:
        """The nodes that `pop` would give until there are so many pages. They keep their turn."""
        first: dict[int, tuple[int, int, Node]] = {}
        while pages > 0 and self._queue:
            entry = heapq.heappop(self._queue)
            node = entry[2]
            if self._is_current(node, entry[0]) and id(node) not in first:
                first[id(node)] = entry
                pages -= node.size
        for entry in first.values():
            heapq.heappush(self._queue, entry)
        return [node for _, _, node in first.values()]

    def queued(self) -> set[int]:
        """By `id`, for checks."""
        return {id(node) for _, _, node in self._current()}

    def entries(self) -> Iterable[tuple[Node, int]]:
        """All of the queue, with what is out of date."""
        return ((node, use) for use, _, node in self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def _current(self) -> list[tuple[int, int, Node]]:
        return [entry for entry in self._queue if self._is_current(entry[2], entry[0])]


def full_is_current(node: Node, use: int) -> bool:
    return node.parent is not None and not node.locks and not node.children and node.last_use == use


def swa_is_current(node: Node, use: int) -> bool:
    return node.parent is not None and not node.swa_locks and node.swa_live > 0 and node.swa_use == use


def state_is_current(node: Node, use: int) -> bool:
    return node.parent is not None and not node.state_locks and node.state > 0 and node.state_use == use


class Parts:
    """A set of ids that is being put together."""

    __slots__ = ("full", "state", "swa")

    def __init__(self) -> None:
        self.full: list[I32] = []
        self.swa: list[I32] = []
        self.state: list[int] = []

    def joined(self) -> GroupPages:
        return GroupPages(joined(self.full), joined(self.swa), slots(self.state))


def joined(parts: list[I32]) -> I32:
    if len(parts) > 1:
        return np.concatenate(parts)
    return parts[0] if parts else NO_IDS


def slots(ids: list[int]) -> I32:
    return np.array(ids, dtype=np.int32) if ids else NO_IDS


def live_ids(ids: I32) -> I32:
    """A copy without the tombstones."""
    if not len(ids):
        return NO_IDS
    live: I32 = ids[ids != 0]
    return live
