"""Functions in `/v1/responses` as the real `openai` package sees them. The decode worker is played by the test."""

from __future__ import annotations

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
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Of a city.", "parameters": CITY, "strict": False},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
MODEL: Any = {"model": "fake"}
BOTH = [("weather", '{"city": "Rome"}'), ("now", "{}")]


@pytest.fixture(scope="module")
def talker() -> Iterator[Served]:
    """Says a word, calls two tools, and says one more."""
    script = saying(f"I look.\n{ROME}\n{NOW}\nDone.")
    with serving(Loopback(script=script), max_model_len=MAX_MODEL_LEN) as served:
        yield served


@pytest.fixture(scope="module")
def chance() -> Iterator[Served]:
    """Draws among what its grammar allows."""

    def at_random(submit: Submit) -> tuple[list[int], str]:
        answer = fake_answer(unpack_tokens(submit.prompt), submit.sampling, MAX_MODEL_LEN)
        return list(answer.tokens), answer.finish_reason

    with serving(Loopback(script=at_random), max_model_len=MAX_MODEL_LEN) as served:
        yield served


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)


def calls_of(response: Any) -> list[tuple[str, str]]:
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


def prompt_of(served: Served) -> str:
    return bytes(unpack_tokens(served.worker.submits[-1].prompt).tolist()).decode()


def test_an_answer_says_and_calls_in_the_order_of_its_text(talker: Served) -> None:
    response = client_of(talker).responses.create(**MODEL, input="Is it warm?", tools=TOOLS, metadata={"run": "7"})
    assert [item.type for item in response.output] == ["message", "function_call", "function_call", "message"]
    assert calls_of(response) == BOTH
    assert response.output_text == "I look.\n\nDone."
    assert len({item.id for item in response.output}) == 4
    assert {item.status for item in response.output if item.type == "function_call"} == {"completed"}
    assert (response.status, response.parallel_tool_calls, response.tool_choice) == ("completed", True, "auto")
    assert [tool.name for tool in response.tools if tool.type == "function"] == ["weather", "now"]
    assert response.metadata == {"run": "7"}
    assert '"name": "weather"' in prompt_of(talker)
    one = client_of(talker).responses.create(**MODEL, input="x", tools=TOOLS, parallel_tool_calls=False)
    assert (calls_of(one), one.parallel_tool_calls) == (BOTH[:1], False)


def test_events_come_in_openais_order(talker: Served) -> None:
    events: list[Any] = list(client_of(talker).responses.create(**MODEL, input="x", tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    short = [kind for at, kind in enumerate(kinds) if not at or kinds[at - 1] != kind]  # deltas once
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
    message += ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert short == ["created", "in_progress", *message, *call, *call, *message, "completed"]
    *_, last = events
    for at, (name, arguments) in enumerate(BOTH, start=1):
        own = [event for event in events if getattr(event, "output_index", -1) == at]
        assert own[0].item.arguments == ""
        assert "".join(event.delta for event in own if hasattr(event, "delta")) == arguments
        assert own[-2].arguments == own[-1].item.arguments == arguments
        assert own[-1].item == last.response.output[at]
        assert own[-1].item.name == name


def test_the_packages_own_accumulation(talker: Served) -> None:
    with client_of(talker).responses.stream(**MODEL, input="x", tools=TOOLS) as stream:
        for _ in stream:
            pass
        assert calls_of(stream.get_final_response()) == BOTH


def test_what_functions_answer_goes_back(talker: Served) -> None:
    """The answer's own items are given back as they came, with what came of the calls."""
    client = client_of(talker)
    given: list[Any] = [{"role": "user", "content": "Is it warm?"}]
    response = client.responses.create(**MODEL, input=given, tools=TOOLS)
    given += [item.to_dict() for item in response.output[:3]]
    calls = [item for item in response.output if item.type == "function_call"]
    given += [
        {"type": "function_call_output", "call_id": call.call_id, "output": said}
        for call, said in zip(calls, ("warm", "noon"), strict=True)
    ]
    client.responses.create(**MODEL, input=given, tools=TOOLS)
    prompt = prompt_of(talker)
    parts = ["Is it warm?", "assistant: I look.\n", ROME, NOW, "user: <tool_response>\nwarm", "noon\n</tool_response>"]
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places)
    assert prompt.count("assistant: ") == 2  # one said and called, one is awaited


class Weather(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_model_that_must_call_calls(chance: Served, choice: Any) -> None:
    response = client_of(chance).responses.create(
        **MODEL, input="x", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
    )
    ((name, arguments),) = calls_of(response)
    assert name == "weather" or choice == "required"
    assert name == "now" or json.loads(arguments)["city"] in ("Rome", "Oslo")
    assert len(response.output) == 1


def test_an_answer_that_follows_a_schema(chance: Served) -> None:
    response = client_of(chance).responses.parse(**MODEL, input="x", text_format=Weather)
    assert response.output_parsed is not None
    assert response.output_parsed.city in ("Rome", "Oslo")


def test_a_call_that_is_cut_off(talker: Served) -> None:
    response = client_of(talker).responses.create(**MODEL, input="x", tools=TOOLS, max_output_tokens=65)
    assert (response.status, response.output[-1].type) == ("incomplete", "function_call")
    assert response.output[-1].to_dict()["status"] == "incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0].name"),
        (
            {"tools": [{"type": "function", "name": "x", "parameters": {"type": "y"}}], "tool_choice": "required"},
            "tools[0].parameters",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "[", "call_id": "c"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"role": "user", "content": "x", "output": "y"}]}, "input[0].output"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
    ],
)
def test_what_is_refused_is_named(chance: Served, fields: dict[str, Any], param: str) -> None:
    answer = chance.http.post("/v1/responses", json={"model": "fake", "input": "x", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
