"""One accepted offer on a prefill worker: what was asked for, its KV record, where it stands.

Never decides anything: that is `core.PrefillCore`'s.

    Queued -> Returning -> Prefilling: where the decode worker has more of the prompt than this one
    Queued -> Prefilling --ShipRegion*, FinishSource--> HandingOff --SourceReleased--> gone
      |           |  ^                                      |
      |           |  +-------- the next offer ------+       |
      |           +------------------------+        |       |    Stopping: over, but a reader may be left
      +--> Stopping <----------------------|--------|-------+    Kept: the receiver was lost, another may come
              | SourceAborted              v        |       |    Ended: nobody reads its pages any more
              +--------> gone, or ------> Kept -----+ <-----+
                                           |
                                           +-- grace over, or pages wanted --> gone
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from baton.common.kv.census import OwnerClass
from baton.common.kv.record import ReqKvInfo
from baton.common.messages import Failure, TokenLogprob
from baton.common.prompt_logprobs import PromptLogprobs
from baton.transfer.api import OfferReceived


@dataclass(frozen=True, slots=True)
class Queued:
    """Owns nothing yet."""


@dataclass(frozen=True, slots=True)
class Returning:
    """Owns its pages, but some of them are being filled by the decode worker with what it has; then it prefills."""


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Owns its pages. Tokens below `shipped` have been handed to the transfer plane (or were not asked for); and in the
    step that computes the last ones, when it ships all of the rest by layers, `sent` of `parts` parts of that."""

    shipped: int
    parts: int = 1
    sent: int = 0


@dataclass(frozen=True, slots=True)
class HandingOff:
    """All computed and shipped; the receiver has not confirmed yet."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """Over without success; a reader may be left. Its pages are quarantined."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Kept:
    """The receiver was lost, and provably reads nothing any more. What was computed waits for the next one, and goes on
    where nobody else wants the time or the pages."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Nobody reads its pages any more, except perhaps the step that is running: it gives them back."""


State = Queued | Returning | Prefilling | HandingOff | Stopping | Kept | Ended


class SourceRequest:
    """A `KvHolder`. `offer` is the newest one that it serves. `first_token` and `logprob` once its last position was
    computed, when they were asked for; `scores` are of the prompt's own tokens, chunk by chunk."""

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "first_token",
        "kv",
        "logprob",
        "number",
        "offer",
        "prefill_s",
        "queued_s",
        "scores",
        "state",
    )

    def __init__(self, number: int, offer: OfferReceived, arrived_s: float) -> None:
        self.number = number  # this engine's name for it in a batch
        self.offer = offer
        self.kv: ReqKvInfo | None = None
        self.state: State = Queued()
        self.arrived_s = arrived_s
        self.queued_s = 0.0  # of the offer that it serves
        self.prefill_s = 0.0
        self.cached_tokens = 0
        self.first_token = -1
        self.logprob: TokenLogprob | None = None
        self.scores: list[PromptLogprobs] = []

    @property
    def total(self) -> int:
        return len(self.offer.tokens)

    @property
    def scored(self) -> bool:
        return self.offer.sample and self.offer.sampling.scores_prompt

    @property
    def record(self) -> ReqKvInfo:
        assert self.kv is not None, f"{self.offer.key} owns no KV"
        return self.kv

    @property
    def complete(self) -> bool:
        return self.record.kv_committed_len == self.total

    def is_behind(self, other: SourceRequest) -> bool:
        """Nothing was shipped of it, and less or no more was computed: `other` can serve its offer instead."""
        match self.state:
            case Queued():
                return True
            case Prefilling(shipped, sent=0):
                return shipped == self.offer.start and self.record.kv_committed_len <= other.record.kv_committed_len
            case _:
                return False

    def __repr__(self) -> str:
        return f"<SourceRequest {self.offer.key} {self.state} {self.kv!r}>"


def owner_class(state: State) -> OwnerClass:
    match state:
        case Queued() | Kept() | Ended():
            return OwnerClass.REQUEST
        case Returning():
            return OwnerClass.INCOMING
        case Prefilling() | HandingOff():
            return OwnerClass.OUTGOING
        case Stopping():
            return OwnerClass.QUARANTINED
        case _:
            assert_never(state)
