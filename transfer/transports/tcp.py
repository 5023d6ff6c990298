"""The lane between hosts on an ordinary network: the kernel copies from the source's pages to the wire, and from the
wire into the receiver's. Plain sockets, two-sided, no staging.

Owns: one listening socket, `streams` connections to each source, and the connections of receivers. Never: a wait, a
thread, or a byte into a page for which no receive is open now.

The receiver asks for a region on one of its connections, and the whole region comes back on that one. Each call of the
kernel copies into the pages that are open at that moment, so `cancel` is immediate on both sides: of a region that is
half there the rest is read into scrap memory; one that is half sent is filled up with zeros, and the receiver is told
that it is spoiled. Other regions on the connection do not notice.

Both ends prove that they have the cluster's secret (`tcp_parts`). What follows is neither encrypted nor signed: for
networks that are yours, as `ucx`; `zmq` is the lane that encrypts.
"""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.common.errors import ConfigError
from baton.common.ids import Stamp
from baton.common.kv.layout import Component
from baton.common.log import EventLog
from baton.common.messages import LaneAddress
from baton.transfer.transports.base import (
    TAG_TAKEN,
    Bytes,
    Ended,
    LinkDown,
    LinkUp,
    Placed,
    Rows,
    Sent,
    TransportEvent,
    Watcher,
)
from baton.transfer.transports.tcp_parts import (
    ASK,
    DATA,
    DROP,
    END,
    FRAME_BYTES,
    PROOF_BYTES,
    WHOLE,
    Gone,
    Prover,
    RegionMemory,
    TcpFrame,
    Vectors,
    Wire,
    region_out,
    region_spoiled,
)

TURN_S = 0.002
"""About as long one `poll` may copy."""
PROVE_WITHIN_S = 5.0
MAX_UNPROVEN = 64
"""Connections that have not proven themselves yet; further ones push out the oldest."""
MAX_ASKED = 1 << 16
"""Regions that one connection may ask for before they are ready."""

_BACKLOG = 128
_READ_AHEAD_BYTES = 64 * FRAME_BYTES
_SCRAP_BYTES = 1 << 18
_UNSENT_BYTES = 512 << 10
"""So much the kernel takes ahead of the wire: fewer turns with more, but then it no longer fits the core's cache."""
_WAKE_BYTES = 512 << 10
"""So much of a region that is coming in is waited for: a turn of the owner costs as much as copying that."""
_LATE_CHECK_S = 1.0
_TCP_NOTSENT_LOWAT = 25
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 3,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 20_000,
}

_log = EventLog("baton.transfer")


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """A region that was asked for, on the receiver's side."""

    op: int
    tag: int
    rows: Rows
    stream: _Stream


@dataclass(slots=True, eq=False)
class _Coming:
    """The region whose bytes are being read. `wanted` and `into` None: nobody wants it (any more)."""

    tag: int
    left: int
    wanted: _Wanted | None
    into: Vectors | None


@dataclass(slots=True, eq=False)
class _Stream:
    """A connection to a source."""

    link: _Link
    wire: Wire
    number: int
    wants_room: bool = True  # until connected
    connected: bool = False
    hello: bytes = b""
    proven: bool = False
    wanted: dict[int, _Wanted] = field(default_factory=dict)  # by tag
    owed_bytes: int = 0
    coming: _Coming | None = None


@dataclass(slots=True, eq=False)
class _Link:
    """Towards a source. Up when all streams are."""

    peer: Stamp
    streams: list[_Stream] = field(default_factory=list)
    up: bool = False


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


