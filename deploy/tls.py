"""The certificate of a gateway, as it is on disk now.

Owns: `gateway.tls_cert` and `gateway.tls_key` in memory, and reading them anew when they have changed: a renewed
certificate needs no restart. Never: a handshake (`http_protocol.py`), or a word about a key in a log or an error.

A pair that cannot be used (half of it is written, or it is wrong) is logged once, and the one before goes on. What
could not even be read is tried again.
"""

from __future__ import annotations

import os
import ssl

from baton.common.errors import ConfigError
from baton.common.log import EventLog

_log = EventLog("baton.tls")
_Stamp = tuple[tuple[int, int, int], ...]


class TlsFiles:
    """Raises ConfigError for a pair that cannot be used."""

    def __init__(self, cert: str, key: str) -> None:
        self._cert = cert
        self._key = key
        self._amiss = ""  # as the log has it
        try:
            self._stamp: _Stamp = self._look()
            self._context = self._load()
        except OSError as error:  # as those of `ssl` are
            why = error.strerror or "no certificate and its key"
            raise ConfigError("gateway.tls_cert", cert, f"cannot be used with gateway.tls_key: {why}") from error

    def context(self) -> ssl.SSLContext:
        """For the next connection."""
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                self._context = self._load()
                self._amiss = ""
                _log.info("certificate_renewed")
        except OSError as error:
            if not isinstance(error, ssl.SSLError):  # a mode, descriptors: that may end without a trace in the files
                self._stamp = ()
            amiss = type(error).__name__
            if amiss != self._amiss:
                _log.warning("certificate_unusable", error=amiss)
            self._amiss = amiss
        return self._context

    def _look(self) -> _Stamp:
        stats = (os.stat(path) for path in (self._cert, self._key))
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)  # from TLS 1.2 on
        context.set_alpn_protocols(["http/1.1"])
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.load_cert_chain(self._cert, self._key, password="")  # a key with a password is refused, not asked for
        return context
