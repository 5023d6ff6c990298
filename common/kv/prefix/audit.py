"""The integrity walk of the prefix tree. Changes nothing and trusts nothing: all that the tree counts is counted again
from its nodes and from the leases that are held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from baton.common.kv.errors import InvariantViolation
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.interface import GroupCounts, PrefixLease, PrefixStats
from baton.common.kv.prefix.node import (
    TOKEN_BYTES,
    Node,
    first_live,
    full_is_current,
    path_up,
    state_is_current,
    swa_is_current,
    window_is_live,
)


def audit(
    layout: KvLayout,
    nodes: Sequence[Node],
    held: Sequence[tuple[PrefixLease, Node]],
    stats: PrefixStats,
    queued: Mapping[Component, set[int]],
) -> None:
    """Raises InvariantViolation unless the nodes are whole, locked by exactly the leases that are held, counted right
    in `stats`, and each evictable one is queued (`queued`: by `id`, entries that are out of date left out)."""
    for lease, node in held:
        if not lease.live or node.end * layout.page_size != lease.length or node.parent is None:
            raise InvariantViolation(f"a lease over {lease.length} tokens points to a node of {node.end} pages")
        if not window_is_live(layout, node, node.end) or (layout.state and not node.state):
            raise InvariantViolation(f"a lease over {lease.length} tokens does not protect what is needed there")
    if len(held) != stats.leases:
        raise InvariantViolation(f"{stats.leases} leases were given out, {len(held)} are held")
    for node in nodes:
        _check_node(layout, node)
    _check_locks(layout, nodes, [node for _, node in held])
    _check_queues(layout, nodes, queued)
    _check_ids(nodes)
    counted = (stats.nodes, stats.evictable, stats.locked)
    found = (len(nodes), _count(nodes, locked=False), _count(nodes, locked=True))
    if found != counted:
        raise InvariantViolation(f"the tree has (nodes, evictable, locked) = {found}; counted were {counted}")


def _name(node: Node) -> str:
    return f"node [{node.start}, {node.end}) with pages {node.full.tolist() or node.swa.tolist()} state {node.state}"


def _check_node(layout: KvLayout, node: Node) -> None:
    parent = node.parent
    if parent is None:
        raise InvariantViolation(f"{_name(node)} was removed and is still reached")
    page_bytes = layout.page_size * TOKEN_BYTES
    whole = node.size > 0 and len(node.key) == node.size * page_bytes
    complete = len(node.full) == node.size * layout.full and len(node.swa) == node.size * (layout.window > 0)
    placed = parent.children.get(node.key[:page_bytes]) is node and node.end == parent.end + node.size
    if not (whole and complete and placed and (layout.state or not node.state)):
        raise InvariantViolation(f"{_name(node)} does not fit below its parent")
    if not node.full.all() or int(np.count_nonzero(node.swa)) != node.swa_live:
        raise InvariantViolation(f"{_name(node)} lacks pages, or counts {node.swa_live} live sliding pages")
    holds_something = layout.full or node.swa_live or node.state or node.children or node.locks
    if not holds_something:
        raise InvariantViolation(f"{_name(node)} holds nothing and nothing would ever remove it")


def _check_locks(layout: KvLayout, nodes: Sequence[Node], lease_nodes: Sequence[Node]) -> None:
    locks: Counter[int] = Counter()
    swa_locks: Counter[int] = Counter()
    state_locks = Counter(id(node) for node in lease_nodes if layout.state)
    for end in lease_nodes:
        first = first_live(layout, end.end)
        for node in path_up(end):
            locks[id(node)] += 1
            if node.start < first < node.end:
                raise InvariantViolation(f"{_name(node)}: a locked window begins inside it, at {first}")
            if node.start >= first:
                swa_locks[id(node)] += 1
    for node in nodes:
        expected = (locks[id(node)], swa_locks[id(node)], state_locks[id(node)])
        if (node.locks, node.swa_locks, node.state_locks) != expected:
            raise InvariantViolation(
                f"{_name(node)}: {node.locks} locks, {node.swa_locks} of a window, {node.state_locks} of a state;"
                f" the leases have {expected}"
            )


def _check_queues(layout: KvLayout, nodes: Sequence[Node], queued: Mapping[Component, set[int]]) -> None:
    for component in layout.components:
        there = queued[component]
        match component:
            case Component.FULL:
                lost = [one for one in nodes if id(one) not in there and full_is_current(one, one.last_use)]
            case Component.SWA:
                lost = [one for one in nodes if id(one) not in there and swa_is_current(one, one.swa_use)]
            case Component.STATE:
                lost = [one for one in nodes if id(one) not in there and state_is_current(one, one.state_use)]
        for node in lost:
            raise InvariantViolation(f"{_name(node)}: its {component} part could never be evicted")


def _check_ids(nodes: Sequence[Node]) -> None:
    for component, ids in (
        (Component.FULL, [one for node in nodes for one in node.full.tolist()]),
        (Component.SWA, [one for node in nodes for one in node.swa.tolist() if one]),
        (Component.STATE, [node.state for node in nodes if node.state]),
    ):
        if len(set(ids)) < len(ids):
            twice = [one for one, times in Counter(ids).items() if times > 1]
            raise InvariantViolation(f"{component} ids {twice} are in the tree twice")


def _count(nodes: Sequence[Node], *, locked: bool) -> GroupCounts:
    return GroupCounts(
        sum(len(node.full) for node in nodes if (node.locks > 0) is locked),
        sum(node.swa_live for node in nodes if (node.swa_locks > 0) is locked),
        sum(1 for node in nodes if node.state and (node.state_locks > 0) is locked),
    )
