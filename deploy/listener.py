"""The socket that a gateway listens on. Apart, so that `launch` can try the address without loading an HTTP server."""

from __future__ import annotations

import errno
import os
import socket

from baton.common.errors import ConfigError

BACKLOG = 1024
_TCP_NOTSENT_LOWAT = 25  # of Linux; Python names it from 3.12 on
UNSENT_BYTES = 128 << 10
"""That the kernel keeps of a stream whose client does not read, instead of some megabytes."""


def open_listener(host: str, port: int) -> socket.socket:
    """Raises ConfigError when nothing can listen there. Port 0 takes any free one. Its connections send what they are
    told to at once: asyncio asks for that only on sockets that name their protocol, and these do not. Without, the
    first token of a stream waits 40 ms for the client to acknowledge the headers."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), backlog=BACKLOG, family=family)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, socket.EAI_NONAME):
            reason = "this machine has no such address"
            raise ConfigError("gateway.host", host, reason, "0.0.0.0: all it has") from error
        # `strerror` of this error repeats the address that the reason names.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        reason = f"cannot listen on {host}:{port}: {why}"
        raise ConfigError("gateway.port", port, reason, "0 takes any free port") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    listener.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)  # this, too
    return listener
