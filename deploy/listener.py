"""The socket that a gateway listens on. Apart, so that `launch` can try the address without loading an HTTP server."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from pathlib import Path

from baton.common.errors import ConfigError

BACKLOG = 1024
_TCP_NOTSENT_LOWAT = 25  # of Linux; Python names it from 3.12 on
_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_DRAWN = 20_000  # above those of Ray's workers
_DRAWS = 32
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


def draw_port(host: str) -> int:
    """A free port that stays so while nobody listens on it, as when a gateway's successor is still starting. One that
    the kernel hands out itself may become anybody's end of a connection meanwhile: a client's that tries to come back
    would even reach itself. Raises ConfigError as `open_listener` does."""
    lowest = int(_KERNELS_PORTS.read_text().split()[0])
    for port in random.sample(range(_LOWEST_DRAWN, lowest), _DRAWS) if lowest >= _LOWEST_DRAWN + _DRAWS else ():
        with contextlib.suppress(ConfigError):
            open_listener(host, port).close()
            return port
    with open_listener(host, 0) as any_port:
        return int(any_port.getsockname()[1])
