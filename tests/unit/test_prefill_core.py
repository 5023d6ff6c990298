"""PrefillCore: computes in chunks, ships while computing, and gives nothing back before it may."""

from __future__ import annotations

import numpy as np
import pytest
from core_rig import DECODE, GREEDY, VOCABULARY, Engine, prefill_engine, prompt_of
from msgspec.structs import replace

from baton.common.engine.core_api import Drain
from baton.common.engine.fake_runner import fake_generate
from baton.common.errors import ErrorCode
from baton.common.ids import HandoffId, HandoffKey, RequestId
from baton.common.kv.census import OwnerClass
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

LOST = Failure(code=ErrorCode.CANCELLED, reason="the client is gone")


def key(number: int) -> HandoffKey:
    return HandoffKey(HandoffId(number), 0)


def offer(
    number: int, tokens: np.ndarray, start: int = 0, sample: bool = True, sampling: SamplingParams = GREEDY
) -> OfferReceived:
    return OfferReceived(key(number), DECODE, RequestId(f"r{number}"), tokens, start, sample, sampling, 100.0)


def finish(engine: Engine, effects: list[object]) -> list[object]:
    """All effects until nothing is left to compute."""
    effects = list(effects)
    while (more := engine.step()) is not None:
        effects += more
    return effects


def regions(effects: list[object], number: int) -> list[tuple[int, int]]:
    return [(one.first_token, one.tokens) for one in effects if isinstance(one, ShipRegion) and one.key == key(number)]


def assert_clean(engine: Engine) -> None:
    assert engine.core.idle
    assert not list(engine.core.holdings())
    assert engine.pool.available_pages == engine.pool.total_pages


def test_ships_each_chunk_and_finishes_with_the_first_token() -> None:
    engine = prefill_engine(chunk_tokens=10)
    effects = finish(engine, engine.handle(offer(1, prompt_of(21))))
    assert regions(effects, 1) == [(0, 8), (8, 8), (16, 5)]
    assert isinstance(effects[-1], FinishSource)
    assert effects[-1].result.first_token == fake_generate(prompt_of(21), GREEDY, 1)[0]
    (holding,) = engine.core.holdings()
    assert holding.owner_class is OwnerClass.OUTGOING
    engine.handle(SourceReleased(key(1)))
    assert_clean(engine)
    assert engine.pool.match_len(prompt_of(21)) == 20


def test_start_is_shipped_from_but_computed_before() -> None:
    engine = prefill_engine(chunk_tokens=8)
    effects = finish(engine, engine.handle(offer(1, prompt_of(21), start=12)))
    assert regions(effects, 1) == [(12, 4), (16, 5)]


def test_cached_prefix_is_shipped_without_computing() -> None:
    engine = prefill_engine()
    finish(engine, engine.handle(offer(1, prompt_of(20))))
    engine.handle(SourceReleased(key(1)))
    longer = np.concatenate((prompt_of(20), prompt_of(7, 1)))
    effects = engine.handle(offer(2, longer, start=4))
    assert regions(effects, 2) == [(4, 16)]  # at once
    effects = finish(engine, [])
    assert engine.batches[-1].num_tokens == 7
    assert regions(effects, 2) == [(20, 7)]
    assert isinstance(effects[-1], FinishSource)
    assert effects[-1].result.cached_tokens == 16  # of those asked for: [4, 20)
    assert effects[-1].result.first_token == fake_generate(longer, GREEDY, 1)[0]


def test_wholly_cached_needs_a_step_only_for_its_token() -> None:
    engine = prefill_engine()
    finish(engine, engine.handle(offer(1, prompt_of(20))))
    engine.handle(SourceReleased(key(1)))
    effects = engine.handle(offer(2, prompt_of(20), sample=False))
    assert [type(one) for one in effects] == [ShipRegion, FinishSource]
    assert engine.step() is None
    effects = finish(engine, engine.handle(offer(3, prompt_of(20))))
    assert engine.batches[-1].num_tokens == 4
    assert effects[-1].result.first_token == fake_generate(prompt_of(20), GREEDY, 1)[0]  # type: ignore[attr-defined]


def test_equal_prompts_in_flight_share_what_was_computed_first() -> None:
    engine = prefill_engine(chunk_tokens=16)
    effects = engine.handle(offer(1, prompt_of(32)))
    effects += engine.handle(offer(2, prompt_of(32)))
    finish(engine, effects)
    assert sum(batch.num_tokens for batch in engine.batches) < 64
    assert engine.pool.stats().owned.full <= 1


