"""The endpoint: who is believed, what is remembered, what a forgotten hand-off is answered, and that all is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import replace

from baton.common.config import TransferConfig
from baton.common.engine.core_api import MembershipView
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
    Frame,
    Heartbeat,
    Member,
    Offer,
    Refuse,
    SamplingParams,
    decode_frame,
    encode_frame,
    pack_tokens,
)
from baton.transfer.api import (
    AbortSink,
    AbortSource,
    FinishSource,
    OfferReceived,
    OpenSink,
    PrefillResult,
    ShipRegion,
    SinkFailed,
    SourceAborted,
    SourceReleased,
)
from baton.transfer.endpoint import Endpoint
from baton.transfer.plan import Span
from baton.transfer.session.effects import (
    EngineEvent,
    FenceSink,
    FenceSource,
    PrepareSink,
    RegionReady,
    SendFrame,
    SendRegion,
    SinkFenced,
    SinkPrepared,
    SourceFenced,
)
from baton.transfer.session.tickets import sign

ME = Stamp(WorkerId("here-0"), 1, Epoch(500))
PEER = Stamp(WorkerId("there-0"), 1, Epoch(600))
OTHER = Stamp(WorkerId("there-1"), 1, Epoch(700))
SUCCESSOR = Stamp(PEER.worker, 2, Epoch(601))
FAILURE = Failure(code=ErrorCode.CANCELLED)
CONFIG = TransferConfig(resend_after_s=0.5, handoff_ttl_s=10.0, tombstone_ttl_s=20.0, max_tombstones=3)


def key(number: int, attempt: int = 1) -> HandoffKey:
    return HandoffKey(HandoffId(number), attempt)


def view(version: int, *stamps: Stamp) -> MembershipView:
    return MembershipView(version, tuple(Member(stamp=stamp, role="", address="") for stamp in stamps))


def endpoint(max_live_sources: int = 8) -> Endpoint:
    made = Endpoint(ME, CONFIG, KvLayout(4), ["zmq", "local"], max_live_sources=max_live_sources)
    assert made.on_membership(view(1, ME, PEER, OTHER), 0.0) == []
    return made


def frame(body: object, src: Stamp = PEER, dst: Stamp = ME) -> Frame:
    return Frame(src, dst.epoch, body)  # type: ignore[arg-type]


def offer(number: int = 1, sink: Stamp = PEER, **changes: object) -> Offer:
    """With a ticket of `sink`'s, of a cluster without keys."""
    fields: dict[str, object] = {
        "key": key(number),
        "request_id": RequestId("r"),
        "tokens": pack_tokens(list(range(10))),
        "start": 4,
        "sample": True,
        "sampling": SamplingParams(),
        "ttl_s": 5.0,
        "lane": "zmq",
        "credit": 2,
        "region_units": (2,),
        "tag_base": 9000,
    }
    return signed(Offer(**(fields | changes)), number + 1, sink)  # type: ignore[arg-type]


def signed(made: Offer, number: int = 1, sink: Stamp = PEER) -> Offer:
    return structs.replace(made, ticket=sign(b"", number, made.key, sink, ME, made.tag_base))


def span(component: str, units: list[int]) -> Span:
    return Span(Component(component), 0, pack_tokens(units))


def open_sink(number: int = 1, peer: WorkerId = PEER.worker, deadline_s: float = 100.0) -> OpenSink:
    tokens, pages = np.arange(10, dtype=np.int32), {Component.FULL: np.array([3, 5], dtype=np.int32)}
    sampling = SamplingParams()
    return OpenSink(key(number), peer, RequestId("r"), tokens, 4, pages, True, sampling, deadline_s)


def bodies(effects: list) -> list:
    """Frames by body, engine events by event."""
    return [
        effect.body if isinstance(effect, SendFrame) else effect.event if isinstance(effect, EngineEvent) else effect
        for effect in effects
    ]


# ------------------------------------------------------------------------------------------------ who is believed


