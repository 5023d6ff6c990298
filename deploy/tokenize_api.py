"""`/tokenize` and `/detokenize`, in vLLM's shapes: what a prompt is to the model, and back.

Owns: their requests and replies. Never: asks a worker.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from baton.deploy.chat_messages import ChatMessage, Tools, chars_of, conversation
from baton.deploy.http_parts import parse_aside
from baton.deploy.json_bodies import decode_object, parse, refusal
from baton.deploy.openai_api import TokenId
from baton.deploy.tokenizer import ServedModel, encode_aside

MAX_TOKENS = 1 << 20

_NEUTRAL = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "tools": ([],),
}


class _Tokenize(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizePrompt(_Tokenize, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A text as /v1/completions takes it."""

    prompt: str


class TokenizeChat(_Tokenize, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A conversation as /v1/chat/completions takes it."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: Tools | None = None


class Tokenized(Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]


class Detokenized(Struct, frozen=True, kw_only=True):
    prompt: str


async def tokenize(model: ServedModel, body: bytes) -> Tokenized:
    """Raises RequestError."""
    request = await parse_aside(_parsed, body)
    _check_model(model, request.model)
    tokens = await _encode(model, request)
    texts = [model.tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None
    return Tokenized(count=len(tokens), max_model_len=model.max_model_len, tokens=tokens, token_strs=texts)


def _parsed(body: bytes) -> TokenizePrompt | TokenizeChat:
    if "messages" in decode_object(body):
        return parse(TokenizeChat, body, _NEUTRAL)
    return parse(TokenizePrompt, body, _NEUTRAL)


async def _encode(model: ServedModel, request: TokenizePrompt | TokenizeChat) -> list[int]:
    if isinstance(request, TokenizePrompt):
        bare = request.add_special_tokens is False
        encode = model.tokenizer.encode_bare if bare else model.tokenizer.encode
        return await encode_aside(len(request.prompt), encode, request.prompt)
    if request.add_special_tokens:
        raise refusal("add_special_tokens", "a chat template writes its own")
    tools = [tool.as_template_input() for tool in request.tools or ()] or None
    size = chars_of(request.messages, request.tools or ())
    return await encode_aside(size, lambda said: model.encode_chat(conversation(said), tools), request.messages)


async def detokenize(model: ServedModel, body: bytes) -> Detokenized:
    """With its special tokens. Raises RequestError."""
    request = await parse_aside(lambda body: parse(DetokenizeRequest, body, {}), body)
    _check_model(model, request.model)
    strange = model.strange_token(request.tokens)
    if strange is not None:
        raise refusal("tokens", strange)
    return Detokenized(prompt=model.tokenizer.decode_with_special(request.tokens))


def _check_model(model: ServedModel, asked: str | None) -> None:
    if asked is not None:
        model.check_name(asked)
