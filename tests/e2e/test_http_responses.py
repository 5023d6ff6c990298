"""`/v1/responses` as the real `openai` package sees it. The decode worker is played by the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from http_loopback import MAX_MODEL_LEN, Loopback, Served, saying, serving

from baton.common.messages import unpack_tokens

TEXT = "Hello wörld €😀"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Loopback(script=saying(TEXT))) as served:
        yield served


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)


def prompt_of(served: Served) -> str:
    """Of the newest request, as the worker was given it."""
    return bytes(unpack_tokens(served.worker.submits[-1].prompt).tolist()).decode()


def test_a_whole_response(client: openai.OpenAI, served: Served) -> None:
    response = client.responses.create(
        model="fake",
        input="hi",
        instructions="Be brief.",
        temperature=0.5,
        store=False,
        extra_body={"min_p": 0.1, "seed": 7},
    )
    assert (response.output_text, response.status, response.error) == (TEXT, "completed", None)
    assert prompt_of(served) == "system: Be brief.\nuser: hi\nassistant: "
    sampling = served.worker.submits[-1].sampling
    assert (sampling.temperature, sampling.min_p, sampling.seed) == (0.5, 0.1, 7)
    assert (response.temperature, response.top_p, response.instructions) == (0.5, 1.0, "Be brief.")
    assert response.usage is not None
    assert response.usage.input_tokens == len(prompt_of(served))
    assert response.usage.output_tokens == len(TEXT.encode()) + 1
    assert response.usage.input_tokens_details.cached_tokens == 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_an_answer_goes_into_the_next_input(client: openai.OpenAI, served: Served) -> None:
    conversation: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    answer = client.responses.create(model="fake", input=conversation)
    conversation += [item.to_dict() for item in answer.output]
    client.responses.create(model="fake", input=[*conversation, {"role": "user", "content": "more"}])
    assert prompt_of(served) == f"user: hi\nassistant: {TEXT}\nuser: more\nassistant: "


def test_no_room_for_more_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input="hi", max_output_tokens=4)
    assert (response.output_text, response.status) == ("Hell", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(("room", "status"), [(100, "completed"), (4, "incomplete")])
def test_a_streamed_response(client: openai.OpenAI, room: int, status: str) -> None:
    text = TEXT if room == 100 else TEXT[:4]
    events: list[Any] = list(client.responses.create(model="fake", input="hi", max_output_tokens=room, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    kinds = [event.type.removeprefix("response.") for event in events if event not in deltas]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:] == ["output_text.done", "content_part.done", "output_item.done", status]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in deltas) == events[-4].text == events[-1].response.output_text == text
    assert events[0].response.id == events[-1].response.id
    assert events[0].response.status == "in_progress"
    assert events[-1].response.usage.output_tokens == (len(TEXT.encode()) + 1 if room == 100 else 4)
    assert {event.item_id for event in deltas} == {events[-1].response.output[0].id}


def test_the_packages_own_accumulation_of_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="hi") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == TEXT


def test_a_failure_in_the_middle_is_the_last_event() -> None:
    with serving(Loopback(script=saying(TEXT), failure_after=3)) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)
        *_, last = client.responses.create(model="fake", input="hi", stream=True)
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "transfer_corrupt"
        with pytest.raises(openai.InternalServerError, match="as scripted"):
            client.responses.create(model="fake", input="hi")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": []}, "input", "length >= 1"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "one of 'assistant', 'developer'"),
        ({"input": [{"role": "user", "content": [{"type": "image", "text": ""}]}]}, "input[0].content[0].type", "in"),
        ({"input": "x" * MAX_MODEL_LEN}, "input", f"{MAX_MODEL_LEN} tokens"),
        ({"max_output_tokens": 300}, "max_output_tokens", f"limit of {MAX_MODEL_LEN}"),
        ({"max_tokens": 3}, "max_tokens", "unknown parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"store": True}, "store", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "one of 'function'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "required"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema", "needs type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format.schema", "x"),
        ({"text": {"verbosity": "low"}}, "text", "verbosity"),
    ],
)
def test_what_is_refused_is_named(served: Served, fields: dict[str, Any], param: str, says: str, stream: bool) -> None:
    answer = served.http.post("/v1/responses", json={"model": "fake", "input": "x", "stream": stream, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert says in error["message"]
