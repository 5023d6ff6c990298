"""The compiled copy of a tree in Python shows each thing that can be wrong with the tree itself."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.checker import InvariantChecker
from baton.common.kv.compiled_checker import StepChecker
from baton.common.kv.errors import InvariantViolation
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.node import Node
from baton.common.kv.prefix.page_tree import PageTree
from baton.common.kv.prefix.tree import UnifiedRadixCache
from baton.common.kv.record import ReqKvInfo


@dataclass
class Holder:
    kv: ReqKvInfo | None = None


class World:
    """A tree with a locked path of two nodes, and two branches that nobody holds; of every component."""

    def __init__(self) -> None:
        layout = KvLayout(4, full=True, window=6, state=True)
        counts = {Component.FULL: 41, Component.SWA: 41, Component.STATE: 9}
        self.pool = KvPool(layout, counts, 4, 64, "UnifiedRadixCache")
        self.holder = Holder()
        for tokens in (list(range(12)), [*range(12), 70, 71, 72, 73], list(range(90, 98))):
            self.put(Holder(), tokens)
        assert self.pool.prepare_for_extend(self.holder, [*range(12), 9, 9], 14) == 12
        prefix = self.pool.prefix
        assert isinstance(prefix, UnifiedRadixCache)
        self.prefix = prefix
        self.tree = prefix.page_tree
        self.checker = StepChecker(self.pool, self.holdings)
        assert self.rule() == ""

    def put(self, holder: Holder, tokens: list[int]) -> None:
        self.pool.prepare_for_extend(holder, tokens, len(tokens))
        assert holder.kv is not None
        self.pool.take_state_copies([holder.kv])
        self.pool.release_kv_cache(holder, tokens)

    def record(self) -> ReqKvInfo:
        assert self.holder.kv is not None
        return self.holder.kv

    def holdings(self) -> list[Holding]:
        return [Holding(OwnerClass.REQUEST, "a", self.record())]

    def rule(self) -> str:
        return self.checker.broken_rule([self.record()])


def counts(tree: PageTree) -> None:
    tree.full.evictable += 1


def nodes(tree: PageTree) -> None:
    tree.nodes += 1


def queues(tree: PageTree) -> None:
    while tree.full.pop() is not None:
        pass


DAMAGES: dict[str, Callable[[Node], None]] = {
    "a lock too many": lambda node: setattr(node, "locks", node.locks + 1),
    "a window's lock too many": lambda node: setattr(node, "swa_locks", node.swa_locks + 1),
    "a state's lock too many": lambda node: setattr(node, "state_locks", node.state_locks + 1),
    "a sliding page counted twice": lambda node: setattr(node, "swa_live", node.swa_live + 1),
    "a page that others have": lambda node: node.full.__setitem__(0, 40),
    "no page": lambda node: node.full.__setitem__(0, 0),
    "a slot that others have": lambda node: setattr(node, "state", 8),
    "another end": lambda node: setattr(node, "end", node.end + 1),
    "another size": lambda node: setattr(node, "size", node.size + 1),
    "half a key": lambda node: setattr(node, "key", node.key[:4]),
    "a key that its parent does not know": lambda node: setattr(node, "key", node.key[4:] + node.key[:4]),
    "removed and still reached": lambda node: setattr(node, "parent", None),
}


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_node_is_found(damage: str, locked: bool) -> None:
    world = World()
    node = next((one for one in world.tree.walk() if bool(one.locks) is locked and one.swa_live), None)
    assert node is not None
    DAMAGES[damage](node)
    world.prefix.changes += 1
    assert world.rule()
    with pytest.raises(InvariantViolation):
        InvariantChecker().check(world.pool, world.holdings())


@pytest.mark.parametrize("damage", [counts, nodes, queues])
def test_wrong_books_are_found(damage: Callable[[PageTree], None]) -> None:
    world = World()
    damage(world.tree)
    world.prefix.changes += 1
    assert world.rule()


def test_a_lease_that_is_over_or_not_given_is_found() -> None:
    world = World()
    lease = world.record().prefix_lock
    assert lease is not None
    world.pool.copying.append(lease)  # as if a second one had been given
    assert "leases are given out" in world.rule()
    world.pool.copying.clear()
    world.prefix.unlock(lease)
    assert "after its end" in world.rule()


def test_the_copy_follows_the_tree() -> None:
    world = World()
    for number in range(30):
        world.put(Holder(), [number, *range(number, 20 + number)])
        assert world.rule() == ""
