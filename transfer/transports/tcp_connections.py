"""The connections of the `tcp` lane, and what each of them waits for. Owns: the descriptors, and the one `epoll` set
that stands for all of them. Never: a wait, or a byte that is read or written (`tcp_parts.Wire` does that).
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import Protocol

from baton.transfer.transports.tcp_parts import Wire

_UNSENT_BYTES = 512 << 10
"""So much the kernel takes ahead of the wire: fewer turns with more, but then it no longer fits the core's cache."""
_TCP_NOTSENT_LOWAT = 25
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 3,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 20_000,
}

Serve = Callable[[int], None]
"""Goes on with one connection, for about one portion each way. It is told what `epoll` says of it."""


class End(Protocol):
    """This process's end of a connection."""

    wire: Wire
    wants_room: bool  # it is waited for, until there is room to write

    @property
    def has_to_write(self) -> bool: ...


class Connections:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._serve: dict[int, Serve] = {}  # by descriptor

    def fileno(self) -> int:
        """Readable when one of them has something to be served."""
        return self._epoll.fileno()

    def listen(self, listener: socket.socket, serve: Serve) -> None:
        self._serve[listener.fileno()] = serve
        self._epoll.register(listener, select.EPOLLIN)

    def set_listening(self, listener: socket.socket, listening: bool) -> None:
        """Whether callers are heard."""
        self._epoll.modify(listener, select.EPOLLIN if listening else 0)

    def add(self, end: End, serve: Serve) -> None:
        self._serve[end.wire.fileno()] = serve
        self._epoll.register(end.wire.fileno(), select.EPOLLOUT if end.wants_room else select.EPOLLIN)

    def listen_for_room(self, end: End) -> None:
        """Room to write matters only while something waits for it."""
        waits = end.has_to_write
        if waits is not end.wants_room:
            end.wants_room = waits
            self._epoll.modify(end.wire.fileno(), select.EPOLLIN | (select.EPOLLOUT if waits else 0))

    def remove(self, end: End) -> None:
        """Closes it."""
        del self._serve[end.wire.fileno()]
        self._epoll.unregister(end.wire.fileno())
        end.wire.close()

    def serve_ready(self, until_s: float) -> None:
        """All that are ready, again and again, until none is or `until_s` (of `time.perf_counter`); once at least."""
        while ready := self._epoll.poll(0):
            for descriptor, mask in ready:
                serve = self._serve.get(descriptor)
                if serve is not None:
                    serve(mask)
            if time.perf_counter() >= until_s:
                break

    @property
    def closed(self) -> bool:
        return self._epoll.closed

    def close(self) -> None:
        """When all ends were removed."""
        self._epoll.close()


def tune(connection: socket.socket) -> None:
    """Small frames leave at once; a dead peer is noticed; little waits to be sent, without a bound on what is under way
    on a long wire."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
