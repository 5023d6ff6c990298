"""What a decode core asks of the tiers below its pool, and whose the pages are meanwhile."""

from __future__ import annotations

import queue

import numpy as np
import pytest
from tier_rig import host

from baton.common.clock import VirtualClock
from baton.common.config import TiersConfig
from baton.common.ids import Epoch, RequestId, Stamp, WorkerId
from baton.common.kv.checker import InvariantChecker
from baton.common.kv.layout import KvLayout
from baton.common.kv.pool import KvPool, PreAllocated
from baton.common.kv.prefix.interface import I32, PrefixMatch
from baton.common.kv.tiers.api import (
    AbortRestore,
    AbortStore,
    JobId,
    PagesRestored,
    PagesStored,
    StorePages,
    TierEvent,
)
from baton.common.kv.tiers.keys import PageKey, PageKeys
from baton.common.kv.tiers.thread import TierThread
from baton.common.kv.tiers.tiers import Tiers
from baton.common.messages import SamplingParams
from baton.decode.request import DecodeRequest, Queued
from baton.decode.restoring import Restores
from baton.decode.storing import LAG, SHARE, Stores

PAGE_SIZE = 4
PAGES = 64
FULL = KvLayout(PAGE_SIZE)
KEYS = PageKeys.of_model({"model": "a"}, PAGE_SIZE)
CONFIG = TiersConfig(host_bytes=1, restore_min_pages=2, restore_deadline_s=5.0)
BACK = TiersConfig(host_bytes=1, write="back")


def prompt(length: int, seed: int = 0) -> I32:
    return np.arange(length, dtype=np.int32) + 1000 * seed


def pool(layout: KvLayout = FULL) -> KvPool:
    return KvPool(layout, dict.fromkeys(layout.components, PAGES + 1), 8, PAGES * PAGE_SIZE)


def request(tokens: I32, outputs: int = 0) -> DecodeRequest:
    return DecodeRequest(
        number=1,
        key=(RequestId("r"), 0),
        gateway=Stamp(WorkerId("gateway-0"), 1, Epoch(1)),
        prompt=tokens,
        outputs=list(range(outputs)),
        sampling=SamplingParams(),
        deadline_s=100.0,
        preferred=None,
        state=Queued(0.0),
        stop_ids=frozenset(),
        limit=16,
    )


def admitted(kv: KvPool, tokens: I32, outputs: int = 0) -> DecodeRequest:
    """As admission leaves it: pages promised, the cached prefix locked."""
    one = request(tokens, outputs)
    most = one.fill_len - 1 if one.wants_first_token else one.fill_len
    assert isinstance(kv.pre_alloc(one, one.fill_tokens, one.fill_len, most), PreAllocated)
    return one


def cached(kv: KvPool, tokens: I32) -> None:
    """The tree holds them; nobody reads them."""
    one = admitted(kv, tokens)
    kv.commit_incoming(one.record, len(tokens))
    kv.release_kv_cache(one, tokens)


def restores(kv: KvPool, keys: PageKeys | None = KEYS, config: TiersConfig = CONFIG) -> Restores:
    return Restores(kv, keys, config)


def stores(kv: KvPool, keys: PageKeys | None = KEYS, config: TiersConfig = CONFIG) -> Stores:
    return Stores(kv, keys, config)


def store(planner: Stores, tokens: I32) -> StorePages:
    """What goes down now that these were offered to the tree; something must."""
    (command,) = planner.cached(tokens)
    return command


def running(kv: KvPool, length: int, outputs: int) -> DecodeRequest:
    """All KV is there but that of the newest output."""
    one = admitted(kv, prompt(length), outputs)
    kv.commit_incoming(one.record, one.fill_len)
    return one


# ------------------------------------------------------------------------------------------------ restoring


@pytest.mark.parametrize(
    ("length", "outputs", "asked"),
    [
        (41, 0, 10),
        (40, 0, 9),  # the last token is computed for its logits, so its page is not asked for
        (39, 0, 9),
        (40, 1, 10),  # the newest output has no KV yet, and the one before is known
        (38, 3, 10),
    ],
)
def test_all_whole_pages_but_the_last_logits_are_asked_for(length: int, outputs: int, asked: int) -> None:
    kv = pool()
    one = admitted(kv, prompt(length), outputs)
    command = restores(kv).begin(one, 0.0)
    assert command is not None
    assert list(command.keys) == KEYS.of(one.fill_tokens)[:asked]
    assert np.array_equal(command.page_ids, kv.pages_of(one.record, 0, asked * PAGE_SIZE))
    assert command.at_least == CONFIG.restore_min_pages


