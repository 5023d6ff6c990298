"""The nodes of a compiled tree, made again from its dump as the Python tree has them, for the audit. Copies what C++
says, right or wrong, and believes none of it: what cannot even be put together raises InvariantViolation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from baton.common.kv.errors import InvariantViolation
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.interface import I32, NO_IDS
from baton.common.kv.prefix.node import (
    TOKEN_BYTES,
    Node,
    full_is_current,
    state_is_current,
    swa_is_current,
)

_IS_CURRENT: Mapping[Component, Callable[[Node, int], bool]] = {
    Component.FULL: full_is_current,
    Component.SWA: swa_is_current,
    Component.STATE: state_is_current,
}


class Record(NamedTuple):
    """One node in the table, as `dump` in csrc/radix_cache.cpp writes it. `found`: the handle of the child that the
    parent has for the node's first page."""

    handle: int
    parent: int
    found: int
    key: int
    full: int
    swa: int
    size: int
    end: int
    children: int
    locks: int
    last_use: int
    swa_live: int
    swa_locks: int
    swa_use: int
    state: int
    state_locks: int
    state_use: int


_FIELDS = len(Record._fields)
_HEAD = 2 + len(Component)  # how many nodes, how many of them hang on a parent, and the lengths of the queues


class Dump:
    """`nodes` by handle, the root's is 0; `queued` by `id`, as the audit wants it."""

    def __init__(self, layout: KvLayout, table: Sequence[int], ids: I32) -> None:
        count, in_parents, *entries = table[:_HEAD]
        until = _HEAD + count * _FIELDS
        if len(table) != until + 2 * sum(entries):
            raise InvariantViolation(f"a dump of {len(table)} numbers for {count} nodes and {entries} queue entries")
        records = [Record(*table[place : place + _FIELDS]) for place in range(_HEAD, until, _FIELDS)]
        self.nodes = {0: Node(b"", 0, None, NO_IDS, NO_IDS)}
        start = 0
        for record in records:
            self.nodes[record.handle] = _node(record, ids[start : start + record.key + record.full + record.swa])
            start += record.key + record.full + record.swa
        if not len(self.nodes) - 1 == in_parents == count or start != len(ids):
            raise InvariantViolation(
                f"{count} nodes, {len(self.nodes) - 1} handles, {in_parents} with a parent; {start} ids of {len(ids)}"
            )
        for record in records:
            self._place(record, layout.page_size * TOKEN_BYTES)
        for record in records:
            if len(self.nodes[record.handle].children) != record.children:
                raise InvariantViolation(f"a node with {record.children} children has another number of them: {record}")
        self.queued: dict[Component, set[int]] = {}
        for component, length in zip(Component, entries, strict=True):
            self.queued[component] = self._current(component, table[until : until + 2 * length])
            until += 2 * length

    @property
    def below_root(self) -> list[Node]:
        return [node for handle, node in self.nodes.items() if handle]

    def _place(self, record: Record, page_bytes: int) -> None:
        if record.parent not in self.nodes or record.found not in self.nodes:
            raise InvariantViolation(f"a node hangs on one that is gone, or its parent finds one that is: {record}")
        node, parent = self.nodes[record.handle], self.nodes[record.parent]
        node.parent = parent
        parent.children[node.key[:page_bytes]] = self.nodes[record.found]

    def _current(self, component: Component, entries: Sequence[int]) -> set[int]:
        pairs = [(self.nodes.get(handle), use) for handle, use in zip(entries[::2], entries[1::2], strict=True)]
        return {id(node) for node, use in pairs if node is not None and _IS_CURRENT[component](node, use)}


def _node(record: Record, ids: I32) -> Node:
    key, full, swa = ids[: record.key], ids[record.key : record.key + record.full], ids[record.key + record.full :]
    node = Node(key.tobytes(), record.size, None, full, swa)
    node.end = record.end
    node.locks, node.last_use = record.locks, record.last_use
    node.swa_live, node.swa_locks, node.swa_use = record.swa_live, record.swa_locks, record.swa_use
    node.state, node.state_locks, node.state_use = record.state, record.state_locks, record.state_use
    return node
