"""Sessions of the real `openai` package with a running gateway, and what both said, compared with what they said when
it was written down (`tests/data/openai_sessions`): a change of the wire format is a difference in these files.

`make sessions` writes them anew. The decode worker is played by the test.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from http_loopback import Loopback, Served, saying, serving
from session_recorder import Recorder

from baton.common.engine.fake_runner import fake_answer
from baton.common.messages import Submit, unpack_tokens

FOLDER = Path(__file__).parents[1] / "data" / "openai_sessions"
MAX_MODEL_LEN = 4096
TEXT = "Hello wörld €😀!"
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
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
FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it warm?"}]
USAGE: Any = {"stream": True, "stream_options": {"include_usage": True}}
MODEL: Any = {"model": "fake"}


class Weather(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]


def by_what_is_asked(submit: Submit) -> tuple[list[int], str]:
    """Draws where there is a grammar, calls where the prompt tells of tools, and else says a text."""
    prompt = bytes(token for token in unpack_tokens(submit.prompt).tolist() if token < 256).decode()
    if submit.sampling.grammar is not None:
        answer = fake_answer(unpack_tokens(submit.prompt), submit.sampling, MAX_MODEL_LEN)
        return list(answer.tokens), answer.finish_reason
    return saying(CALLS if "<tools>" in prompt else TEXT)(submit)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Loopback(script=by_what_is_asked), max_model_len=MAX_MODEL_LEN) as served:
        yield served


@pytest.fixture
def recorder(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    """Compares what was said when the test is over."""
    recorder = Recorder()
    yield recorder
    file = FOLDER / f"{request.node.name.removeprefix('test_')}.txt"
    if request.config.getoption("--record-sessions"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(recorder.told())
    assert recorder.told() == file.read_text(), f"{file.name} says otherwise: `make sessions` writes it anew"


def client_of(served: Served, recorder: Recorder, **options: Any) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(transport=recorder.sync())
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="mine", http_client=http, **{"max_retries": 0, **options})


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_chat(served: Served, recorder: Recorder) -> None:
    client = client_of(served, recorder)
    whole = client.chat.completions.create(**MODEL, messages=CHAT, temperature=0, seed=7, user="me")
    assert whole.choices[0].message.content == TEXT
    assert text_of(list(client.chat.completions.create(**MODEL, messages=CHAT, **USAGE))) == TEXT
    several = client.chat.completions.create(**MODEL, messages=CHAT, n=2, max_completion_tokens=5, stop=["wör", "x"])
    assert [choice.finish_reason for choice in several.choices] == ["length"] * 2
    stopped = client.chat.completions.create(**MODEL, messages=CHAT, stop="wör")
    assert stopped.choices[0].message.content == "Hello "
    scored = client.chat.completions.create(**MODEL, messages=CHAT, logprobs=True, top_logprobs=2, max_tokens=2)
    assert scored.choices[0].logprobs is not None
    list(client.chat.completions.create(**MODEL, messages=CHAT, logprobs=True, max_tokens=2, stream=True))
    prompt = client.chat.completions.create(**MODEL, messages=CHAT[1:], max_tokens=1, extra_body={"prompt_logprobs": 1})
    assert prompt.to_dict()["prompt_logprobs"]


def test_completions(served: Served, recorder: Recorder) -> None:
    """By the asynchronous client."""

    async def ask() -> None:
        http = openai.DefaultAsyncHttpxClient(transport=recorder.asynchronous())
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="mine", http_client=http) as client:
            create = client.completions.create
            whole = await create(**MODEL, prompt="Once", max_tokens=100)
            assert whole.choices[0].text == TEXT
            assert len((await create(**MODEL, prompt=["a", "b"], n=2, max_tokens=3)).choices) == 4
            await create(**MODEL, prompt=[72, 105], max_tokens=2, logprobs=1, echo=True)
            stream = await create(**MODEL, prompt="Once", max_tokens=100, **USAGE)
            assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == TEXT

    asyncio.run(ask())


def test_tools(served: Served, recorder: Recorder) -> None:
    client = client_of(served, recorder)
    message = client.chat.completions.create(**MODEL, messages=CHAT, tools=TOOLS).choices[0].message
    calls = message.tool_calls or []
    assert [call.function.name for call in calls if call.type == "function"] == ["weather", "now"]
    list(client.chat.completions.create(**MODEL, messages=CHAT, tools=TOOLS, stream=True))
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "warm"} for call in calls]
    client.chat.completions.create(**MODEL, messages=[*CHAT, message, *answers], tools=TOOLS, tool_choice="none")
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    made = client.chat.completions.create(**MODEL, messages=CHAT, tools=TOOLS, tool_choice=forced, seed=1)
    assert made.choices[0].finish_reason == "tool_calls"


def test_json_schema(served: Served, recorder: Recorder) -> None:
    client = client_of(served, recorder)
    parsed = client.chat.completions.parse(**MODEL, messages=CHAT, response_format=Weather, seed=3)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    response = client.responses.parse(**MODEL, input="Where?", text_format=Weather, extra_body={"seed": 3})
    assert isinstance(response.output_parsed, Weather)


def test_responses(served: Served, recorder: Recorder) -> None:
    client = client_of(served, recorder)
    response = client.responses.create(
        **MODEL, input="hi", instructions="Be brief.", metadata={"run": "7"}, store=False, max_output_tokens=100
    )
    assert response.output_text == TEXT
    list(client.responses.create(**MODEL, input="hi", stream=True))
    given: list[Any] = [{"role": "user", "content": "Is it warm?"}]
    called = client.responses.create(**MODEL, input=given, tools=FLAT_TOOLS)
    given += [item.to_dict() for item in called.output]
    made = [item for item in called.output if item.type == "function_call"]
    given += [{"type": "function_call_output", "call_id": call.call_id, "output": "warm"} for call in made]
    list(client.responses.create(**MODEL, input=given, tools=FLAT_TOOLS, stream=True))
    cut = client.responses.create(**MODEL, input="hi", max_output_tokens=3)
    assert cut.status == "incomplete"


def test_files_and_batches(served: Served, recorder: Recorder) -> None:
    client = client_of(served, recorder)
    body = {"model": "fake", "prompt": "hi", "max_tokens": 3}
    lines = [
        {"custom_id": f"line-{n}", "method": "POST", "url": "/v1/completions", "body": {**body, **more}}
        for n, more in enumerate([{}, {"max_tokens": -1}])
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    give_up_s = time.monotonic() + 30
    while client.batches.retrieve(batch.id).status != "completed":
        assert time.monotonic() < give_up_s
    done = client.batches.retrieve(batch.id)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    for found in (done.output_file_id, done.error_file_id):
        assert found is not None
        client.files.content(found)
    assert client.files.retrieve(file.id).bytes == len(content)
    assert [one.id for one in client.batches.list()] == [batch.id]
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_models(served: Served, recorder: Recorder) -> None:
    client = client_of(served, recorder)
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").to_dict()["max_model_len"] == MAX_MODEL_LEN


def test_refusals(served: Served, recorder: Recorder) -> None:
    client = client_of(served, recorder)
    chat = client.chat.completions.create
    refused: list[tuple[type[openai.APIStatusError], Callable[[], object]]] = [
        (openai.BadRequestError, lambda: chat(**MODEL, messages=[])),
        (openai.BadRequestError, lambda: chat(**MODEL, messages=CHAT, temperature=-1)),
        (openai.BadRequestError, lambda: chat(**MODEL, messages=CHAT, extra_body={"temprature": 1})),
        (openai.BadRequestError, lambda: chat(**MODEL, messages=CHAT, max_tokens=MAX_MODEL_LEN)),
        (openai.BadRequestError, lambda: chat(**MODEL, messages=CHAT, tools=TOOLS[:1] * 2)),
        (openai.NotFoundError, lambda: chat(model="other", messages=CHAT)),
        (openai.NotFoundError, lambda: client.models.retrieve("other")),
        (openai.NotFoundError, lambda: client.embeddings.create(**MODEL, input="x")),
        (openai.BadRequestError, lambda: client.responses.create(**MODEL, input="x", previous_response_id="resp_1")),
        (openai.NotFoundError, lambda: client.batches.retrieve("batch_x")),
    ]
    for kind, ask in refused:
        with pytest.raises(kind) as caught:
            ask()
        assert type(caught.value) is kind
        assert caught.value.code


def test_failures(recorder: Recorder) -> None:
    """Nobody is there; no answer in time; a failure before the first token, and behind it."""
    with serving(members=False) as nobody:
        with pytest.raises(openai.InternalServerError) as caught:
            client_of(nobody, recorder).completions.create(**MODEL, prompt="x")
        assert caught.value.status_code == 503
    with serving(Loopback(silent=True)) as silent:
        with pytest.raises(openai.InternalServerError) as caught:
            client_of(silent, recorder).completions.create(**MODEL, prompt="x", extra_body={"timeout_s": 0.05})
        assert caught.value.status_code == 504
    early = pytest.raises(openai.InternalServerError)
    with serving(Loopback(script=saying(TEXT), failure_after=0)) as failing, early:
        client_of(failing, recorder).completions.create(**MODEL, prompt="x", stream=True)
    with serving(Loopback(script=saying(TEXT), failure_after=3)) as failing, pytest.raises(openai.APIError) as late:
        list(client_of(failing, recorder).completions.create(**MODEL, prompt="x", stream=True))
    assert late.value.code == "transfer_corrupt"


def test_a_full_gateway(recorder: Recorder) -> None:
    """The package comes again when it is told to."""
    worker = Loopback(script=saying(TEXT), pace_s=0.05)
    with serving(worker, max_inflight_requests=1) as served:
        streaming = openai.OpenAI(base_url=f"{served.url}/v1", api_key="mine").completions
        with streaming.create(**MODEL, prompt="x", max_tokens=6, stream=True) as stream:
            next(iter(stream))
            client = client_of(served, recorder, max_retries=1)
            assert client.completions.create(**MODEL, prompt="x", max_tokens=2).choices[0].text == "He"
        assert [exchange.response.status_code for exchange in recorder.exchanges] == [429, 200]
