"""What the `ucx` lane needs of others: the names of `ucxx`, typed, and messages that only members can make.

Owns: the late import of `ucxx` (its environment must be set first, and it need not be installed), and the first
messages between two peers. Never: a connection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Protocol, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from baton.common.ids import Stamp
from baton.transfer.session.tickets import SecretWith
from baton.transfer.transports.base import Bytes
from baton.transfer.transports.seal import Seal

DOOR_BYTES = 8192
"""Size of every sealed message: a receive must be posted before its size can be known."""


class Endpoint(Protocol):
    closed: bool

    def send(self, buffer: npt.NDArray[np.generic], tag: object, force_tag: bool) -> Awaitable[None]: ...

    def recv(self, buffer: npt.NDArray[np.generic], tag: object, force_tag: bool) -> Awaitable[None]: ...

    def abort(self, period: int) -> None: ...


class Worker(Protocol):
    def start_progress_thread(self, polling_mode: bool, epoll_timeout: int) -> None: ...

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
        context = cast(Context, self._new_context({}, progress_mode="thread", enable_python_future=True))
        context.worker.start_progress_thread(polling_mode=False, epoll_timeout=1)  # has begun for the first of a loop
        return context


Tag = Annotated[int, msgspec.Meta(ge=0)]
"""As UCX has them: 64 bits, as msgpack has at most."""


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """receiver -> source's door."""

    stamp: Stamp
    meant_for: int  # epoch
    worker: bytes
    number: Tag  # of the endpoint over which it comes (`ucx_worker.py`)
    reply_tag: Tag
    nonce: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """source -> receiver: asks go under `ask_tag`."""

    stamp: Stamp
    nonce: bytes
    ask_tag: Tag


MessageT = TypeVar("MessageT", Hello, Welcome)


class Door:
    """The first messages of two peers, sealed, as UCX wants memory."""

    def __init__(self, secret_with: SecretWith) -> None:
        self._secret_with = secret_with
        self._seal = Seal("ucx", DOOR_BYTES)

    def close(self, peer: Stamp, message: Hello | Welcome) -> Bytes:
        """For `peer`. Of one that is no member any more nobody can read it."""
        secret = self._secret_with(peer)
        body = msgspec.msgpack.encode(message) if secret is not None else b""
        sealed = self._seal.close(secret or b"", type(message).__name__, body)
        return np.frombuffer(sealed, dtype=np.uint8).copy()

    def open(self, sealed: Bytes, kind: type[MessageT]) -> MessageT | None:
        """None: no member said that, or not the one that it names."""
        message = sealed.tobytes()
        with contextlib.suppress(msgspec.DecodeError):
            claimed = msgspec.msgpack.decode(self._seal.claims(message), type=kind)
            secret = self._secret_with(claimed.stamp)
            if secret is not None and self._seal.open(secret, kind.__name__, message):
                return claimed
        return None
