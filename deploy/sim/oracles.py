"""What must be true of a worker beyond who owns which page: what is cached is what it is named, admission keeps its
promises and lets nobody wait for nothing, sessions are bounded.

Owns: what was seen of one worker before, for what can only be judged by comparing. Never: changes anything, or asks
the code that it judges how something is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from baton.common.engine.batch import Batch
from baton.common.engine.fake_answer import fake_kept
from baton.common.engine.fake_model import U64
from baton.common.ids import SessionId
from baton.common.kv.census import OwnerClass
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.parts import LEAST_STATE_SLOTS
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.interface import I32
from baton.common.kv.record import ReqKvInfo
from baton.common.kv.tiers.keys import PageKey, PageKeys
from baton.common.units import pages_for_tokens
from baton.decode.admission import ActiveRequest
from baton.decode.core import DecodeCore
from baton.decode.request import THINKING_TAIL
from baton.prefill.core import PrefillCore

if TYPE_CHECKING:
    from baton.deploy.sim.clients import ClientRequest
    from baton.deploy.sim.worker import WorkerProcess

SESSION_SLACK_S = 3.0
"""So late a session may end: an engine sees its timers between two steps, and clocks differ."""


def assert_cached_right(
    worker: WorkerProcess, tokens: I32, expected: Callable[[], Mapping[Component, U64]], seen: set[bytes]
) -> None:
    """What the tree has of these tokens is what their KV must be: `expected`, of each position. `seen`: what the worker
    has cached and was looked at, at this moment."""
    pool, layout = worker.pool, worker.pool.layout
    lease = pool.begin_copy(pool.prefix.match_prefix(tokens))
    if lease is None:
        return
    pages, length = pool.prefix.pages(lease), lease.length
    pool.end_copy(lease)
    if (cached := tokens[:length].tobytes()) in seen:
        return
    seen.add(cached)
    for component in layout.components:
        ids = pages.of(component)
        found = worker.runner.kept(component, ids)
        want = expected()[component][length - 1 if component is Component.STATE else 0 : length]
        wrong = (found.reshape(-1) != want).reshape(found.shape).any(axis=1) & (ids != 0)
        if component is Component.SWA:
            wrong[: layout.live_from(length) // layout.page_size] = False
        if wrong.any():
            what = f"{component} {ids[wrong].tolist()} for {length} tokens"
            raise AssertionError(f"{worker.stamp.worker} has cached {what} whose KV is not in there")


class StoredPages:
    """All that was ever written to the tiers of a world: by its name, what was in it. `keys` None: it has none."""

    def __init__(self, keys: PageKeys | None) -> None:
        self._keys = keys
        self._content: dict[PageKey, U64] = {}

    def wrote(self, key: PageKey, content: U64) -> None:
        before = self._content.setdefault(key, content)
        assert np.array_equal(before, content), f"two pages named {key.hex()} that differ were given to the tiers"

    def assert_right(self, tokens: I32) -> None:
        """What goes by the names of these tokens' pages is their KV."""
        if self._keys is None or not self._content:
            return
        size, kept = self._keys.page_size, fake_kept(tokens, KvLayout(self._keys.page_size))[Component.FULL]
        for number, key in enumerate(self._keys.of(tokens)):
            content, right = self._content.get(key), kept[number * size : (number + 1) * size]
            assert content is None or np.array_equal(content, right), (
                f"page {number} of {len(tokens)} tokens is not that"
            )


class AdmissionOracle:
    """Of one decode worker: looks at it after events."""

    def __init__(self, pool: KvPool, reserved_tokens: int, max_active: int) -> None:
        self._pool = pool
        self._reserved_tokens = reserved_tokens
        self._max_active = max_active
        self._rows: frozenset[int] = frozenset()

    def look(self, core: DecodeCore, records: Sequence[ReqKvInfo]) -> None:
        rows = frozenset([record.req_pool_idx for record in records])
        new, self._rows = rows - self._rows, rows
        if new:
            active = [*core.active()]
            assert len(active) <= self._max_active, f"{len(active)} own pages, where {self._max_active} may"
        if self._pool.copying:
            return  # a lease for the tiers keeps pages that were to be had when somebody was admitted
        if new:
            self._assert_room(active, new)
        if core.queued and not core.pages_coming_back:
            self._assert_nobody_waits_in_vain([*core.active()])

    def _assert_room(self, active: Sequence[ActiveRequest], new: frozenset[int]) -> None:
        """With somebody beside it, nobody is let in unless all can grow by what is reserved, and one running request
        to its end when the others give way."""
        if len(active) < 2:
            return
        for component in self._pool.layout.paged:
            growth = sum(self._grown(component, one, self._reserved_tokens) for one in active)
            # Of several, nobody knows here who already ran when the last one was let in.
            before = [one for one in active if one.running and one.record.req_pool_idx not in new]
            room = max(growth, self._lacking_alone(component, before)) if len(new) == 1 else growth
            available = self._pool.parts.available(component)
            assert room <= available, f"let in with {available} {component} pages left, where {room} may be needed"

    def _grown(self, component: Component, one: ActiveRequest, most: int) -> int:
        """Pages for so many tokens more, or until it is over."""
        length = one.record.kv_allocated_len
        grown = min(length + most, max(length, one.total_len))
        return self._pages(component, grown) - self._pages(component, length)

    def _lacking_alone(self, component: Component, running: Sequence[ActiveRequest]) -> int:
        total = self._pool.supply.total(component)
        own = [self._given_back(component, one) for one in running]
        lacking = 0
        for one, kept in zip(running, own, strict=True):
            held = self._pages(component, one.record.kv_allocated_len)
            wanted = min(self._pages(component, one.total_len), total) - held
            lacking = max(lacking, wanted - (sum(own) - kept))
        return lacking

    def _given_back(self, component: Component, one: ActiveRequest) -> int:
        """By retracting it: what it shares with others stays."""
        shared = one.record.cache_protected_len if component is Component.FULL else 0
        return self._pages(component, one.record.kv_allocated_len) - pages_for_tokens(shared, self._pool.page_size)

    def _assert_nobody_waits_in_vain(self, active: Sequence[ActiveRequest]) -> None:
        """Nobody waits while even the longest request would fit beside all that the others may come to need."""
        pool = self._pool
        if len(active) >= self._max_active or not pool.rows.free_rows:
            return
        for component in pool.layout.components:
            if component is Component.STATE:
                wanted = LEAST_STATE_SLOTS
            else:
                growth = sum(self._grown(component, one, pool.max_context_len) for one in active)
                wanted = self._pages(component, pool.longest) + growth
            if wanted > pool.parts.available(component):
                return
        raise AssertionError("somebody waits though all that can be needed is there")

    def _pages(self, component: Component, length: int) -> int:
        pages = pages_for_tokens(length, self._pool.page_size)
        if component is Component.SWA and self._pool.window is not None:
            return min(pages, self._pool.window.most_pages)
        return pages


