"""Which tokens a grammar lets an answer go on with: masks over the vocabulary, through llguidance.

Owns: the vocabulary as the library reads it, the compiled grammars (so many, and of so much text) and, for each guided
row of the engine's last step, a matcher that has read the row's answer so far. Never: state that anybody has to move. A
mask is a function of (grammar, tokens so far) alone: a row that was not in the last step, because it came from another
worker or was pushed back, gets a matcher that reads its answer anew.

`explain` and `knows` may be called on any thread; masks are the engine's. Compiling takes milliseconds, the vocabulary
at its first use a second: whoever must not wait for that asks `knows`, and lets another thread `explain` before.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from baton.common.engine.batch import I32
from baton.common.errors import BatonError
from baton.common.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MAX_COMPILED = 256
MAX_COMPILED_CHARS = 1 << 20
"""A compiled grammar takes some hundred bytes for each character of its text."""
MAX_SHOWN_CHARS = 400
"""Of what the library says about a grammar."""
MAX_AMBIGUITY: dict[str, int] = {"ebnf": 300}
"""Ways to read one place of an answer, by kind of grammar. A step's time grows with their square: a grammar that a
client wrote gets no further than some 15 ms. A schema of 200 properties has 800; it cannot be ambiguous without end."""
MAX_AMBIGUITY_OF_OTHERS = 2000
JSON_WHITESPACE = r"[ \t\r\n]{0,20}"
"""Between the tokens of a JSON answer: a model that writes nothing else must not go on like that for ever."""

TokenMask = npt.NDArray[np.bool_]
"""[vocabulary] True: may come next."""

MaskedRow = tuple[int, Grammar, I32]
"""(the engine's name for the row, its grammar, its outputs so far)"""


class NoVocabulary(BatonError):
    """This model's tokens cannot be read as text; says why."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The texts of a model's tokens, and how an answer ends."""

    tokenizer: LLTokenizer
    size: int


@dataclass(slots=True)
class _Reader:
    """A matcher, and what it has read."""

    grammar: Grammar
    matcher: LLMatcher
    read: I32


class Guides:
    """The grammars of one process, for one model. `vocabulary` is called once, by `prepare` or at the first use; it may
    raise NoVocabulary."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._unusable = ""
        self._compiled: OrderedDict[Grammar, LLMatcher | str] = OrderedDict()  # or what is wrong with it
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # of what is compiled; held for no longer than a look takes
        self._readers: dict[int, _Reader] = {}

    def prepare(self) -> None:
        """Reads the vocabulary now: of a real model that takes half a second, which the first request would wait."""
        self._load_vocabulary()

    def knows(self, grammar: Grammar) -> bool:
        """`explain` answers at once."""
        with self._lock:
            return grammar in self._compiled

    def explain(self, grammar: Grammar | None) -> str:
        """What is wrong with it; "" when answers can be made after it. Compiles it where that was not done yet."""
        found = "" if grammar is None else self._compile(grammar)
        return found if isinstance(found, str) else ""

    def masks(self, rows: Iterable[MaskedRow]) -> list[TokenMask | None]:
        """Of all guided rows of a step. None: the grammar has outgrown the limits of a step at this place, or the
        outputs do not follow it. Readers of rows that are not among these are forgotten."""
        before, self._readers = self._readers, {}
        masks: list[TokenMask | None] = []
        for key, grammar, outputs in rows:
            reader = self._reader(before.get(key), grammar, outputs)
            if reader is None:
                masks.append(None)
            else:
                self._readers[key] = reader
                masks.append(self._mask_of(reader.matcher))
        return masks

    def _reader(self, before: _Reader | None, grammar: Grammar, outputs: I32) -> _Reader | None:
        """Has read all of `outputs`; goes on from where it was where that is possible."""
        if (
            before is not None
            and before.grammar == grammar
            and np.array_equal(outputs[: len(before.read)], before.read)
        ):
            reader = before
        else:
            compiled = self._compile(grammar)
            if isinstance(compiled, str):
                return None
            reader = _Reader(grammar, compiled.deep_copy(), outputs[:0])
        unread = outputs[len(reader.read) :].tolist()
        if unread and not reader.matcher.consume_tokens(unread):
            return None
        reader.read = outputs
        return reader

    def _mask_of(self, matcher: LLMatcher) -> TokenMask | None:
        assert self._vocabulary is not None
        packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            return None
        mask = np.unpackbits(packed, count=self._vocabulary.size, bitorder="little").view(np.bool_)
        return mask if mask.any() else None

    def _compile(self, grammar: Grammar) -> LLMatcher | str:
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found
        vocabulary = self._load_vocabulary()
        found = _compile(grammar, vocabulary) if vocabulary is not None else self._unusable
        if not isinstance(found, str) and self._mask_of(found.deep_copy()) is None:
            found = "no answer can begin like this"
        with self._lock:
            self._compiled[grammar] = found
            while len(self._compiled) > MAX_COMPILED or self._compiled_chars() > MAX_COMPILED_CHARS:
                self._compiled.popitem(last=False)
        return found

    def _compiled_chars(self) -> int:
        return sum(len(grammar.text) for grammar in self._compiled)

    def _load_vocabulary(self) -> Vocabulary | None:
        with self._loading:
            if self._vocabulary is None and not self._unusable:
                try:
                    self._vocabulary = self._make_vocabulary()
                except NoVocabulary as error:
                    self._unusable = str(error)
            return self._vocabulary


def no_vocabulary() -> Vocabulary:
    """Of who guides nobody."""
    raise NoVocabulary("answers cannot be guided here")


def byte_vocabulary(size: int, special: Sequence[bytes]) -> Vocabulary:
    """Every byte is a token; then come the special ones, of which the last ends an answer."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [bytes([byte]) for byte in range(256)] + list(special)
    assert len(tokens) == size, (len(tokens), size)
    return Vocabulary(LLTokenizer(TokenizerWrapper(_Bytes(tokens))), size)


class _Bytes:
    """What the library asks of a tokenizer."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self.special_token_ids = list(range(256, len(tokens)))
        self.bos_token_id = None
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def model_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Of a model, by its own tokenizer. Raises NoVocabulary."""
    from llguidance import LLTokenizer

    if not tokenizer.is_fast:
        raise NoVocabulary("this model's tokenizer does not say which text each token stands for")
    if not eos_token_ids:
        raise NoVocabulary("this model has no token that ends an answer")
    described: str = tokenizer.backend_tokenizer.to_str()
    try:
        return Vocabulary(LLTokenizer(described, n_vocab=vocab_size, eos_token=list(eos_token_ids)), vocab_size)
    except ValueError as error:
        raise NoVocabulary(f"this model's tokens cannot be read as text: {_shown(str(error))}") from error


def _compile(grammar: Grammar, vocabulary: Vocabulary) -> LLMatcher | str:
    """Or what is wrong with it. Without the interpreter's lock, all but the translation of `ebnf`."""
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    try:
        match grammar.kind:
            case "json_schema":
                lowered = LLMatcher.grammar_from_json_schema(
                    grammar.text, defaults={"whitespace_pattern": JSON_WHITESPACE}
                )
            case "choice":
                lowered = grammar_from(
                    "regex", "|".join(map(_literally, msgspec.json.decode(grammar.text, type=list[str])))
                )
            case kind:
                lowered = grammar_from(kind, grammar.text)
    except ValueError as error:  # msgspec's are, too
        return _shown(str(error))
    limits = LLParserLimits(
        max_items_in_row=MAX_AMBIGUITY.get(grammar.kind, MAX_AMBIGUITY_OF_OTHERS), verbose_errors=False
    )
    matcher = LLMatcher(vocabulary.tokenizer, lowered, log_level=0, limits=limits)
    return _shown(matcher.get_error()) if matcher.is_error() else matcher


def _literally(text: str) -> str:
    """As a regular expression."""
    return "".join(
        character if character.isalnum() or character == " " else f"\\x{{{ord(character):x}}}" for character in text
    )


def _shown(error: str) -> str:
    text = " ".join(error.split())
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
