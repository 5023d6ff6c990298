"""An answer in OpenAI's shapes, streamed. (Whole: `openai_answers.py`.)

Owns: the chunks, and their order. Never: HTTP headers or status codes (`http_app.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET, UnsetType

from baton.common.errors import RequestError
from baton.deploy.gateway_shell import AnswerDelta, AnswerEnd, AnswerEvent
from baton.deploy.openai_answers import (
    Answering,
    answer_id,
    extension_of,
    finish_reason_of,
    usage_of_choices,
    writer_of,
)
from baton.deploy.openai_logprobs import (
    NamedLogprob,
    chat_logprobs,
    completion_logprobs,
    named_logprobs,
    named_prompt,
)
from baton.deploy.openai_replies import (
    SSE_DONE,
    BatonExtension,
    ChatChunkChoice,
    Completion,
    CompletionChoice,
    Delta,
    Usage,
    http_error,
    sse_event,
)
from baton.deploy.tool_choices import Writer


async def answer_stream(answering: Answering) -> AsyncGenerator[bytes, None]:
    """Server-sent events. Raises RequestError before the first one; afterwards a failure is an event."""
    ends: dict[int, AnswerEnd] = {}
    offsets = [0] * len(answering.choices)  # characters of each answer so far
    writers = [writer_of(answering) for _ in answering.choices]
    begun: set[int] = set()
    try:
        async with aclosing(_merged(answering)) as events:
            async for index, event in events:
                if index not in begun and answering.is_chat:
                    yield _chunk(answering, [ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))])
                elif index not in begun and answering.choices[index].echo:
                    chunk, offsets[index] = _echo_chunk(answering, index, event)
                    yield chunk
                begun.add(index)
                if isinstance(event, AnswerEnd):
                    ends[index] = event
                    for delta in writers[index].finish():
                        yield _chunk(answering, [ChatChunkChoice(index=index, delta=delta)])
                    yield _last_chunk(answering, index, event, finish_reason_of(event, writers[index]))
                elif answering.is_chat:
                    for chunk in _chat_chunks(answering, index, event, writers[index]):
                        yield chunk
                elif event.text or event.logprobs:
                    yield _text_chunk(answering, index, event, offsets[index])
                    offsets[index] += len(event.text)
    except RequestError as error:
        if not begun:
            raise
        yield sse_event(http_error(error).reply)
        yield SSE_DONE
        return
    if answering.request.include_usage:
        yield _chunk(answering, [], usage_of_choices(answering, ends))
    yield SSE_DONE


async def _merged(answering: Answering) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
    """The events of all choices, as they come. Raises the first RequestError of any; closing it ends all."""
    if len(answering.choices) == 1:
        async with aclosing(answering.events(0)) as events:
            async for event in events:
                yield 0, event
        return
    merged: asyncio.Queue[tuple[int, AnswerEvent | RequestError]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(answering, index, merged)) for index in range(len(answering.choices))]
    try:
        left = len(tasks)
        while left:
            index, item = await merged.get()
            if isinstance(item, RequestError):
                raise item
            left -= isinstance(item, AnswerEnd)
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    answering: Answering, index: int, merged: asyncio.Queue[tuple[int, AnswerEvent | RequestError]]
) -> None:
    try:
        async with aclosing(answering.events(index)) as events:
            async for event in events:
                merged.put_nowait((index, event))
    except RequestError as error:
        merged.put_nowait((index, error))


def _chunk(
    answering: Answering,
    choices: list[ChatChunkChoice] | list[CompletionChoice],
    usage: Usage | None = None,
    extension: BatonExtension | UnsetType = UNSET,
) -> bytes:
    """With `include_usage` every chunk has `usage`: null but in the last. Without, none has."""
    chunk = Completion(
        id=answer_id(answering),
        object="chat.completion.chunk" if answering.is_chat else "text_completion",
        created=answering.created,
        model=answering.gateway.model.name,
        choices=choices,
        usage=usage if answering.request.include_usage else UNSET,
        baton=extension,
    )
    return sse_event(chunk)


def _chat_chunks(answering: Answering, index: int, event: AnswerDelta, writer: Writer) -> list[bytes]:
    """Log probabilities come with the first piece; without one when the text of their tokens is held back."""
    deltas = writer.push(event.text)
    named = _named(answering, event)
    if named and not deltas:
        deltas = [Delta(content="")]
    choices = [ChatChunkChoice(index=index, delta=delta) for delta in deltas]
    if named:
        choices[0] = ChatChunkChoice(index=index, delta=deltas[0], logprobs=chat_logprobs(named))
    return [_chunk(answering, [choice]) for choice in choices]


def _echo_chunk(answering: Answering, index: int, first: AnswerEvent) -> tuple[bytes, int]:
    """The prompt, in front of its answer; and where in the text its tokens say that the answer begins."""
    choice, top = answering.choices[index], answering.request.wanted_logprobs
    if top < 0:
        return _chunk(answering, [CompletionChoice(index=index, text=choice.echo)]), len(choice.echo)
    assert isinstance(first, AnswerDelta), "an answer has a token"
    named = named_prompt(answering.gateway.model.tokenizer, choice.tokens, first.prompt_logprobs, top)
    echo = CompletionChoice(index=index, text=choice.echo, logprobs=completion_logprobs(named, 0))
    return _chunk(answering, [echo]), sum(len(entry.token) for entry in named)


def _text_chunk(answering: Answering, index: int, event: AnswerDelta, offset: int) -> bytes:
    named = _named(answering, event)
    logprobs = completion_logprobs(named, offset) if named else None
    return _chunk(answering, [CompletionChoice(index=index, text=event.text, logprobs=logprobs)])


def _last_chunk(answering: Answering, index: int, end: AnswerEnd, finish_reason: str) -> bytes:
    """The chunk with the finish reason carries the `baton` extension."""
    extension = extension_of(answering, index, end)
    if answering.is_chat:
        last = ChatChunkChoice(index=index, delta=Delta(), finish_reason=finish_reason)
        return _chunk(answering, [last], extension=extension)
    choice = CompletionChoice(index=index, text="", finish_reason=finish_reason)
    return _chunk(answering, [choice], extension=extension)


def _named(answering: Answering, event: AnswerDelta) -> list[NamedLogprob]:
    return named_logprobs(answering.gateway.model.tokenizer, event.tokens, event.logprobs)
