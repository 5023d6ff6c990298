"""The arithmetic of the fake model: what each component keeps of a token, and the token that follows from it.

Everything is a 64-bit hash, all arithmetic modulo 2^64; `g` scrambles a token, its position and a salt per component:
- full attention keeps h[i] = A h[i-1] + g(token, i) for each position;
- a sliding window of W keeps v[i] = A v[i-1] + B v[i-W+1] + g(token, i): the newest and the oldest key that a query
  sees, so that a page freed one token too early shows (terms of positions that are not visible, or do not exist, are
  absent);
- a recurrent state is s = A s + g(token, i), from 0 on.
The digest of a sequence adds up every h, the v of the last W positions, and s; the next token is a hash of it. A
sampled token also depends on (seed, output index), and one with penalties on the tokens so far, as with a real sampler.
Never: memory, or where a hash lies in it.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from baton.common.engine.batch import NO_TOKEN, History
from baton.common.engine.guiding import TokenMask, Vocabulary, byte_vocabulary
from baton.common.messages import SamplingParams, TokenLogprob
from baton.common.prompt_logprobs import PromptLogprobs

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

MASK = (1 << 64) - 1
A = 0xD1342543DE82EF95  # odd: multiplication by it can be undone modulo 2^64
B = 0x9FB21C651E98DF25  # odd
_A_INVERSE = pow(A, -1, 1 << 64)
START = 0x9E3779B97F4A7C15  # h[-1]
_WORD_STEP = 0xBF58476D1CE4E5B8  # even
_CHECK_STEP = 0x94D049BB133111EA  # even, so that 1 + k * step is odd
FULL_SALT = 0
SWA_SALT = 0x2545F4914F6CDD1D
STATE_SALT = 0x5851F42D4C957F2D

FAKE_VOCAB_SIZE = 258  # every byte, a begin and an end token: text passes through a byte tokenizer unharmed
FAKE_SPECIAL = (b"<begin>", b"<end>")


def fake_vocabulary() -> Vocabulary:
    return byte_vocabulary(FAKE_VOCAB_SIZE, FAKE_SPECIAL)


def mix(values: U64) -> U64:
    """A bijective 64-bit scrambler (the finaliser of splitmix64), elementwise."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def mix_int(value: int) -> int:
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _powers(base: int, count: int) -> U64:
    """base^0 .. base^(count-1) modulo 2^64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


@functools.lru_cache(maxsize=16)
def _tables(count: int) -> tuple[U64, U64, U64, U64]:
    """Powers of A, of its inverse, salts and weights of positions: the same for all models."""
    salts = mix(np.arange(count, dtype=np.uint64) + np.uint64(START))
    tables = _powers(A, count), _powers(_A_INVERSE, count), salts, salts | np.uint64(1)
    for table in tables:
        table.flags.writeable = False
    return tables


class Spread:
    """Spreads a hash over `words` 64-bit words by odd multipliers, so that damage to any byte of them shows."""

    def __init__(self, words: int) -> None:
        assert words > 0
        index = np.arange(words, dtype=np.uint64)
        # Word 0 is the hash itself. The check multipliers are odd and their sum below is even, so that `read` gives
        # every word an odd factor: no bit of any word can be damaged without a trace.
        self._spread = np.where(index == 0, np.uint64(1), index * np.uint64(_WORD_STEP))
        self._check = index * np.uint64(_CHECK_STEP) + np.uint64(1)
        self._scale = (self._spread[1:] * self._check[1:]).sum(dtype=np.uint64)

    def write(self, hashes: U64) -> U64:
        """The words that are stored for each hash: [..., words]."""
        words: U64 = hashes[..., None] * self._spread
        return words

    def read(self, words: U64) -> U64:
        """The hash that the stored words [..., words] stand for; one damaged word gives another hash."""
        first = words[..., 0]
        checked = (words[..., 1:] * self._check[1:]).sum(axis=-1, dtype=np.uint64)
        hashes: U64 = first + (checked - first * self._scale)
        return hashes


class FakeModel:
    """For sequences of up to `max_positions`."""

    def __init__(self, max_positions: int, vocab_size: int = FAKE_VOCAB_SIZE) -> None:
        assert min(max_positions, vocab_size - 1) > 0, (max_positions, vocab_size)
        self.vocab_size = vocab_size
        self._power, self._inverse, self.position_salt, self._weight = _tables(1 << max_positions.bit_length())

    def scrambled(self, tokens: I64, positions: I64 | slice, salt: int) -> U64:
        """g of tokens at their positions."""
        scrambled: U64 = mix(
            (tokens.astype(np.uint64) * np.uint64(A) + self.position_salt[positions]) ^ np.uint64(salt)
        )
        return scrambled

    def hashes(self, tokens: I64, first_position: int, previous: int, salt: int = FULL_SALT) -> U64:
        """h (or s) of consecutive positions from `first_position` on, given that of the position before."""
        positions = slice(first_position, first_position + len(tokens))
        return self._chain(self.scrambled(tokens, positions, salt), previous)

    def window_hashes(self, tokens: I64, first_position: int, before: U64, window: int) -> U64:
        """v of consecutive positions from `first_position` on; `before` are those of the W - 1 (or all) before it."""
        increments = self.scrambled(tokens, slice(first_position, first_position + len(tokens)), SWA_SALT)
        if window == 1:
            return increments
        values = np.concatenate((before, increments))
        done = len(before)
        while done < len(values):  # so many at a time that the oldest key of each is known
            stop = min(len(values), done + window - 1)
            oldest = max(0, done - window + 1)  # place in `values`; positions before the sequence have none
            known = values[oldest : max(0, stop - window + 1)]
            values[stop - len(known) : stop] += known * np.uint64(B)
            previous = int(values[done - 1]) if done else 0
            values[done:stop] = self._chain(values[done:stop], previous)
            done = stop
        return values[len(before) :]

    def _chain(self, increments: U64, previous: int) -> U64:
        """x[i] = A x[i-1] + increments[i]."""
        count = len(increments)
        sums: U64 = np.add.accumulate(increments * self._inverse[:count])
        return (sums + np.uint64((previous * A) & MASK)) * self._power[:count]

    def weights(self, positions: I64) -> U64:
        """How much each position counts in the digest of a sequence; odd, so that no bit is lost."""
        weights: U64 = self._weight[positions]
        return weights

    def token(
        self,
        digest: int,
        sampling: SamplingParams,
        output_index: int,
        history: History | None = None,
        mask: TokenMask | None = None,
    ) -> int:
        """The next token, from the digest of all that is kept of the tokens before it. `history` where
        `sampling.reshapes`: which tokens were in the prompt and in the output then counts once more. `mask` where there
        is a grammar: one of those that it allows; NO_TOKEN without a mask."""
        salt = mix_int(sampling.seed * A + output_index + 1) if sampling.temperature > 0 else 0
        if sampling.reshapes:
            assert history is not None, "a penalty without the tokens that it is for"
            salt ^= mix_int(_counted(history.prompt, START) * A + _counted(history.outputs, SWA_SALT))
        if sampling.grammar is None:
            return mix_int(digest ^ salt) % self.vocab_size
        if mask is None:
            return NO_TOKEN
        allowed = np.flatnonzero(mask)
        return int(allowed[mix_int(digest ^ salt) % len(allowed)])

    def logprob(self, digest: int, token: int, sampling: SamplingParams) -> TokenLogprob | None:
        """Made-up but reproducible log probabilities, when asked for."""
        if sampling.logprobs < 0:
            return None
        own = -((digest >> 44) & 0xFFFFF) / float(1 << 18)
        top = tuple(((token + rank) % self.vocab_size, own - rank) for rank in range(sampling.logprobs))
        return TokenLogprob(logprob=own, top=top)

    def score(self, hashes: U64, targets: I64, top: int) -> PromptLogprobs:
        """Made-up but reproducible log probabilities of prompt tokens, each from what is kept of the one before it."""
        top = min(top, self.vocab_size)
        mixed = mix(hashes ^ targets.astype(np.uint64) * np.uint64(A))
        places = (mixed >> np.uint64(40)).astype(np.int64) % self.vocab_size  # of the token among all, by likelihood
        steps = np.arange(top)
        fractions = (mixed & np.uint64(0xFFFF)).astype(np.float32) / np.float32(1 << 16)
        return PromptLogprobs.of(
            (places + 1).astype(np.int32),
            -(places / 16 + fractions).astype(np.float32),
            ((targets - places)[:, None] + steps).astype(np.int32) % self.vocab_size,
            -(steps / 16 + fractions[:, None]).astype(np.float32),
        )


def _counted(tokens: npt.NDArray[np.int32], salt: int) -> int:
    """How often each token occurs, in whatever order."""
    return sum([_scrambled_token(token, salt) for token in tokens.tolist()]) & MASK


@functools.lru_cache(maxsize=1024)
def _scrambled_token(token: int, salt: int) -> int:
    return mix_int(token ^ salt)


def join_digests(first: int, second: int) -> int:
    """Of two components of the same sequence."""
    return (mix_int(first) + second) & MASK
