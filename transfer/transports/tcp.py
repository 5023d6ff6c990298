"""The lane between hosts on an ordinary network: the kernel copies from the source's pages to the wire, and from the
wire into the receiver's. Plain sockets, two-sided, no staging.

Owns: the turns of its two sides (`tcp_receiver.py` asks, `tcp_source.py` answers) over one set of connections, and what
they report. Never: a wait, or a thread.

The receiver asks for a region on one of its connections, and the whole region comes back on that one. Each call of the
kernel copies into the pages that are open at that moment, so `cancel` is immediate on both sides: of a region that is
half there the rest is read into scrap memory; one that is half sent is filled up with zeros, and the receiver is told
that it is spoiled. Other regions on the connection do not notice.

Both ends prove that they are the two members that they say (`tcp_parts`). What follows is neither encrypted nor signed:
for networks that are yours, as `ucx`; `zmq` is the lane that encrypts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from baton.common.ids import Stamp
from baton.common.kv.layout import Component
from baton.common.messages import LaneAddress
from baton.transfer.session.tickets import SecretWith
from baton.transfer.transports.base import Bytes, Rows, TransportEvent, Watcher
from baton.transfer.transports.tcp_connections import Connections
from baton.transfer.transports.tcp_parts import Prover, RegionMemory
from baton.transfer.transports.tcp_receiver import TcpReceiver
from baton.transfer.transports.tcp_source import TcpSource

TURN_S = 0.002
"""About as long one `poll` may copy."""


class TcpTransport:
    """See DirectTransport. `pools` are uint8 [units, bytes of one], each one block; they must outlive the transport.
    Raises ConfigError when it cannot listen on `bind_host`."""

    lane = "tcp"

    def __init__(
        self,
        stamp: Stamp,
        watcher: Watcher,
        bind_host: str,
        secret_with: SecretWith,
        pools: Mapping[Component, Bytes],
        streams: int,
    ) -> None:
        self._watcher = watcher
        self._connections = Connections()
        self._events: list[TransportEvent] = []
        prover, memory = (
            Prover(stamp, secret_with),
            {component: RegionMemory(pool) for component, pool in pools.items()},
        )
        self._source = TcpSource(prover, self._connections, memory, bind_host, self._report)
        self._receiver = TcpReceiver(prover, self._connections, memory, streams, self._report)
        watcher.register(self._connections.fileno())

    def address(self) -> LaneAddress:
        host, port = self._source.address
        return LaneAddress(lane=self.lane, address={"host": host, "port": port})

    @property
    def stray(self) -> int:
        """Regions that came unasked, and callers that were turned away."""
        return self._receiver.stray + self._source.stray

    def open(self, peer: Stamp, address: LaneAddress) -> None:
        self._receiver.open(peer, address)

    def close_link(self, peer: Stamp) -> None:
        self._receiver.close_link(peer, "link closed")

    def shut_out(self, peer: Stamp) -> None:
        self.close_link(peer)
        self._source.shut_out(peer)

    def receive(self, op: int, peer: Stamp, tag: int, rows: Rows) -> None:
        self._receiver.receive(op, peer, tag, rows)

    def send(self, op: int, peer: Stamp, tag: int, rows: Rows) -> None:
        self._source.send(op, peer, tag, rows)

    def cancel(self, op: int) -> None:
        self._receiver.cancel(op)
        self._source.cancel(op)

    def poll(self) -> list[TransportEvent]:
        self._connections.serve_ready(time.perf_counter() + TURN_S)
        self._source.turn_away_late(time.monotonic())
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        return bool(self._events)

    def close(self) -> None:
        if self._connections.closed:
            return
        self._receiver.close()
        self._source.close()
        self._watcher.unregister(self._connections.fileno())
        self._connections.close()

    def _report(self, event: TransportEvent) -> None:
        self._events.append(event)
