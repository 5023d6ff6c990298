"""What is compared: every lane of Baton, and its peers at their defaults and at their best.

Owns: the list, and how each is started. Settings of the peers are those with which they were fastest here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from baton.common.config import LANES
from benchmarks.transfer.children import PEERS, Child, EndFailed, Pair, baton_ends, join

Wire = Literal["host", "tcp"]
"""Whether it may use that both ends are on one host. Only like wires are compared."""

_ONLY_TCP = {"UCX_TLS": "tcp,self"}
_TUNED_TCP = _ONLY_TCP | {"UCX_TCP_TX_SEG_SIZE": "512K", "UCX_TCP_RX_SEG_SIZE": "512K"}


@dataclass(frozen=True, eq=False)
class Leg:
    """One row of the tables."""

    name: str
    wire: Wire

    def start(self, page_bytes: int, pool_bytes: int) -> Pair:
        """Raises EndFailed: it cannot run here."""
        raise NotImplementedError

    @property
    def is_peer(self) -> bool:
        return not isinstance(self, BatonLeg)


@dataclass(frozen=True, eq=False)
class BatonLeg(Leg):
    lane: str = ""
    encrypted: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, page_bytes: int, pool_bytes: int) -> Pair:
        (source,), (target,) = baton_ends(
            self.lane, page_bytes, pool_bytes, encrypted=self.encrypted, environment=self.environment
        )
        return Pair(source, target, "target", stop_between_turns=False)


@dataclass(frozen=True, eq=False)
class NixlLeg(Leg):
    """`spin`: the end that only serves does nothing but make progress, which is faster over TCP; else it looks once a
    millisecond. For small hand-offs it always spins."""

    operation: Literal["READ", "WRITE"] = "READ"
    progress_thread: bool = True
    spin: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, page_bytes: int, pool_bytes: int) -> Pair:
        spec = {
            "page_bytes": page_bytes,
            "pool_bytes": pool_bytes,
            "operation": self.operation,
            "progress_thread": self.progress_thread,
            "spin": self.spin,
            "environment": dict(self.environment),
        }
        initiator = "target" if self.operation == "READ" else "source"
        return _peer_pair("nixl_end", spec, initiator)


@dataclass(frozen=True, eq=False)
class MooncakeLeg(Leg):
    def start(self, page_bytes: int, pool_bytes: int) -> Pair:
        return _peer_pair("mooncake_end", {"page_bytes": page_bytes, "pool_bytes": pool_bytes}, "target")


LegT = TypeVar("LegT", bound=Leg)


def baton_legs() -> list[BatonLeg]:
    legs: list[BatonLeg] = []
    for lane in LANES:
        match lane:
            case "ucx":
                legs.append(BatonLeg("ucx (shared memory)", "host", "ucx"))
                legs.append(BatonLeg("ucx (tcp)", "tcp", "ucx", environment=_ONLY_TCP))
            case "zmq":
                legs.append(BatonLeg("zmq (encrypted)", "tcp", "zmq"))
                legs.append(BatonLeg("zmq (no keys)", "tcp", "zmq", encrypted=False))
            case _:
                legs.append(BatonLeg(lane, "tcp" if lane == "tcp" else "host", lane))
    return legs


def chosen(legs: Sequence[LegT], only: str) -> list[LegT]:
    """The leg of that name; else all whose names contain it."""
    return [leg for leg in legs if leg.name == only] or [leg for leg in legs if only in leg.name]


def peer_legs() -> list[Leg]:
    return [
        NixlLeg("NIXL defaults", "host"),
        NixlLeg("NIXL read, no progress thread", "host", progress_thread=False),
        NixlLeg("NIXL write, no progress thread", "host", operation="WRITE", progress_thread=False),
        NixlLeg("NIXL tcp defaults", "tcp", environment=_ONLY_TCP),
        NixlLeg("NIXL tcp tuned", "tcp", progress_thread=False, spin=True, environment=_TUNED_TCP),
        MooncakeLeg("Mooncake tcp", "tcp"),
    ]


def _peer_pair(module: str, spec: Mapping[str, object], initiator: str) -> Pair:
    if not (PEERS / "bin/python").exists():
        raise EndFailed(f"there is no {PEERS.name} here (make bench-transfer makes it)")
    children: list[Child] = []
    try:
        children += [Child(module, {**spec, "side": side}, peers=True) for side in ("source", "target")]
        join(children[0], children[1])
    except EndFailed:
        for child in children:
            child.close()
        raise
    return Pair(children[0], children[1], initiator, stop_between_turns=True)
