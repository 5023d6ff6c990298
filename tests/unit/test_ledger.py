"""What two endpoints tell of their hand-offs, on a clock that moves 1 ms with each thing that one tells the other."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from baton.common.config import TransferConfig
from baton.common.engine.core_api import MembershipView
from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import Ack, Failure, Frame, Member, SamplingParams
from baton.common.trace import Interval, Recorder
from baton.transfer.api import (
    AbortSink,
    FinishSource,
    OfferReceived,
    OpenSink,
    PrefillResult,
    ShipRegion,
    SourceAborted,
    SourceReleased,
)
from baton.transfer.endpoint import Endpoint
from baton.transfer.reports import Flow, HandoffTimes
from baton.transfer.session.effects import (
    EndpointEffect,
    EngineEvent,
    FenceSink,
    FenceSource,
    Landed,
    LandRegion,
    PrepareSink,
    RegionDamaged,
    RegionReady,
    SendFrame,
    SendRegion,
    SinkFenced,
    SinkPrepared,
    SourceFenced,
)
from baton.transfer.session.ledger import KEPT_HANDOFFS, REGIONS_KEPT, Ledger

DECODE = Stamp(WorkerId("decode-0"), 1, Epoch(1))
PREFILL = Stamp(WorkerId("prefill-0"), 1, Epoch(2))
CONFIG = TransferConfig(resend_after_s=0.5, handoff_ttl_s=10.0, tombstone_ttl_s=20.0, max_tombstones=1000)
STEP_S = 0.001
GATHER_S = 0.0004
PAGE_SIZE, REGION_PAGES, CREDIT, UNIT_BYTES = 4, 2, 2, 100
RESULT = PrefillResult(7, None, 0.1, 0)
CLOSED = Failure(code=ErrorCode.CANCELLED, reason="enough")


def key(number: int) -> HandoffKey:
    return HandoffKey(HandoffId(number), 1)


@dataclass
class Pair:
    """Both ends; each thing one of them says takes STEP_S to be done or heard. What is `held` waits in `kept`."""

    lane: str = "zmq"
    damage: set[int] = field(default_factory=set)  # seqs whose first try is damaged
    hold_acks: bool = False

    def __post_init__(self) -> None:
        self.now = 100.0
        layout = KvLayout(PAGE_SIZE)
        self.ends = {stamp: Endpoint(stamp, CONFIG, layout, ["zmq", "local"]) for stamp in (DECODE, PREFILL)}
        members = tuple(Member(stamp=stamp, role="", address="") for stamp in self.ends)
        for end in self.ends.values():
            end.on_membership(MembershipView(1, members), self.now)
        self.engine: list[object] = []
        self.kept: list[tuple[Stamp, EndpointEffect]] = []
        self._todo: deque[tuple[Stamp, EndpointEffect]] = deque()

    def ledger(self, stamp: Stamp) -> Ledger:
        return self.ends[stamp].ledger

    def flow(self, stamp: Stamp) -> Flow:
        [flow] = self.ledger(stamp).flows(self.now)
        return flow

    def last(self, stamp: Stamp) -> HandoffTimes:
        return self.ledger(stamp).handoffs()[-1]

    def open(self, number: int, pages: int) -> None:
        tokens, ids = np.arange(pages * PAGE_SIZE, dtype=np.int32), np.arange(1, pages + 1, dtype=np.int32)
        sampling, deadline_s = SamplingParams(), self.now + 100.0
        command = OpenSink(
            key(number), PREFILL.worker, RequestId("r"), tokens, 0, {Component.FULL: ids}, True, sampling, deadline_s
        )
        self.tell(DECODE, command)

    def ship(self, number: int, pages: int) -> None:
        ids = np.arange(1, pages + 1, dtype=np.int32)
        self.tell(PREFILL, ShipRegion(key(number), 0, pages * PAGE_SIZE, ids))

    def hand_over(self, number: int, pages: int) -> None:
        self.open(number, pages)
        self.ship(number, pages)
        self.tell(PREFILL, FinishSource(key(number), RESULT))

    def tell(self, stamp: Stamp, command: object) -> None:
        self._say(stamp, self.ends[stamp].command(command, self.now))  # type: ignore[arg-type]
        self.run()

    def release_kept(self) -> None:
        self._todo.extend(self.kept)
        self.kept, self.hold_acks = [], False
        self.run()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for stamp, end in self.ends.items():
            self._say(stamp, end.on_timer(self.now))
        self.run()

    def run(self) -> None:
        while self._todo:
            stamp, effect = self._todo.popleft()
            self.now += STEP_S
            if isinstance(effect, SendFrame):
                self._deliver(stamp, effect)
            else:
                self._do(stamp, effect)

    def _say(self, stamp: Stamp, effects: list[EndpointEffect]) -> None:
        self._todo.extend((stamp, effect) for effect in effects)

    def _deliver(self, stamp: Stamp, effect: SendFrame) -> None:
        if self.hold_acks and isinstance(effect.body, Ack):
            self.kept.append((stamp, effect))
            return
        [peer] = [one for one in self.ends if one.worker == effect.worker]
        self._say(peer, self.ends[peer].on_frame(Frame(stamp, peer.epoch, effect.body), self.now))

    def _do(self, stamp: Stamp, effect: EndpointEffect) -> None:
        match effect:
            case PrepareSink():
                self._hear(stamp, SinkPrepared(effect.key, self.lane, CREDIT, (REGION_PAGES,)))
            case SendRegion():
                nbytes = effect.span.units * UNIT_BYTES
                self._hear(stamp, RegionReady(effect.key, effect.seq, effect.tag, nbytes, 0, GATHER_S))
            case LandRegion():
                chunk = effect.chunk
                if chunk.seq in self.damage:
                    self.damage.remove(chunk.seq)
                    self._hear(stamp, RegionDamaged(effect.key, chunk.seq))
                else:
                    self._hear(stamp, Landed(effect.key, chunk.seq, chunk.nbytes, 0.0))
            case FenceSink():
                self._hear(stamp, SinkFenced(effect.key))
            case FenceSource():
                self._hear(stamp, SourceFenced(effect.key))
            case EngineEvent():
                self.engine.append(effect.event)
            case _:
                pass

    def _hear(self, stamp: Stamp, event: object) -> None:
        self._say(stamp, self.ends[stamp].on_data(event, self.now))  # type: ignore[arg-type]


def test_both_sides_tell_the_same_of_a_hand_off() -> None:
    pair = Pair()
    pair.hand_over(1, pages=7)
    sink, source = pair.flow(DECODE), pair.flow(PREFILL)
    assert (sink.peer, sink.lane, sink.direction) == ("prefill-0", "zmq", "in")
    assert (source.peer, source.lane, source.direction) == ("decode-0", "zmq", "out")
    for flow in (sink, source):
        assert (flow.nbytes, flow.regions, flow.region.count, flow.handoff.count) == (700, 4, 4, 1)
        assert (flow.failed, flow.resent_frames, flow.damaged_regions, flow.lane_failures) == (0, 0, 0, 0)
        assert 0 < flow.busy_s < flow.handoff.total_s
        assert flow.mean_gbps == pytest.approx(700 / flow.busy_s / 1e9)
    assert source.tail.count == 1
    assert 0 < source.tail.total_s < source.handoff.total_s


def test_a_timeline_is_in_order_and_says_what_waited() -> None:
    pair = Pair()
    pair.hand_over(1, pages=7)
    got, given = pair.last(DECODE), pair.last(PREFILL)
    assert got.handoff == given.handoff
    assert list(got.marks) == ["offered", "accepted", "first region", "all announced", "committed", "over"]
    assert list(given.marks) == ["first computed", "first region", "all computed", "committed", "over"]
    for times in (got, given):
        assert sorted(times.marks.values()) == list(times.marks.values())
        assert (times.outcome, times.request_id, times.tokens, times.nbytes) == ("committed", "r", 28, 700)
        assert [region.nbytes for region in times.regions] == [200, 200, 200, 100]
        assert all(region.begun_s < region.ended_s for region in times.regions)
    assert pair.flow(DECODE).queue_s == pytest.approx(STEP_S)  # OpenSink until SinkPrepared
    assert pair.flow(PREFILL).queued == 4


def test_a_region_waits_for_its_turn_but_not_while_it_is_gathered() -> None:
    pair = Pair()
    pair.hand_over(1, pages=1)
    assert pair.flow(PREFILL).queue_s == pytest.approx(STEP_S - GATHER_S)


def test_regions_that_overlap_keep_a_lane_busy_once() -> None:
    pair = Pair()
    pair.hand_over(1, pages=8)
    times, flow = pair.last(DECODE), pair.flow(DECODE)
    alone = sum(region.ended_s - region.begun_s for region in times.regions)
    assert flow.region.total_s == pytest.approx(alone)
    assert flow.busy_s < alone


def test_a_source_without_credit_stalls_until_it_gets_some() -> None:
    pair = Pair(hold_acks=True)
    pair.open(1, pages=8)
    pair.ship(1, pages=8)
    before = pair.flow(PREFILL)
    assert (before.stalls, before.stall_s) == (1, 0.0)  # it is still going on
    pair.now += 0.25
    pair.release_kept()
    after = pair.flow(PREFILL)
    assert after.stalls == 1
    first, second, *_ = pair.last(PREFILL).regions
    assert after.stall_s == pytest.approx(first.ended_s - second.begun_s)
    assert after.stall_s > 0.25
    assert pair.last(PREFILL).stall_s == after.stall_s


def test_a_commit_acknowledges_what_was_not() -> None:
    pair = Pair(hold_acks=True)
    pair.hand_over(1, pages=4)
    assert len(pair.kept) == 2
    assert pair.flow(PREFILL).regions == pair.flow(PREFILL).region.count == 2
    assert pair.last(PREFILL).nbytes == pair.last(DECODE).nbytes == 400


def test_no_stall_while_credit_is_left_or_nothing_more_is_computed() -> None:
    pair = Pair(hold_acks=True)
    pair.open(1, pages=4)
    pair.ship(1, pages=4)
    pair.now += 0.25
    pair.release_kept()
    assert pair.flow(PREFILL).stalls == 0


def test_what_is_said_again_and_asked_for_again_is_counted() -> None:
    pair = Pair(hold_acks=True, damage={1})
    pair.open(1, pages=4)
    pair.ship(1, pages=4)
    assert pair.flow(DECODE).damaged_regions == pair.flow(PREFILL).damaged_regions == 1
    pair.wait(CONFIG.resend_after_s)
    assert pair.flow(PREFILL).resent_frames == 2  # two Chunks without an Ack
    assert pair.last(PREFILL).resent_frames == 2
    assert pair.flow(DECODE).regions == 2
    pair.release_kept()
    pair.tell(PREFILL, FinishSource(key(1), RESULT))
    for stamp in (DECODE, PREFILL):
        busy_s = pair.flow(stamp).busy_s
        pair.now += 10.0
        assert pair.flow(stamp).busy_s == busy_s, "a damaged region is not under way until it comes again"


def test_what_ends_badly_is_told_with_its_reason() -> None:
    pair = Pair()
    pair.open(1, pages=4)
    pair.tell(DECODE, AbortSink(key(1), CLOSED))
    for stamp in (DECODE, PREFILL):
        assert (pair.flow(stamp).failed, pair.flow(stamp).handoff.count) == (1, 0)
        assert (pair.last(stamp).outcome, pair.last(stamp).reason) == ("failed", "cancelled: enough")
    assert isinstance(pair.engine[-1], SourceAborted)


def test_a_hand_off_that_is_cut_leaves_no_lane_busy() -> None:
    pair = Pair(hold_acks=True)
    pair.open(1, pages=4)
    pair.ship(1, pages=4)
    pair.tell(DECODE, AbortSink(key(1), CLOSED))
    busy_s = pair.flow(PREFILL).busy_s
    pair.now += 10.0
    assert pair.flow(PREFILL).busy_s == busy_s > 0


def test_a_change_of_lane_is_counted_where_it_went() -> None:
    pair = Pair()
    pair.hand_over(1, pages=1)
    pair.lane = "local"
    pair.hand_over(2, pages=1)
    pair.hand_over(3, pages=1)
    for stamp in (DECODE, PREFILL):
        flows = {flow.lane: flow for flow in pair.ledger(stamp).flows(pair.now)}
        assert {lane: flow.lane_changes for lane, flow in flows.items()} == {"local": 1, "zmq": 0}
        assert {lane: flow.handoff.count for lane, flow in flows.items()} == {"local": 2, "zmq": 1}


def test_open_hand_offs_are_shown_last_and_memory_is_bounded() -> None:
    pair = Pair()
    for number in range(KEPT_HANDOFFS + 10):
        pair.hand_over(number, pages=2 * REGIONS_KEPT + 20 if number == KEPT_HANDOFFS else 1)
    pair.open(1000, pages=1)
    shown = pair.ledger(DECODE).handoffs()
    assert len(shown) == KEPT_HANDOFFS + 1
    assert [times.outcome for times in shown[-2:]] == ["committed", "open"]
    assert max(len(times.regions) for times in shown) == REGIONS_KEPT
    assert max(times.region_count for times in shown) == REGIONS_KEPT + 10
    assert sum(isinstance(event, SourceReleased) for event in pair.engine) == KEPT_HANDOFFS + 10
    assert sum(isinstance(event, OfferReceived) for event in pair.engine) == KEPT_HANDOFFS + 11


def test_a_recorder_gets_each_region_and_each_hand_off() -> None:
    pair = Pair()
    recorder = pair.ledger(DECODE).trace = Recorder()
    pair.hand_over(1, pages=7)
    regions = [item for item in recorder.take().items if isinstance(item, Interval) and item.track == "wire zmq"]
    [whole] = [item for item in recorder.take().items if isinstance(item, Interval) and item.track == "hand-offs in"]
    assert [region.args["seq"] for region in regions] == [0, 1, 2, 3]
    assert all(whole.begin_s < region.begin_s < region.end_s <= whole.end_s for region in regions)
    assert (whole.args["bytes"], whole.args["failure"]) == (700, "")
