"""Where a gateway without keys is asked from: not from pages of other sites in somebody's browser.

Owns: which names a gateway answers to, and which pages may make it do something. Never: who asks (`http_door.py`);
where there are keys, a page that has none gets nothing anyway.

Two things a browser would let such a page do. Its name can be pointed at this gateway's address (DNS rebinding): then
the page is of the same origin, and reads what it asks for; but `Host` has its name. And it can send a request blindly,
without reading the answer; but a browser then says `Origin`, or that the fetch was `cross-site`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from typing import final

from baton.common.errors import ErrorCode, RequestError

LOCAL_NAMES = ("localhost",)
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


@final
class Sites:
    """`names`: what the gateway is called, beside addresses and what ends in `.localhost`; None: anything."""

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = None if names is None else frozenset(name.lower() for name in names)

    def check(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises RequestError FOREIGN_SITE."""
        found = {name: value.decode("latin-1").lower() for name, value in headers if name in _LOOKED_AT}
        host, origin = found.get(b"host", ""), found.get(b"origin")
        if host and not self._is_ours(host):
            reason = f"this gateway is not called {_name_of(host)!r}: see gateway.allowed_hosts"
            raise RequestError(ErrorCode.FOREIGN_SITE, reason, "Host")
        if method in _READING:
            return
        if self._is_foreign(origin, host, found.get(b"sec-fetch-site", "")):
            reason = "a page of another site asks, and this gateway has no API keys: see gateway.allowed_hosts"
            raise RequestError(ErrorCode.FOREIGN_SITE, reason, "Origin")

    def _is_foreign(self, origin: str | None, host: str, fetched_by: str) -> bool:
        if origin is None:
            return fetched_by in ("cross-site", "same-site")
        theirs = origin.partition("://")[2]  # nothing, of a page that hides where it is from: also where Host is lost
        return not theirs or (theirs != host and not (self._names and _name_of(theirs) in self._names))

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        if self._names is None or name in self._names or name in LOCAL_NAMES or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True  # a page that has an address for its name was loaded from there: it is no other site's


_LOOKED_AT = (b"host", b"origin", b"sec-fetch-site")


def _name_of(host: str) -> str:
    """Without the port, and an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")
