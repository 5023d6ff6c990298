"""The prefix tree in both implementations, each for itself and both at once, compared in every answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import pytest

from baton.common.kv.errors import OwnershipError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.compiled import CompiledLibrary, load_library
from baton.common.kv.prefix.interface import (
    I32,
    GroupCounts,
    GroupPages,
    Inserted,
    PrefixCache,
    PrefixLease,
    PrefixMatch,
    PrefixStats,
)
from baton.common.kv.prefix.radix_cpp import RadixCacheCpp
from baton.common.kv.prefix.tree import UnifiedRadixCache
from baton.common.native import BuildError

T = TypeVar("T")
Make = Callable[[KvLayout], PrefixCache]


@functools.cache
def library() -> CompiledLibrary | str:
    """Or why there is none."""
    try:
        return load_library()
    except BuildError as error:
        return str(error)


def compiled(layout: KvLayout) -> RadixCacheCpp:
    found = library()
    if isinstance(found, str):
        pytest.skip(found)
    return RadixCacheCpp(found, layout)


IMPLEMENTATIONS: dict[str, Make] = {"python": UnifiedRadixCache, "compiled": compiled}


def ints(*values: int) -> I32:
    return np.array(values, dtype=np.int32)


def given(full: Sequence[int] = (), swa: Sequence[int] = (), state: int = 0) -> GroupPages:
    return GroupPages(ints(*full), ints(*swa), ints(*([state] if state else [])))


class Trees:
    """Makes trees of one implementation."""

    def __init__(self, make: Make) -> None:
        self.of = make

    def full(self, page_size: int = 1) -> PrefixCache:
        return self.of(KvLayout(page_size))

    def sliding(self) -> PrefixCache:
        """A window of 3 tokens: whoever stands at length L needs the pages of L - 2 and L - 1."""
        return self.of(KvLayout(1, window=3))

    def recurrent(self, page_size: int = 1) -> PrefixCache:
        return self.of(KvLayout(page_size, state=True))


def held(lease: PrefixLease | None) -> PrefixLease:
    assert lease is not None
    return lease


def twin(layout: KvLayout) -> PrefixCache:
    """Both, compared in every answer; the one in Python alone where there is no compiler."""
    return UnifiedRadixCache(layout) if isinstance(library(), str) else TwinCache(layout)


class _TwinLease(PrefixLease):
    __slots__ = ("pair",)

    def __init__(self, ours: PrefixLease, theirs: PrefixLease) -> None:
        assert ours.length == theirs.length
        super().__init__(ours.length)
        self.pair = (ours, theirs)


class _TwinMatch(PrefixMatch, frozen=True):
    pair: tuple[PrefixMatch, PrefixMatch]


class TwinCache:
    """Asks both implementations, and asserts that they say the same, in the same order where there is one."""

    def __init__(self, layout: KvLayout) -> None:
        self.ours = UnifiedRadixCache(layout)
        self.theirs = compiled(layout)

    @property
    def evictable(self) -> GroupCounts:
        return same(self.ours.evictable, self.theirs.evictable)

    @property
    def locked(self) -> GroupCounts:
        return same(self.ours.locked, self.theirs.locked)

    def match_prefix(self, tokens: I32) -> PrefixMatch:
        return both_matches(self.ours.match_prefix(tokens), self.theirs.match_prefix(tokens))

    def evictable_in(self, match: PrefixMatch) -> GroupCounts:
        assert isinstance(match, _TwinMatch)
        return same(self.ours.evictable_in(match.pair[0]), self.theirs.evictable_in(match.pair[1]))

    def lock(self, match: PrefixMatch) -> PrefixLease | None:
        assert isinstance(match, _TwinMatch)
        return both_leases(self.ours.lock(match.pair[0]), self.theirs.lock(match.pair[1]))

    def unlock(self, lease: PrefixLease, *, used: bool = True) -> None:
        ours, theirs = pair_of(lease)
        both(lambda: self.ours.unlock(ours, used=used), lambda: self.theirs.unlock(theirs, used=used))

    def pages(self, lease: PrefixLease) -> GroupPages:
        ours, theirs = pair_of(lease)
        return same_pages(*both(lambda: self.ours.pages(ours), lambda: self.theirs.pages(theirs)))

    def insert(self, lease: PrefixLease | None, tokens: I32, given: GroupPages) -> Inserted:
        ours, theirs = (None, None) if lease is None else pair_of(lease)
        first, second = both(
            lambda: self.ours.insert(ours, tokens, given), lambda: self.theirs.insert(theirs, tokens, given)
        )
        assert (ours is None or ours.live) == (theirs is None or theirs.live)
        return Inserted(
            lease=both_leases(first.lease, second.lease),
            taken=same_pages(first.taken, second.taken),
            duplicate=same_pages(first.duplicate, second.duplicate),
            tail=same_pages(first.tail, second.tail),
            pages=same_pages(first.pages, second.pages),
        )

    def coldest(self, count: int) -> list[tuple[I32, PrefixMatch]]:
        ours, theirs = self.ours.coldest(count), self.theirs.coldest(count)
        assert [tokens.tolist() for tokens, _ in ours] == [tokens.tolist() for tokens, _ in theirs]
        return [(tokens, both_matches(one, other)) for (tokens, one), (_, other) in zip(ours, theirs, strict=True)]

    def evict(self, component: Component, count: int) -> GroupPages:
        return same_pages(self.ours.evict(component, count), self.theirs.evict(component, count))

    def clear(self) -> GroupPages:
        return same_pages(self.ours.clear(), self.theirs.clear())

    def cached_pages(self) -> tuple[GroupPages, GroupPages]:
        ours, theirs = self.ours.cached_pages(), self.theirs.cached_pages()
        for one, other in zip(ours, theirs, strict=True):  # sets, in any order
            assert [sorted(ids.tolist()) for ids in one] == [sorted(ids.tolist()) for ids in other]
        return ours

    def check(self, leases: Iterable[PrefixLease]) -> None:
        pairs = [pair_of(lease) for lease in leases]
        self.ours.check([ours for ours, _ in pairs])
        self.theirs.check([theirs for _, theirs in pairs])
        same(self.ours.stats(), self.theirs.stats())

    def stats(self) -> PrefixStats:
        return same(self.ours.stats(), self.theirs.stats())


def same(ours: T, theirs: T) -> T:
    assert ours == theirs
    return ours


def same_pages(ours: GroupPages, theirs: GroupPages) -> GroupPages:
    same([ids.tolist() for ids in ours], [ids.tolist() for ids in theirs])
    return ours


def both(ours: Callable[[], T], theirs: Callable[[], T]) -> tuple[T, T]:
    """What the two answer, or the error that both raise."""
    try:
        answer = ours()
    except OwnershipError as error:
        with pytest.raises(type(error)):
            theirs()
        raise
    return answer, theirs()


def both_leases(ours: PrefixLease | None, theirs: PrefixLease | None) -> PrefixLease | None:
    if ours is None or theirs is None:
        assert ours is theirs
        return None
    return _TwinLease(ours, theirs)


def both_matches(ours: PrefixMatch, theirs: PrefixMatch) -> PrefixMatch:
    return _TwinMatch(same(ours.length, theirs.length), (ours, theirs))


def pair_of(lease: PrefixLease) -> tuple[PrefixLease, PrefixLease]:
    assert isinstance(lease, _TwinLease)
    return lease.pair
