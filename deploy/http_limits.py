"""Who is connected to a gateway, and whether one more may be. Pure.

Owns: the counts of open connections, in all and by address. Never: a socket (`http_protocol.py`).

An IPv6 client has a network of 64 bits to itself: that counts as one address.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Literal

from baton.common.http_config import HttpConfig

Full = Literal["connections", "address"]
"""What there are too many of."""


class Connections:
    """`enter` and `leave` come in pairs, but for those that were not let in."""

    def __init__(self, limits: HttpConfig, most: int) -> None:
        """`most`: connections, where the process has no room for as many as are allowed."""
        self._most = min(limits.max_connections, most)
        self._most_per_address = limits.max_connections_per_address
        self._proxies = [ipaddress.ip_network(proxy) for proxy in limits.trusted_proxies]
        self._by_address: Counter[str] = Counter()
        self.open = 0

    def enter(self, address: str) -> Full | None:
        """None: it is counted from now on."""
        counted = self._counted(address)
        if self.open >= self._most:
            return "connections"
        if counted and self._by_address[counted] >= self._most_per_address:
            return "address"
        self.open += 1
        self._by_address[counted] += 1
        return None

    def leave(self, address: str) -> None:
        counted = self._counted(address)
        self.open -= 1
        self._by_address[counted] -= 1
        if not self._by_address[counted]:
            del self._by_address[counted]

    def _counted(self, address: str) -> str:
        """As what; "": as one of all, and no more."""
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return address
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        if any(ip in proxy for proxy in self._proxies):
            return ""
        if isinstance(ip, ipaddress.IPv6Address):
            return str(ipaddress.ip_network((ip, 64), strict=False))
        return str(ip)
