"""Structured answers and calls of tools by the real model on a real cluster, through the real `openai` package: the
first token comes from a prefill worker, the others from a decode worker, which is killed in one of the tests.

A model as small as this one follows no instruction: what it says follows the grammar, and that is what is looked at.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from harness import kill, wait_clean

from baton.client import Client
from baton.common.config import ClusterConfig, GatewayConfig, KvConfig, LivenessConfig, ModelConfig
from baton.common.ids import WorkerId
from baton.deploy.launch import ClusterHandle, launch

pytestmark = [pytest.mark.ray, pytest.mark.model]

MODEL = "smollm2-135m-instruct"
ASK: list[Any] = [{"role": "user", "content": "Describe the city of Rome."}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "kelvin"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=30)
    country: Literal["Italy", "Norway"]
    population: int
    rivers: list[str] = pydantic.Field(max_length=2)


@pytest.fixture(scope="module")
def cluster(ray_session: str) -> Iterator[ClusterHandle]:
    config = ClusterConfig(
        cluster=f"guided-{os.getpid()}",
        decode=2,
        model=ModelConfig(model=MODEL, max_model_len=2048),
        kv=KvConfig(num_pages=1000),
        liveness=LivenessConfig(restart_backoff_s=0.1, dead_after_s=15.0),  # busy machine, nothing hangs here
        gateway=GatewayConfig(port=0),
    )
    handle = launch(config)
    try:
        yield handle
    finally:
        handle.shutdown()


@pytest.fixture
def client(cluster: ClusterHandle) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.gateway_url}/v1", api_key="unused", max_retries=0, timeout=120)


def test_parse_gives_a_model_of_pydantic(client: openai.OpenAI) -> None:
    for sampling in ({"temperature": 0}, {"temperature": 1.2, "top_p": 0.9, "frequency_penalty": 0.5, "seed": 3}):
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=ASK,
            response_format=City,
            max_tokens=400,
            **sampling,  # type: ignore[arg-type]
        )
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, City)
        timeline = answer.model_extra["baton"]["timeline"]  # type: ignore[index]
        assert timeline["transferred_tokens"] + timeline["cached_tokens"] > 0


def test_regular_expressions_choices_and_log_probabilities(client: openai.OpenAI) -> None:
    def ask(guided: dict[str, Any], **fields: Any) -> Any:
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, temperature=0, max_tokens=60, extra_body=guided, **fields
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0]

    dated = ask({"structured_outputs": {"regex": r"[A-Z][a-z]{2,9}, \d{4}-\d{2}-\d{2}"}}, logprobs=True)
    assert re.fullmatch(r"[A-Z][a-z]{2,9}, \d{4}-\d{2}-\d{2}", dated.message.content)
    assert "".join(entry.token for entry in dated.logprobs.content[:-1]) == dated.message.content
    assert all(entry.logprob <= 0 for entry in dated.logprobs.content)
    assert ask({"guided_choice": ["Rome", "Oslo, Norway"]}).message.content in ("Rome", "Oslo, Norway")
    barred = ask({"guided_choice": ["Rome", "Oslo, Norway"]}, stop=["slo"]).message.content
    assert barred in ("Rome", "O")


def test_tools_that_must_be_called(client: openai.OpenAI) -> None:
    def check(call: Any) -> None:
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather"
        assert set(arguments) == {"city", "unit"}
        assert arguments["unit"] in ("celsius", "kelvin")

    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 200,
    }
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    [call] = whole.message.tool_calls or ()
    check(call)
    with client.chat.completions.stream(**{key: fields[key] for key in fields}) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    [again] = streamed.message.tool_calls or ()
    assert again.function.arguments == call.function.arguments

    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=str(client.base_url), api_key="unused", timeout=120) as asking:
            return await asking.chat.completions.create(**{**fields, "tool_choice": named})

    named = {"type": "function", "function": {"name": "weather"}}
    [call] = asyncio.run(ask()).choices[0].message.tool_calls or ()
    check(call)
    answered = [*ASK, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny, 24 degrees"}]
    said = client.chat.completions.create(**{**fields, "messages": answered, "tool_choice": "auto", "max_tokens": 20})
    assert said.choices[0].finish_reason in ("stop", "length", "tool_calls")


@pytest.mark.slow  # test_parity moves a stream of this model, tests/unit/test_guided_cores.py a guided one
def test_a_guided_stream_survives_its_decode_worker(cluster: ClusterHandle) -> None:
    """Sampled and guided: nothing but grammar, seed and tokens goes to the other worker."""
    schema = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 6, "maxItems": 8}
    form = {"type": "json_schema", "json_schema": {"name": "words", "schema": schema}}
    with Client(cluster.gateway_url, timeout_s=300) as asking:

        def stream(kill_after: int) -> tuple[str, int]:
            with asking.stream(
                "Words:", max_tokens=300, temperature=0.9, top_p=0.95, seed=11, response_format=form
            ) as pieces:
                for count, _ in enumerate(pieces):
                    if count == kill_after:
                        victim = next(
                            member.stamp.worker
                            for member in cluster.status().members
                            if member.role == "decode" and member.load.running
                        )
                        assert kill(cluster, WorkerId(victim))
                return pieces.answer.text, pieces.answer.placements

        undisturbed, placements = stream(kill_after=-1)
        assert placements == 1
        assert 6 <= len(json.loads(undisturbed)) <= 8
        moved, placements = stream(kill_after=10)
        assert placements == 2
        assert moved == undisturbed
        wait_clean(cluster)
