"""The messages of a conversation and the tools that a model may call in it, as typed values. Pure.

Owns: OpenAI's shapes of both, and what chat templates want to see of them. Never: decides how a model writes its calls
(`tool_formats.py`), or which of them an answer must make (`tool_choices.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from baton.deploy.json_bodies import refusal

MAX_TOOLS = 128
MAX_CALLS = 128
"""In one message."""

_MESSAGE_CHARS = 16
"""What a template writes around one."""

Schema = dict[str, Any]
FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
TemplateMessage = dict[str, Any]
"""As chat templates read it: role, content, and of calls what OpenAI's shape has, but with parsed arguments."""


class TextPart(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: str


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """`refusal` is a part of the answers that clients give back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    refusal: None = None

    @property
    def text(self) -> str:
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def as_template_input(self, field: str) -> TemplateMessage:
        """As chat templates want it: "developer" is the newer name of "system"; text parts are joined. `field` is this
        message's, for what is wrong with it. Raises RequestError."""
        role = "system" if self.role == "developer" else self.role
        message: TemplateMessage = {"role": role, "content": self.text}
        if self.tool_calls and role != "assistant":
            raise refusal(f"{field}.tool_calls", "only an assistant calls tools")
        if self.content is None and not self.tool_calls:
            raise refusal(f"{field}.content", "required")
        if (self.tool_call_id is None) == (role == "tool"):
            raise refusal(f"{field}.tool_call_id", "belongs to messages of a tool, and to all of them")
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [_call_input(call, f"{field}.tool_calls[{at}]") for at, call in calls]
        return message


def parse_arguments(text: str, field: str) -> dict[str, Any]:
    """Of a call that was made. Raises RequestError."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise refusal(field, f"must be the text of a JSON object: {error}") from error


def _call_input(call: ToolCall, field: str) -> dict[str, Any]:
    arguments = parse_arguments(call.function.arguments, f"{field}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


class Function(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Without `parameters` it has none. `strict`: also where the model decides to call it, it writes arguments that
    follow the schema; where it must, it does in any case."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    @property
    def schema(self) -> Schema:
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return self.parameters


class Tool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    function: Function
    type: Literal["function"] = "function"

    def as_template_input(self) -> dict[str, Any]:
        described = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**described, "parameters": self.function.schema}}


class ChosenFunction(Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class ChosenTool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    function: ChosenFunction
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | ChosenTool
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


def conversation(messages: list[ChatMessage]) -> list[TemplateMessage]:
    """Raises RequestError."""
    return [message.as_template_input(f"messages[{at}]") for at, message in enumerate(messages)]


def chars_of(messages: list[ChatMessage], tools: Sequence[Tool] = ()) -> int:
    """About how much there is to tokenize."""
    calls = (call.function.arguments for message in messages for call in message.tool_calls or ())
    said = sum(len(message.text) + _MESSAGE_CHARS for message in messages) + sum(map(len, calls))
    return said + (len(msgspec.json.encode(tools)) if tools else 0)
