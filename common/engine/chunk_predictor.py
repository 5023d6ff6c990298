"""How long a step of prompts takes, and so how far a chunk may go for the step to end in time. Pure arithmetic.

A step that computes T tokens of prompts, which see P keys all together, takes about

    t = a + b T + c P,        P of a chunk of n tokens behind h known ones:  n h + n (n + 1) / 2

`a` is what any step costs (weights are read once, and everything per layer); `b` the matrix products, linear in tokens;
`c` attention, where token i of the chunk sees h + i keys. Without history that is a quadratic, a + b n + c n^2 / 2. It
is the formula that `deploy/planner/cost.py` plans with; SGLang's predictor for pipeline stages is of the same kind (it
fits whole prompts, and takes differences). Rows of running requests count as chunks of one token: more than they cost,
where a step reads more than it computes. Sliding layers see less than P says; what that is worth is in the fit and in
`drift`.

Owns: the coefficients of one worker, and how far its steps are from them lately (`drift`). Never: measures (`profiling`
does), or allocates. A chunk that it limits still makes progress: at least to the next page boundary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.common.least_squares import non_negative_fit

LEAST_SAMPLES = 3
MOST_ERROR = 0.35
"""Where the fit is further than that from what was measured, on average and as a share of it, it is of no use."""
NEW_SHARE = 0.2
"""Of a step that is over, in `drift`."""
LEAST_DRIFT, MOST_DRIFT = 0.25, 8.0
UNLIMITED = 1 << 40


def pairs_of(begin: int, end: int) -> float:
    """Keys that the queries of a chunk [begin, end) of a prompt see, all together."""
    return (end - begin) * (begin + end + 1) / 2


@dataclass(frozen=True, slots=True)
class Sample:
    """A step of one chunk, measured."""

    history: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Unfit:
    """There is nothing to predict from, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """a, b and c of the module's formula; none negative, and b and c not both zero."""

    base_s: float
    token_s: float
    pair_s: float

    def seconds(self, tokens: int, pairs: float) -> float:
        return self.base_s + self.token_s * tokens + self.pair_s * pairs

    def most_tokens(self, history: int, left_s: float) -> int:
        """The longest chunk behind `history` that adds at most `left_s`: the root of c/2 n^2 + (b + c (h + 1/2)) n =
        left, in the form that loses nothing where c is small."""
        if left_s <= 0:
            return 0
        if left_s == math.inf:
            return UNLIMITED
        linear = self.token_s + self.pair_s * (history + 0.5)
        root = 2 * left_s / (linear + math.sqrt(linear * linear + 2 * self.pair_s * left_s))
        return int(min(root, UNLIMITED))


def fit(samples: Sequence[Sample]) -> ChunkCost | Unfit:
    """The coefficients nearest to what was measured, by relative error."""
    if len(samples) < LEAST_SAMPLES:
        return Unfit(f"{len(samples)} steps were measured, of the {LEAST_SAMPLES} that are needed")
    seconds = np.array([one.seconds for one in samples])
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        return Unfit("a step took no time")
    features = np.array([[1.0, one.tokens, pairs_of(one.history, one.history + one.tokens)] for one in samples])
    cost = ChunkCost(*non_negative_fit(features, seconds).tolist())
    if cost.token_s <= 0 and cost.pair_s <= 0:
        return Unfit("longer steps took no longer")
    error = float(np.abs(features @ [cost.base_s, cost.token_s, cost.pair_s] / seconds - 1).mean())
    if error > MOST_ERROR:
        return Unfit(f"the measured steps are off by {error:.0%} from any such formula")
    return cost


class StepRoom:
    """What a step that is being planned may still take. Counts what it is given, whether or not it is limited."""

    def __init__(self, cost: ChunkCost, left_s: float, tokens: int, pairs: float) -> None:
        self._cost = cost
        self._left_s = left_s
        self._tokens = tokens
        self._pairs = pairs

    def most_tokens(self, history: int) -> int:
        return self._cost.most_tokens(history, self._left_s)

    def take(self, begin: int, end: int) -> None:
        tokens, pairs = end - begin, pairs_of(begin, end)
        self._left_s -= self._cost.token_s * tokens + self._cost.pair_s * pairs
        self._tokens += tokens
        self._pairs += pairs

    @property
    def predicted_s(self) -> float:
        """Of all that was taken, without drift."""
        return self._cost.seconds(self._tokens, self._pairs)


class ChunkPredictor:
    """`target_s`: how long a step with chunks should take at most."""

    def __init__(self, cost: ChunkCost, target_s: float) -> None:
        self.cost = cost
        self.target_s = target_s
        self.drift = 1.0
        """Seconds that steps took lately, as a multiple of the formula's: another process on the core, a hot CPU."""

    def room(self, running: int = 0, running_keys: float = 0.0, *, limited: bool = True) -> StepRoom:
        """For the chunks of a step beside `running` requests, which read `running_keys` keys."""
        around_s = self.cost.seconds(running, running_keys)
        left_s = self.target_s / self.drift - around_s if limited else math.inf
        return StepRoom(self.cost, left_s, running, running_keys)

    def learn(self, room: StepRoom, took_s: float) -> None:
        """A step is over that was planned with `room`."""
        if took_s > 0:
            drift = self.drift + NEW_SHARE * (took_s / room.predicted_s - self.drift)
            self.drift = min(max(drift, LEAST_DRIFT), MOST_DRIFT)

    def __str__(self) -> str:
        """For people."""
        cost = self.cost
        formula = f"{cost.base_s * 1e3:.2f} ms + {cost.token_s * 1e6:.1f} us/token + {cost.pair_s * 1e9:.2f} ns/pair"
        return f"{formula}, steps of {self.target_s * 1e3:.0f} ms"
