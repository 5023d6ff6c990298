"""Guided answers through both cores: the same tokens as from one process, whoever continues them, and an end only where
the grammar may end. The fake model draws at random among what is allowed."""

from __future__ import annotations

import json
import re

import pytest
from core_rig import Rig, decode_engine, prefill_engine, prompt_of

from baton.common.engine.fake_model import FAKE_VOCAB_SIZE
from baton.common.engine.fake_runner import fake_answer
from baton.common.errors import ErrorCode
from baton.common.messages import Grammar, SamplingParams
from baton.transfer.api import OpenSink

END = FAKE_VOCAB_SIZE - 1
LINES = Grammar(kind="regex", text="([a-c]{3}-){11}[xyz]")  # 45 tokens
WORDS = Grammar(kind="regex", text="[a-c]{3}-[xyz]{8}")
RECORD = Grammar(kind="json_schema", text=json.dumps({"enum": [{"n": [1, 2]}, "some text", 34567, {"n": [1, 3]}]}))


def guided(grammar: Grammar, **sampling: float) -> SamplingParams:
    return SamplingParams(max_tokens=80, grammar=grammar, stop_token_ids=(END,), **sampling)  # type: ignore[arg-type]


def text_of(tokens: list[int]) -> str:
    assert tokens[-1] == END
    return bytes(tokens[:-1]).decode()


@pytest.mark.parametrize("grammar", [WORDS, RECORD], ids=["regex", "schema"])
def test_the_first_token_too_comes_from_the_grammar(grammar: Grammar) -> None:
    """It is sampled by the prefill worker."""
    rig = Rig()
    for index in range(6):
        rig.submit(f"r{index}", prompt_of(9 + index, index), guided(grammar))
    rig.settle()
    for index in range(6):
        tokens = rig.gateway.tokens[f"r{index}"]
        expected = fake_answer(prompt_of(9 + index, index), guided(grammar), 256)
        assert (tokens, rig.gateway.finals[f"r{index}"].finish_reason) == (list(expected.tokens), "stop")
        text = text_of(tokens)
        assert json.loads(text) if grammar is RECORD else re.fullmatch(grammar.text, text)
    assert sum(isinstance(effect, OpenSink) and effect.sample for effect in rig.log) == 6
    rig.assert_clean()


def test_without_a_prefill_worker_the_first_token_comes_from_the_grammar_too() -> None:
    rig = Rig(decode_engine(local_prefill_max_tokens=100))
    rig.submit("r", prompt_of(20), guided(LINES))
    rig.settle()
    assert rig.gateway.tokens["r"] == list(fake_answer(prompt_of(20), guided(LINES), 256).tokens)
    assert not any(isinstance(effect, OpenSink) for effect in rig.log)


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_retraction_under_pressure_changes_no_token(penalty: float) -> None:
    rig = Rig(decode_engine(pages=24, num_reserved_decode_tokens=0))
    sampling = guided(LINES, presence_penalty=penalty)
    for index in range(4):
        rig.submit(f"r{index}", prompt_of(14, index), sampling)
    rig.settle()
    assert rig.decode.core.retractions > 0
    for index in range(4):
        assert rig.gateway.tokens[f"r{index}"] == list(fake_answer(prompt_of(14, index), sampling, 256).tokens)
    rig.assert_clean()


@pytest.mark.parametrize("grammar", [WORDS, RECORD], ids=["regex", "schema"])
def test_another_worker_continues_at_every_place_as_if_nothing_had_happened(grammar: Grammar) -> None:
    """Each has a matcher of its own, which has to read what others have written."""
    sampling = guided(grammar, temperature=1.0, seed=7)
    expected = list(fake_answer(prompt_of(15), sampling, 256).tokens)
    for done in range(1, len(expected), 2):
        rig = Rig()
        rig.gateway.tokens["r"] = expected[:done]
        rig.submit("r", prompt_of(15), sampling, outputs=expected[:done], placement=1)
        rig.settle()
        assert rig.gateway.tokens["r"] == expected, done
        assert rig.gateway.finals["r"].finish_reason == "stop"


def test_an_answer_that_moves_on_with_every_token() -> None:
    sampling, known = guided(WORDS), list[int]()
    while known[-1:] != [END]:
        rig = Rig()
        rig.gateway.tokens["r"] = list(known)
        rig.submit("r", prompt_of(15), sampling, outputs=known, placement=len(known))
        while len(rig.gateway.tokens["r"]) <= len(known):
            rig.run(rig.prefill.step() or [])
            rig.run(rig.decode.step() or [])
        known = rig.gateway.tokens["r"]
    assert known == list(fake_answer(prompt_of(15), sampling, 256).tokens)


def test_neighbours_without_a_grammar_are_left_alone() -> None:
    rig = Rig()
    free = SamplingParams(max_tokens=50)
    for index in range(3):
        rig.submit(f"free{index}", prompt_of(12, index), free)
        rig.submit(f"guided{index}", prompt_of(12, index), guided(LINES))
    rig.settle()
    for index in range(3):
        assert rig.gateway.tokens[f"free{index}"] == list(fake_answer(prompt_of(12, index), free, 256).tokens)
        assert rig.gateway.tokens[f"guided{index}"] == list(
            fake_answer(prompt_of(12, index), guided(LINES), 256).tokens
        )


def test_max_tokens_cuts_a_guided_answer_short() -> None:
    rig = Rig()
    sampling = SamplingParams(max_tokens=7, grammar=LINES, stop_token_ids=(END,))
    rig.submit("r", prompt_of(9), sampling)
    rig.settle()
    assert len(rig.gateway.tokens["r"]) == 7
    assert rig.gateway.finals["r"].finish_reason == "length"


def test_outputs_that_do_not_follow_the_grammar_fail_the_request_and_nobody_else() -> None:
    rig = Rig()
    rig.submit("good", prompt_of(9), guided(LINES))
    rig.gateway.tokens["r"] = [ord("!")]
    rig.submit("r", prompt_of(15), guided(LINES), outputs=[ord("!")], placement=1)
    rig.settle()
    failure = rig.gateway.finals["r"].failure
    assert failure is not None
    assert failure.code is ErrorCode.INVALID_REQUEST
    assert "grammar" in failure.reason
    assert rig.gateway.finals["good"].finish_reason == "stop"
    rig.assert_clean()


def test_both_doors_refuse_a_grammar_that_cannot_be_compiled() -> None:
    """A gateway lets none through; who sends it all the same must not bring an engine down."""
    wrong = Grammar(kind="regex", text="(")
    rig = Rig(decode_engine(guided=True))
    rig.submit("r", prompt_of(9), guided(wrong))
    rig.settle()
    failure = rig.gateway.finals["r"].failure
    assert failure is not None
    assert failure.code is ErrorCode.INVALID_REQUEST
    assert "unclosed group" in failure.reason
    rig = Rig(prefill=prefill_engine(guided=True))  # its decode worker looks at nothing
    rig.submit("r", prompt_of(9), guided(wrong))
    rig.settle()
    assert rig.gateway.finals["r"].failure is not None
    rig.assert_clean()
