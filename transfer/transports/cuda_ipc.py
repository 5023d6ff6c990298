"""The lane between processes of one user whose pools lie on one GPU: the receiver opens the source's pools by CUDA IPC
handles, and has the device copy pages straight into its own. No host memory but what digests are made of.

Owns: what is said of this process's pools, the open pools of its peers, and a pidfd of each peer. Never: a write into a
peer's pool, a wait but in `close`, or a read that is not covered by a hand-off, as on `local`.

Invariants. L1: a pidfd is opened before a handle, and a handle of a dead process opens nothing: so the pidfd is of the
process that the pools belong to. L2: unlike `local`, what a dead process leaves behind is not read: CUDA promises
nothing of it. Its death ends the link, and a copy that it interrupts has failed, whatever it brought. L3: a pool is
closed behind its last copy, which may be long after its link.

Tested over shared host memory (`testing_ipc.py`). Not yet run on a GPU.
"""

from __future__ import annotations

import os
import select
from collections.abc import Mapping

from baton.common.ids import Stamp
from baton.common.kv.layout import Component
from baton.common.messages import LaneAddress
from baton.transfer.device_ipc import (
    IpcAddress,
    IpcCopy,
    IpcDevice,
    IpcRefused,
    OwnPool,
    PeerPool,
    owner_of,
    share_pool,
)
from baton.transfer.transports.base import LinkDown, LinkUp, PullFailed, Rows, TransportEvent

_OF_A_POOL = ("handle", "offset", "units", "unit_bytes")
_OF_A_PROCESS = ("host", "pid", "device")
_GONE = PullFailed("its process is gone", peer_lost=True)
_CLOSED = PullFailed("its link was closed meanwhile", peer_lost=False)


class CudaIpcTransport:
    """See LatePullTransport. Raises IpcRefused where a pool of this process cannot be shared."""

    lane = "cuda_ipc"

    def __init__(self, device: IpcDevice, pools: Mapping[Component, OwnPool]) -> None:
        self._device = device
        self._pools = dict(pools)
        self._address = {name: value for pool in pools.items() for name, value in _told(device, *pool).items()}
        self._peers: dict[Stamp, _Peer] = {}
        self._closing: list[_Peer] = []
        self._events: list[TransportEvent] = []
        self.stray = 0  # addresses that named no memory of the peer's

    def address(self) -> LaneAddress:
        return LaneAddress(lane=self.lane, address=dict(self._address))

    def open(self, peer: Stamp, address: LaneAddress) -> None:
        self.close_link(peer)
        try:
            self._peers[peer] = _Peer(self._device, self._pools, address.address)
        except IpcRefused as error:
            self.stray += 1
            self._events.append(LinkDown(peer, str(error)))
        else:
            self._events.append(LinkUp(peer))

    def close_link(self, peer: Stamp) -> None:
        self._end_link(peer, _CLOSED)

    def shut_out(self, peer: Stamp) -> None:
        self.close_link(peer)  # what it has opened it can read for as long as this process lives

    def begin_pull(self, peer: Stamp, source: Rows, target: Rows) -> _Pull | PullFailed:
        assert (source.component, source.begin, source.end) == (target.component, target.begin, target.end)
        known = self._peers.get(peer)
        if known is None:
            return PullFailed("the link is not open", peer_lost=False)
        if known.is_dead():
            self._lose(peer)
            return _GONE
        try:
            copy = known.pools[source.component].copy(source.units, target.units, target.begin, target.end)
        except IpcRefused as error:
            return PullFailed(str(error), peer_lost=False)
        return _Pull(known, copy)

    def poll(self) -> list[TransportEvent]:
        for peer in [peer for peer, known in self._peers.items() if known.is_dead()]:
            self._lose(peer)
        self._closing = [known for known in self._closing if not known.begin_close()]
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        return bool(self._events or self._closing)

    def close(self) -> None:
        for known in (*self._peers.values(), *self._closing):
            known.close()
        self._peers.clear()
        self._closing.clear()

    def _lose(self, peer: Stamp) -> None:
        self._end_link(peer, _GONE)
        self._events.append(LinkDown(peer, _GONE.reason))

    def _end_link(self, peer: Stamp, why: PullFailed) -> None:
        known = self._peers.pop(peer, None)
        if known is not None and not known.begin_close(why):
            self._closing.append(known)


class _Peer:
    """The open pools of a live process. Raises IpcRefused, with nothing left open."""

    def __init__(self, device: IpcDevice, ours: Mapping[Component, OwnPool], address: IpcAddress) -> None:
        self.over: PullFailed | None = None
        """Why nothing that is read here counts any more."""
        self.pools: dict[Component, PeerPool] = {}
        self._pidfd = _pidfd_of(owner_of(address))
        self._death = select.poll()
        self._death.register(self._pidfd, select.POLLIN)
        try:
            for component, pool in ours.items():
                self.pools[component] = PeerPool(device, _pool_of(address, component), pool)
            if self.is_dead():
                raise IpcRefused(_GONE.reason)
        except BaseException:
            self.close()
            raise

    def is_dead(self) -> bool:
        """Only of a link that has not been closed. Never waits."""
        return bool(self._death.poll(0))

    def begin_close(self, why: PullFailed = _CLOSED) -> bool:
        """See PeerPool."""
        if self.over is None:
            self.over = why
            os.close(self._pidfd)
        closed = [pool.begin_close() for pool in self.pools.values()]
        return all(closed)

    def close(self) -> None:
        """Waits for copies that have begun."""
        for pool in self.pools.values():
            pool.close()
        self.begin_close()


class _Pull:
    """See Pulling."""

    def __init__(self, peer: _Peer, copy: IpcCopy) -> None:
        self._peer, self._copy = peer, copy

    def done(self) -> bool:
        return self._copy.ended()

    @property
    def failed(self) -> PullFailed | None:
        """Asked after the copy: what was read while its process ended does not count."""
        if self._peer.over is not None:
            return self._peer.over
        if self._peer.is_dead():
            return _GONE
        return PullFailed(self._copy.failure, peer_lost=False) if self._copy.failure else None


def _told(device: IpcDevice, component: Component, pool: OwnPool) -> IpcAddress:
    """What is said of this process, and of this pool of it."""
    said = share_pool(device, pool)
    return {name: said[name] for name in _OF_A_PROCESS} | {f"{component}_{name}": said[name] for name in _OF_A_POOL}


def _pool_of(address: IpcAddress, component: Component) -> IpcAddress:
    """For PeerPool, which refuses an address that lacks something."""
    named = {name: name for name in _OF_A_PROCESS} | {name: f"{component}_{name}" for name in _OF_A_POOL}
    return {name: address[told] for name, told in named.items() if told in address}


def _pidfd_of(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (OSError, OverflowError) as error:
        raise IpcRefused(f"its process cannot be found: {error}") from error
