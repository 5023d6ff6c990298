"""Messages of a fixed size that only the two processes of a pair can make: how lanes that have no authentication of
their own begin a connection.

Owns the format: an HMAC, the length of the body, the body, zeros. Never: what is said in it, what two processes share
(`allow_list.PairSecrets`), or what makes a copy of an earlier message worthless (nonces, and what was said `before`,
are the lanes' own).
"""

from __future__ import annotations

import hashlib
import hmac
import struct

_MAC_BYTES = 32
_LENGTH = struct.Struct("<H")


class Seal:
    """`secret`: what the two share; b"" is a cluster without keys, where everybody can make any message. No message of
    one lane is ever taken for one of another."""

    def __init__(self, lane: str, nbytes: int) -> None:
        self._lane = lane
        self._nbytes = nbytes

    def close(self, secret: bytes, kind: str, body: bytes, before: bytes = b"") -> bytes:
        """A message of `nbytes`. `before`: all that was said on this connection until now; the seal covers it too."""
        message = self._mac(secret, kind, body, before) + _LENGTH.pack(len(body)) + body
        assert len(message) <= self._nbytes, f"a {kind} of {len(body)} bytes"
        return message.ljust(self._nbytes, b"\0")

    def claims(self, message: bytes) -> bytes:
        """The body, whoever made it: who that seems to be tells under which secret to `open` it."""
        (length,) = _LENGTH.unpack_from(message, _MAC_BYTES)
        return message[_MAC_BYTES + _LENGTH.size :][:length]

    def open(self, secret: bytes, kind: str, message: bytes, before: bytes = b"") -> bytes:
        """The body, or b"": not made by who has the secret, or for another place."""
        body = self.claims(message)
        return body if hmac.compare_digest(message[:_MAC_BYTES], self._mac(secret, kind, body, before)) else b""

    def _mac(self, secret: bytes, kind: str, body: bytes, before: bytes) -> bytes:
        place = f"{self._lane} {kind}".encode() + struct.pack("<I", len(before))
        return hmac.digest(secret, place + before + body, hashlib.sha256)
