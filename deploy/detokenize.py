"""Tokens to text, one at a time, without ever taking back a character.

Owns: the incremental decoder (`Detokenizer`), the search for stop strings (`StopMatcher`), and the two together for
one answer (`AnswerText`). Pure. Never: talks to a worker, or decides why a request ends; it reports that a stop string
was found, and the gateway acts.

Invariants, held by tests:
- TEXT-1: all text handed out for a token sequence, `finish()` included, equals `decode` of the whole sequence, cut
  before the first stop string.
- TEXT-2: text handed out is never taken back: nothing is released that a later token could turn into another
  character or into a part of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
REALIGN_AFTER_TOKENS = 16


class TokenDecoder(Protocol):
    """Token ids to text, special tokens left out."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


@final
class Detokenizer:
    """Decodes a growing sequence by decoding a short window at its end.

    The window starts at a token boundary that was also a character boundary, one step before the tokens that are not
    yet clean: some decoders treat the first token of a sequence differently (they drop a leading space), so new tokens
    are always decoded behind an old one.
    """

    __slots__ = ("_clean_tokens", "_decoder", "_released_chars", "_window")

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._clean_tokens = 0  # the window's first tokens whose text ends with a whole character
        self._released_chars = 0  # characters of the window's text that were handed out

    def push(self, token_id: int) -> str:
        """The text that is certain now. Often "", when a character is still incomplete."""
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        if len(certain) == len(text):
            released = text[self._released_chars :]
            self._move_window(text)
            return released
        if len(self._window) > REALIGN_AFTER_TOKENS:
            return self._release_garbage(text)
        return self._release(certain)

    def finish(self) -> str:
        """The rest: bytes that never became a character come out as U+FFFD, as `decode` writes them."""
        return self._release(self._decoder.decode(self._window)) if self._window else ""

    def _release(self, text: str) -> str:
        released = text[self._released_chars :]
        self._released_chars = max(self._released_chars, len(text))
        return released

    def _move_window(self, text: str) -> None:
        """All of the window is clean. Keep its last tokens as context, forget the rest. Tokens without text of their
        own (special tokens, a lone space that the decoder drops) are no context: the next token would look first."""
        context = self._window[self._clean_tokens :]
        context_text = self._decoder.decode(context)
        if context_text or len(context) > REALIGN_AFTER_TOKENS:
            self._window, text = context, context_text
            self._clean_tokens = len(context)
        self._released_chars = len(text)

    def _release_garbage(self, text: str) -> str:
        """A long run that never becomes clean: bytes that are no UTF-8. Cut the window before its last token when that
        cut changes nothing, so that the work per token stays bounded."""
        head, tail = self._window[:-1], self._window[-1:]
        head_text, tail_text = self._decoder.decode(head), self._decoder.decode(tail)
        if not tail_text or head_text + tail_text != text:
            return ""
        released = self._release(head_text)
        self._window, self._clean_tokens, self._released_chars = tail, 0, 0
        return released


@final
class StopMatcher:
    """Finds the first of several strings in text that arrives in pieces: the one that is complete first (of two that
    end together the longer one), so that the answer does not depend on where the pieces were cut."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string stops everything: refused at the door"
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that cannot be part of a stop string, the stop string found or None). After a find, the rest of the
        text is dropped."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = min(((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            end, at = found
            self._held = ""
            return text[:at], text[at:end]
        hold = self._longest_start_at_end(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], None

    def finish(self) -> str:
        """What was held back: it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_start_at_end(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown, how many of the tokens given it took, and the stop string that ended it, if any."""

    text: str
    tokens_used: int
    stop: str | None = None


@final
class AnswerText:
    """The text of one answer: decodes, watches for stop strings, and stops there."""

    __slots__ = ("_detokenizer", "_matcher")

    def __init__(self, decoder: TokenDecoder, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._matcher = StopMatcher(stops)

    def push(self, token_ids: Sequence[int]) -> Piece:
        parts: list[str] = []
        for used, token_id in enumerate(token_ids, start=1):
            text, stop = self._matcher.push(self._detokenizer.push(token_id))
            parts.append(text)
            if stop is not None:
                return Piece("".join(parts), used, stop)
        return Piece("".join(parts), len(token_ids))

    def finish(self) -> Piece:
        """After the last token: everything held back, or the stop string that the very end completed."""
        text, stop = self._matcher.push(self._detokenizer.finish())
        return Piece(text if stop is not None else text + self._matcher.finish(), 0, stop)
