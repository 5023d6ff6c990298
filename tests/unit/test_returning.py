"""What a decode worker has of a conversation goes back to the prefill worker instead of being computed again."""

from __future__ import annotations

import numpy as np
import pytest
from core_rig import (
    DECODE,
    EVERYONE,
    GREEDY,
    PREFILL,
    Engine,
    Rig,
    decode_engine,
    prefill_engine,
    prompt_of,
)

from baton.common.config import KvReturn
from baton.common.engine.core_api import Drain
from baton.common.engine.fake_runner import fake_generate
from baton.common.errors import ErrorCode
from baton.common.ids import HandoffId, HandoffKey, RequestId
from baton.common.kv.census import OwnerClass
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import Failure
from baton.prefill.returning import ASKING_S, CLEARLY, UNKNOWN_TOKENS_PER_S, Speed, expected_s, is_worth_it
from baton.transfer.api import (
    AbortSink,
    AbortSource,
    FinishSource,
    OfferReceived,
    OpenSink,
    PrefillResult,
    ShipRegion,
    SinkCommitted,
    SinkFailed,
    SourceAborted,
    SourceReleased,
    return_key,
)

LOST = Failure(code=ErrorCode.NO_WORKER, reason="gone")
GONE = Failure(code=ErrorCode.CANCELLED, reason="the client is gone")
BROKEN = Failure(code=ErrorCode.INTERNAL, reason="the lane broke")
TOKENS = prompt_of(60)
KEY = HandoffKey(HandoffId(7), 0)


def offer(start: int = 40, key: HandoffKey = KEY, tokens: np.ndarray = TOKENS) -> OfferReceived:
    return OfferReceived(key, DECODE, RequestId("r"), tokens, start, True, GREEDY, 1000.0, lane_gbps=1.0)


def returning(known: int = 16, mode: KvReturn = "on") -> tuple[Engine, OpenSink]:
    """A prefill worker that knows so many tokens, and has asked for those until 40."""
    engine = prefill_engine(chunk_tokens=16, kv_return=mode, page_bytes=1000)
    if known:
        engine.handle(
            OfferReceived(
                HandoffKey(HandoffId(1), 0), DECODE, RequestId("first"), TOKENS[:known], 0, False, GREEDY, 99.0
            )
        )
        while engine.step() is not None:
            pass
        engine.handle(SourceReleased(HandoffKey(HandoffId(1), 0)))
    engine.batches.clear()
    (asked,) = engine.handle(offer())
    assert isinstance(asked, OpenSink)
    return engine, asked


def committed(asked: OpenSink) -> SinkCommitted:
    return SinkCommitted(asked.key, asked.peer, PrefillResult(-1, None, 0.0, 0), 1, "test", 0.01, 0.001, 0.0)


def failed(asked: OpenSink, landed: int, failure: Failure = BROKEN) -> SinkFailed:
    return SinkFailed(asked.key, asked.peer, failure, landed, 1, "test", peer_lost=False)


def settle(engine: Engine, effects: list[object]) -> list[object]:
    effects = list(effects)
    while (more := engine.step()) is not None:
        effects += more
    return effects


def computed(engine: Engine) -> int:
    return sum(batch.num_tokens for batch in engine.batches)


def owners(engine: Engine) -> set[OwnerClass]:
    return {one.owner_class for one in engine.core.holdings()}


def assert_clean(engine: Engine) -> None:
    assert engine.core.idle
    assert not list(engine.core.holdings())
    assert engine.pool.census(()).idle


# ------------------------------------------------------------------------------------------- the prefill worker


def test_asks_for_exactly_what_it_lacks_and_computes_the_rest() -> None:
    engine, asked = returning()
    assert (asked.start, len(asked.tokens), asked.peer, asked.sample) == (16, 40, DECODE.worker, False)
    assert asked.key == return_key(KEY)
    assert return_key(asked.key) == KEY
    assert len(asked.pages[Component.FULL]) == 6
    assert engine.step() is None, "it waits for what it asked for"
    assert owners(engine) == {OwnerClass.INCOMING}
    effects = settle(engine, engine.handle(committed(asked)))
    assert computed(engine) == 20
    assert min(one.first_token for one in effects if isinstance(one, ShipRegion)) == 40
    assert isinstance(effects[-1], FinishSource)
    engine.handle(SourceReleased(KEY))
    assert_clean(engine)
    assert engine.pool.match_len(TOKENS) == 60


@pytest.mark.parametrize("landed", [16, 24, 40])
def test_what_did_not_come_back_is_computed(landed: int) -> None:
    engine, asked = returning()
    effects = settle(engine, engine.handle(failed(asked, landed)))
    assert computed(engine) == 60 - landed
    assert isinstance(effects[-1], FinishSource)


