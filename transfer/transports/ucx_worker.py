"""One worker of UCX, with its endpoints to workers of peers: numbered, for UCX pairs them by number.

The n-th endpoint that a worker makes towards another one and the n-th that the other makes towards it are the two ends
of one connection. A region travels by rendezvous: its source's endpoint is answered through the one that it is paired
with. Once that is closed what its pair sends is dropped without a word, on every transport, and small messages go on
arriving. So both sides of a connection make their endpoints with the same number, and an endpoint is only closed with
all of its connection. Two workers to a process keep its two directions apart: one receives, one serves.

Owns: the worker, its threads, and the numbers. Never: what is said over an endpoint.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.common.ids import Stamp
from baton.transfer.transports.ucx_parts import Endpoint, Ucxx

MOST_AT_ONCE = 256
"""So many links that were opened in vain are made up for at a time, which takes a second."""

_ABORT_NS = 10**9


class UcxWorker:
    """To be made in a running loop, which UCX tells of every completion. Raises `ucxx.error` when UCX does not
    start."""

    def __init__(self, ucxx: Ucxx) -> None:
        self._ucxx = ucxx
        self._context = ucxx.new_context()
        self.address = self._context.worker_address.tobytes()
        self._made: dict[Stamp, int] = {}  # endpoints towards each peer

    def made(self, peer: Stamp) -> int:
        """The number that the next endpoint towards `peer` gets."""
        return self._made.get(peer, 0)

    async def connect(self, peer: Stamp, address: bytes) -> Endpoint:
        """The next endpoint towards the worker of `peer` at `address`. Raises `ucxx.error`."""
        self._made[peer] = self.made(peer) + 1
        return await self._to(address)

    async def pair(self, peer: Stamp, address: bytes, number: int) -> Endpoint | None:
        """The endpoint paired with that `number` of the peer's, at least `made`; None: not yet, there were too many
        before it. Raises `ucxx.error`."""
        for _ in range(min(number - self.made(peer), MOST_AT_ONCE)):  # those that it made in vain
            abort(await self.connect(peer, address))
        return await self.connect(peer, address) if self.made(peer) == number else None

    async def to_itself(self) -> Endpoint:
        """Raises `ucxx.error`."""
        return await self._to(self.address)

    async def hear(self, buffer: npt.NDArray[np.generic], tag: int) -> None:
        """Receives into `buffer` from anybody. Raises `ucxx.error`, also for a message that is too long."""
        await self._context.recv(buffer, self._ucxx.tag(tag))

    async def receive(self, endpoint: Endpoint, buffer: npt.NDArray[np.generic], tag: int) -> None:
        """Receives into `buffer`; raises `ucxx.error` when the endpoint is, or gets, closed."""
        self._check(endpoint)
        await endpoint.recv(buffer, self._ucxx.tag(tag), force_tag=True)

    async def send(self, endpoint: Endpoint, buffer: npt.NDArray[np.generic], tag: int) -> None:
        """Sends `buffer`; raises `ucxx.error` when the endpoint is, or gets, closed."""
        self._check(endpoint)
        await endpoint.send(buffer, self._ucxx.tag(tag), force_tag=True)

    def stop(self) -> None:
        """Ends the threads: nothing of it may be called any more."""
        self._context.worker.stop_request_notifier_thread()  # wakes it: it looks up once a second only
        self._context.stop_notifier_thread()
        self._context.worker.stop_progress_thread()  # it would wake a thousand times a second for ever

    async def _to(self, address: bytes) -> Endpoint:
        return await self._context.create_endpoint_from_worker_address(self._ucxx.parse_address(address))

    def _check(self, endpoint: Endpoint) -> None:
        if endpoint.closed:
            raise self._ucxx.closed("closed")


def abort(endpoint: Endpoint) -> None:
    """Every request on it ends."""
    endpoint.abort(period=_ABORT_NS)
