"""How many connections there may be, and whose they count as."""

from __future__ import annotations

from baton.common.http_config import HttpConfig
from baton.deploy.http_limits import Connections


def connections(most: int = 100, **limits: int | tuple[str, ...]) -> Connections:
    return Connections(HttpConfig(**limits), most)  # type: ignore[arg-type]


def test_all_together_and_each_address_have_their_limit() -> None:
    who = connections(max_connections=3, max_connections_per_address=2)
    assert [who.enter("10.0.0.1") for _ in range(3)] == [None, None, "address"]
    assert who.enter("10.0.0.2") is None
    assert who.enter("10.0.0.3") == "connections"
    who.leave("10.0.0.1")
    assert who.open == 2
    assert who.enter("10.0.0.1") is None


def test_a_process_with_few_descriptors_takes_fewer() -> None:
    who = connections(most=1, max_connections=3)
    assert [who.enter("10.0.0.1"), who.enter("10.0.0.2")] == [None, "connections"]


def test_a_network_of_one_ipv6_client_is_one_address() -> None:
    who = connections(max_connections_per_address=1)
    assert [who.enter("2001:db8::1"), who.enter("2001:db8::ffff:1"), who.enter("2001:db8:0:1::1")] == [
        None,
        "address",
        None,
    ]


def test_an_ipv4_client_on_an_ipv6_socket_is_itself() -> None:
    who = connections(max_connections_per_address=1)
    assert [who.enter("::ffff:10.0.0.1"), who.enter("10.0.0.1"), who.enter("::ffff:10.0.0.2")] == [
        None,
        "address",
        None,
    ]


def test_a_trusted_proxy_speaks_for_many() -> None:
    who = connections(max_connections=3, max_connections_per_address=1, trusted_proxies=("10.0.0.0/8", "::1"))
    assert [who.enter("10.1.1.1"), who.enter("10.1.1.1"), who.enter("::1")] == [None, None, None]
    assert who.enter("::1") == "connections"
    for address in ("10.1.1.1", "10.1.1.1", "::1"):
        who.leave(address)
    assert who.open == 0
