"""Builds the lanes that the configuration asks for and this machine has. Owns no state; says why one is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.common.config import ClusterConfig
from baton.common.engine.batch import KvMemory
from baton.common.errors import ConfigError
from baton.common.ids import Stamp
from baton.common.log import EventLog
from baton.transfer.allow_list import PairSecrets
from baton.transfer.device_ipc import IpcRefused
from baton.transfer.mesh import Mesh
from baton.transfer.pool_copier import PoolCopier
from baton.transfer.staging import unit_rows
from baton.transfer.transports.base import DirectTransport, LatePullTransport, PullTransport, StagedTransport
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
    late: tuple[LatePullTransport, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)  # why lanes that are asked for are not here


LaneFactory = Callable[[Stamp, ClusterConfig, Mesh, KvMemory], Lanes]


def build_lanes(stamp: Stamp, config: ClusterConfig, mesh: Mesh, memory: KvMemory) -> Lanes:
    """Raises ConfigError when none of the configured lanes can work here."""
    staged: list[StagedTransport] = []
    pull: list[PullTransport] = []
    direct: list[DirectTransport] = []
    secrets = PairSecrets(mesh.keys, mesh.allow)
    late: list[LatePullTransport] = []
    missing: dict[str, str] = {}
    for lane in config.transfer.lanes:
        match lane:
            case "local" | "tcp" if memory.on_device:
                missing[lane] = "the pools lie on a device"
            case "cuda_ipc" if not memory.on_device:
                missing[lane] = "the pools lie in host memory"
            case "cuda_ipc":
                from baton.transfer.device_pools import cuda_ipc_lane  # needs Triton, as below

                try:
                    late.append(cuda_ipc_lane(memory))
                except IpcRefused as error:
                    missing[lane] = str(error)
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
                    missing[lane] = reason
                else:
                    staged.append(UcxTransport(stamp, mesh, config.bind_host, secrets.of("ucx")))
            case _:
                raise ConfigError("transfer.lanes", lane, "no such lane")
    for lane, reason in missing.items():
        _log.info("lane_missing", lane=lane, reason=reason)
    if not (staged or pull or direct or late):
        reasons = "; ".join(f"{lane}: {reason}" for lane, reason in missing.items())
        raise ConfigError("transfer.lanes", config.transfer.lanes, reasons, 'add "zmq": it always works')
    copier = None
    if memory.on_device:
        from baton.transfer.device_pools import cuda_copier  # needs Triton, which workers on CPUs do without

        copier = cuda_copier(memory, config.transfer.region_bytes)
    return Lanes(tuple(staged), tuple(pull), tuple(direct), copier, tuple(late), missing)
