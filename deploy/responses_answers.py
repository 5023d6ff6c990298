"""From a request to `/v1/responses` to its answer, whole or streamed.

Owns: how one answer becomes a response. Never: the order of its events (`responses_output.py`), HTTP headers or status
codes (`http_app.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from baton.common.errors import RequestError
from baton.deploy.gateway_shell import AnswerEnd, Gateway
from baton.deploy.openai_answers import Answering, extension_of, prepare, usage_of_choices, writer_of
from baton.deploy.openai_replies import server_timing
from baton.deploy.responses_api import ResponsesRequest, renamed
from baton.deploy.responses_output import ResponseOutput
from baton.deploy.responses_replies import (
    ResponseEvent,
    ResponseObject,
    ResponseStreamEvent,
    response_event,
    response_to,
)

_ASIDE_ITEMS = 256


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
        chat = await asyncio.to_thread(request.as_chat) if _is_long(request) else request.as_chat()
        answering = await prepare(gateway, chat, request_id, owner, max_timeout_s)
    except RequestError as error:
        raise renamed(error) from error
    return Responding(answering, response_to(request, request_id, answering.created))


def _is_long(request: ResponsesRequest) -> bool:
    """Of so many items that the loop is not to be kept from its streams by them."""
    return not isinstance(request.input, str) and len(request.input) > _ASIDE_ITEMS


async def respond(responding: Responding) -> tuple[ResponseObject, str]:
    """(the response, its Server-Timing header)."""
    async with aclosing(_events(responding, ResponseOutput(responding.response))) as events:
        async for event in events:
            last = event
    assert isinstance(last, ResponseEvent), "a response ends with one"
    extension = last.response.baton
    assert extension, "a response that has ended says where its time went"
    return last.response, server_timing(extension)


async def respond_stream(responding: Responding) -> AsyncGenerator[bytes, None]:
    """Server-sent events. Raises RequestError before the first one; afterwards a failure is the last event."""
    output = ResponseOutput(responding.response)
    begun = False
    try:
        async with aclosing(_events(responding, output)) as events:
            async for event in events:
                begun = True
                yield response_event(event)
    except RequestError as error:
        if not begun:
            raise
        yield response_event(output.about("response.failed", responding.response.failed(error)))


async def _events(responding: Responding, output: ResponseOutput) -> AsyncGenerator[ResponseStreamEvent, None]:
    """Raises RequestError."""
    answering, writer = responding.answering, writer_of(responding.answering)
    begun = False
    async with aclosing(answering.events(0)) as events:
        async for event in events:
            for first in () if begun else output.begin():
                yield first
            begun = True
            if isinstance(event, AnswerEnd):
                status = "incomplete" if event.finish_reason == "length" else "completed"
                for one in output.push(writer.finish()) + output.finish(status):
                    yield one
                usage, extension = usage_of_choices(answering, {0: event}), extension_of(answering, 0, event)
                ended = responding.response.ended(output.items, status, usage, extension)
                yield output.about(f"response.{status}", ended)
            else:
                for one in output.push(writer.push(event.text)):
                    yield one
