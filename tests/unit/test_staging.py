"""The staging ring and the copies between slots and pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from baton.common.ids import HandoffId, HandoffKey
from baton.common.messages import Chunk
from baton.transfer.staging import (
    Damaged,
    NotMine,
    Scattered,
    SlotLease,
    StagingHandler,
    StagingRing,
    digest_of,
    digest_of_pages,
    gather_pages,
    scatter_pages,
)

KEY = HandoffKey(HandoffId(1), 1)
PAGE_SIZE = 4


def chunk(seq: int, first_token: int, tokens: int, data: np.ndarray, key: HandoffKey = KEY) -> Chunk:
    return Chunk(
        key=key, seq=seq, tag=seq, first_token=first_token, tokens=tokens, nbytes=len(data), digest=digest_of(data)
    )


def content(pages: int, page_bytes: int = 64, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, pages * page_bytes, dtype=np.uint8)


class RingMachine(RuleBasedStateMachine):
    """Any order of reserving, leasing, giving back and closing keeps the slots partitioned and never overcommits."""

    leases = Bundle("leases")

    @initialize(slots=st.integers(1, 6))
    def build(self, slots: int) -> None:
        self.ring = StagingRing(slots * 4096, 4096)
        self.next_key = 0
        self.open: dict[HandoffKey, int] = {}  # key -> slots granted and not leased
        self.out: list[SlotLease] = []

    @rule(want=st.integers(1, 4))
    def reserve(self, want: int) -> None:
        key = HandoffKey(HandoffId(self.next_key), 1)
        self.next_key += 1
        free = self.ring.free
        granted = self.ring.reserve(key, want)
        assert granted == min(want, free)
        if granted:
            self.open[key] = granted

    @rule(target=leases, data=st.data())
    def lease(self, data: st.DataObject) -> SlotLease | None:
        if not self.open:
            return None
        key = data.draw(st.sampled_from(sorted(self.open, key=lambda key: key.handoff)))
        lease = self.ring.lease(key, 0)
        assert (lease is not None) == (self.open[key] > 0), "a reservation is worth exactly its slots"
        if lease is not None:
            self.open[key] -= 1
            self.out.append(lease)
        return lease

    @rule(target=leases)
    def lease_unreserved(self) -> SlotLease | None:
        free = self.ring.free
        lease = self.ring.lease_free(HandoffKey(HandoffId(-1), 1), 0)
        assert (lease is not None) == (free > 0)
        if lease is not None:
            self.out.append(lease)
        return lease

    @rule(lease=consumes(leases))
    def give_back(self, lease: SlotLease | None) -> None:
        if lease is None:
            return
        self.ring.give_back(lease)
        self.out.remove(lease)
        if lease.key in self.open:
            self.open[lease.key] += 1

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.open:
            key = data.draw(st.sampled_from(sorted(self.open, key=lambda key: key.handoff)))
            self.ring.close(key)
            del self.open[key]

    @invariant()
    def partitioned(self) -> None:
        self.ring.check()
        assert self.ring.leased == len(self.out)
        assert self.ring.reserved == sum(self.open.values())
        assert self.ring.free == self.ring.slots - self.ring.leased - self.ring.reserved

    @invariant()
    def no_slot_in_two_hands(self) -> None:
        assert len({lease.index for lease in self.out}) == len(self.out)


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_a_slot_that_is_out_stays_quarantined_after_its_hand_off_ended() -> None:
    ring = StagingRing(2 * 4096, 4096)
    ring.reserve(KEY, 2)
    lease = ring.lease(KEY, 0)
    assert lease is not None
    ring.close(KEY)
    assert (ring.free, ring.leased) == (1, 1)
    ring.give_back(lease)
    assert ring.free == 2
    with pytest.raises(AssertionError, match="twice"):
        ring.give_back(lease)


@given(
    page_bytes=st.sampled_from([8, 12, 64, 100]),
    ids=st.lists(st.integers(1, 30), min_size=1, max_size=30, unique=True),
)
@settings(max_examples=60, deadline=None)
def test_gather_and_scatter_are_inverse_and_touch_only_their_pages(page_bytes: int, ids: list[int]) -> None:
    pages = np.array(ids, dtype=np.int32)
    source = content(31, page_bytes).reshape(31, page_bytes)
    staged = np.zeros(len(pages) * page_bytes, dtype=np.uint8)
    gather_pages(source, pages, staged)
    assert np.array_equal(staged.reshape(len(pages), -1), source[pages])
    assert digest_of_pages(source, pages) == digest_of(staged)
    target = np.zeros_like(source)
    scatter_pages(target, pages, staged)
    expected = np.zeros_like(source)
    expected[pages] = source[pages]
    assert np.array_equal(target, expected)


def handler(pages: list[int], start: int = 8, total: int = 18) -> StagingHandler:
    made = StagingHandler(np.zeros((16, 64), dtype=np.uint8), PAGE_SIZE)
    made.register_decode_req(KEY, np.array(pages, dtype=np.int32), start, total)
    return made


def test_regions_land_where_they_belong_in_any_order_and_again() -> None:
    subject = handler([9, 3, 5])  # tokens 8..11, 12..15, 16..17
    tail, head = content(1, seed=1), content(2, seed=2)
    for _ in range(2):
        assert isinstance(subject._scatter_region(KEY, chunk(1, 16, 2, tail), tail), Scattered)
        assert isinstance(subject._scatter_region(KEY, chunk(0, 8, 8, head), head), Scattered)
    assert np.array_equal(subject.pool[[9, 3]].reshape(-1), head)
    assert np.array_equal(subject.pool[5], tail)
    assert subject.landed_spans(KEY) == [(8, 16), (16, 18)]
    assert not subject.pool[[0, 1, 2, 4, 6, 7, 8, 10]].any()


@pytest.mark.parametrize(
    ("first_token", "tokens", "pages", "reason"),
    [
        (9, 4, 1, "not page-aligned"),
        (8, 5, 2, "not page-aligned"),
        (4, 4, 1, "outside"),
        (16, 4, 1, "outside"),
        (20, 4, 1, "outside"),
    ],
)
def test_a_region_outside_of_the_registration_is_not_ours(
    first_token: int, tokens: int, pages: int, reason: str
) -> None:
    subject, data = handler([9, 3, 5]), content(pages)
    outcome = subject._scatter_region(KEY, chunk(0, first_token, tokens, data), data)
    assert isinstance(outcome, NotMine)
    assert reason in outcome.reason
    assert not subject.pool.any()


def test_nothing_lands_after_forget_or_for_a_stranger() -> None:
    subject, data = handler([9, 3, 5]), content(1)
    other = HandoffKey(KEY.handoff, KEY.attempt + 1)
    assert isinstance(subject._scatter_region(other, chunk(0, 8, 4, data, other), data), NotMine)
    subject.forget(KEY)
    assert isinstance(subject._scatter_region(KEY, chunk(0, 8, 4, data), data), NotMine)
    assert not subject.pool.any()


def test_a_sequence_number_has_one_place() -> None:
    subject, data = handler([9, 3, 5]), content(1)
    assert isinstance(subject._scatter_region(KEY, chunk(0, 8, 4, data), data), Scattered)
    assert isinstance(subject._scatter_region(KEY, chunk(0, 12, 4, data), data), NotMine)
    assert not subject.pool[3].any()


def test_wrong_size_and_wrong_digest_are_damage_and_touch_nothing() -> None:
    subject, data = handler([9, 3, 5]), content(1)
    good = chunk(0, 8, 4, data)
    flipped = data.copy()
    flipped[17] ^= 4
    assert isinstance(subject._scatter_region(KEY, good, flipped), Damaged)
    assert isinstance(subject._scatter_region(KEY, good, data[:-8]), Damaged)
    assert isinstance(subject._scatter_region(KEY, chunk(0, 8, 8, data), data), Damaged)
    assert not subject.pool.any()


@pytest.mark.parametrize(
    ("pages", "start", "total"),
    [([9, 3], 8, 18), ([9, 3, 5], 9, 18), ([0, 3, 5], 8, 18), ([9, 3, 16], 8, 18)],
    ids=["too few pages", "start not aligned", "the null page", "page outside of the pool"],
)
def test_a_registration_that_cannot_be_right_is_a_bug(pages: list[int], start: int, total: int) -> None:
    with pytest.raises(AssertionError):
        handler(pages, start, total)


def test_one_registration_per_key() -> None:
    subject = handler([9, 3, 5])
    with pytest.raises(AssertionError, match="registered"):
        subject.register_decode_req(KEY, np.array([1], dtype=np.int32), 0, 4)