def test_one_budget_over_several_rows() -> None:
    engine = prefill_engine(chunk_tokens=16)
    for number in range(1, 6):
        engine.handle(offer(number, prompt_of(6, number)))
    effects = finish(engine, [])
    assert all(batch.num_tokens <= 16 for batch in engine.batches)
    assert engine.batches[0].num_rows == 3
    assert [one.key for one in effects if isinstance(one, FinishSource)] == [key(number) for number in range(1, 6)]


def test_waits_for_pages_and_never_half_way() -> None:
    engine = prefill_engine(pages=12, chunk_tokens=64)
    effects = engine.handle(offer(1, prompt_of(30)))
    engine.handle(offer(2, prompt_of(30, 1)))
    effects = finish(engine, effects)
    assert engine.core.load().queued == 1
    assert [type(one) for one in effects if not isinstance(one, ShipRegion)] == [FinishSource]
    effects = finish(engine, engine.handle(SourceReleased(key(1))))
    assert effects[-1].key == key(2)  # type: ignore[attr-defined]


def test_tokens_that_the_model_does_not_have_are_refused_and_named() -> None:
    engine = prefill_engine()
    (abort,) = engine.handle(offer(1, np.array([5, VOCABULARY], dtype=np.int32)))
    assert isinstance(abort, AbortSource)
    assert abort.failure.code is ErrorCode.INVALID_REQUEST
    assert abort.failure.reason.startswith("tokens[1] = 65536:")
    engine.handle(SourceAborted(key(1), abort.failure))
    assert_clean(engine)


def test_prompt_that_never_fits_is_refused_at_once() -> None:
    engine = prefill_engine(pages=12)
    (abort,) = engine.handle(offer(1, prompt_of(49)))
    assert isinstance(abort, AbortSource)
    assert abort.failure.code is ErrorCode.PROMPT_TOO_LONG
    engine.handle(SourceAborted(key(1), abort.failure))
    assert_clean(engine)


@pytest.mark.parametrize("when", ["draining", "full"])
def test_refusals(when: str) -> None:
    engine = prefill_engine(max_queued_requests=1, pages=8)
    engine.handle(offer(1, prompt_of(30)))
    engine.handle(offer(2, prompt_of(30, 2)))
    if when == "draining":
        engine.handle(Drain())
    (abort,) = engine.handle(offer(3, prompt_of(4)))
    assert isinstance(abort, AbortSource)
    assert abort.failure.code is (ErrorCode.DRAINING if when == "draining" else ErrorCode.OVERLOADED)


def test_stopping_computes_no_more_and_keeps_the_pages_until_proof() -> None:
    engine = prefill_engine(chunk_tokens=8)
    engine.handle(offer(1, prompt_of(30)))
    engine.step()
    engine.handle(SourceStopping(key(1), LOST))
    assert engine.step() is None
    (holding,) = engine.core.holdings()
    assert holding.owner_class is OwnerClass.QUARANTINED
    engine.handle(SourceAborted(key(1), LOST))
    assert_clean(engine)


@pytest.mark.parametrize("stopping_first", [False, True])
def test_abort_during_a_step_frees_after_it(stopping_first: bool) -> None:
    engine = prefill_engine(chunk_tokens=8)
    engine.handle(offer(1, prompt_of(30)))
    assert engine.launch()
    if stopping_first:
        engine.handle(SourceStopping(key(1), LOST))
    engine.handle(SourceAborted(key(1), LOST))
    assert list(engine.core.holdings())
    assert engine.collect() == []
    assert_clean(engine)


def test_abort_reaches_the_queue() -> None:
    engine = prefill_engine(pages=8)
    engine.handle(offer(1, prompt_of(30)))
    engine.handle(offer(2, prompt_of(30, 1)))
    engine.handle(SourceAborted(key(2), LOST))
    assert engine.core.load().queued == 0
    finish(engine, [])
    engine.handle(SourceReleased(key(1)))
    assert_clean(engine)


def test_deadline_gives_up_with_the_reason() -> None:
    engine = prefill_engine(chunk_tokens=8)
    engine.handle(offer(1, prompt_of(30)))
    engine.step()
    assert engine.core.next_deadline() == 100.0
    (abort,) = engine.pass_time(100.0)
    assert isinstance(abort, AbortSource)
    assert abort.failure.code is ErrorCode.DEADLINE_EXCEEDED
    assert engine.step() is None
    engine.handle(SourceAborted(key(1), abort.failure))
    assert_clean(engine)


def test_receiver_committed_while_we_gave_up() -> None:
    engine = prefill_engine()
    finish(engine, engine.handle(offer(1, prompt_of(30))))
    engine.pass_time(100.0)
    engine.handle(SourceReleased(key(1)))
    assert_clean(engine)


