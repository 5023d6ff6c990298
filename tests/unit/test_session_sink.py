"""The sink machine, step by step: what it lands, acknowledges, distrusts and reports."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import (
    Accept,
    Ack,
    Cancel,
    Chunk,
    Commit,
    Done,
    Failed,
    Failure,
    Nack,
    Offer,
    Refuse,
    SamplingParams,
    pack_tokens,
)
from baton.transfer.api import AbortSink, FirstTokenReady, SinkCommitted, SinkFailed
from baton.transfer.plan import Span, segments_of
from baton.transfer.session.effects import (
    CloseSink,
    EngineEvent,
    FenceSink,
    Landed,
    LandRegion,
    PrepareSink,
    RegionDamaged,
    SendFrame,
    SinkFenced,
    SinkLaneFailed,
    SinkPrepared,
)
from baton.transfer.session.sink import (
    Aborted,
    Closed,
    Draining,
    SinkOrder,
    SinkState,
    open_sink,
    sink_step,
    sink_timer,
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
PEER = Stamp(WorkerId("prefill-0"), 2, Epoch(77))
RULES = SessionRules(page_size=4, resend_after_s=0.5)
FAILURE = Failure(code=ErrorCode.CANCELLED, reason="client gone")
ORDER = SinkOrder(
    key=KEY,
    peer=PEER,
    request_id=RequestId("r"),
    tokens=pack_tokens(list(range(15))),  # [4, 15) is wanted: three pages, the last one not full
    start=4,
    segments=segments_of(KvLayout(4), 4, 15),
    spans=(Span(Component.FULL, 0, pack_tokens([7, 9, 8])),),
    sample=True,
    sampling=SamplingParams(),
    deadline_s=30.0,
    tag_base=1000,
)
DONE = Done(key=KEY, regions=2, total_tokens=15, first_token=42, prefill_s=0.25, cached_tokens=4)


def chunk(seq: int, first_unit: int, units: int, tag: int | None = None, component: str = "full") -> Chunk:
    tag, what = 1000 + seq if tag is None else tag, Component(component)
    return Chunk(
        key=KEY, seq=seq, tag=tag, component=what, first_unit=first_unit, units=units, nbytes=units * 40, digest=seq
    )


FIRST, SECOND = chunk(0, 0, 2), chunk(1, 2, 1)


class Driver:
    """A sink and what it has said so far."""

    def __init__(self, order: SinkOrder = ORDER, credit: int = 2, lane: str = "zmq") -> None:
        opened = open_sink(order, RULES)
        self.state: SinkState = opened.state
        self.prepare = opened.effects
        self.offered = self.tell(SinkPrepared(KEY, lane, credit, (2,) * len(order.segments)))

    def tell(self, event: object, now: float = 0.0) -> list[object]:
        """Frames are shown by their body, engine events by the event."""
        self.verdict = Verdict.MOVE
        step = sink_step(self.state, event, now, RULES)  # type: ignore[arg-type]
        self.state, self.verdict = step.state, step.verdict
        shown: list[object] = []
        for effect in step.effects:
            if isinstance(effect, SendFrame):
                assert (effect.worker, effect.dst_epoch) == (PEER.worker, PEER.epoch)
                shown.append(effect.body)
            else:
                shown.append(effect.event if isinstance(effect, EngineEvent) else effect)
        return shown


def test_pages_are_registered_before_the_offer_leaves() -> None:
    driver = Driver()
    assert driver.prepare == (PrepareSink(KEY, PEER, ORDER.spans, tag_base=1000, tag_count=6),)
    [offer] = driver.offered
    assert isinstance(offer, Offer)
    assert (offer.start, offer.credit, offer.region_units, offer.lane) == (4, 2, (2,), "zmq")
    assert offer.ttl_s == 30.0


def test_the_happy_path() -> None:
    driver = Driver()
    assert driver.tell(Accept(key=KEY)) == []
    assert driver.tell(FIRST, now=1.0) == [LandRegion(KEY, PEER, "zmq", 1000, FIRST)]
    assert driver.tell(Landed(KEY, 0, 80, 0.01), now=1.5) == [Ack(key=KEY, seq=0, credit=3)]
    assert driver.tell(SECOND, now=2.0) == [LandRegion(KEY, PEER, "zmq", 1001, SECOND)]
    assert driver.tell(DONE, now=2.5) == [FirstTokenReady(KEY, 42, None)]
    assert driver.tell(DONE, now=2.6) == []
    close, committed, commit = driver.tell(Landed(KEY, 1, 30, 0.02), now=3.0)
    assert close == CloseSink(KEY)
    assert commit == Commit(key=KEY)
    assert isinstance(committed, SinkCommitted)
    assert (committed.peer, committed.lane, committed.nbytes) == (PEER.worker, "zmq", 110)
    assert committed.transfer_s == pytest.approx(2.0)
    assert committed.scatter_s == pytest.approx(0.03)
    assert (committed.result.first_token, committed.result.prefill_s, committed.result.cached_tokens) == (42, 0.25, 4)


def test_a_slot_that_goes_to_another_hand_off_gives_no_credit_and_further_ones_do() -> None:
    driver = Driver(credit=2)
    driver.tell(Accept(key=KEY))
    driver.tell(FIRST)
    assert driver.tell(Landed(KEY, 0, 80, 0.0, slots=0)) == [Ack(key=KEY, seq=0, credit=2)]
    driver = Driver(credit=1)
    driver.tell(Accept(key=KEY))
    driver.tell(FIRST)
    assert driver.tell(Landed(KEY, 0, 80, 0.0, slots=3)) == [Ack(key=KEY, seq=0, credit=4)]


def test_everything_may_overtake_the_accept() -> None:
    driver = Driver()
    assert driver.tell(DONE) == [FirstTokenReady(KEY, 42, None)]
    assert driver.tell(SECOND) == [LandRegion(KEY, PEER, "zmq", 1001, SECOND)]
    assert driver.tell(FIRST) == [LandRegion(KEY, PEER, "zmq", 1000, FIRST)]
    assert driver.tell(Landed(KEY, 1, 30, 0.0)) == [Ack(key=KEY, seq=1, credit=3)]
    assert driver.tell(Landed(KEY, 0, 80, 0.0))[2:] == [Commit(key=KEY)]


def test_a_repeated_chunk_is_landed_once_and_acknowledged_again() -> None:
    driver = Driver()
    driver.tell(FIRST)
    assert driver.tell(FIRST) == []
    assert driver.verdict is Verdict.IGNORED_DUPLICATE
    driver.tell(Landed(KEY, 0, 80, 0.0))
    assert driver.tell(FIRST) == [Ack(key=KEY, seq=0, credit=3)]
    assert driver.verdict is Verdict.IGNORED_DUPLICATE


def test_a_damaged_region_is_asked_for_once_more_under_a_fresh_tag() -> None:
    driver = Driver()
    driver.tell(FIRST)
    nack = Nack(key=KEY, seq=0, tag=1003)
    assert driver.tell(RegionDamaged(KEY, 0), now=1.0) == [nack]
    assert driver.tell(FIRST) == []  # announced before the Nack: its bytes are not the ones asked for
    assert driver.verdict is Verdict.IGNORED_STALE
    assert sink_timer(driver.state) == 1.5
    assert driver.tell(ResendDue(), now=1.5) == [nack]
    again = chunk(0, 0, 2, tag=1003)
    assert driver.tell(again) == [LandRegion(KEY, PEER, "zmq", 1003, again)]
    assert driver.tell(Landed(KEY, 0, 80, 0.0)) == [Ack(key=KEY, seq=0, credit=3)]
    assert sink_timer(driver.state) == 30.0


def test_the_second_damage_of_a_region_is_the_end() -> None:
    driver = Driver()
    driver.tell(FIRST)
    driver.tell(RegionDamaged(KEY, 0))
    driver.tell(chunk(0, 0, 2, tag=1003))
    assert driver.tell(RegionDamaged(KEY, 0)) == [FenceSink(KEY)]
    cancel, failed = driver.tell(SinkFenced(KEY))
    assert isinstance(cancel, Cancel)
    assert isinstance(failed, SinkFailed)
    assert failed.failure.code is ErrorCode.TRANSFER_CORRUPT
    assert (failed.landed_until, failed.peer_lost) == (4, False)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (chunk(2, 0, 2), "without credit"),
        (chunk(0, 0, 2, tag=1003), "foreign tag"),
        (chunk(0, 1, 1), "region 0 starts at"),
        (chunk(1, 2, 2), "not asked for"),
        (chunk(1, 3, 1), "not asked for"),
        (chunk(1, 2, 1, component="state"), "no state was asked for"),
        (chunk(0, 0, 3), "3 units, over 2"),
    ],
)
def test_a_region_that_cannot_be_ends_the_hand_off_before_it_lands(wrong: Chunk, reason: str) -> None:
    driver = Driver()
    assert driver.tell(wrong) == [FenceSink(KEY)]
    assert isinstance(driver.state, Draining)
    assert driver.state.failure.code is ErrorCode.INTERNAL
    assert reason in driver.state.failure.reason


def test_regions_that_overlap_or_leave_a_gap_end_it() -> None:
    for first, second in ((chunk(0, 0, 2), chunk(1, 1, 2)), (chunk(1, 2, 1), chunk(0, 0, 1))):
        driver = Driver()
        driver.tell(first)
        assert driver.tell(second) == [FenceSink(KEY)]
        assert "gap" in driver.state.failure.reason  # type: ignore[union-attr]


def test_source_pages_belong_to_pull_lanes_and_only_there() -> None:
    pulled = replace(FIRST, source_pages=pack_tokens([1, 2]))
    assert Driver(lane="local").tell(pulled) == [LandRegion(KEY, PEER, "local", 1000, pulled)]
    assert Driver(lane="local").tell(FIRST) == [FenceSink(KEY)]
    assert Driver(lane="zmq").tell(pulled) == [FenceSink(KEY)]


@pytest.mark.parametrize(
    "wrong",
    [
        replace(DONE, total_tokens=14),
        replace(DONE, first_token=-1),
        replace(DONE, regions=0),
        replace(DONE, regions=4),
    ],
)
def test_both_sides_compare_what_was_prefilled(wrong: Done) -> None:
    driver = Driver()
    driver.tell(Accept(key=KEY))
    assert driver.tell(wrong) == [FenceSink(KEY)]
    assert driver.state.failure.code is ErrorCode.INTERNAL  # type: ignore[union-attr]


def test_regions_that_end_too_early_are_no_commit() -> None:
    driver = Driver()
    driver.tell(FIRST)
    driver.tell(Landed(KEY, 0, 80, 0.0))
    assert driver.tell(replace(DONE, regions=1)) == [FenceSink(KEY)]


def test_a_first_token_nobody_asked_for_is_a_contradiction() -> None:
    driver = Driver(replace(ORDER, sample=False))
    assert driver.tell(DONE) == [FenceSink(KEY)]
    driver = Driver(replace(ORDER, sample=False))
    assert driver.tell(replace(DONE, first_token=-1)) == []


def test_failing_reports_what_landed_without_a_gap() -> None:
    driver = Driver(credit=3)
    driver.tell(chunk(0, 0, 1))
    driver.tell(chunk(1, 1, 1))
    driver.tell(chunk(2, 2, 1))
    driver.tell(Landed(KEY, 0, 40, 0.0))
    driver.tell(Landed(KEY, 2, 30, 0.0))
    assert driver.tell(AbortSink(KEY, FAILURE)) == [FenceSink(KEY)]
    cancel, failed = driver.tell(SinkFenced(KEY))
    assert cancel == Cancel(key=KEY, failure=FAILURE)
    assert failed == SinkFailed(KEY, PEER.worker, FAILURE, landed_until=8, nbytes=70, lane="zmq", peer_lost=False)


def test_what_lands_between_the_end_and_the_fence_counts() -> None:
    driver = Driver()
    driver.tell(FIRST)
    driver.tell(AbortSink(KEY, FAILURE))
    assert driver.tell(Landed(KEY, 0, 80, 0.0)) == []
    assert driver.tell(SinkFenced(KEY))[1].landed_until == 12  # type: ignore[attr-defined]


def test_cancel_is_repeated_until_it_is_acknowledged_and_answers_whatever_still_comes() -> None:
    driver = Driver()
    driver.tell(AbortSink(KEY, FAILURE))
    driver.tell(SinkFenced(KEY), now=2.0)
    assert sink_timer(driver.state) == 2.5
    cancel = Cancel(key=KEY, failure=FAILURE)
    assert driver.tell(ResendDue(), now=2.5) == [cancel]
    for late in (FIRST, DONE, Accept(key=KEY), Failed(key=KEY, failure=FAILURE)):
        assert driver.tell(late) == [cancel]
        assert driver.verdict is Verdict.IGNORED_STALE
    assert isinstance(driver.state, Aborted)
    driver.tell(Refuse(key=KEY, failure=FAILURE))
    assert isinstance(driver.state, Closed)
    assert sink_timer(driver.state) is None
    assert driver.tell(DONE) == [cancel]


def test_a_peer_that_is_proven_dead_is_told_nothing() -> None:
    for event, told in ((PeerDead(), 1), (PeerSilent(), 2), (SinkLaneFailed(KEY, FAILURE, peer_lost=True), 2)):
        driver = Driver()
        driver.tell(FIRST)
        assert driver.tell(event) == [FenceSink(KEY)]
        effects = driver.tell(SinkFenced(KEY))
        assert len(effects) == told
        assert effects[-1].peer_lost  # type: ignore[attr-defined]


def test_an_offer_that_was_never_made_needs_no_cancel() -> None:
    opened = open_sink(ORDER, RULES)
    draining = sink_step(opened.state, AbortSink(KEY, FAILURE), 0.0, RULES)
    assert draining.effects == (FenceSink(KEY),)
    late = sink_step(draining.state, SinkPrepared(KEY, "zmq", 1, (1,)), 0.0, RULES)
    assert (late.verdict, late.effects) == (Verdict.IGNORED_STALE, ())
    ended = sink_step(late.state, SinkFenced(KEY), 0.0, RULES)
    assert [type(effect) for effect in ended.effects] == [EngineEvent]
    assert isinstance(ended.state, Closed)


def test_offers_are_repeated_with_the_time_that_is_left() -> None:
    driver = Driver()
    assert sink_timer(driver.state) == 0.5
    [offer] = driver.tell(ResendDue(), now=10.0)
    assert isinstance(offer, Offer)
    assert offer.ttl_s == 20.0
    assert sink_timer(driver.state) == 10.5


def test_a_passed_deadline_fences_and_tells() -> None:
    driver = Driver()
    driver.tell(FIRST)
    assert driver.tell(DeadlinePassed(), now=30.0) == [FenceSink(KEY)]
    assert driver.tell(SinkFenced(KEY))[1].failure.code is ErrorCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]


def test_a_source_that_missed_the_commit_is_told_again() -> None:
    driver = Driver()
    driver.tell(FIRST)
    driver.tell(SECOND)
    driver.tell(DONE)
    driver.tell(Landed(KEY, 0, 80, 0.0))
    driver.tell(Landed(KEY, 1, 30, 0.0))
    for late in (DONE, FIRST, Failed(key=KEY, failure=FAILURE)):
        assert driver.tell(late) == [Commit(key=KEY)]
    assert driver.tell(AbortSink(KEY, FAILURE)) == []


def test_bugs_of_this_process_raise() -> None:
    driver = Driver()
    driver.tell(FIRST)
    for event in (Landed(KEY, 1, 1, 0.0), RegionDamaged(KEY, 5), SinkFenced(KEY), SinkPrepared(KEY, "zmq", 1, (1,))):
        with pytest.raises(ImpossibleTransition):
            driver.tell(event)
    short = (Span(Component.FULL, 0, pack_tokens([1])),)
    for order in (replace(ORDER, start=3), replace(ORDER, segments=()), replace(ORDER, spans=short)):
        with pytest.raises(AssertionError):
            open_sink(order, RULES)


HYBRID = replace(
    ORDER,
    segments=segments_of(KvLayout(4, window=5, state=True), 4, 15, state_pieces=3),
    spans=(
        Span(Component.FULL, 0, pack_tokens([7, 9, 8])),
        Span(Component.SWA, 0, pack_tokens([2, 3])),  # the window of [8, 15)
        Span(Component.STATE, 0, pack_tokens([6, 7, 8])),  # the third slot, in three pieces
    ),
)
REGIONS = (
    chunk(0, 0, 2),
    chunk(1, 2, 1),
    chunk(2, 0, 2, component="swa"),
    chunk(3, 0, 2, component="state"),
    chunk(4, 2, 1, component="state"),
)


def test_segments_follow_one_another_and_all_of_them_make_a_commit() -> None:
    driver = Driver(HYBRID, credit=5)
    assert driver.prepare[0].tag_count == 16  # type: ignore[attr-defined]
    for region in reversed(REGIONS):
        assert driver.tell(region) == [LandRegion(KEY, PEER, "zmq", region.tag, region)]
    driver.tell(replace(DONE, regions=5))
    for region in REGIONS[:-1]:
        assert isinstance(driver.tell(Landed(KEY, region.seq, region.nbytes, 0.0))[0], Ack)
    assert driver.tell(Landed(KEY, 4, 40, 0.0))[2] == Commit(key=KEY)


@pytest.mark.parametrize("missing", [3, 4, 5])
def test_a_hand_off_without_its_window_or_state_is_no_commit(missing: int) -> None:
    driver = Driver(HYBRID, credit=5)
    for region in REGIONS[: missing - 1]:
        driver.tell(region)
        driver.tell(Landed(KEY, region.seq, region.nbytes, 0.0))
    assert driver.tell(replace(DONE, regions=missing - 1)) == [FenceSink(KEY)]


def test_what_landed_of_a_hand_off_with_a_window_or_a_state_is_of_no_use_before_all_has() -> None:
    driver = Driver(HYBRID, credit=5)
    for region in REGIONS:
        driver.tell(region)
        driver.tell(Landed(KEY, region.seq, region.nbytes, 0.0))
    driver.tell(AbortSink(KEY, FAILURE))
    failed = driver.tell(SinkFenced(KEY))[1]
    assert isinstance(failed, SinkFailed)
    assert (failed.landed_until, failed.nbytes) == (4, 320)


@pytest.mark.parametrize(
    ("before", "wrong", "reason"),
    [
        ([], chunk(0, 0, 2, component="swa"), "region 0 starts at"),
        (REGIONS[:2], chunk(2, 0, 2, component="state"), "a gap before"),  # the window is left out
        (REGIONS[:2], chunk(2, 1, 1, component="swa"), "a gap before"),
        ([REGIONS[3]], chunk(2, 0, 1, component="swa"), "a gap behind"),
        ([REGIONS[0]], chunk(1, 2, 2), "not asked for"),  # across the end of a segment
        (REGIONS[:3], chunk(3, 0, 3, component="state"), "3 units, over 2"),
    ],
)
def test_regions_of_the_wrong_place_among_the_segments_end_it(before: list[Chunk], wrong: Chunk, reason: str) -> None:
    driver = Driver(HYBRID, credit=5)
    for region in before:
        driver.tell(region)
    assert driver.tell(wrong) == [FenceSink(KEY)]
    assert reason in driver.state.failure.reason  # type: ignore[union-attr]


def test_a_damaged_piece_comes_again_as_the_same_one() -> None:
    driver = Driver(HYBRID, credit=5)
    for region in REGIONS:
        driver.tell(region)
    nack = Nack(key=KEY, seq=3, tag=1011)
    assert driver.tell(RegionDamaged(KEY, 3)) == [nack]
    assert driver.tell(chunk(3, 0, 2, tag=1011)) == [FenceSink(KEY)], "the same units of another component"


LAYERED = replace(ORDER, segments=segments_of(KvLayout(4), 4, 15, layers={Component.FULL: 4}))


def part(seq: int, part: int, first_unit: int, units: int, *, parts: int = 2, tail: int = 1) -> Chunk:
    return replace(chunk(seq, first_unit, units), part=part, parts=parts, tail=tail)


PARTS = (chunk(0, 0, 1), part(1, 0, 1, 2), part(2, 1, 1, 1), part(3, 1, 2, 1))
"""Page 0; then the first two layers of pages 1 and 2; then the other two of page 1, and of page 2."""


def test_what_comes_by_layers_makes_a_commit_when_all_layers_have_landed() -> None:
    driver = Driver(LAYERED, credit=5)
    assert driver.prepare[0].tag_count == 24  # type: ignore[attr-defined]
    for region in reversed(PARTS):
        assert driver.tell(region) == [LandRegion(KEY, PEER, "zmq", region.tag, region)]
    driver.tell(replace(DONE, regions=4))
    for seq in (2, 0, 3):
        assert isinstance(driver.tell(Landed(KEY, seq, 20, 0.0))[0], Ack)
    assert driver.tell(Landed(KEY, 1, 20, 0.0))[2] == Commit(key=KEY)


@pytest.mark.parametrize(("landed", "until"), [((0,), 8), ((0, 1), 8), ((0, 1, 2), 12), ((0, 2, 3), 8), ((1, 2), 4)])
def test_a_page_has_landed_when_its_last_layers_have(landed: tuple[int, ...], until: int) -> None:
    driver = Driver(LAYERED, credit=5)
    for seq in landed:
        driver.tell(PARTS[seq])
        driver.tell(Landed(KEY, seq, 20, 0.0))
    driver.tell(AbortSink(KEY, FAILURE))
    failed = driver.tell(SinkFenced(KEY))[1]
    assert isinstance(failed, SinkFailed)
    assert failed.landed_until == until


@pytest.mark.parametrize(
    ("before", "wrong", "reason"),
    [
        ((), part(0, 1, 0, 2, tail=0), "starts at"),  # the second part first
        ((), part(0, 0, 1, 2), "starts at"),
        (PARTS[:1], part(1, 0, 2, 1), "a gap before"),
        (PARTS[:1], part(1, 0, 1, 1, tail=0), "a gap before"),  # its part 0 began elsewhere
        (PARTS[:1], part(1, 1, 1, 2), "a gap before"),
        (PARTS[:2], part(2, 0, 1, 2), "a gap before"),  # the same part twice
        (PARTS[:2], part(2, 1, 2, 1), "a gap before"),
        (PARTS[:2], part(2, 1, 1, 2, parts=3), "a gap before"),  # another cut
        (PARTS[:2], chunk(2, 1, 2), "a gap before"),
        ((*PARTS[:2], PARTS[3]), part(2, 1, 1, 2), "a gap behind"),
        (PARTS[:1], part(1, 0, 1, 2, parts=5), "not asked for"),  # more than there are layers
        (PARTS[:1], part(1, 2, 1, 2), "not asked for"),
        (PARTS[:1], part(1, 0, 1, 2, tail=2), "not asked for"),
        (PARTS[:1], part(1, 0, 1, 2, parts=1), "not asked for"),
    ],
)
def test_parts_in_the_wrong_order_end_it(before: tuple[Chunk, ...], wrong: Chunk, reason: str) -> None:
    driver = Driver(LAYERED, credit=5)
    for region in before:
        driver.tell(region)
    assert driver.tell(wrong) == [FenceSink(KEY)]
    assert reason in driver.state.failure.reason  # type: ignore[union-attr]


def test_a_part_of_the_layers_lets_more_pages_into_a_region() -> None:
    driver = Driver(LAYERED, credit=5)
    whole = part(0, 0, 0, 3, tail=0)  # 3 half pages, where 2 whole ones fit
    assert driver.tell(whole) == [LandRegion(KEY, PEER, "zmq", 1000, whole)]
    many = Driver(replace(LAYERED, segments=segments_of(KvLayout(4), 4, 15, layers={Component.FULL: 3})), credit=5)
    assert many.tell(whole) == [LandRegion(KEY, PEER, "zmq", 1000, whole)]  # of three layers a part may have two


def test_where_no_token_was_asked_for_none_is_told() -> None:
    driver = Driver(replace(ORDER, sample=False))
    driver.tell(FIRST)
    assert driver.tell(replace(DONE, first_token=-1)) == []


def test_a_long_hand_off_costs_each_step_what_a_short_one_does() -> None:
    """Of what has landed without a gap nothing is kept but counts: no step goes over regions that are done with."""
    pages, end = 400, 4 + 400 * 4
    order = replace(
        ORDER,
        tokens=pack_tokens([0] * end),
        segments=segments_of(KvLayout(4), 4, end),
        spans=(Span(Component.FULL, 0, pack_tokens(range(1, pages + 1))),),
    )
    driver = Driver(order, credit=3)
    for seq in range(0, 200, 2):
        driver.tell(chunk(seq + 1, 2 * seq + 2, 2))  # overtook the one before
        driver.tell(chunk(seq, 2 * seq, 2))
        driver.tell(Landed(KEY, seq + 1, 80, 0.0))
        assert driver.state.arrivals.landed == seq + 1  # type: ignore[union-attr]
        driver.tell(Landed(KEY, seq, 80, 0.0))
        assert driver.state.arrivals.open == ()  # type: ignore[union-attr]
        assert driver.tell(chunk(seq // 2, seq, 2)) == [Ack(key=KEY, seq=seq // 2, credit=seq + 5)], "long ago"
    end_of_it = driver.tell(replace(DONE, regions=200, total_tokens=end))
    assert [type(effect) for effect in end_of_it] == [CloseSink, SinkCommitted, Commit]
    assert end_of_it[1].nbytes == 200 * 80  # type: ignore[attr-defined]
