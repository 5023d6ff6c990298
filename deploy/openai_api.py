"""What the OpenAI-compatible endpoints accept, as typed values. Pure. (What they answer: `openai_replies.py`.)

Owns: the request shapes, and the refusal of what cannot be done: a parameter is used or refused, never ignored.
Never: tokenizes, waits, or knows the cluster.

Extensions to the OpenAI shapes: `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`, `timeout_s`,
`session_id`, `priority` (smaller is sooner, as in vLLM), and what vLLM has beside `response_format` (`guided_api`).
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from baton.common.errors import ErrorCode, RequestError
from baton.common.messages import MAX_LOGIT_BIASES, MAX_REPETITION_PENALTY, Grammar, Priority, SamplingParams
from baton.common.prompt_logprobs import explain_too_many
from baton.deploy.chat_messages import ChatMessage, ToolChoice, Tools, conversation
from baton.deploy.guided_api import Choices, GrammarText, ResponseFormat, Schema, StructuredOutputs
from baton.deploy.json_bodies import parse, refusal

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions; chat has none: up to the model's length
MAX_STOP_STRINGS = 16
MAX_CHOICES = 128
"""In one answer: prompts times `n`."""

StopString = Annotated[str, Meta(min_length=1, max_length=256)]
TokenCount = Annotated[int, Meta(ge=1, le=1 << 20)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`continuous_usage_stats` is vLLM's, `include_obfuscation` OpenAI's: neither is had here, but for "no"."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all endpoints that generate share. None is "not given"."""

    model: str
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=MAX_REPETITION_PENALTY)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    session_id: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    priority: Priority | None = None
    user: str | None = None  # a label; changes nothing

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class _Completion(Sampled, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of completions share."""

    min_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(_Completion, frozen=True, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int:
        """-1: none; n: the chosen token's and the n best."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    @property
    def scored_top(self) -> int:
        """The same, of the prompt's tokens."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs


class CompletionRequest(_Completion, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None  # 0: the echo alone

    @property
    def wanted_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def scored_top(self) -> int:
        asked = -1 if self.prompt_logprobs is None else self.prompt_logprobs
        return max(asked, self.wanted_logprobs) if self.echo else asked

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids: one string, one list of ids, or a list of either."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise refusal("prompt", "the prompt is empty")
        texts = [part for part in self.prompt if isinstance(part, str)]
        ids = [part for part in self.prompt if isinstance(part, int)]
        lists = [part for part in self.prompt if isinstance(part, list)]
        if len(ids) == len(self.prompt):
            return [ids]
        if len(texts) == len(self.prompt) or len(lists) == len(self.prompt):
            if len(self.prompt) > MAX_CHOICES:
                raise refusal("prompt", f"at most {MAX_CHOICES} prompts in one request, got {len(self.prompt)}")
            return [*texts, *lists]
        raise refusal("prompt", "a list holds texts, or token ids, or lists of token ids: not a mixture")


RequestT = TypeVar("RequestT", bound=ChatRequest | CompletionRequest)

# Parameters of the OpenAI API that Baton does not have, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "prompt_cache_key": (),
    "safety_identifier": (),
    # vLLM's
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "return_tokens_as_token_ids": (False,),
}


def parse_request(kind: type[RequestT], body: bytes) -> RequestT:
    """The request, or RequestError INVALID_REQUEST that names the parameter and what is wrong with it."""
    request = parse(kind, body, _NEUTRAL)
    if request.stream_options is not None:
        _check_stream_options(request.stream_options, streamed=bool(request.stream))
    _check_min_tokens(request)
    if isinstance(request, ChatRequest):
        _check_chat(request)
    elif request.max_tokens == 0 and not request.echo:
        raise refusal("max_tokens", "no answer is asked for: 0 needs echo: true")
    if request.prompt_logprobs is not None and request.stream:
        raise refusal("prompt_logprobs", "cannot be streamed")
    if request.scored_top >= 0 and request.session_id is not None:
        raise refusal("session_id", "a turn computes what is new: its prompt has no log probabilities")
    return request


def _check_stream_options(options: StreamOptions, *, streamed: bool) -> None:
    if not streamed:
        raise refusal("stream_options", "needs stream: true")
    for name in ("continuous_usage_stats", "include_obfuscation"):
        if getattr(options, name):
            raise refusal(f"stream_options.{name}", "not supported by Baton (leave it out)")


def _check_min_tokens(request: ChatRequest | CompletionRequest) -> None:
    """As benchmarks ask: an answer that does not end before its last token has as many as it may have."""
    if not request.min_tokens:
        return
    if not request.ignore_eos or request.stops or request.stop_token_ids:
        raise refusal("min_tokens", "needs ignore_eos: true and no stop: the answer is then as long as max_tokens says")
    if request.wanted_tokens is not None and request.min_tokens > request.wanted_tokens:
        raise refusal("min_tokens", f"more than the {request.wanted_tokens} tokens that the answer may have")


def _check_chat(request: ChatRequest) -> None:
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise refusal("max_tokens", "max_completion_tokens is given too, with another value")
    if request.top_logprobs is not None and not request.logprobs:
        raise refusal("top_logprobs", "needs logprobs: true")
    conversation(request.messages)


def sampling_for(
    request: ChatRequest | CompletionRequest,
    *,
    prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    drawn_seed: int,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """The request's sampling, its length resolved, under the grammar that it asks for. Raises RequestError
    PROMPT_TOO_LONG, naming the limit."""
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    if prompt_tokens == 0:
        raise refusal(field, "the prompt is empty")
    if prompt_tokens >= max_model_len:
        raise RequestError(
            ErrorCode.PROMPT_TOO_LONG,
            f"the prompt has {prompt_tokens} tokens; the limit, with the answer, is {max_model_len} tokens",
            field,
        )
    if too_many := explain_too_many(prompt_tokens, request.scored_top):
        raise refusal(field, too_many)
    room = max_model_len - prompt_tokens
    wanted = request.wanted_tokens
    if request.max_tokens is None and isinstance(request, CompletionRequest):
        wanted = min(DEFAULT_COMPLETION_TOKENS, room)
    if wanted is not None and wanted > room:
        raise RequestError(
            ErrorCode.PROMPT_TOO_LONG,
            f"{prompt_tokens} prompt tokens and {wanted} answer tokens exceed the limit of {max_model_len} tokens; "
            f"at most {room} are left for the answer",
            "max_tokens",
        )
    stop_ids = tuple(dict.fromkeys((*(request.stop_token_ids or ()), *(() if request.ignore_eos else eos_token_ids))))
    seed = drawn_seed if request.seed is None else request.seed
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        logit_bias=_biases(request, vocab_size),
        seed=seed & ((1 << 63) - 1),
        max_tokens=room if wanted is None else max(1, wanted),
        stop_token_ids=stop_ids,
        logprobs=request.wanted_logprobs,
        prompt_logprobs=request.scored_top,
        grammar=grammar,
    )


def _biases(request: ChatRequest | CompletionRequest, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = tuple((request.logit_bias or {}).items())
    strange = next((token for token, _ in biases if token >= vocab_size), None)
    if strange is not None:
        raise refusal("logit_bias", f"token {strange} is not in the vocabulary of {vocab_size} tokens")
    return biases
