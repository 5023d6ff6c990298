"""What the two session machines share: the verdict of a transition, their clockwork events, their settings.

Owns no state. A transition is `(state, event, now, rules) -> Step`; it never waits, and does nothing but compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct, field

from baton.common.kv.layout import Component
from baton.common.messages import Failure

StateT = TypeVar("StateT")
EffectT = TypeVar("EffectT")


class Verdict(StrEnum):
    """What an event meant to a state. `IGNORED_*` leave the state as it is; they may answer the peer again."""

    MOVE = "move"
    IGNORED_STALE = "ignored_stale"  # about something that is over, or not ours to act on
    IGNORED_DUPLICATE = "ignored_duplicate"  # heard before


class ImpossibleTransition(AssertionError):
    """An event of this process (a command, an answer of the data plane, a timer) that its own rules exclude: a bug.
    Never raised by a peer's frame: whatever a peer sends is legal, stale, or a reason to end the hand-off."""


class Step(Struct, Generic[StateT, EffectT], frozen=True):
    """The outcome of one transition: the next state and what to do, in order."""

    state: StateT
    verdict: Verdict
    effects: tuple[EffectT, ...] = ()


class SessionRules(Struct, frozen=True):
    """Settings of the machines; the same for all hand-offs of a process."""

    page_size: int
    resend_after_s: float
    state_pieces: int = 1
    layers: Mapping[Component, int] = field(default_factory=dict)  # of a unit; one where nothing is said


def impossible(state: object, event: object) -> ImpossibleTransition:
    return ImpossibleTransition(f"{type(event).__name__} in {type(state).__name__}: {event!r} in {state!r}")


MAX_REASON = 1000


def for_the_wire(failure: Failure) -> Failure:
    """`failure` with a reason that every receiver takes. A frame over the limits would be dropped over there, again and
    again, and the peer would learn of this end by its deadline only."""
    if len(failure.reason) <= MAX_REASON:
        return failure
    return msgspec.structs.replace(failure, reason=failure.reason[: MAX_REASON - 1] + "…")


# --------------------------------------------------------------------------------------- clockwork and liveness


class ResendDue(Struct, frozen=True):
    """What was sent last has not been answered for `resend_after_s`."""


class DeadlinePassed(Struct, frozen=True):
    """The hand-off has run out of time."""


class PeerSilent(Struct, frozen=True):
    """Nothing was heard of the peer for `dead_after_s`: give up on it. It may still read: this is no proof."""


class PeerDead(Struct, frozen=True):
    """The peer's process is proven dead: it reads and sends nothing any more."""
