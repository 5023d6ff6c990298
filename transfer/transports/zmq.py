"""The lane that always works: regions as ZMQ messages over TCP, encrypted with the keys of the two processes (CURVE).

Owns: one bound ROUTER that answers, and one DEALER per peer that asks. Never: a write into memory of the caller: a
region arrives in memory of libzmq's, which goes to the caller with `Received`; so a receive can be given up at once.

On the wire, receiver to source: HELLO(own stamp, epoch of the process meant), ASK(tag), DROP(tag). Source to receiver:
WELCOME(own stamp), DATA(tag, payload). An ASK may come before its `send`; it waits there until DROP. ROUTER_MANDATORY:
a message that cannot be sent is an error that we hear of, not a message less. Whoever asks is asked for its key each
time: a region goes to the process that it was made ready for, for as long as that is a member.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from baton.common.ids import Stamp
from baton.common.messages import LaneAddress
from baton.transfer.mesh import (
    Mesh,
    bind_to,
    connect_to,
    key_of,
    secure_client,
    secure_server,
    set_socket_options,
)
from baton.transfer.transports.base import TAG_TAKEN, Bytes, Ended, LinkDown, LinkUp, Received, Sent, TransportEvent

_HELLO, _ASK, _DROP, _WELCOME, _DATA = b"H", b"A", b"X", b"W", b"D"
_MESSAGES_PER_POLL = 64
_DATA_PER_POLL = 4
"""Regions handled in one turn of the owner: each is scattered afterwards, and timers must not wait for many of them."""
_HIGH_WATER_MESSAGES = 4096
_OVERHEAD_BYTES = 4096
_MAX_CALLERS = 4096
_MAX_ASKS = 1 << 16
_CLOSE_WAIT_S = 5.0

_stamp_decoder = msgspec.msgpack.Decoder(tuple[Stamp, int])


@dataclass(frozen=True, slots=True)
class _Open:
    """A region that was asked for."""

    op: int
    nbytes: int


@dataclass(slots=True)
class _Link:
    """Towards a source: we ask, it answers."""

    peer: Stamp
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    up: bool = False
    open: dict[int, _Open] = field(default_factory=dict)  # by tag


@dataclass(frozen=True, slots=True)
class _Ready:
    """A payload that waits to be asked for."""

    op: int
    payload: Bytes


class ZmqTransport:
    """See StagedTransport. `max_region_bytes` bounds what a peer can make us take."""

    lane = "zmq"

    def __init__(self, stamp: Stamp, mesh: Mesh, bind_host: str, max_region_bytes: int) -> None:
        self._stamp = stamp
        self._mesh = mesh
        self._max_bytes = max_region_bytes + _OVERHEAD_BYTES
        self._router = mesh.context.socket(zmq.ROUTER)
        set_socket_options(self._router, _HIGH_WATER_MESSAGES, _OVERHEAD_BYTES)  # it is only asked
        self._router.router_mandatory = True
        secure_server(self._router, mesh.keys)
        self._address = bind_to(self._router, bind_host)
        mesh.register(self._router)
        self._links: dict[Stamp, _Link] = {}
        self._callers: OrderedDict[bytes, Stamp] = OrderedDict()  # routing id -> who said HELLO over it
        self._asks: OrderedDict[tuple[Stamp, int], bytes] = OrderedDict()  # (receiver, tag) -> routing id
        self._ready: dict[tuple[Stamp, int], _Ready] = {}
        self._leaving: dict[int, zmq.MessageTracker] = {}  # op -> libzmq still reads its payload
        self._events: list[TransportEvent] = []
        self.stray = 0  # messages that nobody asked for, or that made no sense

    def address(self) -> LaneAddress:
        return LaneAddress(lane=self.lane, address={"tcp": self._address})

    # ---------------------------------------------------------------------------------------- receiver

    def open(self, peer: Stamp, address: LaneAddress) -> None:
        if (old := self._links.get(peer)) is not None:
            self._drop(old, "opened again", peer_lost=False)
        socket = self._mesh.context.socket(zmq.DEALER)
        set_socket_options(socket, _HIGH_WATER_MESSAGES, self._max_bytes)
        secured = secure_client(socket, self._mesh.keys, self._mesh.allow.key_of(peer))
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        if not secured or not connect_to(socket, str(address.address.get("tcp"))):
            _close(socket, monitor)
            self._events.append(LinkDown(peer, "its address makes no sense"))
            return
        socket.send_multipart([_HELLO, msgspec.msgpack.encode((self._stamp, peer.epoch))])
        self._links[peer] = _Link(peer, socket, monitor)
        self._mesh.register(socket)
        self._mesh.register(monitor)

    def close_link(self, peer: Stamp) -> None:
        link = self._links.get(peer)
        if link is not None:
            self._drop(link, "link closed", peer_lost=False)

    def shut_out(self, peer: Stamp) -> None:
        """That it has said HELLO is remembered: its connection stays, so it would not say so again. Who is no member is
        not answered all the same."""
        self.close_link(peer)
        for receiver, tag in [key for key in self._asks if key[0] == peer]:
            del self._asks[receiver, tag]
        for key in [key for key in self._ready if key[0] == peer]:
            self._events.append(Ended(self._ready.pop(key).op, "shut out", peer_lost=False))

    def receive(self, op: int, peer: Stamp, tag: int, slot: Bytes) -> None:
        link = self._links.get(peer)
        if link is None or not link.up:
            self._events.append(Ended(op, "the link is not open", peer_lost=False))
            return
        link.open[tag] = _Open(op, len(slot))
        if not _send_small(link.socket, [_ASK, _pack_tag(tag)]):
            del link.open[tag]
            self._events.append(Ended(op, "too many requests wait for the peer", peer_lost=False))

    def cancel(self, op: int) -> None:
        for link in self._links.values():
            for tag in [tag for tag, opened in link.open.items() if opened.op == op]:
                del link.open[tag]
                _send_small(link.socket, [_DROP, _pack_tag(tag)])  # lost: its ASK waits there until the link closes
                self._events.append(Ended(op, "cancelled", peer_lost=False))
        for key in [key for key, ready in self._ready.items() if ready.op == op]:
            del self._ready[key]
            self._events.append(Ended(op, "cancelled", peer_lost=False))

    # ------------------------------------------------------------------------------------------ source

    def send(self, op: int, peer: Stamp, tag: int, payload: Bytes) -> None:
        if (peer, tag) in self._ready:
            self._events.append(Ended(op, TAG_TAKEN, peer_lost=False))
            return
        self._ready[peer, tag] = _Ready(op, payload)
        caller = self._asks.pop((peer, tag), None)
        if caller is not None:
            self._answer(caller, peer, tag)

    # -------------------------------------------------------------------------------------------- both

    def poll(self) -> list[TransportEvent]:
        self._poll_router()
        for link in list(self._links.values()):
            self._poll_link(link)
        for op in [op for op, tracker in self._leaving.items() if tracker.done]:
            del self._leaving[op]
            self._events.append(Sent(op))
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        return bool(self._leaving or self._events)

    def close(self) -> None:
        for link in list(self._links.values()):
            self._drop(link, "closed", peer_lost=False)
        self._mesh.unregister(self._router)
        self._router.close(linger=0)
        for tracker in self._leaving.values():
            tracker.wait(_CLOSE_WAIT_S)
        self._leaving.clear()

    # ---------------------------------------------------------------------------------------- internal

    def _poll_router(self) -> None:
        for _ in range(_MESSAGES_PER_POLL):
            try:
                caller, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            parts = [frame.bytes for frame in frames]
            match parts:
                case [kind, hello] if kind == _HELLO:
                    self._on_hello(caller, hello)
                case [kind, packed] if kind in (_ASK, _DROP) and len(packed) == 8 and self._is_caller(caller):
                    self._on_ask(caller.bytes, kind, int.from_bytes(packed, "little"))
                case _:
                    self.stray += 1

    def _is_caller(self, caller: zmq.Frame) -> bool:
        """It has said HELLO, and speaks for the same process still."""
        stamp = self._callers.get(caller.bytes)
        return stamp is not None and self._may_speak_for(stamp, caller)

    def _may_speak_for(self, stamp: Stamp, caller: zmq.Frame) -> bool:
        return self._mesh.keys is None or self._mesh.allow.speaks_for(key_of(caller), stamp)

    def _on_hello(self, calling: zmq.Frame, hello: bytes) -> None:
        try:
            stamp, meant_for = _stamp_decoder.decode(hello)
        except msgspec.DecodeError:
            self.stray += 1
            return
        # Meant for a process that sat at this address before us, or said in another's name.
        if meant_for != self._stamp.epoch or not self._may_speak_for(stamp, calling):
            self.stray += 1
            return
        caller = calling.bytes
        self._callers[caller] = stamp
        if len(self._callers) > _MAX_CALLERS:
            self._callers.popitem(last=False)
        self._reply(caller, [_WELCOME, msgspec.msgpack.encode((self._stamp, stamp.epoch))])

    def _on_ask(self, caller: bytes, kind: bytes, tag: int) -> None:
        peer = self._callers[caller]
        if kind == _DROP:
            self._asks.pop((peer, tag), None)
        elif (peer, tag) in self._ready:
            self._answer(caller, peer, tag)
        else:
            self._asks[peer, tag] = caller
            if len(self._asks) > _MAX_ASKS:
                self._asks.popitem(last=False)

    def _answer(self, caller: bytes, peer: Stamp, tag: int) -> None:
        ready = self._ready.pop((peer, tag))
        tracker = self._reply(caller, [_DATA, _pack_tag(tag), ready.payload.data])
        if tracker is None:
            self._events.append(Ended(ready.op, "the receiver is gone", peer_lost=True))
        else:
            self._leaving[ready.op] = tracker

    def _reply(self, caller: bytes, parts: list[bytes | memoryview]) -> zmq.MessageTracker | None:
        """None: nobody is there any more, or its queue is full."""
        try:
            return self._router.send_multipart([caller, *parts], zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._callers.pop(caller, None)
            return None

    def _poll_link(self, link: _Link) -> None:
        regions = 0
        while regions < _DATA_PER_POLL:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            kind = frames[0].bytes
            if kind == _DATA and len(frames) == 3:
                regions += 1
                self._on_data(link, frames[1].bytes, np.frombuffer(frames[2].buffer, dtype=np.uint8))
            elif kind == _WELCOME and len(frames) == 2:
                self._on_welcome(link, frames[1].bytes)
            else:
                self.stray += 1
        if link.monitor.poll(0) and not link.socket.poll(0):  # what came before the end is read first
            parse_monitor_message(link.monitor.recv_multipart())
            self._drop(link, "connection lost", peer_lost=True)
            self._events.append(LinkDown(link.peer, "connection lost"))

    def _on_welcome(self, link: _Link, welcome: bytes) -> None:
        try:
            stamp, meant_for = _stamp_decoder.decode(welcome)
        except msgspec.DecodeError:
            self.stray += 1
            return
        if stamp != link.peer or meant_for != self._stamp.epoch:
            self.stray += 1
        elif not link.up:
            link.up = True
            self._events.append(LinkUp(link.peer))

    def _on_data(self, link: _Link, packed_tag: bytes, data: Bytes) -> None:
        opened = link.open.pop(int.from_bytes(packed_tag, "little"), None)
        if opened is None:
            self.stray += 1
        elif len(data) != opened.nbytes:
            reason = f"{len(data)} bytes came for a region of {opened.nbytes}"
            self._events.append(Ended(opened.op, reason, peer_lost=False))
        else:
            self._events.append(Received(opened.op, data))

    def _drop(self, link: _Link, reason: str, peer_lost: bool) -> None:
        del self._links[link.peer]
        for opened in link.open.values():
            self._events.append(Ended(opened.op, reason, peer_lost))
        self._mesh.unregister(link.socket)
        self._mesh.unregister(link.monitor)
        _close(link.socket, link.monitor)


def _close(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=0)


def _pack_tag(tag: int) -> bytes:
    return tag.to_bytes(8, "little")


def _send_small(socket: zmq.Socket[bytes], parts: list[bytes]) -> bool:
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True
