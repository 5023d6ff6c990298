"""`InvariantChecker` proves that a pool's books add up; `who_holds` looks one page up. Owns no state, changes nothing.

What holds after every transition, given every live record exactly once:
 C1 conservation: each allocatable page (or slot) of each component is free, cached, or one record's own; the null page
    is nobody's.
 C2 each record: 0 <= protected <= committed <= allocated <= row width, protected page-aligned and equal to its lease.
 C3 a record's protected entries are the tree's pages of its lease, so they are cached and locked.
 C4 each taken row belongs to one record, each record has one taken row.
 C5 the tree is whole and its locks are exactly the leases of the records and of those who copy.
 C6 sliding window: what is needed behind `committed` is there, what the eviction cursor has passed is not; each record
    is promised what its length may need, and owns and locks no more than that; the promises add up to what the pool
    counts, at most all it has.
 C7 recurrent state: what a record is still to copy its state from is the checkpoint that its lease protects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from baton.common.errors import ErrorCode, RequestError
from baton.common.kv.census import Census, Holding, OwnerClass
from baton.common.kv.errors import InvariantViolation, OwnershipError
from baton.common.kv.layout import Component
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.interface import I32
from baton.common.kv.record import NO_COPY
from baton.common.kv.transitions import Transition
from baton.common.units import pages_for_tokens

__all__ = ["Census", "Holding", "InvariantChecker", "InvariantViolation", "OwnerClass", "PageOwner", "who_holds"]

SHOWN_TRANSITIONS = 8


@dataclass(frozen=True, slots=True)
class PageOwner:
    """Who holds a page. `since_s` and `history` are known as far back as the pool's transition log reaches."""

    component: Component
    page: int  # or slot
    owner: OwnerClass | Literal["free", "cached", "nobody"]
    owner_id: str  # "" when the owner is not a record
    readers: tuple[str, ...]  # owner ids of the records whose locked prefix contains the page
    since_s: float | None
    history: tuple[Transition, ...]

    def told(self, now_s: float) -> str:
        """For people."""
        owner = f"{self.owner} {self.owner_id}".rstrip()
        since = "" if self.since_s is None else f" for {now_s - self.since_s:.1f} s"
        readers = f", read by {', '.join(self.readers)}" if self.readers else ""
        history = "".join(
            f"\n    {now_s - one.at_s:.1f} s ago: {one.what}" for one in self.history[-SHOWN_TRANSITIONS:]
        )
        return f"{_named(self.component, self.page)}: {owner}{since}{readers}{history}"


def who_holds(pool: KvPool, page: int, holdings: Iterable[Holding], component: Component | None = None) -> PageOwner:
    """Of the pool's first component unless another is named. "nobody" is a leak. Raises RequestError for a component
    or a page that the pool does not have."""
    component = component or pool.main
    if component not in pool.layout.components:
        have = " and ".join(pool.layout.components)
        raise RequestError(ErrorCode.INVALID_REQUEST, f"this model's KV has no {component}: it has {have}", "component")
    total = pool.supply.total(component)
    if not 1 <= page <= total:
        message = f"there is no {_named(component, page)}: they are numbered from 1 to {total}"
        raise RequestError(ErrorCode.INVALID_REQUEST, message, "page")
    history = () if pool.transitions is None else pool.transitions.of_page(page, component)
    owner: OwnerClass | Literal["free", "cached", "nobody"] = "nobody"
    owner_id = ""
    readers: list[str] = []
    if pool.supply.allocators[component].is_free(page):
        owner = "free"
    for holding in holdings:
        lease = holding.record.prefix_lock
        if (pool.parts.own_ids(holding.record, component) == page).any():
            owner, owner_id = holding.owner_class, holding.owner_id
        elif lease is not None and (pool.prefix.pages(lease).of(component) == page).any():
            readers.append(holding.owner_id)
    if owner == "nobody" and any((pages.of(component) == page).any() for pages in pool.prefix.cached_pages()):
        owner = "cached"
    since_s = history[-1].at_s if history else None
    return PageOwner(component, page, owner, owner_id, tuple(readers), since_s, history)


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
        for component in pool.layout.components:
            _check_pages(pool, held, component, np.concatenate((evictable.of(component), locked.of(component))))
        _check_promises(pool, held)
        try:
            for allocator in pool.supply.allocators.values():
                allocator.check()
            leases = [h.record.prefix_lock for h in held if h.record.prefix_lock is not None]
            pool.prefix.check([*leases, *pool.copying])
        except InvariantViolation:
            raise
        except OwnershipError as error:
            raise InvariantViolation(str(error)) from error
        census = pool.census(held)
        if any(one.unaccounted for one in (census, *census.others)):
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
    _check_protected(pool, holding)
    _check_window(pool, holding)
    expected = 0 if lease is None else pool.prefix.pages(lease).state_slot
    if pool.states is not None and record.state_source not in (NO_COPY, expected):
        raise InvariantViolation(f"C7: {_name(holding)} would copy state {record.state_source}, not {expected}")


