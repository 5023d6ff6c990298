"""What a decode core asks of the tiers below its pool, and whose the pages are meanwhile."""

from __future__ import annotations

import queue

import numpy as np
import pytest
from tier_rig import host

from baton.common.clock import VirtualClock
from baton.common.config import TiersConfig
from baton.common.ids import Epoch, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import KvPool, PreAllocated
from baton.common.kv.prefix.interface import I32
from baton.common.kv.tiers.api import (
    AbortRestore,
    EvictedRun,
    JobId,
    PagesRestored,
    PagesStored,
    StorePages,
    TierEvent,
)
from baton.common.kv.tiers.keys import PageKeys
from baton.common.kv.tiers.thread import TierThread
from baton.common.kv.tiers.tiers import Tiers
from baton.common.messages import SamplingParams
from baton.decode.request import DecodeRequest, Queued, Times
from baton.decode.restoring import Landed, Restores
from baton.decode.storing import LOW_SHARE, SHARE, Stores

PAGE_SIZE = 4
PAGES = 64
FULL = KvLayout(PAGE_SIZE)
KEYS = PageKeys.of_model({"model": "a"}, PAGE_SIZE)
CONFIG = TiersConfig(host_bytes=1, restore_min_pages=2, restore_deadline_s=5.0)
BACK = TiersConfig(host_bytes=1, write="back")


def prompt(length: int, seed: int = 0) -> I32:
    return np.arange(length, dtype=np.int32) + 1000 * seed


def pool() -> KvPool:
    return KvPool(KvLayout(PAGE_SIZE), {Component.FULL: PAGES + 1}, 8, PAGES * PAGE_SIZE)


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
        times=Times(0.0),
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


def restores(layout: KvLayout = FULL, keys: PageKeys | None = KEYS, config: TiersConfig = CONFIG) -> Restores:
    return Restores(layout, keys, config)


def stores(layout: KvLayout = FULL, keys: PageKeys | None = KEYS, config: TiersConfig = CONFIG) -> Stores:
    return Stores(layout, keys, config, PAGES)


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
    command = restores().begin(one, kv, 0.0)
    assert command is not None
    assert list(command.keys) == KEYS.of(one.fill_tokens)[:asked]
    assert np.array_equal(command.page_ids, kv.pages_of(one.record, 0, asked * PAGE_SIZE))
    assert command.at_least == CONFIG.restore_min_pages


def test_what_the_tree_has_is_not_asked_for() -> None:
    kv = pool()
    cached(kv, prompt(20))
    one = admitted(kv, prompt(41))
    command = restores().begin(one, kv, 0.0)
    assert command is not None
    assert list(command.keys) == KEYS.of(prompt(40))[5:]
    assert np.array_equal(command.page_ids, kv.pages_of(one.record, 20, 40))


def test_few_pages_are_not_worth_it() -> None:
    kv = pool()
    assert restores().begin(admitted(kv, prompt(8)), kv, 0.0) is None
    assert restores().begin(admitted(kv, prompt(9, seed=1)), kv, 0.0) is not None


def test_a_page_known_in_part_is_not_overwritten() -> None:
    kv = pool()
    one = admitted(kv, prompt(41))
    kv.commit_incoming(one.record, 10)  # as a conversation's last turn left it
    assert restores().begin(one, kv, 0.0) is None


@pytest.mark.parametrize(
    "layout",
    [KvLayout(PAGE_SIZE, window=8), KvLayout(PAGE_SIZE, full=False, window=8), KvLayout(PAGE_SIZE, state=True)],
)
def test_models_with_sliding_or_recurrent_layers_are_left_alone(layout: KvLayout) -> None:
    kv = pool()
    assert restores(layout).begin(admitted(kv, prompt(41)), kv, 0.0) is None
    assert stores(layout).through(prompt(40), kv.prefix) is None
    assert stores(layout, config=BACK).wanted(0) == 0


def test_without_tiers_nothing_is_asked() -> None:
    kv = pool()
    assert restores(keys=None).begin(admitted(kv, prompt(41)), kv, 0.0) is None
    assert stores(keys=None).through(prompt(40), kv.prefix) is None
    assert stores(keys=None, config=BACK).wanted(0) == 0


@pytest.mark.parametrize(("pages", "until"), [(0, 20), (3, 32), (5, 40)])
def test_what_landed_is_told_from_where_the_tree_ended(pages: int, until: int) -> None:
    kv, planner = pool(), restores()
    cached(kv, prompt(20))
    one = admitted(kv, prompt(41))
    command = planner.begin(one, kv, 0.0)
    assert command is not None
    assert planner.end(PagesRestored(command.job, pages)) == Landed(one, 20, until)
    kv.commit_incoming(one.record, until)
    assert len(planner) == 0


