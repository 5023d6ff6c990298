"""From a parsed request to an answer in OpenAI's shapes, whole. (Streamed: `openai_streams.py`.)

Owns: the way of one HTTP request through the gateway: check the model, tokenize, one request per choice, and the
assembly of choices, logprobs, usage and the `baton` extension. Never: HTTP headers or status codes (`http_app.py`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec
from msgspec import UNSET, UnsetType

from baton.common.engine.guiding import Guides
from baton.common.ids import NO_SESSION, RequestId, SessionId
from baton.common.messages import Grammar, SamplingParams
from baton.common.prompt_logprobs import PromptLogprobs
from baton.deploy.chat_messages import chars_of, conversation
from baton.deploy.gateway_shell import AnswerDelta, AnswerEnd, AnswerEvent, Gateway
from baton.deploy.guided_api import check_grammar, grammar_asked
from baton.deploy.json_bodies import refusal
from baton.deploy.openai_api import MAX_CHOICES, ChatRequest, CompletionRequest, sampling_for
from baton.deploy.openai_logprobs import (
    NamedLogprob,
    chat_logprobs,
    completion_logprobs,
    named_logprobs,
    named_prompt,
    prompt_logprob_list,
)
from baton.deploy.openai_replies import (
    AnswerMessage,
    BatonExtension,
    ChatChoice,
    Completion,
    CompletionChoice,
    Delta,
    MadeCall,
    PromptLogprobList,
    Usage,
    server_timing,
    usage_of,
)
from baton.deploy.tokenizer import ServedModel, Tokenizer, encode_aside
from baton.deploy.tool_choices import Calling, PlainWriter, Writer, calling_asked, told


@dataclass(frozen=True, slots=True)
class _Choice:
    """One answer to one prompt. `echo`: the prompt's text, where that goes before it."""

    request_id: RequestId
    tokens: list[int]
    sampling: SamplingParams
    echo: str


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
    calling: Calling | None  # tools that the answers may call
    computed: tuple[asyncio.Event, ...]  # by prompt: its first choice has begun, or ended

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    def events(self, index: int) -> AsyncGenerator[AnswerEvent, None]:
        events = self._events(index)
        return _without_answer(events) if self.request.wanted_tokens == 0 else events

    async def _events(self, index: int) -> AsyncGenerator[AnswerEvent, None]:
        """The other choices of a prompt wait until the first one has it computed, and find it in a cache then: asked
        for together, each would compute it."""
        prompt, turn = divmod(index, self.per_prompt)
        waited_s = 0.0
        if turn:
            began_s = time.monotonic()
            await self.computed[prompt].wait()
            waited_s = time.monotonic() - began_s
        try:
            async with aclosing(self._answer(self.choices[index], max(0.0, self.timeout_s - waited_s))) as events:
                async for event in events:
                    self.computed[prompt].set()
                    yield event
        finally:
            self.computed[prompt].set()

    def _answer(self, choice: _Choice, timeout_s: float) -> AsyncGenerator[AnswerEvent, None]:
        return self.gateway.answer(
            choice.request_id,
            choice.tokens,
            choice.sampling,
            self.request.stops,
            timeout_s,
            session_id=SessionId(self.request.session_id or NO_SESSION),
            owner=self.owner,
            priority=self.request.priority or 0,
        )


