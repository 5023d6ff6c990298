"""What a gateway tells of itself and its cluster: the body of `GET /status`, read by `baton status` and the client."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from baton.common.kv.layout import Component
from baton.common.messages import Load
from baton.deploy.recent import Recent
from baton.transfer.reports import Flow


class LaneUse(Struct, frozen=True, kw_only=True):
    """What one pair of workers has handed over on one lane, as far as this gateway's requests tell."""

    prefill_worker: str
    decode_worker: str
    lane: str
    transfers: int
    nbytes: int
    seconds: float


class WorkerView(Struct, frozen=True, kw_only=True):
    """One process of the cluster, as this gateway sees it."""

    worker: str
    role: str
    incarnation: int
    silent: bool
    load: Load


class SeatView(Struct, frozen=True, kw_only=True):
    """One place in the cluster, as its controller sees it: also where nobody is, and why. `differs`: what keeps its
    process from being of one group with the first one, field -> "its != theirs"."""

    worker: str
    role: str
    state: str
    incarnation: int
    detail: str = ""
    revision: int = 1
    group: str = ""
    release: str = ""
    differs: dict[str, str] = {}


class ClusterView(Struct, frozen=True, kw_only=True):
    """What its controller tells of it; nothing while that does not answer. `given_up`: which revision the last upgrade
    gave up, why, and which one serves."""

    seats: list[SeatView] = []
    given_up: str = ""


class GatewayStatus(Struct, frozen=True, kw_only=True):
    """`requests.running` and `recent` are this gateway's own; `details` are the workers' own accounts (page census), by
    worker."""

    version: str
    model: str
    max_model_len: int
    ready: bool
    reason: str
    requests: Load
    workers: list[WorkerView]
    lanes: list[LaneUse]
    details: dict[str, Any]
    recent: Recent = Recent()
    seats: list[SeatView] = []  # none while the controller does not answer
    given_up: str = ""  # which revision the last upgrade gave up, why, and which one serves


class LaneState(Struct, frozen=True, kw_only=True):
    """One lane from a worker to a peer. `reason`: why it is not up."""

    peer: str
    lane: str
    status: str
    reason: str = ""
    gbps: float = 0.0


class WorkerAccount(Struct, frozen=True, kw_only=True):
    """What is read of a worker's own account (`baton.transfer.worker.WorkerStatus`) in `details`."""

    cores: tuple[int, ...] = ()  # that it is pinned to; none: to none
    component: str = Component.FULL  # the model's first, whose `census` is
    census: dict[str, int] = {}
    components: dict[str, dict[str, int]] = {}  # those of the others
    lanes: list[LaneState] = []
    flows: list[Flow] = []
    counters: dict[str, int] = {}
