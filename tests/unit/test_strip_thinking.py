"""`kv.strip_thinking_cache`: what a reasoning model thought is not kept for others; its prompt is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_rig import GREEDY, Rig, decode_engine, prompt_of

from baton.common.config import ClusterConfig, KvConfig, ModelConfig
from baton.common.engine.fake_runner import fake_generate
from baton.common.errors import ConfigError
from baton.common.messages import SamplingParams
from baton.deploy.tokenizer import load_served_model

PROMPT = prompt_of(21)
ANSWER = fake_generate(PROMPT, GREEDY, 30)
KNOWN = np.concatenate((PROMPT, np.array(ANSWER, dtype=np.int32)))
SAMPLING = SamplingParams(max_tokens=30)


def cached_after(thinking_token_id: int, prompt: np.ndarray = PROMPT, outputs: list[int] | None = None) -> int:
    """How much of prompt and answer the tree has once the request is over."""
    rig = Rig(decode_engine(64, 4))
    rig.gateway.tokens["r"] = list(outputs or [])
    rig.submit("r", prompt, SAMPLING, outputs, thinking_token_id=thinking_token_id)
    rig.settle()
    assert rig.gateway.finals["r"].failure is None
    known = np.concatenate((prompt, np.array(fake_generate(prompt, GREEDY, 30), dtype=np.int32)))
    found = rig.decode.pool.match_len(known)
    rig.assert_clean()
    return found


def test_an_answer_without_thoughts_is_cached() -> None:
    unused = next(token for token in range(258) if token not in KNOWN)
    assert cached_after(-1) == cached_after(unused) == 48


@pytest.mark.parametrize("index", [0, 7, 29])
def test_of_an_answer_with_thoughts_the_prompt_is_kept(index: int) -> None:
    assert cached_after(ANSWER[index]) == 20


def test_a_prompt_that_ends_by_thinking_makes_the_answer_one_with_thoughts() -> None:
    first = next(token for token in range(258) if token not in KNOWN)
    prompt = np.concatenate((PROMPT, np.array([first, 10], dtype=np.int32)))
    assert cached_after(first, prompt) == 20
    earlier = np.concatenate((np.array([first], dtype=np.int32), PROMPT))  # an example in the middle of a prompt
    if first not in fake_generate(earlier, GREEDY, 30):
        assert cached_after(first, earlier) > 22


def test_a_stream_that_continues_here_does_not_publish_its_earlier_thoughts() -> None:
    assert cached_after(ANSWER[3], outputs=ANSWER[:12]) == 20


def test_a_stream_may_find_its_own_thoughts_where_somebody_has_asked_with_them() -> None:
    rig = Rig(decode_engine(64, 4))
    rig.submit("asks", KNOWN[:40], SamplingParams(max_tokens=1))
    rig.settle()
    rig.gateway.tokens["r"] = ANSWER[:25]
    rig.submit("r", PROMPT, SAMPLING, ANSWER[:25], thinking_token_id=ANSWER[3])
    rig.settle()
    assert rig.gateway.finals["r"].failure is None
    assert rig.decode.pool.match_len(KNOWN) == 40, "what was there stays, and nothing is added"
    rig.assert_clean()


def test_a_session_keeps_thoughts_to_itself() -> None:
    rig = Rig(decode_engine(64, 4))
    rig.submit("s0", PROMPT, SAMPLING, session=("s", 0), thinking_token_id=ANSWER[3])
    rig.settle()
    assert rig.decode.pool.match_len(KNOWN) == 20
    rig.run(rig.decode.pass_time(10_000.0))  # expired
    assert rig.decode.pool.match_len(KNOWN) == 20
    rig.assert_clean()


def test_the_gateway_finds_the_token_or_says_that_there_is_none() -> None:
    config = ClusterConfig(
        model=ModelConfig(model="fake", max_model_len=64, thinking_start="~"), kv=KvConfig(strip_thinking_cache=True)
    )
    assert load_served_model(config).thinking_token_id == ord("~")
    off = replace(config, kv=KvConfig())
    assert load_served_model(off).thinking_token_id == -1
    with pytest.raises(ConfigError, match=r"model\.thinking_start = '<think>': is not one token of fake"):
        load_served_model(replace(config, model=ModelConfig(model="fake", max_model_len=64)))
