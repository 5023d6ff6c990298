"""The workers of one role that could take a request, and what each has to do: what policies choose from. Pure.

Owns: the last news of each. News are many, choices few: news are kept in lists, and are arrays for a choice. Never:
chooses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from baton.common.engine.policy import affinity_key, affinity_seeds, affinity_weights
from baton.common.ids import Stamp
from baton.common.messages import Load
from baton.deploy.routing.policies import I64, Bools, Choice, Role


class Seats:
    """A worker that drains takes nothing."""

    def __init__(self, role: Role, page_size: int, stamps: Iterable[Stamp] = ()) -> None:
        self.stamps: Sequence[Stamp] = list(stamps)
        self._role = role
        self._page_size = page_size
        self._places = {stamp: place for place, stamp in enumerate(self.stamps)}
        self._seeds = affinity_seeds([stamp.worker for stamp in self.stamps])
        count = len(self.stamps)
        self._said_requests = [0] * count
        self._placed_requests = [0] * count
        self._placed_tokens = [0] * count  # that wait
        self._others_tokens = [0] * count  # of what a worker said, those that were not placed by this gateway
        self._free_pages = [0] * count
        self._tokens_per_s = [0.0] * count
        self._takes = [True] * count

    def __len__(self) -> int:
        return len(self.stamps)

    def __contains__(self, stamp: Stamp) -> bool:
        return stamp in self._places

    @property
    def takers(self) -> list[Stamp]:
        """Who takes anything at all."""
        return [stamp for stamp, takes in zip(self.stamps, self._takes, strict=True) if takes]

    def heard(self, stamp: Stamp, load: Load) -> None:
        place = self._places.get(stamp)
        if place is not None:
            self._said_requests[place] = load.queued + load.running
            self._others_tokens[place] = max(0, load.queued_tokens - self._placed_tokens[place])
            self._free_pages[place] = load.free_pages
            self._tokens_per_s[place] = load.tokens_per_s
            self._takes[place] = not load.draining

    def placed(self, stamp: Stamp, requests: int, tokens: int) -> None:
        """So many of this gateway's are there; the tokens are those that wait."""
        place = self._places.get(stamp)
        if place is not None:
            self._placed_requests[place], self._placed_tokens[place] = requests, tokens

    def choice(
        self,
        prompt: npt.NDArray[np.int32],
        refused_by: Collection[Stamp],
        cached: tuple[I64, Bools] | None,
        turn: int,
        draw: int,
    ) -> Choice:
        """All that is known for a policy. None of `refused_by` takes it. `cached`: `Choice.matched` and `current`."""
        takes = np.array(self._takes, dtype=np.bool_)
        for stamp in refused_by:
            if stamp in self._places:
                takes[self._places[stamp]] = False
        requests = np.array((self._said_requests, self._placed_requests), dtype=np.int64).max(axis=0)
        waiting_tokens = np.array((self._placed_tokens, self._others_tokens), dtype=np.int64).sum(axis=0)
        count = len(self.stamps)
        matched, current = cached or (np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.bool_))
        return Choice(
            role=self._role,
            prompt_tokens=len(prompt),
            page_size=self._page_size,
            takes=takes,
            matched=matched,
            current=current,
            requests=requests,
            waiting_tokens=waiting_tokens,
            free_pages=np.array(self._free_pages, dtype=np.int64),
            tokens_per_s=np.array(self._tokens_per_s, dtype=np.float64),
            affinity=affinity_weights(affinity_key(prompt), self._seeds),
            turn=turn,
            draw=draw,
        )
