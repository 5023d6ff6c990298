"""The staging ring and the copies between slots and pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from msgspec import structs

from baton.common.engine.batch import KvMemory
from baton.common.ids import HandoffId, HandoffKey
from baton.common.kv.buffers import NumpyKvBuffer
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import Chunk, pack_tokens
from baton.transfer.digest import RegionDigest, digest_of, digest_of_pages
from baton.transfer.plan import Span
from baton.transfer.pool_copier import HostCopier
from baton.transfer.staging import (
    Damaged,
    NotMine,
    Scattered,
    SlotLease,
    StagingHandler,
    StagingRing,
    state_pieces_of,
    unit_rows,
)

KEY = HandoffKey(HandoffId(1), 1)


def chunk(
    seq: int, first_unit: int, units: int, data: np.ndarray, key: HandoffKey = KEY, component: str = "full"
) -> Chunk:
    return Chunk(
        key=key,
        seq=seq,
        tag=seq,
        component=Component(component),
        first_unit=first_unit,
        units=units,
        nbytes=len(data),
        digest=digest_of(data),
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

    @rule(want=st.integers(1, 4), again=st.booleans())
    def reserve(self, want: int, again: bool) -> None:
        known = sorted(self.open, key=lambda key: key.handoff)
        key = known[-1] if again and known else HandoffKey(HandoffId(self.next_key), 1)
        self.next_key += 1
        if want <= self.ring.free:
            self.ring.reserve(key, want)
            self.open[key] = self.open.get(key, 0) + want
        else:
            with pytest.raises(AssertionError):
                self.ring.reserve(key, want)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        idle = sorted((key for key, slots in self.open.items() if slots), key=lambda key: key.handoff)
        if idle:
            key = data.draw(st.sampled_from(idle))
            self.ring.release(key)
            self.open[key] -= 1

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
def test_the_digest_of_pages_is_that_of_their_gathered_bytes(page_bytes: int, ids: list[int]) -> None:
    pages = np.array(ids, dtype=np.int32)
    source = content(31, page_bytes).reshape(31, page_bytes)
    assert digest_of_pages(source, pages) == digest_of(source[pages].reshape(-1))


def span(component: str, units: list[int]) -> Span:
    return Span(Component(component), 0, pack_tokens(units))


def handler(*spans: Span) -> StagingHandler:
    """Units of FULL have 64 bytes, of SWA 24, of STATE 100."""
    sizes = zip(Component, (64, 24, 100), strict=True)
    pools = {component: np.zeros((16, size), dtype=np.uint8) for component, size in sizes}
    made = StagingHandler(HostCopier(pools), RegionDigest("full"))
    made.register_decode_req(KEY, spans)
    return made


def one_pool(units: list[int]) -> tuple[StagingHandler, np.ndarray]:
    made = handler(span("full", units))
    return made, made.copier.host_pools[Component.FULL]


def test_regions_land_where_they_belong_in_any_order_and_again() -> None:
    subject, pool = one_pool([9, 3, 5])
    tail, head = content(1, seed=1), content(2, seed=2)
    for _ in range(2):
        assert isinstance(subject._scatter_region(KEY, chunk(1, 2, 1, tail), tail), Scattered)
        assert isinstance(subject._scatter_region(KEY, chunk(0, 0, 2, head), head), Scattered)
    assert np.array_equal(pool[[9, 3]].reshape(-1), head)
    assert np.array_equal(pool[5], tail)
    assert not pool[[0, 1, 2, 4, 6, 7, 8, 10]].any()


def test_each_component_has_its_own_units_of_its_own_size() -> None:
    subject = handler(span("full", [9, 3]), span("swa", [3]), span("state", [4, 5, 6]))
    for seq, (name, first, units, size) in enumerate((("state", 1, 2, 100), ("full", 0, 2, 64), ("swa", 0, 1, 24))):
        data = content(units, size, seed=seq)
        assert isinstance(subject._scatter_region(KEY, chunk(seq, first, units, data, component=name), data), Scattered)
    pools = {component.value: pool for component, pool in subject.copier.host_pools.items()}
    assert np.array_equal(pools["full"][[9, 3]].reshape(-1), content(2, 64, seed=1))
    assert np.array_equal(pools["swa"][3], content(1, 24, seed=2))
    assert np.array_equal(pools["state"][[5, 6]].reshape(-1), content(2, 100, seed=0))
    assert [np.count_nonzero(pool.any(axis=1)) for pool in pools.values()] == [2, 1, 2]


@pytest.mark.parametrize(
    ("component", "first", "units"), [("full", 2, 2), ("full", 3, 1), ("full", 0, 4), ("swa", 0, 1), ("state", 1, 1)]
)
def test_a_region_outside_of_the_registration_is_not_ours(component: str, first: int, units: int) -> None:
    subject = handler(span("full", [9, 3, 5]), span("state", [4]))
    data = content(units, {"full": 64, "swa": 24, "state": 100}[component])
    outcome = subject._scatter_region(KEY, chunk(0, first, units, data, component=component), data)
    assert isinstance(outcome, NotMine)
    assert "outside" in outcome.reason
    assert not any(pool.any() for pool in subject.copier.host_pools.values())


def test_nothing_lands_after_forget_or_for_a_stranger() -> None:
    (subject, pool), data = one_pool([9, 3, 5]), content(1)
    other = HandoffKey(KEY.handoff, KEY.attempt + 1)
    assert isinstance(subject._scatter_region(other, chunk(0, 0, 1, data, other), data), NotMine)
    subject.forget(KEY)
    assert isinstance(subject._scatter_region(KEY, chunk(0, 0, 1, data), data), NotMine)
    assert not pool.any()


def test_a_sequence_number_has_one_place() -> None:
    subject, data = handler(span("full", [9, 3, 5]), span("swa", [3])), content(1)
    assert isinstance(subject._scatter_region(KEY, chunk(0, 0, 1, data), data), Scattered)
    assert isinstance(subject._scatter_region(KEY, chunk(0, 1, 1, data), data), NotMine)
    part = data[:24]
    assert isinstance(subject._scatter_region(KEY, chunk(0, 0, 1, part, component="swa"), part), NotMine)
    assert not subject.copier.host_pools[Component.FULL][3].any()
    assert not subject.copier.host_pools[Component.SWA].any()


def test_wrong_size_and_wrong_digest_are_damage_and_touch_nothing() -> None:
    (subject, pool), data = one_pool([9, 3, 5]), content(1)
    good = chunk(0, 0, 1, data)
    flipped = data.copy()
    flipped[17] ^= 4
    assert isinstance(subject._scatter_region(KEY, good, flipped), Damaged)
    assert isinstance(subject._scatter_region(KEY, good, data[:-8]), Damaged)
    assert isinstance(subject._scatter_region(KEY, chunk(0, 0, 2, data), data), Damaged)
    assert not pool.any()


def test_bytes_of_one_component_are_damage_for_another() -> None:
    subject, data = handler(span("full", [9]), span("swa", [3])), content(1)
    assert isinstance(subject._scatter_region(KEY, chunk(0, 0, 1, data, component="swa"), data), Damaged)
    assert isinstance(subject.verify_placed(KEY, chunk(0, 0, 1, data, component="swa")), Damaged)


@pytest.mark.parametrize(
    "spans",
    [[span("full", [0, 3])], [span("full", [9, 16])], [span("swa", [0])], [span("full", [1]), span("full", [2])]],
    ids=["the null page", "page outside of the pool", "another null page", "two segments of one component"],
)
def test_a_registration_that_cannot_be_right_is_a_bug(spans: list[Span]) -> None:
    with pytest.raises(AssertionError):
        handler(*spans)


def test_one_registration_per_key() -> None:
    subject, _ = one_pool([9, 3, 5])
    with pytest.raises(AssertionError, match="registered"):
        subject.register_decode_req(KEY, (span("full", [1]),))


def test_a_state_is_cut_into_pieces_of_the_same_memory() -> None:
    state = NumpyKvBuffer(4, 40000, 4)
    memory = KvMemory(KvLayout(4, state=True), {Component.FULL: NumpyKvBuffer(8, 64, 4), Component.STATE: state})
    assert state_pieces_of(memory) == 4
    rows = unit_rows(memory)
    assert {component.value: pool.shape for component, pool in rows.items()} == {"full": (8, 64), "state": (16, 10000)}
    rows[Component.STATE][4:8] = 7
    assert state.as_bytes()[1].all()
    assert not state.as_bytes()[[0, 2, 3]].any()


def test_a_part_of_the_layers_lands_in_their_bytes_alone() -> None:
    pool = np.zeros((16, 64), dtype=np.uint8)
    subject = StagingHandler(HostCopier({Component.FULL: pool}), RegionDigest("full"), {Component.FULL: 4})
    subject.register_decode_req(KEY, (span("full", [9, 3, 5]),))
    data = content(2, 32)
    second = structs.replace(chunk(1, 1, 2, data), part=1, parts=2)
    assert isinstance(subject._scatter_region(KEY, second, data), Scattered)
    assert np.array_equal(pool[[3, 5], 32:].reshape(-1), data)
    assert not pool[:, :32].any()
    assert isinstance(subject._scatter_region(KEY, structs.replace(second, part=0), data), NotMine)
    rows = subject.rows_of(Span(Component.FULL, 0, pack_tokens([3, 5]), part=1, parts=2))
    slot = np.zeros(64, dtype=np.uint8)
    assert subject.copier.gather(rows, slot).done()
    assert np.array_equal(slot, data)
