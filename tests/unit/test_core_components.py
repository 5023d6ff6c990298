"""Both cores with sliding windows and recurrent states: hand-offs, failures, retraction, sessions.

The fake model's answer proves that each step read the right pages and states, and none that was dead; the rig checks
the books of every component after every event.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from core_rig import (
    DECODE,
    EVERYONE,
    GREEDY,
    PREFILL_2,
    Engine,
    Rig,
    decode_engine,
    member,
    prefill_engine,
    prompt_of,
)

from baton.common.engine.core_api import Drain
from baton.common.engine.fake_runner import fake_answer, fake_generate
from baton.common.ids import HandoffId, HandoffKey, RequestId
from baton.common.kv.layout import KvLayout
from baton.common.messages import SamplingParams
from baton.transfer.api import FinishSource, OfferReceived, OpenSink, ShipRegion, SourceReleased

LAYOUTS = {
    "swa": {"full": False, "window": 11},
    "full+swa": {"window": 11},
    "full+state": {"state": True},
    "state": {"full": False, "state": True},
    "full+swa+state": {"window": 11, "state": True},
}
ANSWER = SamplingParams(max_tokens=21)


def layout_of(name: str, page_size: int = 4) -> KvLayout:
    return KvLayout(page_size, **LAYOUTS[name])  # type: ignore[arg-type]


def engines(layout: KvLayout, pages: int = 256, chunk: int = 16, **config: int) -> tuple[Engine, Engine]:
    size, count = layout.page_size, pages // layout.page_size
    return (
        decode_engine(count, size, layout=layout, chunk_tokens=chunk, **config),
        prefill_engine(count, size, layout=layout, chunk_tokens=chunk),
    )


def answer(layout: KvLayout, prompt: np.ndarray, sampling: SamplingParams = ANSWER) -> list[int]:
    return list(fake_answer(prompt, sampling, 256, layout=layout).tokens)


def sinks(rig: Rig) -> list[OpenSink]:
    return [effect for effect in rig.log if isinstance(effect, OpenSink)]


every_layout = pytest.mark.parametrize("name", LAYOUTS)
every_size = pytest.mark.parametrize("page_size", [1, 4, 16])


@every_layout
@every_size
def test_answers_by_hand_off(name: str, page_size: int) -> None:
    layout = layout_of(name, page_size)
    rig = Rig(*engines(layout, 512))
    for index, length in enumerate([1, 4, 11, 16, 17, 40]):
        rig.submit(f"r{index}", prompt_of(length, index), ANSWER)
    rig.settle()
    for index, length in enumerate([1, 4, 11, 16, 17, 40]):
        assert rig.gateway.tokens[f"r{index}"] == answer(layout, prompt_of(length, index))
    assert len(sinks(rig)) == 6
    rig.assert_clean()


@every_layout
@every_size
def test_answers_alone(name: str, page_size: int) -> None:
    layout = layout_of(name, page_size)
    rig = Rig(*engines(layout))
    rig.view(*EVERYONE[:2])
    for index in range(4):
        rig.submit(f"r{index}", prompt_of(13 + 9 * index, index), ANSWER)
    rig.settle()
    for index in range(4):
        assert rig.gateway.tokens[f"r{index}"] == answer(layout, prompt_of(13 + 9 * index, index))
    rig.assert_clean()


@every_layout
def test_chunk_caches_share_nothing_and_answer_the_same(name: str) -> None:
    layout = layout_of(name)
    decode = decode_engine(layout=layout, cache="chunk")
    rig = Rig(decode, prefill_engine(layout=layout, cache="chunk", chunk_tokens=8))
    for index in range(3):
        rig.submit(f"r{index}", prompt_of(30), ANSWER)
    rig.settle()
    for index in range(3):
        assert rig.gateway.tokens[f"r{index}"] == answer(layout, prompt_of(30))
    for engine in (rig.decode, rig.prefill):
        assert engine.pool.census(()).free == engine.pool.total_pages
    rig.assert_clean()


@every_layout
def test_a_prompt_that_is_known_is_not_computed_again(name: str) -> None:
    layout = layout_of(name)
    rig = Rig(*engines(layout))
    prompt = prompt_of(43)
    rig.submit("first", prompt, GREEDY)
    rig.settle()
    computed = sum(batch.num_tokens for batch in rig.prefill.batches)
    rig.decode.pool.clear_cache()
    longer = np.concatenate((prompt[:41], prompt_of(6, 1)))
    rig.submit("again", longer, GREEDY)
    rig.settle()
    assert rig.gateway.tokens["again"] == answer(layout, longer, GREEDY)
    assert sum(batch.num_tokens for batch in rig.prefill.batches) - computed == 7
    timeline = rig.gateway.finals["again"].timeline
    assert timeline is not None
    assert timeline.prefill_cached_tokens == 40
    rig.assert_clean()


@every_layout
def test_what_a_decode_worker_computed_it_finds_again(name: str) -> None:
    layout = layout_of(name)
    rig = Rig(*engines(layout))
    rig.view(*EVERYONE[:2])
    for index in range(2):
        rig.submit(f"r{index}", prompt_of(43), GREEDY)
        rig.settle()
    assert rig.gateway.tokens["r1"] == answer(layout, prompt_of(43), GREEDY)
    timeline = rig.gateway.finals["r1"].timeline
    assert timeline is not None
    assert (timeline.cached_tokens, timeline.local_tokens) == (40, 3)
    rig.assert_clean()


@pytest.mark.parametrize("name", ["full+state", "full+swa+state"])
def test_an_answer_is_found_again_up_to_the_last_state_that_was_kept(name: str) -> None:
    """The next turn of a conversation without a session: prompt and answer come again, neither a whole page long."""
    layout = layout_of(name)
    rig = Rig(*engines(layout, 1024))
    sampling = SamplingParams(max_tokens=101)
    prompt = prompt_of(37)
    rig.submit("first", prompt, sampling)
    rig.settle()
    turn = np.concatenate((prompt, np.array(answer(layout, prompt, sampling), dtype=np.int32), prompt_of(9, 5)))
    rig.submit("second", turn, ANSWER)
    rig.settle()
    assert rig.gateway.tokens["second"] == answer(layout, turn)
    timeline = rig.gateway.finals["second"].timeline
    assert timeline is not None
    assert timeline.cached_tokens == 128
    rig.assert_clean()


def test_no_state_is_kept_of_an_answer_while_slots_are_scarce() -> None:
    layout = layout_of("full+state")
    rig = Rig(decode_engine(256, 4, layout=layout, slots=4), prefill_engine(256, 4, layout=layout))
    sampling = SamplingParams(max_tokens=101)
    for index in range(3):
        rig.submit(f"r{index}", prompt_of(37, index), sampling)
    rig.settle()
    for index in range(3):
        assert rig.gateway.tokens[f"r{index}"] == answer(layout, prompt_of(37, index), sampling)
    assert rig.decode.pool.match_len(np.concatenate((prompt_of(37), np.array(rig.gateway.tokens["r0"])))) == 0
    rig.assert_clean()


@every_layout
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_lost_prefill_worker_leaves_nothing_half_known(name: str, steps: int) -> None:
    layout = layout_of(name)
    rig = Rig(*engines(layout, chunk=8))
    rig.view(*EVERYONE, member(PREFILL_2, "prefill"))
    rig.hold_offers = True
    rig.submit("r", prompt_of(30), ANSWER)
    rig.release_offers()
    for _ in range(steps):
        rig.run(rig.prefill.step() or [])
    rig.lose_prefill()
    assert all(one.start == 0 for one in sinks(rig))
    rig.lose_prefill()
    rig.view(*EVERYONE[:2])
    while (effects := rig.decode.step()) is not None:
        rig.run(effects)
    assert rig.gateway.tokens["r"] == answer(layout, prompt_of(30))
    timeline = rig.gateway.finals["r"].timeline
    assert timeline is not None
    assert (timeline.cached_tokens, timeline.transferred_tokens, timeline.local_tokens) == (0, 0, 30)


@every_layout
@pytest.mark.parametrize("scarce", ["pages", "swa", "slots"])
def test_retraction_under_pressure_loses_nothing(name: str, scarce: str) -> None:
    layout = layout_of(name)
    pool = {"pages": 24} if scarce == "pages" else {"swa_pages": 20} if scarce == "swa" else {"slots": 3}
    rig = Rig(
        decode_engine(**{"pages": 64} | pool, layout=layout, num_reserved_decode_tokens=0, chunk_tokens=8),
        prefill_engine(layout=layout, chunk_tokens=8),
    )
    sampling = SamplingParams(max_tokens=40)
    for index in range(6):
        rig.submit(f"r{index}", prompt_of(14, index), sampling)
    rig.settle()
    for index in range(6):
        assert rig.gateway.tokens[f"r{index}"] == answer(layout, prompt_of(14, index), sampling)
        timeline = rig.gateway.finals[f"r{index}"].timeline
        assert timeline is not None
        assert timeline.cached_tokens + timeline.transferred_tokens + timeline.local_tokens == 14
    if scarce == "pages" and layout.full:
        assert rig.decode.core.retractions > 0
    rig.assert_clean()


@every_layout
def test_a_migrated_request_continues_where_it_was(name: str) -> None:
    layout = layout_of(name)
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=7)
    expected = fake_generate(prompt_of(15), sampling, 30, layout=layout)
    rig = Rig(*engines(layout))
    rig.gateway.tokens["r"] = expected[:18]
    rig.submit("r", prompt_of(15), sampling, outputs=expected[:18], placement=1)
    rig.settle()
    assert rig.gateway.tokens["r"] == expected
    rig.assert_clean()


@every_layout
def test_a_chunk_of_a_request_that_was_cancelled_meanwhile_is_cached_as_what_it_is(name: str) -> None:
    """Its step has moved the state on, whether anybody still waits for it or not."""
    layout = layout_of(name)
    rig = Rig(*engines(layout, chunk=8))
    rig.view(*EVERYONE[:2])
    rig.submit("r", prompt_of(30), ANSWER)
    rig.run(rig.decode.step() or [])
    assert rig.decode.launch()
    rig.cancel("r")
    rig.run(rig.decode.collect())
    assert rig.decode.pool.match_len(prompt_of(30)) in (8, 16)
    rig.submit("again", prompt_of(30), ANSWER)
    rig.settle()
    assert rig.gateway.tokens["again"] == answer(layout, prompt_of(30))


# ---------------------------------------------------------------------------------------- conversations


def turn(rig: Rig, number: int, prompt: np.ndarray) -> list[int]:
    name = f"s{number}"
    rig.submit(name, prompt, ANSWER, session=("s", number))
    rig.settle()
    assert rig.gateway.tokens[name] == answer(rig.decode.pool.layout, prompt)
    timeline = rig.gateway.finals[name].timeline
    assert timeline is not None
    assert timeline.cached_tokens + timeline.transferred_tokens + timeline.local_tokens == len(prompt)
    return rig.gateway.tokens[name]


def joined(*parts: np.ndarray | list[int]) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


@every_layout
@every_size
def test_turns_go_on_where_the_last_one_ended(name: str, page_size: int) -> None:
    rig = Rig(*engines(layout_of(name, page_size), 512))
    conversation, sent = prompt_of(21), 0
    for number in range(4):
        said = turn(rig, number, conversation)
        timeline = rig.gateway.finals[f"s{number}"].timeline
        assert timeline is not None
        sent += timeline.transferred_tokens
        assert number == 0 or timeline.cached_tokens >= len(conversation) - 12 - 1
        conversation = joined(conversation, said, prompt_of(11, number + 1))
    assert sent <= len(conversation)
    rig.run(rig.decode.handle(Drain()))  # ends the conversations
    rig.assert_clean()


@every_layout
@pytest.mark.parametrize("keep", [5, 20, 22, 40])
def test_an_edited_conversation(name: str, keep: int) -> None:
    """It leaves the old one at token `keep`: behind the window, within it, in the shared part."""
    rig = Rig(*engines(layout_of(name)))
    first = prompt_of(21)
    known = joined(first, turn(rig, 0, first))
    turn(rig, 1, joined(known[:keep], prompt_of(9, 7)))
    turn(rig, 2, joined(known[:keep], prompt_of(9, 7), prompt_of(30, 8)))


@every_layout
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_turn_whose_hand_off_fails(name: str, steps: int) -> None:
    layout = layout_of(name)
    rig = Rig(*engines(layout, chunk=8))
    first = prompt_of(21)
    known = joined(first, turn(rig, 0, first), prompt_of(33, 3))
    rig.submit("s1", known, ANSWER, session=("s", 1))
    while not rig.handoffs:
        rig.run(rig.decode.step() or [])
    for _ in range(steps):
        rig.run(rig.prefill.step() or [])
    (key,) = rig.handoffs
    rig.fail(key)
    rig.settle()
    assert rig.gateway.tokens["s1"] == answer(layout, known)
    timeline = rig.gateway.finals["s1"].timeline
    assert timeline is not None
    assert timeline.cached_tokens + timeline.transferred_tokens + timeline.local_tokens == len(known)


# ---------------------------------------------------------------------------------------- what prefill ships


def shipped(engine: Engine, prompt: np.ndarray, start: int, number: int = 1) -> list[tuple[str, int, int]]:
    key = HandoffKey(HandoffId(number), 0)
    offer = OfferReceived(key, DECODE, RequestId("r"), prompt, start, True, GREEDY, 100.0)
    effects = engine.handle(offer)
    while (more := engine.step()) is not None:
        effects += more
    assert isinstance(effects[-1], FinishSource)
    engine.handle(SourceReleased(key))
    return [(one.component.value, one.first_token, one.tokens) for one in effects if isinstance(one, ShipRegion)]


def test_full_attention_streams_and_the_rest_follows_once() -> None:
    layout = layout_of("full+swa+state")
    engine = prefill_engine(layout=layout, chunk_tokens=8)
    full = [("full", 0, 8), ("full", 8, 8), ("full", 16, 8), ("full", 24, 4), ("full", 28, 2)]
    assert shipped(engine, prompt_of(30), 0) == [*full, ("swa", 20, 10), ("state", 0, 30)]
    assert shipped(engine, prompt_of(30), 24, 2) == [("full", 24, 4), ("full", 28, 2), ("swa", 24, 6), ("state", 24, 6)]
    assert engine.pool.match_len(prompt_of(30)) == 28


def test_pages_that_the_tree_did_not_take_yet_are_not_lent_before_the_end() -> None:
    """Without a spare slot no checkpoint is made, so the tree takes nothing; another prompt's may come to replace the
    pages later."""
    engine = prefill_engine(layout=layout_of("full+state"), chunk_tokens=8, slots=3)
    other = OfferReceived(HandoffKey(HandoffId(9), 0), DECODE, RequestId("o"), prompt_of(8, 5), 0, True, GREEDY, 100.0)
    engine.handle(other)
    while engine.step() is not None:
        pass  # it holds a slot until it is released
    assert shipped(engine, prompt_of(30), 0) == [("full", 0, 30), ("state", 0, 30)]


# ---------------------------------------------------------------------------------------- storms


@every_layout
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 20))])
def test_storm(name: str, seed: int) -> None:
    """Random arrivals, cancellations, lost hand-offs, workers that leave and come back, evictions, tiny pools."""
    rng = Random(seed * 1009 + sum(map(ord, name)))
    page_size = rng.choice([1, 4, 16])
    layout = layout_of(name, page_size)
    pages = rng.choice([96, 160]) // page_size + 4
    tight = {"swa_pages": rng.choice([52, 120]) // page_size + 9, "slots": rng.choice([3, 6])}
    cache = rng.choice(["radix", "radix", "chunk"])
    rig = Rig(
        decode_engine(pages, page_size, 8, 120, layout, **tight, cache=cache, chunk_tokens=16, max_running_requests=6),
        prefill_engine(pages, page_size, 8, 120, layout, **tight, cache=cache, chunk_tokens=rng.choice([8, 16])),
    )
    families = [prompt_of(60, 50 + n) for n in range(2)]
    asked: dict[str, tuple[np.ndarray, SamplingParams]] = {}
    cancelled: set[str] = set()
    for number in range(14):
        shared = rng.choice(families)[: rng.randint(1, 50)]
        prompt = joined(shared, prompt_of(rng.randint(0, 12), number))
        sampling = SamplingParams(max_tokens=rng.randint(1, 25), temperature=rng.choice([0.0, 1.0]), seed=number)
        asked[f"r{number}"] = (prompt, sampling)
        session = (rng.choice(["", "x", "y"]), 0)
        rig.submit(f"r{number}", prompt, sampling, session=session)
        for _ in range(rng.randint(0, 12)):
            engine = rng.choice([rig.prefill, rig.decode])
            if engine.launched is not None:
                rig.run(engine.collect())
            else:
                engine.launch()
        chance = rng.random()
        if chance < 0.2 and f"r{number}" not in rig.gateway.finals:
            cancelled.add(f"r{number}")
            rig.cancel(f"r{number}")
        elif chance < 0.4 and rig.handoffs:
            key = rng.choice(list(rig.handoffs))
            rig.fail(key)
        elif chance < 0.5:
            rng.choice([rig.prefill, rig.decode]).pool.clear_cache()
        elif chance < 0.6:
            rig.view(*(EVERYONE[:2] if rng.random() < 0.5 else EVERYONE))
    for engine in (rig.prefill, rig.decode):
        if engine.launched is not None:
            rig.run(engine.collect())
    rig.settle()
    for request, (prompt, sampling) in asked.items():
        final = rig.gateway.finals[request]
        expected = list(fake_answer(prompt, sampling, 120, layout=layout).tokens)
        said = rig.gateway.tokens.get(request, [])
        assert said == expected[: len(said)]
        assert final.failure is None or request in cancelled, final
        assert final.failure is not None or said == expected
    rig.run(rig.decode.handle(Drain()))  # ends the conversations
    rig.assert_clean()
