"""`/v1/responses`: what it answers, as typed values. Pure. (What it accepts: `responses_api.py`.)

Owns: the shapes of a response, its items and its events, and what a response says when it is completed, cut off or
failed. Never: decides the order of the events (`responses_output.py`).
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType

from baton.common.errors import RequestError
from baton.deploy.openai_replies import BatonExtension, Usage
from baton.deploy.responses_api import ChosenFunctionTool, FunctionTool, ResponsesRequest


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


class OutputCall(Struct, frozen=True, kw_only=True):
    """Of a function. `call_id` is what its result is given back under."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str
    type: str = "function_call"


OutputItem = OutputMessage | OutputCall


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
    output: tuple[OutputItem, ...] = ()
    usage: ResponseUsage | None = None
    incomplete_details: Incomplete | None = None
    error: Failed | None = None
    object: str = "response"
    parallel_tool_calls: bool = True
    tool_choice: str | ChosenFunctionTool = "auto"
    tools: tuple[FunctionTool, ...] = ()
    metadata: dict[str, str] = {}
    previous_response_id: None = None
    store: bool = False
    truncation: str = "disabled"
    baton: BatonExtension | UnsetType = UNSET

    def ended(
        self, output: tuple[OutputItem, ...], status: str, usage: Usage, extension: BatonExtension
    ) -> ResponseObject:
        """With all that was said: completed, or incomplete because there was no room for more."""
        return msgspec.structs.replace(
            self,
            status=status,
            output=output,
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
        parallel_tool_calls=request.parallel_tool_calls is not False,
        tool_choice=request.tool_choice or "auto",
        tools=tuple(request.tools or ()),
        metadata=request.metadata or {},
    )


# ------------------------------------------------------------------------------------------------- events


class _Event(Struct, frozen=True, kw_only=True):
    type: str
    sequence_number: int


class ResponseEvent(_Event, frozen=True, kw_only=True):
    """It is created, in progress, or over."""

    response: ResponseObject


class ItemEvent(_Event, frozen=True, kw_only=True):
    """A message or a call begins or is whole."""

    item: OutputItem
    output_index: int


class _TextEvent(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int
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


class ArgumentsDeltaEvent(_Event, frozen=True, kw_only=True):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsEvent(_Event, frozen=True, kw_only=True):
    """All of them."""

    item_id: str
    output_index: int
    name: str
    arguments: str


ResponseStreamEvent = (
    ResponseEvent | ItemEvent | PartEvent | DeltaEvent | TextEvent | ArgumentsDeltaEvent | ArgumentsEvent
)


def response_event(event: ResponseStreamEvent) -> bytes:
    """As a server-sent event, which has a name here."""
    return b"event: " + event.type.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
