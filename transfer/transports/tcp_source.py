"""The side of the `tcp` lane that answers: receivers that call here, and regions on their way out of pages.

Owns: the listening socket, the connections of receivers, what they asked for, and what waits to be asked for. Never: a
wait, or an answer to somebody who has not proven itself. Each call that sends copies into the kernel before it returns,
so nothing reads the pages of a region that was given up; the receiver gets zeros instead, and is told.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from baton.common.errors import ConfigError
from baton.common.ids import Stamp
from baton.common.kv.layout import Component
from baton.common.log import EventLog
from baton.transfer.transports.base import TAG_TAKEN, Ended, Rows, Sent, TransportEvent
from baton.transfer.transports.tcp_connections import Connections, tune
from baton.transfer.transports.tcp_parts import (
    ASK,
    DROP,
    FRAME_BYTES,
    PROOF_BYTES,
    Gone,
    NotListed,
    Prover,
    RegionMemory,
    TcpFrame,
    Vectors,
    Wire,
    region_out,
    region_spoiled,
)

PROVE_WITHIN_S = 5.0
MAX_UNPROVEN = 64
"""Connections that have not proven themselves yet; further ones push out the oldest."""
MAX_ASKED = 1 << 16
"""Regions that one connection may ask for before they are ready."""
LATE_CHECK_S = 1.0
"""How often those are looked for that prove nothing."""

_BACKLOG = 128
_READ_AHEAD_BYTES = 64 * FRAME_BYTES

_log = EventLog("baton.transfer")


@dataclass(slots=True, eq=False)
class _Offered:
    """A region that waits to be asked for, or for its turn on the connection that asked."""

    op: int
    peer: Stamp
    tag: int
    rows: Rows
    caller: _Caller | None = None


@dataclass(slots=True, eq=False)
class _Leaving:
    """The region whose bytes are being sent. `offered` None: given up, and what is left is padding."""

    offered: _Offered | None
    tag: int
    out: Vectors


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection of a receiver, or of somebody who has yet to prove that."""

    wire: Wire
    prove_by_s: float
    wants_room: bool = False
    hello: bytes = b""
    welcome: bytes = b""
    peer: Stamp | None = None  # proven
    number: int = 0
    asked: dict[int, None] = field(default_factory=dict)  # tags that nobody has offered yet
    queue: deque[_Offered] = field(default_factory=deque)
    leaving: _Leaving | None = None

    @property
    def has_to_write(self) -> bool:
        return not self.wire.quiet or self.leaving is not None or bool(self.queue)


