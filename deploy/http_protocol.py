"""One connection of a client that may mean harm: uvicorn's protocol, and the limits that it leaves to others.

Owns: how long headers may take, how slowly a body may come and an answer be read, what a request must not look like
(`CheckedConnection`), TLS from the first byte on, and the end of a connection that breaks any of it. Never: a request
(`http_app.py`), or how many connections there may be (`http_limits.py`).

Whoever is waited for is waited for with a deadline:

    connected ──▶ [TLS] ──▶ headers ──▶ body ──▶ answer ──▶ (nothing: keep_alive_s) ──▶ headers ...
                  header_timeout_s      stall_s   stall_s, when the kernel takes no more of it
                                        for min_bytes_per_s each

The transport's own buffer is for what the kernel does not take: it holds one piece of one answer at most, and whoever
makes the answer waits. So "not empty for a time" says that its client does not read.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Literal

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from baton.common.errors import ErrorCode
from baton.common.http_config import HttpConfig
from baton.deploy.http_limits import Connections
from baton.deploy.openai_replies import ErrorDetail, ErrorReply, encode
from baton.deploy.tls import TlsFiles

Refusal = Literal["connections", "address", "tls", "malformed", "headers", "header_time", "body_rate", "read_rate"]
"""Why a connection was ended: the labels of a metric."""
TLS_CLOSE_S = 2.0
"""For a client to say goodbye."""
HELD_BYTES = 1
"""More in a transport's buffer means: wait. (0 would be right, but TLS transports of asyncio take it for "always".)"""
_RETRY = ((b"retry-after", b"1"),)


class Guard:
    """What the connections of one server share. `on_refusal` counts."""

    def __init__(
        self,
        limits: HttpConfig,
        connections: Connections,
        tls: TlsFiles | None,
        on_refusal: Callable[[Refusal], None],
        on_change: Callable[[int], None],
    ) -> None:
        """`on_change`: so many connections are open."""
        self.limits = limits
        self.connections = connections
        self.tls = tls
        self.on_refusal = on_refusal
        self.on_change = on_change


class CheckedConnection(h11.Connection):
    """h11, which refuses most of what is wrong, and refuses what two readers could understand differently, and more
    headers than anybody needs."""

    def __init__(self, limits: HttpConfig) -> None:
        super().__init__(h11.SERVER, limits.max_header_bytes)
        self._limits = limits
        self.body_bytes = 0  # of all bodies so far
        self.status = 400  # of the refusal, once there is one

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check(event)
        except h11.RemoteProtocolError as error:
            self.status = error.error_status_hint
            raise
        if isinstance(event, h11.Data):
            self.body_bytes += len(event.data)
        return event

    def _check(self, request: h11.Request) -> None:
        if request.http_version not in (b"1.0", b"1.1"):
            raise h11.RemoteProtocolError("an HTTP version that is not spoken here", 505)
        headers = list(request.headers)
        size = len(request.target) + sum(len(name) + len(value) for name, value in headers)
        if len(headers) > self._limits.max_headers or size > self._limits.max_header_bytes:
            raise h11.RemoteProtocolError("more headers than anybody needs", 431)
        framing = [name for name, _ in headers if name in (b"content-length", b"transfer-encoding")]
        if len(framing) > 1:  # the length of a body is told once: else a proxy and we could see two different requests
            raise h11.RemoteProtocolError("the body has two lengths", 400)


