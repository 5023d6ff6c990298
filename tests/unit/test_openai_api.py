"""Requests are understood or refused with the parameter's name; nothing is silently ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.errors import ErrorCode, RequestError
from baton.common.messages import SamplingParams, Timeline
from baton.deploy.chat_messages import conversation
from baton.deploy.openai_api import ChatRequest, CompletionRequest, parse_request, sampling_for
from baton.deploy.openai_replies import HTTP_STATUS, http_error, usage_of

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"model": "m", "prompt": "Hello", **fields}).encode())


def refused(make: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(**fields)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    return caught.value


def sampling(request: ChatRequest | CompletionRequest, prompt_tokens: int = 10, limit: int = 100) -> SamplingParams:
    return sampling_for(
        request,
        prompt_tokens=prompt_tokens,
        max_model_len=limit,
        vocab_size=50,
        eos_token_ids=(2, 3),
        drawn_seed=12345,
    )


def test_defaults_are_those_of_openai() -> None:
    params = sampling(chat())
    assert (params.temperature, params.top_p, params.top_k, params.logprobs) == (1.0, 1.0, 0, -1)
    assert params.max_tokens == 90  # chat: all that is left
    assert params.seed == 12345
    assert params.stop_token_ids == (2, 3)
    assert sampling(completion()).max_tokens == 16
    assert sampling(completion(), prompt_tokens=95).max_tokens == 5


def test_every_sampling_parameter_arrives() -> None:
    params = sampling(
        completion(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            seed=7,
            max_tokens=20,
            logprobs=3,
            stop_token_ids=[9, 2],
            min_p=0.1,
            repetition_penalty=1.1,
            frequency_penalty=-0.5,
            presence_penalty=0.25,
            logit_bias={"7": -100, "49": 1.5},
        )
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=7,
        max_tokens=20,
        logprobs=3,
        stop_token_ids=(9, 2, 3),
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        logit_bias=((7, -100.0), (49, 1.5)),
    )
    assert params.reshapes
    assert not sampling(completion(min_p=0.1, repetition_penalty=1, presence_penalty=0, logit_bias={})).reshapes


def test_a_bias_for_a_token_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(RequestError, match="token 50 is not in the vocabulary of 50 tokens") as caught:
        sampling(chat(logit_bias={"50": 1}))
    assert caught.value.field == "logit_bias"


def test_ignore_eos_leaves_only_the_clients_stop_tokens() -> None:
    assert sampling(chat(ignore_eos=True, stop_token_ids=[9])).stop_token_ids == (9,)


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_every_64_bit_seed_is_accepted(seed: int) -> None:
    assert 0 <= sampling(chat(seed=seed)).seed < 1 << 63


def test_stop_is_a_string_or_a_list() -> None:
    assert chat(stop="END").stops == ("END",)
    assert chat(stop=["a", "b", "c", "d", "e"]).stops == ("a", "b", "c", "d", "e")
    assert chat().stops == chat(stop=None).stops == ()
    assert refused(chat, stop="").field == "stop"
    assert refused(chat, stop=["a", ""]).field == "stop[1]"


def test_prompts_in_every_form() -> None:
    assert completion(prompt="x").prompts() == ["x"]
    assert completion(prompt=["x", "y"]).prompts() == ["x", "y"]
    assert completion(prompt=[1, 2, 3]).prompts() == [[1, 2, 3]]
    assert completion(prompt=[[1, 2], [3]]).prompts() == [[1, 2], [3]]
    for bad in (["x", 1], [], ["x"] * 129):
        with pytest.raises(RequestError, match="prompt"):
            completion(prompt=bad).prompts()
    assert refused(completion, prompt=[-1]).field == "prompt[0]"
    assert refused(completion, prompt=1.5).field == "prompt"


def test_chat_messages_as_templates_want_them() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        ]
    )
    assert conversation(request.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"temperature": -1}, "temperature", "got -1"),
        ({"temperature": "hot"}, "temperature", "got 'hot'"),
        ({"temperature": True}, "temperature", "bool"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_p": 1.5}, "top_p", "<= 1"),
        ({"top_k": -2}, "top_k", ">= 0"),
        ({"top_k": 10**30}, "top_k", "<= 2147483647"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"priority": 101}, "priority", "<= 100"),
        ({"priority": 0.5}, "priority", "got 0.5"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 129}, "n", "<= 128"),
        ({"n": True}, "n", "bool"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "<= 2.0, got 2.5"),
        ({"presence_penalty": -3}, "presence_penalty", ">= -2.0, got -3"),
        ({"repetition_penalty": 0}, "repetition_penalty", "> 0"),
        ({"min_p": 1.5}, "min_p", "<= 1"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'json_object', 'json_schema', 'text'"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "<= 100"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "a key: expected `int` >= 0"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "a key: expected `int`, got `str`"),
        ({"logit_bias": [5]}, "logit_bias", "object"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "<= 1024"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"xyz": 1}, "xyz", "unknown parameter"),
        ({"min_tokens": 4}, "min_tokens", "needs ignore_eos"),
        ({"min_tokens": 4, "ignore_eos": True, "stop": "x"}, "min_tokens", "no stop"),
        ({"min_tokens": 4, "ignore_eos": True, "max_tokens": 3}, "min_tokens", "more than the 3"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "not",
        ),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"stream_options": {"include_usages": True}}, "stream_options", "include_usages"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "it is one of 'assistant', "),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "'text'"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "another value"),
    ],
)
def test_refusals_name_the_parameter(fields: dict[str, Any], field: str, says: str) -> None:
    error = refused(chat, **fields)
    assert error.field == field
    assert says in error.message
    assert field.split("[")[0] in error.message


@pytest.mark.parametrize("fields", [{"x" * 1_000_000: 1}, {"temperature": "x" * 1_000_000}, {"seed": 10**4000}])
def test_a_refusal_does_not_send_the_body_back(fields: dict[str, Any]) -> None:
    error = refused(chat, **fields)
    assert len(error.message) < 400
    assert len(error.field or "") < 200


def test_values_that_ask_for_nothing_are_accepted() -> None:
    chat(n=1, tools=[], frequency_penalty=0, presence_penalty=0.0, logit_bias=None, response_format={"type": "text"})
    completion(n=1, best_of=1, echo=False, suffix=None, user="someone")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"model": "m",}', b"\xff\xfe", b"nul", b'"text"', b"[" * 10_000])
def test_a_body_that_is_no_json_object(body: bytes) -> None:
    with pytest.raises(RequestError, match="JSON") as caught:
        parse_request(ChatRequest, body)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_missing_fields_are_named() -> None:
    with pytest.raises(RequestError, match="model: required"):
        parse_request(CompletionRequest, b'{"prompt": "x"}')
    with pytest.raises(RequestError, match="messages: required"):
        parse_request(ChatRequest, b'{"model": "m"}')


def test_an_over_length_prompt_names_the_limit() -> None:
    for prompt_tokens, fields in ((100, {}), (101, {}), (90, {"max_tokens": 11})):
        with pytest.raises(RequestError, match="100 tokens") as caught:
            sampling(completion(**fields), prompt_tokens=prompt_tokens)
        assert caught.value.code is ErrorCode.PROMPT_TOO_LONG
    assert sampling(completion(max_tokens=10), prompt_tokens=90).max_tokens == 10


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        sampling(completion(prompt=""), prompt_tokens=0)


def test_every_error_code_has_an_http_status() -> None:
    assert set(HTTP_STATUS) == set(ErrorCode)
    overloaded = http_error(RequestError(ErrorCode.OVERLOADED, "full", retry_after_s=0.2))
    assert (overloaded.status, overloaded.headers) == (429, {"Retry-After": "1"})
    unknown = http_error(RequestError(ErrorCode.MODEL_NOT_FOUND, "no such model", "model"))
    assert (unknown.status, unknown.reply.error.param, unknown.reply.error.code) == (404, "model", "model_not_found")


def test_cached_tokens_count_both_workers_caches() -> None:
    usage = usage_of(100, 5, [Timeline(cached_tokens=16, transferred_tokens=84, prefill_cached_tokens=32)])
    assert usage.prompt_tokens_details.cached_tokens == 48
    assert usage.total_tokens == 105