class TcpSource:
    """See `tcp.TcpTransport`. `report` takes the events. Raises ConfigError when it cannot listen on `bind_host`."""

    def __init__(
        self,
        prover: Prover,
        connections: Connections,
        memory: Mapping[Component, RegionMemory],
        bind_host: str,
        report: Callable[[TransportEvent], None],
    ) -> None:
        self._prover = prover
        self._connections = connections
        self._memory = memory
        self._report = report
        self._listener = _listen(bind_host)
        connections.listen(self._listener, self._accept)
        self._unproven: deque[_Caller] = deque()  # oldest first
        self._callers: dict[tuple[Stamp, int], _Caller] = {}  # proven, by receiver and number of its stream
        self._asks: dict[tuple[Stamp, int], _Caller] = {}  # (receiver, tag): asked for before it was offered
        self._offered: dict[int, _Offered] = {}  # by op
        self._ready: dict[tuple[Stamp, int], _Offered] = {}  # (receiver, tag): not asked for yet
        self._late_check_s = 0.0
        self.stray = 0  # callers that were turned away

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def send(self, op: int, peer: Stamp, tag: int, rows: Rows) -> None:
        if (peer, tag) in self._ready:
            self._report(Ended(op, TAG_TAKEN, peer_lost=False))
            return
        offered = self._offered[op] = _Offered(op, peer, tag, rows)
        caller = self._asks.pop((peer, tag), None)
        if caller is None:
            self._ready[peer, tag] = offered
        else:
            del caller.asked[tag]
            self._queue(caller, offered)

    def cancel(self, op: int) -> None:
        """Unknown is fine."""
        offered = self._offered.get(op)
        if offered is not None:
            self._end(offered, "cancelled", peer_lost=False)

    def shut_out(self, peer: Stamp) -> None:
        for caller in [caller for caller in self._callers.values() if caller.peer == peer]:
            self._close_caller(caller, "shut out", peer_lost=False)
        for offered in [offered for offered in self._ready.values() if offered.peer == peer]:
            self._end(offered, "shut out", peer_lost=False)

    def turn_away_late(self, now: float) -> None:
        """Those that prove nothing. To be called with every turn."""
        self._greet_early()
        if now < self._late_check_s:
            return
        self._late_check_s = now + LATE_CHECK_S
        self._connections.set_listening(self._listener, True)
        while self._unproven and self._unproven[0].prove_by_s <= now:
            self._on_gone(self._unproven[0], "proved nothing in time")

    def close(self) -> None:
        for caller in [*self._unproven, *self._callers.values()]:
            self._close_caller(caller, "closed", peer_lost=False)
        for offered in list(self._ready.values()):
            self._end(offered, "closed", peer_lost=False)
        self._listener.close()

    # ------------------------------------------------------------------------------------- connections

    def _accept(self, _mask: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, for instance: heard again with the next check
            _log.seldom("tcp_accept", error=str(error))
            self._connections.set_listening(self._listener, False)
            return
        tune(connection)
        caller = _Caller(Wire(connection), time.monotonic() + PROVE_WITHIN_S)
        self._unproven.append(caller)
        self._connections.add(caller, partial(self._serve, caller))
        if len(self._unproven) > MAX_UNPROVEN:
            self._on_gone(self._unproven[0], "too many callers that prove nothing")

    def _serve(self, caller: _Caller, mask: int) -> None:
        try:
            if mask & ~select.EPOLLOUT:
                self._hear(caller)
            self._send_some(caller)
        except Gone as gone:
            self._on_gone(caller, str(gone))

    def _hear(self, caller: _Caller) -> None:
        caller.wire.fill(_READ_AHEAD_BYTES)
        if caller.peer is None:
            self._hear_proof(caller)
        if caller.peer is not None:
            while (message := caller.wire.take(FRAME_BYTES)) is not None:
                self._on_frame(caller, caller.peer, TcpFrame.unpack(message))

    def _hear_proof(self, caller: _Caller) -> None:
        """Answers the hello when it is there, and believes it when the proof is there too."""
        if not caller.hello:
            caller.hello = caller.wire.take(PROOF_BYTES) or b""
            self._greet(caller)
        proof = caller.wire.take(PROOF_BYTES) if caller.welcome else None
        if proof is None:
            return
        hello = self._prover.read_hello(caller.hello)  # anew: who said it may not be a member any more
        self._prover.check_proof(hello.stamp, caller.hello, caller.welcome, proof)
        self._unproven.remove(caller)
        old = self._callers.get((hello.stamp, hello.stream))
        if old is not None:
            self._close_caller(old, "connected anew", peer_lost=True)
        caller.peer, caller.number = hello.stamp, hello.stream
        self._callers[hello.stamp, hello.stream] = caller

    def _greet(self, caller: _Caller) -> None:
        """News of a new member do not reach all at the same time: who is none yet may wait, as long as for a proof."""
        if caller.hello and not caller.welcome:
            with contextlib.suppress(NotListed):
                claimed = self._prover.read_hello(caller.hello)
                caller.welcome = self._prover.welcome(claimed.stamp, caller.hello)
                caller.wire.say(caller.welcome)

    def _greet_early(self) -> None:
        for caller in list(self._unproven):
            try:
                self._greet(caller)
            except Gone as gone:
                self._on_gone(caller, str(gone))

    def _on_gone(self, caller: _Caller, reason: str) -> None:
        if caller.peer is None:
            self.stray += 1
            _log.seldom("tcp_stranger", reason=reason)
        self._close_caller(caller, reason, peer_lost=True)

    def _close_caller(self, caller: _Caller, reason: str, peer_lost: bool) -> None:
        if caller.leaving is not None and caller.leaving.offered is not None:
            self._end(caller.leaving.offered, reason, peer_lost)
        for offered in list(caller.queue):
            self._end(offered, reason, peer_lost)
        if caller.peer is None:
            self._unproven.remove(caller)
        else:
            for tag in caller.asked:
                del self._asks[caller.peer, tag]
            del self._callers[caller.peer, caller.number]
        self._connections.remove(caller)

    # ----------------------------------------------------------------------------------------- regions

    def _on_frame(self, caller: _Caller, peer: Stamp, frame: TcpFrame) -> None:
        if frame.kind == DROP:
            if frame.tag in caller.asked:  # else it has been offered, and may be on its way
                del caller.asked[frame.tag], self._asks[peer, frame.tag]
            return
        if frame.kind != ASK or (peer, frame.tag) in self._asks:
            raise Gone(f"frame {frame} makes no sense")
        offered = self._ready.pop((peer, frame.tag), None)
        if offered is not None:
            offered.caller = caller
            caller.queue.append(offered)
        elif len(caller.asked) >= MAX_ASKED:
            raise Gone("asks for too much")
        else:
            caller.asked[frame.tag] = None
            self._asks[peer, frame.tag] = caller

    def _queue(self, caller: _Caller, offered: _Offered) -> None:
        offered.caller = caller
        caller.queue.append(offered)
        try:
            self._send_some(caller)
        except Gone as gone:
            self._on_gone(caller, str(gone))

    def _send_some(self, caller: _Caller) -> None:
        """One portion of the region whose turn it is."""
        caller.wire.say()
        if caller.leaving is None and caller.queue:
            offered = caller.queue.popleft()
            out = region_out(offered.tag, self._memory[offered.rows.component].pieces(offered.rows))
            caller.leaving = _Leaving(offered, offered.tag, out)
        leaving = caller.leaving
        if leaving is not None and caller.wire.quiet:
            caller.wire.send(leaving.out)
            if not leaving.out.left:
                caller.leaving = None
                if leaving.offered is not None:
                    del self._offered[leaving.offered.op]
                    self._report(Sent(leaving.offered.op))
        self._connections.listen_for_room(caller)

    def _end(self, offered: _Offered, reason: str, peer_lost: bool) -> None:
        """Nothing reads its pages from here on."""
        del self._offered[offered.op]
        self._report(Ended(offered.op, reason, peer_lost))
        caller = offered.caller
        if caller is None:
            del self._ready[offered.peer, offered.tag]
        elif caller.leaving is not None and caller.leaving.offered is offered:
            out = caller.leaving.out
            caller.leaving = _Leaving(None, offered.tag, region_spoiled(offered.tag, out)) if out.done else None
        else:
            caller.queue.remove(offered)


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError("bind_host", host, f"cannot listen there: {error}") from error
    return listener