class GuardedProtocol(H11Protocol):
    """Made by uvicorn, one for each connection."""

    def __init__(
        self,
        guard: Guard,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._guard = guard
        self._limits = guard.limits
        self.conn = self._checked = CheckedConnection(guard.limits)
        self._socket: asyncio.Transport | None = None  # what lies below TLS; the transport itself where there is none
        self._address = ""
        self._counted = False
        self._begun = False  # `self.transport` is there
        self._early = bytearray()  # of the client, before TLS is known to be up
        self._handshake: asyncio.Task[None] | None = None
        self._awaited: Literal["headers", "body", "rest", ""] = ""
        self._await_timer: asyncio.TimerHandle | None = None
        self._came_bytes = 0
        self._read_timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0

    # ---------------------------------------------------------------------------------- beginning and end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        transport.set_write_buffer_limits(high=HELD_BYTES)
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if peer else ""
        full = self._guard.connections.enter(self._address)
        if full is not None:
            self._turn_away(transport, full)
            return
        self._counted = True
        self._guard.on_change(self._guard.connections.open)
        if self._guard.tls is None:
            self._begin(transport)
        else:
            transport.pause_reading()
            self._handshake = self.loop.create_task(self._encrypt(transport, self._guard.tls.context()))

    def _turn_away(self, transport: asyncio.Transport, full: Refusal) -> None:
        """An answer for whoever would have been good; in the clear only."""
        self._guard.on_refusal(full)
        if self._guard.tls is None:
            self._begun = True
            super().connection_made(transport)
            self._answer(503, ErrorCode.OVERLOADED, "too many connections", _RETRY)
        else:
            transport.abort()

    async def _encrypt(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        try:
            encrypted = await self.loop.start_tls(
                transport,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=self._limits.header_timeout_s,
                ssl_shutdown_timeout=TLS_CLOSE_S,
            )
        except OSError:  # its errors, those of TLS and those of time
            self._guard.on_refusal("tls")
            self._leave()
            return
        if encrypted is None or encrypted.is_closing():
            self._leave()
            return
        encrypted.set_write_buffer_limits(high=HELD_BYTES)
        self._begin(encrypted)
        if self._early:
            early, self._early = bytes(self._early), bytearray()
            self.data_received(early)

    def _begin(self, transport: asyncio.Transport) -> None:
        self._begun = True
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_reading_watch()
        self._leave()
        if self._begun:
            super().connection_lost(exc)

    def _leave(self) -> None:
        if self._counted:
            self._counted = False
            self._guard.connections.leave(self._address)
            self._guard.on_change(self._guard.connections.open)

    # ----------------------------------------------------------------------------------- what a client sends

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            self._early += data
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """After whatever may have changed what is waited for."""
        awaited = self._now_awaited()
        if awaited == self._awaited:
            return
        self._stop_waiting()
        self._awaited = awaited
        if awaited == "headers":
            self._await_timer = self.loop.call_later(self._limits.header_timeout_s, self._headers_late)
        elif awaited:
            self._came_bytes = self._checked.body_bytes
            self._await_timer = self.loop.call_later(self._limits.stall_s, self._check_body)

    def _now_awaited(self) -> Literal["headers", "body", "rest", ""]:
        if self.transport.is_closing():
            return ""
        if self.conn.their_state is h11.SEND_BODY:
            return "rest" if self.cycle.response_complete else "body"
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            return "headers"
        return ""

    def _headers_late(self) -> None:
        self._refuse("header_time", 408, "the headers took too long")

    def _check_body(self) -> None:
        """The rest of a body whose request is answered is dropped, so that its client sees the answer; for one such
        time, whatever its rate."""
        came = self._checked.body_bytes - self._came_bytes
        enough = came >= self._limits.min_bytes_per_s * self._limits.stall_s
        if self._awaited == "body" and (enough or self.flow.read_paused):  # paused: it is we who are slow
            self._came_bytes = self._checked.body_bytes
            self._await_timer = self.loop.call_later(self._limits.stall_s, self._check_body)
        else:
            self._refuse("body_rate", 408, "the body came too slowly")

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn while it handles the error, whose status h11 knows."""
        status = self._checked.status
        self._refuse("headers" if status == 431 else "malformed", status, msg)

    def _refuse(self, why: Refusal, status: int, message: str) -> None:
        self._guard.on_refusal(why)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(status, ErrorCode.INVALID_REQUEST, message)
        else:
            self.transport.abort()

    def _answer(
        self, status: int, code: ErrorCode, message: str, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """Without a route; and the end."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = encode(ErrorReply(error=ErrorDetail(message=message, type=kind, param=None, code=str(code))))
        fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
        head = h11.Response(status_code=status, headers=[*fields, CLOSE_HEADER], reason=STATUS_PHRASES[status])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:  # its request hears that it is gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _stop_waiting(self) -> None:
        if self._await_timer is not None:
            self._await_timer.cancel()
            self._await_timer = None
        self._awaited = ""

    # ------------------------------------------------------------------------------------ what it does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_reading_watch()

    def _watch_reading(self) -> None:
        self._unread_bytes = self._unread()
        self._read_timer = self.loop.call_later(self._limits.stall_s, self._check_reading)

    def _check_reading(self) -> None:
        if self._unread_bytes - self._unread() >= self._limits.min_bytes_per_s * self._limits.stall_s:
            self._watch_reading()
        else:
            self._guard.on_refusal("read_rate")
            self.transport.abort()

    def _unread(self) -> int:
        below = 0 if self._socket is None or self._socket is self.transport else self._socket.get_write_buffer_size()
        return self.transport.get_write_buffer_size() + below

    def _stop_reading_watch(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
