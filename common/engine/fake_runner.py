"""A model without weights whose answers prove that every page it read was the right one.

Owns: the self-describing "KV" (`FakeModel`), a runner over it (`FakeRunner`), and the answer that a correct system
must give (`fake_generate`, `fake_answer`). Never: knows pages beyond a batch's ids, or who owns them.

The KV of a position is a 64-bit hash of the token history up to it, h[i] = A * h[i-1] + g(token, i) mod 2^64, where
h[i-1] is *read from the page of position i-1*. It is spread over all bytes of the position's share of a page by odd
multipliers, so that damage to any byte shows. The next token is a hash of every position in [0, kv_len), each read
from its page: one wrong, stale or damaged page anywhere changes the output. A sampled token also depends on
(seed, output index), as with a real sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.common.engine.batch import Batch, KvMemory, StepResult, Ticket
from baton.common.kv.buffers import NumpyKvBuffer
from baton.common.messages import SamplingParams, TokenLogprob

U64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_A = 0xD1342543DE82EF95  # odd: multiplication by it can be undone modulo 2^64
_A_INVERSE = pow(_A, -1, 1 << 64)
_START = 0x9E3779B97F4A7C15
_WORD_STEP = 0xBF58476D1CE4E5B8  # even
_CHECK_STEP = 0x94D049BB133111EA  # even, so that 1 + k * step is odd

FAKE_VOCAB_SIZE = 258  # every byte, a begin and an end token: text passes through a byte tokenizer unharmed


def _mix(values: U64) -> U64:
    """A bijective 64-bit scrambler (the finaliser of splitmix64), elementwise."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix_int(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _powers(base: int, count: int) -> U64:
    """base^0 .. base^(count-1) modulo 2^64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


class FakeModel:
    """The arithmetic. `words` is how many 64-bit words of a page belong to one position."""

    def __init__(self, words: int, max_positions: int, vocab_size: int = FAKE_VOCAB_SIZE) -> None:
        assert min(words, max_positions, vocab_size - 1) > 0, (words, max_positions, vocab_size)
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self._power = _powers(_A, max_positions + 1)
        self._inverse = _powers(_A_INVERSE, max_positions + 1)
        index = np.arange(words, dtype=np.uint64)
        # Word 0 is the hash itself. The check multipliers are odd and their sum below is even, so that `read` gives
        # every word an odd factor: no bit of any word can be damaged without a trace.
        self._spread = np.where(index == 0, np.uint64(1), index * np.uint64(_WORD_STEP))
        self._check = index * np.uint64(_CHECK_STEP) + np.uint64(1)
        self._scale = (self._spread[1:] * self._check[1:]).sum(dtype=np.uint64)
        positions = np.arange(max_positions + 1, dtype=np.uint64)
        self._position_salt = _mix(positions + np.uint64(_START))
        self._weight = self._position_salt | np.uint64(1)

    def hashes(self, tokens: npt.NDArray[np.int64], first_position: int, previous: int) -> U64:
        """h of consecutive positions from `first_position` on, given h of the position before."""
        count = len(tokens)
        salt = self._position_salt[first_position : first_position + count]
        increments = _mix(tokens.astype(np.uint64) * np.uint64(_A) + salt)
        start = np.uint64((previous * _A) & _MASK)
        sums: U64 = np.cumsum(increments * self._inverse[:count], dtype=np.uint64)
        return (sums + start) * self._power[:count]

    def next_hashes(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], previous: U64) -> U64:
        """h of one position in each of many sequences."""
        return previous * np.uint64(_A) + _mix(
            tokens.astype(np.uint64) * np.uint64(_A) + self._position_salt[positions]
        )

    def spread(self, hashes: U64) -> U64:
        """The words that are stored for each hash: [..., words]."""
        words: U64 = hashes[..., None] * self._spread
        return words

    def read(self, words: U64) -> U64:
        """The hash that the stored words [..., words] stand for; one damaged word gives another hash."""
        first = words[..., 0]
        checked = (words[..., 1:] * self._check[1:]).sum(axis=-1, dtype=np.uint64)
        hashes: U64 = first + (checked - first * self._scale)
        return hashes

    def weights(self, positions: npt.NDArray[np.int64]) -> U64:
        """How much each position counts in the digest of a sequence; odd, so that no bit is lost."""
        weights: U64 = self._weight[positions]
        return weights

    def token(self, digest: int, sampling: SamplingParams, output_index: int) -> int:
        """The next token, from the digest of all positions before it."""
        salt = _mix_int(sampling.seed * _A + output_index + 1) if sampling.temperature > 0 else 0
        return _mix_int(digest ^ salt) % self.vocab_size

    def logprob(self, digest: int, token: int, sampling: SamplingParams) -> TokenLogprob | None:
        """Made-up but reproducible log probabilities, when asked for."""
        if sampling.logprobs < 0:
            return None
        own = -((digest >> 44) & 0xFFFFF) / float(1 << 18)
        top = tuple(((token + rank) % self.vocab_size, own - rank) for rank in range(sampling.logprobs))
        return TokenLogprob(logprob=own, top=top)


@dataclass(frozen=True, slots=True)
class StepCost:
    """How long a step takes, for the simulator: base + per query token + per key read."""

    base_s: float = 0.0
    per_token_s: float = 0.0
    per_key_s: float = 0.0

    def of(self, batch: Batch) -> float:
        return self.base_s + self.per_token_s * batch.num_tokens + self.per_key_s * float(batch.kv_lens.sum())


@dataclass(frozen=True, slots=True)
class FakeTicket:
    """A step that was computed at launch."""

    result: StepResult


class FakeRunner:
    """`ModelRunner` over the fake model. Every byte it reads or writes lies in `memory`."""

    def __init__(
        self,
        memory: KvMemory,
        *,
        max_positions: int = 8192,
        vocab_size: int = FAKE_VOCAB_SIZE,
        cost: StepCost | None = None,
    ) -> None:
        buffer, page_size = memory.main, memory.layout.page_size
        assert buffer.page_bytes % (8 * page_size) == 0, "each position needs whole 64-bit words of its page"
        words = buffer.page_bytes // (8 * page_size)
        self.memory = memory
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self._cost = cost or StepCost()
        self._model = FakeModel(words, max_positions + page_size, vocab_size)
        self._pages = buffer.as_bytes().view(np.uint64).reshape(buffer.num_pages, page_size, words)
        self._slots = self._pages.reshape(buffer.num_pages * page_size, words)

    def step_cost_s(self, batch: Batch) -> float:
        """What this step would take on the machine that `cost` describes."""
        return self._cost.of(batch)

    def launch(self, batch: Batch) -> FakeTicket:
        self._write(batch)
        tokens, logprobs = self._sample(batch)
        return FakeTicket(StepResult(batch.keys, tokens, logprobs, self.step_cost_s(batch)))

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, FakeTicket), ticket
        return ticket.result

    def _write(self, batch: Batch) -> None:
        """Computes and stores the KV of every query token, reading what lies before it from the pages."""
        hashes = np.empty(batch.num_tokens, dtype=np.uint64)
        q_starts = batch.q_offsets[:-1]
        q_lens = np.diff(batch.q_offsets)
        first = batch.positions[q_starts]
        before = np.maximum(first - 1, 0)
        page = batch.page_ids[batch.page_offsets[:-1] + before // batch.page_size]
        previous = self._model.read(self._slots[page.astype(np.int64) * batch.page_size + before % batch.page_size])
        previous = np.where(first > 0, previous, np.uint64(_START))
        single = q_lens == 1
        at = q_starts[single]
        hashes[at] = self._model.next_hashes(batch.input_ids[at], batch.positions[at], previous[single])
        for row in np.flatnonzero(~single):
            span = slice(int(q_starts[row]), int(batch.q_offsets[row + 1]))
            hashes[span] = self._model.hashes(batch.input_ids[span], int(first[row]), int(previous[row]))
        self._slots[batch.slots] = self._model.spread(hashes)

    def _sample(self, batch: Batch) -> tuple[tuple[int, ...], tuple[TokenLogprob | None, ...]]:
        """Reads all KV of the rows that want a token."""
        wanted = [row for row, sampling in enumerate(batch.sampling) if sampling is not None]
        tokens = [-1] * batch.num_rows
        logprobs: list[TokenLogprob | None] = [None] * batch.num_rows
        if wanted:
            for row, digest in zip(wanted, self._digests(batch, np.array(wanted)), strict=True):
                sampling = batch.sampling[row]
                assert sampling is not None
                tokens[row] = self._model.token(int(digest), sampling, batch.output_indices[row])
                logprobs[row] = self._model.logprob(int(digest), tokens[row], sampling)
        return tuple(tokens), tuple(logprobs)

    def _digests(self, batch: Batch, rows: npt.NDArray[np.int64]) -> U64:
        counts = np.diff(batch.page_offsets)[rows].astype(np.int64)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)  # index of each page within its row
        pages = batch.page_ids[np.repeat(batch.page_offsets[rows].astype(np.int64), counts) + within]
        positions = within[:, None] * batch.page_size + np.arange(batch.page_size)
        weights = self._model.weights(positions)
        weights[positions >= np.repeat(batch.kv_lens[rows], counts)[:, None]] = 0
        per_page = (self._model.read(self._pages[pages]) * weights).sum(axis=1, dtype=np.uint64)
        return np.add.reduceat(per_page, starts[:-1])


def fake_runner(
    num_pages: int,
    page_size: int,
    *,
    bytes_per_token: int = 16,
    max_positions: int = 8192,
    cost: StepCost | None = None,
) -> FakeRunner:
    """A fake runner with memory of its own. `num_pages` counts the null page."""
    buffer = NumpyKvBuffer(num_pages, bytes_per_token * page_size, page_size, "fake")
    return FakeRunner(KvMemory.full(buffer, page_size), max_positions=max_positions, cost=cost)


@dataclass(frozen=True, slots=True)
class FakeAnswer:
    """What a correct system answers."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    finish_reason: str


