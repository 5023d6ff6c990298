"""What every lane must do, as tests that each lane's test file inherits. Never used outside of tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from msgspec import structs

from baton.common.kv.layout import Component
from baton.transfer.digest import digest_of
from baton.transfer.session.effects import (
    PULL_LANES,
    FenceSource,
    Landed,
    RegionDamaged,
    RegionReady,
    SinkLaneFailed,
    SinkNotPrepared,
    SourceFenced,
    SourceLaneFailed,
)
from baton.transfer.testing_ends import (
    FULL_ONLY,
    HYBRID,
    End,
    EndKeys,
    EndSpec,
    HandOff,
    KvSpec,
    RemoteEnd,
    SourceEnd,
    pump,
    random_pool,
    small_config,
)
from baton.transfer.transports.base import UnitIds
from baton.transfer.transports.inproc import InprocHub

SourceT = TypeVar("SourceT", bound=SourceEnd)
REOPENED_S = 5.0
"""A link that died silently is noticed by UCX after 20 s."""


@contextmanager
def closing_both(pair: tuple[End, SourceT]) -> Iterator[tuple[End, SourceT]]:
    """The two ends of a test, closed behind it."""
    try:
        yield pair
    finally:
        for end in pair:
            end.close()


class TransportContract:
    """Inherited by one test class per lane, which names the lane. `remote`: whether it reaches other processes;
    `staged`: whether a page is touched only by what was verified before; `slotted`: whether its regions take slots."""

    lane = ""
    remote = True
    staged = True
    slotted = True

    def make_pair(self, kv: KvSpec = FULL_ONLY) -> tuple[End, End]:
        hub = InprocHub()
        keys = EndKeys.generate()
        config = small_config(self.lane)
        sink = End(EndSpec("sink", 7, self.lane, keys, config, kv), hub)
        source = End(EndSpec("source", 8, self.lane, keys, config, kv, fill=1), hub)
        sink.set_peers([source.member])
        return sink, source

    def make_remote_pair(self, kv: KvSpec = FULL_ONLY) -> tuple[End, RemoteEnd]:
        keys = EndKeys.generate()
        config = small_config(self.lane)
        source = RemoteEnd(EndSpec("source", 8, self.lane, keys, config, kv, fill=1))
        sink = End(EndSpec("sink", 7, self.lane, keys, config, kv))
        sink.set_peers([source.member])
        return sink, source

    # ----------------------------------------------------------------------------------------- content

    def test_regions_of_every_size_arrive_in_their_pages_and_nowhere_else(self) -> None:
        rng = np.random.default_rng(3)
        with closing_both(self.make_pair()) as (sink, source):
            for count in (1, 2, 4, 7):
                sink.pool[:] = 0
                hand_off = self._hand_off(sink, source, rng, count)
                assert hand_off.prepare().region_units == (4,)
                for seq, first in enumerate(range(0, count, 4)):
                    hand_off.move(seq, slice(first, min(count, first + 4)))
                    assert pump([sink, source], lambda: seq in hand_off.landed()), "not landed in time"  # noqa: B023
                self._check_content(hand_off)
                hand_off.close()
            self._check_all_slots_return(sink, source)

    def test_parts_of_pages_arrive_in_their_layers_and_nowhere_else(self) -> None:
        with closing_both(self.make_pair()) as (sink, source):
            hand_off = self._hand_off(sink, source, np.random.default_rng(13), 5)
            hand_off.prepare()
            for part, done in (
                (1, slice(1024, 2048)),
                (2, slice(1024, 4096)),
                (0, slice(0, 4096)),
            ):  # of 1, 2, 1 layers
                hand_off.move(part, slice(0, 5), part=(part, 3))
                assert pump([sink, source], lambda: part in hand_off.landed()), "not landed in time"  # noqa: B023
                expected = np.zeros_like(sink.pool)
                expected[hand_off.sink_pages, done] = source.pool[hand_off.source_pages, done]
                assert np.array_equal(sink.pool, expected)
            hand_off.close()
            self._check_all_slots_return(sink, source)

    def test_many_hand_offs_at_once_do_not_mix(self) -> None:
        with closing_both(self.make_pair()) as (sink, source):
            ids = np.random.default_rng(4).permutation(np.arange(1, 64, dtype=np.int32))
            hand_offs = [HandOff(sink, source, ids[i : i + 6][::-1], ids[i : i + 6]) for i in range(0, 24, 6)]
            for hand_off in hand_offs:
                hand_off.prepare()
            for seq, pages in enumerate((slice(0, 4), slice(4, 6))):
                for hand_off in hand_offs:
                    hand_off.send(seq, pages)
                for hand_off in reversed(hand_offs):
                    ready = hand_off.ready(seq)
                    hand_off.land(hand_off.chunk(seq, pages, ready.nbytes, ready.digest))
            assert pump([sink, source], lambda: all(h.landed() == {0, 1} for h in hand_offs))
            for hand_off in hand_offs:
                self._check_pages(hand_off)
                hand_off.close()
            self._check_all_slots_return(sink, source)

    def test_asking_first_and_sending_first_are_both_fine(self) -> None:
        with closing_both(self.make_pair()) as (sink, source):
            hand_off = self._hand_off(sink, source, np.random.default_rng(5), 4)
            hand_off.prepare()
            data = source.pool[hand_off.source_pages].reshape(-1)
            hand_off.land(hand_off.chunk(0, slice(0, 4), len(data), digest_of(data)))
            pump([sink, source], lambda: False, wait_s=0.05)
            hand_off.send(0, slice(0, 4))
            assert pump([sink, source], lambda: hand_off.landed() == {0})
            self._check_content(hand_off)

    def test_components_with_pages_of_unlike_size_share_a_hand_off(self) -> None:
        with closing_both(self.make_pair(HYBRID)) as (sink, source):
            self._check_hybrid(sink, source)
            self._check_all_slots_return(sink, source)

    def test_between_two_processes(self) -> None:
        if not self.remote:
            return
        with closing_both(self.make_remote_pair(HYBRID)) as (sink, source):
            self._check_hybrid(sink, source)

    def test_a_component_that_was_not_agreed_on_lands_nowhere(self) -> None:
        with closing_both(self.make_pair(HYBRID)) as (sink, source):
            ids, piece = np.array([3, 4], dtype=np.int32), np.array([5], dtype=np.int32)
            hand_off = HandOff(sink, source, ids, ids)
            hand_off.prepare()
            hand_off.units[Component.STATE] = (piece, piece)  # the source's idea alone
            hand_off.move(0, slice(0, 1), Component.STATE)
            assert pump([sink, source], lambda: bool(hand_off.of(SinkLaneFailed)))
            assert not any(pool.any() for pool in sink.pools.values())

    # ---------------------------------------------------------------------------------------- adversity

    def test_damage_is_found_and_a_second_try_succeeds(self) -> None:
        with closing_both(self.make_pair()) as (sink, source):
            hand_off = self._hand_off(sink, source, np.random.default_rng(7), 4)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            ready = hand_off.ready(0)
            hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest ^ 1))
            assert pump([sink, source], lambda: bool(hand_off.of(RegionDamaged)))
            assert not hand_off.landed()
            if self.staged:
                assert not sink.pool.any(), "a damaged region touched a page"
            fresh = hand_off.tag_base + 1000
            hand_off.send(0, slice(0, 4), tag=fresh)
            assert pump([sink, source], lambda: len(hand_off.of(RegionReady)) == 2)
            hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest), tag=fresh)
            assert pump([sink, source], lambda: hand_off.landed() == {0})
            self._check_content(hand_off)

    def test_what_comes_after_a_fence_lands_nowhere_and_every_slot_returns(self) -> None:
        with closing_both(self.make_pair()) as (sink, source):
            hand_off = self._hand_off(sink, source, np.random.default_rng(8), 8)
            hand_off.prepare()
            data = source.pool[hand_off.source_pages].reshape(-1)
            if self.lane not in PULL_LANES:  # ask for regions that nobody has sent yet
                for seq, pages in enumerate((slice(0, 4), slice(4, 8))):
                    part = data.reshape(8, -1)[pages].reshape(-1)
                    hand_off.land(hand_off.chunk(seq, pages, len(part), digest_of(part)))
            pump([sink, source], lambda: False, wait_s=0.05)
            hand_off.fence()
            hand_off.send(0, slice(0, 4))  # the source has not heard of it yet
            hand_off.send(1, slice(4, 8))
            pump([sink, source], lambda: len(hand_off.of(RegionReady)) == 2)
            pump([sink, source], lambda: False, wait_s=0.1)
            assert not sink.pool.any(), "late bytes reached a page"
            source.execute(FenceSource(hand_off.key))
            assert hand_off.of(SourceFenced)
            self._check_all_slots_return(sink, source)
            assert not hand_off.of(Landed)

    def test_a_source_that_gives_up_frees_its_slots_before_anybody_asks(self) -> None:
        with closing_both(self.make_pair()) as (sink, source):
            hand_off = self._hand_off(sink, source, np.random.default_rng(9), 4)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            ready = hand_off.ready(0)
            source.execute(FenceSource(hand_off.key))
            assert pump([source], lambda: self._all_free(source)), "a cancelled send must end"
            if self.lane not in PULL_LANES:
                hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest))
                pump([sink, source], lambda: False, wait_s=0.05)
                assert not hand_off.landed()
            hand_off.fence()
            self._check_all_slots_return(sink, source)

    def test_a_tag_that_is_taken_harms_nobody_but_who_named_it_twice(self) -> None:
        if self.lane in PULL_LANES:
            return  # has no tags
        with closing_both(self.make_pair()) as (sink, source):
            hand_off = self._hand_off(sink, source, np.random.default_rng(12), 8)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            hand_off.send(1, slice(4, 8), tag=hand_off.tag_base)
            assert pump([source], lambda: bool(hand_off.of(SourceLaneFailed))), "the second one must end"
            ready = hand_off.ready(0)
            hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest))
            assert pump([sink, source], lambda: hand_off.landed() == {0}), "the first one arrives"
            hand_off.fence()
            source.execute(FenceSource(hand_off.key))
            self._check_all_slots_return(sink, source)

    def test_an_announced_size_that_is_wrong_touches_no_page(self) -> None:
        with closing_both(self.make_pair()) as (sink, source):
            hand_off = self._hand_off(sink, source, np.random.default_rng(10), 4)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            ready = hand_off.ready(0)
            hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes // 2, ready.digest))
            over = (RegionDamaged, SinkLaneFailed)
            assert pump([sink, source], lambda: any(hand_off.of(kind) for kind in over))
            assert not hand_off.landed()
            assert not sink.pool.any()
            hand_off.fence()
            source.execute(FenceSource(hand_off.key))
            self._check_all_slots_return(sink, source)

    def test_a_region_that_was_not_agreed_on_is_refused(self) -> None:
        with closing_both(self.make_pair()) as (sink, source):
            hand_off = self._hand_off(sink, source, np.random.default_rng(11), 4)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            ready = hand_off.ready(0)
            chunk = hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest)
            hand_off.land(structs.replace(chunk, first_unit=1))
            assert pump([sink, source], lambda: bool(hand_off.of(SinkLaneFailed)))
            assert not sink.pool.any()

    def test_hand_offs_wait_for_slots_in_order_of_arrival(self) -> None:
        if not self.slotted:
            return
        with closing_both(self.make_pair()) as (sink, source):
            rng = np.random.default_rng(12)
            first = [self._hand_off(sink, source, rng, 8) for _ in range(5)]  # 2, 2, 2, 1, 1 slots: all eight
            for hand_off in first:
                hand_off.prepare()
            late = [self._hand_off(sink, source, rng, 8) for _ in range(2)]
            for hand_off in late:
                hand_off.ask_to_prepare()
            pump([sink, source], lambda: False, wait_s=0.05)
            assert not any(hand_off.prepared_now() for hand_off in late), "overcommitted"
            first[3].close()
            assert late[0].prepared_now()
            assert not late[1].prepared_now()
            late[0].fence()
            assert late[1].prepared_now()

    def test_a_link_that_is_opened_again_leaves_the_other_direction_alone(self) -> None:
        """Both receive from each other, where KV is returned. What becomes of one direction is nothing to the other."""
        with closing_both(self.make_pair()) as (sink, source):
            source.set_peers([sink.member])
            self._until_both_up(sink, source)
            for ours, theirs in ((sink, source), (source, sink), (sink, source), (sink, source)):
                waiting = self._hand_off(theirs, ours, np.random.default_rng(15), 8)
                waiting.prepare()
                waiting.move(0, slice(0, 4))
                waiting.send(1, slice(4, 8))
                ready = waiting.ready(1)
                ours.set_peers([])
                ours.set_peers([theirs.member])
                self._until_both_up(sink, source)
                waiting.land(waiting.chunk(1, slice(4, 8), ready.nbytes, ready.digest))
                assert pump([sink, source], lambda: waiting.landed() == {0, 1}, REOPENED_S), "it died with the other"  # noqa: B023
                waiting.close()
                again = self._hand_off(ours, theirs, np.random.default_rng(16), 4)
                again.prepare()
                again.move(0, slice(0, 4))
                assert pump([sink, source], lambda: again.landed() == {0}, REOPENED_S), "opened again in vain"  # noqa: B023
                again.close()
            self._check_all_slots_return(sink, source)

    def test_two_processes_open_their_links_again_in_turns(self) -> None:
        if not self.remote:
            return
        with closing_both(self.make_remote_pair()) as (sink, source):
            ids = np.arange(1, 5, dtype=np.int32)
            source.set_peers([sink.member])
            for opened in (None, source, sink, source, source, sink):
                if opened is not None:
                    opened.set_peers([])
                    opened.set_peers([(sink if opened is source else source).member])
                for to, by in ((sink, source), (source, sink)):
                    hand_off = HandOff(to, by, ids, ids)
                    hand_off.prepare()
                    hand_off.move(0, slice(0, 4))
                    assert pump([sink, source], lambda: hand_off.landed() == {0}, REOPENED_S)  # noqa: B023
                    hand_off.close()
            assert pump([sink], lambda: self._all_free(sink)), "a slot is stuck"

    def test_a_killed_source_ends_everything_at_the_sink(self) -> None:
        if not self.remote:
            return
        with closing_both(self.make_remote_pair()) as (sink, source):
            ids = np.arange(1, 9, dtype=np.int32)
            hand_off = HandOff(sink, source, ids, ids + 20)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            ready = hand_off.ready(0)
            if self.lane not in PULL_LANES:
                data = random_pool(64, 4096, 1)[ids[4:]].reshape(-1)
                hand_off.land(hand_off.chunk(1, slice(4, 8), len(data), digest_of(data)))
            pump([sink, source], lambda: False, wait_s=0.05)
            source.kill()
            hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest))
            if self.lane == "local":  # what was announced can still be read; that nothing follows is for others to see
                assert pump([sink], lambda: hand_off.landed() == {0})
                assert np.array_equal(sink.pool[21:25], random_pool(64, 4096, 1)[1:5])
            else:
                assert pump([sink], lambda: bool(hand_off.of(SinkLaneFailed))), "the death was not noticed"
            hand_off.fence()
            assert pump([sink], lambda: self._all_free(sink)), "a slot is stuck"
            assert not sink.pool[25:].any(), "the region that was never sent landed"

    def test_a_stopped_source_keeps_no_slot_and_its_late_bytes_land_nowhere(self) -> None:
        if not self.remote:
            return
        with closing_both(self.make_remote_pair()) as (sink, source):
            ids = np.arange(1, 9, dtype=np.int32)
            hand_off = HandOff(sink, source, ids, ids + 20)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            ready = hand_off.ready(0)
            source.stop()
            if self.lane not in PULL_LANES:
                hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest))
                pump([sink], lambda: False, wait_s=0.1)
            hand_off.fence()
            assert pump([sink], lambda: self._all_free(sink)), "a slot is stuck"
            source.resume()
            pump([sink, source], lambda: False, wait_s=0.2)
            assert not sink.pool.any(), "late bytes reached a page"
            second = self._until_prepared(sink, source, ids, ids + 30)  # its silence is not held against it for ever
            second.move(0, slice(0, 4))
            assert pump([sink, source], lambda: second.landed() == {0})

    # ------------------------------------------------------------------------------------------ helpers

    def _check_hybrid(self, sink: End, source: SourceEnd) -> None:
        """26 tokens of HYBRID: seven pages, a window of three, a state in four pieces; to their places only."""
        rng, counts = np.random.default_rng(6), {Component.FULL: 7, Component.SWA: 3, Component.STATE: 4}
        sent = {component: random_pool(*size, 1) for component, size in zip(counts, HYBRID.pools, strict=True)}

        def some(component: Component) -> UnitIds:
            if component is Component.STATE:  # whole slots
                return np.arange(4, dtype=np.int32) + 4 * rng.integers(1, 8, dtype=np.int32)
            return rng.permutation(np.arange(1, len(sent[component]), dtype=np.int32))[: counts[component]]

        units = {component: (some(component), some(component)) for component in counts}
        hand_off = HandOff(sink, source, *units.pop(Component.FULL), units)
        most = dict(zip(counts, hand_off.prepare().region_units, strict=True))
        assert most == {Component.FULL: 4, Component.SWA: 10, Component.STATE: 1}
        regions = [
            (component, slice(first, min(first + most[component], count)))
            for component, count in counts.items()
            for first in range(0, count, most[component])
        ]
        for seq, (component, part) in enumerate(regions):
            hand_off.move(seq, part, component)
            assert pump([sink, source], lambda: seq in hand_off.landed()), "not landed in time"  # noqa: B023
        for component, (theirs, ours) in hand_off.units.items():
            expected = np.zeros_like(sink.pools[component])
            expected[ours] = sent[component].reshape(expected.shape)[theirs]
            assert np.array_equal(sink.pools[component], expected), component
        hand_off.close()

    def _hand_off(self, sink: End, source: SourceEnd, rng: np.random.Generator, pages: int) -> HandOff:
        def some() -> UnitIds:
            return rng.permutation(np.arange(1, 64, dtype=np.int32))[:pages]

        return HandOff(sink, source, some(), some())

    def _until_prepared(self, sink: End, source: SourceEnd, theirs: UnitIds, ours: UnitIds) -> HandOff:
        """Attempt after attempt, as a decode worker makes them, until there is a lane again."""
        attempts = [HandOff(sink, source, theirs, ours)]
        attempts[-1].ask_to_prepare()

        def prepared() -> bool:
            if attempts[-1].of(SinkNotPrepared):
                attempts.append(HandOff(sink, source, theirs, ours))
                attempts[-1].ask_to_prepare()
            return attempts[-1].prepared_now() is not None

        assert pump([sink, source], prepared), "the lane did not come back"
        return attempts[-1]

    def _until_both_up(self, sink: End, source: End) -> None:
        assert pump([sink, source], lambda: sink.is_up(source) and source.is_up(sink)), "the lanes did not come up"

    def _check_pages(self, hand_off: HandOff) -> None:
        assert isinstance(hand_off.source, End)
        assert isinstance(hand_off.sink, End)
        sent = hand_off.source.pool[hand_off.source_pages]
        assert np.array_equal(hand_off.sink.pool[hand_off.sink_pages], sent)

    def _check_content(self, hand_off: HandOff) -> None:
        """The pages, and that nothing else was touched."""
        self._check_pages(hand_off)
        assert isinstance(hand_off.sink, End)
        others = np.setdiff1d(np.arange(len(hand_off.sink.pool)), hand_off.sink_pages)
        assert not hand_off.sink.pool[others].any(), "a page outside of the hand-off was written"

    def _check_all_slots_return(self, sink: End, source: End) -> None:
        def all_free() -> bool:
            return self._all_free(sink) and self._all_free(source)

        assert pump([sink, source], all_free), f"slots are stuck: {sink.slots()} {source.slots()}"

    def _all_free(self, end: End) -> bool:
        """No transport has memory of it any more."""
        return end.slots() == ((8, 0, 0), (8, 0, 0)) and not end.operations()