@pytest.mark.parametrize("first", ["hand-off", "return"])
@pytest.mark.parametrize("failure", [GONE, LOST])
def test_pages_are_given_back_when_both_have_ended(first: str, failure: Failure) -> None:
    engine, asked = returning()
    aborted = SourceAborted(KEY, failure)
    if first == "hand-off":
        assert [type(one) for one in engine.handle(aborted)] == [AbortSink]
        assert owners(engine) == {OwnerClass.INCOMING}, "somebody may write them"
        engine.handle(failed(asked, 24))
    else:
        engine.handle(failed(asked, 24))
        engine.handle(aborted)
        engine.pass_time(10.0)  # it may be kept
    assert_clean(engine)
    assert engine.pool.match_len(TOKENS) >= 24


def test_out_of_time_while_it_waits() -> None:
    engine, asked = returning()
    effects = engine.pass_time(1000.0)
    assert {type(one) for one in effects} == {AbortSink, AbortSource}
    engine.handle(SourceAborted(KEY, Failure(code=ErrorCode.DEADLINE_EXCEEDED)))
    engine.handle(committed(asked))  # it was faster than the abort
    assert_clean(engine)


def test_others_are_computed_while_it_waits() -> None:
    engine, asked = returning()
    settle(engine, engine.handle(offer(0, HandoffKey(HandoffId(9), 0), prompt_of(30, 5))))
    assert computed(engine) == 30
    effects = settle(engine, engine.handle(committed(asked)))
    assert isinstance(effects[-1], FinishSource)


@pytest.mark.parametrize(
    "layout", [KvLayout(4, window=9), KvLayout(4, state=True), KvLayout(4, full=False, window=9)], ids=str
)
def test_not_where_layers_slide_or_recur(layout: KvLayout) -> None:
    engine = prefill_engine(layout=layout, kv_return="on")
    assert not [one for one in engine.handle(offer()) if isinstance(one, OpenSink)]


def test_not_for_a_page_that_is_not_missing() -> None:
    engine = prefill_engine(kv_return="on")
    assert not engine.handle(offer(start=0))


def test_off_is_off() -> None:
    engine = prefill_engine(kv_return="off")
    assert not engine.handle(offer())


def test_adaptive_asks_where_that_is_clearly_faster() -> None:
    assert not is_worth_it(None, 0.0)
    assert is_worth_it(CLEARLY, 1.0)
    assert not is_worth_it(CLEARLY - 0.01, 1.0)
    unknown_s = expected_s(1000, 0, 0.0)
    assert unknown_s == expected_s(1000, 1 << 20, 0.0) == pytest.approx(ASKING_S + 1000 / UNKNOWN_TOKENS_PER_S)
    assert expected_s(1000, 10**9, 2.0) == pytest.approx(ASKING_S + 0.5)


def test_speed_weighs_recent_and_large_work_most() -> None:
    speed = Speed()
    assert speed.seconds(10) is None
    speed.add(0, 1.0)
    assert speed.seconds(10) is None
    speed.add(1000, 0.1)
    assert speed.seconds(1000) == pytest.approx(1.0)
    for _ in range(50):
        speed.add(10, 1.0)
    assert speed.seconds(10) == pytest.approx(1.0, rel=0.1)


def test_adaptive_stops_asking_a_slow_peer_and_tries_again_later() -> None:
    engine, asked = returning(mode="adaptive")  # 16 tokens take a step of 10 ms
    engine.now += 2.0
    settle(engine, engine.handle(committed(asked)))  # 24 tokens in two seconds
    engine.handle(SourceReleased(KEY))
    engine.pool.clear_cache()
    second, third = HandoffKey(HandoffId(8), 0), HandoffKey(HandoffId(9), 0)
    assert not engine.handle(offer(key=second))
    settle(engine, [])
    engine.handle(SourceReleased(second))
    engine.pool.clear_cache()
    engine.now += 60.0
    (again,) = engine.handle(offer(key=third))
    assert isinstance(again, OpenSink)


def test_adaptive_knows_nothing_before_it_has_computed() -> None:
    engine = prefill_engine(kv_return="adaptive")
    assert not engine.handle(offer())


# -------------------------------------------------------------------------------------------- the decode worker


def conversation(rig: Rig, turns: int, session: str) -> int:
    """Returns the tokens that the prefill worker was offered and nobody had."""
    prompt = prompt_of(30)
    for turn in range(turns):
        name = f"turn-{turn}"
        rig.submit(name, prompt, session=(session, turn))
        rig.settle()
        said = rig.gateway.tokens[name]
        assert said == fake_generate(prompt, GREEDY, len(said))
        assert rig.gateway.finals[name].finish_reason
        prompt = np.concatenate((prompt, np.array(said, dtype=np.int32), prompt_of(25, turn + 1)))
    return sum(len(one.tokens) - one.start for one in rig.log if isinstance(one, OpenSink) and one.key.attempt >= 0)