def fake_generate(
    prompt: npt.NDArray[np.int32] | list[int], sampling: SamplingParams, n: int, vocab_size: int = FAKE_VOCAB_SIZE
) -> list[int]:
    """The first `n` output tokens after `prompt`, whatever the stop conditions say."""
    return list(_generate(prompt, sampling, n, frozenset(), vocab_size).tokens)


def fake_answer(
    prompt: npt.NDArray[np.int32] | list[int],
    sampling: SamplingParams,
    max_context_len: int,
    vocab_size: int = FAKE_VOCAB_SIZE,
) -> FakeAnswer:
    """The whole answer: up to and including a stop token ("stop"), else `max_tokens` or a full context ("length")."""
    room = max(1, max_context_len - len(prompt))
    return _generate(prompt, sampling, min(sampling.max_tokens, room), frozenset(sampling.stop_token_ids), vocab_size)


def _generate(
    prompt: npt.NDArray[np.int32] | list[int], sampling: SamplingParams, n: int, stop: frozenset[int], vocab_size: int
) -> FakeAnswer:
    model = FakeModel(1, len(prompt) + n + 1, vocab_size)
    hashes = model.hashes(np.asarray(prompt, dtype=np.int64), 0, _START)
    weights = [int(weight) for weight in model.weights(np.arange(len(prompt) + n))]
    salts = [int(salt) for salt in model._position_salt[: len(prompt) + n]]
    digest = sum(int(value) * weight for value, weight in zip(hashes, weights, strict=False)) & _MASK
    last = int(hashes[-1])
    tokens: list[int] = []
    logprobs: list[TokenLogprob | None] = []
    for index in range(n):
        token = model.token(digest, sampling, index)
        tokens.append(token)
        logprobs.append(model.logprob(digest, token, sampling))
        if token in stop:
            return FakeAnswer(tuple(tokens), tuple(logprobs), "stop")
        position = len(prompt) + index
        last = (last * _A + _mix_int(token * _A + salts[position])) & _MASK
        digest = (digest + last * weights[position]) & _MASK
    return FakeAnswer(tuple(tokens), tuple(logprobs), "length")
