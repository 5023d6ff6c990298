"""Structured answers and calls of tools as the real `openai` package sees them.

The decode worker is played by the test: by the fake model, which draws at random among what a grammar allows, or by a
script that says what a model would.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from http_loopback import Loopback, Served, saying, serving

from baton.common.engine.fake_runner import fake_answer
from baton.common.messages import Submit, unpack_tokens

MAX_MODEL_LEN = 4096


class City(pydantic.BaseModel):
    name: Literal["Rome", "Oslo"]
    capital: bool


class Weather(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3] = 1


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "Is it warm?"}]
WRONG = {"type": "objct"}


def at_random(submit: Submit) -> tuple[list[int], str]:
    answer = fake_answer(unpack_tokens(submit.prompt), submit.sampling, MAX_MODEL_LEN)
    return list(answer.tokens), answer.finish_reason


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Loopback(script=at_random), max_model_len=MAX_MODEL_LEN) as served:
        yield served


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return client_of(served)


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)


def prompt_of(served: Served) -> str:
    """Of the newest request, as the worker was given it."""
    return bytes(unpack_tokens(served.worker.submits[-1].prompt).tolist()).decode()


# ----------------------------------------------------------------------------------------- structured answers


def test_parse_gives_a_model_of_pydantic(client: openai.OpenAI) -> None:
    for seed in range(5):
        answer = client.chat.completions.parse(model="fake", messages=ASK, response_format=City, seed=seed)
        assert isinstance(answer.choices[0].message.parsed, City)
        assert answer.choices[0].finish_reason == "stop"
    response = client.responses.parse(model="fake", input="Is it warm?", text_format=City)
    assert isinstance(response.output_parsed, City)


def test_a_streamed_answer_follows_its_schema(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=ASK, response_format=City) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)


def test_regular_expressions_choices_and_grammars(client: openai.OpenAI) -> None:
    def complete(**guided: Any) -> str:
        answer = client.completions.create(model="fake", prompt="x", max_tokens=100, extra_body=guided)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert complete(guided_choice=["yes", "no"]) in ("yes", "no")
    assert complete(structured_outputs={"regex": "[0-9]{4}"}).isdecimal()
    assert complete(structured_outputs={"grammar": 'root ::= ("a" | "b") "!"'}) in ("a!", "b!")
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": [1, [2]]}}}
    assert json.loads(complete(response_format=schema)) in (1, [2])


def test_several_choices_and_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=ASK, n=4, logprobs=True, top_logprobs=2, extra_body={"guided_regex": "[ab]{12}"}
    )
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == 13


def test_no_room_for_all_of_it_is_a_matter_of_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=ASK, max_tokens=5, extra_body={"guided_regex": "[ab]{12}"}
    )
    assert (len(answer.choices[0].message.content or ""), answer.choices[0].finish_reason) == (5, "length")


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": WRONG}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex"),
        ({"tools": TOOLS, "tool_choice": named("x")}, "tool_choice.function.name"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "x", "parameters": WRONG}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_before_a_worker_is_asked(
    served: Served, fields: dict[str, Any], param: str, stream: bool
) -> None:
    before = len(served.worker.submits)
    body = {"model": "fake", "messages": ASK, "stream": stream, **fields}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len(served.worker.submits) == before


# --------------------------------------------------------------------------------------------------- tools


@pytest.mark.parametrize("choice", ["required", named("weather")], ids=["required", "named"])
def test_a_model_that_must_call_calls(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(4):
        answer = client.chat.completions.create(
            model="fake", messages=ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed
        )
        [made] = answer.choices
        assert made.finish_reason == "tool_calls"
        assert made.message.content is None
        [(name, arguments)] = calls_of(made.message)
        if choice != "required":
            assert name == "weather"
        if name == "weather":
            assert json.loads(arguments)["city"] in ("Rome", "Oslo")
        else:
            assert (name, json.loads(arguments)) == ("now", {})


def test_the_packages_own_parsing_of_arguments(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="fake", messages=ASK, tools=[openai.pydantic_function_tool(Weather)], tool_choice="required"
    )
    calls = answer.choices[0].message.tool_calls or ()
    assert calls
    for call in calls:
        assert isinstance(call.function.parsed_arguments, Weather)


@pytest.fixture(scope="module")
def talker() -> Iterator[Served]:
    """Says a word, then calls two tools."""
    script = saying(f"I look.\n{ROME}\n{NOW}")
    with serving(Loopback(script=script), max_model_len=MAX_MODEL_LEN) as served:
        yield served


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


BOTH = [("weather", '{"city": "Rome"}'), ("now", "{}")]


def test_a_model_that_decides_to_call(talker: Served) -> None:
    message = client_of(talker).chat.completions.create(model="fake", messages=ASK, tools=TOOLS).choices[0]
    assert (calls_of(message.message), message.message.content) == (BOTH, "I look.\n")
    assert message.finish_reason == "tool_calls"
    prompt = prompt_of(talker)
    assert '"name": "weather"' in prompt
    assert "Of a city." in prompt
    one = client_of(talker).chat.completions.create(model="fake", messages=ASK, tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(one.choices[0].message) == BOTH[:1]


def test_tokenize_shows_what_a_model_is_told_of_tools(talker: Served) -> None:
    client_of(talker).chat.completions.create(model="fake", messages=ASK, tools=TOOLS)
    body = {"messages": ASK, "tools": TOOLS}
    tokens = talker.http.post("/tokenize", json=body).json()["tokens"]
    assert tokens == unpack_tokens(talker.worker.submits[-1].prompt).tolist()


def test_without_tools_or_with_none_wanted_calls_are_text(talker: Served) -> None:
    unwanted: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}]
    for fields in unwanted:
        choice = client_of(talker).chat.completions.create(model="fake", messages=ASK, **fields).choices[0]
        assert ROME in (choice.message.content or "")
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert "weather" not in prompt_of(talker)


def test_streamed_calls_come_bit_by_bit(talker: Served) -> None:
    stream = client_of(talker).chat.completions.create(model="fake", messages=ASK, tools=TOOLS, stream=True)
    text, calls, reasons = "", list[list[str]](), []
    for chunk in stream:
        [choice] = chunk.choices
        text += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            assert call.function.arguments is not None
            if call.index == len(calls):
                assert call.id is not None
                assert call.type == "function"
                calls.append([call.function.name or ""])
            calls[call.index].append(call.function.arguments)
    assert text == "I look.\n"
    assert [(name, "".join(arguments)) for name, *arguments in calls] == BOTH
    assert reasons[-1] == "tool_calls"
    assert not any(reasons[:-1])


def test_the_packages_own_accumulation_of_streamed_calls(talker: Served) -> None:
    with client_of(talker).chat.completions.stream(model="fake", messages=ASK, tools=TOOLS) as stream:
        for _ in stream:
            pass
        assert calls_of(stream.get_final_completion().choices[0].message) == BOTH


def test_asynchronously(talker: Served) -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{talker.url}/v1", api_key="unused") as client:
            return await client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS)

    assert calls_of(asyncio.run(ask()).choices[0].message) == BOTH


def test_what_tools_answer_goes_back_into_the_conversation(talker: Served) -> None:
    client = client_of(talker)
    message = client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS).choices[0].message
    answers = [
        {"role": "tool", "tool_call_id": call.id, "content": said}
        for call, said in zip(message.tool_calls or (), ("warm", "noon"), strict=True)
    ]
    messages: list[Any] = [*ASK, message, *answers]
    client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    prompt = prompt_of(talker)
    parts = ["Is it warm?", ROME, NOW, "warm\n</tool_response>", "noon\n</tool_response>"]
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places)
