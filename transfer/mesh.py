"""The control plane's sockets: authenticated, typed frames between the processes of one cluster.

Owns: one bound ROUTER that only receives, one DEALER per peer that only sends, the door that the allow-list keeps, and
the counters of what was dropped and why. Never: a thread of its own, an opinion on what a frame means, a retry (what
must arrive is re-sent by the session that wants it), or a wait while sending.

Invariants: everything is used from one owner thread, `wake` excepted; nothing that arrives can end the loop; a peer
whose key is not on the list gets no frame in and none out, and nobody speaks in another's name; every queue is bounded
and what does not fit is counted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, replace

import zmq
import zmq.utils.garbage  # else imported by the first frame that is not copied
import zmq.utils.z85

from baton.common.config import NODE_ADDRESS
from baton.common.config_checks import validate_interface
from baton.common.errors import ConfigError
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.messages import MAX_FRAME_BYTES, Body, Frame, MalformedFrame, decode_frame, encode_frame
from baton.transfer.allow_list import AllowList
from baton.transfer.keys import KeyPair

HIGH_WATER_FRAMES = 4096
FRAMES_PER_POLL = 512
"""A flood cannot keep the owner from its timers: the rest is read by the next poll, which then returns at once."""

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"baton"
_HANDSHAKE_MS = 5_000
_NOT_NOW = b""
"""No status of ZAP: libzmq closes the connection at once, and a peer of ours comes again, later each time. With 400 it
would never come again, with 300 only when the handshake has timed out."""
EARLY_S = 1.0
"""News of a new member do not reach all at the same time: who is on no list yet waits so long for its answer."""
MAX_EARLY = 64
"""Further ones push out the first."""

_Way = tuple[str, str, KeyPair | None]
"""Address, key, as whom."""


@dataclass(slots=True)
class MeshCounters:
    """Frames since the start, by what became of them."""

    sent: int = 0
    received: int = 0
    dropped_full: int = 0  # the peer's queue was at its high-water mark
    dropped_unknown: int = 0  # not connected to that worker
    dropped_too_big: int = 0
    bad_address: int = 0  # of a peer: nothing can be sent to it
    malformed: int = 0
    foreign_epoch: int = 0  # meant for a process that sat at this address before
    foreign_key: int = 0  # over the connection of a key that is off the list by now, or in another's name
    admitted: int = 0  # connections let in
    denied: int = 0  # connections with a key that was not on the list then
    failed_handshakes: int = 0  # connections that proved nothing: without a key, for another process, or too slow

    def refusals(self) -> dict[str, int]:
        """What came over the socket and was not heard, by why: of nobody (`stranger`), no frame (`malformed`), for a
        process that is gone (`foreign_epoch`), in another's name or of one that was a member (`name`)."""
        return {
            "stranger": self.denied + self.failed_handshakes,
            "malformed": self.malformed,
            "foreign_epoch": self.foreign_epoch,
            "name": self.foreign_key,
        }


def secure_server(socket: zmq.Socket[bytes], keys: KeyPair | None) -> None:
    """Makes a socket, before it is bound, admit only whom the allow-list of its context knows."""
    if keys is None:
        return
    socket.curve_server = True
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_publickey = keys.public.encode()
    socket.zap_domain = _ZAP_DOMAIN


def secure_client(socket: zmq.Socket[bytes], keys: KeyPair | None, server: str) -> bool:
    """Makes a socket, before it connects, prove who it is, to the holder of the key `server` and to nobody else. False:
    that is no key."""
    if keys is None:
        return True
    try:
        socket.curve_serverkey = server.encode()
    except zmq.ZMQError:
        return False
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_publickey = keys.public.encode()
    return True


def key_of(frame: zmq.Frame) -> str:
    """With which key the connection was opened that this came over; "" without CURVE."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def set_socket_options(socket: zmq.Socket[bytes], high_water: int, max_message_bytes: int) -> None:
    """Options that every socket between processes has: bounded, and quick to notice a dead connection."""
    socket.linger = 0
    socket.sndhwm = high_water
    socket.rcvhwm = high_water
    socket.maxmsgsize = max_message_bytes
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1_000
    socket.heartbeat_ivl = 1_000
    socket.heartbeat_timeout = 5_000
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 10
    socket.tcp_keepalive_intvl = 3
    socket.tcp_keepalive_cnt = 3


def bind_to(socket: zmq.Socket[bytes], host: str, port: int = 0) -> str:
    """Binds to one interface and returns the address that peers use. Raises ConfigError."""
    validate_interface(host)
    socket.ipv6 = ":" in host
    name = f"[{host}]" if socket.ipv6 else host
    try:
        socket.bind(f"tcp://{name}:{port or '*'}")
    except zmq.ZMQError as error:
        reason = f"cannot listen there{f', on port {port}' if port else ''}: {error.strerror}"
        raise ConfigError("bind_host", host, reason, f"an address of this machine's, or {NODE_ADDRESS}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def try_interface(bind_host: str) -> None:
    """Raises ConfigError when this machine cannot listen on it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        bind_to(probe, bind_host)


