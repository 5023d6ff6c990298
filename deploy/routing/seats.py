"""Which workers a request is sent to. Pure: loads in, a choice out. Knows no socket and no clock.

Policy: least loaded, with prefix affinity as the tie breaker. A worker that prefers a prompt (rendezvous hash of its
beginning) gets it as long as it has at most `slack` more requests than the least loaded one. A choice costs a few array
operations however many workers there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from baton.common.engine.policy import affinity_key, affinity_seeds, affinity_weights
from baton.common.ids import Stamp
from baton.common.messages import Load

SLACK = 4
_NEVER = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


class Seats:
    """The workers of one role that could take a request, and what each has to do: what it says itself, or what this
    gateway has placed there when that is more, for heartbeats lag behind. A worker that drains takes nothing."""

    def __init__(self, stamps: Iterable[Stamp] = ()) -> None:
        self._stamps = list(stamps)
        self._places = {stamp: place for place, stamp in enumerate(self._stamps)}
        self._seeds = affinity_seeds([stamp.worker for stamp in self._stamps])
        self._said = np.zeros(len(self._stamps), dtype=np.int64)
        self._placed = np.zeros(len(self._stamps), dtype=np.int64)
        self._drains = np.zeros(len(self._stamps), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, stamp: Stamp) -> bool:
        return stamp in self._places

    def heard(self, stamp: Stamp, load: Load) -> None:
        place = self._places.get(stamp)
        if place is not None:
            self._said[place] = load.queued + load.running
            self._drains[place] = load.draining

    def placed(self, stamp: Stamp, requests: int) -> None:
        """So many of this gateway's are there."""
        place = self._places.get(stamp)
        if place is not None:
            self._placed[place] = requests

    def choose(
        self, tokens: npt.NDArray[np.int32], refused_by: Collection[Stamp] = (), slack: int = SLACK
    ) -> Stamp | None:
        """The worker for a prompt, none of `refused_by`; None when there is no candidate."""
        takes = ~self._drains
        for stamp in refused_by:
            if stamp in self._places:
                takes[self._places[stamp]] = False
        requests = np.maximum(self._said, self._placed)
        able = requests[takes]
        if not len(able):
            return None
        takes &= requests <= able.min() + slack
        weights = affinity_weights(affinity_key(tokens), self._seeds)
        return self._stamps[int(np.where(takes, weights, _NEVER).argmin())]
