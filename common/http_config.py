"""The settings of a gateway's HTTP server: what a client may take of it. Part of `baton.common.config`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from baton.common.by_name import ByName
from baton.common.errors import ConfigError

LEAST_HEADER_BYTES = 4 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig(ByName):
    """What one client, and all together, may take of a gateway before a request is looked at, and while its answer is
    sent (SECURITY.md)."""

    max_connections: int = 4096
    max_connections_per_address: int = 1024  # of an IPv4 address, or an IPv6 network of 64 bits
    trusted_proxies: tuple[str, ...] = ()  # addresses and networks (CIDR) that speak for many: not counted by address
    header_timeout_s: float = 15.0  # for the headers of a request, and for a TLS handshake
    max_header_bytes: int = 64 << 10
    max_headers: int = 100
    keep_alive_s: float = 30.0  # a connection without a request is closed after it
    stall_s: float = 60.0  # in any such time ...
    min_bytes_per_s: float = 256.0  # ... a body must come, and an answer that is there be read, at this rate on average
    max_receiving_bytes: int = 256 << 20  # of all JSON bodies that are being received


def validate_http(http: HttpConfig) -> None:
    """Raises ConfigError."""
    if http.max_header_bytes < LEAST_HEADER_BYTES:
        reason = f"must be at least {LEAST_HEADER_BYTES}: browsers send as much"
        raise ConfigError("gateway.http.max_header_bytes", http.max_header_bytes, reason)
    for proxy in http.trusted_proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            hint = "for example 10.0.0.0/8"
            raise ConfigError("gateway.http.trusted_proxies", proxy, "no address or network", hint) from error
