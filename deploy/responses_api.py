"""`/v1/responses` for texts: what it accepts and what it answers, as typed values. Pure.

Owns: the shapes, and what a response says when it is completed, cut off or failed. Never: generates; an answer is that
of the chat which the input amounts to (`as_chat`). Nothing is stored, so there is no `previous_response_id`: a
conversation's KV is kept by sessions.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from baton.common.errors import RequestError
from baton.deploy.chat_messages import ChatMessage
from baton.deploy.guided_api import JsonSchema, ResponseFormat, Schema
from baton.deploy.json_bodies import parse, refusal
from baton.deploy.openai_api import ChatRequest, Sampled, TokenCount
from baton.deploy.openai_replies import BatonExtension, Usage

_NEUTRAL = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "metadata": ({},),
    "parallel_tool_calls": (True, False),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_key": (),
    "reasoning": ({},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}

Nothing = Annotated[list[int], Meta(max_length=0)]


class InputPart(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Text of a message; of an answer, too, as it was given."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Nothing | None = None
    logprobs: Nothing | None = None


class InputMessage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    type: Literal["message"] = "message"
    id: str | None = None  # of an answer; changes nothing
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    def as_chat(self) -> ChatMessage:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return ChatMessage(role=self.role, content=text)


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


class ResponsesRequest(Sampled, frozen=True, forbid_unknown_fields=True, kw_only=True):
    input: str | Annotated[list[InputMessage], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    text: TextOptions | None = None

    def as_chat(self) -> ChatRequest:
        """The instructions as a system message, then the input."""
        messages = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            messages.append(ChatMessage(role="user", content=self.input))
        else:
            messages += [message.as_chat() for message in self.input]
        shared = {name: getattr(self, name) for name in Sampled.__struct_fields__}
        form = self.text.format.as_chat() if self.text is not None and self.text.format is not None else None
        return ChatRequest(
            messages=messages, max_completion_tokens=self.max_output_tokens, response_format=form, **shared
        )


def parse_responses_request(body: bytes) -> ResponsesRequest:
    """The request, or RequestError INVALID_REQUEST that names the parameter and what is wrong with it."""
    return parse(ResponsesRequest, body, _NEUTRAL)


def renamed(error: RequestError) -> RequestError:
    """An error about the chat, as one about the response that it stands for."""
    names = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format.schema",
        "response_format.json_schema.schema": "text.format.schema",
    }
    field = names.get(error.field or "", error.field)
    return RequestError(error.code, error.message, field, error.retry_after_s)


# ------------------------------------------------------------------------------------------------ replies


class OutputText(Struct, frozen=True, kw_only=True):
    text: str
    type: str = "output_text"
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class OutputMessage(Struct, frozen=True, kw_only=True):
    id: str
    status: str
    content: tuple[OutputText, ...]
    type: str = "message"
    role: str = "assistant"


class InputDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int


class OutputDetails(Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails = OutputDetails()


class Incomplete(Struct, frozen=True, kw_only=True):
    reason: str


class Failed(Struct, frozen=True, kw_only=True):
    code: str
    message: str


class ResponseObject(Struct, frozen=True, kw_only=True):
    """What a client asked for, and how far it is answered."""

    id: str
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    user: str | None
    status: str = "in_progress"  # "completed" | "incomplete" | "failed"
    output: tuple[OutputMessage, ...] = ()
    usage: ResponseUsage | None = None
    incomplete_details: Incomplete | None = None
    error: Failed | None = None
    object: str = "response"
    parallel_tool_calls: bool = False
    tool_choice: str = "none"
    tools: tuple[()] = ()
    metadata: dict[str, str] = {}
    previous_response_id: None = None
    store: bool = False
    truncation: str = "disabled"
    baton: BatonExtension | UnsetType = UNSET

    @property
    def message_id(self) -> str:
        return self.id.replace("resp", "msg", 1)

    def message(self, text: str, status: str = "completed") -> OutputMessage:
        return OutputMessage(id=self.message_id, status=status, content=(OutputText(text=text),))

    def ended(self, text: str, finish_reason: str, usage: Usage, extension: BatonExtension) -> ResponseObject:
        """With its whole text: completed, or cut off because there was no room for more."""
        status = "incomplete" if finish_reason == "length" else "completed"
        return msgspec.structs.replace(
            self,
            status=status,
            output=(self.message(text, status),),
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
                input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            ),
            incomplete_details=Incomplete(reason="max_output_tokens") if status == "incomplete" else None,
            baton=extension,
        )

    def failed(self, error: RequestError) -> ResponseObject:
        return msgspec.structs.replace(self, status="failed", error=Failed(code=str(error.code), message=error.message))


def response_to(request: ResponsesRequest, request_id: str, created: int) -> ResponseObject:
    """Before anything is answered."""
    return ResponseObject(
        id=f"resp_{request_id}",
        created_at=created,
        model=request.model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
    )


# ------------------------------------------------------------------------------------------------- events


class _Event(Struct, frozen=True, kw_only=True):
    type: str
    sequence_number: int


class ResponseEvent(_Event, frozen=True, kw_only=True):
    """It is created, in progress, or over."""

    response: ResponseObject


class ItemEvent(_Event, frozen=True, kw_only=True):
    """A message begins or is whole."""

    item: OutputMessage
    output_index: int = 0


class _TextEvent(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int = 0
    content_index: int = 0


class PartEvent(_TextEvent, frozen=True, kw_only=True):
    """The text of a message begins or is whole."""

    part: OutputText


class DeltaEvent(_TextEvent, frozen=True, kw_only=True):
    """More of the text."""

    delta: str
    logprobs: tuple[()] = ()


class TextEvent(_TextEvent, frozen=True, kw_only=True):
    """All of the text."""

    text: str
    logprobs: tuple[()] = ()


ResponseStreamEvent = ResponseEvent | ItemEvent | PartEvent | DeltaEvent | TextEvent


def response_event(event: ResponseStreamEvent) -> bytes:
    """As a server-sent event, which has a name here."""
    return b"event: " + event.type.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
