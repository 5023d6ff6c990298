"""What a gateway measures and limits over time: how fast its queue moves, and how much each API key asks. Pure.

Owns: a speed that is known or unknown, and one bucket per limit. Never: an order, or a decision about a request.
"""

from __future__ import annotations

import math
from typing import final

from baton.deploy.admission_queue import Tenant

REMEMBERED_S = 30.0
"""What is older counts for less than 1/e in the speed."""
KNOWN_AFTER_S = 1.0
KNOWN_AFTER = 8
"""A speed is known when so many left the queue, over so long a time."""
STALE_S = 60.0
MINUTE_S = 60.0


@final
class QueueSpeed:
    """Tokens of prompts that leave the queue in a second, while somebody waits."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Other workers serve from now on."""
        self._tokens = self._seconds = 0.0
        self._left = 0
        self._since_s: float | None = None  # somebody has been waiting, and nobody left
        self._last_s = -math.inf

    def waits(self, now: float) -> None:
        """Somebody waits now."""
        if self._since_s is None:
            if now - self._last_s > STALE_S:
                self.forget()
            self._since_s = now

    def left(self, tokens: int, now: float, *, waiting: bool) -> None:
        """One was let in. `waiting`: others still wait."""
        if self._since_s is None:
            return  # it did not have to wait
        seconds = now - self._since_s
        kept = math.exp(-seconds / REMEMBERED_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds
        self._left += 1
        self._last_s = now
        self._since_s = now if waiting else None

    def emptied(self) -> None:
        """The last one has gone without its turn."""
        self._since_s = None

    @property
    def tokens_per_s(self) -> float | None:
        """None: not known."""
        known = self._left >= KNOWN_AFTER and self._seconds >= KNOWN_AFTER_S
        return self._tokens / self._seconds if known else None


@final
class _Bucket:
    """Fills evenly, up to what a minute brings, or to one, without which nobody would ever be within the limit. What is
    taken after it was allowed may make it owe."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._most = max(1.0, per_minute)
        self._level = self._most
        self._at_s = now

    def wait_s(self, now: float) -> float:
        """Until there is one in it."""
        return max(0.0, 1.0 - self._fill(now)) * MINUTE_S / self.per_minute

    def take(self, count: float, now: float) -> None:
        self._level = self._fill(now) - count

    def _fill(self, now: float) -> float:
        self._level = min(self._most, self._level + max(0.0, now - self._at_s) * self.per_minute / MINUTE_S)
        self._at_s = now
        return self._level


@final
class RateLimits:
    """Of all keys."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], _Bucket] = {}  # as many as there are limits

    def wait_s(self, tenant: Tenant, now: float) -> tuple[float, str]:
        """(until one more request is within the key's limits, which one it waits for). 0.0: it is."""
        waits = [
            (self._bucket(tenant, what, per_minute, now).wait_s(now), f"{per_minute:g} {what} per minute")
            for what, per_minute in _limits(tenant)
        ]
        return max(waits, default=(0.0, ""))

    def admitted(self, tenant: Tenant, prompt_tokens: int, now: float) -> None:
        for what, per_minute in _limits(tenant):
            self._bucket(tenant, what, per_minute, now).take(prompt_tokens if what == "tokens" else 1, now)

    def said(self, tenant: Tenant, tokens: int, now: float) -> None:
        if tenant.tokens_per_minute is not None:
            self._bucket(tenant, "tokens", tenant.tokens_per_minute, now).take(tokens, now)

    def _bucket(self, tenant: Tenant, what: str, per_minute: float, now: float) -> _Bucket:
        key = tenant.name, what
        bucket = self._buckets.get(key)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self._buckets[key] = _Bucket(per_minute, now)
        return bucket


def _limits(tenant: Tenant) -> list[tuple[str, float]]:
    """(what, how many a minute)."""
    limits = (("requests", tenant.requests_per_minute), ("tokens", tenant.tokens_per_minute))
    return [(what, per_minute) for what, per_minute in limits if per_minute is not None]
