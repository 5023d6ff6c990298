"""`InvariantChecker` proves that a pool's books add up; `who_holds` looks one page up. Owns no state, changes nothing.

What holds after every transition, given every live record exactly once:
 C1 conservation: each allocatable page is free, cached, or in exactly one record's own range; the null page in none.
 C2 each record: 0 <= protected <= committed <= allocated <= row width, protected page-aligned and equal to its lease.
 C3 a record's protected entries are the tree's pages of its lease, so they are cached and locked.
 C4 each taken row belongs to one record, each record has one taken row.
 C5 the tree is whole and its locks are exactly the records' leases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from baton.common.kv.census import Census, Holding, OwnerClass
from baton.common.kv.errors import InvariantViolation, OwnershipError
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.interface import I32
from baton.common.kv.record import ReqKvInfo
from baton.common.kv.transitions import Transition
from baton.common.units import pages_for_tokens, whole_pages

__all__ = ["Census", "Holding", "InvariantChecker", "InvariantViolation", "OwnerClass", "PageOwner", "who_holds"]


@dataclass(frozen=True, slots=True)
class PageOwner:
    """Who holds a page. `since_s` and `history` are known as far back as the pool's transition log reaches."""

    page: int
    owner: OwnerClass | Literal["free", "cached", "nobody"]
    owner_id: str  # "" when the owner is not a record
    readers: tuple[str, ...]  # owner ids of the records whose locked prefix contains the page
    since_s: float | None
    history: tuple[Transition, ...]


def who_holds(pool: KvPool, page: int, holdings: Iterable[Holding]) -> PageOwner:
    """ "nobody" is a leak. Raises ValueError for a page that the pool does not have."""
    if not 1 <= page <= pool.total_pages:
        raise ValueError(f"page {page}: this pool has pages 1 to {pool.total_pages}")
    history = () if pool.transitions is None else pool.transitions.of_page(page)
    owner: OwnerClass | Literal["free", "cached", "nobody"] = "nobody"
    owner_id = ""
    readers: list[str] = []
    if pool.allocator.is_free(page):
        owner = "free"
    for holding in holdings:
        index = np.flatnonzero(pool.pages_for_row(holding.record, holding.record.kv_allocated_len) == page)
        if not len(index):
            continue
        if index[0] < whole_pages(holding.record.cache_protected_len, pool.page_size):
            readers.append(holding.owner_id)
        else:
            owner, owner_id = holding.owner_class, holding.owner_id
    if owner == "nobody" and any((pages.full == page).any() for pages in pool.prefix.cached_pages()):
        owner = "cached"
    since_s = history[-1].at_s if history else None
    return PageOwner(page, owner, owner_id, tuple(readers), since_s, history)


class InvariantChecker:
    """Costs a walk over the tree and the records: for every step in tests and simulation, for idle moments in
    production."""

    def check(self, pool: KvPool, holdings: Iterable[Holding]) -> Census:
        """Raises InvariantViolation at the first rule that does not hold; returns the census when all do."""
        held = list(holdings)
        for holding in held:
            _check_record(pool, holding)
        _check_rows(pool, held)
        evictable, locked = pool.prefix.cached_pages()
        _check_pages(pool, held, np.concatenate((evictable.full, locked.full)))
        try:
            pool.allocator.check()
            pool.prefix.check([h.record.prefix_lock for h in held if h.record.prefix_lock is not None])
        except InvariantViolation:
            raise
        except OwnershipError as error:
            raise InvariantViolation(str(error)) from error
        census = pool.census(held)
        if census.unaccounted:
            raise InvariantViolation(f"C1: {census}")
        return census


def _check_record(pool: KvPool, holding: Holding) -> None:
    record = holding.record
    if not record.live:
        raise InvariantViolation(f"{_name(holding)} holds {record!r}")
    protected = record.cache_protected_len
    ordered = 0 <= protected <= record.kv_committed_len <= record.kv_allocated_len <= pool.max_context_len
    lease = record.prefix_lock
    leased = 0 if lease is None else lease.length
    if not ordered or protected % pool.page_size or protected != leased:
        raise InvariantViolation(
            f"C2: {_name(holding)}: {record!r}, lease over {leased} tokens, row width {pool.max_context_len}"
            + _row_history(pool, record.req_pool_idx)
        )
    if lease is not None:
        entries = pool.pages_for_row(record, protected)
        leased_pages = pool.prefix.pages(lease).full
        if not np.array_equal(entries, leased_pages):
            raise InvariantViolation(
                f"C3: {_name(holding)} reads pages {entries.tolist()}, the tree has {leased_pages.tolist()}"
                + _row_history(pool, record.req_pool_idx)
            )


def _check_rows(pool: KvPool, held: Sequence[Holding]) -> None:
    owners: dict[int, Holding] = {}
    for holding in held:
        row = holding.record.req_pool_idx
        if row in owners:
            raise InvariantViolation(f"C4: row {row} belongs to {_name(owners[row])} and to {_name(holding)}")
        owners[row] = holding
    taken = set(pool.rows.taken_rows())
    if taken != set(owners):
        raise InvariantViolation(
            f"C4: rows {sorted(taken - set(owners))} are taken by nobody, rows {sorted(set(owners) - taken)} are held"
            " but not taken" + "".join(_row_history(pool, row) for row in sorted(taken ^ set(owners)))
        )


def _check_pages(pool: KvPool, held: Sequence[Holding], cached: I32) -> None:
    own = [_own_pages(pool, holding.record) for holding in held]
    everything = np.concatenate([pool.allocator.free_page_ids(), cached, *own])
    counts = np.bincount(everything, minlength=pool.total_pages + 1)
    expected = np.ones(pool.total_pages + 1, dtype=counts.dtype)
    expected[0] = 0
    if np.array_equal(counts, expected):
        return
    if len(counts) > len(expected):
        raise InvariantViolation(f"C1: page {len(counts) - 1} is in use; the pool has {pool.total_pages}")
    lines = []
    for page in np.flatnonzero(counts != expected)[:8].tolist():
        owners = ["free"] if pool.allocator.is_free(page) else []
        owners += ["cached"] * int((cached == page).sum())
        owners += [_name(h) for h, pages in zip(held, own, strict=True) for _ in range(int((pages == page).sum()))]
        lines.append(f"page {page} is owned by {' and by '.join(owners) or 'nobody'}" + _page_history(pool, page))
    raise InvariantViolation("C1: " + "\n".join(lines))


def _own_pages(pool: KvPool, record: ReqKvInfo) -> I32:
    first = whole_pages(record.cache_protected_len, pool.page_size)
    return pool.rows.view(record.req_pool_idx, first, pages_for_tokens(record.kv_allocated_len, pool.page_size))


def _name(holding: Holding) -> str:
    return f"{holding.owner_class} {holding.owner_id}"


def _page_history(pool: KvPool, page: int) -> str:
    return "" if pool.transitions is None else _lines(pool.transitions.of_page(page))


def _row_history(pool: KvPool, row: int) -> str:
    return "" if pool.transitions is None else _lines(pool.transitions.of_row(row))


def _lines(history: Sequence[Transition]) -> str:
    return "".join(f"\n    {entry}" for entry in history[-8:])
