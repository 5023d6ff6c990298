"""How far two clocks are apart, from questions that take time themselves. Pure.

As NTP has it: the answer was given at some moment between question and answer, so the offset is known to half of the
round trip, and the shortest round trip knows it best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Exchange(NamedTuple):
    """By our wall clock: asked, and answered; by theirs: what they said in between."""

    asked_s: float
    theirs_s: float
    answered_s: float


class Offset(NamedTuple):
    """Theirs minus ours, give or take `error_s`."""

    ahead_s: float
    error_s: float


def offset_of(exchanges: Sequence[Exchange]) -> Offset:
    """At least one."""
    best = min(exchanges, key=lambda one: one.answered_s - one.asked_s)
    return Offset(best.theirs_s - (best.asked_s + best.answered_s) / 2, (best.answered_s - best.asked_s) / 2)
