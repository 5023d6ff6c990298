"""How many tokens of prompts a step may compute beside streams, for the gap between their tokens to stay as promised.

A step with streams should take at most as long as was promised between two tokens; where the streams alone take more
than half of that, at most `STRETCH` times what they take alone, so that prompts get their share on a machine for which
too much was promised. Nothing is measured in advance: what streams take alone, and what a token of a prompt adds, is
learned from the steps that are computed anyway. Under prompts without end, one step in so many leaves them out, to see
again what the streams take alone; and so does the next one when a step with prompts shows that they take less.

What a token adds grows with the history that it sees; it is followed from step to step, so the first chunk behind a
long history that somebody else computed may take too long. Other than `chunk_predictor`, this knows no formula.

Owns: the two estimates. Never: measures, or leaves prompts out of two steps in a row.
"""

from __future__ import annotations

import math

STRETCH = 2.0
REMEASURE_STEPS = 32
"""With prompts in each of them."""
NEW_SHARE = 0.3
"""Of a step that is over, in the estimates."""
MOST_GROWTH = 2.0
"""A step of streams alone that took longer than so many usual ones was disturbed, and counts as no more than that.
Where one with prompts takes less than the usual one by that factor, the usual one is not usual any more."""
UNLIMITED = 1 << 40


class ItlPacer:
    """`itl_s`: promised between two tokens."""

    def __init__(self, itl_s: float) -> None:
        assert itl_s > 0, itl_s
        self.itl_s = itl_s
        self._alone_s: float | None = None
        self._token_s: float | None = None
        self._steps = REMEASURE_STEPS  # with prompts since the last one without

    def most_tokens(self, running: int) -> int:
        """Of prompts in the next step, beside `running` streams. 0: none, this once."""
        if not running:
            return UNLIMITED
        if self._steps >= REMEASURE_STEPS:
            return 0
        if self._alone_s is None or self._token_s is None:
            return 1
        left_s = max(self.itl_s - self._alone_s, (STRETCH - 1) * self._alone_s)
        return max(1, int(left_s / self._token_s)) if self._token_s * UNLIMITED > left_s else UNLIMITED

    def learn(self, tokens: int, took_s: float) -> None:
        """A step with streams is over, in which so many tokens of prompts were computed."""
        self._steps = self._steps + 1 if tokens else 0
        if not 0 < took_s < math.inf:
            return
        if not tokens:
            known_s = took_s if self._alone_s is None else self._alone_s
            self._alone_s = known_s + NEW_SHARE * (min(took_s, MOST_GROWTH * known_s) - known_s)
        elif self._alone_s is not None:
            usual_s = self._alone_s if self._token_s is None else self._alone_s / MOST_GROWTH
            if took_s < usual_s:  # the step of streams alone was disturbed, or there are fewer of them: look again
                self._alone_s, self._steps = None, REMEASURE_STEPS
                return
            added_s = max(0.0, took_s - self._alone_s) / tokens
            known_s = added_s if self._token_s is None else self._token_s
            self._token_s = known_s + NEW_SHARE * (added_s - known_s)
