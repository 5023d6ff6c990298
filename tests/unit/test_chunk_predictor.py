"""Chunks as long as a step should take: the arithmetic, the profile at start, and both cores with it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pytest
from core_rig import EVERYONE, GREEDY, Rig, decode_engine, prefill_engine, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.engine import chunk_predictor
from baton.common.engine.batch import Batch
from baton.common.engine.breaking_runner import BreakingRunner
from baton.common.engine.chunk_predictor import ChunkCost, ChunkPredictor, Sample, Unfit, fit, pairs_of
from baton.common.engine.chunks import ChunkBudget
from baton.common.engine.fake_runner import FakeRunner, fake_answer, fake_runner
from baton.common.engine.profiling import predictor_for
from baton.common.kv.checker import InvariantChecker
from baton.common.kv.layout import KvLayout
from baton.common.kv.pool import KvPool
from baton.common.messages import SamplingParams
from baton.transfer.model_runner import find_predictor

COST = ChunkCost(base_s=0.010, token_s=1e-4, pair_s=2e-7)
LAYOUTS = [
    KvLayout(1),
    KvLayout(4),
    KvLayout(16),
    KvLayout(4, full=False, window=11),
    KvLayout(4, window=11),
    KvLayout(4, state=True),
    KvLayout(4, full=False, state=True),
    KvLayout(4, window=11, state=True),
]

costs = st.builds(
    ChunkCost,
    base_s=st.floats(0, 0.1),
    token_s=st.floats(1e-7, 1e-2),
    pair_s=st.one_of(st.just(0.0), st.floats(1e-12, 1e-4)),
)


@dataclass(frozen=True)
class Formula:
    """A step takes what `cost` says."""

    cost: ChunkCost = COST

    def of(self, batch: Batch) -> float:
        queries = np.diff(batch.q_offsets)
        pairs = [pairs_of(int(end - count), int(end)) for count, end in zip(queries, batch.kv_lens, strict=True)]
        return self.cost.seconds(batch.num_tokens, sum(pairs))


def pool_and_runner(layout: KvLayout, tokens: int = 512, timer: Formula = Formula()) -> tuple[KvPool, FakeRunner]:
    pages = dict.fromkeys(layout.components, tokens // layout.page_size + 1)
    pool = KvPool(layout, pages, 4, tokens, step_tokens=64)
    return pool, fake_runner(pages, layout.page_size, layout=layout, max_positions=tokens, cost=timer)


# ------------------------------------------------------------------------------------------------- arithmetic


@settings(max_examples=60)
@given(cost=costs, history=st.integers(0, 100_000), left_s=st.floats(1e-6, 10.0))
def test_the_longest_chunk_that_fits(cost: ChunkCost, history: int, left_s: float) -> None:
    def adds_s(tokens: int) -> float:
        return cost.seconds(tokens, pairs_of(history, history + tokens)) - cost.base_s

    tokens = cost.most_tokens(history, left_s)
    assert adds_s(tokens) <= left_s * 1.001 + 1e-9
    assert adds_s(tokens + 1) >= left_s * 0.999 - 1e-9
    assert cost.most_tokens(history + 1000, left_s) <= tokens <= cost.most_tokens(history, 2 * left_s)


@settings(max_examples=60)
@given(cost=costs)
def test_what_follows_the_formula_is_found_again(cost: ChunkCost) -> None:
    points = [(0, 32), (2048, 32), (0, 128), (2048, 128), (0, 512), (2048, 512)]
    samples = [Sample(h, n, cost.seconds(n, pairs_of(h, h + n))) for h, n in points]
    found = fit(samples)
    assert isinstance(found, ChunkCost)
    for sample in samples:
        predicted_s = found.seconds(sample.tokens, pairs_of(sample.history, sample.history + sample.tokens))
        assert predicted_s == pytest.approx(sample.seconds, rel=1e-3)
    assert min(found.base_s, found.token_s, found.pair_s) >= 0


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [
        ((0.1, 0.1), "2 steps were measured"),
        ((0.1, 0.0, 0.2), "took no time"),
        ((0.1, float("nan"), 0.2), "took no time"),
        ((0.3, 0.2, 0.1), "took no longer"),
        ((0.01, 5.0, 0.02, 9.0, 0.01, 7.0), "off by"),
    ],
)
def test_what_follows_no_such_formula_is_a_reason(seconds: tuple[float, ...], reason: str) -> None:
    found = fit([Sample(0, 16 * (number + 1), one) for number, one in enumerate(seconds)])
    assert isinstance(found, Unfit)
    assert reason in found.reason


def test_a_slower_machine_is_noticed_and_forgiven() -> None:
    predictor = ChunkPredictor(COST, 0.1)
    alone = predictor.room().most_tokens(0)
    for slower in (3.0, 1.0):
        for _ in range(40):
            room = predictor.room()
            room.take(0, 256)
            predictor.learn(room, slower * room.predicted_s)
        if slower > 1:
            assert predictor.room().most_tokens(0) < 0.4 * alone
    assert predictor.room().most_tokens(0) == pytest.approx(alone, rel=0.01)
    for took_s in (1e9, 1e-9):
        for _ in range(100):
            predictor.learn(room, took_s)
        assert chunk_predictor.LEAST_DRIFT <= predictor.drift <= chunk_predictor.MOST_DRIFT


# ------------------------------------------------------------------------------------------- chunks of a step


@settings(max_examples=60)
@given(
    cost=costs,
    target_s=st.floats(1e-6, 1.0),
    page_size=st.sampled_from([1, 4, 16]),
    chunk_tokens=st.integers(1, 512),
    prompts=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3000), st.booleans()), min_size=1, max_size=6),
    running=st.integers(0, 64),
)
def test_the_chunks_of_a_step(
    cost: ChunkCost,
    target_s: float,
    page_size: int,
    chunk_tokens: int,
    prompts: list[tuple[int, int, bool]],
    running: int,
) -> None:
    """Page-aligned, progress, never above what tokens allow, and within the time unless that is less than a page."""
    pool = KvPool(KvLayout(page_size), {KvLayout(page_size).components[0]: 4}, 1, 1 << 20)
    room = ChunkPredictor(cost, target_s).room(running, running * 100.0)
    budget = ChunkBudget(pool, chunk_tokens, room)
    before_s, taken = room.predicted_s, 0
    for number, (done, more, scored) in enumerate(prompts):
        done = done // page_size * page_size
        end = budget.take(done, done + more, scored=scored)
        taken += end - done
        assert done <= end <= done + more
        assert end == done + more or end % page_size == 0
        if number == 0:
            assert end - done >= min(more, page_size)
            first_s = room.predicted_s
    assert taken <= max(chunk_tokens, page_size)
    assert room.predicted_s <= max(target_s, before_s, first_s) * 1.001 + 1e-9


def test_without_streams_a_step_has_all_the_time() -> None:
    room = ChunkPredictor(COST, 0.001).room(limited=False)
    pool, _ = pool_and_runner(KvLayout(4))
    assert ChunkBudget(pool, 256, room).take(0, 400, scored=False) == 256


# ------------------------------------------------------------------------------------------------ the profile


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"{one.page_size}{'+'.join(one.components)}")
def test_a_profile_finds_the_formula_and_leaves_nothing_behind(layout: KvLayout) -> None:
    pool, runner = pool_and_runner(layout)
    before = InvariantChecker().check(pool, ())
    predictor = predictor_for(pool, runner, 64, 0.05)
    assert isinstance(predictor, ChunkPredictor)
    for history, tokens in ((0, 64), (256, 16)):
        work = tokens, pairs_of(history, history + tokens)
        assert predictor.cost.seconds(*work) == pytest.approx(COST.seconds(*work), rel=0.02)
    assert InvariantChecker().check(pool, ()) == before


@pytest.mark.parametrize("layout", LAYOUTS[3:], ids=lambda one: "+".join(one.components))
@pytest.mark.parametrize("at", range(12))
def test_a_profile_that_breaks_is_a_reason_and_leaves_nothing_behind(layout: KvLayout, at: int) -> None:
    pool, runner = pool_and_runner(layout)
    before = InvariantChecker().check(pool, ())
    found = predictor_for(pool, BreakingRunner(runner, at, RuntimeError("no memory\nat all")), 64, 0.05)
    assert found == Unfit("a step failed: RuntimeError: no memory at all")
    assert InvariantChecker().check(pool, ()) == before


def test_a_bug_is_not_taken_for_a_failed_profile() -> None:
    pool, runner = pool_and_runner(KvLayout(4))
    with pytest.raises(AssertionError, match="a bug"):
        predictor_for(pool, BreakingRunner(runner, 2, AssertionError("a bug")), 64, 0.05)
    assert pool.free_pages == pool.total_pages


def test_a_slow_profile_ends_with_what_it_has() -> None:
    slow = Formula(ChunkCost(base_s=1.5, token_s=0.1, pair_s=0.0))
    pool, runner = pool_and_runner(KvLayout(4), timer=slow)
    found = predictor_for(pool, runner, 64, 0.05)
    assert isinstance(found, Unfit)
    assert "1 steps were measured" in found.reason


@pytest.mark.parametrize("tokens", [4, 8, 20])
def test_a_pool_without_room_for_more_than_a_page_or_two(tokens: int) -> None:
    pool, runner = pool_and_runner(KvLayout(4), tokens)
    predictor_for(pool, runner, 64, 0.05)
    assert pool.free_pages == pool.total_pages


def test_a_worker_tells_what_became_of_it(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    pool, runner = pool_and_runner(KvLayout(4))
    assert find_predictor(pool, runner, 64, 0.0, said.append) == (None, "off")
    assert not said
    predictor, told = find_predictor(pool, runner, 64, 0.05, said.append)
    assert predictor is not None
    assert told == "10.00 ms + 100.0 us/token + 200.00 ns/pair, steps of 50 ms"
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    broken = BreakingRunner(runner, 3, RuntimeError("no memory"))
    assert find_predictor(pool, broken, 64, 0.05, said.append) == (
        None,
        "failed: a step failed: RuntimeError: no memory",
    )
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1
    assert len(said) == 2


# -------------------------------------------------------------------------------------------------- both cores


def test_a_prefill_workers_chunks_shrink_with_their_history() -> None:
    """As attention to it grows; and the answer is the same."""
    cost = ChunkCost(base_s=0.001, token_s=1e-4, pair_s=2e-5)
    rig = Rig(prefill=prefill_engine(chunk_tokens=64, predictor=ChunkPredictor(cost, 0.02)))
    prompt = prompt_of(200)
    rig.submit("long", prompt)
    rig.settle()
    lengths = [batch.num_tokens for batch in rig.prefill.batches]
    assert lengths[:-1] == sorted(lengths[:-1], reverse=True)
    assert lengths[0] > 2 * lengths[-2] > 0
    assert all(length % 4 == 0 for length in lengths[:-1])
    assert rig.gateway.tokens["long"] == list(fake_answer(prompt, GREEDY, 256).tokens)
    rig.assert_clean()


def test_a_local_prefill_is_short_beside_streams_and_long_alone() -> None:
    cost = ChunkCost(base_s=0.001, token_s=1e-3, pair_s=0.0)
    rig = Rig(decode_engine(chunk_tokens=32, predictor=ChunkPredictor(cost, 0.012)))
    rig.view(*EVERYONE[:2])
    rig.submit("first", prompt_of(40), SamplingParams(max_tokens=12))
    rig.run(rig.decode.step() or [])
    assert rig.decode.batches[-1].num_tokens == 32, "nobody waits"
    rig.run(rig.decode.step() or [])
    rig.submit("second", prompt_of(60, 1))
    rig.run(rig.decode.step() or [])
    assert rig.decode.batches[-1].num_tokens == 1 + 8, "of the 11 ms that are left for tokens, one is the stream's"
    rig.settle()
    assert rig.gateway.tokens["second"] == list(fake_answer(prompt_of(60, 1), GREEDY, 256).tokens)
    rig.assert_clean()
