"""The lane between processes of one user on one host: the receiver maps the source's pool, for reading, and copies
pages straight into its own. One copy, no staging, nothing for the source to do.

Owns: the maps of its peers' pools, and the copies. Never: a write into memory of another process (the maps do not allow
it), or a read that is not covered by a hand-off: the source keeps the pages until the receiver has said that it stopped
(Commit, Cancel) or is proven dead.

A map is bound to memory, not to a pid: once proven by its nonce it is the right one for good, also after its process
is dead; what was announced before can still be read then. Torn bytes are found by the region's digest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.common.engine.batch import KvMemory
from baton.common.ids import Stamp
from baton.common.kv.layout import Component
from baton.common.messages import LaneAddress
from baton.common.shared_memory import NONCE_BYTES, NotShared, SharedBlock, SharedView
from baton.transfer.copying import copy_rows
from baton.transfer.staging import unit_rows
from baton.transfer.transports.base import Bytes, LinkDown, LinkUp, PullFailed, Rows, TransportEvent


@dataclass(frozen=True, slots=True)
class _Pool:
    """One component's pool of this process. No block: others cannot read it."""

    block: SharedBlock | None
    rows: Bytes


@dataclass(frozen=True, slots=True)
class _PeerPool:
    """One component's pool of a proven peer."""

    view: SharedView
    rows: Bytes


class LocalTransport:
    """See PullTransport. Peers can read pools that are in shared memory; for reading theirs, ours may be anywhere."""

    lane = "local"

    def __init__(self, memory: KvMemory) -> None:
        self._pools = {
            component: _Pool(memory.buffers[component].block, rows) for component, rows in unit_rows(memory).items()
        }
        self._peers: dict[Stamp, dict[Component, _PeerPool]] = {}
        self._events: list[TransportEvent] = []
        self.stray = 0  # addresses that named no memory of the peer's

    def address(self) -> LaneAddress:
        address: dict[str, str | int] = {"host": host_id(), "pid": os.getpid()}
        for component, pool in self._pools.items():
            units, unit_bytes = pool.rows.shape
            if pool.block is None:
                continue
            address |= {
                f"{component}_fd": pool.block.fd,
                f"{component}_nonce": pool.block.nonce.hex(),
                f"{component}_units": units,
                f"{component}_unit_bytes": unit_bytes,
            }
        return LaneAddress(lane=self.lane, address=address)

    def open(self, peer: Stamp, address: LaneAddress) -> None:
        try:
            self._peers[peer] = self._map(address.address)
        except NotShared as error:
            self.stray += 1
            self._events.append(LinkDown(peer, str(error)))
        except (KeyError, ValueError, TypeError, OverflowError):
            self.stray += 1
            self._events.append(LinkDown(peer, "its address makes no sense"))
        else:
            self._events.append(LinkUp(peer))

    def close_link(self, peer: Stamp) -> None:
        self._peers.pop(peer, None)

    def shut_out(self, peer: Stamp) -> None:
        self.close_link(peer)  # what it has mapped it can read for as long as this process lives

    def pull(self, peer: Stamp, source: Rows, target: Rows) -> PullFailed | None:
        known = self._peers.get(peer)
        if known is None:
            return PullFailed("the link is not open", peer_lost=False)
        theirs, ours = known[source.component], self._pools[target.component].rows
        for rows, pool in ((source, theirs.rows), (target, ours)):
            if len(rows.units) and int(rows.units.view(np.uint32).max()) >= len(pool):  # negative ones are large
                return PullFailed("a unit outside of the pool", peer_lost=False)
            assert 0 <= rows.begin < rows.end <= pool.shape[1], rows
        if len(source.units) != len(target.units) or source.row_bytes != target.row_bytes:
            return PullFailed(f"{source.nbytes} bytes for {target.nbytes} of ours", peer_lost=False)
        copy_rows(target.of(ours), target.units, source.of(theirs.rows), source.units)
        if not theirs.view.valid:  # asked after the copy: what was read while it was taken back does not count
            del self._peers[peer]
            failed = PullFailed("its process has taken its memory back", peer_lost=True)
            self._events.append(LinkDown(peer, failed.reason))
            return failed
        return None

    def poll(self) -> list[TransportEvent]:
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        return bool(self._events)

    def close(self) -> None:
        for pool in self._pools.values():
            if pool.block is not None:
                pool.block.revoke()
        self._peers.clear()

    def _map(self, address: dict[str, str | int]) -> dict[Component, _PeerPool]:
        """Raises NotShared for a peer that cannot be read or is not the one that it should be."""
        if address["host"] != host_id():
            raise NotShared("another host, pid namespace or user")
        pools = {}
        for component, ours in self._pools.items():
            if f"{component}_fd" not in address:
                raise NotShared(f"its pool of {component} is in memory of its own")
            units, unit_bytes = int(address[f"{component}_units"]), int(address[f"{component}_unit_bytes"])
            if unit_bytes != ours.rows.shape[1]:
                raise NotShared(f"a unit of its {component} has {unit_bytes} bytes, of ours {ours.rows.shape[1]}")
            nonce = bytes.fromhex(str(address[f"{component}_nonce"]))
            if len(nonce) != NONCE_BYTES:
                raise NotShared("its nonce makes no sense")
            view = SharedView(int(address["pid"]), int(address[f"{component}_fd"]), nonce, units * unit_bytes)
            pools[component] = _PeerPool(view, view.memory.reshape(units, unit_bytes))
        return pools


def host_id() -> str:
    """Processes with equal ids see the same pids, and may open each other's descriptors where the kernel allows it."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pid_namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot_id}/{pid_namespace}/{os.getuid()}"
