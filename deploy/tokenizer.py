"""Text to tokens and back, and what the gateway must know of the model it serves.

Owns: `Tokenizer` and its two kinds: a model's own, and the bytes of the fake model. Never: holds weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, final

from baton.common.config import FAKE_MODEL, ClusterConfig
from baton.common.engine.fake_model import FAKE_SPECIAL, FAKE_VOCAB_SIZE, fake_vocabulary
from baton.common.engine.guiding import Guides, model_vocabulary
from baton.common.errors import ConfigError, ErrorCode, RequestError
from baton.common.kv.cache_dtype import CacheDtype, is_quantised
from baton.common.kv.layout import Component, KvLayout
from baton.deploy.chat_messages import TemplateMessage
from baton.deploy.json_bodies import shorten
from baton.deploy.tool_formats import FORMATS, ToolFormat, format_named, format_of_template, spelled_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from baton.common.model.loading import ModelInfo

FAKE_MAX_POSITIONS = 8192
FAKE_BYTES_PER_TOKEN = 16
_BYTES = 256
_FAKE_END = FAKE_VOCAB_SIZE - 1

_ASIDE_CHARS = 4096  # longer texts are tokenized on another thread: the loop has streams to serve
_TextT = TypeVar("_TextT")


class Tokenizer(Protocol):
    """What the gateway asks of a tokenizer. `decode` leaves special tokens out, but for those that are to be shown; the
    others show them all."""

    def encode(self, text: str) -> list[int]: ...

    def encode_bare(self, text: str) -> list[int]:
        """Without the tokens that a model wants around a text."""

    def encode_chat(
        self, messages: Sequence[TemplateMessage], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """With `tools` only where `knows_tools`. Raises RequestError."""

    @property
    def chat_template(self) -> str:
        """Empty where there is none."""

    @property
    def knows_tools(self) -> bool:
        """Its chat template shows tools and calls to the model."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def decode_with_special(self, token_ids: Sequence[int]) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def has_token(self, text: str) -> bool:
        """A token of its own, beside those that words are made of."""

    def showing(self, texts: Sequence[str]) -> Tokenizer:
        """The same; but special tokens of these texts are text."""