@pytest.mark.parametrize("session", ["", "s"])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_five_turns_compute_what_nobody_has(session: str, mode: KvReturn) -> None:
    rig = Rig(decode_engine(pages=128), prefill_engine(pages=128, kv_return=mode))
    missing = conversation(rig, 5, session)
    done = sum(batch.num_tokens for batch in rig.prefill.batches)
    assert done == missing if mode == "on" else done >= missing + 4 * 6
    rig.run(rig.decode.handle(Drain()))
    rig.settle()
    rig.assert_clean()


def waiting_for_a_return(decode: Engine | None = None) -> tuple[Rig, OpenSink]:
    """The second turn has been offered, and the decode worker has not heard yet that a part is wanted back."""
    rig = Rig(decode, prefill_engine(kv_return="on"))
    rig.submit("first", prompt_of(30))
    rig.settle()
    rig.hold_returns = True
    said = np.array(rig.gateway.tokens["first"], dtype=np.int32)
    rig.submit("second", np.concatenate((prompt_of(30), said, prompt_of(25, 1))))
    (asked,) = rig.returns.values()
    return rig, asked


def heard(asked: OpenSink) -> OfferReceived:
    rest = (asked.request_id, asked.tokens, asked.start, asked.sample, asked.sampling, asked.deadline_s)
    return OfferReceived(asked.key, PREFILL, *rest)


@pytest.mark.parametrize("how", ["committed", "failed", "cancelled"])
def test_a_hand_off_that_ends_first_waits_for_its_return(how: str) -> None:
    rig, asked = waiting_for_a_return()
    ship, finish = rig.decode.handle(heard(asked))
    assert isinstance(ship, ShipRegion)
    assert isinstance(finish, FinishSource)
    key, (handoff,) = return_key(asked.key), rig.handoffs.values()
    free = rig.decode.pool.available_pages
    if how == "cancelled":
        rig.handoffs.clear()
        rig.cancel("second")
        assert rig.gateway.finals["second"].failure is not None, "it is told at once"
    if how == "committed":
        result = PrefillResult(fake_generate(handoff.open.tokens, GREEDY, 1)[0], None, 0.0, 0)
        assert not rig.decode.handle(SinkCommitted(key, PREFILL.worker, result, 1, "test", 0.1, 0.0, 0.0))
    else:
        assert not rig.decode.handle(SinkFailed(key, PREFILL.worker, LOST, handoff.open.start, 0, "", peer_lost=True))
    assert rig.decode.step() is None
    assert OwnerClass.INCOMING in owners(rig.decode)
    assert rig.decode.pool.available_pages == free
    rig.view(*EVERYONE[:2])  # what is not there is computed on the decode worker itself
    rig.run(rig.decode.handle(SourceReleased(asked.key)))
    if how == "committed":
        # Nothing was written into its pages, so it must not read on: that it runs is all that counts here.
        assert rig.decode.core.load().running == 1
        return
    rig.settle()
    assert bool(rig.gateway.finals["second"].finish_reason) == (how == "failed")
    assert rig.decode.core.idle
    assert not list(rig.decode.core.holdings())


@pytest.mark.parametrize("what", ["unknown", "over", "other tokens", "too far", "a token"])
def test_what_it_cannot_return_it_refuses(what: str) -> None:
    rig, asked = waiting_for_a_return()
    wanted = heard(asked)
    tokens = wanted.tokens
    match what:
        case "unknown":
            wanted = OfferReceived(
                HandoffKey(HandoffId(5), -1), PREFILL, wanted.request_id, tokens, 0, False, GREEDY, 9.0
            )
        case "over":
            rig.cancel("second")
        case "other tokens":
            rest = (tokens[::-1].copy(), wanted.start, False, GREEDY, 9.0)
            wanted = OfferReceived(wanted.key, PREFILL, wanted.request_id, *rest)
        case "too far":
            (handoff,) = rig.handoffs.values()
            rest = (handoff.open.tokens, wanted.start, False, GREEDY, 9.0)
            wanted = OfferReceived(wanted.key, PREFILL, wanted.request_id, *rest)
        case "a token":
            wanted = OfferReceived(wanted.key, PREFILL, wanted.request_id, tokens, wanted.start, True, GREEDY, 9.0)
    (refused,) = rig.decode.handle(wanted)
    assert isinstance(refused, AbortSource)
    rig.run(rig.decode.handle(SourceAborted(wanted.key, refused.failure)))


def test_a_return_that_is_refused_is_computed() -> None:
    rig, asked = waiting_for_a_return()
    rig.end(asked.key, GONE)
    rig.settle()
    assert rig.gateway.finals["second"].finish_reason
    rig.assert_clean()


def test_cancelled_while_it_waits() -> None:
    rig, _ = waiting_for_a_return()
    rig.cancel("second")
    rig.settle()
    rig.assert_clean()
