"""The tier thread with real memory: what it copies, in which order, when it answers, and what it never touches."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tier_rig import PAGE_BYTES, content, disk, host, key

from baton.common.clock import VirtualClock
from baton.common.kv.tiers.api import (
    AbortRestore,
    AbortStore,
    JobId,
    PagesRestored,
    PagesStored,
    RestorePages,
    StorePages,
    TierEvent,
)
from baton.common.kv.tiers.host import HostStore
from baton.common.kv.tiers.keys import PageKey
from baton.common.kv.tiers.store import Bytes, Demote, PageStore
from baton.common.kv.tiers.thread import STALL_S, TierThread
from baton.common.kv.tiers.tiers import Tiers

WAIT_S = 20.0
POOL_PAGES = 64


class GatedStore(HostStore):
    """Each page that is copied waits for a permit, once `gated`."""

    def __init__(self, pages: int = 64) -> None:
        super().__init__(pages * PAGE_BYTES, PAGE_BYTES)
        self.gated = False
        self.entered: queue.Queue[PageKey] = queue.Queue()
        self.permits = threading.Semaphore(0)
        self.order: list[tuple[str, PageKey]] = []

    def read(self, key: PageKey, out: Bytes) -> bool:
        self._pass("read", key)
        return super().read(key, out)

    def write(self, key: PageKey, data: Bytes, demote: Demote | None = None) -> bool:
        self._pass("write", key)
        return super().write(key, data, demote)

    def _pass(self, what: str, key: PageKey) -> None:
        self.order.append((what, key))
        if self.gated:
            self.entered.put(key)
            assert self.permits.acquire(timeout=WAIT_S), "nobody let it through"


class Rig:
    """A pool, a tier thread, and what it answers."""

    def __init__(self, stores: Sequence[PageStore], limit: int = 8) -> None:
        self.stores = stores
        self.clock = VirtualClock()
        self.pool = np.zeros((POOL_PAGES, PAGE_BYTES), np.uint8)
        self.tiers = Tiers(stores, "through")
        self.answers: queue.Queue[TierEvent] = queue.Queue()
        self.fatal = threading.Event()
        self.thread = TierThread(
            self.tiers,
            self.pool,
            self.answers.put,
            self.clock,
            max_queued_jobs=limit,
            on_fatal=self.fatal.set,
        )
        self.jobs = 0

    def store(self, numbers: Sequence[int], pages: Sequence[int]) -> JobId:
        """Fills the pages, and asks that they be kept."""
        keys = tuple(key(number) for number in numbers)
        for one, page in zip(keys, pages, strict=True):
            self.pool[page] = content(one)
        return self.post(lambda job: StorePages(job, keys, np.array(pages, np.int32)))

    def restore(self, numbers: Sequence[int], pages: Sequence[int], at_least: int = 1) -> JobId:
        keys = tuple(key(number) for number in numbers)
        return self.post(lambda job: RestorePages(job, keys, np.array(pages, np.int32), at_least))

    def post(self, make: Callable[[JobId], StorePages | RestorePages]) -> JobId:
        self.jobs += 1
        job = JobId(self.jobs)
        self.thread.post(make(job))
        return job

    def abort(self, job: JobId) -> None:
        self.thread.post(AbortRestore(job))

    def answer(self) -> TierEvent:
        return self.answers.get(timeout=WAIT_S)

    def holds(self, page: int, number: int) -> bool:
        return np.array_equal(self.pool[page], content(key(number)))

    def counter(self, name: str) -> int:
        return self.thread.counters()[name]


Make = Callable[..., Rig]


@pytest.fixture
def rig() -> Iterator[Make]:
    rigs: list[Rig] = []

    def make(*stores: PageStore, limit: int = 8, start: bool = True) -> Rig:
        rigs.append(Rig(stores or (host(64),), limit))
        if start:
            rigs[-1].thread.start()
        return rigs[-1]

    yield make
    for one in rigs:
        for store in one.stores:
            if isinstance(store, GatedStore):
                store.gated = False
                store.permits.release(1000)
        one.thread.stop(WAIT_S)
        one.tiers.close()


def gate(store: GatedStore) -> GatedStore:
    store.gated = True
    return store


# ------------------------------------------------------------------------------------------------- copying


def test_pages_go_down_and_come_back_elsewhere(rig: Make, tmp_path: Path) -> None:
    one = rig(host(2), disk(tmp_path / "kv", 64))
    job = one.store(range(10), range(1, 11))
    assert one.answer() == PagesStored(job, 10)
    one.pool[:] = 0
    job = one.restore(range(10), range(40, 50))
    assert one.answer() == PagesRestored(job, 10)
    assert all(one.holds(40 + number, number) for number in range(10))
    assert not one.pool[:40].any()
    assert not one.pool[50:].any()


def test_a_restore_ends_at_the_first_page_that_is_not_there(rig: Make) -> None:
    one = rig()
    one.store([0, 1, 3], [1, 2, 3])
    one.answer()
    job = one.restore([0, 1, 2, 3], [10, 11, 12, 13])
    assert one.answer() == PagesRestored(job, 2)
    assert not one.pool[12:].any()


def test_a_page_that_turns_out_damaged_ends_it_too(rig: Make, tmp_path: Path) -> None:
    one = rig(disk(tmp_path / "kv", 64))
    one.store(range(3), [1, 2, 3])
    one.answer()
    (damaged,) = (tmp_path / "kv").rglob(f"{key(1).hex()}.kv")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    job = one.restore(range(3), [10, 11, 12])
    assert one.answer() == PagesRestored(job, 1)
    assert one.holds(10, 0)


def test_too_few_pages_are_not_copied(rig: Make) -> None:
    one = rig()
    one.store([0, 1], [1, 2])
    one.answer()
    job = one.restore([0, 1, 2, 3], [10, 11, 12, 13], at_least=3)
    assert one.answer() == PagesRestored(job, 0)
    assert not one.pool[10:].any()
    job = one.restore([0, 1, 2, 3], [10, 11, 12, 13], at_least=2)
    assert one.answer() == PagesRestored(job, 2)


def test_nothing_to_do_is_answered(rig: Make) -> None:
    one = rig()
    job = one.store([], [])
    assert one.answer() == PagesStored(job, 0)
    job = one.restore([], [])
    assert one.answer() == PagesRestored(job, 0)


def test_a_store_tells_how_many_pages_were_taken(rig: Make, tmp_path: Path) -> None:
    one = rig(disk(tmp_path / "kv", 64))
    (tmp_path / "kv").rename(tmp_path / "gone")
    job = one.store([0, 1], [1, 2])
    assert one.answer() == PagesStored(job, 0)


def test_only_pages_without_a_gap_before_them_count_as_taken(rig: Make) -> None:
    class Picky(HostStore):
        def write(self, key: PageKey, data: Bytes, demote: Demote | None = None) -> bool:
            return key != refused and super().write(key, data, demote)

    refused = key(1)
    one = rig(Picky(64 * PAGE_BYTES, PAGE_BYTES))
    job = one.store([0, 1, 2], [1, 2, 3])
    assert one.answer() == PagesStored(job, 1)
    job = one.restore([2], [10])
    assert one.answer() == PagesRestored(job, 1)


# --------------------------------------------------------------------------------------------------- order


def test_a_restore_overtakes_stores_between_two_pages(rig: Make) -> None:
    store = GatedStore()
    one = rig(store)
    one.store([0], [1])
    one.answer()
    gate(store)
    stored = one.store([1, 2, 3], [2, 3, 4])
    assert store.entered.get(timeout=WAIT_S) == key(1)
    restored = one.restore([0], [10])
    store.gated = False
    store.permits.release()
    assert one.answer() == PagesRestored(restored, 1)
    assert one.answer() == PagesStored(stored, 3)
    assert store.order[1:] == [("write", key(1)), ("read", key(0)), ("write", key(2)), ("write", key(3))]


# ---------------------------------------------------------------------------------------------------- abort


def test_an_abort_ends_a_restore_at_the_next_page(rig: Make) -> None:
    store = GatedStore()
    one = rig(store)
    one.store(range(4), [1, 2, 3, 4])
    one.answer()
    gate(store)
    job = one.restore(range(4), [10, 11, 12, 13])
    assert store.entered.get(timeout=WAIT_S) == key(0)
    store.permits.release()
    assert store.entered.get(timeout=WAIT_S) == key(1)
    one.abort(job)
    assert one.answers.empty(), "answered while a page was being written"
    store.permits.release()
    assert one.answer() == PagesRestored(job, 2)
    assert one.holds(10, 0)
    assert one.holds(11, 1)
    assert not one.pool[12:].any()
    one.abort(job)  # late: it has been answered
    job = one.restore([0], [20])
    store.permits.release()
    assert one.answer() == PagesRestored(job, 1)
    assert one.counter("aborted_restores") == 1


def test_a_restore_that_was_not_begun_is_given_back_at_once(rig: Make) -> None:
    store = GatedStore()
    one = rig(store)
    one.store([0], [1])
    one.answer()
    gate(store)
    first, second, third = one.restore([0], [10]), one.restore([0], [11]), one.restore([0], [12])
    assert store.entered.get(timeout=WAIT_S) == key(0)
    one.abort(second)
    assert one.answers.get_nowait() == PagesRestored(second, 0)
    store.permits.release(2)
    assert [one.answer(), one.answer()] == [PagesRestored(first, 1), PagesRestored(third, 1)]
    assert not one.pool[11].any()


def test_a_store_is_given_up_at_the_next_page_or_at_once(rig: Make) -> None:
    store = GatedStore()
    one = rig(store)
    gate(store)
    begun = one.store([0, 1, 2], [1, 2, 3])
    assert store.entered.get(timeout=WAIT_S) == key(0)
    waiting = one.store([3], [4])
    one.thread.post(AbortStore(waiting))
    assert one.answers.get_nowait() == PagesStored(waiting, 0)
    one.thread.post(AbortStore(begun))
    assert one.answers.empty(), "answered while a page was being read"
    store.permits.release()
    assert one.answer() == PagesStored(begun, 1)
    one.thread.post(AbortStore(begun))  # late: it has been answered
    last = one.store([4], [5])
    store.permits.release()
    assert one.answer() == PagesStored(last, 1)
    assert store.order == [("write", key(0)), ("write", key(4))]
    assert one.counter("dropped_stores") == 1


def test_an_abort_of_nothing_is_ignored(rig: Make) -> None:
    one = rig()
    one.abort(JobId(99))
    job = one.restore([0], [10])
    assert one.answer() == PagesRestored(job, 0)


# ------------------------------------------------------------------------------------------------- overflow


def test_stores_beyond_the_bound_are_dropped(rig: Make) -> None:
    one = rig(limit=2, start=False)
    jobs = [one.store([number], [number + 1]) for number in range(4)]
    assert [one.answers.get_nowait() for _ in range(2)] == [PagesStored(job, 0) for job in jobs[2:]]
    assert one.counter("dropped_stores") == 2
    one.thread.start()
    assert [one.answer(), one.answer()] == [PagesStored(job, 1) for job in jobs[:2]]


def test_restores_beyond_the_bound_come_back_empty(rig: Make) -> None:
    one = rig(limit=2, start=False)
    jobs = [one.restore([0], [number]) for number in range(10, 14)]
    assert [one.answers.get_nowait() for _ in range(2)] == [PagesRestored(job, 0) for job in jobs[2:]]
    assert one.counter("refused_restores") == 2
    store = one.store([0], [1])  # has a queue of its own
    one.thread.start()
    assert [one.answer() for _ in range(3)] == [*(PagesRestored(job, 0) for job in jobs[:2]), PagesStored(store, 1)]


def test_nobody_queues_behind_a_level_that_does_not_move(rig: Make) -> None:
    store = GatedStore()
    one = rig(store)
    gate(store)
    slow = one.store([0], [1])
    store.entered.get(timeout=WAIT_S)
    one.clock.advance_to(STALL_S)
    waits = one.restore([5], [10])
    assert one.answers.empty()
    one.clock.advance_to(STALL_S + 0.1)
    refused = one.restore([5], [11])
    assert one.answers.get_nowait() == PagesRestored(refused, 0)
    dropped = one.store([6], [12])
    assert one.answers.get_nowait() == PagesStored(dropped, 0)
    store.permits.release()
    assert [one.answer(), one.answer()] == [PagesStored(slow, 1), PagesRestored(waits, 0)]
    for page in (12, 13):  # an idle thread is not a slow one
        one.clock.advance_to(one.clock.now() + 2 * STALL_S)
        late = one.restore([0], [page])
        store.permits.release()
        assert one.answer() == PagesRestored(late, 1)
    assert one.counter("refused_restores") == 1


# ------------------------------------------------------------------------------------------------------ end


def test_stopping_answers_everything_and_waits_for_the_page_in_hand(rig: Make) -> None:
    store = GatedStore()
    one = rig(store)
    gate(store)
    begun, waiting = one.store([0, 1], [1, 2]), one.store([2], [3])
    store.entered.get(timeout=WAIT_S)
    restore = one.restore([0], [10])
    assert not one.thread.stop(0.0)
    assert [one.answer(), one.answer()] == [PagesRestored(restore, 0), PagesStored(waiting, 0)]
    assert one.answers.empty(), "answered while a page was being read"
    store.permits.release()
    assert one.answer() == PagesStored(begun, 1)
    assert one.thread.stop(WAIT_S)
    assert one.store([5], [5]) == one.answers.get_nowait().job
    assert one.restore([5], [5]) == one.answers.get_nowait().job
    assert one.answers.empty()


def test_a_bug_in_a_level_is_fatal(rig: Make) -> None:
    class Broken(HostStore):
        def read(self, key: PageKey, out: Bytes) -> bool:
            raise RuntimeError("a bug")

        def known_prefix(self, keys: Sequence[PageKey]) -> int:
            return len(keys)

    one = rig(Broken(64 * PAGE_BYTES, PAGE_BYTES))
    one.restore([0], [1])
    assert one.fatal.wait(WAIT_S)


# ---------------------------------------------------------------------------------------------------- storm


class Lender:
    """Lends pages to jobs. Pages that it holds bear a mark of its own: who touches one that was given back is seen,
    by the mark if it wrote, and by what a later restore finds if it read."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self.rig = rig
        self.rng = rng
        self.free = list(range(1, POOL_PAGES))
        self.lent: dict[JobId, tuple[list[int], list[int], bool]] = {}
        rig.pool[1:, :] = 255

    def lend(self, numbers: list[int]) -> None:
        pages = [self.free.pop() for _ in numbers]
        assert (self.rig.pool[pages] == 255).all(), "somebody wrote to a page after giving it back"
        restores = self.rng.random() < 0.5
        job = (self.rig.restore if restores else self.rig.store)(numbers, pages)
        self.lent[job] = (numbers, pages, restores)

    def take_back(self) -> None:
        answer = self.rig.answer()
        numbers, pages, restores = self.lent.pop(answer.job)
        assert isinstance(answer, PagesRestored) == restores
        landed = list(zip(pages, numbers, strict=True))[: answer.pages] if restores else []
        assert all(self.rig.holds(page, number) for page, number in landed)
        self.rig.pool[pages] = 255
        self.free[:0] = pages


@pytest.mark.parametrize("seed", range(6))
def test_in_a_storm_every_job_is_answered_once_and_pages_are_let_go(rig: Make, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    one = rig(host(6), disk(tmp_path / "kv", 20), limit=4)
    lender = Lender(one, rng)
    for _ in range(150):
        # As many as the queues hold, so that most are carried out however slow the thread is; and sometimes more.
        most = 4 if rng.random() < 0.8 else 10
        while len(lender.lent) >= most:
            lender.take_back()
        lender.lend(rng.sample(range(30), rng.randrange(1, 6)))
        if rng.random() < 0.3:
            one.abort(rng.choice(list(lender.lent)))
    while lender.lent:
        lender.take_back()
    assert one.thread.stop(WAIT_S)
    assert one.answers.empty()
    assert (one.pool[1:] == 255).all()
    counters = one.thread.counters()
    assert counters["disk.damaged"] == 0
    assert min(counters["restored_pages"], counters["stored_pages"]) > 0
