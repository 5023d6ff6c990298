"""The hand-offs that this worker asked for. Owns their ids and which request each belongs to, until it has ended."""

from __future__ import annotations

import hashlib

from baton.common.ids import Epoch, HandoffId, HandoffKey, Stamp
from baton.common.kv.pool import KvPool
from baton.common.units import page_floor
from baton.decode.request import DecodeRequest, Incoming
from baton.transfer.api import OpenSink


class Handoffs:
    """Ids are unique over all processes, ever: a hash of the random epoch and a counter."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._count = 0
        self._open: dict[HandoffKey, tuple[DecodeRequest, int]] = {}  # and where it starts

    def __len__(self) -> int:
        return len(self._open)

    def new_id(self) -> HandoffId:
        self._count += 1
        seed = self._epoch.to_bytes(8, "little") + self._count.to_bytes(8, "little")
        return HandoffId(int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little") >> 1)

    def open(self, request: DecodeRequest, peer: Stamp, pool: KvPool, deadline_s: float) -> OpenSink:
        """The next attempt of the request's hand-off: everything from the last whole page that it has. Its pages are
        the hand-off's from here on."""
        assert request.handoff is not None
        key = HandoffKey(request.handoff, request.attempt)
        start = page_floor(request.record.kv_committed_len, pool.page_size)
        request.attempt += 1
        request.tried.add(peer)
        request.times.attempts += 1
        request.times.prefill_worker = peer.worker
        request.state = Incoming(key)
        self._open[key] = (request, start)
        return OpenSink(
            key=key,
            peer=peer.worker,
            request_id=request.key[0],
            tokens=request.fill_tokens,
            start=start,
            pages=pool.open_incoming(request.record, start),
            sample=request.wants_first_token,
            sampling=request.sampling,
            deadline_s=deadline_s,
            priority=request.priority,
            trace=request.trace,
        )

    def find(self, key: HandoffKey) -> tuple[DecodeRequest | None, int]:
        """Whose it is, and where it starts; None: it has ended, or never was."""
        return self._open.get(key, (None, 0))

    def close(self, key: HandoffKey) -> tuple[DecodeRequest, int]:
        """It has ended, one way or the other: the pages are the request's again. Also where it started."""
        return self._open.pop(key)
