"""The side of the `tcp` lane that asks: links to sources, and regions on their way into pages of this process.

Owns: `streams` connections to each source, and what was asked for on them. Never: a wait, or a byte into a page for
which no receive is open now. The rest of a region that nobody wants any more is read into scrap memory.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from baton.common.ids import Stamp
from baton.common.kv.layout import Component
from baton.common.messages import LaneAddress
from baton.transfer.transports.base import Ended, LinkDown, LinkUp, Placed, Rows, TransportEvent
from baton.transfer.transports.tcp_connections import Connections, tune
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
)

_SCRAP_BYTES = 1 << 18
_WAKE_BYTES = 512 << 10
"""So much of a region that is coming in is waited for: a turn of the owner costs as much as copying that."""


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """A region that was asked for."""

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

    @property
    def has_to_write(self) -> bool:
        return not self.wire.quiet


@dataclass(slots=True, eq=False)
class _Link:
    """Towards a source. Up when all streams are."""

    peer: Stamp
    streams: list[_Stream] = field(default_factory=list)
    up: bool = False


class TcpReceiver:
    """See `tcp.TcpTransport`. `report` takes the events."""

    def __init__(
        self,
        prover: Prover,
        connections: Connections,
        memory: Mapping[Component, RegionMemory],
        streams: int,
        report: Callable[[TransportEvent], None],
    ) -> None:
        self._prover = prover
        self._connections = connections
        self._memory = memory
        self._streams = streams
        self._report = report
        self._links: dict[Stamp, _Link] = {}
        self._wanted: dict[int, _Wanted] = {}  # by op
        self._scrap = memoryview(bytearray(_SCRAP_BYTES))
        self.stray = 0  # regions that came unasked

    def open(self, peer: Stamp, address: LaneAddress) -> None:
        self.close_link(peer, "opened again")
        try:
            host, port = ipaddress.ip_address(str(address.address["host"])), int(address.address["port"])
        except (KeyError, ValueError):
            self._report(LinkDown(peer, "its address makes no sense"))
            return
        link = self._links[peer] = _Link(peer)
        family = socket.AF_INET6 if host.version == 6 else socket.AF_INET
        try:
            for number in range(self._streams):
                connection = socket.socket(family, socket.SOCK_STREAM)
                stream = _Stream(link, Wire(connection), number)
                link.streams.append(stream)
                self._connections.add(stream, partial(self._serve, stream))
                tune(connection)
                code = connection.connect_ex((str(host), port))
                if code not in (0, errno.EINPROGRESS):
                    raise OSError(code, "cannot connect")
        except (OSError, OverflowError) as error:
            self._break_link(link, f"cannot connect: {error}")

    def close_link(self, peer: Stamp, reason: str, peer_lost: bool = False) -> None:
        """Unknown is fine."""
        link = self._links.pop(peer, None)
        for stream in link.streams if link is not None else ():
            for wanted in list(stream.wanted.values()):
                self._end(wanted, Ended(wanted.op, reason, peer_lost))
            self._connections.remove(stream)

    def receive(self, op: int, peer: Stamp, tag: int, rows: Rows) -> None:
        link = self._links.get(peer)
        if link is None or not link.up:
            self._report(Ended(op, "the link is not open", peer_lost=False))
            return
        stream = min(link.streams, key=lambda one: one.owed_bytes)
        self._wanted[op] = stream.wanted[tag] = _Wanted(op, tag, rows, stream)
        stream.owed_bytes += rows.nbytes
        self._say(stream, TcpFrame(ASK, tag, 0))

    def cancel(self, op: int) -> None:
        """Unknown is fine."""
        wanted = self._wanted.get(op)
        if wanted is None:
            return
        coming = wanted.stream.coming
        if coming is not None and coming.wanted is wanted:
            coming.wanted = coming.into = None
        self._end(wanted, Ended(op, "cancelled", peer_lost=False))
        self._say(wanted.stream, TcpFrame(DROP, wanted.tag, 0))

    def close(self) -> None:
        for peer in list(self._links):
            self.close_link(peer, "closed")

    # ------------------------------------------------------------------------------------- connections

    def _serve(self, stream: _Stream, _mask: int) -> None:
        try:
            self._go_on(stream)
        except Gone as gone:
            self._break_link(stream.link, str(gone))

    def _go_on(self, stream: _Stream) -> None:
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
            self._connections.listen_for_room(stream)

    def _say(self, stream: _Stream, frame: TcpFrame) -> None:
        try:
            stream.wire.say(frame.pack())
            self._connections.listen_for_room(stream)
        except Gone as gone:
            self._break_link(stream.link, str(gone))

    def _hear_welcome(self, stream: _Stream) -> None:
        stream.wire.fill(stream.wire.missing(PROOF_BYTES))
        welcome = stream.wire.take(PROOF_BYTES)
        if welcome is not None:
            stream.wire.say(self._prover.proof(stream.link.peer, stream.hello, welcome))
            stream.proven = True
            self._check_up(stream.link)

    def _check_up(self, link: _Link) -> None:
        if all(stream.proven for stream in link.streams):
            link.up = True
            self._report(LinkUp(link.peer))

    def _break_link(self, link: _Link, reason: str) -> None:
        if self._links.get(link.peer) is link:
            self.close_link(link.peer, reason, peer_lost=True)
            self._report(LinkDown(link.peer, reason))

    # ----------------------------------------------------------------------------------------- regions

    def _read_frames(self, stream: _Stream) -> None:
        """Behind an END there is at most a DATA to be read before bytes of a region."""
        wire = stream.wire
        wire.fill(wire.missing(FRAME_BYTES if stream.coming is None else 2 * FRAME_BYTES))
        while (message := wire.take(FRAME_BYTES)) is not None:
            self._on_frame(stream, TcpFrame.unpack(message))

    def _on_frame(self, stream: _Stream, frame: TcpFrame) -> None:
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
                self._end(wanted, Placed(wanted.op))
            elif wanted is not None:
                self._end(wanted, Ended(wanted.op, "the source gave the region up", peer_lost=False))
        else:
            raise Gone(f"frame {frame} makes no sense")

    def _read_region(self, stream: _Stream, coming: _Coming) -> None:
        into = [self._scrap[: coming.left]] if coming.into is None else coming.into.next()
        nbytes = stream.wire.receive(into)
        coming.left -= nbytes
        if coming.into is not None:
            coming.into.done += nbytes
        stream.wire.wake_at(max(1, min(coming.left, _WAKE_BYTES)))

    def _end(self, wanted: _Wanted, event: Placed | Ended) -> None:
        """Nothing writes its rows from here on."""
        del self._wanted[wanted.op], wanted.stream.wanted[wanted.tag]
        wanted.stream.owed_bytes -= wanted.rows.nbytes
        self._report(event)