def test_frames_for_or_of_another_process_are_dropped() -> None:
    here = endpoint()
    for wrong in (
        frame(offer(), dst=Stamp(ME.worker, 1, Epoch(501))),
        frame(offer(), dst=Stamp(ME.worker, 1, Epoch(0))),
        frame(offer(), src=SUCCESSOR),
        frame(offer(), src=Stamp(WorkerId("nobody"), 1, Epoch(1))),
    ):
        assert here.on_frame(wrong, 0.0) == []
    assert here.sessions() == []
    assert here.counters == {"frame.for_another_epoch": 2, "frame.of_unlisted_process": 2}


def test_a_third_party_cannot_touch_a_hand_off() -> None:
    here = endpoint()
    here.on_frame(frame(offer(1)), 0.0)
    here.command(open_sink(2), 0.0)
    assert here.on_frame(frame(Cancel(key=key(1), failure=FAILURE), src=OTHER), 0.0) == []
    assert here.on_frame(frame(Failed(key=key(2), failure=FAILURE), src=OTHER), 0.0) == []
    [refusal] = bodies(here.on_frame(frame(offer(1, OTHER), src=OTHER), 0.0))
    assert isinstance(refusal, Refuse)
    assert (here.live_sources, here.live_sinks) == (1, 1)


def test_a_frame_that_is_not_about_a_hand_off_is_a_bug_of_the_shell() -> None:
    with pytest.raises(TypeError, match="Heartbeat"):
        endpoint().on_frame(frame(Heartbeat()), 0.0)


