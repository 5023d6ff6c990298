"""The answer that a correct system must give to a request of the fake model, by the formulas of `fake_model` alone.

Owns no state. Never: pages, or the code that runs steps over them (`fake_runner`): who is judged is not asked.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.common.engine.batch import NO_TOKEN, History
from baton.common.engine.fake_model import (
    FAKE_VOCAB_SIZE,
    FULL_SALT,
    MASK,
    START,
    STATE_SALT,
    SWA_SALT,
    U64,
    A,
    B,
    FakeModel,
    fake_vocabulary,
    mix_int,
)
from baton.common.engine.guiding import Guides
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import SamplingParams, TokenLogprob
from baton.common.prompt_logprobs import PromptLogprobs

_NO_HASHES = np.zeros(0, dtype=np.uint64)
ANY_FULL = KvLayout(page_size=1)
"""The layout of a model whose layers all attend to everything; what it answers does not depend on the page size."""


@dataclass(frozen=True, slots=True)
class FakeAnswer:
    """What a correct system answers. `finish_reason` "": its grammar outgrew the limits of a step."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    finish_reason: str


def fake_generate(
    prompt: npt.NDArray[np.int32] | list[int],
    sampling: SamplingParams,
    n: int,
    vocab_size: int = FAKE_VOCAB_SIZE,
    layout: KvLayout = ANY_FULL,
) -> list[int]:
    """The first `n` output tokens after `prompt`, whatever the stop conditions say."""
    return list(_generate(prompt, sampling, n, frozenset(), vocab_size, layout).tokens)


def fake_answer(
    prompt: npt.NDArray[np.int32] | list[int],
    sampling: SamplingParams,
    max_context_len: int,
    vocab_size: int = FAKE_VOCAB_SIZE,
    layout: KvLayout = ANY_FULL,
) -> FakeAnswer:
    """The whole answer: up to and including a stop token ("stop"), else `max_tokens` or a full context ("length")."""
    n = min(sampling.max_tokens, max(1, max_context_len - len(prompt)))
    return _generate(prompt, sampling, n, frozenset(sampling.stop_token_ids), vocab_size, layout)


def _generate(
    prompt: npt.NDArray[np.int32] | list[int],
    sampling: SamplingParams,
    n: int,
    stop: frozenset[int],
    vocab_size: int,
    layout: KvLayout,
) -> FakeAnswer:
    model = FakeModel(len(prompt) + n + 1, vocab_size)
    kept = _Kept(model, layout, np.asarray(prompt, dtype=np.int64), len(prompt) + n)
    given = np.asarray(prompt, dtype=np.int32)
    guides = Guides(fake_vocabulary)
    tokens: list[int] = []
    logprobs: list[TokenLogprob | None] = []
    for index in range(n):
        digest = kept.digest()
        history = History(given, np.array(tokens, dtype=np.int32)) if sampling.reshapes else None
        mask = None
        if sampling.grammar is not None:  # under another key each time: by a matcher that reads them all
            (mask,) = guides.masks([(index, sampling.grammar, np.array(tokens, dtype=np.int32))])
        token = model.token(digest, sampling, index, history, mask)
        if token == NO_TOKEN:
            return FakeAnswer(tuple(tokens), tuple(logprobs), "")
        tokens.append(token)
        logprobs.append(model.logprob(digest, token, sampling))
        if token in stop:
            return FakeAnswer(tuple(tokens), tuple(logprobs), "stop")
        kept.add(token)
    return FakeAnswer(tuple(tokens), tuple(logprobs), "length")


def fake_kept(tokens: npt.NDArray[np.int32], layout: KvLayout) -> dict[Component, U64]:
    """What each component must keep of each position; of a recurrent state, what it is behind that position."""
    model, given = FakeModel(len(tokens) + 1), tokens.astype(np.int64)
    kept: dict[Component, U64] = {}
    for component in layout.components:
        match component:
            case Component.FULL:
                kept[component] = model.hashes(given, 0, START)
            case Component.SWA:
                kept[component] = model.window_hashes(given, 0, np.zeros(0, dtype=np.uint64), layout.window)
            case Component.STATE:
                kept[component] = model.hashes(given, 0, 0, STATE_SALT)
    return kept


def fake_prompt_logprobs(
    prompt: npt.NDArray[np.int32] | list[int], top: int, layout: KvLayout = ANY_FULL
) -> PromptLogprobs:
    """How likely the fake model says that the tokens of `prompt` are, behind its first."""
    tokens = np.asarray(prompt, dtype=np.int32)
    hashes = fake_kept(tokens, layout)[layout.paged[0]]
    return FakeModel(len(tokens) + 1).score(hashes[:-1], tokens[1:].astype(np.int64), top)


class _Kept:
    """What a sequence keeps, without pages: token by token, straight from the formulas of `fake_model`."""

    def __init__(self, model: FakeModel, layout: KvLayout, prompt: npt.NDArray[np.int64], max_len: int) -> None:
        self._layout = layout
        self._only_full = layout.only_full  # the common case, kept fast
        self._weights: list[int] = model.weights(np.arange(max_len)).tolist()
        self._salts: list[int] = model.position_salt[:max_len].tolist()
        self._full, self._full_digest, self._state = START, 0, 0
        self._values: list[int] = []  # v of all positions
        self._length = len(prompt)
        if layout.full:
            hashes = model.hashes(prompt, 0, START).tolist()
            self._full = hashes[-1]
            self._full_digest = sum(map(operator.mul, hashes, self._weights)) & MASK
        if layout.window:
            self._values = model.window_hashes(prompt, 0, _NO_HASHES, layout.window).tolist()
        if layout.state:
            self._state = int(model.hashes(prompt, 0, 0, STATE_SALT)[-1])

    def add(self, token: int) -> None:
        layout, i = self._layout, self._length
        seed = (token * A + self._salts[i]) & MASK
        if layout.full:
            self._full = (self._full * A + mix_int(seed ^ FULL_SALT)) & MASK
            self._full_digest = (self._full_digest + self._full * self._weights[i]) & MASK
        if layout.window:
            value = mix_int(seed ^ SWA_SALT)
            for factor, before in ((A, i - 1), (B, i - layout.window + 1)):
                if layout.window > 1 and before >= 0:
                    value += factor * self._values[before]
            self._values.append(value & MASK)
        if layout.state:
            self._state = (self._state * A + mix_int(seed ^ STATE_SALT)) & MASK
        self._length += 1

    def digest(self) -> int:
        if self._only_full:
            return self._full_digest
        begin = max(0, self._length - self._layout.window)
        live = zip(self._values[begin:], self._weights[begin:], strict=False)
        of = {
            Component.FULL: self._full_digest,
            Component.SWA: sum(value * weight for value, weight in live) & MASK,
            Component.STATE: self._state,
        }
        first, *others = [of[component] for component in self._layout.components]
        for other in others:
            first = (mix_int(first) + other) & MASK
        return first
