"""The control plane's sockets: authenticated, typed frames between the processes of one cluster.

Owns: one bound ROUTER that only receives, one DEALER per peer that only sends, the allow-list that decides who gets in,
and the counters of what was dropped and why. Never: a thread of its own, an opinion on what a frame means, a retry
(what must arrive is re-sent by the session that wants it), or a wait while sending.

Invariants: everything is used from one owner thread, `wake` excepted; nothing that arrives can end the loop; a peer
without the cluster's key gets no frame in and none out; every queue is bounded and what does not fit is counted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from dataclasses import dataclass, field, replace
from ipaddress import ip_address

import zmq
import zmq.utils.z85

from baton.common.errors import ConfigError
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.messages import MAX_FRAME_BYTES, Body, Frame, MalformedFrame, decode_frame, encode_frame

HIGH_WATER_FRAMES = 4096
FRAMES_PER_POLL = 512
"""A flood cannot keep the owner from its timers: the rest is read by the next poll, which then returns at once."""

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"baton"
_HANDSHAKE_MS = 5_000


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """What makes a process part of a cluster: CURVE key pairs (Z85 text) that every member holds, and the secret with
    which lanes that cannot encrypt prove who they are. Whoever has them is trusted as a member."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)
    data_secret: str = field(repr=False)

    @staticmethod
    def generate() -> ClusterKeys:
        server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
        client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
        return ClusterKeys(server_public, server_secret, client_public, client_secret, secrets.token_hex(32))


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
    admitted: int = 0  # connections let in
    denied: int = 0  # connections with a wrong key


def secure_server(socket: zmq.Socket[bytes], keys: ClusterKeys | None) -> None:
    """Makes a socket, before it is bound, admit only holders of the cluster's client key."""
    if keys is None:
        return
    socket.curve_server = True
    socket.curve_secretkey = keys.server_secret.encode()
    socket.curve_publickey = keys.server_public.encode()
    socket.zap_domain = _ZAP_DOMAIN


def secure_client(socket: zmq.Socket[bytes], keys: ClusterKeys | None) -> None:
    """Makes a socket, before it connects, prove that it belongs to the cluster."""
    if keys is None:
        return
    socket.curve_serverkey = keys.server_public.encode()
    socket.curve_secretkey = keys.client_secret.encode()
    socket.curve_publickey = keys.client_public.encode()


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
    """Binds to one interface and returns the address that peers use. Refuses the wildcard: peers must be able to
    connect to what is returned, and nobody else needs to."""
    if host in ("", "*") or (_is_ip(host) and ip_address(host).is_unspecified):
        raise ConfigError("bind_host", host, "would listen on every interface", "name the cluster interface's address")
    socket.ipv6 = ":" in host
    name = f"[{host}]" if socket.ipv6 else host
    try:
        socket.bind(f"tcp://{name}:{port or '*'}")
    except zmq.ZMQError as error:
        raise ConfigError("bind_host", f"{host}:{port}", f"cannot listen there: {error}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


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


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class Mesh:
    """One process's place in the control plane. Raises ConfigError when it cannot listen on `bind_host`."""

    def __init__(self, stamp: Stamp, bind_host: str, keys: ClusterKeys | None, port: int = 0) -> None:
        self.stamp = stamp
        self.keys = keys
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # own: there is one allow-list per context
        self._counters = MeshCounters()
        self._peers: dict[WorkerId, tuple[str, zmq.Socket[bytes]]] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False  # `poll` has still to return for it
        self._wake_lock = threading.Lock()  # between `wake` and `close`: a closed descriptor's number is soon another's
        self._zap = self.context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ENDPOINT)  # before any other bind: a connection must not slip in unasked
        self._router = self.context.socket(zmq.ROUTER)
        set_socket_options(self._router, HIGH_WATER_FRAMES, MAX_FRAME_BYTES)
        secure_server(self._router, keys)
        try:
            self.address = bind_to(self._router, bind_host, port)
        except ConfigError:
            self.close()
            raise
        self._poller = zmq.Poller()
        for source in (self._zap, self._router, self._wake_fd):
            self._poller.register(source, zmq.POLLIN)

    @property
    def counters(self) -> MeshCounters:
        """A copy."""
        return replace(self._counters)

    def connect(self, worker: WorkerId, address: str) -> None:
        """Opens the way to `worker`, or moves it to a new address. Connecting happens in the background. An address
        that makes no sense is counted, and its worker stays unreachable: one bad peer ends nobody else."""
        known = self._peers.get(worker)
        if known is not None:
            if known[0] == address:
                return
            self.disconnect(worker)
        socket = self.context.socket(zmq.DEALER)
        set_socket_options(socket, HIGH_WATER_FRAMES, MAX_FRAME_BYTES)
        secure_client(socket, self.keys)
        if connect_to(socket, address):
            self._peers[worker] = (address, socket)
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
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000 + 0.499))))
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            self._woken = False  # after the reading: whoever still found it set is served by the turn that begins now
        if self._zap in ready:
            self._answer_zap()
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
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(parts) != 2:  # identity, frame
                self._counters.malformed += 1
                continue
            try:
                frame = decode_frame(parts[1])
            except MalformedFrame:
                self._counters.malformed += 1
                continue
            if frame.dst_epoch not in (0, self.stamp.epoch):
                self._counters.foreign_epoch += 1
                continue
            frames.append(frame)
        self._counters.received += len(frames)
        return frames

    def _answer_zap(self) -> None:
        """Says who may connect (RFC 27). Questions come from our own libzmq, never from the network."""
        while True:
            try:
                version, request_id, domain, _peer, _identity, mechanism, *credentials = self._zap.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            admit = (
                self.keys is not None
                and domain == _ZAP_DOMAIN
                and mechanism == b"CURVE"
                and zmq.utils.z85.encode(credentials[0]) == self.keys.client_public.encode()
            )
            self._counters.admitted += admit
            self._counters.denied += not admit
            status, text = (b"200", b"OK") if admit else (b"400", b"not a member of this cluster")
            self._zap.send_multipart([version, request_id, status, text, b"member", b""])
