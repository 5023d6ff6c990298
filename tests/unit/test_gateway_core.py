"""GatewayCore: one outcome per request, gapless tokens, continuation on another worker."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from baton.common.config import GatewayConfig, LivenessConfig, TransferConfig
from baton.common.engine.core_api import FromPeer, MembershipView, SendTo
from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, RequestId, Stamp, WorkerId
from baton.common.messages import (
    CancelRequest,
    Failure,
    FinishAck,
    Heartbeat,
    Load,
    Member,
    Output,
    Resume,
    SamplingParams,
    Submit,
    Submitted,
    Timeline,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)
from baton.common.routing_config import RoutingConfig
from baton.deploy.gateway_core import GatewayCore
from baton.deploy.gateway_states import RequestEnded, TokensArrived
from baton.deploy.routing.policies import SLACK

R = RequestId("r1")
PROMPT = np.arange(5, dtype=np.int32)
SAMPLING = SamplingParams(max_tokens=8)


def stamp(name: str, incarnation: int = 1) -> Stamp:
    return Stamp(WorkerId(name), incarnation, Epoch(hash((name, incarnation)) & 0xFFFF))


def view(version: int, *stamps: Stamp, silent: tuple[str, ...] = ()) -> MembershipView:
    members = tuple(
        Member(stamp=one, role="prefill" if one.worker.startswith("p") else "decode", address="") for one in stamps
    )
    return MembershipView(version, members, frozenset(WorkerId(name) for name in silent))


A, B, P = stamp("decode-a"), stamp("decode-b"), stamp("prefill-0")


class Driver:
    """Calls the core and keeps what came out, by kind."""

    def __init__(self, max_inflight: int = 8) -> None:
        self.core = GatewayCore(
            GatewayConfig(max_inflight_requests=max_inflight),
            TransferConfig(resend_after_s=1.0),
            LivenessConfig(),
            64,
            routing=RoutingConfig(policy="rendezvous"),
        )
        self.now = 0.0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.ended: list[RequestEnded] = []
        self.sent: list[SendTo] = []

    def take(self, effects: list[object]) -> list[SendTo]:
        sent: list[SendTo] = []
        for effect in effects:
            match effect:
                case TokensArrived():
                    assert effect.first_index == len(self.tokens)
                    self.tokens.extend(effect.tokens)
                    self.logprobs.extend(effect.logprobs)
                case RequestEnded():
                    self.ended.append(effect)
                case SendTo():
                    sent.append(effect)
        self.sent.extend(sent)
        return sent

    def view(self, *stamps: Stamp, silent: tuple[str, ...] = ()) -> list[SendTo]:
        return self.take(self.core.handle(view(1, *stamps, silent=silent), self.now))

    def submit(self, request_id: RequestId = R, timeout_s: float = 60.0) -> list[SendTo]:
        return self.take(self.core.submit(request_id, PROMPT, SAMPLING, timeout_s, self.now))

    def tell(self, sender: Stamp, body: object) -> list[SendTo]:
        return self.take(self.core.handle(FromPeer(sender, body), self.now))  # type: ignore[arg-type]

    def output(self, sender: Stamp, first: int, tokens: list[int], placement: int = 0, **more: object) -> list[SendTo]:
        body = Output(request_id=R, placement=placement, first_index=first, tokens=pack_tokens(tokens), **more)  # type: ignore[arg-type]
        return self.tell(sender, body)

    def pass_time(self, seconds: float) -> list[SendTo]:
        end = self.now + seconds
        sent: list[SendTo] = []
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            sent += self.take(self.core.on_timer(self.now))
        self.now = end
        return sent


@pytest.fixture
def one() -> Driver:
    """One decode worker, one prefill worker, one request submitted and accepted."""
    driver = Driver()
    driver.view(A, P)
    (sent,) = driver.submit()
    assert isinstance(sent.body, Submit)
    assert sent.worker == A.worker
    assert sent.body.prefill_worker == P.worker
    driver.tell(A, Submitted(request_id=R, placement=0))
    return driver


def test_streams_and_ends_once(one: Driver) -> None:
    one.output(A, 0, [10])
    one.output(A, 1, [11, 12])
    (ack,) = one.output(A, 3, [13], finish_reason="length")
    assert isinstance(ack.body, FinishAck)
    assert one.tokens == [10, 11, 12, 13]
    assert [(end.finish_reason, end.failure) for end in one.ended] == [("length", None)]
    (again,) = one.output(A, 3, [13], finish_reason="length")  # its ack was lost
    assert isinstance(again.body, FinishAck)
    assert len(one.ended) == 1
    assert one.core.idle


def test_gap_is_asked_for_and_overlap_skipped(one: Driver) -> None:
    one.output(A, 0, [10])
    (resume,) = one.output(A, 2, [12], finish_reason="length")
    assert resume.body == Resume(request_id=R, placement=0, next_index=1)
    assert one.tokens == [10]
    assert not one.ended
    one.output(A, 0, [10, 11, 12], finish_reason="length")
    assert one.tokens == [10, 11, 12]
    assert len(one.ended) == 1


def test_logprobs_follow_their_tokens(one: Driver) -> None:
    logprobs = tuple(TokenLogprob(logprob=-float(i)) for i in range(3))
    one.output(A, 0, [10], logprobs=logprobs[:1])
    one.output(A, 0, [10, 11, 12], logprobs=logprobs)
    assert one.logprobs == list(logprobs)


def test_a_priority_goes_to_the_worker() -> None:
    driver = Driver()
    driver.view(A, P)
    [sent] = driver.take(driver.core.submit(R, PROMPT, SAMPLING, 60.0, driver.now, priority=-5))
    assert isinstance(sent.body, Submit)
    assert sent.body.priority == -5


def test_submit_is_sent_again_until_answered() -> None:
    driver = Driver()
    driver.view(A)
    driver.submit()
    again = driver.pass_time(2.5)
    assert [type(sent.body) for sent in again] == [Submit, Submit]
    driver.tell(A, Submitted(request_id=R, placement=0))
    assert driver.pass_time(2.5) == []


def test_dead_worker_is_replaced_and_the_stream_continues(one: Driver) -> None:
    one.output(A, 0, [10, 11])
    (sent,) = one.view(B, P)
    assert sent.worker == B.worker
    assert isinstance(sent.body, Submit)
    assert sent.body.placement == 1
    assert unpack_tokens(sent.body.outputs).tolist() == [10, 11]
    (late,) = one.output(A, 2, [99])  # the dead one's last words
    assert late.body == CancelRequest(request_id=R, placement=0)
    one.output(B, 2, [12], placement=1, finish_reason="length")
    assert one.tokens == [10, 11, 12]
    assert one.ended[0].placements == 2


def test_restart_on_the_same_seat_is_another_process(one: Driver) -> None:
    successor = stamp("decode-a", 2)
    (sent,) = one.view(successor, P)
    assert sent.epoch == successor.epoch
    (late,) = one.output(A, 0, [99])
    assert late.epoch == A.epoch
    assert one.tokens == []


def test_silent_worker_is_left_and_told_until_it_lets_go(one: Driver) -> None:
    cancel, submit = one.view(A, B, P, silent=("decode-a",))
    assert cancel.body == CancelRequest(request_id=R, placement=0)
    assert submit.worker == B.worker
    one.tell(B, Submitted(request_id=R, placement=1))
    assert {type(sent.body) for sent in one.pass_time(2.0)} == {CancelRequest}
    one.output(B, 0, [10], placement=1, finish_reason="length")
    assert not one.core.idle
    (ack,) = one.output(A, 0, [], failure=Failure(code=ErrorCode.CANCELLED))
    assert ack.body == FinishAck(request_id=R, placement=0)
    assert one.core.idle
    assert len(one.ended) == 1


@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.DRAINING, ErrorCode.INTERNAL])
def test_refusal_goes_to_another_worker(code: ErrorCode) -> None:
    driver = Driver()
    driver.view(A, B)
    (first,) = driver.submit()
    refuser, other = (A, B) if first.worker == A.worker else (B, A)
    sent = driver.output(refuser, 0, [], failure=Failure(code=code))
    assert [type(one.body) for one in sent] == [FinishAck, Submit]
    assert sent[1].worker == other.worker


def test_refused_by_everyone_is_overloaded() -> None:
    driver = Driver()
    driver.view(A)
    driver.submit()
    driver.output(A, 0, [], failure=Failure(code=ErrorCode.OVERLOADED))
    assert driver.ended[0].failure is not None
    assert driver.ended[0].failure.code is ErrorCode.OVERLOADED
    assert driver.ended[0].retry_after_s


def test_out_of_pages_is_final(one: Driver) -> None:
    one.output(A, 0, [], failure=Failure(code=ErrorCode.OUT_OF_PAGES))
    assert [end.failure.code for end in one.ended if end.failure] == [ErrorCode.OUT_OF_PAGES]


def test_waits_for_a_worker_then_gives_up() -> None:
    driver = Driver()
    driver.submit()
    assert driver.pass_time(1.0) == []
    (sent,) = driver.view(A)
    assert isinstance(sent.body, Submit)
    driver.view()
    driver.pass_time(13.0)
    assert [end.failure.code for end in driver.ended if end.failure] == [ErrorCode.NO_WORKER]
    assert driver.core.idle


def test_deadline_ends_and_cancels(one: Driver) -> None:
    one.output(A, 0, [10])
    one.pass_time(61.0)
    assert [end.failure.code for end in one.ended if end.failure] == [ErrorCode.DEADLINE_EXCEEDED]
    assert any(isinstance(sent.body, CancelRequest) for sent in one.sent)
    one.pass_time(100.0)
    assert one.core.idle  # a worker that never answers is not told for ever


def test_client_cancel_ends_at_once(one: Driver) -> None:
    sent = one.take(one.core.cancel(R, one.now))
    assert [type(effect.body) for effect in sent] == [CancelRequest]
    assert one.core.cancel(R, one.now) == []
    one.output(A, 0, [10])
    one.output(A, 0, [10], failure=Failure(code=ErrorCode.CANCELLED))
    assert [end.failure.code for end in one.ended if end.failure] == [ErrorCode.CANCELLED]
    assert one.tokens == []
    assert one.core.idle


def test_found_stop_string_ends_with_the_workers_timeline(one: Driver) -> None:
    one.output(A, 0, [10, 11])
    sent = one.take(one.core.finish(R, one.now))
    assert [type(effect.body) for effect in sent] == [CancelRequest]
    assert not one.ended
    (cancel,) = one.output(A, 2, [12])  # crossed the cancellation: behind the stop string
    assert cancel.body == CancelRequest(request_id=R, placement=0, answered=True)
    timeline = Timeline(decode_s=1.5, decode_worker="decode-a")
    (ack,) = one.output(A, 3, [], failure=Failure(code=ErrorCode.CANCELLED), timeline=timeline)
    assert ack.body == FinishAck(request_id=R, placement=0)
    assert one.tokens == [10, 11]
    assert [(end.finish_reason, end.failure, end.timeline) for end in one.ended] == [("stop", None, timeline)]
    assert one.core.idle


def test_found_stop_string_does_not_wait_for_a_worker_that_says_nothing(one: Driver) -> None:
    one.output(A, 0, [10])
    one.take(one.core.finish(R, one.now))
    (again,) = one.pass_time(1.0)
    assert again.body == CancelRequest(request_id=R, placement=0, answered=True)
    assert [(end.finish_reason, end.timeline) for end in one.ended] == [("stop", None)]
    one.output(A, 1, [], failure=Failure(code=ErrorCode.CANCELLED), timeline=Timeline())
    assert len(one.ended) == 1
    assert one.core.idle


def test_a_found_stop_string_waits_no_longer_than_the_deadline(one: Driver) -> None:
    one.output(A, 0, [10])
    one.pass_time(59.5)
    one.take(one.core.finish(R, one.now))
    one.pass_time(0.5)
    assert [end.finish_reason for end in one.ended] == ["stop"]


@pytest.mark.parametrize("how", ["worker dies", "client leaves", "worker finishes by itself"])
def test_after_a_found_stop_string_there_is_one_end(one: Driver, how: str) -> None:
    one.output(A, 0, [10])
    one.take(one.core.finish(R, one.now))
    one.take(one.core.finish(R, one.now))
    if how == "worker dies":
        assert one.view(B, P) == []
    elif how == "client leaves":
        assert one.take(one.core.cancel(R, one.now)) == []
    else:
        one.output(A, 1, [11], finish_reason="length", timeline=Timeline())
    assert [(end.finish_reason, end.failure) for end in one.ended] == [("stop", None)]
    one.pass_time(200.0)
    assert len(one.ended) == 1
    assert one.tokens == [10]
    assert one.core.idle


def test_a_stop_string_found_while_no_worker_has_the_request_ends_at_once(one: Driver) -> None:
    one.output(A, 0, [10])
    one.view(P)
    one.take(one.core.finish(R, one.now))
    assert [end.finish_reason for end in one.ended] == ["stop"]
    assert one.core.idle


def test_the_goodbye_of_an_earlier_placement_is_not_the_account_of_the_last(one: Driver) -> None:
    one.output(A, 0, [10])
    one.view(A, B, P, silent=("decode-a",))
    one.output(B, 1, [11], placement=1)
    one.take(one.core.finish(R, one.now))
    one.output(A, 1, [], failure=Failure(code=ErrorCode.CANCELLED), timeline=Timeline(decode_worker="decode-a"))
    assert not one.ended
    last = Timeline(decode_worker="decode-b")
    one.output(B, 2, [], placement=1, failure=Failure(code=ErrorCode.CANCELLED), timeline=last)
    assert [(end.placements, end.timeline) for end in one.ended] == [(2, last)]
    assert one.core.idle


def test_bounded_in_flight() -> None:
    driver = Driver(max_inflight=1)
    driver.view(A)
    driver.submit()
    driver.submit(RequestId("r2"))
    assert [(end.request_id, end.failure.code) for end in driver.ended if end.failure] == [
        (RequestId("r2"), ErrorCode.OVERLOADED)
    ]


def test_bad_prompts_are_refused_at_the_door() -> None:
    driver = Driver()
    driver.take(driver.core.submit(RequestId("e"), np.empty(0, dtype=np.int32), SAMPLING, 1.0, 0.0))
    driver.take(driver.core.submit(RequestId("l"), np.zeros(64, dtype=np.int32), SAMPLING, 1.0, 0.0))
    codes = [end.failure.code for end in driver.ended if end.failure]
    assert codes == [ErrorCode.INVALID_REQUEST, ErrorCode.PROMPT_TOO_LONG]


def test_worker_that_took_us_for_dead_may_get_it_again(one: Driver) -> None:
    sent = one.output(A, 0, [], failure=Failure(code=ErrorCode.CANCELLED, reason="gateway lost"))
    assert [type(effect.body) for effect in sent] == [FinishAck, Submit]
    assert not one.ended


def test_quiet_worker_is_asked(one: Driver) -> None:
    assert [sent.body for sent in one.pass_time(8.5)] == [Resume(request_id=R, placement=0, next_index=0)]


def test_messages_nobody_asked_for_create_nothing() -> None:
    driver = Driver()
    driver.view(A)
    (answer,) = driver.tell(A, Submitted(request_id=RequestId("ghost"), placement=3))
    assert isinstance(answer.body, CancelRequest)
    driver.output(A, 0, [1], finish_reason="stop")
    assert driver.core.idle
    assert driver.core.next_deadline() is None


def prefill_asked(driver: Driver, number: int) -> WorkerId | None:
    """For one more request, which begins like all others."""
    (sent,) = driver.submit(RequestId(f"b{number}"))
    assert isinstance(sent.body, Submit)
    return sent.body.prefill_worker


def test_a_burst_between_two_heartbeats_is_spread_over_prefill_workers() -> None:
    driver = Driver(max_inflight=64)
    driver.view(A, B, P, stamp("prefill-1"), stamp("prefill-2"))
    asked = Counter(prefill_asked(driver, number) for number in range(30))
    assert len(asked) == 3
    assert max(asked.values()) - min(asked.values()) <= SLACK + 1, "all prefer the same one"


@pytest.mark.parametrize("over", ["first token", "cancelled", "decode worker lost"])
def test_a_prompt_is_load_until_it_is_over(over: str) -> None:
    driver = Driver(max_inflight=64)
    driver.view(A, P, stamp("prefill-1"))
    (favourite,) = {prefill_asked(driver, number) for number in range(SLACK + 1)}
    if over == "first token":
        driver.tell(A, Output(request_id=RequestId("b0"), placement=0, first_index=0, tokens=pack_tokens([10])))
    elif over == "cancelled":
        driver.take(driver.core.cancel(RequestId("b0"), driver.now))
    else:
        driver.view(P, stamp("prefill-1"))  # all wait for another one
        driver.take(driver.core.cancel(RequestId("b0"), driver.now))
        placed_again = {sent.body.prefill_worker for sent in driver.view(A, P, stamp("prefill-1"))}
        assert placed_again == {favourite}
    assert [prefill_asked(driver, number) for number in (20, 21)] == [favourite, *others(favourite)]


def test_a_submit_that_is_repeated_names_the_same_prefill_worker_while_it_is_there() -> None:
    driver = Driver(max_inflight=64)
    driver.view(A, P, stamp("prefill-1"))
    first = prefill_asked(driver, 0)
    for load in (0, 9, 0):
        driver.tell(P if first == P.worker else stamp("prefill-1"), Heartbeat(load=Load(queued=load)))
        (again,) = driver.pass_time(1.0)
        assert again.body.prefill_worker == first
    driver.view(A, *[one for one in (P, stamp("prefill-1")) if one.worker != first])
    (again,) = driver.pass_time(1.0)
    assert [again.body.prefill_worker] == others(first)


def others(worker: WorkerId | None) -> list[WorkerId]:
    return [one for one in (P.worker, WorkerId("prefill-1")) if one != worker]