def connect_to(socket: zmq.Socket[bytes], address: str) -> bool:
    """False: that is no TCP address (other kinds would lead to places on this host that no peer may name)."""
    if not address.startswith("tcp://"):
        return False
    socket.ipv6 = "[" in address
    try:
        socket.connect(address)
    except zmq.ZMQError:
        return False
    return True


def _monitor_of(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Readable when a handshake has failed. libzmq waits where its news find no room: there is a lot, and it is read
    with every poll."""
    socket.monitor("inproc://strangers", zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    context: zmq.Context[zmq.Socket[bytes]] = socket.context
    monitor = context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.rcvhwm = 1 << 16
    monitor.connect("inproc://strangers")
    return monitor


@dataclass(frozen=True, slots=True)
class _Question:
    """May a connection with this key be let in?"""

    envelope: list[bytes]  # of the answer
    key: str
    until_s: float


class Mesh:
    """One process's place in the control plane. `keys` are its own; None: nothing is encrypted, and everybody gets in
    (tests, benchmarks). Raises ConfigError when it cannot listen on `bind_host`."""

    def __init__(self, stamp: Stamp, bind_host: str, keys: KeyPair | None, port: int = 0) -> None:
        self.stamp = stamp
        self.keys = keys
        self.allow = AllowList(keys.public if keys is not None else "")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # own: there is one allow-list per context
        self._counters = MeshCounters()
        self._peers: dict[WorkerId, tuple[_Way, zmq.Socket[bytes]]] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False  # `poll` has still to return for it
        self._wake_lock = threading.Lock()  # between `wake` and `close`: a closed descriptor's number is soon another's
        self._early: deque[_Question] = deque()
        self._zap = self.context.socket(zmq.ROUTER)  # answers in any order
        self._zap.linger = 0
        self._zap.bind(_ZAP_ENDPOINT)  # before any other bind: a connection must not slip in unasked
        self._router = self.context.socket(zmq.ROUTER)
        set_socket_options(self._router, HIGH_WATER_FRAMES, MAX_FRAME_BYTES)
        secure_server(self._router, keys)
        self._monitor = _monitor_of(self._router)
        try:
            self.address = bind_to(self._router, bind_host, port)
        except ConfigError:
            self.close()
            raise
        self._poller = zmq.Poller()
        for source in (self._zap, self._router, self._monitor, self._wake_fd):
            self._poller.register(source, zmq.POLLIN)

    @property
    def counters(self) -> MeshCounters:
        """A copy."""
        return replace(self._counters)

    def connect(self, worker: WorkerId, address: str, key: str = "", guest: KeyPair | None = None) -> None:
        """Opens the way to `worker`, whose public key is `key`, or moves it elsewhere. Connecting happens in the
        background. What makes no sense is counted, and its worker stays unreachable: one bad peer ends nobody else.
        `guest`: as whom, instead of by this process's own keys."""
        way = (address, key, guest)
        known = self._peers.get(worker)
        if known is not None:
            if known[0] == way:
                return
            self.disconnect(worker)
        socket = self.context.socket(zmq.DEALER)
        set_socket_options(socket, HIGH_WATER_FRAMES, MAX_FRAME_BYTES)
        if secure_client(socket, guest or self.keys, key) and connect_to(socket, address):
            self._peers[worker] = (way, socket)
        else:
            socket.close(linger=0)
            self._counters.bad_address += 1

    def disconnect(self, worker: WorkerId) -> None:
        """Forgets `worker` and what was queued for it. Unknown is fine."""
        known = self._peers.pop(worker, None)
        if known is not None:
            known[1].close(linger=0)

    def send(self, worker: WorkerId, dst_epoch: Epoch, body: Body) -> bool:
        """Queues one frame; never waits. False: not connected, or that peer's queue is full, or the frame is over the
        limit. The frame is gone then, and counted."""
        known = self._peers.get(worker)
        if known is None:
            self._counters.dropped_unknown += 1
            return False
        data = encode_frame(Frame(self.stamp, dst_epoch, body))
        if len(data) > MAX_FRAME_BYTES:
            self._counters.dropped_too_big += 1
            return False
        try:
            known[1].send(data, zmq.NOBLOCK)
        except zmq.Again:
            self._counters.dropped_full += 1
            return False
        self._counters.sent += 1
        return True

    def poll(self, timeout_s: float) -> list[Frame]:
        """Waits until frames, a wake-up or a registered source are there, or the time is over. Returns at most
        FRAMES_PER_POLL well-formed frames that were meant for this process."""
        if self._early:
            timeout_s = min(timeout_s, max(0.0, self._early[0].until_s - time.monotonic()))
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000 + 0.499))))
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            self._woken = False  # after the reading: whoever still found it set is served by the turn that begins now
        if self._zap in ready:
            self._hear_zap()
        if self._early:
            self._answer_early()
        if self._monitor in ready:
            self._count_strangers()
        return self._receive() if self._router in ready else []

    def wake(self) -> None:
        """Ends a `poll` that waits, or the next one. From any thread, also after `close`."""
        if self._woken:
            return
        with self._wake_lock:
            if self._wake_fd >= 0:
                self._woken = True
                os.eventfd_write(self._wake_fd, 1)

    def register(self, source: int | zmq.Socket[bytes]) -> None:
        """`poll` also returns when `source` (a descriptor, or a socket of this context) is readable."""
        self._poller.register(source, zmq.POLLIN)

    def unregister(self, source: int | zmq.Socket[bytes]) -> None:
        self._poller.unregister(source)

    def close(self) -> None:
        """Drops every connection and what is queued on it. Sockets that others made in `context` are closed too."""
        self._peers.clear()
        self.context.destroy(linger=0)
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
            self._wake_fd = -1

    def _receive(self) -> list[Frame]:
        frames: list[Frame] = []
        for _ in range(FRAMES_PER_POLL):
            if not int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than to be told by an exception
                break
            try:
                parts = self._receive_parts()
            except zmq.Again:
                break
            if len(parts) != 1:
                self._counters.malformed += 1
                continue
            try:
                frame = decode_frame(parts[0].buffer)
            except MalformedFrame:
                self._counters.malformed += 1
                continue
            if self.keys is not None and not self.allow.believes(key_of(parts[0]), frame):
                self._counters.foreign_key += 1
                continue
            if frame.dst_epoch not in (0, self.stamp.epoch):
                self._counters.foreign_epoch += 1
                continue
            frames.append(frame)
        self._counters.received += len(frames)
        return frames

    def _receive_parts(self) -> list[zmq.Frame]:
        """Of one message, behind the number of its connection. Raises zmq.Again. (`recv_multipart` takes twice as long:
        it wraps the number, too.)"""
        more = bool(self._router.recv(zmq.NOBLOCK)) and self._router.rcvmore
        parts = []
        while more:
            parts.append(self._router.recv(zmq.NOBLOCK, copy=False))
            more = parts[-1].more
        return parts

    def _count_strangers(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._monitor.recv_multipart(zmq.NOBLOCK):
                self._counters.failed_handshakes += 1

    def _hear_zap(self) -> None:
        """Who may connect (RFC 27), and as whom: its key, which each message of the connection then has with it.
        Questions come from our own libzmq, never from the network."""
        while True:
            try:
                *envelope, version, request_id, domain, _peer, _identity, mechanism, credential = (
                    self._zap.recv_multipart(zmq.NOBLOCK)
                )
            except zmq.Again:
                return
            key = zmq.utils.z85.encode(credential).decode() if (domain, mechanism) == (_ZAP_DOMAIN, b"CURVE") else ""
            self._early.append(_Question([*envelope, version, request_id], key, time.monotonic() + EARLY_S))

    def _answer_early(self) -> None:
        """All that can be answered by now."""
        now, waiting = time.monotonic(), deque[_Question]()
        for question in self._early:
            if self.keys is not None and self.allow.knows(question.key):
                self._counters.admitted += 1
                self._zap.send_multipart([*question.envelope, b"200", b"", question.key.encode(), b""])
            else:
                waiting.append(question)
        while waiting and (waiting[0].until_s <= now or len(waiting) > MAX_EARLY):
            self._counters.denied += 1
            self._zap.send_multipart([*waiting.popleft().envelope, _NOT_NOW, b"", b"", b""])
        self._early = waiting