async def _without_answer(events: AsyncGenerator[AnswerEvent, None]) -> AsyncGenerator[AnswerEvent, None]:
    """For who asked for no token: workers produce one all the same."""
    async with aclosing(events):
        async for event in events:
            match event:
                case AnswerDelta():
                    yield AnswerDelta("", (), (), event.prompt_logprobs)
                case AnswerEnd():
                    yield replace(event, completion_tokens=0, finish_reason="length")


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
        sampling = sampling_for(
            request,
            prompt_tokens=len(tokens),
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            drawn_seed=secrets.randbits(63),
            grammar=asked,
        )
        strange = model.strange_token(tokens)  # after the bound on their number: it looks at each
        if strange is not None:
            raise refusal("prompt", strange)
        echo = _echo_of(model.tokenizer, request, len(choices) // per_prompt, tokens)
        for turn in range(per_prompt):
            own_id = request_id if count == 1 else f"{request_id}-{len(choices)}"
            own = msgspec.structs.replace(sampling, seed=(sampling.seed + turn) % (1 << 63))  # as in vLLM
            if turn and not request.stream:  # the first one's are theirs, too
                own = msgspec.structs.replace(own, prompt_logprobs=-1)
            choices.append(_Choice(RequestId(own_id), tokens, own, echo))
    timeout_s = min(request.timeout_s or max_timeout_s, max_timeout_s)
    created = int(time.time())
    computed = tuple(asyncio.Event() for _ in token_lists)
    return Answering(
        gateway, request, request_id, owner, timeout_s, tuple(choices), per_prompt, created, calling, computed
    )


def _echo_of(tokenizer: Tokenizer, request: ChatRequest | CompletionRequest, place: int, tokens: list[int]) -> str:
    if isinstance(request, ChatRequest) or not request.echo:
        return ""
    given = request.prompts()[place]
    return given if isinstance(given, str) else tokenizer.decode(tokens)


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
        tools = None if calling is None else [tool.as_template_input() for tool in calling.tools]
        size = chars_of(request.messages, () if calling is None else calling.tools)
        return [await encode_aside(size, lambda said: model.encode_chat(conversation(said), tools), request.messages)]
    encode = model.tokenizer.encode
    return [
        prompt if isinstance(prompt, list) else await encode_aside(len(prompt), encode, prompt)
        for prompt in request.prompts()
    ]


# -------------------------------------------------------------------------------------------- whole answers


@dataclass(frozen=True, slots=True)
class _WholeAnswer:
    """One choice, from its first to its last token."""

    text: str
    logprobs: list[NamedLogprob]
    end: AnswerEnd
    calls: list[MadeCall]
    finish_reason: str
    prompt_logprobs: PromptLogprobs | None


async def answer_json(answering: Answering) -> tuple[Completion, str]:
    """(the response, its Server-Timing header). The first choice that fails fails the request and ends the others."""
    tasks = [asyncio.create_task(_collect_answer(answering, index)) for index in range(len(answering.choices))]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    extensions = [extension_of(answering, index, whole.end) for index, whole in enumerate(answers)]
    reply = Completion(
        id=answer_id(answering),
        object="chat.completion" if answering.is_chat else "text_completion",
        created=answering.created,
        model=answering.gateway.model.name,
        choices=_choices(answering, answers),
        usage=usage_of_choices(answering, {index: whole.end for index, whole in enumerate(answers)}),
        prompt_logprobs=_prompt_logprobs(answering, 0, answers[0].prompt_logprobs) if answering.is_chat else UNSET,
        baton=extensions[0] if len(extensions) == 1 else extensions,
    )
    return reply, server_timing(max(extensions, key=lambda extension: extension.total_s))


async def _collect_answer(answering: Answering, index: int) -> _WholeAnswer:
    """One choice. Raises RequestError."""
    deltas: list[Delta] = []
    logprobs: list[NamedLogprob] = []
    prompt_logprobs: PromptLogprobs | None = None
    writer, tokenizer = writer_of(answering), answering.gateway.model.tokenizer
    async with aclosing(answering.events(index)) as events:
        async for event in events:
            if isinstance(event, AnswerEnd):
                text, calls = told(deltas + writer.finish())
                return _WholeAnswer(text, logprobs, event, calls, finish_reason_of(event, writer), prompt_logprobs)
            deltas += writer.push(event.text)
            logprobs += named_logprobs(tokenizer, event.tokens, event.logprobs)
            prompt_logprobs = event.prompt_logprobs or prompt_logprobs
    raise AssertionError("an answer ends with AnswerEnd or RequestError")


def writer_of(answering: Answering) -> Writer:
    """For one choice."""
    return PlainWriter() if answering.calling is None else answering.calling.writer()


def finish_reason_of(end: AnswerEnd, writer: Writer) -> str:
    return "tool_calls" if writer.called and end.finish_reason == "stop" else end.finish_reason


def _choices(answering: Answering, answers: list[_WholeAnswer]) -> list[ChatChoice] | list[CompletionChoice]:
    if not answering.is_chat:
        return [_completion_choice(answering, index, answers) for index in range(len(answers))]
    wanted = answering.request.wanted_logprobs >= 0
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


def _completion_choice(answering: Answering, index: int, answers: list[_WholeAnswer]) -> CompletionChoice:
    request, choice, whole = answering.request, answering.choices[index], answers[index]
    assert isinstance(request, CompletionRequest)
    scores = answers[index - index % answering.per_prompt].prompt_logprobs
    named = whole.logprobs
    if request.echo and request.logprobs is not None:
        tokenizer = answering.gateway.model.tokenizer
        named = named_prompt(tokenizer, choice.tokens, scores, request.logprobs) + named
    return CompletionChoice(
        index=index,
        text=choice.echo + whole.text,
        finish_reason=whole.end.finish_reason,
        logprobs=completion_logprobs(named, 0) if request.wanted_logprobs >= 0 else None,
        prompt_logprobs=_prompt_logprobs(answering, index, scores),
    )


def _prompt_logprobs(answering: Answering, index: int, scores: PromptLogprobs | None) -> PromptLogprobList | UnsetType:
    top = answering.request.prompt_logprobs
    if top is None:
        return UNSET
    return prompt_logprob_list(answering.gateway.model.tokenizer, answering.choices[index].tokens, scores, top)


# ------------------------------------------------------------------------------------------------- parts


def answer_id(answering: Answering) -> str:
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
