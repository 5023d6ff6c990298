"""Who is next, of those that wait at a gateway: fair shares between API keys, priorities within one. Pure.

Owns: the order of those that wait, and what each key has had. Never: a clock, a worker, or how many may be let in.

Each key has a counter of the work that was done for it, divided by its weight. The key with the lowest one is next; in
it the most urgent request, of those the first. A prompt is counted when it is let in, an answer's tokens as they come:
nobody has to guess how long an answer will be. (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.)

A1. Nobody waits while there is room: the queue refuses nobody his turn, it only orders (work conservation).
A2. A key that has asked for nothing begins at the counter of those that wait: it has saved up nothing.
A3. What a key is ahead of another, both waiting all the time, is bounded by twice a prompt and the answers under way.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from baton.common.config import MAX_PRIORITY
from baton.common.ids import RequestId

ANSWER_TOKEN_WORK = 2.0
"""What one more token of an answer costs, in tokens of a prompt: as price lists have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """With whom a cluster is shared: an API key, by its name. "" is everybody, where there are no keys. None: no limit;
    `top_priority`: the most urgent that it may be (smaller is sooner)."""

    name: str = ""
    weight: float = 1.0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    top_priority: int = -MAX_PRIORITY


EVERYBODY = Tenant()


class _Entry(NamedTuple):
    """One that waits, in the order of its key."""

    priority: int
    number: int
    request_id: RequestId
    tokens: int  # of its prompt


@final
@dataclass(slots=True, eq=False)
class _Share:
    """One key's. `work` / weight is its counter."""

    tenant: Tenant
    counter: float = 0.0
    waiting: list[_Entry] = field(default_factory=list)  # the next one first
    tokens: int = 0  # of their prompts


@final
class FairQueue:
    """`join`, then `pop` or `leave`. `said` counts the tokens of answers."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}  # as many as there are keys
        self._waiting: dict[RequestId, tuple[_Share, _Entry]] = {}
        self._number = 0
        self._floor = 0.0  # where somebody begins who was not there
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    def join(self, request_id: RequestId, tenant: Tenant, priority: int, tokens: int) -> None:
        share = self._shares.setdefault(tenant.name, _Share(tenant))
        share.tenant = tenant  # its weight may have been changed
        if not share.waiting:
            counters = [one.counter for one in self._shares.values() if one.waiting]
            self._floor = max(self._floor, min(counters, default=0.0))
            share.counter = max(share.counter, self._floor)  # A2
        entry = _Entry(priority, self._number, request_id, tokens)
        self._number += 1
        insort(share.waiting, entry)
        self._waiting[request_id] = share, entry
        share.tokens += tokens
        self.tokens += tokens

    def pop(self) -> tuple[RequestId, int]:
        """Who is next, and the tokens of its prompt, which are counted now. Not of an empty queue."""
        share = min((one for one in self._shares.values() if one.waiting), key=lambda one: one.counter)
        entry = share.waiting[0]
        self.leave(entry.request_id)
        self._floor = max(self._floor, share.counter)
        share.counter += entry.tokens / share.tenant.weight
        return entry.request_id, entry.tokens

    def leave(self, request_id: RequestId) -> None:
        """Does not wait any more; fine when it did not."""
        found = self._waiting.pop(request_id, None)
        if found is not None:
            share, entry = found
            del share.waiting[bisect_left(share.waiting, entry)]
            share.tokens -= entry.tokens
            self.tokens -= entry.tokens

    def said(self, tenant: Tenant, tokens: int) -> None:
        """So many more tokens of its answers have come."""
        share = self._shares.get(tenant.name)
        if share is not None:
            share.counter += ANSWER_TOKEN_WORK * tokens / share.tenant.weight

    def last_of_longest(self, than: Tenant) -> RequestId | None:
        """Who gives way to one more of `than` where all places are taken: the last of the key that has the most, for
        its weight. None: that is `than` itself."""
        own = self._shares.get(than.name)
        least = (len(own.waiting) + 1 if own is not None else 1) / than.weight
        longest = max(self._shares.values(), key=_length, default=None)
        if longest is None or longest is own or _length(longest) <= least:
            return None
        return longest.waiting[-1].request_id

    def tokens_of(self, request_id: RequestId) -> int:
        """Of the prompt of one that waits."""
        return self._waiting[request_id][1].tokens

    def last_of_heaviest(
        self, than: Tenant, tokens: int, excess: int, leaving: Collection[RequestId]
    ) -> list[RequestId] | None:
        """Who else gives way to a prompt of so many `tokens` of `than` where `excess` too many would wait: the last
        ones of keys that have more of them than that key would, for their weight. None: they would not be enough."""
        own = self._shares.get(than.name)
        least = ((own.tokens if own is not None else 0) + tokens) / than.weight
        others = [share for share in self._shares.values() if share is not own and share.waiting]
        staying = [[entry for entry in share.waiting if entry.request_id not in leaving] for share in others]
        loads = [
            sum(entry.tokens for entry in entries) / share.tenant.weight
            for share, entries in zip(others, staying, strict=True)
        ]
        victims: list[RequestId] = []
        while excess > 0:
            heaviest = max(range(len(loads)), key=loads.__getitem__, default=-1)
            if heaviest < 0 or loads[heaviest] <= least:
                return None
            entry = staying[heaviest].pop()
            loads[heaviest] -= entry.tokens / others[heaviest].tenant.weight
            excess -= entry.tokens
            victims.append(entry.request_id)
        return victims

    def tokens_before(self, tenant: Tenant, priority: int) -> float:
        """Tokens of prompts that will be let in before one that joins now, if nobody else comes: the key's own, and of
        the others what their shares let them have meanwhile."""
        own = self._shares.get(tenant.name)
        ahead = 0 if own is None else sum(one.tokens for one in own.waiting if one.priority <= priority)
        return ahead + sum(
            min(one.tokens, ahead * one.tenant.weight / tenant.weight)
            for one in self._shares.values()
            if one is not own
        )

    def lengths(self) -> Mapping[str, tuple[int, int]]:
        """(requests, tokens of their prompts) that wait, by key."""
        return {name: (len(one.waiting), one.tokens) for name, one in self._shares.items()}


def _length(share: _Share) -> float:
    return len(share.waiting) / share.tenant.weight
