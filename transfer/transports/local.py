"""The lane between processes of one user on one host: the receiver reads the source's pages with `process_vm_readv`,
straight into its own. One copy, no staging, nothing for the source to do.

Owns: the nonce by which peers recognise this process's memory, and the reads. Never: a write into memory of another
process (there is no call for it here), or a read that is not covered by a hand-off: the source keeps the pages until
the receiver has said that it stopped (Commit, Cancel) or is proven dead.

A pid can be recycled: every read fetches the peer's nonce in the same call, and what comes without the right nonce is
refused. Torn bytes are found by the region's digest.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.common.ids import Stamp
from baton.common.kv.layout import Component
from baton.common.messages import LaneAddress
from baton.transfer.transports.base import Bytes, LinkDown, LinkUp, PullFailed, Rows, TransportEvent

_IOV_MAX = 1024
_UNITS_PER_CALL = _IOV_MAX - 1  # the last entry is the nonce
_NONCE_BYTES = 16
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_YAMA_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")

Iovecs = npt.NDArray[np.uint64]
"""[n, 2]: address and length, as `struct iovec`."""


@dataclass(frozen=True, slots=True)
class _Pool:
    """Where one component's pool lies in its process: `units` blocks of `unit_bytes` bytes from `base` on."""

    base: int
    units: int
    unit_bytes: int


@dataclass(frozen=True, slots=True)
class _Peer:
    """A proven peer."""

    pid: int
    pools: Mapping[Component, _Pool]
    nonce_at: int
    nonce: bytes