def test_tags_stay_below_the_sign_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there were, and whatever the epoch: lanes use the bits above for themselves."""
    monkeypatch.setattr("baton.transfer.endpoint.TAGS_BEFORE_REUSE", (1 << 40) - 8)
    me = Stamp(ME.worker, ME.incarnation, Epoch((1 << 23) - 1))
    here = Endpoint(me, CONFIG, KvLayout(4), ["zmq"])
    here.on_membership(view(1, me, PEER), 0.0)
    monkeypatch.setattr(here, "_tags_used", (1 << 40) - 12)
    tags = []
    for number in range(1, 4):
        [prepare] = here.command(open_sink(number), 0.0)
        assert isinstance(prepare, PrepareSink)
        tags.append(range(prepare.tag_base, prepare.tag_base + prepare.tag_count))
    assert max(map(max, tags)) < 1 << 63
    assert len({tag for each in tags for tag in each}) == sum(map(len, tags))


def test_the_context_of_a_traced_request_goes_along() -> None:
    here, trace = endpoint(), "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    here.command(replace(open_sink(), trace=trace), 0.0)
    [offered] = bodies(here.on_data(SinkPrepared(key(1), "zmq", 1, (2,)), 0.0))
    received, _ = bodies(here.on_frame(frame(replace(offer(2), trace=offered.trace)), 0.0))
    assert offered.trace == received.trace == trace
    assert [times.trace for times in here.ledger.handoffs()] == [trace, trace]


# ------------------------------------------------------------------------------------------------------- sources


def test_an_offer_is_accepted_once_and_answered_as_often_as_it_comes() -> None:
    here = endpoint()
    received, accept = bodies(here.on_frame(frame(offer()), 2.0))
    assert accept == Accept(key=key(1))
    assert isinstance(received, OfferReceived)
    assert (received.peer, received.start, received.tokens.tolist()) == (PEER, 4, list(range(10)))
    assert received.deadline_s == 7.0
    assert bodies(here.on_frame(frame(offer()), 2.0)) == [Accept(key=key(1))]
    assert here.counters["source.Accepted.Offer.ignored_duplicate"] == 1


def test_no_offer_is_worth_more_time_than_is_configured() -> None:
    received = bodies(endpoint().on_frame(frame(offer(ttl_s=1e9)), 0.0))[0]
    assert received.deadline_s == CONFIG.handoff_ttl_s


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lane": "pigeon"}, "pigeon"),
        ({"start": 3}, "start at token 3"),
        ({"start": 12}, "start at token 12"),
        ({"tokens": b"", "start": 0}, "start at token 0"),
        ({"credit": 0}, "without credit"),
        ({"region_units": ()}, "0 segments"),
        ({"region_units": (2, 2)}, "2 segments"),
    ],
)
def test_an_offer_that_cannot_be_met_is_refused_with_the_reason(changes: dict[str, object], reason: str) -> None:
    here = endpoint()
    for _ in range(2):  # duplicates get the same answer
        [refusal] = bodies(here.on_frame(frame(offer(**changes)), 0.0))
        assert isinstance(refusal, Refuse)
        assert reason in refusal.failure.reason
    assert here.live_sources == 0


def test_too_many_sources_are_refused_until_one_ends() -> None:
    here = endpoint(max_live_sources=1)
    here.on_frame(frame(offer(1)), 0.0)
    [refusal] = bodies(here.on_frame(frame(offer(2)), 0.0))
    assert refusal.failure.code is ErrorCode.OVERLOADED
    here.on_frame(frame(Cancel(key=key(1), failure=FAILURE)), 0.0)
    here.on_data(SourceFenced(key(1)), 0.0)
    assert isinstance(bodies(here.on_frame(frame(offer(3)), 0.0))[1], Accept)


def test_a_cancel_before_its_offer_is_remembered() -> None:
    here = endpoint()
    cancel = frame(Cancel(key=key(1), failure=FAILURE))
    assert bodies(here.on_frame(cancel, 0.0)) == [Cancelled(key=key(1))]
    assert bodies(here.on_frame(frame(offer(1)), 0.0)) == [Cancelled(key=key(1))]
    assert bodies(here.on_frame(cancel, 0.0)) == [Cancelled(key=key(1))]
    assert here.live_sources == 0


def test_frames_about_an_unknown_source_create_nothing() -> None:
    here = endpoint()
    for body in (Ack(key=key(1), seq=0, credit=9), Commit(key=key(1))):
        assert here.on_frame(frame(body), 0.0) == []
    assert here.sessions() == []


def test_a_priority_travels_with_the_offer_to_every_region() -> None:
    here = endpoint()
    urgent = replace(open_sink(), priority=-2)
    [prepare] = here.command(urgent, 0.0)
    assert prepare.priority == -2
    [offered] = bodies(here.on_data(SinkPrepared(key(1), "zmq", 2, (2,)), 0.0))
    assert offered.priority == -2
    there = endpoint()
    received, _ = bodies(there.on_frame(frame(signed(replace(offered, key=key(2)))), 0.0))
    assert received.priority == -2
    [send] = there.command(ShipRegion(key(2), 4, 6, np.array([8, 9], dtype=np.int32)), 0.0)
    assert send.priority == -2


def test_a_whole_source_session() -> None:
    here = endpoint()
    here.on_frame(frame(offer()), 0.0)
    [send] = here.command(ShipRegion(key(1), 4, 6, np.array([8, 9], dtype=np.int32)), 0.0)
    assert send == SendRegion(key(1), PEER, "zmq", 0, 9000, Span(Component.FULL, 0, pack_tokens([8, 9])))
    here.command(FinishSource(key(1), PrefillResult(3, None, 0.0, 0)), 0.0)
    assert [type(b) for b in bodies(here.on_data(RegionReady(key(1), 0, 9000, 60, 1), 0.0))] == [Chunk, Done]
    assert here.next_deadline() == 0.5
    assert [type(b) for b in bodies(here.on_timer(0.5))] == [Chunk, Done]
    assert here.on_frame(frame(Commit(key=key(1))), 0.6) == [FenceSource(key(1))]
    assert bodies(here.on_data(SourceFenced(key(1)), 0.6)) == [SourceReleased(key(1))]
    assert (here.live_sources, here.next_deadline()) == (0, None)


# --------------------------------------------------------------------------------------------------------- sinks


def test_an_open_sink_is_prepared_then_offered_then_given_up_in_time() -> None:
    here = endpoint()
    [prepare] = here.command(open_sink(), 1.0)
    assert isinstance(prepare, PrepareSink)
    assert (prepare.peer, prepare.spans, prepare.tag_count) == (PEER, (span("full", [3, 5]),), 4)
    [sent] = bodies(here.on_data(SinkPrepared(key(1), "zmq", 2, (2,)), 1.0))
    assert isinstance(sent, Offer)
    assert here.next_deadline() == 1.5
    assert isinstance(bodies(here.on_timer(1.5))[0], Offer)
    assert here.on_timer(1.6) == []
    assert here.on_timer(11.0) == [FenceSink(key(1))]  # handoff_ttl_s, though the request has more time
    cancel, failed = bodies(here.on_data(SinkFenced(key(1)), 11.0))
    assert isinstance(cancel, Cancel)
    assert isinstance(failed, SinkFailed)
    assert failed.failure.code is ErrorCode.DEADLINE_EXCEEDED


def test_a_sink_towards_a_worker_that_has_left_fails_at_once() -> None:
    here = endpoint()
    [failed] = bodies(here.command(open_sink(1, WorkerId("gone-3")), 0.0))
    assert (failed.peer_lost, failed.landed_until) == (True, 4)
    assert here.command(AbortSink(key(1), FAILURE), 0.0) == []  # it was on its way
    assert here.live_sinks == 0


def test_tags_are_never_used_twice_nor_by_a_successor() -> None:
    here, successor = endpoint(), Endpoint(Stamp(ME.worker, 2, Epoch(501)), CONFIG, KvLayout(4), ["zmq"])
    successor.on_membership(view(1, PEER), 0.0)
    ranges = []
    for process in (here, successor):
        for number in range(3):
            [prepare] = process.command(open_sink(number), 0.0)
            assert isinstance(prepare, PrepareSink)
            ranges.append(range(prepare.tag_base, prepare.tag_base + prepare.tag_count))
    tags = [tag for used in ranges for tag in used]
    assert len(set(tags)) == len(tags)
    assert max(tags) < 1 << 63


def test_a_source_of_a_forgotten_sink_is_told_to_stop() -> None:
    here = endpoint()
    for body in (
        Accept(key=key(9)),
        Chunk(key=key(9), seq=0, tag=1, first_unit=0, units=1, nbytes=1, digest=1),
        Done(key=key(9), regions=1, total_tokens=4),
        Failed(key=key(9), failure=FAILURE),
    ):
        [cancel] = bodies(here.on_frame(frame(body), 0.0))
        assert isinstance(cancel, Cancel)
    for body in (Refuse(key=key(9), failure=FAILURE), Cancelled(key=key(9))):
        assert here.on_frame(frame(body), 0.0) == []
    assert here.sessions() == []


# ----------------------------------------------------------------------------------------------- commands, bounds


def test_commands_for_what_never_was_are_bugs_and_those_that_cross_an_end_are_not() -> None:
    here = endpoint()
    for command in (AbortSink(key(1), FAILURE), AbortSource(key(1), FAILURE)):
        with pytest.raises(AssertionError, match="never was"):
            here.command(command, 0.0)
    here.command(open_sink(1), 0.0)
    with pytest.raises(AssertionError, match="exists"):
        here.command(open_sink(1), 0.0)
    here.on_frame(frame(offer(1)), 0.0)
    here.on_frame(frame(Cancel(key=key(1), failure=FAILURE)), 0.0)
    here.on_data(SourceFenced(key(1)), 0.0)
    assert here.command(AbortSource(key(1), FAILURE), 0.0) == []


def test_a_command_may_cross_even_the_forgetting_of_its_session() -> None:
    """The engine was away in a long step while its hand-off ended and its memory expired."""
    here = endpoint()
    here.on_frame(frame(offer(1)), 0.0)
    here.on_frame(frame(Cancel(key=key(1), failure=FAILURE)), 0.0)
    here.on_data(SourceFenced(key(1)), 0.0)
    later_s = 2 * CONFIG.tombstone_ttl_s
    here.on_timer(later_s)
    assert here.sessions() == []
    assert here.command(AbortSource(key(1), FAILURE), later_s) == []


def test_news_of_a_death_may_push_out_the_memory_of_another_session() -> None:
    """The first hand-off ends by the news itself; that makes the book forget the second, which had ended long ago."""
    here = endpoint()
    here.on_frame(frame(offer(1, lane="local")), 0.0)
    here.command(ShipRegion(key(1), 4, 4, np.array([7], dtype=np.int32)), 0.0)
    here.on_data(RegionReady(key(1), 0, 9000, 64, 1), 0.0)
    here.on_frame(frame(offer(2)), 0.0)
    here.on_frame(frame(Cancel(key=key(2), failure=FAILURE)), 0.0)
    here.on_data(SourceFenced(key(2)), 0.0)
    here.on_timer(CONFIG.handoff_ttl_s)
    here.on_data(SourceFenced(key(1)), CONFIG.handoff_ttl_s)
    assert here.live_sources == 1, "the reader of a pull lane must be proven dead"
    effects = here.on_membership(view(2, ME, OTHER), 2 * CONFIG.tombstone_ttl_s)
    assert [one.event for one in effects if isinstance(one, EngineEvent) and isinstance(one.event, SourceAborted)]
    assert here.live_sources == 0


def test_what_ended_is_forgotten_within_bounds_and_answers_of_the_data_plane_may_come_later_still() -> None:
    here = endpoint()
    for number in range(10):
        here.on_frame(frame(offer(number)), 0.0)
        here.on_frame(frame(Cancel(key=key(number), failure=FAILURE)), 0.0)
        assert isinstance(bodies(here.on_data(SourceFenced(key(number)), 0.0))[-1], SourceAborted)
    assert [info.key for info in here.sessions()] == [key(7), key(8), key(9)]
    assert here.on_data(SourceFenced(key(0)), 0.0) == []
    assert here.counters["data.of_unknown_source"] == 1
    here.on_timer(CONFIG.tombstone_ttl_s + 1)
    assert here.sessions() == []


def test_a_flood_of_frames_pushes_out_nothing_but_itself() -> None:
    here = endpoint()
    here.on_frame(frame(offer(1)), 0.0)
    here.on_frame(frame(Cancel(key=key(1), failure=FAILURE)), 0.0)
    here.on_data(SourceFenced(key(1)), 0.0)
    for number in range(100, 200):
        here.on_frame(frame(Cancel(key=key(number), failure=FAILURE)), 0.0)
        here.on_frame(frame(offer(number + 100, lane="pigeon")), 0.0)
    assert len(here.sessions()) == 1 + CONFIG.max_tombstones
    assert key(1) in {info.key for info in here.sessions()}
    assert here.command(AbortSource(key(1), FAILURE), 0.0) == []


def test_retrying_a_cancel_ends_with_its_place_in_the_table() -> None:
    here = endpoint()
    here.command(open_sink(1), 0.0)
    here.on_data(SinkPrepared(key(1), "zmq", 2, (2,)), 0.0)
    here.command(AbortSink(key(1), FAILURE), 0.0)
    here.on_data(SinkFenced(key(1)), 0.0)
    now, cancels = 0.0, 0
    while (due_s := here.next_deadline()) is not None:
        now = due_s
        cancels += len(here.on_timer(now))
    assert now == pytest.approx(CONFIG.tombstone_ttl_s, abs=1.0)
    assert cancels == pytest.approx(CONFIG.tombstone_ttl_s / CONFIG.resend_after_s, abs=2)


def test_a_long_reason_does_not_make_a_frame_that_the_peer_drops() -> None:
    here, long = endpoint(), Failure(code=ErrorCode.INTERNAL, reason="why? " * 2000)
    here.on_frame(frame(offer(1)), 0.0)
    told = here.command(AbortSource(key(1), long), 0.0)
    here.command(open_sink(2), 0.0)
    here.on_data(SinkPrepared(key(2), "zmq", 2, (2,)), 0.0)
    here.command(AbortSink(key(2), long), 0.0)
    told += here.on_data(SinkFenced(key(2)), 0.0)
    bodies_told = [effect.body for effect in told if isinstance(effect, SendFrame)]
    assert [type(body) for body in bodies_told] == [Failed, Cancel]
    for body in bodies_told:
        assert decode_frame(encode_frame(frame(body))).body == body
    [failed] = [effect.event for effect in told if isinstance(effect, EngineEvent)]
    assert failed.failure == long  # type: ignore[union-attr]  # the engine here is told all of it


# ------------------------------------------------------------------------------------- models of several components


def hybrid(start: int = 0, **pages: list[int]) -> OpenSink:
    """The KV of ten tokens of a model with full, sliding and recurrent layers."""
    arrays = {Component(name): np.array(ids, dtype=np.int32) for name, ids in pages.items()}
    return replace(open_sink(), start=start, pages=arrays)


def hybrid_endpoint(state_pieces: int = 2) -> Endpoint:
    made = Endpoint(ME, CONFIG, KvLayout(4, window=5, state=True), ["zmq"], state_pieces=state_pieces)
    made.on_membership(view(1, ME, PEER, OTHER), 0.0)
    return made


def test_each_segment_has_its_destination_and_a_state_travels_in_pieces() -> None:
    here = hybrid_endpoint()
    [prepare] = here.command(hybrid(full=[7, 8, 9], swa=[4, 2], state=[3]), 0.0)
    assert isinstance(prepare, PrepareSink)
    assert prepare.spans == (span("full", [7, 8, 9]), span("swa", [4, 2]), span("state", [6, 7]))
    [sent] = bodies(here.on_data(SinkPrepared(key(1), "zmq", 2, (4, 9, 1)), 0.0))
    assert isinstance(sent, Offer)
    assert sent.region_units == (4, 9, 1)
    there = hybrid_endpoint()
    assert isinstance(bodies(there.on_frame(frame(signed(sent)), 0.0))[1], Accept)


@pytest.mark.parametrize(
    "command",
    [
        hybrid(full=[7, 8, 9], swa=[4, 2]),
        hybrid(full=[7, 8, 9], swa=[4, 2, 3], state=[3]),
        hybrid(full=[7, 8, 9], swa=[4, 2], state=[3, 4]),
        hybrid(full=[7, 8, 9], swa=[4, 0], state=[3]),
        hybrid(start=8, full=[7, 8, 9], swa=[4], state=[3]),
    ],
    ids=["no state", "more than the window", "two states", "a dead page", "more than the missing pages"],
)
def test_pages_of_anything_but_the_segments_are_a_bug(command: OpenSink) -> None:
    with pytest.raises(AssertionError):
        hybrid_endpoint().command(command, 0.0)


def test_the_state_of_a_prefix_hit_is_asked_for_whole() -> None:
    [prepare] = hybrid_endpoint().command(hybrid(start=8, full=[7], swa=[4], state=[3]), 0.0)
    assert isinstance(prepare, PrepareSink)
    assert prepare.spans == (span("full", [7]), span("swa", [4]), span("state", [6, 7]))


# -------------------------------------------------------------------------------------------------------- liveness


def test_silence_ends_hand_offs_but_is_no_proof() -> None:
    here = endpoint()
    here.on_frame(frame(offer(1, lane="local")), 0.0)
    here.command(ShipRegion(key(1), 4, 6, np.array([8, 9], dtype=np.int32)), 0.0)
    here.on_data(RegionReady(key(1), 0, 9000, 60, 1), 0.0)
    here.on_frame(frame(offer(2, OTHER, lane="local"), src=OTHER), 0.0)
    assert FenceSource(key(1)) in here.on_peer_silent(PEER.worker, 1.0)
    assert here.on_peer_silent(PEER.worker, 1.1) == []
    here.on_data(SourceFenced(key(1)), 1.1)
    assert here.live_sources == 2
    [aborted] = bodies(here.on_membership(view(2, ME, OTHER, SUCCESSOR), 2.0))
    assert isinstance(aborted, SourceAborted)
    assert here.live_sources == 1  # the other peer's goes on


def test_nothing_is_sent_to_the_dead() -> None:
    here = endpoint()
    here.command(open_sink(1), 0.0)
    here.on_data(SinkPrepared(key(1), "zmq", 2, (2,)), 0.0)
    here.on_frame(frame(offer(2)), 0.0)
    effects = here.on_membership(view(2, ME, OTHER, SUCCESSOR), 1.0)
    assert effects == [FenceSink(key(1)), FenceSource(key(2))]
    [failed] = bodies(here.on_data(SinkFenced(key(1)), 1.0))
    assert failed.peer_lost
    [aborted] = bodies(here.on_data(SourceFenced(key(2)), 1.0))
    assert isinstance(aborted, SourceAborted)
    assert here.next_deadline() is None
    assert here.on_frame(frame(offer(2)), 1.0) == []  # its last words


def test_history_tells_what_happened() -> None:
    here = endpoint()
    here.on_frame(frame(offer(1)), 0.0)
    here.on_frame(frame(Cancel(key=key(1), failure=FAILURE)), 3.0)
    [last] = here.history
    assert (last.now, last.side, last.event, last.before, last.after) == (
        3.0,
        "source",
        "Cancel",
        "Accepted",
        "Cancelling",
    )