@final
class ByteTokenizer:
    """Of the fake model: every UTF-8 byte is a token; then come a begin and an end token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_bare(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_chat(
        self, messages: Sequence[TemplateMessage], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant: "]))

    @property
    def chat_template(self) -> str:
        return ""

    @property
    def knows_tools(self) -> bool:
        return False

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < _BYTES).decode("utf-8", errors="replace")

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        shown = (bytes([token]) if token < _BYTES else FAKE_SPECIAL[token - _BYTES] for token in token_ids)
        return b"".join(shown).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode_with_special([token_id])

    def has_token(self, text: str) -> bool:
        return text.encode() in FAKE_SPECIAL

    def showing(self, texts: Sequence[str]) -> Tokenizer:
        return self


@final
class ModelTokenizer:
    """A model's own tokenizer, through `transformers`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shown: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._added = frozenset(str(token.content) for token in added.values())
        self._hidden = frozenset(one for one, token in added.items() if token.special and token.content not in shown)

    def encode(self, text: str) -> list[int]:
        """With the tokens that the model wants around a bare text. An empty text is no tokens."""
        return cast(list[int], self._tokenizer.encode(text)) if text else []

    def encode_bare(self, text: str) -> list[int]:
        return cast(list[int], self._tokenizer.encode(text, add_special_tokens=False))

    @property
    def chat_template(self) -> str:
        template = self._tokenizer.chat_template  # a model may have several, by name
        return "".join(template.values()) if isinstance(template, dict) else template or ""

    @property
    def knows_tools(self) -> bool:
        return "tools" in self.chat_template

    def encode_chat(
        self, messages: Sequence[TemplateMessage], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Raises RequestError when the model has no chat template, or when its template refuses the conversation."""
        from jinja2 import TemplateError

        if self._tokenizer.chat_template is None:
            raise RequestError(
                ErrorCode.INVALID_REQUEST, "this model has no chat template: use /v1/completions", "messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise RequestError(
                ErrorCode.INVALID_REQUEST, f"the chat template refuses this: {error}", "messages"
            ) from error
        return self.encode_bare(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return cast(
            str,
            self._tokenizer.decode(
                [token for token in token_ids if token not in self._hidden],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            ),
        )

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        return cast(
            str,
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False),
        )

    def token_text(self, token_id: int) -> str:
        return self.decode_with_special([token_id])

    def has_token(self, text: str) -> bool:
        return text in self._added

    def showing(self, texts: Sequence[str]) -> Tokenizer:
        return ModelTokenizer(self._tokenizer, texts)


async def encode_aside(chars: int, encode: Callable[[_TextT], list[int]], text: _TextT) -> list[int]:
    """`encode(text)`, of so many characters, without keeping the loop."""
    return await asyncio.to_thread(encode, text) if chars > _ASIDE_CHARS else encode(text)


@dataclass(frozen=True, slots=True)
class FakeModelInfo:
    """The fake model's facts (`ModelFacts`)."""

    name: str = FAKE_MODEL
    architecture: str = FAKE_MODEL
    max_positions: int = FAKE_MAX_POSITIONS
    vocab_size: int = FAKE_VOCAB_SIZE
    eos_token_ids: tuple[int, ...] = (_FAKE_END,)

    def layout(self, page_size: int) -> KvLayout:
        return KvLayout(page_size)

    def component_bytes(self, component: Component, dtype: str, *, cache_dtype: CacheDtype) -> int:
        if is_quantised(cache_dtype):
            raise ConfigError("kv.cache_dtype", cache_dtype, "the fake model keeps hashes, which cannot be rounded")
        return FAKE_BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a gateway serves."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    guides: Guides
    tool_format: ToolFormat = FORMATS["hermes"]
    thinking_token_id: int = -1  # whose answers are not cached; -1: all are

    def check_name(self, asked: str) -> None:
        """Raises RequestError MODEL_NOT_FOUND for another model's."""
        if asked != self.name:
            reason = f"model {shorten(repr(asked))} is not served here; {self.name!r} is"
            raise RequestError(ErrorCode.MODEL_NOT_FOUND, reason, "model")

    def encode_chat(
        self, messages: Sequence[TemplateMessage], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """A conversation in which `tools` may be called. Where the chat template knows none, the conversation itself
        tells of them. Raises RequestError."""
        if not self.tokenizer.knows_tools:
            messages, tools = spelled_out(messages, tools or (), self.tool_format), None
        return self.tokenizer.encode_chat(messages, tools)

    def strange_token(self, tokens: Sequence[int]) -> str | None:
        """Which token is none of the model's, in words."""
        at = next((at for at, token in enumerate(tokens) if token >= self.vocab_size), None)
        if at is None:
            return None
        return f"token {at} is {tokens[at]}, which is not in the vocabulary of {self.vocab_size} tokens"


def load_served_model(config: ClusterConfig) -> ServedModel:
    """Tokenizer and facts of the configured model, whose `max_model_len` is resolved. Raises ConfigError."""
    max_model_len = config.model.max_model_len
    assert max_model_len is not None, "resolve() decides max_model_len"
    if config.model.model == FAKE_MODEL:
        fake = FakeModelInfo()
        return _served(config, fake, max_model_len, ByteTokenizer(), Guides(fake_vocabulary))
    from baton.common.model.loading import load_tokenizer, model_info  # heavy, and not needed for the fake model

    info = model_info(config.model.model)
    tokenizer = load_tokenizer(config.model.model)
    guides = Guides(lambda: model_vocabulary(tokenizer, info.vocab_size, info.eos_token_ids))
    guides.prepare()
    served = _served(config, info, max_model_len, ModelTokenizer(tokenizer), guides)
    _compile_template(served.tokenizer)
    return served


def _compile_template(tokenizer: Tokenizer) -> None:
    """Else the first conversation waits for it. Templates are programs: one that fails here may work with others."""
    with suppress(RequestError, TypeError, ValueError, LookupError, AttributeError):
        tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "Hello."}]))


def _served(
    config: ClusterConfig, info: ModelInfo | FakeModelInfo, max_model_len: int, tokenizer: Tokenizer, guides: Guides
) -> ServedModel:
    thinking = -1
    if config.kv.strip_thinking_cache:
        start = config.model.thinking_start
        ids = tokenizer.encode_bare(start)
        if len(ids) != 1:
            reason = f"is not one token of {info.name}, so nobody can see where an answer begins to think"
            raise ConfigError("model.thinking_start", start, reason, "or leave kv.strip_thinking_cache off")
        thinking = ids[0]
    asked = config.gateway.tool_parser
    name = format_of_template(tokenizer.chat_template) if asked == "template" else asked
    tool_format = format_named(name, tokenizer.has_token)
    tokenizer = tokenizer.showing(tool_format.markers)
    return ServedModel(
        info.name, max_model_len, info.vocab_size, info.eos_token_ids, tokenizer, guides, tool_format, thinking
    )
