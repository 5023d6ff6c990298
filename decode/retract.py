"""Who gives way when pages are short: a conversation between two turns, or a request that is pushed back.

Owns: the count of those that were. Never: decides who comes in for it, or frees a page that is still being copied to a
tier (`storing.Stores`): then whoever needs it waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.common.errors import ErrorCode
from baton.common.kv.pool import RefusalReason, Refused
from baton.common.kv.tiers.api import PagesStored, StorePages
from baton.decode.answers import Answers
from baton.decode.parts import Parts
from baton.decode.request import DecodeRequest, Queued, Stopping, Storing


def choose_victim(running: Sequence[DecodeRequest]) -> DecodeRequest | None:
    """The request that is cheapest to bring back: fewest tokens that would have to be computed or moved again (its
    prefix in the tree is likely to be found there). Among equals the youngest. None when only one is left: one always
    keeps running, so that something finishes."""
    if len(running) < 2:
        return None

    def cost(request: DecodeRequest) -> tuple[int, int]:
        record = request.record
        return (record.kv_committed_len - record.cache_protected_len, -request.number)

    return min(running, key=cost)


class Retraction:
    def __init__(self, parts: Parts, answers: Answers) -> None:
        self._parts = parts
        self._answers = answers
        self.retractions = 0

    def make_room(self, request: DecodeRequest, refused: Refused, now: float) -> bool:
        """Retracts somebody, perhaps `request` itself. False when that frees nothing yet, or nobody can be: then it
        waits for a store or a hand-off to end, or fails when there is nothing to wait for."""
        parts = self._parts
        no_pages = refused.reason is RefusalReason.NO_PAGES
        parts.starved |= no_pages
        if no_pages and parts.stores.awaited:
            return False
        if no_pages and self.give_up_session(now):
            return not parts.stores.awaited
        victim = choose_victim([*parts.steps.running, *parts.steps.prefilling])
        if victim is not None and no_pages:
            return self._retract(victim, now)
        others = any(one.kv is not None and one is not request for one in parts.requests.values())
        if not no_pages or not (others or len(parts.stores)):
            reason = "prompt and answer outgrew this worker's pool"
            self._answers.fail(request, ErrorCode.OUT_OF_PAGES, reason, now)
        return False

    def give_up_session(self, now: float) -> bool:
        """The one that was idle longest, for somebody who lacks pages. They are copied to a tier first (if there is
        one), and waited for, before the next session is given up. False: there is none."""
        commands, stores = self._parts.commands, self._parts.stores
        before = len(commands)
        released = self._parts.sessions.release_oldest()
        stores.await_these([one for one in commands[before:] if isinstance(one, StorePages)], now)
        return released

    def on_stored(self, event: PagesStored, now: float) -> None:
        parts = self._parts
        request = parts.stores.end(event)
        parts.commands += parts.stores.go_on(event, parts.lacking)
        parts.waiting.stir()
        if request is None:
            return
        match request.state:
            case Storing():
                self._push_back(request, now)
            case Stopping():
                self._give_back(request)
                self._answers.done(request, now)
            case _:
                raise AssertionError(f"{event} for {request.key} in {request.state}")

    def _retract(self, request: DecodeRequest, now: float) -> bool:
        """Its pages are given back, at once or when they were copied to a tier (False)."""
        parts = self._parts
        parts.steps.remove(request)
        self.retractions += 1
        request.times.retracted(now)
        backup = parts.stores.retract(request, now)
        if backup is None:
            self._push_back(request, now)
            return True
        request.state = Storing()
        parts.commands.append(backup)
        return False

    def _push_back(self, request: DecodeRequest, now: float) -> None:
        """It comes again as a request whose outputs are known."""
        self._give_back(request)
        request.state = Queued(now)
        self._parts.waiting.put_back(request)

    def _give_back(self, request: DecodeRequest) -> None:
        """Of a retracted request. Nothing is cached: its newest position may have been planned and not computed."""
        self._parts.pool.release_kv_cache(request, request.known_tokens, is_insert=False)
        request.session_protected_len = None
