"""`RadixCacheCpp`: the prefix tree with its core compiled, and in every answer the same as `tree.UnifiedRadixCache`.

Here: matches, leases and the values of the interface; all that is known of tokens and pages is in csrc/, and
`compiled.py` calls it. Nodes are named by handles: a number that is never given twice, so that a match whose node was
removed since is recognised. The audit is the same as the other tree's, over nodes that are made again from a dump.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.common.kv.errors import InvariantViolation, OwnershipError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.audit import audit
from baton.common.kv.prefix.compiled import CompiledLibrary, CompiledTree, foreign
from baton.common.kv.prefix.compiled_dump import Dump
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
from baton.common.kv.prefix.node import joined, slots
from baton.common.kv.prefix.offers import assert_adds_up, check_given
from baton.common.units import whole_pages

_NUMBERS = {component: number for number, component in enumerate(Component)}  # as C++ counts them


class _Lease(PrefixLease):
    __slots__ = ("node", "tree")

    def __init__(self, tree: CompiledTree, node: int, length: int) -> None:
        super().__init__(length)
        self.tree = tree
        self.node = node


class _Match(PrefixMatch, frozen=True):
    tree: CompiledTree
    node: int  # holds the last page of the match, which may end inside it
    end: int  # pages


class RadixCacheCpp:
    """See `tree.UnifiedRadixCache` for what it does and when."""

    def __init__(self, library: CompiledLibrary, layout: KvLayout) -> None:
        self._layout = layout
        self._page_size = layout.page_size
        self._lib = library
        self._tree = CompiledTree(library, layout)

    # ------------------------------------------------------------------------------------------ reading

    @property
    def evictable(self) -> GroupCounts:
        books = self._tree.books
        return GroupCounts(books.full.evictable, books.swa.evictable, books.state.evictable)

    @property
    def locked(self) -> GroupCounts:
        books = self._tree.books
        return GroupCounts(books.full.locked, books.swa.locked, books.state.locked)

    @property
    def work(self) -> int:
        """Nodes, places of tables and queue entries that all calls so far have looked at: what they cost, without a
        clock."""
        return self._tree.books.work

    def match_prefix(self, tokens: I32) -> PrefixMatch:
        tree = self._tree
        pages = whole_pages(len(tokens), self._page_size)
        reply = tree.done(self._lib.match(tree.pointer, foreign(tokens), pages))
        end = reply.end
        return _Match(end * self._page_size, tree, reply.node, end)

    def evictable_in(self, match: PrefixMatch) -> GroupCounts:
        tree = self._tree
        assert isinstance(match, _Match)
        assert match.tree is tree, "a match of another cache"
        reply = tree.done(self._lib.evictable_in(tree.pointer, match.node, match.end))
        return GroupCounts(*reply.counts)

    def pages(self, lease: PrefixLease) -> GroupPages:
        tree = self._tree
        reply = tree.done(self._lib.pages(tree.pointer, self._node_of(lease)))
        full, swa = tree.parts(2)
        return GroupPages(full, swa, slots([reply.state] if reply.state else []))

    def coldest(self, count: int) -> list[tuple[I32, PrefixMatch]]:
        assert self._layout.only_full, self._layout
        tree = self._tree
        tree.done(self._lib.coldest(tree.pointer, count))
        ids, start = tree.ids(), 0
        found: list[tuple[I32, PrefixMatch]] = []
        for node, end in tree.table().reshape(-1, 2).tolist():
            length = end * self._page_size
            found.append((ids[start : start + length], _Match(length, tree, node, end)))
            start += length
        return found

    def cached_pages(self) -> tuple[GroupPages, GroupPages]:
        tree = self._tree
        tree.done(self._lib.cached(tree.pointer))
        parts = tree.parts(6)
        return GroupPages(*parts[:3]), GroupPages(*parts[3:])

    def check(self, leases: Iterable[PrefixLease]) -> None:
        tree = self._tree
        tree.done(self._lib.dump(tree.pointer))
        dump = Dump(self._layout, tree.table().tolist(), tree.ids())
        held = []
        for lease in leases:
            if not isinstance(lease, _Lease) or lease.tree is not tree or lease.node not in dump.nodes:
                raise InvariantViolation(f"a lease over {lease.length} tokens points to no node of this cache")
            held.append((lease, dump.nodes[lease.node]))
        audit(self._layout, dump.below_root, held, self.stats(), dump.queued)

    def stats(self) -> PrefixStats:
        books = self._tree.books
        full, swa, state = books.full, books.swa, books.state
        return PrefixStats(
            nodes=books.nodes,
            leases=books.leases,
            evictable=self.evictable,
            locked=self.locked,
            eviction_queue=GroupCounts(full.queued, swa.queued, state.queued),
            evicted_total=GroupCounts(full.evicted_total, swa.evicted_total, state.evicted_total),
        )

    # ------------------------------------------------------------------------------------------ leases

    def lock(self, match: PrefixMatch) -> PrefixLease | None:
        tree = self._tree
        assert isinstance(match, _Match)
        assert match.tree is tree, "a match of another cache"
        node = tree.done(self._lib.lock(tree.pointer, match.node, match.end)).node
        return _Lease(tree, node, match.length) if node else None

    def unlock(self, lease: PrefixLease, *, used: bool = True) -> None:
        tree = self._tree
        node = self._node_of(lease)
        lease.end()
        tree.done(self._lib.unlock(tree.pointer, node, used))

    # ------------------------------------------------------------------------------------------ writing

    def insert(self, lease: PrefixLease | None, tokens: I32, given: GroupPages) -> Inserted:
        tree, page_size = self._tree, self._page_size
        old = 0 if lease is None else self._node_of(lease)
        first = 0 if lease is None else whole_pages(lease.length, page_size)
        whole = whole_pages(len(tokens), page_size)
        check_given(self._layout, given, whole - first)
        slot = given.state_slot if whole * page_size == len(tokens) else 0
        reply = tree.done(
            self._lib.insert(
                tree.pointer,
                old,
                foreign(tokens[first * page_size : whole * page_size]),
                whole - first,
                foreign(given.full),
                foreign(given.swa),
                len(given.swa),
                slot,
            )
        )
        if lease is not None:
            lease.end()
        end, known = reply.end - first, reply.known - first
        states = (NO_IDS, NO_IDS, given.state)  # taken, duplicate, tail
        if slot and 0 < end + first == whole:
            states = (given.state, NO_IDS, NO_IDS) if reply.state_taken else (NO_IDS, given.state, NO_IDS)
        if self._layout.window:
            taken, duplicate, tail, full, swa = tree.parts(5)
        else:  # the only ids in the reply; this path is worth it
            taken, duplicate, tail, full, swa = NO_IDS, NO_IDS, NO_IDS, tree.ids(), NO_IDS
        kept = Inserted(
            lease=_Lease(tree, reply.node, reply.end * page_size) if reply.node else None,
            taken=GroupPages(given.full[known:end], taken, states[0]),
            duplicate=GroupPages(given.full[:known], duplicate, states[1]),
            tail=GroupPages(given.full[end:], tail, states[2]),
            pages=GroupPages(full, swa, slots([reply.state] if reply.state else [])),
        )
        assert_adds_up(given, kept)
        return kept

    def evict(self, component: Component, count: int) -> GroupPages:
        tree = self._tree
        tree.done(self._lib.evict(tree.pointer, _NUMBERS[component], count))
        return GroupPages(*tree.parts(3))

    def clear(self) -> GroupPages:
        gone = [self.evict(component, self.evictable.of(component)) for component in self._layout.components]
        return GroupPages(*(joined([one.of(component) for one in gone]) for component in Component))

    # ------------------------------------------------------------------------------------------ inside

    @property
    def compiled(self) -> CompiledTree:
        """For the compiled checks."""
        return self._tree

    def node_of(self, lease: PrefixLease) -> int:
        """Its handle. Raises OwnershipError for a lease that is not this cache's, or is over."""
        return self._node_of(lease)

    def _node_of(self, lease: PrefixLease) -> int:
        if not isinstance(lease, _Lease) or not lease.live or lease.tree is not self._tree:
            raise OwnershipError(f"a lease over {lease.length} tokens is used after its end, or in another cache")
        return lease.node
