"""From a parsed request to an answer in OpenAI's shapes, whole or streamed.

Owns: the way of one HTTP request through the gateway: check the model, tokenize, one request per choice, and the
assembly of choices, logprobs, usage and the `baton` extension. Never: HTTP headers or status codes (`http_app.py`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType

from baton.common.engine.guiding import Guides
from baton.common.errors import RequestError
from baton.common.ids import NO_SESSION, RequestId, SessionId
from baton.common.messages import Grammar, SamplingParams, TokenLogprob
from baton.deploy.chat_messages import chars_of, conversation
from baton.deploy.gateway_shell import AnswerDelta, AnswerEnd, AnswerEvent, Gateway
from baton.deploy.guided_api import check_grammar, grammar_asked
from baton.deploy.json_bodies import refusal
from baton.deploy.openai_api import MAX_CHOICES, ChatRequest, CompletionRequest, sampling_for
from baton.deploy.openai_replies import (
    SSE_DONE,
    AnswerMessage,
    BatonExtension,
    ChatChoice,
    ChatChunkChoice,
    Completion,
    CompletionChoice,
    Delta,
    MadeCall,
    NamedLogprob,
    Usage,
    chat_logprobs,
    completion_logprobs,
    http_error,
    logprob_entry,
    server_timing,
    sse_event,
    usage_of,
)
from baton.deploy.tokenizer import ServedModel, Tokenizer, encode_aside
from baton.deploy.tool_choices import Calling, PlainWriter, Writer, calling_asked, told


@dataclass(frozen=True, slots=True)
class _Choice:
    """One answer to one prompt."""

    request_id: RequestId
    tokens: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Answering:
    """A request that was found good, ready to be answered."""

    gateway: Gateway
    request: ChatRequest | CompletionRequest
    request_id: str
    owner: str
    timeout_s: float
    choices: tuple[_Choice, ...]  # of the first prompt, then of the second, ...; `per_prompt` of each
    per_prompt: int
    created: int
    calling: Calling | None = None  # tools that the answers may call

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    def events(self, index: int) -> AsyncGenerator[AnswerEvent, None]:
        choice = self.choices[index]
        return self.gateway.answer(
            choice.request_id,
            choice.tokens,
            choice.sampling,
            self.request.stops,
            self.timeout_s,
            session_id=SessionId(self.request.session_id or NO_SESSION),
            owner=self.owner,
            priority=self.request.priority or 0,
        )


async def prepare(
    gateway: Gateway, request: ChatRequest | CompletionRequest, request_id: str, owner: str, max_timeout_s: float
) -> Answering:
    """Everything that can be refused before a worker is asked. `owner`: who asks. Raises RequestError."""
    model = gateway.model
    model.check_name(request.model)
    calling = calling_asked(request, model.tool_format) if isinstance(request, ChatRequest) else None
    token_lists = await _tokenize(model, request, calling)
    per_prompt = request.n or 1
    count = len(token_lists) * per_prompt
    if request.session_id is not None and count > 1:
        raise refusal("session_id", f"a turn has one prompt and one answer, not {count}")
    if count > MAX_CHOICES:
        raise refusal("n", f"{len(token_lists)} prompts, each {per_prompt} times, are more than {MAX_CHOICES} choices")
    asked = await _guide(model.guides, request, calling)
    choices: list[_Choice] = []
    for tokens in token_lists:
        strange = model.strange_token(tokens)
        if strange is not None:
            raise refusal("prompt", strange)
        sampling = sampling_for(
            request,
            prompt_tokens=len(tokens),
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            drawn_seed=secrets.randbits(63),
            grammar=asked,
        )
        for turn in range(per_prompt):
            own_id = request_id if count == 1 else f"{request_id}-{len(choices)}"
            own = msgspec.structs.replace(sampling, seed=(sampling.seed + turn) % (1 << 63))  # as in vLLM
            choices.append(_Choice(RequestId(own_id), tokens, own))
    timeout_s = min(request.timeout_s or max_timeout_s, max_timeout_s)
    created = int(time.time())
    return Answering(gateway, request, request_id, owner, timeout_s, tuple(choices), per_prompt, created, calling)


async def _guide(guides: Guides, request: ChatRequest | CompletionRequest, calling: Calling | None) -> Grammar | None:
    """What the answers have to follow. Raises RequestError when it cannot be compiled."""
    asked = grammar_asked(request)
    if calling is not None:
        if asked is not None:
            raise refusal(asked.field, 'an answer that follows it can call no tools (tool_choice: "none")')
        for guided in calling.guided:
            await check_grammar(guides, guided)  # its own field is named where it is wrong
        asked = calling.asked
    if asked is None:
        return None
    await check_grammar(guides, asked)
    return asked.grammar


async def _tokenize(
    model: ServedModel, request: ChatRequest | CompletionRequest, calling: Calling | None
) -> list[list[int]]:
    if isinstance(request, ChatRequest):
        messages = conversation(request.messages)
        tools = None if calling is None else [tool.as_template_input() for tool in calling.tools]
        return [await encode_aside(chars_of(request.messages), partial(model.encode_chat, tools=tools), messages)]
    encode = model.tokenizer.encode
    return [
        prompt if isinstance(prompt, list) else await encode_aside(len(prompt), encode, prompt)
        for prompt in request.prompts()
    ]


# -------------------------------------------------------------------------------------------- whole answers


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """One choice, from its first to its last token."""

    text: str
    logprobs: list[NamedLogprob]
    end: AnswerEnd
    calls: list[MadeCall]
    finish_reason: str


async def answer_json(answering: Answering) -> tuple[Completion, str]:
    """(the response, its Server-Timing header). The first choice that fails fails the request and ends the others."""
    tasks = [asyncio.create_task(collect_answer(answering, index)) for index in range(len(answering.choices))]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    extensions = [extension_of(answering, index, whole.end) for index, whole in enumerate(answers)]
    reply = Completion(
        id=_answer_id(answering),
        object="chat.completion" if answering.is_chat else "text_completion",
        created=answering.created,
        model=answering.gateway.model.name,
        choices=_choices(answering, answers),
        usage=usage_of_choices(answering, {index: whole.end for index, whole in enumerate(answers)}),
        baton=extensions[0] if len(extensions) == 1 else extensions,
    )
    return reply, server_timing(max(extensions, key=lambda extension: extension.total_s))


async def collect_answer(answering: Answering, index: int) -> WholeAnswer:
    """One choice. Raises RequestError."""
    deltas: list[Delta] = []
    logprobs: list[NamedLogprob] = []
    writer = writer_of(answering)
    async with aclosing(answering.events(index)) as events:
        async for event in events:
            if isinstance(event, AnswerEnd):
                text, calls = told(deltas + writer.finish())
                return WholeAnswer(text, logprobs, event, calls, _finish_reason(event, writer))
            deltas += writer.push(event.text)
            logprobs += _named_logprobs(answering, event)
    raise AssertionError("an answer ends with AnswerEnd or RequestError")


def writer_of(answering: Answering) -> Writer:
    """For one choice."""
    return PlainWriter() if answering.calling is None else answering.calling.writer()


def _finish_reason(end: AnswerEnd, writer: Writer) -> str:
    return "tool_calls" if writer.called and end.finish_reason == "stop" else end.finish_reason


def _choices(answering: Answering, answers: list[WholeAnswer]) -> list[ChatChoice] | list[CompletionChoice]:
    wanted = answering.request.wanted_logprobs >= 0
    if answering.is_chat:
        return [
            ChatChoice(
                index=index,
                message=AnswerMessage(
                    content=whole.text if whole.text or not whole.calls else None, tool_calls=whole.calls or UNSET
                ),
                finish_reason=whole.finish_reason,
                logprobs=chat_logprobs(whole.logprobs) if wanted else None,
            )
            for index, whole in enumerate(answers)
        ]
    return [
        CompletionChoice(
            index=index,
            text=whole.text,
            finish_reason=whole.end.finish_reason,
            logprobs=completion_logprobs(whole.logprobs, 0) if wanted else None,
        )
        for index, whole in enumerate(answers)
    ]


# ----------------------------------------------------------------------------------------- streamed answers


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
                begun.add(index)
                if isinstance(event, AnswerEnd):
                    ends[index] = event
                    for delta in writers[index].finish():
                        yield _chunk(answering, [ChatChunkChoice(index=index, delta=delta)])
                    yield _last_chunk(answering, index, event, _finish_reason(event, writers[index]))
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
        id=_answer_id(answering),
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
    named = _named_logprobs(answering, event)
    if named and not deltas:
        deltas = [Delta(content="")]
    choices = [ChatChunkChoice(index=index, delta=delta) for delta in deltas]
    if named:
        choices[0] = ChatChunkChoice(index=index, delta=deltas[0], logprobs=chat_logprobs(named))
    return [_chunk(answering, [choice]) for choice in choices]


def _text_chunk(answering: Answering, index: int, event: AnswerDelta, offset: int) -> bytes:
    named = _named_logprobs(answering, event)
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


# ------------------------------------------------------------------------------------------------- parts


def _answer_id(answering: Answering) -> str:
    return f"{'chatcmpl' if answering.is_chat else 'cmpl'}-{answering.request_id}"


def usage_of_choices(answering: Answering, ends: dict[int, AnswerEnd]) -> Usage:
    """Each prompt counts once, as its first choice found it; the others may have found what that one computed."""
    firsts = [ends[index] for index in range(0, len(ends), answering.per_prompt)]
    return usage_of(
        sum(first.prompt_tokens for first in firsts),
        sum(end.completion_tokens for end in ends.values()),
        [first.timeline for first in firsts],
    )


def extension_of(answering: Answering, index: int, end: AnswerEnd) -> BatonExtension:
    return BatonExtension(
        request_id=answering.choices[index].request_id,
        ttft_s=end.ttft_s,
        total_s=end.total_s,
        placements=end.placements,
        timeline=end.timeline,
    )


def _named_logprobs(answering: Answering, event: AnswerDelta) -> list[NamedLogprob]:
    tokenizer = answering.gateway.model.tokenizer
    return [_named(tokenizer, token, logprob) for token, logprob in zip(event.tokens, event.logprobs, strict=False)]


def _named(tokenizer: Tokenizer, token: int, logprob: TokenLogprob) -> NamedLogprob:
    return NamedLogprob(
        logprob_entry(tokenizer.token_text(token), logprob.logprob),
        tuple(logprob_entry(tokenizer.token_text(top), value) for top, value in logprob.top),
    )
