"""What clients ask an answer to look like, and what is wrong with it: each refusal names its field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from baton.common.engine.fake_model import fake_vocabulary
from baton.common.engine.guiding import Guides
from baton.common.errors import ErrorCode, RequestError
from baton.common.messages import MAX_GRAMMAR_CHARS, Grammar
from baton.deploy.guided_api import Asked, check_grammar, grammar_asked
from baton.deploy.openai_api import ChatRequest, CompletionRequest, parse_request

OBJECT = {"type": "object"}


def asked(**fields: Any) -> Asked | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return grammar_asked(parse_request(ChatRequest, json.dumps(body).encode()))


def refused(**fields: Any) -> RequestError:
    """At the door, or when it is compiled."""

    def ask() -> None:
        found = asked(**fields)
        assert found is not None
        asyncio.run(check_grammar(Guides(fake_vocabulary), found))

    with pytest.raises(RequestError) as caught:
        ask()
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert len(caught.value.message) < 700
    return caught.value


def format_of(schema: object, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


@pytest.mark.parametrize(
    ("fields", "field", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", "json_schema", OBJECT),
        ({"response_format": format_of(OBJECT)}, "response_format.json_schema.schema", "json_schema", OBJECT),
        (
            {"response_format": format_of(OBJECT, strict=True)},
            "response_format.json_schema.schema",
            "json_schema",
            OBJECT,
        ),
        ({"structured_outputs": {"json": OBJECT}}, "structured_outputs.json", "json_schema", OBJECT),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", "json_schema", OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice", "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": "start: A"}}, "structured_outputs.grammar", "ebnf", "start: A"),
        ({"guided_json": OBJECT}, "guided_json", "json_schema", OBJECT),
        ({"guided_json": json.dumps(OBJECT)}, "guided_json", "json_schema", OBJECT),
        ({"guided_regex": "a+"}, "guided_regex", "regex", "a+"),
        ({"guided_choice": ["a"]}, "guided_choice", "choice", ["a"]),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "ebnf", "root ::= x"),
    ],
)
def test_every_way_to_ask_is_one_grammar(fields: dict[str, Any], field: str, kind: str, text: object) -> None:
    found = asked(**fields)
    assert found is not None
    assert (found.field, found.grammar.kind) == (field, kind)
    assert (found.grammar.text if isinstance(text, str) else json.loads(found.grammar.text)) == text


def test_the_order_of_properties_is_kept() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}, "m": {}}}
    found = asked(guided_json=schema)
    assert found is not None
    assert list(json.loads(found.grammar.text)["properties"]) == ["z", "a", "m"]


def test_what_asks_for_nothing_is_no_grammar() -> None:
    assert asked() is None
    assert asked(response_format=None, guided_json=None, structured_outputs=None) is None
    assert asked(response_format={"type": "text"}) is None


def test_completions_can_be_guided_too() -> None:
    request = parse_request(CompletionRequest, b'{"model": "m", "prompt": "x", "guided_regex": "a"}')
    assert grammar_asked(request) == Asked("guided_regex", Grammar(kind="regex", text="a"))


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
            "response_format.json_schema",
            "needs type",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "required",
        ),
        ({"response_format": format_of([])}, "response_format.json_schema.schema", "object"),
        ({"response_format": format_of({"type": "objct"})}, "response_format.json_schema.schema", "objct"),
        ({"response_format": format_of({"$ref": "#/nowhere"})}, "response_format.json_schema.schema", "nowhere"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "response_format is given"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "regex is given too"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "regexp"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "neither"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length >= 1"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "str"),
        ({"guided_json": "3"}, "guided_json", "neither"),
        ({"guided_json": {"type": "string", "pattern": "("}}, "guided_json", "unclosed group"),
        ({"guided_regex": "a("}, "guided_regex", "unclosed"),
        ({"guided_regex": ""}, "guided_regex", "length >= 1"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex", "the limit is 65536"),
        ({"guided_choice": ["x"] * 1025}, "guided_choice", "<= 1024"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ends where that does"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], field: str, says: str) -> None:
    error = refused(**fields)
    assert error.field == field, error
    assert says in error.message
