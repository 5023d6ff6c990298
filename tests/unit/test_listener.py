"""The gateway's listening socket."""

from __future__ import annotations

import socket

from baton.deploy.listener import open_listener


def test_connections_hold_nothing_back_until_the_client_acknowledges() -> None:
    with open_listener("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
