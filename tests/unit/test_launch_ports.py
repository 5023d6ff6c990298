"""Ports of several gateways, before anything is started."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace

import pytest

from baton.common.config import ClusterConfig, GatewayConfig, ModelConfig, PlacementConfig
from baton.common.errors import ConfigError
from baton.deploy import launch
from baton.deploy.listener import draw_port, open_listener

HOST = "127.71.3.9"
"""An address that nothing else on this machine listens on: its ports are ours alone."""


def config_of(port: int, gateways: int = 2) -> ClusterConfig:
    gateway = GatewayConfig(host=HOST, port=port)
    return ClusterConfig(model=ModelConfig(model="fake"), gateways=gateways, gateway=gateway)


def taken_after_a_free_one() -> socket.socket:
    """Listens on a port while the one before it is free. None of those that the kernel hands out by itself."""
    for port in range(20_001, 32_000, 2):
        with contextlib.suppress(ConfigError):
            open_listener(HOST, port - 1).close()
            return open_listener(HOST, port)
    raise AssertionError(f"no two neighbouring ports of {HOST} are free")


def test_a_drawn_port_whose_next_one_is_taken_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with taken_after_a_free_one() as taken:
        port = taken.getsockname()[1]
        drawn = iter([port - 1])
        monkeypatch.setattr(launch, "draw_port", lambda host: next(drawn, None) or draw_port(host))
        found = launch._checked(config_of(0))
        assert port not in [found.gateway_port(number) for number in range(2)]
        with pytest.raises(ConfigError, match=str(port)):
            launch._checked(config_of(port - 1))


def test_on_nodes_of_their_own_gateways_share_a_port() -> None:
    found = launch._checked(replace(config_of(0, 3), placement=PlacementConfig(resources="role"), pin_cores=False))
    assert {found.gateway_port(number) for number in range(3)} == {found.gateway.port}
