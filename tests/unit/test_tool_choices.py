"""What `tools` and `tool_choice` amount to, and conversations with calls in them: each refusal names its field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from baton.common.engine.fake_model import fake_vocabulary
from baton.common.engine.guiding import Guides
from baton.common.errors import ErrorCode, RequestError
from baton.deploy.chat_messages import conversation
from baton.deploy.guided_api import check_grammar
from baton.deploy.openai_api import ChatRequest, parse_request
from baton.deploy.openai_replies import encode
from baton.deploy.tool_choices import Calling, PlainWriter, calling_asked, told
from baton.deploy.tool_formats import FORMATS

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = {"role": "user", "content": "Rome?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def tool(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def calling(**fields: Any) -> Calling | None:
    return calling_asked(chat(**fields), FORMATS["hermes"])


def refused(**fields: Any) -> RequestError:
    """At the door, or when its schemas are compiled."""

    def ask() -> None:
        found = calling(**fields)
        for asked in () if found is None else found.guided:
            asyncio.run(check_grammar(Guides(fake_vocabulary), asked))

    with pytest.raises(RequestError) as caught:
        ask()
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    return caught.value


def test_an_answer_without_tools_calls_nothing() -> None:
    for fields in (
        {},
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tools": [tool()], "tool_choice": "none"},
    ):
        assert calling(**fields) is None


def test_auto_is_free_unless_a_tool_is_strict() -> None:
    free = calling(tools=[tool(parameters=CITY), tool("now")])
    assert free is not None
    assert (free.asked, free.guided, free.parallel) == (None, (), True)
    assert [one.function.name for one in free.tools] == ["weather", "now"]
    strict = calling(tools=[tool("now"), tool(parameters=CITY, strict=True)], tool_choice="auto")
    assert strict is not None
    assert strict.asked is not None
    assert [asked.field for asked in strict.guided] == ["tools[1].function.parameters"]


def test_required_and_named_choices_are_grammars() -> None:
    tools = [tool(parameters=CITY), tool("now")]
    required = calling(tools=tools, tool_choice="required", parallel_tool_calls=False)
    named = calling(tools=tools, tool_choice={"type": "function", "function": {"name": "now"}})
    assert required is not None
    assert required.asked is not None
    assert named is not None
    assert named.asked is not None
    assert not required.parallel
    assert "weather" in required.asked.grammar.text
    assert "weather" not in named.asked.grammar.text
    assert [asked.field for asked in named.guided] == ["tools[1].function.parameters"]
    for one in (required.asked, named.asked):
        assert Guides(fake_vocabulary).explain(one.grammar) == ""


def message(role: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, **fields}


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"type": "retrieval", "function": {"name": "x"}}]}, "tools[0].type", "function"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "matching regex"),
        ({"tools": [tool(), tool("x"), tool()]}, "tools[2].function.name", "there twice"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "object"),
        (
            {"tools": [tool(), tool("x", parameters={"type": "objct"})], "tool_choice": "required"},
            "tools[1].function.parameters",
            "objct",
        ),
        ({"tools": [tool(parameters={"type": "objct"}, strict=True)]}, "tools[0].function.parameters", "objct"),
        ({"tools": [tool(description="x" * 5, extra=1)]}, "tools[0].function", "extra"),
        ({"tools": [tool(str(n)) for n in range(129)]}, "tools", "<= 128"),
        (
            {
                "tools": [tool(str(n), parameters=CITY, description="x" * 600) for n in range(128)],
                "tool_choice": "required",
            },
            "",
            "",
        ),
        (
            {"tools": [tool(parameters={"enum": ["x" * 70000]})], "tool_choice": "required"},
            "tools",
            "the limit is 65536",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "any"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            "'x'",
        ),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", "bool"),
        ({"messages": [USER, message("assistant")]}, "messages[1].content", "required"),
        ({"messages": [message("user", tool_calls=[CALL])]}, "messages[0].tool_calls", "only an assistant"),
        ({"messages": [message("tool", content="x")]}, "messages[0].tool_call_id", "belongs"),
        ({"messages": [message("user", content="x", tool_call_id="1")]}, "messages[0].tool_call_id", "belongs"),
        (
            {"messages": [message("assistant", tool_calls=[{**CALL, "function": {"name": "x", "arguments": "[1]"}}])]},
            "messages[0].tool_calls[0].function.arguments",
            "JSON object",
        ),
        (
            {"messages": [message("assistant", tool_calls=[{**CALL, "function": {"name": "x", "arguments": "{"}}])]},
            "messages[0].tool_calls[0].function.arguments",
            "JSON object",
        ),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], field: str, says: str) -> None:
    if not field:
        assert calling(**fields) is not None
        return
    error = refused(**fields)
    assert error.field == field, error
    assert says in error.message


def test_calls_and_their_answers_are_a_part_of_a_conversation() -> None:
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}
    request = chat(messages=[USER, answer, message("tool", tool_call_id="call_1", content="sunny")])
    _, called, answered = conversation(request.messages)
    assert called == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
        ],
    }
    assert answered == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}


def test_an_answer_in_pieces_and_as_a_whole() -> None:
    found = calling(tools=[tool(parameters=CITY), tool("now")])
    assert found is not None
    writer = found.writer()
    calls = [
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}}',
    ]
    deltas = [*writer.push("I look. "), *(delta for call in calls for delta in writer.push(call)), *writer.finish()]
    assert writer.called == 2
    shown = [json.loads(encode(delta)) for delta in deltas]
    assert shown[0] == {"content": "I look. "}
    begun = shown[1]["tool_calls"][0]
    assert begun.pop("id").startswith("call_")
    assert begun == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert shown[2] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Rome"}'}}]}
    assert shown[3]["tool_calls"][0]["index"] == 1
    text, made = told(deltas)
    assert text == "I look. "
    assert [(one.function.name, one.function.arguments) for one in made] == [
        ("weather", '{"city": "Rome"}'),
        ("now", "{}"),
    ]
    assert len({one.id for one in made}) == 2


def test_who_wants_one_call_gets_one() -> None:
    found = calling(tools=[tool(parameters=CITY)], parallel_tool_calls=False)
    assert found is not None
    writer = found.writer()
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    text, made = told([*writer.push(call * 3), *writer.finish()])
    assert (text, len(made)) == ("", 1)


def test_text_that_calls_nothing_passes() -> None:
    writer = PlainWriter()
    assert told([*writer.push("<tool_call>"), *writer.push(""), *writer.push("x"), *writer.finish()]) == (
        "<tool_call>x",
        [],
    )
    assert not writer.called
