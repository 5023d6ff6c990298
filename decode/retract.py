"""Whom to push back when a decode step does not fit: a pure choice. Owns nothing, frees nothing."""

from __future__ import annotations

from collections.abc import Sequence

from baton.decode.request import DecodeRequest


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