# ------------------------------------------------------------------------------------------------------ by layers


def parts(effects: list[object], number: int) -> list[tuple[int, int, int, int]]:
    ships = [one for one in effects if isinstance(one, ShipRegion) and one.key == key(number)]
    return [(one.first_token, one.tokens, one.part, one.parts) for one in ships]


def test_the_last_chunk_leaves_in_groups_of_layers_while_it_is_computed() -> None:
    engine = prefill_engine(chunk_tokens=8, layers=5, layer_groups=2)
    early: list[object] = []
    engine.post = early.extend
    late = finish(engine, engine.handle(offer(1, prompt_of(21))))
    assert parts(late, 1) == [(0, 8, 0, 1), (8, 8, 0, 1)]
    assert parts(early, 1) == [(16, 5, 0, 2), (16, 5, 1, 2)]
    assert engine.batches[-1].report_after == (2, 5)
    assert not any(batch.report_after for batch in engine.batches[:-1])
    done = late[-1]
    assert isinstance(done, FinishSource)
    assert done.result.first_token == fake_generate(prompt_of(21), GREEDY, 1)[0]
    engine.handle(SourceReleased(key(1)))
    assert_clean(engine)


def test_what_left_by_layers_stays_where_it_is_until_the_hand_off_has_ended() -> None:
    """Two requests with the same prompt compute the same pages: the tree would keep one set of them."""
    engine = prefill_engine(chunk_tokens=16, layers=4, layer_groups=4, page_size=4)
    tokens = prompt_of(8)
    engine.handle(offer(1, tokens))
    engine.handle(offer(2, tokens))
    effects = finish(engine, [])
    for number in (1, 2):
        ships = [one for one in effects if isinstance(one, ShipRegion) and one.key == key(number)]
        assert len(ships) == 4
        [holding] = [one for one in engine.core.holdings() if one.owner_id == str(key(number))]
        for ship in ships:
            assert ship.pages.tolist() == engine.pool.pages_of(holding.record, 0, 8).tolist()
    engine.handle(SourceReleased(key(1)))
    engine.handle(SourceReleased(key(2)))
    assert_clean(engine)
    again = finish(engine, engine.handle(offer(3, tokens)))
    assert isinstance(again[-1], FinishSource)
    assert again[-1].result.cached_tokens == 4, "what was handed over by layers is cached afterwards"


def test_a_receiver_that_gives_up_in_the_middle_of_a_step_gets_no_further_layers() -> None:
    engine = prefill_engine(chunk_tokens=16, layers=4, layer_groups=4)
    engine.handle(offer(1, prompt_of(8)))
    said: list[object] = []

    def give_up_after_the_second(effects: list[object]) -> None:
        said.extend(effects)
        if len(said) == 2:
            engine.core.handle(SourceStopping(key(1), LOST), engine.now)

    engine.post = give_up_after_the_second
    assert engine.step() == []
    assert parts(said, 1) == [(0, 8, 0, 4), (0, 8, 1, 4)]
    engine.handle(SourceAborted(key(1), LOST))
    assert_clean(engine)


def test_a_runner_that_reports_nothing_costs_time_only() -> None:
    engine = prefill_engine(chunk_tokens=16, layers=4, layer_groups=4)
    engine.handle(offer(1, prompt_of(8)))
    assert engine.launch()
    batch = engine.launched
    assert batch is not None
    result = engine.runner.collect(engine.runner.launch(batch))
    assert parts(engine.core.on_step(result, 1.0), 1) == [(0, 8, 0, 1)]


def test_the_speed_of_the_lane_and_of_the_steps_decide_where_nobody_else_does() -> None:
    engine = prefill_engine(chunk_tokens=64, layers=4, page_bytes=1 << 20, layer_groups="adaptive")  # type: ignore[arg-type]
    tokens = [prompt_of(16, seed) for seed in range(3)]
    engine.handle(replace(offer(1, tokens[0]), lane_gbps=1.0))
    assert parts(finish(engine, []), 1) == [(0, 16, 0, 1)], "nothing is known of the steps"
    engine.handle(replace(offer(2, tokens[1]), lane_gbps=1.0))
    effects = finish(engine, [])
    assert [one[2:] for one in parts(effects, 2)] == [(0, 3), (1, 3), (2, 3)], "4 MiB at 1 GB/s: 4.2 ms"
    engine.handle(replace(offer(3, tokens[2]), lane_gbps=100.0))
    assert parts(finish(engine, []), 3) == [(0, 16, 0, 1)]
