"""Calls of tools as the client has them. The decode worker is played by the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from http_loopback import Loopback, Served, saying, serving

from baton.client import Client, Message, ToolCall

MAX_MODEL_LEN = 4096
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
ASKED: list[Message] = [{"role": "user", "content": "Is it warm?"}]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
BOTH = [("weather", '{"city": "Rome"}'), ("now", "{}")]


def served(text: str) -> Any:
    return serving(Loopback(script=saying(text)), max_model_len=MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def talker() -> Iterator[Served]:
    with served(f"I look.\n{ROME}\n{NOW}") as one:
        yield one


def named(calls: tuple[ToolCall, ...]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in calls]


def test_the_calls_of_an_answer_are_in_it_streamed_or_of_a_job(talker: Served) -> None:
    with Client(talker.url) as client:
        with client.stream(ASKED, tools=TOOLS) as stream:
            said = "".join(stream)
        for answer in (stream.answer, client.submit(ASKED, tools=TOOLS).result(timeout_s=30)):
            assert named(answer.tool_calls) == BOTH
            assert len({call.id for call in answer.tool_calls} - {""}) == 2
            assert answer.finish_reason == "tool_calls"
            assert answer.text.strip() == said.strip() == "I look."
        one = client.chat(ASKED, tools=TOOLS, parallel_tool_calls=False)
        assert named(one.tool_calls) == BOTH[:1]
        assert client.chat(ASKED, tools=TOOLS, tool_choice="none").tool_calls == ()


def test_a_conversation_goes_on_with_the_message_of_an_answer(talker: Served) -> None:
    with Client(talker.url) as client:
        answer = client.chat(ASKED, tools=TOOLS)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "31"} for call in answer.tool_calls]
        again = client.chat([*ASKED, answer.message, *results], tools=TOOLS)
        assert again.prompt_tokens > answer.prompt_tokens
        text = client.chat("Hello.")
        assert text.message == {"role": "assistant", "content": text.text}
        client.chat([*ASKED, text.message, *ASKED])
