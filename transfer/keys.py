"""Key pairs: as whom a process speaks, and what two of them share that nobody else can know.

Owns: the making of keys, and what is derived from them. Never: a socket, or a list of whom to believe
(`allow_list.py`). The secret half of a process's own pair is made in the process and never leaves it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field

import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from zmq.utils import z85

from baton.common.by_name import ByName

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Of Curve25519, as CURVE writes them: 40 characters of Z85."""

    public: str
    secret: str = field(repr=False)

    @staticmethod
    def generate() -> KeyPair:
        public, secret = zmq.curve_keypair()
        return KeyPair(public.decode(), secret.decode())

    def shared_with(self, public: str, purpose: str) -> bytes:
        """32 bytes that only this process and the holder of `public` can compute, others for each purpose. Raises
        ValueError when that is no key."""
        theirs = X25519PublicKey.from_public_bytes(_raw(public))
        shared = X25519PrivateKey.from_private_bytes(_raw(self.secret)).exchange(theirs)
        both = "".join(sorted((self.public, public)))  # they say the same, whichever of the two computes it
        return hmac.digest(shared, f"baton {purpose} {both}".encode(), hashlib.sha256)


def is_key(text: str) -> bool:
    """Whether somebody can be reached by it: what a stranger calls a key may be anything."""
    try:
        KeyPair.generate().shared_with(text, "")
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class ControllerDoor(ByName):
    """Where a process says Hello, to whose key. `guest`: what the controller has given to this one process, so that it
    can introduce its own key, once; None: its own is known there already."""

    address: str
    key: str = ""
    guest: KeyPair | None = None


NOWHERE = ControllerDoor("")
"""There is no controller."""


def _raw(key: str) -> bytes:
    """Raises ValueError."""
    try:
        raw: bytes = z85.decode(key)
    except (KeyError, struct.error) as error:
        raise ValueError("no Z85") from error
    if len(raw) != _KEY_BYTES:
        raise ValueError(f"{len(raw)} bytes")
    return raw