def test_more_than_was_asked_for_cannot_land() -> None:
    kv, planner = pool(), restores()
    command = planner.begin(admitted(kv, prompt(41)), kv, 0.0)
    assert command is not None
    with pytest.raises(AssertionError):
        planner.end(PagesRestored(command.job, 11))


def test_a_slow_restore_is_cut_short_once() -> None:
    kv, planner = pool(), restores()
    first, second = [planner.begin(admitted(kv, prompt(41, seed)), kv, float(seed)) for seed in (0, 1)]
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
    kv, planner = pool(), stores()
    cached(kv, prompt(41))
    command = planner.through(prompt(41), kv.prefix)
    assert command is not None
    assert list(command.keys) == KEYS.of(prompt(41))
    assert planner.end(PagesStored(command.job, 10), kv.prefix).tolist() == []
    assert planner.through(prompt(41), kv.prefix) is None
    cached(kv, np.concatenate((prompt(41)[:40], prompt(8, seed=3))))
    longer = planner.through(np.concatenate((prompt(41)[:40], prompt(8, seed=3))), kv.prefix)
    assert longer is not None
    assert len(longer.keys) == 2


def test_pages_being_stored_stay_in_the_tree() -> None:
    kv, planner = pool(), stores()
    cached(kv, prompt(40))
    cached(kv, prompt(40, seed=1))
    command = planner.through(prompt(40), kv.prefix)
    assert command is not None
    kv.prefix.check(planner.leases())
    kv.clear_cache()
    assert kv.match_len(prompt(40)) == 40
    assert kv.match_len(prompt(40, seed=1)) == 0
    planner.end(PagesStored(command.job, 10), kv.prefix)
    kv.prefix.check(planner.leases())
    kv.clear_cache()
    assert kv.free_pages == kv.total_pages


def test_what_was_dropped_is_offered_again() -> None:
    kv, planner = pool(), stores()
    cached(kv, prompt(40))
    for kept, left in ((0, 10), (7, 10), (3, 3)):
        command = planner.through(prompt(40), kv.prefix)
        assert command is not None
        assert len(command.keys) == left
        planner.end(PagesStored(command.job, kept), kv.prefix)
    assert planner.through(prompt(40), kv.prefix) is None


def test_a_page_that_holds_something_else_by_now_is_stored_again() -> None:
    kv, planner = pool(), stores()
    for seed in range(4):
        cached(kv, prompt(40, seed))
        command = planner.through(prompt(40, seed), kv.prefix)
        assert command is not None
        assert list(command.keys) == KEYS.of(prompt(40, seed))
        planner.end(PagesStored(command.job, 10), kv.prefix)
        kv.clear_cache()


def test_no_more_than_a_share_of_the_pool_is_being_stored() -> None:
    kv, planner = pool(), stores()
    most = PAGES // SHARE
    commands: list[StorePages] = []
    for seed in range(5):
        cached(kv, prompt(40, seed))
        command = planner.through(prompt(40, seed), kv.prefix)
        if command is not None:
            commands.append(command)
    assert sum(len(command.keys) for command in commands) == most
    assert planner.skipped_pages == 50 - most
    kv.prefix.check(planner.leases())
    for command in commands:
        planner.end(PagesStored(command.job, 0), kv.prefix)
    again = planner.through(prompt(40, seed=4), kv.prefix)
    assert again is not None
    assert len(again.keys) == 10


def test_nothing_cached_is_nothing_to_store() -> None:
    assert stores().through(prompt(40), pool().prefix) is None


# ---------------------------------------------------------------------------------------------- written back


def give_up(kv: KvPool, tokens: I32) -> EvictedRun:
    """As a tree that tells tokens would: everything of one leaf."""
    pages = kv.prefix.clear().full
    return EvictedRun(tokens[: len(pages) * PAGE_SIZE], pages)


def test_pages_that_the_tree_gave_up_are_owned_until_stored() -> None:
    kv, planner = pool(), stores(config=BACK)
    cached(kv, prompt(41))
    assert planner.through(prompt(41), kv.prefix) is None
    run = give_up(kv, prompt(41))
    command, free = planner.back([run])
    assert command is not None
    assert list(command.keys) == KEYS.of(prompt(40))
    assert free.tolist() == []
    assert planner.owned_pages().tolist() == run.pages.tolist()
    assert kv.free_pages == kv.total_pages - 10
    freed = planner.end(PagesStored(command.job, 10), kv.prefix)
    kv.allocator.free(freed)
    assert kv.free_pages == kv.total_pages
    assert planner.owned_pages().tolist() == []


