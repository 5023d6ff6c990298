"""A compiled copy of a tree in Python, for checks after every event: making it costs less than looking through the tree
itself would, and it is made anew only when the tree has changed.

Owns the copy. Never: changes the tree, or believes it: what cannot be right is copied as it is, for the audit to find.
"""

from __future__ import annotations

from array import array
from operator import attrgetter
from typing import final

from baton.common.kv.layout import KvLayout
from baton.common.kv.prefix.compiled import CompiledLibrary, CompiledTree
from baton.common.kv.prefix.interface import PrefixLease
from baton.common.kv.prefix.node import TOKEN_BYTES
from baton.common.kv.prefix.tree import UnifiedRadixCache

_NO_PARENT = -1
_counts_of = attrgetter("locks", "last_use", "swa_live", "swa_locks", "swa_use", "state", "state_locks", "state_use")


@final
class Mirror:
    """Of `cache`, whose `changes` says when it is out of date."""

    def __init__(self, library: CompiledLibrary, layout: KvLayout, cache: UnifiedRadixCache) -> None:
        self._library = library
        self._layout = layout
        self._cache = cache
        self._handles: dict[int, int] = {}  # by the `id` of a node
        self._changes = -1
        self._tree: CompiledTree | None = None

    def tree(self) -> CompiledTree:
        """As the other one is now. Raises InvariantViolation when it cannot be copied."""
        cache = self._cache
        if self._tree is None or self._changes != cache.changes:
            self._tree = tree = CompiledTree(self._library, self._layout)
            self._changes = cache.changes
            tree.done(self._library.load(tree.pointer, self._counted(), *self._dump()))
        return self._tree

    def node_of(self, lease: PrefixLease) -> int:
        """Its handle in the copy, or one that nothing has. Raises OwnershipError as the cache does."""
        return self._handles.get(id(self._cache.node_of(lease)), _NO_PARENT)

    def _counted(self) -> bytes:
        counts = self._cache.stats()
        ledgers = self._cache.page_tree.ledgers.values()
        books = [number for ledger in ledgers for number in (ledger.evictable, ledger.locked)]
        return array("q", (*books, counts.nodes, counts.leases)).tobytes()

    def _dump(self) -> tuple[bytes, bytes]:
        """The table and the ids that `load` in csrc/radix_cache.cpp reads; `compiled_dump.Record` names the fields."""
        page_tree = self._cache.page_tree
        nodes = list(page_tree.walk())
        self._handles = handles = {id(node): handle for handle, node in enumerate(nodes, start=1)}
        handles[id(page_tree.root)] = 0
        queues = [
            [number for node, use in ledger.entries() if id(node) in handles for number in (handles[id(node)], use)]
            for ledger in page_tree.ledgers.values()
        ]
        table = [len(nodes), len(nodes), *(len(queue) // 2 for queue in queues)]
        ids: list[bytes] = []
        page_bytes = page_tree.page_bytes
        for handle, node in enumerate(nodes, start=1):
            parent, key = node.parent, node.key
            found = parent is not None and parent.children.get(key[:page_bytes]) is node
            table += (
                handle,
                _NO_PARENT if parent is None else handles.get(id(parent), _NO_PARENT),
                handle if found and len(key) >= page_bytes else 0,
                len(key) // TOKEN_BYTES,
                len(node.full),
                len(node.swa),
                node.size,
                node.end,
                len(node.children),
            )
            table += _counts_of(node)
            ids += (key, node.full.tobytes(), node.swa.tobytes())
        for queue in queues:
            table += queue
        return array("q", table).tobytes(), b"".join(ids)
