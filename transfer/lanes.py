"""Builds the lanes that the configuration asks for and this machine has. Owns no state; says why one is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.common.config import ClusterConfig
from baton.common.engine.batch import KvMemory
from baton.common.errors import ConfigError
from baton.common.ids import Stamp
from baton.common.log import EventLog
from baton.transfer.allow_list import PairSecrets
from baton.transfer.mesh import Mesh
from baton.transfer.pool_copier import PoolCopier
from baton.transfer.staging import unit_rows
from baton.transfer.transports.base import DirectTransport, PullTransport, StagedTransport
from baton.transfer.transports.local import LocalTransport
from baton.transfer.transports.tcp import TcpTransport
from baton.transfer.transports.ucx import UcxTransport, why_unavailable
from baton.transfer.transports.zmq import ZmqTransport

_log = EventLog("baton.transfer")


@dataclass(frozen=True, slots=True)
class Lanes:
    """The transports of one process."""

    staged: tuple[StagedTransport, ...]
    pull: tuple[PullTransport, ...] = ()
    direct: tuple[DirectTransport, ...] = ()
    copier: PoolCopier | None = None  # of pools that are not host memory


LaneFactory = Callable[[Stamp, ClusterConfig, Mesh, KvMemory], Lanes]


def build_lanes(stamp: Stamp, config: ClusterConfig, mesh: Mesh, memory: KvMemory) -> Lanes:
    """Raises ConfigError when none of the configured lanes can work here."""
    staged: list[StagedTransport] = []
    pull: list[PullTransport] = []
    direct: list[DirectTransport] = []
    secrets = PairSecrets(mesh.keys, mesh.allow)
    missing: list[str] = []
    for lane in config.transfer.lanes:
        if memory.on_device and lane in ("local", "tcp"):
            missing.append(f"{lane}: the pools lie on a device")
            _log.info("lane_missing", lane=lane, reason="the pools lie on a device")
            continue
        match lane:
            case "local":
                pull.append(LocalTransport(memory))
            case "zmq":
                staged.append(ZmqTransport(stamp, mesh, config.bind_host, config.transfer.region_bytes))
            case "tcp":
                streams = config.transfer.tcp_streams
                direct.append(
                    TcpTransport(stamp, mesh, config.bind_host, secrets.of("tcp"), unit_rows(memory), streams)
                )
            case "ucx":
                reason = why_unavailable()
                if reason:
                    missing.append(f"ucx: {reason}")
                    _log.info("lane_missing", lane="ucx", reason=reason)
                else:
                    staged.append(UcxTransport(stamp, mesh, config.bind_host, secrets.of("ucx")))
            case _:
                raise ConfigError("transfer.lanes", lane, "no such lane")
    if not staged and not pull and not direct:
        raise ConfigError("transfer.lanes", config.transfer.lanes, "; ".join(missing), 'add "zmq": it always works')
    copier = None
    if memory.on_device:
        from baton.transfer.device_pools import cuda_copier  # needs Triton, which workers on CPUs do without

        copier = cuda_copier(memory, config.transfer.region_bytes)
    return Lanes(tuple(staged), tuple(pull), tuple(direct), copier)
