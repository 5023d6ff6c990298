"""What a prefill worker owes those who ask it for KV: an oracle beside its core.

Whoever is refused without need asks elsewhere, and what is told of a cache changes no answer. So what comes of each
event is compared with what must, and what a worker says of its work with the work that it was seen to do.

- M1  An offer is refused for want of room exactly when as many wait as may, unless what it asks for is kept.
- M2  Kept, for a receiver that may come, is only what was lost with its receiver: not by one who drains, nor where the
      request was over by itself. Nor is anything kept while a prompt waits and none is computed.
- M3  What is said to have come from the cache, of the tokens asked for, is what was neither computed nor given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.common.config import PrefillConfig
from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.record import ReqKvInfo
from baton.common.messages import Failure
from baton.prefill.core import PrefillCore
from baton.prefill.grace import RECEIVER_LOST
from baton.transfer.api import (
    AbortSource,
    FinishSource,
    OfferReceived,
    SinkCommitted,
    SinkFailed,
    SourceAborted,
    SourceReleased,
    SourceStopping,
)


class PromptWatch:
    """Of one prefill worker."""

    def __init__(self, name: str, core: PrefillCore, config: PrefillConfig) -> None:
        self._name = name
        self._core = core
        self._config = config
        self._offers: dict[HandoffKey, OfferReceived] = {}
        self._given_up: dict[HandoffKey, Failure] = {}  # of these, those that are over already
        self._committed: dict[ReqKvInfo, int] = {}  # before the step or the return that ends now
        self._filled: dict[ReqKvInfo, int] = {}  # tokens, of each that is held, since it is
        self._queued = 0
        self._kept = False

    def before(self, event: object) -> None:
        """It is going to be handled."""
        if isinstance(event, OfferReceived):
            self._offers[event.key] = event
            self._queued = self._core.queued
            self._kept = self._full and self._keeps(event)
        elif isinstance(event, SinkCommitted | SinkFailed):
            self.before_filling()

    @property
    def _full(self) -> bool:
        return self._queued >= self._config.max_queued_requests

    def _keeps(self, offer: OfferReceived) -> bool:
        kept = [one.owner for one in self._core.holdings() if one.owner_class is OwnerClass.REQUEST]
        return any(isinstance(key, HandoffKey) and self._is_of(key, offer) for key in kept)

    def _is_of(self, key: HandoffKey, offer: OfferReceived) -> bool:
        return key in self._offers and self._offers[key].request_id == offer.request_id

    def after(self, event: object, effects: Sequence[object], computing: bool) -> None:
        """`computing`: a step is under way, whose requests stay until it is over."""
        if isinstance(event, SinkCommitted | SinkFailed):
            self.filled()
        self.says(effects)
        match event:
            case OfferReceived(key):
                self._offered(key)
            case SourceStopping(key, failure):
                self._given_up.setdefault(key, failure)
            case SourceReleased(key):
                self._over(key)
            case SourceAborted(key, failure):
                if not computing and self._holding(key, OwnerClass.REQUEST):
                    self._kept_rightly(key, failure)
                self._given_up.pop(key, None)
                if not self._holding(key):
                    self._over(key)
            case _:
                pass

    def _offered(self, key: HandoffKey) -> None:
        """M1"""
        failure = self._given_up.get(key)
        refused = failure is not None and failure.code is ErrorCode.OVERLOADED
        assert failure is not None or not self._full or self._kept, (
            f"{self._name} takes {key} in behind {self._queued} of {self._config.max_queued_requests}"
        )
        assert not refused or self._full, f"{self._name} refuses {key} behind {self._queued}: {failure}"

    def _kept_rightly(self, key: HandoffKey, failure: Failure) -> None:
        """M2"""
        reasons = [one.code for one in (failure, self._given_up.get(key)) if one is not None]
        assert RECEIVER_LOST.issuperset(reasons), f"{self._name} keeps {key}, which ended by {reasons}"
        assert not self._core.load().draining, f"{self._name} drains, and keeps {key}"

    def look(self) -> None:
        """M2, between two steps"""
        if not self._core.queued:
            return
        held = [*self._core.holdings()]
        computed = [one.record for one in held if one.owner_class is OwnerClass.OUTGOING]
        if not any(record.kv_committed_len < record.kv_allocated_len for record in computed):
            kept = [one.owner_id for one in held if one.owner_class is OwnerClass.REQUEST]
            assert not kept, f"{self._name} keeps {kept} while {self._core.queued} prompts wait"

    def _holding(self, key: HandoffKey, *classes: OwnerClass) -> Holding | None:
        held = (one for one in self._core.holdings() if one.owner == key)
        return next((one for one in held if not classes or one.owner_class in classes), None)

    def _over(self, key: HandoffKey) -> None:
        self._offers.pop(key, None)
        self._given_up.pop(key, None)

    def before_filling(self) -> None:
        """A step or a return is over, which the core does not know yet."""
        self._committed = {record: record.kv_committed_len for record in self._core.records()}

    def filled(self) -> None:
        """Now it does."""
        before, known = self._committed, self._filled
        self._filled = {}
        for record in self._core.records():
            now = record.kv_committed_len
            self._filled[record] = known.get(record, 0) + now - before.get(record, now)

    def says(self, effects: Iterable[object]) -> None:
        for effect in effects:
            if isinstance(effect, AbortSource):
                self._given_up.setdefault(effect.key, effect.failure)
            elif isinstance(effect, FinishSource):
                self._finished(effect)

    def _finished(self, finish: FinishSource) -> None:
        """M3"""
        offer, holding = self._offers[finish.key], self._holding(finish.key)
        assert holding is not None, f"{self._name} has finished {finish.key}, and holds nothing of it"
        found = len(offer.tokens) - self._filled.get(holding.record, 0) - offer.start
        told = finish.result.cached_tokens
        assert told == max(0, found), f"{self._name} says that {told} tokens of {finish.key} were cached, of {found}"
