"""From a request to `/v1/responses` to its answer, whole or streamed.

Owns: the order of the events. Never: HTTP headers or status codes (`http_app.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from baton.common.errors import RequestError
from baton.deploy.gateway_shell import AnswerEnd, Gateway
from baton.deploy.openai_answers import Answering, collect_answer, extension_of, prepare, usage_of_choices
from baton.deploy.openai_replies import server_timing
from baton.deploy.responses_api import (
    DeltaEvent,
    ItemEvent,
    OutputMessage,
    OutputText,
    PartEvent,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    TextEvent,
    renamed,
    response_event,
    response_to,
)


@dataclass(frozen=True, slots=True)
class Responding:
    """A request that was found good, ready to be answered."""

    answering: Answering
    response: ResponseObject


async def prepare_response(
    gateway: Gateway, request: ResponsesRequest, request_id: str, owner: str, max_timeout_s: float
) -> Responding:
    """Everything that can be refused before a worker is asked. `owner`: who asks. Raises RequestError."""
    try:
        answering = await prepare(gateway, request.as_chat(), request_id, owner, max_timeout_s)
    except RequestError as error:
        raise renamed(error) from error
    return Responding(answering, response_to(request, request_id, answering.created))


async def respond(responding: Responding) -> tuple[ResponseObject, str]:
    """(the response, its Server-Timing header)."""
    whole = await collect_answer(responding.answering, 0)
    ended = _ended(responding, whole.text, whole.end)
    return ended, server_timing(extension_of(responding.answering, 0, whole.end))


async def respond_stream(responding: Responding) -> AsyncGenerator[bytes, None]:
    """Server-sent events. Raises RequestError before the first one; afterwards a failure is the last event."""
    response, numbers = responding.response, itertools.count()
    parts: list[str] = []
    begun = False
    try:
        async with aclosing(responding.answering.events(0)) as events:
            async for event in events:
                if not begun:
                    for first in _begin(response, numbers):
                        yield first
                begun = True
                if isinstance(event, AnswerEnd):
                    for last in _end(_ended(responding, "".join(parts), event), numbers):
                        yield last
                elif event.text:
                    parts.append(event.text)
                    yield response_event(
                        DeltaEvent(
                            type="response.output_text.delta",
                            sequence_number=next(numbers),
                            item_id=response.message_id,
                            delta=event.text,
                        )
                    )
    except RequestError as error:
        if not begun:
            raise
        failed = response.failed(error)
        yield response_event(ResponseEvent(type="response.failed", sequence_number=next(numbers), response=failed))


def _begin(response: ResponseObject, numbers: itertools.count[int]) -> list[bytes]:
    item = OutputMessage(id=response.message_id, status="in_progress", content=())
    part = OutputText(text="")
    return [
        response_event(event)
        for event in (
            ResponseEvent(type="response.created", sequence_number=next(numbers), response=response),
            ResponseEvent(type="response.in_progress", sequence_number=next(numbers), response=response),
            ItemEvent(type="response.output_item.added", sequence_number=next(numbers), item=item),
            PartEvent(type="response.content_part.added", sequence_number=next(numbers), item_id=item.id, part=part),
        )
    ]


def _end(response: ResponseObject, numbers: itertools.count[int]) -> list[bytes]:
    (item,) = response.output
    (part,) = item.content
    return [
        response_event(event)
        for event in (
            TextEvent(type="response.output_text.done", sequence_number=next(numbers), item_id=item.id, text=part.text),
            PartEvent(type="response.content_part.done", sequence_number=next(numbers), item_id=item.id, part=part),
            ItemEvent(type="response.output_item.done", sequence_number=next(numbers), item=item),
            ResponseEvent(type=f"response.{response.status}", sequence_number=next(numbers), response=response),
        )
    ]


def _ended(responding: Responding, text: str, end: AnswerEnd) -> ResponseObject:
    answering = responding.answering
    usage, extension = usage_of_choices(answering, {0: end}), extension_of(answering, 0, end)
    return responding.response.ended(text, end.finish_reason, usage, extension)