def test_the_end_of_a_run_has_the_names_of_its_end() -> None:
    planner = stores(config=BACK)
    command, _ = planner.back([EvictedRun(prompt(40), np.array([5, 6, 7], np.int32))])
    assert command is not None
    assert list(command.keys) == KEYS.of(prompt(40))[7:]


def test_clean_pages_are_free_at_once() -> None:
    planner = stores(config=BACK)
    run = EvictedRun(prompt(16), np.array([1, 2, 3, 4], np.int32))
    command, _ = planner.back([run])
    assert command is not None
    planner.end(PagesStored(command.job, 3), pool().prefix)
    command, free = planner.back([run])
    assert command is not None
    assert (command.page_ids.tolist(), free.tolist()) == ([4], [1, 2, 3])
    assert planner.end(PagesStored(command.job, 1), pool().prefix).tolist() == [4]
    command, free = planner.back([run])
    assert (command, free.tolist()) == (None, [1, 2, 3, 4])
    assert planner.back([])[0] is None


def test_pages_are_given_up_ahead_of_need() -> None:
    planner = stores(config=BACK)
    low = PAGES // LOW_SHARE
    assert planner.wanted(low) == 0
    assert planner.wanted(low - 3) == 3
    command, _ = planner.back([EvictedRun(prompt(8), np.array([1, 2], np.int32))])
    assert command is not None
    assert planner.wanted(low - 3) == 1
    assert stores().wanted(0) == 0


def test_beyond_the_share_pages_are_free_and_lost_to_the_tiers() -> None:
    planner = stores(config=BACK)
    most = PAGES // SHARE
    pages = np.arange(1, most + 6, dtype=np.int32)
    command, free = planner.back([EvictedRun(prompt(len(pages) * PAGE_SIZE), pages)])
    assert command is not None
    assert len(command.keys) == most
    assert free.tolist() == pages[most:].tolist()
    assert planner.skipped_pages == 5
    assert planner.wanted(0) == 0


# ----------------------------------------------------------------------------------------------- all together


def test_a_prompt_comes_back_through_the_tiers_byte_for_byte() -> None:
    """Stored through the thread, evicted, and restored into the pages of the next request for it."""
    kv, answers = pool(), queue.Queue[TierEvent]()
    store = host(32)
    memory = np.zeros((PAGES + 1, store.page_bytes), np.uint8)
    thread = TierThread(
        Tiers([store], "through"),
        memory,
        answers.put,
        VirtualClock(),
        max_queued_jobs=8,
        on_fatal=lambda: pytest.fail("the tier thread failed"),
    )
    thread.start()
    writer, reader = stores(), restores()
    one = admitted(kv, prompt(41))
    content = np.random.default_rng(1).integers(0, 256, (11, store.page_bytes), dtype=np.uint8)
    memory[kv.pages_of(one.record, 0, 41)] = content
    kv.commit_incoming(one.record, 41)
    kv.release_kv_cache(one, prompt(41))
    command = writer.through(prompt(41), kv.prefix)
    assert command is not None
    thread.post(command)
    stored = answers.get(timeout=20.0)
    assert isinstance(stored, PagesStored)
    writer.end(stored, kv.prefix)
    kv.clear_cache()
    memory[:] = 0
    cached(kv, prompt(20, seed=7))  # so that the pages are others
    two = admitted(kv, prompt(41))
    wanted = reader.begin(two, kv, 0.0)
    assert wanted is not None
    thread.post(wanted)
    restored = answers.get(timeout=20.0)
    assert isinstance(restored, PagesRestored)
    landed = reader.end(restored)
    assert (landed.start, landed.until) == (0, 40)
    assert np.array_equal(memory[kv.pages_of(two.record, 0, 40)], content[:10])
    kv.commit_incoming(two.record, landed.until)
    kv.cache_finished_req(two, prompt(41), kv_len_to_handle=40)
    assert writer.through(prompt(41), kv.prefix) is not None, "other pages: stored again, which the levels notice"
    assert thread.stop(20.0)


def test_job_ids_are_never_used_twice() -> None:
    kv, planner = pool(), restores()
    jobs: set[JobId] = set()
    for seed in range(4):
        command = planner.begin(admitted(kv, prompt(41, seed)), kv, 0.0)
        assert command is not None
        jobs.add(command.job)
        planner.end(PagesRestored(command.job, 0))
    assert len(jobs) == 4
