"""Requests whose receiver was lost, kept for the one that takes its place.

Owns: which requests are kept, and until when. Never: frees a page, computes, or ships (`core.PrefillCore` does, with
what this table gives it). Who lost a decode worker is placed on another one within moments, which offers for the same
tokens: it is given what is there, at once, instead of computing it again.

What is kept is in nobody's way: it is computed further in what a step has left, its pages are the first to go when
an offer lacks some, and it ends after the grace period whatever happens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baton.common.errors import ErrorCode
from baton.common.ids import RequestId
from baton.common.messages import Failure
from baton.prefill.request import SourceRequest
from baton.transfer.api import OfferReceived

RECEIVER_LOST = frozenset({ErrorCode.NO_WORKER, ErrorCode.INTERNAL, ErrorCode.TRANSFER_CORRUPT})
"""The receiver died, fell silent, broke its rules, or could not be reached; the request may live on. All others are
about the request: cancelled, out of time, refused."""


def is_receiver_lost(failure: Failure) -> bool:
    return failure.code in RECEIVER_LOST


def serves(request: SourceRequest, offer: OfferReceived) -> bool:
    """Whether what `request` has computed is what `offer` asks for: the tokens, and the one behind if that is wanted.
    It may be known by now: it goes ahead of the pages."""
    own = request.offer
    token = not offer.sample or (own.sample and own.sampling == offer.sampling)
    return own.request_id == offer.request_id and token and np.array_equal(own.tokens, offer.tokens)


class KeptRequests:
    """At most one per request id: whoever comes later has been given what was there. Oldest first."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._kept: dict[RequestId, tuple[SourceRequest, float]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[SourceRequest]:
        return (request for request, _ in self._kept.values())

    @property
    def keeps(self) -> bool:
        return self._grace_s > 0

    def add(self, request: SourceRequest, now: float) -> SourceRequest | None:
        """Returns the one that gives way to it, if there is one."""
        before = self.take(request.offer.request_id)
        self._kept[request.offer.request_id] = request, now + self._grace_s
        return before

    def take(self, request_id: RequestId) -> SourceRequest | None:
        """Whoever is kept for this request; not any more."""
        found = self._kept.pop(request_id, None)
        return None if found is None else found[0]

    def take_oldest(self) -> SourceRequest | None:
        return self.take(next(iter(self._kept))) if self._kept else None

    def take_due(self, now: float) -> list[SourceRequest]:
        due = [request_id for request_id, (_, until_s) in self._kept.items() if until_s <= now]
        return [self._kept.pop(request_id)[0] for request_id in due]

    def next_deadline(self) -> float | None:
        return next(iter(self._kept.values()))[1] if self._kept else None
