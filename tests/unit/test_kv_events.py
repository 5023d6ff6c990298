"""What a pool says of its tree, what a feed makes of that, and what an index at the other end knows: the same pages,
over a network that loses, doubles and overtakes, and through restarts."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import numpy as np
import pytest
from kv_events_rig import PAGE, Holder, make_pool, use

from baton.common.engine.core_api import MembershipView, SendTo
from baton.common.engine.kv_feed import KEPT_BATCHES, KvFeed, PublishPages
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.kv.events import NO_PARENT, AllRemoved, PageEvent, PagesRemoved, PagesStored, page_names
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.names import PrefixCacheName
from baton.common.messages import KvEvents, KvEventsWanted, KvSnapshot, Member
from baton.deploy.routing.index import PrefixIndex
from baton.deploy.sim.watch_caches import names_in

GATEWAY = Stamp(WorkerId("gateway-0"), 1, Epoch(7))
WORKER = Stamp(WorkerId("prefill-0"), 1, Epoch(8))
VIEW = MembershipView(1, (Member(stamp=GATEWAY, role="gateway", address=""),))
RESEND_S = 0.5


def played(events: Iterable[PageEvent], held: set[int]) -> None:
    for event in events:
        match event:
            case PagesStored(parent, names, tokens):
                assert parent == NO_PARENT or parent in held, "what it follows was there before"
                assert names == list(page_names(tokens, PAGE, parent))
                assert not held & set(names), "stored twice"
                held.update(names)
            case PagesRemoved(names):
                assert held.issuperset(names)
                held.difference_update(names)
            case AllRemoved(names):
                assert held == set(names)
                held.clear()


@pytest.mark.parametrize("cache", ["RadixCacheCpp", "UnifiedRadixCache", "chunk"])
@pytest.mark.parametrize("layout", [KvLayout(PAGE), KvLayout(PAGE, window=6), KvLayout(PAGE, state=True)])
def test_the_events_of_a_pool_tell_what_its_tree_holds(cache: PrefixCacheName, layout: KvLayout) -> None:
    rng, pool, held = Random(1), make_pool(cache, layout=layout), set[int]()
    seen = set[type[PageEvent]]()
    assert pool.events is not None
    for _ in range(300):
        use(pool, rng)
        events = pool.events.take()
        seen.update(type(event) for event in events)
        played(events, held)
        assert held == names_in(pool) == set(pool.events.held().tolist())
    assert seen == (set() if cache == "chunk" else {PagesStored, PagesRemoved, AllRemoved})


def test_a_name_stands_for_all_tokens_before() -> None:
    tokens = np.arange(22, dtype=np.int32)
    names = list(page_names(tokens, PAGE))
    assert len(names) == 5
    assert list(page_names(tokens[8:], PAGE, names[1])) == names[2:]
    assert not set(page_names(tokens[8:], PAGE)) & set(names)
    assert make_pool(layout=KvLayout(PAGE, full=False, window=8)).events is None, "names are of full attention's pages"


class Line:
    """A worker and a gateway, and a bad network between them."""

    def __init__(self, rng: Random, max_pages: int = 1 << 20) -> None:
        self.rng, self.now, self.faults = rng, 0.0, True
        self.index = PrefixIndex(max_pages, RESEND_S)
        self.ever: dict[Stamp, set[int]] = {}
        self.waiting: list[tuple[Stamp, object]] = []
        self.snapshots = 0
        self.restart(1)

    def restart(self, incarnation: int) -> None:
        self.worker = Stamp(WorkerId("prefill-0"), incarnation, Epoch(incarnation))
        self.pool = make_pool()
        feed = KvFeed.of(self.pool, indexed=True)
        assert feed is not None
        self.feed = feed
        self.feed.on_view(VIEW)
        self.index.alive([self.worker])
        self.ever[self.worker] = set()

    def step(self) -> None:
        use(self.pool, self.rng)
        self.say()

    def say(self) -> None:
        for effect in self.feed.take():
            assert isinstance(effect, SendTo)
            if isinstance(effect.body, KvEvents):
                self.ever[self.worker].update(np.frombuffer(effect.body.stored, dtype="<u8").tolist())
            for _ in range(self.rng.choice((0, 1, 1, 2)) if self.faults else 1):
                self.waiting.append((self.worker, effect.body))

    def deliver(self) -> None:
        if self.faults:
            self.rng.shuffle(self.waiting)
        for _ in range(self.rng.randint(0, len(self.waiting)) if self.faults else len(self.waiting)):
            sender, body = self.waiting.pop(0)
            if isinstance(body, KvEvents):
                self.index.on_events(sender, body, self.now)
            else:
                assert isinstance(body, KvSnapshot)
                self.snapshots += 1
                self.index.on_snapshot(sender, body, self.now)
            assert set(self.index.names_of(sender)) <= self.ever[sender], "it never held that"
            assert self.index.pages == len(self.index.names_of(self.worker))

    def heartbeat(self) -> None:
        self.now += 0.2
        wanted = self.index.wants(self.worker, self.feed.seq, self.now)
        if wanted is not None and not (self.faults and self.rng.random() < 0.3):
            self.feed.on_wanted(GATEWAY, wanted)
            self.say()


@pytest.mark.parametrize("seed", range(12))
def test_an_index_says_what_is_there_whatever_the_network_does(seed: int) -> None:
    line = Line(Random(seed))
    for turn in range(120):
        line.step()
        if line.rng.random() < 0.6:
            line.deliver()
        if line.rng.random() < 0.3:
            line.heartbeat()
        if turn == 60:
            old = line.worker
            line.restart(2)
            assert not line.index.names_of(old), "of a predecessor nothing is known"
    line.faults = False
    for _ in range(8):
        line.heartbeat()
        line.deliver()
    assert line.index.is_current(line.worker)
    assert set(line.index.names_of(line.worker)) == names_in(line.pool)


def test_who_is_far_behind_is_given_everything() -> None:
    line = Line(Random(3))
    line.faults = False
    for _ in range(2 * KEPT_BATCHES):
        line.step()
        line.waiting.clear()
    for _ in range(4):
        line.heartbeat()
        line.deliver()
    assert line.snapshots == 1, "asked once, answered at once"
    assert set(line.index.names_of(line.worker)) == names_in(line.pool)


def test_what_is_only_late_is_not_asked_for_and_what_is_not_answered_is_asked_for_again() -> None:
    index = PrefixIndex(100, RESEND_S)
    index.alive([WORKER])
    first, second = [KvEvents(seq=seq, stored=np.array([seq], dtype="<u8").tobytes()) for seq in (1, 2)]
    assert index.wants(WORKER, 1, 0.0) is None, "it may be on its way"
    index.on_events(WORKER, first, 0.1)
    assert index.wants(WORKER, 2, 0.2) is None
    assert index.is_current(WORKER) is False
    assert index.wants(WORKER, 2, 0.4) is None, "something came a moment ago"
    assert index.wants(WORKER, 2, 0.7) == KvEventsWanted(first_seq=2)
    assert index.wants(WORKER, 2, 0.9) is None
    assert index.wants(WORKER, 2, 1.3) == KvEventsWanted(first_seq=2)
    index.on_events(WORKER, second, 1.4)
    assert index.is_current(WORKER)
    assert index.wants(WORKER, 2, 9.0) is None
    assert index.wants(GATEWAY, 5, 9.0) is None, "nobody it knows"


def test_an_index_keeps_within_its_limit_and_says_nothing_untrue() -> None:
    line = Line(Random(5), max_pages=10)
    line.faults = False
    for _ in range(60):
        line.step()
        line.deliver()
        assert line.index.pages <= 10
        assert set(line.index.names_of(line.worker)) <= names_in(line.pool)
    assert line.index.refused_pages > 0


def test_a_snapshot_in_parts_counts_when_it_is_whole() -> None:
    index = PrefixIndex(100, RESEND_S)
    index.alive([WORKER])
    packed = [np.array([name], dtype="<u8").tobytes() for name in range(4)]
    old = KvSnapshot(seq=5, part=0, parts=2, names=packed[0])
    parts = [KvSnapshot(seq=6, part=part, parts=2, names=packed[part + 1]) for part in (0, 1)]
    index.on_snapshot(WORKER, old, 0.0)
    index.on_snapshot(WORKER, parts[0], 0.0)
    index.on_snapshot(WORKER, KvSnapshot(seq=5, part=1, parts=2, names=packed[3]), 0.0)
    assert not index.names_of(WORKER), "parts of two snapshots are none"
    index.on_events(WORKER, KvEvents(seq=7, removed=packed[1]), 0.0)
    index.on_snapshot(WORKER, parts[1], 0.0)
    assert set(index.names_of(WORKER)) == {2}, "and the batch behind it was waiting"


def test_outsiders_are_told_everything_in_order() -> None:
    pool = make_pool()
    feed = KvFeed.of(pool, indexed=False, published=True)
    assert feed is not None
    feed.on_view(VIEW)
    holder, tokens = Holder(), list(range(12))
    pool.prepare_for_extend(holder, tokens, 12)
    pool.release_kv_cache(holder, tokens)
    pool.evict(1)
    pool.clear_cache()
    assert feed.waiting
    [published] = feed.take()
    assert isinstance(published, PublishPages), "no gateway wants to hear"
    assert [type(event) for event in published.events] == [PagesStored, PagesRemoved, AllRemoved]
    assert not feed.waiting
    assert feed.take() == []
    assert feed.seq == 0
    assert KvFeed.of(make_pool(), indexed=False) is None
    assert KvFeed.of(KvPool(KvLayout(PAGE), {Component.FULL: 9}, 4, 64), indexed=True) is None
