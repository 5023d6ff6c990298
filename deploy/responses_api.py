"""`/v1/responses` for texts and calls of functions: what it accepts, as typed values. Pure. (What it answers:
`responses_replies.py`.)

Owns: the shapes. Never: generates; an answer is that of the chat which the input amounts to (`as_chat`). Nothing is
stored, so there is no `previous_response_id`: a conversation is sent whole, and its KV is kept by sessions.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from baton.common.errors import RequestError
from baton.deploy.chat_messages import (
    MAX_TOOLS,
    CalledFunction,
    ChatMessage,
    ChosenFunction,
    ChosenTool,
    Function,
    FunctionName,
    Schema,
    Tool,
    ToolCall,
    ToolChoice,
    parse_arguments,
)
from baton.deploy.guided_api import JsonSchema, ResponseFormat
from baton.deploy.json_bodies import decode_object, parse_fields, refusal
from baton.deploy.openai_api import ChatRequest, Sampled, TokenCount

_NEUTRAL = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_key": (),
    "reasoning": ({},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_STORED = {
    "previous_response_id": "nothing is stored here: send the conversation in `input`",
    "conversation": "nothing is stored here: send the conversation in `input`",
    "store": "nothing is stored here: leave it out, or send false",
}

Nothing = Annotated[list[int], Meta(max_length=0)]


class InputPart(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Text of a message; of an answer, too, as it was given."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Nothing | None = None
    logprobs: Nothing | None = None


class InputItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A message (`role`, `content`), a call that an answer made (`call_id`, `name`, `arguments`), or what came of it
    (`call_id`, `output`)."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    id: str | None = None  # of an answer; changes nothing
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    def check(self, field: str) -> None:
        """Raises RequestError when it has not what its type has, and nothing else."""
        own = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }
        for name in ("role", "content", "call_id", "name", "arguments", "output"):
            given = getattr(self, name) is not None
            if given != (name in own[self.type]):
                raise refusal(f"{field}.{name}", f"no part of a {self.type}" if given else "required")
        if self.arguments is not None:
            parse_arguments(self.arguments, f"{field}.arguments")

    def add_to(self, messages: list[ChatMessage]) -> None:
        """To a chat that nobody else has. Calls that follow one another, or a text, are one message with it."""
        if self.type == "message":
            assert self.role is not None
            messages.append(ChatMessage(role=self.role, content=_text(self.content)))
            return
        if self.type == "function_call_output":
            messages.append(ChatMessage(role="tool", content=_text(self.output), tool_call_id=self.call_id))
            return
        called = CalledFunction(name=self.name or "", arguments=self.arguments or "")
        call = ToolCall(id=self.call_id or "", function=called)
        last = messages[-1] if messages else None
        if last is None or last.role != "assistant":
            messages.append(ChatMessage(role="assistant", tool_calls=[call]))
        elif last.tool_calls is None:
            messages[-1] = structs.replace(last, tool_calls=[call])
        else:
            last.tool_calls.append(call)


def _text(content: str | list[InputPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`response_format`, as this endpoint writes it."""

    type: Literal["text", "json_object", "json_schema"]
    schema: Schema | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def as_chat(self) -> ResponseFormat:
        if self.type != "json_schema" and self.schema is not None:
            raise refusal("text.format.schema", 'needs type: "json_schema"')
        given = None if self.schema is None else JsonSchema(schema=self.schema)
        return ResponseFormat(type=self.type, json_schema=given)


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat | None = None


class FunctionTool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """As in chats, but flat. A response says it again."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    def as_chat(self) -> Tool:
        function = Function(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return Tool(function=function)


class ChosenFunctionTool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: str


class ResponsesRequest(Sampled, frozen=True, forbid_unknown_fields=True, kw_only=True):
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None  # labels; they change nothing

    def as_chat(self) -> ChatRequest:
        """The instructions as a system message, then the input. Raises RequestError."""
        messages = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            messages.append(ChatMessage(role="user", content=self.input))
        else:
            for at, item in enumerate(self.input):
                item.check(f"input[{at}]")
                item.add_to(messages)
        shared = {name: getattr(self, name) for name in Sampled.__struct_fields__}
        return ChatRequest(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            response_format=self.text.format.as_chat() if self.text is not None and self.text.format else None,
            tools=None if self.tools is None else [tool.as_chat() for tool in self.tools],
            tool_choice=self._choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            **shared,
        )

    def _choice(self) -> ToolChoice | None:
        if not isinstance(self.tool_choice, ChosenFunctionTool):
            return self.tool_choice
        return ChosenTool(function=ChosenFunction(name=self.tool_choice.name))


def parse_responses_request(body: bytes) -> ResponsesRequest:
    """The request, or RequestError INVALID_REQUEST that names the parameter and what is wrong with it."""
    fields = decode_object(body)
    for name, reason in _STORED.items():
        if fields.get(name) not in (None, False):
            raise refusal(name, f"not supported by Baton: {reason}")
    return parse_fields(ResponsesRequest, fields, _NEUTRAL)


def renamed(error: RequestError) -> RequestError:
    """An error about the chat, as one about the response that it stands for."""
    names = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format.schema",
        "response_format.json_schema.schema": "text.format.schema",
        "tool_choice.function.name": "tool_choice.name",
    }
    field = names.get(error.field or "", error.field)
    if field is not None:
        field = re.sub(r"^(tools\[\d+\])\.function\.", r"\1.", field)
    return RequestError(error.code, error.message, field, error.retry_after_s)