def test_what_the_tree_has_is_not_asked_for() -> None:
    kv = pool()
    cached(kv, prompt(20))
    one = admitted(kv, prompt(41))
    command = restores(kv).begin(one, 0.0)
    assert command is not None
    assert list(command.keys) == KEYS.of(prompt(40))[5:]
    assert np.array_equal(command.page_ids, kv.pages_of(one.record, 20, 40))


def test_few_pages_are_not_worth_it() -> None:
    kv = pool()
    assert restores(kv).begin(admitted(kv, prompt(8)), 0.0) is None
    assert restores(kv).begin(admitted(kv, prompt(9, seed=1)), 0.0) is not None


def test_a_page_known_in_part_is_not_overwritten() -> None:
    kv = pool()
    one = admitted(kv, prompt(41))
    kv.commit_incoming(one.record, 10)  # as a conversation's last turn left it
    assert restores(kv).begin(one, 0.0) is None


@pytest.mark.parametrize(
    "layout",
    [KvLayout(PAGE_SIZE, window=8), KvLayout(PAGE_SIZE, full=False, window=8), KvLayout(PAGE_SIZE, state=True)],
)
def test_models_with_sliding_or_recurrent_layers_are_left_alone(layout: KvLayout) -> None:
    kv = pool(layout)
    one = admitted(kv, prompt(41))
    assert not layout.only_full
    assert restores(kv).begin(one, 0.0) is None
    assert stores(kv).retract(running(kv, 41, outputs=2), 0.0) is None
    assert stores(kv).cached(prompt(41)) == []


def test_without_tiers_nothing_is_asked() -> None:
    kv = pool()
    assert restores(kv, keys=None).begin(admitted(kv, prompt(41)), 0.0) is None
    assert stores(kv, keys=None).retract(running(kv, 41, outputs=2), 0.0) is None
    cached(kv, prompt(41, seed=1))
    assert stores(kv, keys=None).cached(prompt(41, seed=1)) == []


