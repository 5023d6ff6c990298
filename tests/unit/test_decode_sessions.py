"""A conversation keeps its KV on the decode worker between turns; whatever ends a turn, nothing is lost or owned twice.

The rig checks the pool's books after every event.
"""

from __future__ import annotations

import numpy as np
import pytest
from core_rig import GREEDY, Rig, decode_engine, prefill_engine, prompt_of

from baton.common.engine.core_api import Drain
from baton.common.engine.fake_runner import fake_generate
from baton.common.errors import ErrorCode
from baton.common.ids import SessionId
from baton.common.kv.census import OwnerClass
from baton.common.messages import CloseSession, SamplingParams
from baton.decode.filling import LOCAL_SHARE
from baton.transfer.api import OpenSink

SESSION = "s"


def joined(*parts: np.ndarray | list[int]) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def said(rig: Rig, name: str) -> list[int]:
    return rig.gateway.tokens[name]


def slots(rig: Rig) -> list[str]:
    return [one.owner_id for one in rig.decode.core.holdings() if one.owner_class is OwnerClass.SESSION]


def sinks(rig: Rig) -> list[OpenSink]:
    return [effect for effect in rig.log if isinstance(effect, OpenSink)]


def turn(
    rig: Rig, number: int, prompt: np.ndarray, sampling: SamplingParams = GREEDY, session: str = SESSION
) -> list[int]:
    """Runs to the end; the answer must be that of the prompt alone."""
    name = f"{session}{number}"
    rig.submit(name, prompt, sampling, session=(session, number))
    rig.settle()
    assert rig.gateway.finals[name].failure is None, rig.gateway.finals[name]
    assert said(rig, name) == fake_generate(prompt, sampling, len(said(rig, name)))
    return said(rig, name)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_five_turns_send_each_token_at_most_once(page_size: int) -> None:
    rig = Rig(
        decode_engine(512 // page_size, page_size, context=512, local_prefill_max_tokens=0),
        prefill_engine(512 // page_size, page_size, context=512),
    )
    conversation = prompt_of(21)
    sent: set[int] = set()
    for number in range(5):
        before = len(sinks(rig))
        answer = turn(rig, number, conversation, SamplingParams(max_tokens=13 + number))
        asked = [token for sink in sinks(rig)[before:] for token in range(sink.start, len(sink.tokens))]
        assert len(asked) == len(set(asked))
        assert not sent.intersection(asked)
        assert number == 0 or min(asked, default=len(conversation)) >= len(conversation) - 30
        sent.update(asked)
        timeline = rig.gateway.finals[f"s{number}"].timeline
        assert timeline is not None
        assert timeline.transferred_tokens == len(asked)
        assert timeline.local_tokens < page_size + len(conversation) // LOCAL_SHARE
        assert slots(rig) == ["s"]
        conversation = joined(conversation, answer, prompt_of(17 + number, number + 1))
    rig.tell(CloseSession(session_id=SessionId(SESSION)))
    assert slots(rig) == []
    rig.assert_clean()


def test_a_session_holds_its_pages_and_the_cache_cannot_evict_them() -> None:
    rig = Rig(decode_engine(16, 4, context=64))
    answer = turn(rig, 0, prompt_of(21))
    held = sum(one.record.kv_allocated_len for one in rig.decode.core.holdings())
    assert held >= 21 + len(answer) - 1
    shared = rig.decode.pool.stats().prefix.locked.full
    assert shared == 21 // 4
    rig.decode.pool.clear_cache()
    assert rig.decode.pool.stats().prefix.locked.full == shared
    turn(rig, 1, joined(prompt_of(21), answer, prompt_of(3, 1)))


def test_a_turn_that_is_cancelled_gives_its_record_back_and_the_next_one_goes_on() -> None:
    rig = Rig()
    first = prompt_of(21)
    answer = turn(rig, 0, first)
    second = joined(first, answer, prompt_of(9, 1))
    rig.submit("cancelled", second, SamplingParams(max_tokens=50), session=(SESSION, 1))
    for _ in range(6):
        rig.run(rig.prefill.step() or [])
        rig.run(rig.decode.step() or [])
    assert len(said(rig, "cancelled")) > 1
    assert slots(rig) == []  # the turn has the record
    rig.cancel("cancelled")
    rig.settle()
    assert slots(rig) == []
    turn(rig, 1, second)
    assert slots(rig) == ["s"]


@pytest.mark.parametrize("hold", [True, False])
def test_a_turn_cancelled_during_its_hand_off_waits_for_the_fence(hold: bool) -> None:
    rig = Rig(prefill=prefill_engine(chunk_tokens=8))
    first = prompt_of(21)
    answer = turn(rig, 0, first)
    rig.hold_offers = hold
    rig.submit("cancelled", joined(first, answer, prompt_of(30, 1)), session=(SESSION, 1))
    for _ in range(2):  # the rest of a page is computed here first
        rig.run(rig.decode.step() or [])
    assert rig.handoffs
    rig.cancel("cancelled")
    rig.settle()
    assert slots(rig) == []
    rig.assert_clean()


def test_an_answer_that_the_gateway_found_complete_keeps_the_session() -> None:
    """A stop string: the worker is told to stop, and the conversation goes on."""
    rig = Rig()
    first = prompt_of(21)
    rig.submit("stopped", first, SamplingParams(max_tokens=50), session=(SESSION, 0))
    for _ in range(8):
        rig.run(rig.prefill.step() or [])
        rig.run(rig.decode.step() or [])
    rig.cancel("stopped", answered=True)
    rig.settle()
    assert slots(rig) == ["s"]
    before = len(sinks(rig))
    turn(rig, 1, joined(first, said(rig, "stopped")[:4], prompt_of(30, 1)))  # the stop string began behind 4 tokens
    assert sinks(rig)[before].start == 28  # 25 tokens are known: the page's rest is computed, whole pages are sent


def test_a_refused_turn_leaves_the_slot_as_it_is() -> None:
    rig = Rig(decode_engine(max_queued_requests=1, max_running_requests=1))
    first = prompt_of(21)
    answer = turn(rig, 0, first)
    rig.submit("running", prompt_of(5, 7), SamplingParams(max_tokens=200))
    rig.submit("queued", prompt_of(5, 8))
    second = joined(first, answer, prompt_of(9, 1))
    rig.submit("refused", second, session=(SESSION, 1))
    failure = rig.gateway.finals["refused"].failure
    assert failure is not None
    assert failure.code is ErrorCode.OVERLOADED
    assert slots(rig) == ["s"]
    rig.settle()
    before = len(sinks(rig))
    turn(rig, 1, second)
    assert all(sink.start >= 28 for sink in sinks(rig)[before:])


@pytest.mark.parametrize("common", [0, 7, 20, 21, 23, 27])
def test_a_conversation_that_was_changed_goes_on_from_where_it_is_the_same(common: int) -> None:
    """Below what is shared with the tree (20 tokens here) the slot is of no use; the tree still is."""
    rig = Rig()
    first = prompt_of(21)
    answer = turn(rig, 0, first)
    edited = joined(joined(first, answer)[:common], prompt_of(30, 99))
    turn(rig, 1, edited)
    timeline = rig.gateway.finals["s1"].timeline
    assert timeline is not None
    assert timeline.cached_tokens == (min(common, 27) if common >= 20 else common // 4 * 4)
    turn(rig, 2, joined(edited, said(rig, "s1"), prompt_of(3, 5)))


def test_a_shorter_prompt_gives_pages_back() -> None:
    rig = Rig()
    first = prompt_of(21)
    answer = turn(rig, 0, first, SamplingParams(max_tokens=100))
    free = rig.decode.pool.free_pages
    turn(rig, 1, joined(first, answer[:5]), SamplingParams(max_tokens=1))
    assert rig.decode.pool.free_pages >= free + 20


def test_sessions_are_bounded_oldest_first() -> None:
    rig = Rig(decode_engine(max_sessions=2, session_ttl_s=100.0))
    for name in "abc":
        turn(rig, 0, prompt_of(9, ord(name)), session=name)
        rig.run(rig.decode.pass_time(10.0))
    assert slots(rig) == ["b", "c"]
    due_s = rig.decode.core.next_deadline()
    assert due_s is not None
    rig.run(rig.decode.pass_time(due_s - rig.decode.now - 0.001))
    assert slots(rig) == ["b", "c"]
    rig.run(rig.decode.pass_time(0.001))
    assert slots(rig) == ["c"]
    rig.run(rig.decode.pass_time(1000.0))
    rig.assert_clean()


def test_without_sessions_a_turn_is_a_request() -> None:
    rig = Rig(decode_engine(max_sessions=0))
    turn(rig, 0, prompt_of(9))
    rig.assert_clean()


@pytest.mark.parametrize("policy", ["prefill", "fail"])
def test_a_turn_whose_kv_is_gone(policy: str) -> None:
    rig = Rig(decode_engine(lost_session=policy))
    first = prompt_of(21)
    answer = turn(rig, 0, first)
    rig.tell(CloseSession(session_id=SessionId(SESSION)))
    second = joined(first, answer, prompt_of(9, 1))
    if policy == "prefill":
        turn(rig, 1, second)
        return
    rig.submit("lost", second, session=(SESSION, 1))
    failure = rig.gateway.finals["lost"].failure
    assert failure is not None
    assert failure.code is ErrorCode.SESSION_LOST
    rig.assert_clean()


def test_idle_sessions_make_way_before_anybody_is_retracted() -> None:
    rig = Rig(decode_engine(24, 4, context=96, num_reserved_decode_tokens=0))
    for name in "ab":
        turn(rig, 0, prompt_of(25, ord(name)), session=name)
    assert len(slots(rig)) == 2
    prompts = {name: prompt_of(20, ord(name)) for name in "xy"}
    for name, prompt in prompts.items():
        rig.submit(name, prompt, SamplingParams(max_tokens=28))
    rig.settle()
    assert rig.decode.core.retractions == 0
    assert len(slots(rig)) < 2
    for name, prompt in prompts.items():
        assert said(rig, name) == fake_generate(prompt, GREEDY, 28)


def test_a_turn_and_a_retraction() -> None:
    """A turn and another request grow until one must give way; both answers are right, and the next turn's is."""
    rig = Rig(decode_engine(24, 4, context=96, num_reserved_decode_tokens=0))
    first = prompt_of(20)
    answer = turn(rig, 0, first)
    second = joined(first, answer, prompt_of(4, 1))
    rig.submit("s1", second, SamplingParams(max_tokens=30), session=(SESSION, 1))
    rig.submit("other", prompt_of(30, 9), SamplingParams(max_tokens=40))
    rig.settle()
    assert rig.decode.core.retractions > 0
    assert said(rig, "s1") == fake_generate(second, GREEDY, 30)
    assert said(rig, "other") == fake_generate(prompt_of(30, 9), GREEDY, 40)
    turn(rig, 2, joined(second, said(rig, "s1"), prompt_of(4, 2)))


def test_a_retracted_turn_shares_what_it_finds_when_it_comes_back() -> None:
    """Not what the session's first turn shared: that was evicted meanwhile."""
    rig = Rig(decode_engine(16, 4, num_reserved_decode_tokens=0))
    first = prompt_of(21, 1)
    answer = turn(rig, 0, first, SamplingParams(max_tokens=3))
    rig.submit("grows", prompt_of(3), SamplingParams(max_tokens=30))
    for _ in range(12):
        rig.run(rig.prefill.step() or [])
        rig.run(rig.decode.step() or [])
    second, sampling = joined(first, answer, prompt_of(2, 2)), SamplingParams(max_tokens=12)
    rig.submit("s1", second, sampling, session=(SESSION, 1))
    while not rig.decode.core.retractions:
        assert "s1" not in rig.gateway.finals
        rig.run(rig.prefill.step() or [])
        rig.run(rig.decode.step() or [])
    rig.decode.pool.clear_cache()
    rig.settle()
    assert said(rig, "s1") == fake_generate(second, GREEDY, 12)
    assert slots(rig) == ["s"]
    turn(rig, 2, joined(second, said(rig, "s1"), prompt_of(4, 2)))
    rig.settle()
    rig.tell(CloseSession(session_id=SessionId(SESSION)))
    rig.assert_clean()


def test_drain_gives_sessions_up() -> None:
    rig = Rig()
    turn(rig, 0, prompt_of(21))
    rig.run(rig.decode.handle(Drain()))
    assert slots(rig) == []
    rig.assert_clean()


@pytest.mark.parametrize("end", ["expired", "closed", "drained"])
def test_whoever_waits_is_asked_when_a_session_ends(end: str) -> None:
    """The session has the last row; nothing else happens afterwards that would have somebody look again."""
    rig = Rig(decode_engine(rows=1, session_ttl_s=100.0))
    turn(rig, 0, prompt_of(9))
    rig.submit("waits", prompt_of(9, 1))
    rig.settle()
    assert "waits" not in rig.gateway.finals
    if end == "expired":
        due_s = rig.decode.core.next_deadline()
        assert due_s is not None
        rig.run(rig.decode.pass_time(due_s - rig.decode.now))
    elif end == "closed":
        rig.tell(CloseSession(session_id=SessionId(SESSION)))
    else:
        rig.run(rig.decode.handle(Drain()))
    assert not slots(rig)
    assert rig.decode.core.queued == 0
    rig.settle()
    assert said(rig, "waits") == fake_generate(prompt_of(9, 1), GREEDY, len(said(rig, "waits")))