class LocalTransport:
    """See PullTransport. `pools` are uint8 [units, bytes of one], each one block; they must outlive the transport."""

    lane = "local"

    def __init__(self, pools: Mapping[Component, Bytes]) -> None:
        assert all(pool.flags.c_contiguous for pool in pools.values())
        self._memory = dict(pools)  # kept alive: from here on only its addresses count
        self._pools = {
            component: _Pool(pool.ctypes.data, len(pool), pool.shape[1]) for component, pool in pools.items()
        }
        self._libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL while it copies
        self._libc.process_vm_readv.restype = ctypes.c_ssize_t
        self._libc.process_vm_readv.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
        ]  # fmt: skip
        self._nonce = np.frombuffer(secrets.token_bytes(_NONCE_BYTES), dtype=np.uint8).copy()
        self._seen_nonce = np.zeros(_NONCE_BYTES, dtype=np.uint8)
        self._peers: dict[Stamp, _Peer] = {}
        self._events: list[TransportEvent] = []
        if _yama_scope() == 1:  # only descendants may look, unless we say otherwise; the kernel still compares users
            self._libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)

    def address(self) -> LaneAddress:
        address: dict[str, str | int] = {
            "host": _host_id(),
            "pid": os.getpid(),
            "nonce_at": self._nonce.ctypes.data,
            "nonce": self._nonce.tobytes().hex(),
        }
        for component, pool in self._pools.items():
            address |= {f"{component}_{name}": value for name, value in asdict(pool).items()}
        return LaneAddress(lane=self.lane, address=address)

    def open(self, peer: Stamp, address: LaneAddress) -> None:
        try:
            reason = self._prove(peer, address.address)
        except (KeyError, ValueError, TypeError):
            reason = "its address makes no sense"
        self._events.append(LinkDown(peer, reason) if reason else LinkUp(peer))

    def close_link(self, peer: Stamp) -> None:
        self._peers.pop(peer, None)

    def pull(self, peer: Stamp, source: Rows, target: Rows) -> PullFailed | None:
        known = self._peers.get(peer)
        if known is None:
            return PullFailed("the link is not open", peer_lost=False)
        if len(source.units) != len(target.units):
            return PullFailed(f"{len(source.units)} source units for {len(target.units)} of ours", peer_lost=False)
        theirs, ours = known.pools[source.component], self._pools[target.component]
        for rows, pool in ((source, theirs), (target, ours)):
            if len(rows.units) and not (rows.units.min() > 0 and rows.units.max() < pool.units):
                return PullFailed("a unit outside of the pool", peer_lost=False)
        for at in range(0, len(target.units), _UNITS_PER_CALL):
            batch = slice(at, at + _UNITS_PER_CALL)
            remote = _iovecs(theirs, replace(source, units=source.units[batch]), known.nonce_at)
            local = _iovecs(ours, replace(target, units=target.units[batch]), self._seen_nonce.ctypes.data)
            failed = self._read(known, local, remote)
            if failed is not None:
                del self._peers[peer]
                self._events.append(LinkDown(peer, failed.reason))  # to be proven anew
                return failed
        return None

    def poll(self) -> list[TransportEvent]:
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        return bool(self._events)

    def close(self) -> None:
        self._nonce[:] = 0  # whoever still reads here is told that it reads the wrong process
        self._peers.clear()

    def _prove(self, stamp: Stamp, address: dict[str, str | int]) -> str:
        """Reads the peer's nonce where it says it is. Returns why that cannot work, or "" and knows the peer."""
        if address["host"] != _host_id():
            return "another host, pid namespace or user"
        pools = {
            component: _Pool(*(int(address[f"{component}_{field.name}"]) for field in fields(_Pool)))
            for component in self._pools
        }
        for component, ours in self._pools.items():
            theirs = pools[component].unit_bytes
            if theirs != ours.unit_bytes:
                return f"a unit of its {component} has {theirs} bytes, of ours {ours.unit_bytes}"
        scope = _yama_scope()
        if scope > 1:
            return f"kernel.yama.ptrace_scope is {scope}"
        nonce = bytes.fromhex(str(address["nonce"]))
        peer = _Peer(int(address["pid"]), pools, int(address["nonce_at"]), nonce)
        if len(nonce) != _NONCE_BYTES:
            return "its nonce makes no sense"
        nothing, none = _Pool(0, 0, 0), Rows(Component.FULL, np.empty(0, dtype=np.int32), 0, 0)
        local = _iovecs(nothing, none, self._seen_nonce.ctypes.data)
        failed = self._read(peer, local, _iovecs(nothing, none, peer.nonce_at))
        if failed is not None:
            return failed.reason
        self._peers[stamp] = peer
        return ""

    def _read(self, peer: _Peer, local: Iovecs, remote: Iovecs) -> PullFailed | None:
        """One call. None when every byte came, and from the process that was proven."""
        self._seen_nonce[:] = 0
        want = int(local[:, 1].sum())
        got = self._libc.process_vm_readv(
            peer.pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
        )  # fmt: skip
        if got < 0:
            code = ctypes.get_errno()
            return PullFailed(f"process_vm_readv: {os.strerror(code)}", peer_lost=code in (errno.ESRCH, errno.EFAULT))
        if got != want:
            return PullFailed(f"process_vm_readv: {got} of {want} bytes", peer_lost=True)
        if self._seen_nonce.tobytes() != peer.nonce:
            return PullFailed("another process sits at that pid", peer_lost=True)
        return None


def _iovecs(pool: _Pool, rows: Rows, nonce_at: int) -> Iovecs:
    """One entry per stretch of consecutive whole units, or per part of one; and one for the nonce."""
    units, whole = rows.units, rows.row_bytes == pool.unit_bytes
    starts = np.flatnonzero(np.diff(units, prepend=-2) != 1) if whole else np.arange(len(units))
    vectors = np.empty((len(starts) + 1, 2), dtype=np.uint64)
    vectors[:-1, 0] = pool.base + units[starts].astype(np.int64) * pool.unit_bytes + rows.begin
    vectors[:-1, 1] = np.diff(np.append(starts, len(units))) * rows.row_bytes
    vectors[-1] = nonce_at, _NONCE_BYTES
    return vectors


def _host_id() -> str:
    """Processes with equal ids see the same pids, and may read each other where the kernel allows it at all."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pid_namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot_id}/{pid_namespace}/{os.getuid()}"


def _yama_scope() -> int:
    try:
        return int(_YAMA_SCOPE.read_text())
    except FileNotFoundError:
        return 0