class TcpTransport:
    """See DirectTransport. `pools` are uint8 [units, bytes of one], each one block; they must outlive the transport.
    `secret` is ClusterKeys.data_secret. Raises ConfigError when it cannot listen on `bind_host`."""

    lane = "tcp"

    def __init__(
        self,
        stamp: Stamp,
        watcher: Watcher,
        bind_host: str,
        secret: str,
        pools: Mapping[Component, Bytes],
        streams: int,
    ) -> None:
        self._prover = Prover(stamp, secret)
        self._watcher = watcher
        self._streams = streams
        self._memory = {component: RegionMemory(pool) for component, pool in pools.items()}
        self._listener = _listen(bind_host)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._ends: dict[int, _Stream | _Caller] = {}  # by descriptor
        self._links: dict[Stamp, _Link] = {}
        self._unproven: deque[_Caller] = deque()  # oldest first
        self._callers: dict[tuple[Stamp, int], _Caller] = {}
        self._asks: dict[tuple[Stamp, int], _Caller] = {}  # (receiver, tag): asked for before it was offered
        self._wanted: dict[int, _Wanted] = {}  # by op
        self._offered: dict[int, _Offered] = {}  # by op
        self._ready: dict[tuple[Stamp, int], _Offered] = {}  # (receiver, tag): not asked for yet
        self._scrap = memoryview(bytearray(_SCRAP_BYTES))
        self._late_check_s = 0.0
        self._events: list[TransportEvent] = []
        self.stray = 0  # regions that came unasked, and callers that were turned away
        watcher.register(self._epoll.fileno())

    def address(self) -> LaneAddress:
        host, port = self._listener.getsockname()[:2]
        return LaneAddress(lane=self.lane, address={"host": host, "port": port})

    # ---------------------------------------------------------------------------------------- receiver

    def open(self, peer: Stamp, address: LaneAddress) -> None:
        self._forget_link(peer, "opened again")
        try:
            host, port = ipaddress.ip_address(str(address.address["host"])), int(address.address["port"])
        except (KeyError, ValueError):
            self._events.append(LinkDown(peer, "its address makes no sense"))
            return
        link = self._links[peer] = _Link(peer)
        family = socket.AF_INET6 if host.version == 6 else socket.AF_INET
        try:
            for number in range(self._streams):
                connection = socket.socket(family, socket.SOCK_STREAM)
                stream = _Stream(link, Wire(connection), number)
                link.streams.append(stream)
                self._watch(stream, select.EPOLLOUT)
                _tune(connection)
                code = connection.connect_ex((str(host), port))
                if code not in (0, errno.EINPROGRESS):
                    raise OSError(code, "cannot connect")
        except (OSError, OverflowError) as error:
            self._break_link(link, f"cannot connect: {error}")

    def close_link(self, peer: Stamp) -> None:
        self._forget_link(peer, "link closed")
        for caller in [caller for caller in self._callers.values() if caller.peer == peer]:
            self._close_caller(caller, "link closed", peer_lost=False)
        for offered in [offered for offered in self._ready.values() if offered.peer == peer]:
            self._end_offered(offered, "link closed", peer_lost=False)

    def receive(self, op: int, peer: Stamp, tag: int, rows: Rows) -> None:
        link = self._links.get(peer)
        if link is None or not link.up:
            self._events.append(Ended(op, "the link is not open", peer_lost=False))
            return
        stream = min(link.streams, key=lambda one: one.owed_bytes)
        self._wanted[op] = stream.wanted[tag] = _Wanted(op, tag, rows, stream)
        stream.owed_bytes += rows.nbytes
        self._say(stream, TcpFrame(ASK, tag, 0))

    # ------------------------------------------------------------------------------------------ source

    def send(self, op: int, peer: Stamp, tag: int, rows: Rows) -> None:
        if (peer, tag) in self._ready:
            self._events.append(Ended(op, TAG_TAKEN, peer_lost=False))
            return
        offered = self._offered[op] = _Offered(op, peer, tag, rows)
        caller = self._asks.pop((peer, tag), None)
        if caller is None:
            self._ready[peer, tag] = offered
        else:
            del caller.asked[tag]
            self._queue(caller, offered)

    # -------------------------------------------------------------------------------------------- both

    def cancel(self, op: int) -> None:
        wanted, offered = self._wanted.get(op), self._offered.get(op)
        if wanted is not None:
            coming = wanted.stream.coming
            if coming is not None and coming.wanted is wanted:
                coming.wanted = coming.into = None
            self._end_wanted(wanted, Ended(op, "cancelled", peer_lost=False))
            self._say(wanted.stream, TcpFrame(DROP, wanted.tag, 0))
        elif offered is not None:
            self._end_offered(offered, "cancelled", peer_lost=False)

    def poll(self) -> list[TransportEvent]:
        now = time.monotonic()
        end_s = time.perf_counter() + TURN_S
        while ready := self._epoll.poll(0):
            for descriptor, mask in ready:
                end = self._ends.get(descriptor)
                if end is not None:
                    self._serve(end, mask)
                elif descriptor == self._listener.fileno():
                    self._accept(now)
            if time.perf_counter() >= end_s:
                break
        if now >= self._late_check_s:
            self._turn_away_late(now)
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        return bool(self._events)

    def close(self) -> None:
        if self._epoll.closed:
            return
        for link in list(self._links.values()):
            self._forget_link(link.peer, "closed")
        for caller in [end for end in self._ends.values() if isinstance(end, _Caller)]:
            self._close_caller(caller, "closed", peer_lost=False)
        for offered in list(self._ready.values()):
            self._end_offered(offered, "closed", peer_lost=False)
        self._watcher.unregister(self._epoll.fileno())
        self._listener.close()
        self._epoll.close()

    # ------------------------------------------------------------------------------------- connections

    def _watch(self, end: _Stream | _Caller, mask: int) -> None:
        self._ends[end.wire.fileno()] = end
        self._epoll.register(end.wire.fileno(), mask)

    def _serve(self, end: _Stream | _Caller, mask: int) -> None:
        """Goes on with one connection, for about one portion each way."""
        try:
            if isinstance(end, _Stream):
                self._serve_stream(end)
            else:
                self._serve_caller(end, mask)
        except Gone as gone:
            self._on_gone(end, str(gone))

    def _on_gone(self, end: _Stream | _Caller, reason: str) -> None:
        if isinstance(end, _Stream):
            self._break_link(end.link, reason)
            return
        if end.peer is None:
            self.stray += 1
            _log.warning("tcp_stranger", reason=reason)
        self._close_caller(end, reason, peer_lost=True)

    def _say(self, stream: _Stream, frame: TcpFrame) -> None:
        try:
            stream.wire.say(frame.pack())
            self._listen_for_room(stream)
        except Gone as gone:
            self._break_link(stream.link, str(gone))

    def _listen_for_room(self, end: _Stream | _Caller) -> None:
        """Room to write matters only while something waits for it."""
        waits = not end.wire.quiet or (isinstance(end, _Caller) and (end.leaving is not None or bool(end.queue)))
        if waits is not end.wants_room:
            end.wants_room = waits
            self._epoll.modify(end.wire.fileno(), select.EPOLLIN | (select.EPOLLOUT if waits else 0))

    def _close_wire(self, end: _Stream | _Caller) -> None:
        del self._ends[end.wire.fileno()]
        self._epoll.unregister(end.wire.fileno())
        end.wire.close()

    # ------------------------------------------------------------------------------- receiver, internal

    def _serve_stream(self, stream: _Stream) -> None:
        coming = stream.coming
        if coming is not None and coming.left > 0:
            self._read_region(stream, coming)
        elif stream.proven:
            self._read_frames(stream)
        elif stream.connected:
            self._hear_welcome(stream)
        else:
            stream.wire.check_connected()
            stream.connected = True
            stream.hello = self._prover.hello(stream.link.peer, stream.number)
            stream.wire.say(stream.hello)
        if stream.wants_room:
            stream.wire.say()
            self._listen_for_room(stream)

    def _hear_welcome(self, stream: _Stream) -> None:
        stream.wire.fill(stream.wire.missing(PROOF_BYTES))
        welcome = stream.wire.take(PROOF_BYTES)
        if welcome is not None:
            stream.wire.say(self._prover.proof(stream.link.peer, stream.hello, welcome))
            stream.proven = True
            self._check_up(stream.link)

    def _read_frames(self, stream: _Stream) -> None:
        """Behind an END there is at most a DATA to be read before bytes of a region."""
        wire = stream.wire
        wire.fill(wire.missing(FRAME_BYTES if stream.coming is None else 2 * FRAME_BYTES))
        while (message := wire.take(FRAME_BYTES)) is not None:
            self._on_answer(stream, TcpFrame.unpack(message))

    def _check_up(self, link: _Link) -> None:
        if all(stream.proven for stream in link.streams):
            link.up = True
            self._events.append(LinkUp(link.peer))

    def _on_answer(self, stream: _Stream, frame: TcpFrame) -> None:
        coming = stream.coming
        if frame.kind == DATA and coming is None:
            wanted = stream.wanted.get(frame.tag)
            if wanted is None:
                self.stray += 1
            elif wanted.rows.nbytes != frame.number:  # nobody knows where it ends
                raise Gone(f"{frame.number} bytes came for a region of {wanted.rows.nbytes}")
            into = Vectors(self._memory[wanted.rows.component].pieces(wanted.rows)) if wanted is not None else None
            stream.coming = _Coming(frame.tag, frame.number, wanted, into)
        elif frame.kind == END and coming is not None and coming.tag == frame.tag:
            stream.coming = None
            wanted = coming.wanted
            if wanted is not None and frame.number == WHOLE:
                self._end_wanted(wanted, Placed(wanted.op))
            elif wanted is not None:
                self._end_wanted(wanted, Ended(wanted.op, "the source gave the region up", peer_lost=False))
        else:
            raise Gone(f"frame {frame} makes no sense")

    def _read_region(self, stream: _Stream, coming: _Coming) -> None:
        into = [self._scrap[: coming.left]] if coming.into is None else coming.into.next()
        nbytes = stream.wire.receive(into)
        coming.left -= nbytes
        if coming.into is not None:
            coming.into.done += nbytes
        stream.wire.wake_at(max(1, min(coming.left, _WAKE_BYTES)))

    def _end_wanted(self, wanted: _Wanted, event: Placed | Ended) -> None:
        del self._wanted[wanted.op], wanted.stream.wanted[wanted.tag]
        wanted.stream.owed_bytes -= wanted.rows.nbytes
        self._events.append(event)

    def _break_link(self, link: _Link, reason: str) -> None:
        if self._links.get(link.peer) is link:
            self._forget_link(link.peer, reason, peer_lost=True)
            self._events.append(LinkDown(link.peer, reason))

    def _forget_link(self, peer: Stamp, reason: str, peer_lost: bool = False) -> None:
        link = self._links.pop(peer, None)
        for stream in link.streams if link is not None else ():
            for wanted in list(stream.wanted.values()):
                self._end_wanted(wanted, Ended(wanted.op, reason, peer_lost))
            self._close_wire(stream)

    # --------------------------------------------------------------------------------- source, internal

    def _accept(self, now: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, for instance: heard again with the next check
            _log.warning("tcp_accept", error=str(error))
            self._epoll.modify(self._listener, 0)
            return
        _tune(connection)
        caller = _Caller(Wire(connection), now + PROVE_WITHIN_S)
        self._unproven.append(caller)
        self._watch(caller, select.EPOLLIN)
        if len(self._unproven) > MAX_UNPROVEN:
            self._on_gone(self._unproven[0], "too many callers that prove nothing")

    def _turn_away_late(self, now: float) -> None:
        self._late_check_s = now + _LATE_CHECK_S
        self._epoll.modify(self._listener, select.EPOLLIN)
        while self._unproven and self._unproven[0].prove_by_s <= now:
            self._on_gone(self._unproven[0], "proved nothing in time")

    def _serve_caller(self, caller: _Caller, mask: int) -> None:
        if mask & ~select.EPOLLOUT:
            caller.wire.fill(_READ_AHEAD_BYTES)
            if caller.peer is None:
                self._hear_proof(caller)
            if caller.peer is not None:
                while (message := caller.wire.take(FRAME_BYTES)) is not None:
                    self._on_ask(caller, caller.peer, TcpFrame.unpack(message))
        self._send_some(caller)

    def _hear_proof(self, caller: _Caller) -> None:
        """Answers the hello when it is there, and believes it when the proof is there too."""
        if not caller.hello:
            caller.hello = caller.wire.take(PROOF_BYTES) or b""
            if caller.hello:
                self._prover.read_hello(caller.hello)
                caller.welcome = self._prover.welcome(caller.hello)
                caller.wire.say(caller.welcome)
        proof = caller.wire.take(PROOF_BYTES) if caller.hello else None
        if proof is None:
            return
        self._prover.check_proof(caller.hello, caller.welcome, proof)
        hello = self._prover.read_hello(caller.hello)
        self._unproven.remove(caller)
        old = self._callers.get((hello.stamp, hello.stream))
        if old is not None:
            self._close_caller(old, "connected anew", peer_lost=True)
        caller.peer, caller.number = hello.stamp, hello.stream
        self._callers[hello.stamp, hello.stream] = caller

    def _on_ask(self, caller: _Caller, peer: Stamp, frame: TcpFrame) -> None:
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
                    self._events.append(Sent(leaving.offered.op))
        self._listen_for_room(caller)

    def _end_offered(self, offered: _Offered, reason: str, peer_lost: bool) -> None:
        """Nothing reads its pages from here on."""
        del self._offered[offered.op]
        self._events.append(Ended(offered.op, reason, peer_lost))
        caller = offered.caller
        if caller is None:
            del self._ready[offered.peer, offered.tag]
        elif caller.leaving is not None and caller.leaving.offered is offered:
            out = caller.leaving.out
            caller.leaving = _Leaving(None, offered.tag, region_spoiled(offered.tag, out)) if out.done else None
        else:
            caller.queue.remove(offered)

    def _close_caller(self, caller: _Caller, reason: str, peer_lost: bool) -> None:
        if caller.leaving is not None and caller.leaving.offered is not None:
            self._end_offered(caller.leaving.offered, reason, peer_lost)
        for offered in list(caller.queue):
            self._end_offered(offered, reason, peer_lost)
        if caller.peer is None:
            self._unproven.remove(caller)
        else:
            for tag in caller.asked:
                del self._asks[caller.peer, tag]
            self._callers.pop((caller.peer, caller.number), None)
        self._close_wire(caller)


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


def _tune(connection: socket.socket) -> None:
    """Small frames leave at once; a dead peer is noticed; little waits to be sent, without a bound on what is under way
    on a long wire."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