def assert_no_prompt_waits_in_vain(pool: KvPool, core: PrefillCore, records: Sequence[ReqKvInfo]) -> None:
    """Where all that was let in is computed, nobody waits while all that wait would fit."""
    if (
        not core.queued
        or not pool.rows.free_rows
        or any(one.kv_committed_len < one.kv_allocated_len for one in records)
    ):
        return
    load = core.load()
    for component in pool.layout.components:
        wanted = LEAST_STATE_SLOTS if component is Component.STATE else pool.parts.needed(component, load.queued_tokens)
        if wanted > pool.parts.available(component):
            return
    raise AssertionError(f"{load.queued} prompts wait though all that they need is there")


class SessionOracle:
    """Of one decode worker: its sessions end in time, are not too many, and none is kept by one that drains."""

    def __init__(self, limit: int, ttl_s: float) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._since_s: dict[tuple[SessionId, int], float] = {}

    def look(self, core: DecodeCore, answered: Collection[SessionId], now: float) -> None:
        held = [one for one in core.holdings() if one.owner_class is OwnerClass.SESSION]
        assert len(held) <= self._limit, f"{len(held)} sessions are kept, where {self._limit} may be"
        assert not held or not core.load().draining, "a worker that drains keeps sessions"
        strange = {one.owner_id for one in held} - set(answered)
        assert not strange, f"{strange} are kept, of which no turn has ended with its answer"
        # A turn changes the length of what is kept.
        keys = [(SessionId(one.owner_id), one.record.kv_committed_len) for one in held]
        self._since_s = {key: self._since_s.get(key, now) for key in keys}
        for key, since_s in self._since_s.items():
            assert now - since_s <= self._ttl_s + SESSION_SLACK_S, f"session {key[0]} is kept after its time"


def assert_thoughts_are_not_cached(
    workers: Iterable[WorkerProcess], request: ClientRequest, thinking: int, prompts: Iterable[I32]
) -> None:
    """Where the model began to think, others find the tokens before that at most; unless a prompt repeats the rest."""
    prompt, outputs = request.prompt, request.tokens
    if thinking in prompt[-THINKING_TAIL:]:
        most = len(prompt)
    elif thinking in outputs:
        most = len(prompt) + outputs.index(thinking)
    else:
        return
    for worker in workers:
        found = request.known[: worker.pool.match_len(request.known)]
        repeated = any(np.array_equal(one[: len(found)], found) for one in prompts)
        assert len(found) <= most or repeated, (
            f"{worker.stamp.worker} has cached thoughts: {len(found)} of {most} tokens"
        )


def assert_step_fits(batch: Batch, chunk_tokens: int) -> None:
    """What is configured as the most tokens of one step, beside one for each running request."""
    most = batch.num_rows + max(chunk_tokens, batch.page_size)
    assert batch.num_tokens <= most, f"a step over {batch.num_tokens} tokens, {most} at most"


def assert_step_keeps_its_pages(batch: Batch, pool: KvPool) -> None:
    """Nobody gives back what a step writes while it is under way."""
    slots = {pool.main: batch.slots} if pool.layout.paged else {}
    if batch.swa is not None:
        slots[Component.SWA] = batch.swa.slots
    for component, written in slots.items():
        pages = written // batch.page_size
        _, is_free = pool.supply.allocators[component].memory
        assert not is_free[pages].any(), f"{component} pages {pages[is_free[pages]].tolist()} are free, and are written"


def assert_content(workers: Sequence[WorkerProcess], sequences: Iterable[I32], layout: KvLayout) -> None:
    """Of everything that is cached of these sequences."""
    seen: list[set[bytes]] = [set() for _ in workers]
    for tokens in sequences:
        expected = functools.cache(functools.partial(fake_kept, tokens, layout))
        for worker, looked_at in zip(workers, seen, strict=True):
            assert_cached_right(worker, tokens, expected, looked_at)
