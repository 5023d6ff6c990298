"""The lane over UCX (through `ucxx`): shared memory, TCP, or whatever fabric UCX finds. Two-sided and staged.

Owns: a thread with its own asyncio loop, where all of UCX lives (`ucx_loop.py`), and the way there and back. Never: a
one-sided access to memory of a peer, or a listener (UCX would open it on every interface): peers meet through worker
addresses, which travel with the encrypted membership.

UCX knows no passwords and does not encrypt: use it on a network that is yours. Whoever wants a region must first prove
that it is the member that it says (HMAC over a fresh nonce under what the two share, both ways); the source makes no
endpoint for anybody else, and tags of regions are only known to those who got them over the encrypted control plane.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import xxhash

from baton.common import env
from baton.common.errors import ConfigError
from baton.common.ids import Stamp
from baton.common.messages import LaneAddress
from baton.transfer.session.tickets import SecretWith
from baton.transfer.transports.base import Bytes, LinkDown, TransportEvent, Watcher
from baton.transfer.transports.ucx_loop import CLOSE_TIMEOUT_S, UcxLoop
from baton.transfer.transports.ucx_parts import Ucxx

_START_TIMEOUT_S = 30.0

Started = Future[tuple[asyncio.AbstractEventLoop, UcxLoop]]


def why_unavailable() -> str:
    """ "" when the lane can be built here."""
    return "" if importlib.util.find_spec("ucxx") else "ucxx is not installed (pip install 'baton-pd[ucx]')"


class UcxTransport:
    """See StagedTransport. Raises ConfigError when UCX cannot start."""

    lane = "ucx"

    def __init__(self, stamp: Stamp, watcher: Watcher, bind_host: str, secret_with: SecretWith) -> None:
        env.tune_ucx(_interface_of(bind_host))
        self._watcher = watcher
        self._events: deque[TransportEvent] = deque()
        self._crashed: BaseException | None = None
        self._damaged = 0  # addresses; UCX trusts them to the byte, and ends the process over one that it cannot read
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        started: Started = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(started, stamp, secret_with)), name="ucx", daemon=True
        )
        self._thread.start()
        try:
            self._loop, self._ucx = started.result(_START_TIMEOUT_S)
        except TimeoutError:
            reason = f"UCX has not started within {_START_TIMEOUT_S} s"
            raise ConfigError("transfer.lanes", "ucx", reason, "leave it out") from None
        except ConfigError:
            os.close(self._wake_fd)
            raise
        watcher.register(self._wake_fd)

    def address(self) -> LaneAddress:
        worker = self._ucx.worker_address
        address: dict[str, str | int] = {"worker": worker.hex(), "digest": xxhash.xxh3_64_hexdigest(worker)}
        return LaneAddress(lane=self.lane, address=address | {"door": self._ucx.door})

    def open(self, peer: Stamp, address: LaneAddress) -> None:
        try:
            worker, door = bytes.fromhex(str(address.address["worker"])), int(address.address["door"])
            door.to_bytes(8, "little")  # a tag of UCX's
            if xxhash.xxh3_64_hexdigest(worker) != address.address["digest"]:
                raise ValueError("damaged")
        except (KeyError, ValueError, OverflowError):
            self._damaged += 1
            self._report(LinkDown(peer, "its address makes no sense"))
            return
        self._call(self._ucx.open, peer, worker, door)

    def close_link(self, peer: Stamp) -> None:
        self._call(self._ucx.close_link, peer)

    def shut_out(self, peer: Stamp) -> None:
        self._call(self._ucx.shut_out, peer)

    def receive(self, op: int, peer: Stamp, tag: int, slot: Bytes) -> None:
        self._call(self._ucx.receive, op, peer, tag, slot)

    def send(self, op: int, peer: Stamp, tag: int, payload: Bytes) -> None:
        self._call(self._ucx.send, op, peer, tag, payload)

    def cancel(self, op: int) -> None:
        self._call(self._ucx.cancel, op)

    def poll(self) -> list[TransportEvent]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        if self._crashed is not None:
            raise RuntimeError("a bug on the UCX thread") from self._crashed
        return [self._events.popleft() for _ in range(len(self._events))]

    @property
    def stray(self) -> int:
        return self._ucx.stray + self._damaged

    @property
    def busy(self) -> bool:
        return False

    def close(self) -> None:
        if not self._loop.is_closed():
            self._call(self._ucx.close)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise RuntimeError("UCX did not end its requests; staging memory must not be reused")
        self._watcher.unregister(self._wake_fd)
        os.close(self._wake_fd)

    def _call(self, method: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(method, *arguments)

    def _report(self, event: TransportEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._wake_fd, 1)

    def _crash(self, error: BaseException | None) -> None:
        """On the UCX thread; the owner raises it where it polls: operations may never end otherwise."""
        self._crashed = error
        os.eventfd_write(self._wake_fd, 1)

    async def _main(self, started: Started, stamp: Stamp, secret_with: SecretWith) -> None:
        try:
            ucxx = Ucxx()
        except ImportError as error:
            started.set_exception(ConfigError("transfer.lanes", "ucx", f"ucxx cannot be imported: {error}"))
            return
        try:
            ucx = UcxLoop(ucxx, stamp, secret_with, self._report, self._crash)
        except ucxx.error as error:
            started.set_exception(ConfigError("transfer.lanes", "ucx", f"UCX does not start: {error}"))
            return
        started.set_result((asyncio.get_running_loop(), ucx))
        await ucx.run()


def _interface_of(host: str) -> str:
    """The network interface that has this address, or "" when none is found (UCX then uses all it has)."""
    with contextlib.suppress(OSError):
        wanted = socket.gethostbyname(host)
        if wanted.startswith("127."):
            return "lo"
        for _, name in socket.if_nameindex():
            if _ipv4_of(name) == wanted:
                return name
    return ""


def _ipv4_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        siocgifaddr = 0x8915
        answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""
