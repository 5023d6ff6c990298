"""The gateway's listening socket."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from baton.common.errors import ConfigError
from baton.deploy.listener import draw_port, open_listener


def test_connections_hold_nothing_back_until_the_client_acknowledges() -> None:
    with open_listener("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_drawn_port_is_none_that_the_kernel_gives_away() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {draw_port("127.0.0.1") for _ in range(20)}
    assert len(ports) > 1
    assert not ports & set(range(lowest, highest + 1))
    open_listener("127.0.0.1", ports.pop()).close()


def test_no_port_can_be_drawn_of_an_address_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.host = '192\.0\.2\.1': this machine has no such address"):
        draw_port("192.0.2.1")
