"""The source machine, step by step: what it cuts, sends, re-sends, and when it lets go of its pages."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import (
    Accept,
    Ack,
    Cancel,
    Cancelled,
    Chunk,
    Commit,
    Done,
    Failed,
    Failure,
    Nack,
    SamplingParams,
    pack_tokens,
)
from baton.transfer.api import (
    AbortSource,
    FinishSource,
    OfferReceived,
    PrefillResult,
    ShipRegion,
    SourceAborted,
    SourceReleased,
    SourceStopping,
)
from baton.transfer.plan import Span, segments_of
from baton.transfer.session.effects import (
    EngineEvent,
    FenceSource,
    RegionReady,
    SendFrame,
    SendRegion,
    SourceFenced,
    SourceLaneFailed,
)
from baton.transfer.session.source import (
    Aborted,
    AwaitingAck,
    Closed,
    Quarantined,
    SourceState,
    SourceTerms,
    accept_offer,
    source_step,
    source_timer,
)
from baton.transfer.session.step import (
    DeadlinePassed,
    ImpossibleTransition,
    PeerDead,
    PeerSilent,
    ResendDue,
    SessionRules,
    Verdict,
)

KEY = HandoffKey(HandoffId(1), 3)
PEER = Stamp(WorkerId("decode-1"), 2, Epoch(77))
RULES = SessionRules(page_size=4, resend_after_s=0.5, state_pieces=3)
FAILURE = Failure(code=ErrorCode.DRAINING, reason="going away")
RESULT = PrefillResult(first_token=42, logprob=None, prefill_s=0.25, cached_tokens=8)
FIRST_CHUNK = Chunk(key=KEY, seq=0, tag=1000, first_unit=0, units=2, nbytes=80, digest=5)
FULL = KvLayout(4)
CANCEL = Cancel(key=KEY, failure=Failure(code=ErrorCode.CANCELLED))


class Driver:
    """A source and what it has said so far. [4, 23) is wanted: five pages, the last one not full."""

    def __init__(self, lane: str = "zmq", credit: int = 2, layout: KvLayout = FULL) -> None:
        segments = segments_of(layout, 4, 23, RULES.state_pieces, {Component.FULL: 3})
        terms = SourceTerms(KEY, PEER, lane, 23, segments, True, (2,) * len(segments), 1000, 30.0)
        tokens = np.arange(23, dtype=np.int32)
        received = OfferReceived(KEY, PEER, RequestId("r"), tokens, 4, True, SamplingParams(), 30.0)
        first = accept_offer(terms, credit, received)
        assert first.effects == (
            EngineEvent(received),
            SendFrame(PEER.worker, PEER.epoch, Accept(key=KEY)),
        )
        self.state: SourceState = first.state
        self.lane, self.verdict = lane, Verdict.MOVE

    def tell(self, event: object, now: float = 0.0) -> list[object]:
        """Frames are shown by their body, engine events by the event."""
        step = source_step(self.state, event, now, RULES)  # type: ignore[arg-type]
        self.state, self.verdict = step.state, step.verdict
        shown: list[object] = []
        for effect in step.effects:
            if isinstance(effect, SendFrame):
                assert (effect.worker, effect.dst_epoch) == (PEER.worker, PEER.epoch)
                shown.append(effect.body)
            else:
                shown.append(effect.event if isinstance(effect, EngineEvent) else effect)
        return shown

    def send(
        self, seq: int, first_unit: int, units: list[int], tag: int | None = None, component: str = "full"
    ) -> SendRegion:
        span = Span(Component(component), first_unit, pack_tokens(units))
        return SendRegion(KEY, PEER, self.lane, seq, 1000 + seq if tag is None else tag, span)

    def up_to_done(self) -> Driver:
        """Three regions, all announced, the first one acknowledged."""
        self.tell(ship(4, 12, [11, 12, 13]))
        self.tell(ship(16, 7, [14, 15]))
        self.tell(FinishSource(KEY, RESULT))
        for seq, tokens in enumerate((8, 4)):
            self.tell(RegionReady(KEY, seq, 1000 + seq, tokens * 10, 5))
        self.tell(Ack(key=KEY, seq=0, credit=3))
        self.tell(RegionReady(KEY, 2, 1002, 70, 5))
        return self


def ship(first_token: int, tokens: int, pages: list[int], component: str = "full") -> ShipRegion:
    return ShipRegion(KEY, first_token, tokens, np.array(pages, dtype=np.int32), Component(component))


def test_the_happy_path() -> None:
    driver = Driver()
    assert driver.tell(ship(4, 12, [11, 12, 13])) == [driver.send(0, 0, [11, 12]), driver.send(1, 2, [13])]
    assert driver.tell(RegionReady(KEY, 0, 1000, 80, 5)) == [FIRST_CHUNK]
    assert driver.tell(ship(16, 7, [14, 15])) == []  # no credit for a third one
    done = Done(key=KEY, regions=3, total_tokens=23, first_token=42, prefill_s=0.25, cached_tokens=8)
    assert driver.tell(FinishSource(KEY, RESULT)) == [done], "its token is not kept back until there is credit"
    assert driver.tell(Ack(key=KEY, seq=0, credit=3)) == [driver.send(2, 3, [14, 15])]
    assert [type(body) for body in driver.tell(RegionReady(KEY, 1, 1001, 40, 6))] == [Chunk]
    chunk, again = driver.tell(RegionReady(KEY, 2, 1002, 70, 7))
    assert isinstance(chunk, Chunk)
    assert again == done
    assert driver.tell(Commit(key=KEY)) == [FenceSource(KEY)]
    assert driver.tell(SourceFenced(KEY)) == [SourceReleased(KEY)]
    assert source_timer(driver.state) is None


def test_a_finish_after_everything_is_announced_says_done_at_once() -> None:
    driver = Driver(credit=9)
    driver.tell(ship(4, 19, [1, 2, 3, 4, 5]))
    for seq in range(3):
        driver.tell(RegionReady(KEY, seq, 1000 + seq, 1, 1))
    assert [type(body) for body in driver.tell(FinishSource(KEY, RESULT))] == [Done]


def test_pull_lanes_name_the_pages_to_read() -> None:
    for lane, pages in (("local", pack_tokens([11, 12])), ("zmq", b"")):
        driver = Driver(lane)
        driver.tell(ship(4, 8, [11, 12]))
        [chunk] = driver.tell(RegionReady(KEY, 0, 1000, 80, 5))
        assert chunk.source_pages == pages  # type: ignore[attr-defined]


def test_whatever_is_not_acknowledged_is_sent_again() -> None:
    driver = Driver()
    driver.tell(ship(4, 12, [11, 12, 13]))
    assert source_timer(driver.state) == 30.0
    driver.tell(RegionReady(KEY, 0, 1000, 80, 5), now=1.0)
    driver.tell(RegionReady(KEY, 1, 1001, 40, 5), now=1.2)
    assert source_timer(driver.state) == 1.5  # a later region does not put an earlier one off
    assert [body.seq for body in driver.tell(ResendDue(), now=1.5)] == [0, 1]  # type: ignore[attr-defined]
    driver.tell(Ack(key=KEY, seq=0, credit=3))
    assert [body.seq for body in driver.tell(ResendDue(), now=2.0)] == [1]  # type: ignore[attr-defined]
    driver = Driver().up_to_done()
    assert [type(body) for body in driver.tell(ResendDue(), now=2.0)] == [Chunk, Chunk, Done]


def test_acks_of_any_order_and_number_only_raise_credit() -> None:
    driver = Driver(credit=1)
    driver.tell(ship(4, 12, [11, 12, 13]))
    driver.tell(RegionReady(KEY, 0, 1000, 80, 5))
    assert driver.tell(Ack(key=KEY, seq=0, credit=2)) == [driver.send(1, 2, [13])]
    for again in (Ack(key=KEY, seq=0, credit=2), Ack(key=KEY, seq=0, credit=1), Ack(key=KEY, seq=1, credit=1)):
        assert driver.tell(again) == []
        assert driver.verdict is Verdict.IGNORED_DUPLICATE
    assert driver.tell(Ack(key=KEY, seq=999, credit=5)) == []


def test_a_damaged_region_is_gathered_again_under_the_tag_that_was_asked_for() -> None:
    for driver in (Driver(), Driver().up_to_done()):
        if not driver.tell(Nack(key=KEY, seq=1, tag=1006)):  # not announced yet
            assert driver.verdict is Verdict.IGNORED_STALE
            driver.tell(ship(4, 12, [11, 12, 13]))
            driver.tell(RegionReady(KEY, 1, 1001, 40, 5))
            assert driver.tell(Nack(key=KEY, seq=1, tag=1006)) == [driver.send(1, 2, [13], tag=1006)]
        assert driver.tell(Nack(key=KEY, seq=1, tag=1006)) == []
        assert driver.verdict is Verdict.IGNORED_DUPLICATE
        [chunk] = driver.tell(RegionReady(KEY, 1, 1006, 40, 5))
        assert (chunk.seq, chunk.tag) == (1, 1006)  # type: ignore[attr-defined]
        assert driver.tell(Nack(key=KEY, seq=1, tag=1006)) == []
        fence, failed = driver.tell(Nack(key=KEY, seq=1, tag=1007))
        assert fence == FenceSource(KEY)
        assert failed.failure.code is ErrorCode.TRANSFER_CORRUPT  # type: ignore[attr-defined]


def test_a_nack_about_a_region_that_has_landed_is_stale() -> None:
    driver = Driver().up_to_done()
    assert driver.tell(Nack(key=KEY, seq=0, tag=1005)) == []
    assert driver.verdict is Verdict.IGNORED_STALE


@pytest.mark.parametrize("lane", ["zmq", "local"])
def test_cancel_is_proof_and_is_acknowledged_after_the_fence(lane: str) -> None:
    for driver in (Driver(lane), Driver(lane).up_to_done()):
        assert driver.tell(CANCEL) == [FenceSource(KEY)]
        assert driver.tell(CANCEL) == []
        assert driver.tell(SourceFenced(KEY)) == [Cancelled(key=KEY), SourceAborted(KEY, CANCEL.failure)]
        assert driver.tell(CANCEL) == [Cancelled(key=KEY)]


def test_on_a_staged_lane_the_own_fence_is_proof_enough() -> None:
    for event in (PeerSilent(), DeadlinePassed(), SourceLaneFailed(KEY, FAILURE), AbortSource(KEY, FAILURE)):
        driver = Driver("zmq").up_to_done()
        fence, failed = driver.tell(event, now=1.0)
        assert fence == FenceSource(KEY)
        assert isinstance(failed, Failed)
        [aborted] = driver.tell(SourceFenced(KEY))
        assert aborted == SourceAborted(KEY, failed.failure)
        assert isinstance(driver.state, Aborted)
        assert source_timer(driver.state) == 1.5
        assert driver.tell(ResendDue(), now=1.5) == [failed]
        assert driver.tell(CANCEL) == [Cancelled(key=KEY)]
        assert isinstance(driver.state, Closed)


def test_on_a_pull_lane_only_the_peer_can_prove_that_it_has_stopped_reading() -> None:
    for event in (PeerSilent(), DeadlinePassed(), SourceLaneFailed(KEY, FAILURE), AbortSource(KEY, FAILURE)):
        for proof in (CANCEL, Commit(key=KEY), PeerDead()):
            driver = Driver("local").up_to_done()
            fence, failed, *stopping = driver.tell(event)
            assert fence == FenceSource(KEY)
            assert isinstance(failed, Failed)
            if isinstance(event, AbortSource):
                assert stopping == []  # the engine has asked for it: it knows
            else:
                assert stopping == [SourceStopping(KEY, failed.failure)]
            assert driver.tell(SourceFenced(KEY)) == []
            assert isinstance(driver.state, Quarantined)
            for no_proof in (PeerSilent(), Ack(key=KEY, seq=1, credit=9), AbortSource(KEY, FAILURE)):
                assert driver.tell(no_proof) == []
            assert driver.tell(ResendDue(), now=99.0) == [failed]
            assert driver.tell(proof)[-1] == SourceAborted(KEY, failed.failure)
            assert isinstance(driver.state, Closed)


def test_a_proof_before_the_fence_still_waits_for_the_fence() -> None:
    driver = Driver("local").up_to_done()
    driver.tell(AbortSource(KEY, FAILURE))
    assert driver.tell(CANCEL) == []
    assert driver.tell(SourceFenced(KEY)) == [Cancelled(key=KEY), SourceAborted(KEY, FAILURE)]


def test_a_pull_lane_where_nothing_was_announced_needs_no_proof() -> None:
    for shipped in (False, True):
        driver = Driver("local")
        if shipped:
            driver.tell(ship(4, 8, [11, 12]))
        assert driver.tell(PeerSilent())[0] == FenceSource(KEY)
        [aborted] = driver.tell(SourceFenced(KEY))
        assert isinstance(aborted, SourceAborted)


def test_a_commit_before_done_means_that_this_is_an_echo() -> None:
    driver = Driver()
    driver.tell(ship(4, 8, [11, 12]))
    assert driver.tell(Commit(key=KEY)) == [FenceSource(KEY)]
    assert isinstance(driver.tell(SourceFenced(KEY))[-1], SourceAborted)


def test_commands_that_cross_the_end_are_ignored() -> None:
    driver = Driver()
    driver.tell(ship(4, 12, [11, 12, 13]))
    driver.tell(CANCEL)
    for _ in range(2):
        for late in (ship(16, 7, [14, 15]), FinishSource(KEY, RESULT), AbortSource(KEY, FAILURE)):
            assert driver.tell(late) == []
            assert driver.verdict is Verdict.IGNORED_STALE
        if not isinstance(driver.state, Closed):
            driver.tell(SourceFenced(KEY))
    assert isinstance(driver.state, Closed)


def test_bugs_of_this_process_raise() -> None:
    driver = Driver()
    for event in (FinishSource(KEY, RESULT), RegionReady(KEY, 0, 1000, 1, 1), SourceFenced(KEY)):
        with pytest.raises(ImpossibleTransition):
            driver.tell(event)
    for wrong in (ship(8, 4, [1]), ship(4, 6, [1, 2]), ship(4, 20, [1] * 5), ship(4, 8, [1]), ship(4, 4, [0])):
        with pytest.raises(AssertionError):
            driver.tell(wrong)
    driver.tell(ship(4, 12, [11, 12, 13]))
    with pytest.raises(AssertionError, match="before everything was shipped"):
        driver.tell(FinishSource(KEY, RESULT))
    driver.tell(ship(16, 7, [14, 15]))
    with pytest.raises(AssertionError, match="first token"):
        driver.tell(FinishSource(KEY, PrefillResult(-1, None, 0.0, 0)))


HYBRID = KvLayout(
    4, window=5, state=True
)  # of [4, 23): five pages, the window [16, 23) of two, a state of three pieces


def test_segments_are_shipped_in_order_and_done_comes_after_the_last() -> None:
    driver = Driver(credit=9, layout=HYBRID)
    driver.tell(ship(4, 12, [11, 12, 13]))
    driver.tell(ship(16, 7, [14, 15]))
    assert driver.tell(ship(16, 7, [5, 6], "swa")) == [driver.send(3, 0, [5, 6], component="swa")]
    assert driver.tell(ship(4, 19, [2], "state")) == [
        driver.send(4, 0, [6, 7], component="state"),
        driver.send(5, 2, [8], component="state"),
    ]
    driver.tell(FinishSource(KEY, RESULT))
    for seq in range(5):
        driver.tell(RegionReady(KEY, seq, 1000 + seq, 1, 1))
    chunk, done = driver.tell(RegionReady(KEY, 5, 1005, 1, 1))
    assert chunk == Chunk(
        key=KEY, seq=5, tag=1005, component=Component.STATE, first_unit=2, units=1, nbytes=1, digest=1
    )
    assert (done.regions, done.total_tokens) == (6, 23)  # type: ignore[attr-defined]


def test_shipping_in_another_way_is_a_bug() -> None:
    full = [ship(4, 19, [1, 2, 3, 4, 5])]
    window = [*full, ship(16, 7, [5, 6], "swa")]
    for before, wrong in (
        ([], ship(16, 7, [5, 6], "swa")),  # before its turn
        (full, ship(4, 19, [2], "state")),
        (full, ship(12, 11, [4, 5, 6], "swa")),  # more than the window
        (window, ship(16, 7, [5, 6], "swa")),  # twice
        (window, ship(4, 12, [2], "state")),  # a part of it
        (window, ship(4, 19, [2, 3], "state")),
    ):
        driver = Driver(layout=HYBRID)
        for shipment in before:
            driver.tell(shipment)
        with pytest.raises(AssertionError):
            driver.tell(wrong)
    for done in (full, window):
        driver = Driver(layout=HYBRID)
        for shipment in done:
            driver.tell(shipment)
        with pytest.raises(AssertionError, match="before everything was shipped"):
            driver.tell(FinishSource(KEY, RESULT))
    with pytest.raises(AssertionError, match="no swa was asked for"):
        Driver().tell(ship(16, 7, [5, 6], "swa"))


def by_layers(part: int, parts: int = 3) -> ShipRegion:
    """Of pages 3 and 4."""
    return replace(ship(16, 7, [14, 15]), part=part, parts=parts)


def test_the_last_pages_go_by_layers_part_after_part() -> None:
    driver = Driver(credit=9)
    driver.tell(ship(4, 12, [11, 12, 13]))
    for part in range(3):
        [send] = driver.tell(by_layers(part))
        span = Span(Component.FULL, 3, pack_tokens([14, 15]), part, 3, tail=3)
        assert send == SendRegion(KEY, PEER, "zmq", 2 + part, 1002 + part, span)
    driver.tell(FinishSource(KEY, RESULT))
    for seq in range(4):
        driver.tell(RegionReady(KEY, seq, 1000 + seq, 1, 1))
    chunk, done = driver.tell(RegionReady(KEY, 4, 1004, 1, 1))
    assert (chunk.part, chunk.parts, chunk.tail, chunk.units) == (2, 3, 3, 2)  # type: ignore[attr-defined]
    assert (done.regions, done.total_tokens) == (5, 23)  # type: ignore[attr-defined]


def test_shipping_layers_in_another_way_is_a_bug() -> None:
    first = ship(4, 12, [11, 12, 13])
    for before, wrong in (
        ([first], by_layers(1)),
        ([first, by_layers(0)], by_layers(0)),
        ([first, by_layers(0)], by_layers(2)),
        ([first, by_layers(0)], by_layers(1, parts=2)),
        ([first, by_layers(0)], FinishSource(KEY, RESULT)),
        ([first], by_layers(0, parts=4)),  # more than there are layers
        ([], replace(first, part=0, parts=2)),  # not to the end
    ):
        driver = Driver(credit=9)
        for shipment in before:
            driver.tell(shipment)
        with pytest.raises(AssertionError):
            driver.tell(wrong)


def test_a_long_hand_off_costs_each_step_what_a_short_one_does() -> None:
    """What is acknowledged and what waits for credit is left alone: a step handles what is under way."""
    pages = 400
    end = 4 + pages * 4
    segments = segments_of(FULL, 4, end)
    terms = SourceTerms(KEY, PEER, "zmq", end, segments, True, (2,), 1000, 30.0)
    tokens = np.arange(end, dtype=np.int32)
    driver = Driver()
    received = OfferReceived(KEY, PEER, RequestId("r"), tokens, 4, True, SamplingParams(), 30.0)
    driver.state = accept_offer(terms, 3, received).state
    assert len(driver.tell(ship(4, end - 4, list(range(1, pages + 1))))) == 3
    driver.tell(FinishSource(KEY, RESULT))
    announced = 0
    for seq in range(200):
        while announced < min(200, seq + 3):
            assert isinstance(driver.tell(RegionReady(KEY, announced, 1000 + announced, 80, 5))[0], Chunk)
            announced += 1
        sent = driver.tell(Ack(key=KEY, seq=seq, credit=seq + 4))
        assert [one.seq for one in sent] == ([seq + 3] if seq + 3 < 200 else [])  # type: ignore[attr-defined]
        assert len(driver.state.regions.open) <= 3  # type: ignore[union-attr]
        assert driver.tell(Ack(key=KEY, seq=seq // 2, credit=0)) == []
        assert driver.verdict is Verdict.IGNORED_DUPLICATE
    assert isinstance(driver.state, AwaitingAck)
    assert driver.state.regions.acked == 200
