"""DecodeCore: from Submit to an acknowledged last message, whatever happens to the KV on the way."""

from __future__ import annotations

import numpy as np
import pytest
from core_rig import (
    DECODE,
    EVERYONE,
    GATEWAY,
    GREEDY,
    PREFILL,
    PREFILL_2,
    VOCABULARY,
    Rig,
    decode_engine,
    member,
    prefill_engine,
    prompt_of,
)
from msgspec import structs

from baton.common.engine.core_api import Drain, FromPeer, HandOver, SendTo
from baton.common.engine.fake_answer import fake_prompt_logprobs
from baton.common.engine.fake_runner import fake_answer, fake_generate
from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey, RequestId
from baton.common.kv.census import OwnerClass
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import CancelRequest, Failure, FinishAck, Output, SamplingParams, Submitted
from baton.transfer.api import AbortSink, FirstTokenReady, OfferReceived, OpenSink, ShipRegion


def answer(prompt: np.ndarray, sampling: SamplingParams = GREEDY, context: int = 256) -> list[int]:
    return list(fake_answer(prompt, sampling, context).tokens)


def code_of(rig: Rig, name: str) -> ErrorCode | None:
    failure = rig.gateway.finals[name].failure
    return None if failure is None else failure.code


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_answers_by_hand_off(page_size: int) -> None:
    rig = Rig(decode_engine(256 // page_size, page_size), prefill_engine(256 // page_size, page_size, chunk_tokens=16))
    for index, length in enumerate([1, 3, 4, 5, 16, 17, 40]):
        rig.submit(f"r{index}", prompt_of(length, index))
    rig.settle()
    for index, length in enumerate([1, 3, 4, 5, 16, 17, 40]):
        assert rig.gateway.tokens[f"r{index}"] == answer(prompt_of(length, index))
        assert rig.gateway.finals[f"r{index}"].finish_reason == "length"
    rig.assert_clean()


def test_answers_alone_when_there_is_no_prefill_worker() -> None:
    rig = Rig(decode_engine(chunk_tokens=8))
    rig.view(*EVERYONE[:2])
    for index in range(3):
        rig.submit(f"r{index}", prompt_of(30 + index, index))
    rig.settle()
    for index in range(3):
        assert rig.gateway.tokens[f"r{index}"] == answer(prompt_of(30 + index, index))
    rig.assert_clean()


def test_running_streams_go_on_while_a_prompt_is_prefilled_here() -> None:
    rig = Rig(decode_engine(chunk_tokens=8))
    rig.view(*EVERYONE[:2])
    rig.submit("short", prompt_of(4), SamplingParams(max_tokens=30))
    rig.run(rig.decode.step() or [])
    rig.submit("long", prompt_of(60, 1))
    before = len(rig.gateway.tokens["short"])
    for _ in range(7):
        rig.run(rig.decode.step() or [])
        assert rig.decode.batches[-1].num_tokens == 1 + 8
    assert len(rig.gateway.tokens["short"]) == before + 7
    assert "long" not in rig.gateway.tokens
    rig.settle()
    assert rig.gateway.tokens["long"] == answer(prompt_of(60, 1))


def test_short_uncached_parts_are_not_handed_over() -> None:
    rig = Rig(decode_engine(local_prefill_max_tokens=6))
    rig.submit("short", prompt_of(6))
    rig.submit("long", prompt_of(7, 1))
    rig.settle()
    assert [effect.request_id for effect in rig.log if isinstance(effect, OpenSink)] == ["long"]
    assert rig.gateway.tokens["short"] == answer(prompt_of(6))


def test_second_turn_asks_only_for_what_is_not_cached() -> None:
    rig = Rig()
    prompt = prompt_of(21)
    rig.submit("r1", prompt)
    rig.settle()
    longer = np.concatenate((prompt, np.array(answer(prompt), dtype=np.int32), prompt_of(9, 5)))
    rig.submit("r2", longer)
    rig.settle()
    assert [effect.start for effect in rig.log if isinstance(effect, OpenSink)] == [0, 28]
    assert rig.gateway.tokens["r2"] == answer(longer)
    timeline = rig.gateway.finals["r2"].timeline
    assert timeline is not None
    assert (timeline.cached_tokens, timeline.transferred_tokens, timeline.local_tokens) == (28, 10, 0)


def test_stop_token_context_limit_and_max_tokens() -> None:
    rig = Rig(decode_engine(context=40))
    prompt = prompt_of(10)
    free = fake_generate(prompt, GREEDY, 40)
    stopping = SamplingParams(max_tokens=30, stop_token_ids=(free[3],))
    rig.submit("stop", prompt, stopping)
    rig.submit("context", prompt_of(33, 1), SamplingParams(max_tokens=30))
    rig.submit("one", prompt_of(5, 2), SamplingParams(max_tokens=1))
    rig.settle()
    assert rig.gateway.tokens["stop"] == free[: free.index(free[3]) + 1]
    assert rig.gateway.finals["stop"].finish_reason == "stop"
    assert len(rig.gateway.tokens["context"]) == 7
    assert rig.gateway.finals["context"].finish_reason == "length"
    assert len(rig.gateway.tokens["one"]) == 1
    rig.assert_clean()


def test_logprobs_include_those_of_the_first_token() -> None:
    rig = Rig()
    sampling = SamplingParams(max_tokens=5, logprobs=2, temperature=1.0, seed=3)
    rig.submit("r", prompt_of(9), sampling)
    rig.settle()
    outputs = [effect.body for effect in rig.gateway.said if isinstance(effect.body, Output)]
    said = {output.first_index + i: one for output in outputs for i, one in enumerate(output.logprobs)}
    assert [said[i] for i in range(5)] == list(fake_answer(prompt_of(9), sampling, 256).logprobs)


def test_the_priority_of_a_request_is_that_of_its_hand_off() -> None:
    rig = Rig()
    rig.submit("r", prompt_of(15), priority=-3)
    rig.settle()
    [opened] = [effect for effect in rig.log if isinstance(effect, OpenSink)]
    assert opened.priority == -3


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_migrated_request_continues_where_it_was(penalty: float) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=7, frequency_penalty=penalty)
    expected = fake_generate(prompt_of(15), sampling, 12)
    rig = Rig()
    rig.gateway.tokens["r"] = expected[:5]
    rig.submit("r", prompt_of(15), sampling, outputs=expected[:5], placement=1)
    rig.settle()
    assert rig.gateway.tokens["r"] == expected
    offer = next(effect for effect in rig.log if isinstance(effect, OpenSink))
    assert not offer.sample
    assert len(offer.tokens) == 15 + 4
    rig.assert_clean()


def test_a_migrated_request_that_was_complete_ends_at_once() -> None:
    expected = answer(prompt_of(15))
    rig = Rig()
    rig.gateway.tokens["r"] = expected
    rig.submit("r", prompt_of(15), outputs=expected, placement=1)
    assert rig.gateway.finals["r"].finish_reason == "length"
    assert not rig.decode.batches
    rig.assert_clean()


def test_submit_is_idempotent_and_remembered() -> None:
    rig = Rig()
    rig.submit("r", prompt_of(9))
    rig.submit("r", prompt_of(9))
    assert [type(one.body) for one in rig.gateway.said] == [Submitted, Submitted]
    rig.settle()
    assert rig.gateway.tokens["r"] == answer(prompt_of(9))
    steps = len(rig.decode.batches)
    rig.gateway.finals.clear()
    rig.submit("r", prompt_of(9))  # a late copy
    rig.settle()
    assert code_of(rig, "r") is ErrorCode.CANCELLED
    assert len(rig.decode.batches) == steps
    rig.assert_clean()


def test_cancel_before_submit() -> None:
    rig = Rig()
    rig.cancel("r")
    rig.submit("r", prompt_of(9))
    assert code_of(rig, "r") is ErrorCode.CANCELLED
    rig.settle()
    assert not rig.decode.batches
    assert not any(isinstance(effect, OpenSink) for effect in rig.log)
    rig.assert_clean()


def test_cancel_while_queued_incoming_prefilling_running() -> None:
    rig = Rig(decode_engine(pages=20, rows=2, chunk_tokens=8))
    rig.hold_offers = True
    rig.submit("incoming", prompt_of(20))
    rig.submit("other", prompt_of(20, 1))
    rig.submit("queued", prompt_of(20, 2))
    assert rig.decode.core.load().queued == 1
    rig.cancel("queued")
    rig.cancel("incoming")
    assert [effect.key for effect in rig.log if isinstance(effect, AbortSink)]
    rig.release_offers()
    rig.settle()
    assert code_of(rig, "queued") is code_of(rig, "incoming") is ErrorCode.CANCELLED
    assert rig.gateway.tokens["other"] == answer(prompt_of(20, 1))
    rig.view(*EVERYONE[:2])
    rig.submit("here", prompt_of(30, 3))
    rig.run(rig.decode.step() or [])
    rig.cancel("here")
    rig.settle()
    assert code_of(rig, "here") is ErrorCode.CANCELLED
    rig.assert_clean()


def test_pages_of_an_aborted_hand_off_are_kept_until_it_has_ended() -> None:
    rig = Rig()
    rig.hold_offers = True
    rig.submit("r", prompt_of(20))
    effects = rig.decode.handle(_cancel_event("r"))
    assert [type(effect) for effect in effects] == [AbortSink, SendTo]
    (holding,) = rig.decode.core.holdings()
    assert holding.owner_class is OwnerClass.INCOMING
    assert rig.decode.pool.free_pages == rig.decode.pool.total_pages - 5
    rig.run(effects)
    assert not list(rig.decode.core.holdings())
    rig.assert_clean()


def _cancel_event(name: str) -> object:
    return FromPeer(GATEWAY, CancelRequest(request_id=RequestId(name), placement=0))


def test_cancel_during_a_step_frees_after_it() -> None:
    rig = Rig()
    rig.submit("r", prompt_of(20))
    while not rig.decode.launch():
        rig.run(rig.prefill.step() or [])
    rig.cancel("r")
    assert list(rig.decode.core.holdings())
    rig.run(rig.decode.collect())
    assert not list(rig.decode.core.holdings())
    assert code_of(rig, "r") is ErrorCode.CANCELLED
    rig.assert_clean()


def test_lost_prefill_worker_keeps_what_landed_and_asks_another() -> None:
    rig = Rig(prefill=prefill_engine(chunk_tokens=8))
    rig.view(*EVERYONE, member(PREFILL_2, "prefill"))
    rig.decode.now = 1.0
    rig.hold_offers = True
    rig.submit("r", prompt_of(30))
    rig.decode.now += 2.0
    first = next(effect for effect in rig.log if isinstance(effect, OpenSink))
    peers = {PREFILL.worker, PREFILL_2.worker}
    if first.peer == PREFILL.worker:
        rig.release_offers()
        rig.run(rig.prefill.step() or [])
        landed = 8
    else:
        landed = 0
    rig.lose_prefill()
    opened = [effect for effect in rig.log if isinstance(effect, OpenSink)]
    assert [effect.key.attempt for effect in opened] == [0, 1]
    assert {effect.peer for effect in opened} == peers
    assert opened[1].start == landed
    rig.decode.now += 3.0
    rig.lose_prefill()  # nobody is left: the rest is computed here
    rig.view(*EVERYONE[:2])
    while (effects := rig.decode.step()) is not None:
        rig.run(effects)
    assert rig.gateway.tokens["r"] == answer(prompt_of(30))
    timeline = rig.gateway.finals["r"].timeline
    assert timeline is not None
    assert timeline.attempts == 2
    assert timeline.handoff_s == pytest.approx(5.0), "of both"
    assert (timeline.transferred_tokens, timeline.local_tokens) == (landed, 30 - landed)
    assert timeline.lane == ("inproc" if landed else "")


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_retraction_under_pressure_loses_nothing(penalty: float) -> None:
    rig = Rig(decode_engine(pages=24, num_reserved_decode_tokens=0))
    sampling = SamplingParams(max_tokens=40, presence_penalty=penalty)
    for index in range(4):
        rig.submit(f"r{index}", prompt_of(14, index), sampling)
    rig.settle()
    assert rig.decode.core.retractions > 0
    for index in range(4):
        assert rig.gateway.tokens[f"r{index}"] == answer(prompt_of(14, index), sampling)
        timeline = rig.gateway.finals[f"r{index}"].timeline
        assert timeline is not None
        assert timeline.cached_tokens + timeline.transferred_tokens + timeline.local_tokens == 14
    rig.assert_clean()


def test_a_prompt_that_is_computed_again_is_scored_once() -> None:
    """Room is made for somebody else's next token when a part of the prompt has been computed, and scored."""
    rig = Rig(decode_engine(pages=43, num_reserved_decode_tokens=0, chunk_tokens=4))
    prompt, sampling = prompt_of(62, 1), SamplingParams(max_tokens=2, prompt_logprobs=1)
    for index in range(2):
        rig.submit(f"grows{index}", prompt_of(3, index), SamplingParams(max_tokens=60))
        rig.run(rig.prefill.step() or [])
    for _ in range(40):
        rig.run(rig.decode.step() or [])
    rig.hold_offers = True
    rig.submit("scored", prompt, sampling)
    rig.run(rig.decode.pass_time(0.0))
    while rig.handoffs:
        rig.lose_prefill()
    while not rig.decode.core.retractions:
        effects = rig.decode.step()
        assert effects is not None, "nobody had to make room"
        rig.run(effects)
    assert not any(held.owner_id.startswith("scored") for held in rig.decode.core.holdings())
    rig.settle()
    while rig.handoffs:
        rig.lose_prefill()
    rig.settle()
    assert rig.gateway.tokens["scored"] == answer(prompt, sampling)
    said = [one.body for one in rig.gateway.said if isinstance(one.body, Output) and one.body.request_id == "scored"]
    assert [one.prompt_logprobs for one in said if one.prompt_logprobs] == [fake_prompt_logprobs(prompt, 1)]
    rig.assert_clean()


def test_what_the_prefill_worker_had_cached_is_a_part_of_what_came_from_it() -> None:
    """Known to it from another decode worker, say: the decode worker's own cache is dropped in between."""
    rig = Rig()
    prompt, sampling = prompt_of(21), SamplingParams(max_tokens=20)
    expected = answer(prompt, sampling)
    rig.submit("first", prompt, sampling)
    rig.settle()
    rig.decode.pool.clear_cache()
    rig.submit("again", prompt, sampling)
    rig.settle()
    rig.decode.pool.clear_cache()
    known = np.concatenate((prompt, np.array(expected[:15], dtype=np.int32)))
    rig.submit("warms the prefill worker", known)
    rig.settle()
    rig.decode.pool.clear_cache()
    rig.gateway.tokens["migrated"] = expected[:15]
    rig.submit("migrated", prompt, sampling, outputs=expected[:15], placement=1)
    rig.settle()
    assert rig.gateway.tokens["migrated"] == expected
    assert [_moved(rig, name) for name in ("first", "again", "migrated")] == [(21, 0), (21, 20), (21, 21)]


def test_retracted_requests_count_what_was_cached_at_prefill_once() -> None:
    rig = Rig(decode_engine(pages=24, num_reserved_decode_tokens=0))
    sampling = SamplingParams(max_tokens=40)
    for index in range(4):
        rig.submit(f"r{index}", prompt_of(14, index), sampling)
    rig.settle()
    assert rig.decode.core.retractions > 0
    assert sum(isinstance(effect, OpenSink) for effect in rig.log) > 4, "none came back by a hand-off"
    for index in range(4):
        assert _moved(rig, f"r{index}") == (14, 0)


def _moved(rig: Rig, name: str) -> tuple[int, int]:
    timeline = rig.gateway.finals[name].timeline
    assert timeline is not None
    assert 0 <= timeline.prefill_cached_tokens <= timeline.transferred_tokens
    return timeline.transferred_tokens, timeline.prefill_cached_tokens


def test_a_retracted_request_leaves_nothing_in_the_cache_that_was_planned_and_not_computed() -> None:
    """It was planned, its newest position filled a page, and then somebody behind it in the same step needed room: of
    the window, so that pages of full attention are not wanted and would stay in the cache."""
    layout = KvLayout(4, window=8)
    rig = Rig(
        decode_engine(layout=layout, swa_pages=7, num_reserved_decode_tokens=0, chunk_tokens=8),
        prefill_engine(layout=layout),
    )
    rig.submit("first turn", prompt_of(6, 1), SamplingParams(max_tokens=3), session=("s", 0))
    rig.settle()
    prompt, sampling = prompt_of(9), SamplingParams(max_tokens=10)
    conversation = np.concatenate((prompt_of(6, 1), np.array(rig.gateway.tokens["first turn"]), prompt_of(5, 2)))
    rig.submit("planned", prompt, sampling)
    rig.submit("second turn", conversation, sampling, session=("s", 1))  # dearer: little of it is shared
    while not rig.decode.core.retractions:
        rig.run(rig.prefill.step() or [])
        rig.run(rig.decode.step() or [])
    known = np.concatenate((prompt, np.array(rig.gateway.tokens["planned"])))
    assert len(known) == 12, "three pages, and the last position of them was to be computed"
    assert rig.decode.pool.match_len(known) == 8
    rig.settle()
    assert rig.gateway.tokens["planned"] == fake_generate(prompt, sampling, 10, layout=layout)
    assert rig.gateway.tokens["second turn"] == fake_generate(conversation, sampling, 10, layout=layout)


def test_the_last_one_that_does_not_fit_fails_clearly() -> None:
    rig = Rig(decode_engine(pages=8))
    rig.submit("r", prompt_of(20), SamplingParams(max_tokens=60))
    rig.settle()
    assert code_of(rig, "r") is ErrorCode.OUT_OF_PAGES
    assert rig.gateway.tokens["r"] == fake_generate(prompt_of(20), GREEDY, len(rig.gateway.tokens["r"]))
    assert len(rig.gateway.tokens["r"]) == 8 * 4 - 20 + 1
    rig.assert_clean()


def test_deadline_in_every_state() -> None:
    rig = Rig(decode_engine(pages=16, rows=2))
    rig.hold_offers = True
    rig.submit("incoming", prompt_of(10), ttl_s=5.0)
    rig.submit("incoming2", prompt_of(10, 1), ttl_s=5.0)
    rig.submit("queued", prompt_of(10, 2), ttl_s=5.0)
    assert rig.decode.core.next_deadline() == 5.0
    rig.run(rig.decode.pass_time(5.0))
    assert {name: code_of(rig, name) for name in rig.gateway.finals} == dict.fromkeys(
        ["incoming", "incoming2", "queued"], ErrorCode.DEADLINE_EXCEEDED
    )
    rig.assert_clean()


def test_last_message_is_repeated_until_acknowledged() -> None:
    rig = Rig()
    rig.gateway.acknowledge = False
    rig.submit("r", prompt_of(6))
    rig.settle()
    rig.gateway.said.clear()
    for _ in range(3):
        rig.run(rig.decode.pass_time(0.5))
    assert [type(one.body) for one in rig.gateway.said] == [Output] * 3
    assert not rig.decode.core.idle
    rig.resume("r", 2)
    last = rig.gateway.said[-1].body
    assert isinstance(last, Output)
    assert last.first_index == 2
    assert len(last.tokens) == 4 * 6
    assert last.finish_reason == "length"
    rig.tell(FinishAck(request_id=RequestId("r"), placement=0))
    rig.assert_clean()


def test_unacknowledged_last_messages_end_with_their_time() -> None:
    rig = Rig()
    rig.gateway.acknowledge = False
    rig.submit("r", prompt_of(6))
    rig.settle()
    for _ in range(200):
        rig.run(rig.decode.pass_time(0.5))
    rig.assert_clean()
    assert rig.decode.core.next_deadline() is None
    rig.gateway.finals.clear()
    rig.resume("r", 0)
    assert code_of(rig, "r") is ErrorCode.CANCELLED


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_lost_gateway_frees_everything(how: str) -> None:
    rig = Rig()
    rig.gateway.acknowledge = False
    rig.submit("r", prompt_of(20), SamplingParams(max_tokens=100))
    rig.run(rig.prefill.step() or [])
    rig.run(rig.decode.step() or [])
    if how == "gone":
        rig.view(*EVERYONE[1:])
        rig.assert_clean()
    else:
        rig.view(*EVERYONE, silent=("gateway-0",))
        assert not list(rig.decode.core.holdings())
    assert not rig.decode.launch()


def test_drain_refuses_new_and_finishes_old() -> None:
    rig = Rig()
    rig.submit("old", prompt_of(20))
    rig.run(rig.decode.handle(Drain()))
    rig.submit("new", prompt_of(5))
    assert code_of(rig, "new") is ErrorCode.DRAINING
    assert not rig.decode.core.idle
    rig.settle()
    assert rig.gateway.tokens["old"] == answer(prompt_of(20))
    rig.assert_clean()


def test_who_leaves_hands_over_what_it_has_not_finished() -> None:
    rig = Rig()
    rig.submit("running", prompt_of(20))
    rig.submit("waiting", prompt_of(30))
    rig.run(rig.decode.handle(Drain()))
    rig.run(rig.decode.handle(HandOver()))
    rig.settle()
    assert code_of(rig, "running") is code_of(rig, "waiting") is ErrorCode.DRAINING, "the gateway tries another one"
    rig.assert_clean()
    assert rig.decode.core.idle


def test_bounded_queue() -> None:
    rig = Rig(decode_engine(rows=1, max_queued_requests=2))
    rig.hold_offers = True
    for index in range(4):
        rig.submit(f"r{index}", prompt_of(8, index))
    assert code_of(rig, "r3") is ErrorCode.OVERLOADED
    rig.release_offers()
    rig.settle()
    for index in range(3):
        assert rig.gateway.tokens[f"r{index}"] == answer(prompt_of(8, index))


def test_impossible_prompts_are_refused() -> None:
    rig = Rig(decode_engine(pages=10))
    rig.submit("pool", prompt_of(41))
    rig.submit("context", prompt_of(256))
    rig.submit("empty", prompt_of(0))
    assert code_of(rig, "pool") is code_of(rig, "context") is ErrorCode.PROMPT_TOO_LONG
    assert code_of(rig, "empty") is ErrorCode.INVALID_REQUEST
    rig.assert_clean()


def test_tokens_that_the_model_does_not_have_are_refused_and_named() -> None:
    rig = Rig()
    rig.submit("high", np.array([3, VOCABULARY - 1, VOCABULARY, 4], dtype=np.int32))
    rig.submit("negative", np.array([-7, 1], dtype=np.int32))
    rig.submit("continued", prompt_of(8), outputs=[5, VOCABULARY + 9])
    reasons = [rig.gateway.finals[name].failure for name in ("high", "negative", "continued")]
    assert [failure.code for failure in reasons if failure] == [ErrorCode.INVALID_REQUEST] * 3
    named = [failure.reason.partition(":")[0] for failure in reasons if failure]
    assert named == ["prompt[2] = 65536", "prompt[0] = -7", "outputs[1] = 65545"]
    rig.assert_clean()


def test_later_placement_replaces_an_earlier_one() -> None:
    rig = Rig()
    rig.hold_offers = True
    rig.submit("r", prompt_of(20))
    rig.submit("r", prompt_of(20), placement=1)
    rig.release_offers()
    rig.gateway.finals.clear()
    rig.settle()
    assert rig.gateway.tokens["r"] == answer(prompt_of(20))
    rig.assert_clean()


def test_ids_are_compared_exactly() -> None:
    rig = Rig()
    rig.hold_offers = True
    rig.submit("a1", prompt_of(8))
    rig.submit("a10", prompt_of(8, 1))
    rig.cancel("a1")
    rig.release_offers()
    rig.settle()
    assert code_of(rig, "a1") is ErrorCode.CANCELLED
    assert rig.gateway.tokens["a10"] == answer(prompt_of(8, 1))


def test_foreign_events_fail_loudly() -> None:
    with pytest.raises(TypeError):
        decode_engine().handle(ShipRegion(None, 0, 1, None))  # type: ignore[arg-type]


@pytest.mark.parametrize("another", [False, True])
def test_all_landed_but_no_first_token(another: bool) -> None:
    """The prefill worker died between the last region and Done: only the last position is computed again, and here,
    whoever else is there: hand-offs move whole pages."""
    rig = Rig()
    rig.hold_offers = True
    rig.submit("r", prompt_of(20))
    (opened,) = [effect for effect in rig.log if isinstance(effect, OpenSink)]
    source = prefill_engine()
    source.handle(
        OfferReceived(opened.key, DECODE, opened.request_id, opened.tokens, 0, True, opened.sampling, opened.deadline_s)
    )
    shipped = [effect for effect in source.step() or [] if isinstance(effect, ShipRegion)]
    target, there = opened.pages[Component.FULL], source.runner.memory.main.as_bytes()
    rig.decode.runner.memory.main.as_bytes()[target] = there[shipped[0].pages]
    rig.handoffs[opened.key].shipped = 20
    rig.version += 1
    if another:
        rig.view(*EVERYONE[:2], member(PREFILL_2, "prefill"))
    else:
        rig.view(*EVERYONE[:2])
    rig.lose_prefill()
    assert len([effect for effect in rig.log if isinstance(effect, OpenSink)]) == 1
    while (effects := rig.decode.step()) is not None:
        rig.run(effects)
    assert rig.decode.batches[0].num_tokens == 1
    assert rig.gateway.tokens["r"] == answer(prompt_of(20))


# ---------------------------------------------------------------------------------------- the first token comes early


def begun(rig: Rig, name: str, length: int, **how: int) -> HandoffKey:
    """Asked for, and its first token has come ahead of its pages."""
    rig.hold_offers = True
    rig.submit(name, prompt_of(length), structs.replace(GREEDY, **how))
    key = [effect.key for effect in rig.log if isinstance(effect, OpenSink)][-1]
    rig.run(rig.decode.handle(FirstTokenReady(key, answer(prompt_of(length))[0], None)))
    return key


def test_the_first_token_is_told_before_the_pages_are_there_and_once() -> None:
    rig = Rig()
    begun(rig, "r", 21)
    assert rig.gateway.tokens["r"] == answer(prompt_of(21))[:1]
    assert not rig.decode.launch(), "its pages are not there"
    rig.release_offers()
    rig.settle()
    assert rig.gateway.tokens["r"] == answer(prompt_of(21))
    assert [len(one.body.tokens) // 4 for one in rig.gateway.said if isinstance(one.body, Output)] == [1] * 8
    rig.assert_clean()


def test_who_is_refused_goes_to_another_worker_and_then_computes_here_all_at_once() -> None:
    rig = Rig()
    rig.view(*EVERYONE, member(PREFILL_2, "prefill"))
    rig.hold_offers = True
    rig.submit("r", prompt_of(30))
    began_s = rig.decode.now
    for number in range(2):
        opened = [effect for effect in rig.log if isinstance(effect, OpenSink)]
        assert len(opened) == number + 1
        rig.end(opened[-1].key, Failure(code=ErrorCode.OVERLOADED, reason="1024 hand-offs are open here"))
    assert {effect.peer for effect in opened} == {PREFILL.worker, PREFILL_2.worker}
    batch = rig.decode.launch()
    assert batch, "by the next step"
    assert rig.decode.now == began_s


@pytest.mark.parametrize("another", [True, False])
def test_a_first_token_stays_what_it_is_when_the_hand_off_fails_after_it(another: bool) -> None:
    rig = Rig()
    key = begun(rig, "r", 21)
    if not another:
        rig.view(*EVERYONE[:2])
    rig.hold_offers = False
    rig.fail(key)
    rig.settle()
    again = [effect for effect in rig.log if isinstance(effect, OpenSink)][1:]
    assert [effect.sample for effect in again] == [False] * another
    assert rig.gateway.tokens["r"] == answer(prompt_of(21))
    rig.assert_clean()


def test_a_first_token_that_ends_the_answer_comes_with_the_pages() -> None:
    rig = Rig()
    begun(rig, "r", 21, max_tokens=1)
    assert not rig.gateway.tokens.get("r")
    rig.release_offers()
    rig.settle()
    assert rig.gateway.tokens["r"] == answer(prompt_of(21))[:1]
    assert rig.gateway.finals["r"].finish_reason == "length"
    rig.assert_clean()


def test_a_first_token_for_somebody_who_has_left_is_dropped() -> None:
    rig = Rig()
    rig.hold_offers = True
    rig.submit("r", prompt_of(21))
    [key] = [effect.key for effect in rig.log if isinstance(effect, OpenSink)]
    effects = rig.decode.handle(FromPeer(GATEWAY, CancelRequest(request_id=RequestId("r"), placement=0)))
    assert rig.decode.handle(FirstTokenReady(key, 5, None)) == []
    rig.run(effects)
    assert rig.gateway.tokens["r"] == []
    rig.assert_clean()
