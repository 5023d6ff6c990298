"""How clients say what an answer must look like, as typed values, and the one grammar that it amounts to. Pure.

Owns: the shapes of OpenAI's `response_format` and of vLLM's `structured_outputs` and `guided_*`. Never: compiles; what
is wrong inside of a schema or a grammar is found by whoever does (`check_grammar`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta, Struct

from baton.common.engine.guiding import Guides
from baton.common.messages import MAX_GRAMMAR_CHARS, Grammar
from baton.deploy.json_bodies import refusal

MAX_CHOICES_OF_TEXT = 1024

Schema = dict[str, Any]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES_OF_TEXT)]
GrammarText = Annotated[str, Meta(min_length=1)]


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`strict` changes nothing: every answer follows its schema. Neither do a name and a description."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of them."""

    json: Schema | str | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class Guidable(Protocol):
    """What requests that can be guided share. None is "not given"; at most one thing is."""

    @property
    def ignore_eos(self) -> bool | None: ...

    @property
    def response_format(self) -> ResponseFormat | None: ...

    @property
    def structured_outputs(self) -> StructuredOutputs | None: ...

    @property
    def guided_json(self) -> Schema | str | None: ...

    @property
    def guided_regex(self) -> str | None: ...

    @property
    def guided_choice(self) -> list[str] | None: ...

    @property
    def guided_grammar(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A grammar, and the field that asks for it."""

    field: str
    grammar: Grammar


def grammar_asked(request: Guidable) -> Asked | None:
    """Raises RequestError INVALID_REQUEST."""
    found = [
        *_of_format(request.response_format),
        *_of_structured("structured_outputs", request.structured_outputs),
        *_of_schema("guided_json", request.guided_json),
        *_of_text("guided_regex", "regex", request.guided_regex),
        *_of_choices("guided_choice", request.guided_choice),
        *_of_text("guided_grammar", "ebnf", request.guided_grammar),
    ]
    if len(found) > 1:
        raise refusal(found[1].field, f"{found[0].field} is given too, and an answer follows one grammar")
    if found and request.ignore_eos:
        raise refusal("ignore_eos", "an answer that follows a grammar ends where that does")
    return found[0] if found else None


async def check_grammar(guides: Guides, asked: Asked) -> None:
    """Compiles it, beside the loop. Raises RequestError INVALID_REQUEST that says what is wrong with it."""
    if guides.knows(asked.grammar):
        wrong = guides.explain(asked.grammar)
    else:
        wrong = await asyncio.to_thread(guides.explain, asked.grammar)
    if wrong:
        raise refusal(asked.field, wrong)


def schema_asked(field: str, schema: Schema) -> Asked:
    return _asked(field, "json_schema", msgspec.json.encode(schema).decode())


def _of_format(given: ResponseFormat | None) -> list[Asked]:
    if given is None or given.type == "text":
        if given is not None and given.json_schema is not None:
            raise refusal("response_format.json_schema", 'needs type: "json_schema"')
        return []
    if given.type == "json_object":
        return [schema_asked("response_format", {"type": "object"})]
    if given.json_schema is None:
        raise refusal("response_format.json_schema", "required")
    return [schema_asked("response_format.json_schema.schema", given.json_schema.schema)]


def _of_structured(field: str, given: StructuredOutputs | None) -> list[Asked]:
    if given is None:
        return []
    found = [
        *_of_schema(f"{field}.json", given.json),
        *_of_text(f"{field}.regex", "regex", given.regex),
        *_of_choices(f"{field}.choice", given.choice),
        *_of_text(f"{field}.grammar", "ebnf", given.grammar),
        *([schema_asked(f"{field}.json_object", {"type": "object"})] if given.json_object else []),
    ]
    if not found:
        raise refusal(field, "needs one of json, regex, choice, grammar, json_object")
    return found


def _of_schema(field: str, given: Schema | str | None) -> list[Asked]:
    if given is None:
        return []
    if isinstance(given, dict):
        return [schema_asked(field, given)]
    try:
        schema = msgspec.json.decode(given, type=Schema)
    except msgspec.DecodeError as error:
        raise refusal(field, f"is neither a JSON schema nor the text of one: {error}") from error
    return [schema_asked(field, schema)]


def _of_choices(field: str, given: list[str] | None) -> list[Asked]:
    return [] if given is None else [_asked(field, "choice", msgspec.json.encode(given).decode())]


def _of_text(field: str, kind: Literal["regex", "ebnf"], given: str | None) -> list[Asked]:
    return [] if given is None else [_asked(field, kind, given)]


def _asked(field: str, kind: Literal["json_schema", "regex", "choice", "ebnf", "lark"], text: str) -> Asked:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise refusal(field, f"has {len(text)} characters; the limit is {MAX_GRAMMAR_CHARS}")
    return Asked(field, Grammar(kind=kind, text=text))
