"""Log probabilities of a prompt's tokens: all of them, once, whoever computes the prompt and whatever is cached."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core_rig import (
    EVERYONE,
    PREFILL,
    PREFILL_2,
    Rig,
    decode_engine,
    member,
    prefill_engine,
    prompt_of,
)
from msgspec import msgpack, structs

from baton.common.engine.batch import Scoring
from baton.common.engine.fake_answer import fake_prompt_logprobs
from baton.common.engine.scoring import score
from baton.common.errors import ErrorCode
from baton.common.kv.layout import KvLayout
from baton.common.messages import Failure, Output, SamplingParams
from baton.common.prompt_logprobs import MAX_PROMPT_LOGPROBS, PromptLogprobs, join_chunks
from baton.transfer.api import FirstTokenReady, OpenSink

SCORED = SamplingParams(max_tokens=4, prompt_logprobs=3)
PROMPT = prompt_of(50, 7)


def told(rig: Rig, name: str = "r") -> list[PromptLogprobs | None]:
    """With each message that has token 0."""
    bodies = [one.body for one in rig.gateway.said]
    firsts = [one for one in bodies if isinstance(one, Output) and one.request_id == name and one.first_index == 0]
    return [one.prompt_logprobs for one in firsts if one.tokens]


@pytest.mark.parametrize("chunk_tokens", [4, 12, 512])
def test_the_prefill_workers_account_is_whole_whatever_the_chunks(chunk_tokens: int) -> None:
    rig = Rig(prefill=prefill_engine(chunk_tokens=chunk_tokens))
    rig.submit("r", PROMPT, SCORED)
    rig.settle()
    assert told(rig) == [fake_prompt_logprobs(PROMPT, 3)]
    rig.assert_clean()


def test_a_worker_that_computes_alone_says_the_same() -> None:
    rig = Rig(decode_engine(chunk_tokens=8))
    rig.view(*EVERYONE[:2])
    rig.submit("r", PROMPT, SCORED)
    rig.submit("one", PROMPT[:1], SCORED)
    rig.submit("plain", PROMPT, SamplingParams(max_tokens=4))
    rig.settle()
    assert told(rig) == [fake_prompt_logprobs(PROMPT, 3)]
    assert told(rig, "one") == [None]  # nothing says how likely a first token is
    assert told(rig, "plain") == [None]
    rig.assert_clean()


@pytest.mark.parametrize("layout", [KvLayout(4), KvLayout(4, full=True, window=10), KvLayout(4, full=True, state=True)])
@pytest.mark.parametrize("alone", [True, False])
def test_what_is_cached_is_computed_again(layout: KvLayout, alone: bool) -> None:
    rig = Rig(decode_engine(layout=layout), prefill_engine(layout=layout))
    if alone:
        rig.view(*EVERYONE[:2])
    rig.submit("before", PROMPT, SamplingParams(max_tokens=4))
    rig.settle()
    rig.submit("r", PROMPT, SCORED)
    rig.settle()
    assert told(rig) == [fake_prompt_logprobs(PROMPT, 3, layout)]
    assert rig.gateway.tokens["r"] == rig.gateway.tokens["before"]
    timeline = rig.gateway.finals["r"].timeline
    assert timeline is not None
    assert (timeline.cached_tokens, timeline.prefill_cached_tokens) == (0, 0)
    rig.assert_clean()


def test_when_a_hand_off_breaks_the_next_worker_scores_all_of_it() -> None:
    """What had landed came without its scores."""
    rig = Rig(decode_engine(chunk_tokens=8), prefill_engine(chunk_tokens=8))
    rig.submit("r", PROMPT, SCORED)
    for _ in range(3):
        effects = rig.prefill.step()
        assert effects is not None
        rig.run(effects)
    assert max(one.shipped for one in rig.handoffs.values()) > 0
    (key,) = rig.handoffs
    rig.view(*EVERYONE[:2])
    rig.end(key, Failure(code=ErrorCode.INTERNAL, reason="peer lost"), peer_lost=True)
    rig.settle()
    assert told(rig) == [fake_prompt_logprobs(PROMPT, 3)]


def test_what_is_kept_for_the_next_receiver_goes_on_where_it_was() -> None:
    """The first half was scored for a hand-off that broke; the prefill worker has it, and computes it only once."""
    rig = Rig(prefill=prefill_engine(chunk_tokens=8))
    rig.submit("r", PROMPT, SCORED)
    for effects in (rig.prefill.step(), rig.prefill.step()):
        rig.run(effects or [])
    (key,) = rig.handoffs
    rig.fail(key)
    rig.settle()
    assert told(rig) == [fake_prompt_logprobs(PROMPT, 3)]
    assert sum(len(batch.input_ids) for batch in rig.prefill.batches) == len(PROMPT)
    rig.assert_clean()


def test_after_a_broken_hand_off_another_prefill_worker_is_asked_for_all() -> None:
    rig = Rig(prefill=prefill_engine(chunk_tokens=8))
    rig.view(*EVERYONE, member(PREFILL_2, "prefill"))
    rig.submit("r", PROMPT, SCORED)
    for effects in (rig.prefill.step(), rig.prefill.step()):
        rig.run(effects or [])
    (key,) = rig.handoffs
    rig.end(key, Failure(code=ErrorCode.INTERNAL, reason="peer lost"), peer_lost=True)
    opened = [effect for effect in rig.log if isinstance(effect, OpenSink)]
    assert {one.peer for one in opened} == {PREFILL.worker, PREFILL_2.worker}
    assert [one.start for one in opened] == [0, 0]


def test_a_first_token_that_runs_ahead_brings_them_and_a_resume_repeats_them() -> None:
    rig = Rig()
    rig.hold_offers = True
    rig.submit("r", PROMPT, SCORED)
    (key,) = rig.handoffs
    scores = fake_prompt_logprobs(PROMPT, 3)
    rig.run(rig.decode.handle(FirstTokenReady(key, 5, None, scores)))
    rig.resume("r", 0)
    assert told(rig) == [scores, scores]


def test_who_goes_on_from_outputs_has_them() -> None:
    rig = Rig()
    first = Rig()
    first.submit("r", PROMPT, SCORED)
    first.settle()
    begun = first.gateway.tokens["r"][:2]
    rig.gateway.tokens["r"] = list(begun)
    rig.submit("r", PROMPT, SCORED, outputs=begun, placement=1)
    rig.settle()
    assert rig.gateway.tokens["r"] == first.gateway.tokens["r"]
    assert not any(one.body.prompt_logprobs for one in rig.gateway.said if isinstance(one.body, Output))
    rig.assert_clean()


def test_too_many_are_refused_at_the_door() -> None:
    rig = Rig()
    rig.submit("r", np.zeros(MAX_PROMPT_LOGPROBS // 21 + 1, np.int32), structs.replace(SCORED, prompt_logprobs=20))
    failure = rig.gateway.finals["r"].failure
    assert failure is not None
    assert failure.code is ErrorCode.PROMPT_TOO_LONG or "log probabilities" in failure.reason


# ------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("sizes", [(40,), (1, 39), (16, 16, 8), (3,) * 13 + (1,)])
def test_scores_do_not_depend_on_the_chunks(sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 300, generator=generator) * 4
    targets = np.arange(40, dtype=np.int32) * 7 % 300
    chunks, at = [], 0
    for size in sizes:
        chunks.append(score(logits[at : at + size], Scoring(targets[at : at + size], 5)))
        at += size
    joined = join_chunks(chunks)
    assert joined is not None
    expected = torch.log_softmax(logits, -1)
    for row, (rank, logprob, best) in enumerate(joined.rows()):
        assert logprob == float(expected[row, int(targets[row])])
        assert rank == int((expected[row] > logprob).sum()) + 1
        assert [value for _, value in best] == expected[row].topk(5).values.tolist()
    assert joined == score(logits, Scoring(targets, 5))


def test_no_alternatives() -> None:
    logits = torch.zeros(2, 4)
    (first, second) = score(logits, Scoring(np.array([1, 2], np.int32), 0)).rows()
    assert first == second == (1, pytest.approx(-1.3862944), [])


@pytest.mark.parametrize("field", ["ranks", "logprobs", "top_tokens", "top_logprobs"])
def test_one_that_does_not_add_up_is_no_message(field: str) -> None:
    good = fake_prompt_logprobs(PROMPT, 2)
    encoded = msgpack.encode(good)
    assert msgpack.decode(encoded, type=PromptLogprobs) == good
    bad = {name: getattr(good, name) for name in good.__struct_fields__} | {field: getattr(good, field)[:-3]}
    with pytest.raises(ValueError, match="not of the same tokens"):
        msgpack.decode(msgpack.encode(bad), type=PromptLogprobs)
