"""Log probabilities as the OpenAI-compatible endpoints show them: of an answer's tokens, and of its prompt's. Pure.

Owns: the texts that tokens get there, and the three shapes (chat, completions, and vLLM's `prompt_logprobs`). Never:
computes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.common.messages import TokenLogprob
from baton.common.prompt_logprobs import PromptLogprobs
from baton.deploy.openai_replies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    LogprobEntry,
    PromptLogprob,
    PromptLogprobList,
)
from baton.deploy.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class NamedLogprob:
    """One token's log probabilities with the tokens' texts. `chosen` is None for the first token of a prompt."""

    token: str
    chosen: LogprobEntry | None
    top: tuple[LogprobEntry, ...]


def _entry(token: str, logprob: float) -> LogprobEntry:
    """`bytes` is None when the token alone is not whole characters: its text then shows U+FFFD."""
    return LogprobEntry(token=token, logprob=logprob, bytes=None if "\ufffd" in token else list(token.encode()))


def named_logprobs(tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[NamedLogprob]:
    """Of an answer's tokens; none where none were asked for."""
    return [_named(tokenizer, token, one.logprob, one.top) for token, one in zip(tokens, logprobs, strict=False)]


def named_prompt(
    tokenizer: Tokenizer, tokens: Sequence[int], scores: PromptLogprobs | None, top: int
) -> list[NamedLogprob]:
    """Of a prompt's tokens, with `top` alternatives of those that there are."""
    rows = [] if scores is None else scores.rows()
    scored = [
        _named(tokenizer, token, logprob, best[:top])
        for token, (_, logprob, best) in zip(tokens[1:], rows, strict=True)
    ]
    return [NamedLogprob(tokenizer.token_text(tokens[0]), None, ()), *scored]


def _named(tokenizer: Tokenizer, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> NamedLogprob:
    text = tokenizer.token_text(token)
    best = tuple(_entry(tokenizer.token_text(one), value) for one, value in top)
    return NamedLogprob(text, _entry(text, logprob), best)


def prompt_logprob_list(
    tokenizer: Tokenizer, tokens: Sequence[int], scores: PromptLogprobs | None, top: int
) -> PromptLogprobList:
    """vLLM's `prompt_logprobs`: `top` alternatives, and the token itself where it is none of them."""
    rows = [] if scores is None else scores.rows()
    shown: PromptLogprobList = [None]
    for token, (rank, logprob, best) in zip(tokens[1:], rows, strict=True):
        ranked = {one: (value, place) for place, (one, value) in enumerate(best[:top], start=1)}
        entries = {token: (logprob, rank)} | ranked
        shown.append(
            {
                str(one): PromptLogprob(logprob=value, rank=place, decoded_token=tokenizer.token_text(one))
                for one, (value, place) in entries.items()
            }
        )
    return shown


def chat_logprobs(entries: Sequence[NamedLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=entry.token,
                logprob=entry.chosen.logprob,
                bytes=entry.chosen.bytes,
                top_logprobs=list(entry.top),
            )
            for entry in entries
            if entry.chosen is not None
        ]
    )


def completion_logprobs(entries: Sequence[NamedLogprob], first_offset: int) -> CompletionLogprobs:
    """The token itself is always among the likeliest ones, as OpenAI has it: up to one more than was asked for."""
    offsets, at = [], first_offset
    for entry in entries:
        offsets.append(at)
        at += len(entry.token)
    return CompletionLogprobs(
        tokens=[entry.token for entry in entries],
        token_logprobs=[None if entry.chosen is None else entry.chosen.logprob for entry in entries],
        top_logprobs=[
            None if entry.chosen is None else {one.token: one.logprob for one in (entry.chosen, *entry.top)}
            for entry in entries
        ],
        text_offset=offsets,
    )