@pytest.mark.parametrize(("pages", "until"), [(0, 20), (3, 32), (5, 40)])
def test_what_landed_is_told_from_where_the_tree_ended(pages: int, until: int) -> None:
    kv = pool()
    planner = restores(kv)
    cached(kv, prompt(20))
    one = admitted(kv, prompt(41))
    command = planner.begin(one, 0.0)
    assert command is not None
    landed = planner.end(PagesRestored(command.job, pages))
    assert landed[:3] == (one, 20, until)
    assert list(landed.keys) == KEYS.of(prompt(40))[5 : until // PAGE_SIZE]
    assert np.array_equal(landed.page_ids, kv.pages_of(one.record, 20, until))
    kv.commit_incoming(one.record, until)
    assert len(planner) == 0


def test_more_than_was_asked_for_cannot_land() -> None:
    kv = pool()
    planner = restores(kv)
    command = planner.begin(admitted(kv, prompt(41)), 0.0)
    assert command is not None
    with pytest.raises(AssertionError):
        planner.end(PagesRestored(command.job, 11))


def test_a_slow_restore_is_cut_short_once() -> None:
    kv = pool()
    planner = restores(kv)
    first, second = [planner.begin(admitted(kv, prompt(41, seed)), float(seed)) for seed in (0, 1)]
    assert first is not None
    assert second is not None
    assert planner.next_deadline() == 5.0
    assert planner.cut_short(4.9) == []
    assert planner.cut_short(5.0) == [AbortRestore(first.job)]
    assert planner.cut_short(5.5) == []
    assert planner.next_deadline() == 6.0
    assert planner.abort(second.job) == AbortRestore(second.job)
    assert planner.cut_short(99.0) == []
    assert planner.next_deadline() is None
    assert planner.end(PagesRestored(first.job, 4)).until == 16
    assert planner.end(PagesRestored(second.job, 0)).until == 0


# -------------------------------------------------------------------------------------------- written through


def test_what_the_tree_got_is_stored_once() -> None:
    kv = pool()
    planner = stores(kv)
    cached(kv, prompt(41))
    command = store(planner, prompt(41))
    assert list(command.keys) == KEYS.of(prompt(41))
    assert planner.end(PagesStored(command.job, 10)) is None
    assert planner.cached(prompt(41)) == []
    longer = np.concatenate((prompt(41)[:40], prompt(8, seed=3)))
    cached(kv, longer)
    assert list(store(planner, longer).keys) == KEYS.of(longer)[10:]


def test_what_is_being_stored_is_not_asked_for_again() -> None:
    """Many prompts begin alike, and what is under way is bounded."""
    kv = pool()
    planner = stores(kv)
    longer = [np.concatenate((prompt(32), prompt(8, seed))) for seed in (3, 4)]
    for one in longer:
        cached(kv, one)
    first, second = [store(planner, one) for one in longer]
    assert list(second.keys) == KEYS.of(longer[1])[8:]
    assert planner.cached(longer[0]) == []
    planner.end(PagesStored(second.job, 2))
    planner.end(PagesStored(first.job, 0))  # dropped
    assert list(store(planner, longer[1]).keys) == KEYS.of(longer[1])[:8]


def test_pages_being_stored_stay_in_the_tree() -> None:
    kv = pool()
    planner = stores(kv)
    cached(kv, prompt(40))
    cached(kv, prompt(40, seed=1))
    command = store(planner, prompt(40))
    InvariantChecker().check(kv, [])
    kv.clear_cache()
    assert kv.match_len(prompt(40)) == 40
    assert kv.match_len(prompt(40, seed=1)) == 0
    planner.end(PagesStored(command.job, 10))
    InvariantChecker().check(kv, [])
    kv.clear_cache()
    assert kv.free_pages == kv.total_pages


def test_a_stored_page_is_evicted_when_it_would_have_been() -> None:
    kv = pool()
    planner = stores(kv)
    cached(kv, prompt(40))
    cached(kv, prompt(40, seed=1))
    command = store(planner, prompt(40))
    planner.end(PagesStored(command.job, 10))
    kv.evict(10)
    assert (kv.match_len(prompt(40)), kv.match_len(prompt(40, seed=1))) == (0, 40)


def test_what_was_dropped_is_offered_again() -> None:
    kv = pool()
    planner = stores(kv)
    cached(kv, prompt(40))
    for kept, left in ((0, 10), (7, 10), (3, 3)):
        command = store(planner, prompt(40))
        assert len(command.keys) == left
        planner.end(PagesStored(command.job, kept))
    assert planner.cached(prompt(40)) == []


def test_a_page_that_holds_something_else_by_now_is_stored_again() -> None:
    kv = pool()
    planner = stores(kv)
    for seed in (0, 1, 0):
        cached(kv, prompt(40, seed))
        command = store(planner, prompt(40, seed))
        assert list(command.keys) == KEYS.of(prompt(40, seed))
        planner.end(PagesStored(command.job, 10))
        assert planner.cached(prompt(40, seed)) == []
        kv.clear_cache()


def test_no_more_than_a_share_of_the_pool_is_being_stored() -> None:
    kv = pool()
    planner = stores(kv)
    most = PAGES // SHARE
    commands: list[StorePages] = []
    for seed in range(5):
        cached(kv, prompt(40, seed))
        commands += planner.cached(prompt(40, seed))
    assert sum(len(command.keys) for command in commands) == most
    stored: set[PageKey] = set()
    while commands:
        command = commands.pop(0)
        stored.update(command.keys)
        planner.end(event := PagesStored(command.job, len(command.keys)))
        commands += planner.go_on(event)
    assert stored == {key for seed in range(5) for key in KEYS.of(prompt(40, seed))}, "the rest follows"


def test_nothing_cached_is_nothing_to_store() -> None:
    assert stores(pool()).cached(prompt(40)) == []


# ---------------------------------------------------------------------------------------------- written back


def crowded() -> KvPool:
    """Three prompts of ten pages in the tree, the first one oldest, and one that fills it; a page is free."""
    kv = pool()
    for seed in range(3):
        cached(kv, prompt(40, seed))
    cached(kv, prompt((PAGES - 31) * PAGE_SIZE, seed=99))
    assert kv.free_pages == 1
    return kv


def test_pages_are_copied_before_they_are_evicted() -> None:
    kv = crowded()
    planner = stores(kv, config=BACK)
    first, second = planner.cached(prompt(8, seed=50))
    assert list(first.keys) == KEYS.of(prompt(40)), "the oldest leaf, whatever was offered last"
    assert list(second.keys) == KEYS.of(prompt(40, seed=1))[:6], "until a share of the pool is free or clean"
    assert kv.evict(10) == 10
    assert [kv.match_len(prompt(40, seed)) for seed in range(3)] == [40, 40, 0], "not those that are being read"
    planner.end(PagesStored(first.job, 10))
    kv.evict(10)
    assert [kv.match_len(prompt(40, seed)) for seed in range(2)] == [0, 40], "but as soon as they were"


def test_while_there_is_room_nothing_is_written_back() -> None:
    kv = pool()
    cached(kv, prompt(40))
    assert stores(kv, config=BACK).cached(prompt(40)) == []


def test_pages_have_the_names_of_their_whole_prompt() -> None:
    """The beginning of the oldest leaf is shared with another one."""
    kv = pool()
    ours, other = prompt(40), np.concatenate((prompt(20), prompt(20, seed=5)))
    cached(kv, ours)
    cached(kv, other)
    cached(kv, prompt((PAGES - 16) * PAGE_SIZE, seed=99))
    command = stores(kv, config=BACK).cached(prompt(40))[0]
    assert list(command.keys) == KEYS.of(ours)
    assert np.array_equal(command.page_ids, kv.prefix.pages(kv.copying[0]).full)


def test_clean_pages_are_not_copied_again() -> None:
    kv = crowded()
    planner = stores(kv, config=BACK)
    first, second = planner.cached(prompt(40))
    planner.end(PagesStored(first.job, 7))
    planner.end(PagesStored(second.job, 6))
    first, second = planner.cached(prompt(40))
    assert list(first.keys) == KEYS.of(prompt(40))[7:]
    assert list(second.keys) == KEYS.of(prompt(40, seed=1))[6:]
    planner.end(PagesStored(first.job, 3))
    planner.end(PagesStored(second.job, 4))
    assert planner.cached(prompt(40)) == []
    kv.evict(20)
    cached(kv, prompt(76, seed=7))
    next_in_line, *_ = planner.cached(prompt(40))
    assert list(next_in_line.keys) == KEYS.of(prompt(40, seed=2))


def test_what_was_stored_makes_room_for_the_next() -> None:
    kv = crowded()
    planner = stores(kv, config=BACK)
    first, second = planner.cached(prompt(40))
    planner.end(event := PagesStored(second.job, 6))
    (more,) = planner.go_on(event)
    assert list(more.keys) == KEYS.of(prompt(40, seed=1))[6:]
    planner.end(dropped := PagesStored(more.job, 0))
    assert planner.go_on(dropped) == [], "the next would be dropped as well"
    planner.end(PagesStored(first.job, 10))


def test_what_is_clean_is_not_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = crowded()
    planner = stores(kv, config=BACK)
    while commands := planner.cached(prompt(40)):
        for command in commands:
            planner.end(PagesStored(command.job, len(command.keys)))
    looks: list[int] = []
    coldest = kv.prefix.coldest

    def counted(count: int) -> list[tuple[I32, PrefixMatch]]:
        looks.append(count)
        return coldest(count)

    monkeypatch.setattr(kv.prefix, "coldest", counted)
    assert planner.cached(prompt(40)) == []
    assert not looks
    seed = 5
    while not looks:  # as pages go, others are next
        cached(kv, prompt(PAGE_SIZE, seed))
        planner.cached(prompt(PAGE_SIZE, seed))
        seed += 1
    assert seed - 5 <= PAGES // SHARE // LAG + 2


def test_while_somebody_lacks_pages_only_a_share_is_kept_from_him() -> None:
    kv = crowded()
    planner = stores(kv, config=BACK)
    begun = planner.cached(prompt(40), lacking=True)
    assert begun
    assert kv.supply.prefix.locked.full <= PAGES // SHARE
    planner.end(event := PagesStored(begun[0].job, 7))
    assert planner.go_on(event, lacking=True) == []
    assert planner.go_on(event) != []


# ------------------------------------------------------------------------------------------------- retracted


def test_a_retracted_request_is_copied_up_to_its_last_whole_page() -> None:
    kv = pool()
    planner = stores(kv)
    one = running(kv, 41, outputs=9)  # KV of 49 tokens
    command = planner.retract(one, 0.0)
    assert command is not None
    assert list(command.keys) == KEYS.of(one.known_tokens[:48])
    assert np.array_equal(command.page_ids, kv.pages_of(one.record, 0, 48))
    assert planner.end(PagesStored(command.job, 12)) is one
    assert planner.retract(one, 0.0) is None, "there already"


def test_a_position_that_was_planned_and_not_computed_is_not_copied() -> None:
    kv = pool()
    one = running(kv, 41, outputs=7)  # KV of 47 tokens is there
    kv.prepare_for_decode(one)
    assert one.record.kv_committed_len == 48
    command = stores(kv).retract(one, 0.0)
    assert command is not None
    assert list(command.keys) == KEYS.of(one.known_tokens[:44])


def test_a_slow_copy_is_cut_short_once_and_waited_for_no_longer() -> None:
    kv = pool()
    planner = stores(kv)
    cached(kv, prompt(40, seed=1))
    store(planner, prompt(40, seed=1))
    assert (planner.awaited, planner.next_deadline()) == (False, None), "nobody waits for what the tree keeps"
    one = running(kv, 41, outputs=9)
    command = planner.retract(one, 1.0)
    assert command is not None
    assert (planner.awaited, planner.next_deadline()) == (True, 6.0)
    assert planner.cut_short(5.9) == []
    assert planner.cut_short(6.0) == [AbortStore(command.job)]
    assert planner.cut_short(99.0) == []
    assert (planner.awaited, planner.next_deadline()) == (False, None)
    assert planner.end(PagesStored(command.job, 3)) is one


def test_what_was_stored_of_the_prompt_is_not_copied_again() -> None:
    kv = pool()
    planner = stores(kv)
    one = running(kv, 41, outputs=9)
    kv.cache_finished_req(one, one.fill_tokens, kv_len_to_handle=40)
    planner.end(PagesStored(store(planner, prompt(40)).job, 10))
    command = planner.retract(one, 0.0)
    assert command is not None
    assert list(command.keys) == KEYS.of(one.known_tokens[:48])[10:]
    two = admitted(kv, prompt(41), outputs=4)
    kv.commit_incoming(two.record, 44)
    assert planner.retract(two, 0.0) is None, "one new page is not worth it"


# ----------------------------------------------------------------------------------------------- all together


def test_a_prompt_comes_back_through_the_tiers_byte_for_byte() -> None:
    """Stored through the thread, evicted, and restored into the pages of the next request for it."""
    kv, answers = pool(), queue.Queue[TierEvent]()
    level = host(32)
    memory = np.zeros((PAGES + 1, level.page_bytes), np.uint8)
    thread = TierThread(
        Tiers([level], "through"),
        memory,
        answers.put,
        VirtualClock(),
        max_queued_jobs=8,
        on_fatal=lambda: pytest.fail("the tier thread failed"),
    )
    thread.start()
    writer, reader = stores(kv), restores(kv)
    one = admitted(kv, prompt(41))
    content = np.random.default_rng(1).integers(0, 256, (11, level.page_bytes), dtype=np.uint8)
    memory[kv.pages_of(one.record, 0, 41)] = content
    kv.commit_incoming(one.record, 41)
    kv.release_kv_cache(one, prompt(41))
    thread.post(store(writer, prompt(41)))
    stored = answers.get(timeout=20.0)
    assert isinstance(stored, PagesStored)
    writer.end(stored)
    kv.clear_cache()
    memory[:] = 0
    cached(kv, prompt(20, seed=7))  # so that the pages are others
    two = admitted(kv, prompt(41))
    wanted = reader.begin(two, 0.0)
    assert wanted is not None
    thread.post(wanted)
    restored = answers.get(timeout=20.0)
    assert isinstance(restored, PagesRestored)
    landed = reader.end(restored)
    assert (landed.start, landed.until) == (0, 40)
    assert np.array_equal(memory[kv.pages_of(two.record, 0, 40)], content[:10])
    kv.commit_incoming(two.record, landed.until)
    kv.cache_finished_req(two, prompt(41), kv_len_to_handle=40)
    assert store(writer, prompt(41)), "other pages: stored again, which the levels notice"
    assert thread.stop(20.0)


def test_job_ids_are_never_used_twice() -> None:
    kv = pool()
    planner = restores(kv)
    jobs: set[JobId] = set()
    for seed in range(4):
        command = planner.begin(admitted(kv, prompt(41, seed)), 0.0)
        assert command is not None
        jobs.add(command.job)
        planner.end(PagesRestored(command.job, 0))
    assert len(jobs) == 4
