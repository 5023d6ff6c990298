"""What the `ucx` lane needs of others: the names of `ucxx`, typed, and messages that only members can make.

Owns: the late import of `ucxx` (its environment must be set first, and it need not be installed), and the seal on the
first messages between two peers. Never: a connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import struct
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt

from baton.common.ids import Stamp
from baton.transfer.transports.base import Bytes

DOOR_BYTES = 8192
"""Size of every sealed message: a receive must be posted before its size can be known."""


class Endpoint(Protocol):
    closed: bool

    def send(self, buffer: npt.NDArray[np.generic], tag: object, force_tag: bool) -> Awaitable[None]: ...

    def recv(self, buffer: npt.NDArray[np.generic], tag: object, force_tag: bool) -> Awaitable[None]: ...

    def abort(self, period: int) -> None: ...


class Worker(Protocol):
    def stop_request_notifier_thread(self) -> None: ...

    def stop_progress_thread(self) -> None: ...


class WorkerAddress(Protocol):
    def tobytes(self) -> bytes: ...


class Context(Protocol):
    worker: Worker
    worker_address: WorkerAddress

    def recv(self, buffer: npt.NDArray[np.generic], tag: object) -> Awaitable[None]: ...

    def create_endpoint_from_worker_address(self, address: object) -> Awaitable[Endpoint]: ...

    def stop_notifier_thread(self) -> None: ...


class Ucxx:
    """The names we need. Imported late: its environment must be set first, and it need not be there."""

    def __init__(self) -> None:
        import ucxx._lib.libucxx as native
        from ucxx.core import ApplicationContext

        self.error = cast(type[Exception], native.UCXError)
        self.closed = cast(type[Exception], native.UCXCloseError)
        self.tag = cast(Callable[[int], object], native.UCXXTag)
        self.parse_address = cast(Callable[[bytes], object], native.UCXAddress.create_from_buffer)
        self._new_context = ApplicationContext

    def new_context(self) -> Context:
        """In a running loop, which UCX tells of every completion. Other progress modes burn a core when idle."""
        return cast(Context, self._new_context({}, progress_mode="thread", enable_python_future=True))


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """receiver -> source's door."""

    stamp: Stamp
    meant_for: int  # epoch
    worker: bytes
    reply_tag: int
    nonce: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """source -> receiver: asks go under `ask_tag`."""

    stamp: Stamp
    nonce: bytes
    ask_tag: int


class Seal:
    """Fixed-size messages that only holders of the secret can make."""

    def __init__(self, secret: str) -> None:
        self._key = bytes.fromhex(secret)

    def close(self, message: Hello | Welcome) -> Bytes:
        body = msgspec.msgpack.encode(message)
        sealed = struct.pack("<I", len(body)) + self._mac(type(message).__name__, body) + body
        assert len(sealed) <= DOOR_BYTES, len(sealed)
        return np.frombuffer(sealed.ljust(DOOR_BYTES, b"\0"), dtype=np.uint8).copy()

    def open_hello(self, sealed: Bytes) -> Hello | None:
        body = self._checked(sealed, Hello.__name__)
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.msgpack.decode(body, type=Hello)
        return None

    def open_welcome(self, sealed: Bytes) -> Welcome | None:
        body = self._checked(sealed, Welcome.__name__)
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.msgpack.decode(body, type=Welcome)
        return None

    def _checked(self, sealed: Bytes, kind: str) -> bytes:
        data = sealed.tobytes()
        (length,) = struct.unpack_from("<I", data)
        mac, body = data[4:36], data[36 : 36 + length]
        return body if hmac.compare_digest(mac, self._mac(kind, body)) else b""

    def _mac(self, kind: str, body: bytes) -> bytes:
        return hmac.digest(self._key, kind.encode() + b"\0" + body, hashlib.sha256)