def _check_protected(pool: KvPool, holding: Holding) -> None:
    record = holding.record
    if record.prefix_lock is None:
        return
    leased, protected = pool.prefix.pages(record.prefix_lock), record.cache_protected_len
    entries = {Component.FULL: pool.parts.full_view(record, 0, protected)}
    if pool.window is not None:
        entries[Component.SWA] = pool.window.row(record, 0, protected)
    for component in pool.layout.paged:
        ours, theirs = entries[component], leased.of(component)
        if not np.array_equal(ours, theirs):
            raise InvariantViolation(
                f"C3: {_name(holding)} reads {component} pages {ours.tolist()}, the tree has {theirs.tolist()}"
                + _row_history(pool, record.req_pool_idx)
            )


def _check_window(pool: KvPool, holding: Holding) -> None:
    window, record = pool.window, holding.record
    if window is None:
        return
    committed, protected = record.kv_committed_len, record.cache_protected_len
    needed = window.row(record, pool.layout.live_from(committed), committed)
    passed = window.row(record, window.dead_lo(record), max(record.swa_evicted_seqlen, window.dead_lo(record)))
    # A row has no pages of its own beyond what is allocated.
    allocated = pages_for_tokens(record.kv_allocated_len, pool.page_size)
    beyond = window.rows.view(record.req_pool_idx, allocated, window.rows.max_pages)
    if not needed.all() or passed.any() or beyond.any():
        raise InvariantViolation(
            f"C6: {_name(holding)}: {record!r} has sliding pages {needed.tolist()} behind {committed}, and"
            f" {passed.tolist()} from {protected} to its cursor {record.swa_evicted_seqlen}"
            + _row_history(pool, record.req_pool_idx)
        )
    held = window.held_pages(record)
    if held > record.swa_promised:
        raise InvariantViolation(f"C6: {_name(holding)} holds {held} sliding pages, promised {record.swa_promised}")
    wanted = window.pages_for(record.kv_allocated_len)
    if record.swa_promised != wanted:
        raise InvariantViolation(f"C6: {_name(holding)} is promised {record.swa_promised} sliding pages, not {wanted}")


def _check_promises(pool: KvPool, held: Sequence[Holding]) -> None:
    if pool.window is None:
        return
    promised = sum(one.record.swa_promised for one in held)
    if promised != pool.window.promised or promised > pool.window.total_pages:
        counted, total = pool.window.promised, pool.window.total_pages
        raise InvariantViolation(f"C6: {promised} sliding pages are promised, counted as {counted} of {total}")


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


def _check_pages(pool: KvPool, held: Sequence[Holding], component: Component, cached: I32) -> None:
    allocator, total = pool.supply.allocators[component], pool.supply.total(component)
    own = [pool.parts.own_ids(holding.record, component) for holding in held]
    everything = np.concatenate([allocator.free_page_ids(), cached, *own])
    counts = np.bincount(everything, minlength=total + 1)
    expected = np.ones(total + 1, dtype=counts.dtype)
    expected[0] = 0
    if np.array_equal(counts, expected):
        return
    if len(counts) > len(expected):
        raise InvariantViolation(f"C1: {_named(component, len(counts) - 1)} is in use; the pool has {total}")
    lines = []
    for page in np.flatnonzero(counts != expected)[:8].tolist():
        owners = ["free"] if allocator.is_free(page) else []
        owners += ["cached"] * int((cached == page).sum())
        owners += [_name(h) for h, pages in zip(held, own, strict=True) for _ in range(int((pages == page).sum()))]
        history = "" if pool.transitions is None else _lines(pool.transitions.of_page(page, component))
        lines.append(f"{_named(component, page)} is owned by {' and by '.join(owners) or 'nobody'}{history}")
    raise InvariantViolation("C1: " + "\n".join(lines))


def _named(component: Component, number: int) -> str:
    return f"{component} {'slot' if component is Component.STATE else 'page'} {number}"


def _name(holding: Holding) -> str:
    return f"{holding.owner_class} {holding.owner_id}"


def _row_history(pool: KvPool, row: int) -> str:
    return "" if pool.transitions is None else _lines(pool.transitions.of_row(row))


def _lines(history: Sequence[Transition]) -> str:
    return "".join(f"\n    {entry}" for entry in history[-SHOWN_TRANSITIONS:])
