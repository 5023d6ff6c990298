"""What a prefill worker has computed for a receiver that was lost serves the next one, and is in nobody's way."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from core_rig import DECODE, GREEDY, Engine, prefill_engine, prompt_of

from baton.common.engine.core_api import Drain
from baton.common.engine.fake_runner import fake_generate
from baton.common.errors import ErrorCode
from baton.common.ids import HandoffId, HandoffKey, RequestId
from baton.common.kv.census import OwnerClass
from baton.common.kv.layout import KvLayout
from baton.common.messages import Failure, SamplingParams
from baton.transfer.api import (
    AbortSource,
    FinishSource,
    OfferReceived,
    ShipRegion,
    SourceAborted,
    SourceReleased,
    SourceStopping,
)

LOST = Failure(code=ErrorCode.NO_WORKER, reason="the receiver is gone")
BROKEN = Failure(code=ErrorCode.INTERNAL, reason="the lane broke")
PROMPT = prompt_of(30)
LAYOUTS = {
    "full": KvLayout(4),
    "full+swa": KvLayout(4, window=9),
    "full+state": KvLayout(4, state=True),
    "swa": KvLayout(4, full=False, window=9),
}


def key(number: int) -> HandoffKey:
    return HandoffKey(HandoffId(number), 0)


def offer(
    number: int,
    tokens: np.ndarray = PROMPT,
    start: int = 0,
    request: str = "r",
    sample: bool = True,
    sampling: SamplingParams = GREEDY,
) -> OfferReceived:
    return OfferReceived(key(number), DECODE, RequestId(request), tokens, start, sample, sampling, 100.0)


def settle(engine: Engine, effects: list[object]) -> list[object]:
    effects = list(effects)
    while (more := engine.step()) is not None:
        effects += more
    return effects


def computed(engine: Engine) -> int:
    return sum(batch.num_tokens for batch in engine.batches)


def shipped(effects: list[object], number: int) -> list[tuple[int, int]]:
    return [(one.first_token, one.tokens) for one in effects if isinstance(one, ShipRegion) and one.key == key(number)]


def result(effects: list[object], number: int) -> FinishSource:
    (found,) = [one for one in effects if isinstance(one, FinishSource) and one.key == key(number)]
    return found


def assert_clean(engine: Engine) -> None:
    assert engine.core.idle
    assert not list(engine.core.holdings())
    assert engine.pool.census(()).idle


@pytest.mark.parametrize("cache", ["radix", "chunk"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("steps", [0, 1, 2, 99])
def test_the_next_receiver_gets_what_was_computed_and_nothing_is_computed_twice(
    cache: str, layout: KvLayout, steps: int
) -> None:
    engine = prefill_engine(chunk_tokens=8, layout=layout, cache=cache)  # type: ignore[arg-type]
    engine.handle(offer(1))
    for _ in range(steps):
        engine.step()
    engine.handle(SourceAborted(key(1), LOST))
    effects = settle(engine, engine.handle(offer(2)))
    assert result(effects, 2).result.first_token == fake_generate(PROMPT, GREEDY, 1, layout=layout)[0]
    assert computed(engine) == len(PROMPT)
    if layout.full:
        assert max(first + tokens for first, tokens in shipped(effects, 2)) == len(PROMPT)
    engine.handle(SourceReleased(key(2)))
    assert_clean(engine)


def test_it_is_shipped_at_once_from_where_the_next_receiver_starts() -> None:
    engine = prefill_engine(chunk_tokens=8, cache="chunk")
    settle(engine, engine.handle(offer(1)))
    engine.handle(SourceAborted(key(1), LOST))
    effects = engine.handle(offer(2, start=12))
    assert shipped(effects, 2) == [(12, 18)]
    assert result(effects, 2).result.first_token >= 0
    assert engine.step() is None


def test_it_goes_on_computing_meanwhile_but_after_everybody_else() -> None:
    engine = prefill_engine(chunk_tokens=8, cache="chunk")
    engine.handle(offer(1))
    engine.step()
    engine.handle(SourceAborted(key(1), LOST))
    engine.handle(offer(5, prompt_of(16, 5), request="other"))
    effects = engine.step() or []
    effects += engine.step() or []
    assert [one.key for one in effects if isinstance(one, FinishSource)] == [key(5)], "two steps were the other's alone"
    settle(engine, [])
    effects = engine.handle(offer(2))
    assert shipped(effects, 2) == [(0, 30)], "all of it had been computed by then"
    assert result(effects, 2).result.first_token == fake_generate(PROMPT, GREEDY, 1)[0]
    assert computed(engine) == len(PROMPT) + 16


@pytest.mark.parametrize("launched", [False, True], ids=["between steps", "during a step"])
def test_kept_pages_go_to_who_lacks_pages(launched: bool) -> None:
    engine = prefill_engine(pages=12, chunk_tokens=8, cache="chunk")
    engine.handle(offer(1))
    engine.step()
    if launched:
        engine.launch()
    engine.handle(SourceAborted(key(1), LOST))
    engine.handle(offer(5, prompt_of(40, 5), request="other"))
    effects = settle(engine, engine.collect() if launched else [])
    assert result(effects, 5)
    assert [one.owner_id for one in engine.core.holdings()] == [str(key(5))]


def test_grace_ends_and_leaves_nothing_behind() -> None:
    engine = prefill_engine(chunk_tokens=8, cache="chunk")
    engine.handle(offer(1))
    engine.step()
    engine.handle(SourceAborted(key(1), LOST))
    (holding,) = engine.core.holdings()
    assert holding.owner_class is OwnerClass.REQUEST
    assert not engine.core.idle
    due_s = engine.core.next_deadline()
    assert due_s is not None
    assert due_s - engine.now == pytest.approx(5.0)
    engine.pass_time(5.0)
    assert_clean(engine)
    assert shipped(settle(engine, engine.handle(offer(2))), 2)[0] == (0, 8), "from the beginning"


@pytest.mark.parametrize("code", [ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.DRAINING])
def test_what_is_over_is_not_kept(code: ErrorCode) -> None:
    engine = prefill_engine(chunk_tokens=8)
    engine.handle(offer(1))
    engine.step()
    engine.handle(SourceAborted(key(1), Failure(code=code)))
    assert_clean(engine)


def test_what_this_worker_gave_up_is_not_kept() -> None:
    engine = prefill_engine(chunk_tokens=8)
    engine.handle(offer(1))
    engine.step()
    assert isinstance(engine.pass_time(100.0)[0], AbortSource)
    engine.handle(SourceAborted(key(1), LOST))  # the receiver died while it was told
    assert_clean(engine)


def test_a_queued_offer_owns_nothing_to_keep() -> None:
    engine = prefill_engine(pages=8, chunk_tokens=8)
    engine.handle(offer(1))
    engine.handle(offer(2, prompt_of(30, 2), request="other"))
    engine.handle(SourceAborted(key(2), LOST))
    assert len(list(engine.core.holdings())) == 1


def test_grace_of_zero_keeps_nothing() -> None:
    engine = prefill_engine(chunk_tokens=8, grace_s=0)
    engine.handle(offer(1))
    engine.step()
    engine.handle(SourceAborted(key(1), LOST))
    assert_clean(engine)


def test_drain_lets_go_of_what_is_kept() -> None:
    engine = prefill_engine(chunk_tokens=8)
    for number, name in ((1, "a"), (2, "b")):
        engine.handle(offer(number, prompt_of(30, number), request=name))
        engine.step()
    engine.handle(SourceAborted(key(1), LOST))
    engine.handle(Drain())
    assert [one.owner_id for one in engine.core.holdings()] == [str(key(2))]
    engine.handle(SourceAborted(key(2), LOST))
    assert_clean(engine)


@pytest.mark.parametrize(
    "other",
    [
        offer(2, prompt_of(30, 9)),
        offer(2, sampling=msgspec.structs.replace(GREEDY, temperature=0.5)),
        offer(2, np.concatenate((PROMPT, prompt_of(3, 1)))),
    ],
    ids=["tokens", "sampling", "longer"],
)
def test_an_offer_for_something_else_ends_it(other: OfferReceived) -> None:
    engine = prefill_engine(chunk_tokens=8)
    settle(engine, engine.handle(offer(1)))
    engine.handle(SourceAborted(key(1), BROKEN))
    effects = settle(engine, engine.handle(other))
    assert result(effects, 2).result.first_token == fake_generate(other.tokens, other.sampling, 1)[0]
    assert [one.owner_id for one in engine.core.holdings()] == [str(key(2))]
    engine.handle(SourceReleased(key(2)))
    assert_clean(engine)


@pytest.mark.parametrize("steps", [2, 99])
def test_a_token_that_went_ahead_is_not_sent_again(steps: int) -> None:
    """The next receiver knows it by now, and asks for the pages alone."""
    engine = prefill_engine(chunk_tokens=8, cache="chunk")
    engine.handle(offer(1))
    for _ in range(steps):
        engine.step()
    engine.handle(SourceAborted(key(1), LOST))
    effects = settle(engine, engine.handle(offer(2, sample=False)))
    assert result(effects, 2).result.first_token == -1
    assert computed(engine) == len(PROMPT)


def test_other_requests_are_not_served_with_it() -> None:
    engine = prefill_engine(chunk_tokens=8, cache="chunk")
    engine.handle(offer(1))
    engine.step()
    engine.handle(SourceAborted(key(1), LOST))
    engine.handle(offer(2, request="other"))
    assert len(list(engine.core.holdings())) == 2


def test_pages_are_not_shipped_again_before_the_reader_is_proven_gone() -> None:
    """A silent receiver may wake up and read: the next one is served from elsewhere until there is proof."""
    engine = prefill_engine(chunk_tokens=8, cache="chunk")
    engine.handle(offer(1))
    engine.step()
    engine.handle(SourceStopping(key(1), LOST))
    assert engine.step() is None, "it waits"
    assert shipped(engine.handle(offer(2)), 2) == []
    engine.handle(SourceAborted(key(2), Failure(code=ErrorCode.CANCELLED)))
    engine.handle(SourceAborted(key(1), LOST))
    assert shipped(engine.handle(offer(3)), 3) == [(0, 8)]


def test_a_next_receiver_that_was_faster_and_waits_is_served() -> None:
    engine = prefill_engine(pages=12, chunk_tokens=8, cache="chunk")
    engine.handle(offer(1))
    engine.step()
    assert engine.handle(offer(2)) == []  # no pages for both
    assert engine.core.load().queued == 1
    effects = engine.handle(SourceAborted(key(1), LOST))
    assert shipped(effects, 2) == [(0, 8)]
    assert engine.core.load().queued == 0
    settle(engine, [])
    assert computed(engine) == len(PROMPT)
    engine.handle(SourceReleased(key(2)))
    assert_clean(engine)


def test_a_next_receiver_that_is_served_already_needs_it_no_more() -> None:
    engine = prefill_engine(chunk_tokens=64, cache="chunk")
    engine.handle(offer(1))
    engine.step()
    engine.handle(offer(2))
    engine.step()
    engine.handle(SourceAborted(key(1), LOST))
    assert [one.owner_id for one in engine.core.holdings()] == [str(key(2))]


def test_one_request_loses_receiver_after_receiver() -> None:
    engine = prefill_engine(chunk_tokens=8, cache="chunk")
    for number in range(1, 5):
        engine.handle(offer(number))
        engine.step()
        engine.handle(SourceAborted(key(number), LOST))
    assert computed(engine) == len(PROMPT)
    effects = engine.handle(offer(9))
    assert result(effects, 9).result.first_token == fake_generate(PROMPT, GREEDY, 1)[0]
    engine.handle(SourceReleased(key(9)))
    assert_clean(engine)


def test_lost_during_the_last_chunk_keeps_the_token() -> None:
    engine = prefill_engine(chunk_tokens=64, cache="chunk")
    engine.handle(offer(1))
    assert engine.launch()
    engine.handle(SourceStopping(key(1), LOST))
    engine.collect()
    engine.handle(SourceAborted(key(1), LOST))
    effects = engine.handle(offer(2))
    assert result(effects, 2).result.first_token == fake_generate(PROMPT, GREEDY, 1)[0]
    assert computed(engine) == len(PROMPT)
