"""The prefix tree against a dict: every aligned prefix -> what is cached of its last page of tokens, per component.

Both implementations at once (`prefix_rig.TwinCache`): each is held against the dict, and against the other in all that
the dict leaves open, the order of eviction first of all. The dict is the specification. A match is the longest prefix
from which every component can go on; an insertion keeps what is not known yet, up to the longest such prefix; an
eviction takes what was used longest ago and never what a lease protects. All combinations of components, page sizes 1,
4 and 16, windows that are and are not whole pages.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefix_rig import twin

from baton.common.kv.errors import OwnershipError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.interface import I32, GroupCounts, GroupPages, PrefixLease, PrefixMatch

Prefix = tuple[int, ...]

# Pages of tokens differ in their last token only, so that comparing has to look all the way; a tail fills no page.
page_symbols = st.lists(st.integers(0, 1), max_size=7)
tails = st.integers(0, 15) | st.just(0)


@dataclass
class Cell:
    """What is cached at one aligned prefix: its last page, and the state after it. 0: nothing. `used`: when."""

    held: dict[Component, int] = field(default_factory=lambda: dict.fromkeys(Component, 0))
    used: dict[Component, int] = field(default_factory=lambda: dict.fromkeys(Component, 0))


@dataclass
class Held:
    prefix: Prefix
    lease: PrefixLease


@dataclass
class Remembered:
    prefix: Prefix
    match: PrefixMatch
    eviction_since: bool = False  # of anything: a refusal may be over-cautious, but only then


class TreeMachine(RuleBasedStateMachine):
    page_size = 4
    components: tuple[Component, ...] = tuple(Component)

    @initialize(window=st.integers(0, 3))
    def start(self, window: int) -> None:
        sizes = [2, self.page_size, self.page_size + 2, 3 * self.page_size + 1]
        self.layout = KvLayout(
            self.page_size,
            full=Component.FULL in self.components,
            window=max(2, sizes[window]) if Component.SWA in self.components else 0,
            state=Component.STATE in self.components,
        )
        self.cache = twin(self.layout)
        self.cells: dict[Prefix, Cell] = {}
        self.held: list[Held] = []
        self.remembered: list[Remembered] = []
        self.next_id = 1
        self.uses = 0

    # ------------------------------------------------------------------------------------ the model

    def tokens(self, symbols: Iterable[int], tail: int) -> I32:
        pages = [[7] * (self.page_size - 1) + [symbol] for symbol in symbols]
        return np.array([token for page in pages for token in page] + [9] * (tail % self.page_size), dtype=np.int32)

    def fresh(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def at(self, prefix: Prefix, component: Component) -> int:
        return self.cells[prefix].held[component] if prefix in self.cells else 0

    def needs(self, prefix: Prefix) -> dict[Component, list[Prefix]]:
        """Of each component the prefixes whose last page, or state, computing on from `prefix` needs."""
        live_from = self.layout.live_from(len(prefix) * self.page_size) // self.page_size
        every = [prefix[:n] for n in range(1, len(prefix) + 1)]
        needed = {Component.FULL: every, Component.SWA: every[live_from:], Component.STATE: every[-1:]}
        return {component: needed[component] for component in self.components}

    def usable(self, prefix: Prefix) -> bool:
        return all(self.at(part, component) for component, parts in self.needs(prefix).items() for part in parts)

    def longest_usable(self, symbols: Prefix) -> Prefix:
        return next(symbols[:n] for n in range(len(symbols), -1, -1) if self.usable(symbols[:n]))

    def locked(self, component: Component) -> set[Prefix]:
        return {part for held in self.held for part in self.needs(held.prefix).get(component, [])}

    def unlocked(self, component: Component) -> set[Prefix]:
        return {prefix for prefix in self.cells if self.at(prefix, component)} - self.locked(component)

    def counts(self, of: dict[Component, int]) -> GroupCounts:
        return GroupCounts(*(of.get(component, 0) for component in Component))

    def protected(self, prefix: Prefix, start: int) -> dict[Component, list[int]]:
        """The pages that a lease on `prefix` gives, from page `start` on."""
        needed = self.needs(prefix)
        pages = {
            component: [self.at(prefix[:n], component) if prefix[:n] in needed[component] else 0 for n in numbers]
            for component in self.layout.paged
            for numbers in [range(start + 1, len(prefix) + 1)]
        }
        return pages | {Component.STATE: [self.at(part, Component.STATE) for part in needed.get(Component.STATE, [])]}

    def forget(self, evicted: Component, gone: GroupPages) -> None:
        lost = {component: self.owners(component, gone.of(component).tolist()) for component in Component}
        for component, prefixes in lost.items():
            assert not prefixes & self.locked(component), "evicted under a lease"
            if component is not evicted:  # with a FULL page goes all that is cached at it, else nothing does
                goes_too = lost[evicted] if evicted is Component.FULL else set()
                assert prefixes == {prefix for prefix in goes_too if self.at(prefix, component)}
        uses = [self.cells[prefix].used[evicted] for prefix in lost[evicted]]
        left = [self.cells[prefix].used[evicted] for prefix in self.unlocked(evicted) - lost[evicted]]
        assert not left or not uses or max(uses) <= min(left), "not the least recently used"
        for component, prefixes in lost.items():
            for prefix in prefixes:
                self.cells[prefix].held[component] = 0
        if Component.FULL in self.components:
            kept = {prefix for prefix in self.cells if self.at(prefix, Component.FULL)}
            assert all(prefix[:-1] in kept for prefix in kept if len(prefix) > 1), "not a leaf"
        for memory in self.remembered:
            memory.eviction_since |= any(lost.values())

    def owners(self, component: Component, ids: list[int]) -> set[Prefix]:
        found = {prefix for prefix in self.cells if self.at(prefix, component) in ids}
        assert len(found) == len(ids) == len(set(ids)), "evicted what was not cached, or something twice"
        return found

    # ------------------------------------------------------------------------------------ the rules

    @rule(symbols=page_symbols, tail=tails)
    def match(self, symbols: list[int], tail: int) -> None:
        match = self.cache.match_prefix(self.tokens(symbols, tail))
        known = self.longest_usable(tuple(symbols))
        assert match.length == len(known) * self.page_size
        needed = self.needs(known)
        pinned = {component: len(set(needed[component]) - self.locked(component)) for component in needed}
        assert self.cache.evictable_in(match) == self.counts(pinned)
        if known:
            self.remembered.append(Remembered(known, match))

    @precondition(lambda self: self.remembered)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        self.do_lock(self.remembered.pop(data.draw(st.integers(0, len(self.remembered) - 1))))

    @precondition(lambda self: any(self.cache.evictable))
    @rule(symbols=page_symbols, data=st.data(), count=st.integers(1, 4))
    def lock_too_late(self, symbols: list[int], data: st.DataObject, count: int) -> None:
        self.match(symbols, 0)
        self.evict(data, count)
        if self.remembered:
            self.do_lock(self.remembered.pop())

    def do_lock(self, memory: Remembered) -> None:
        lease = self.cache.lock(memory.match)
        if lease is None:
            assert memory.eviction_since
            return
        assert self.usable(memory.prefix)
        assert lease.length == len(memory.prefix) * self.page_size
        self.held.append(Held(memory.prefix, lease))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), used=st.booleans())
    def unlock(self, data: st.DataObject, used: bool) -> None:
        self.do_unlock(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))), used)

    def do_unlock(self, held: Held, used: bool = True) -> None:
        self.cache.unlock(held.lease, used=used)
        self.uses += used
        for component, parts in self.needs(held.prefix).items():
            for part in parts if used else []:
                self.cells[part].used[component] = self.uses
        with pytest.raises(OwnershipError):
            self.cache.unlock(held.lease)

    @rule(symbols=page_symbols, tail=tails, dead=st.integers(0, 7), slot=st.booleans(), data=st.data())
    def insert(self, symbols: list[int], tail: int, dead: int, slot: bool, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from([None, *range(len(self.held))]))
        kept = self.do_insert(None if old is None else self.held.pop(old), symbols, tail, dead, slot)
        if kept is not None:
            self.held.append(kept)

    @rule(symbols=page_symbols, more=page_symbols, tail=tails, dead=st.integers(0, 2), ends=st.booleans())
    def serve(self, symbols: list[int], more: list[int], tail: int, dead: int, ends: bool) -> None:
        """A request's life: its prefix is looked up and locked, two chunks are cached, and perhaps it ends."""
        self.match(symbols, tail)
        held = None
        if self.remembered and self.longest_usable(tuple(symbols)):
            self.do_lock(self.remembered.pop())
            held = self.held.pop()
        start = 0 if held is None else len(held.prefix)
        held = self.do_insert(held, symbols[start:], 0, dead, True)
        start = 0 if held is None else len(held.prefix)
        held = self.do_insert(held, [*symbols, *more][start:], tail, dead, True)
        if held is not None and ends:
            self.do_unlock(held)
        elif held is not None:
            self.held.append(held)

    def do_insert(self, held: Held | None, symbols: list[int], tail: int, dead: int, slot: bool) -> Held | None:
        start = () if held is None else held.prefix
        whole = start + tuple(symbols)
        tokens = self.tokens(whole, tail)
        given = self.offer(len(symbols) + (tail % self.page_size > 0), dead, slot)
        arrays = GroupPages(*(np.array(given[component], dtype=np.int32) for component in Component))
        exact = len(tokens) == len(whole) * self.page_size
        end, taken, duplicate, tail_ids = self.expect(start, whole, given, exact)
        kept = self.cache.insert(None if held is None else held.lease, tokens, arrays)
        for found, expected in ((kept.taken, taken), (kept.duplicate, duplicate), (kept.tail, tail_ids)):
            for component in Component:
                assert sorted(found.of(component).tolist()) == expected[component]
        if held is not None:
            with pytest.raises(OwnershipError):
                self.cache.unlock(held.lease)  # it was consumed
        if not end:
            assert kept.lease is None
            return None
        assert kept.lease is not None
        assert kept.lease.length == len(end) * self.page_size
        self.uses += 1
        for component, parts in self.needs(start).items():
            for part in parts if held is not None and component is not Component.FULL else []:
                self.cells[part].used[component] = self.uses
        for n in range(len(start) + 1, len(end) + 1):
            self.cells[end[:n]].used[Component.SWA] = self.uses
        for component, ids in self.protected(end, len(start)).items():
            assert kept.pages.of(component).tolist() == ids
        return Held(end, kept.lease)

    def offer(self, pages: int, dead: int, slot: bool) -> dict[Component, list[int]]:
        given: dict[Component, list[int]] = {component: [] for component in Component}
        if self.layout.full:
            given[Component.FULL] = self.fresh(pages)
        if self.layout.window:
            given[Component.SWA] = [0] * min(dead, pages) + self.fresh(max(0, pages - dead))
        if self.layout.state and slot:
            given[Component.STATE] = self.fresh(1)
        return given

    def expect(
        self, start: Prefix, whole: Prefix, given: dict[Component, list[int]], exact: bool
    ) -> tuple[Prefix, dict[Component, list[int]], dict[Component, list[int]], dict[Component, list[int]]]:
        """Where the new lease ends, and what becomes of each id that is given; puts the taken ones into the cells."""
        before = {whole[:n]: dict(self.cells[whole[:n]].held) for n in range(len(whole) + 1) if whole[:n] in self.cells}
        merged: dict[Component, dict[Prefix, int]] = {component: {} for component in Component}
        for component in self.layout.paged:
            numbers = range(len(start) + 1, len(whole) + 1)
            merged[component] = {whole[:n]: one for n, one in zip(numbers, given[component], strict=False)}
        if given[Component.STATE] and exact:
            merged[Component.STATE] = {whole: given[Component.STATE][0]}

        def usable(prefix: Prefix) -> bool:
            return prefix == start or all(
                self.at(part, component) or merged[component].get(part, 0)
                for component, parts in self.needs(prefix).items()
                for part in parts
            )

        end = next(whole[:n] for n in range(len(whole), len(start) - 1, -1) if usable(whole[:n]))
        taken: dict[Component, list[int]] = {component: [] for component in Component}
        duplicate: dict[Component, list[int]] = {component: [] for component in Component}
        for component, ids in merged.items():
            for prefix, one in ids.items():
                if one and prefix and len(prefix) <= len(end):
                    known = before.get(prefix, {}).get(component, 0)
                    (duplicate if known else taken)[component].append(one)
                    if not known:
                        cell = self.cells.setdefault(prefix, Cell())
                        cell.held[component], cell.used[component] = one, 0
        for n in range(len(start) + 1, len(end) + 1):
            self.cells.setdefault(end[:n], Cell())
        used = {component: {*taken[component], *duplicate[component], 0} for component in Component}
        tail = {component: [one for one in given[component] if one not in used[component]] for component in Component}
        return end, taken, duplicate, tail

    @precondition(lambda self: self.held)
    @rule(data=st.data(), times=st.sampled_from([2, 20, 100]))
    def copy(self, data: st.DataObject, times: int) -> None:
        """What is only copied from keeps its turn, however often; the queues are tidied up on the way."""
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.do_unlock(held, used=False)
        match = self.cache.match_prefix(self.tokens(held.prefix, 0))
        for _ in range(times):
            lease = self.cache.lock(match)
            assert lease is not None
            self.cache.unlock(lease, used=False)

    @precondition(lambda self: self.components == (Component.FULL,))
    @rule(count=st.integers(1, 9))
    def foretell(self, count: int) -> None:
        foretold, before = self.cache.coldest(count), self.cache.stats()
        prefixes = [tuple(tokens[self.page_size - 1 :: self.page_size].tolist()) for tokens, _ in foretold]
        assert [match.length for _, match in foretold] == [len(prefix) * self.page_size for prefix in prefixes]
        kept = {prefix for prefix in self.cells if self.at(prefix, Component.FULL)}
        leaves = self.unlocked(Component.FULL) - {prefix[:-1] for prefix in kept}
        assert set(prefixes) <= leaves
        uses = [self.cells[prefix].used[Component.FULL] for prefix in prefixes]
        later = [self.cells[prefix].used[Component.FULL] for prefix in leaves - set(prefixes)]
        assert sorted(uses) == uses
        assert not uses or not later or uses[-1] <= min(later)
        assert bool(prefixes) == bool(leaves)
        again = self.cache.coldest(count)
        assert [tokens.tolist() for tokens, _ in again] == [tokens.tolist() for tokens, _ in foretold]
        assert self.cache.stats().evictable == before.evictable
        if prefixes:
            self.remembered.append(Remembered(prefixes[0], foretold[0][1]))
            gone = self.cache.evict(Component.FULL, 1)
            assert self.owners(Component.FULL, gone.full.tolist()) == {prefixes[0]}
            self.forget(Component.FULL, gone)

    @precondition(lambda self: any(self.cache.evictable))
    @rule(data=st.data(), count=st.integers(1, 9))
    def evict(self, data: st.DataObject, count: int) -> None:
        component = data.draw(st.sampled_from([one for one in Component if self.cache.evictable.of(one)]))
        expected = min(count, len(self.unlocked(component)))
        gone = self.cache.evict(component, count)
        assert len(gone.of(component)) == expected
        self.forget(component, gone)

    @rule(really=st.integers(0, 3))
    def clear(self, really: int) -> None:
        if not really:
            self.do_clear()

    def do_clear(self) -> None:
        expected = {component: {self.at(p, component) for p in self.unlocked(component)} for component in Component}
        gone = self.cache.clear()
        for component, ids in expected.items():
            assert len(gone.of(component)) == len(ids)
            assert set(gone.of(component).tolist()) == ids
            for prefix in self.owners(component, gone.of(component).tolist()):
                self.cells[prefix].held[component] = 0
        for memory in self.remembered:
            memory.eviction_since = True

    @invariant()
    def tree_says_what_the_dict_says(self) -> None:
        self.cache.check([held.lease for held in self.held])
        evictable, locked = self.cache.cached_pages()
        for component in Component:
            for found, prefixes in ((evictable, self.unlocked(component)), (locked, self.locked(component))):
                expected = sorted(self.at(prefix, component) for prefix in prefixes)
                assert sorted(found.of(component).tolist()) == expected
        assert (self.cache.evictable, self.cache.locked) == (evictable.counts, locked.counts)
        for held in self.held:
            pages = self.cache.pages(held.lease)
            for component, ids in self.protected(held.prefix, 0).items():
                assert pages.of(component).tolist() == ids

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for held in self.held:
            self.cache.unlock(held.lease)
        self.held = []
        self.do_clear()
        stats = self.cache.stats()
        assert (stats.nodes, stats.leases, stats.evictable, stats.locked) == (0, 0, GroupCounts(), GroupCounts())


COMBINATIONS = {
    "Full": (Component.FULL,),
    "Swa": (Component.SWA,),
    "State": (Component.STATE,),
    "FullSwa": (Component.FULL, Component.SWA),
    "FullState": (Component.FULL, Component.STATE),
    "SwaState": (Component.SWA, Component.STATE),
    "FullSwaState": (Component.FULL, Component.SWA, Component.STATE),
}

for _name, _components in COMBINATIONS.items():
    for _page_size in (1, 4, 16):
        _machine = type(
            f"{_name}Page{_page_size}Machine",
            (TreeMachine,),
            {"page_size": _page_size, "components": _components},
        )
        _case = operator.attrgetter("TestCase")(_machine)
        _case.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
        globals()[f"Test{_name}Page{_page_size}"] = _case
        _many = type(f"{_name}Page{_page_size}ManyMachine", (_machine,), {})
        _case = pytest.mark.slow(operator.attrgetter("TestCase")(_many))
        _case.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
        globals()[f"TestMany{_name}Page{_page_size}"] = _case
