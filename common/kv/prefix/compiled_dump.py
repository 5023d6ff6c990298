"""The nodes of a compiled tree, made again from its dump as the Python tree has them, for the audit. Copies what C++
says, right or wrong, and believes none of it: what cannot even be put together raises InvariantViolation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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


class _Record(NamedTuple):
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


class Dump:
    """`nodes` by handle, the root's is 0; `queued` by `id`, as the audit wants it."""

    def __init__(self, layout: KvLayout, table: Sequence[int], ids: I32) -> None:
        numbers = iter(table)
        count, in_parents = next(numbers), next(numbers)
        entries = {component: next(numbers) for component in Component}
        records = [_Record(*_take(numbers, len(_Record._fields))) for _ in range(count)]
        self.nodes = {0: Node(b"", 0, None, NO_IDS, NO_IDS)}
        start = 0
        for record in records:
            self.nodes[record.handle] = _node(record, ids[start : start + record.key + record.full + record.swa])
            start += record.key + record.full + record.swa
        if len(self.nodes) != count + 1 or in_parents != count:
            raise InvariantViolation(f"{count} nodes have {len(self.nodes) - 1} handles, {in_parents} have a parent")
        for record in records:
            self._place(record, layout.page_size * TOKEN_BYTES)
        for record in records:
            if len(self.nodes[record.handle].children) != record.children:
                raise InvariantViolation(f"a node with {record.children} children has another number of them: {record}")
        self.queued = {
            component: self._current(component, _take(numbers, 2 * entries[component])) for component in Component
        }

    @property
    def below_root(self) -> list[Node]:
        return [node for handle, node in self.nodes.items() if handle]

    def _place(self, record: _Record, page_bytes: int) -> None:
        if record.parent not in self.nodes or record.found not in self.nodes:
            raise InvariantViolation(f"a node hangs on one that is gone, or its parent finds one that is: {record}")
        node, parent = self.nodes[record.handle], self.nodes[record.parent]
        node.parent = parent
        parent.children[node.key[:page_bytes]] = self.nodes[record.found]

    def _current(self, component: Component, entries: list[int]) -> set[int]:
        pairs = [(self.nodes.get(handle), use) for handle, use in zip(entries[::2], entries[1::2], strict=True)]
        return {id(node) for node, use in pairs if node is not None and _IS_CURRENT[component](node, use)}


def _take(numbers: Iterator[int], count: int) -> list[int]:
    return [next(numbers) for _ in range(count)]


def _node(record: _Record, ids: I32) -> Node:
    key, full, swa = ids[: record.key], ids[record.key : record.key + record.full], ids[record.key + record.full :]
    node = Node(key.tobytes(), record.size, None, full, swa)
    node.end = record.end
    node.locks, node.last_use = record.locks, record.last_use
    node.swa_live, node.swa_locks, node.swa_use = record.swa_live, record.swa_locks, record.swa_use
    node.state, node.state_locks, node.state_use = record.state, record.state_locks, record.state_use
    return node
