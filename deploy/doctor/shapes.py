"""What a probe is asked and what it answers, and what a whole examination found: typed JSON, so that hosts with other
versions of Baton are understood, or named. Pure.

The answers are a part of `baton doctor --json` (docs/DOCTOR.md): fields are added, never renamed.
"""

from __future__ import annotations

from msgspec import Struct

from baton.common.config import ClusterConfig
from baton.common.ids import WorkerId
from baton.common.messages import Member


class ProbeSpec(Struct, frozen=True):
    """What a probe is born with. `run_dir` holds its pid, on its host."""

    worker: WorkerId
    config: ClusterConfig
    run_dir: str
    lifetime_s: float  # whatever happens to whoever asks, it is gone by then


# ------------------------------------------------------------------------------------------ one host


class Nic(Struct, frozen=True):
    """`speed_mbps` 0: the driver does not say. `numa` -1: not bound to a node."""

    name: str
    up: bool
    speed_mbps: int
    numa: int
    pci: str


class RdmaPort(Struct, frozen=True):
    device: str
    port: int
    active: bool
    rate_gbps: float  # gigabits, as InfiniBand counts
    numa: int
    pci: str


class Gpu(Struct, frozen=True):
    """`nearest`: of the RDMA devices, else of the network cards; `link` as nvidia-smi names it: PIX, PXB, PHB, NODE,
    SYS; "" when nothing tells."""

    name: str
    pci: str
    numa: int
    nearest: str = ""
    link: str = ""


class HostFacts(Struct, frozen=True):
    """As one process on it sees the host. Bytes; 0 limits: none; -1: unlimited."""

    hostname: str
    address: str
    boot_id: str
    namespaces: dict[str, str]  # pid, ipc, net
    uid: int
    pid: int
    versions: dict[str, str]  # "": not installed
    wire: str  # the versions of frames that this Baton speaks, "2-3"
    layout: dict[str, str]  # what workers of one cluster must have in common
    model_trouble: str  # why the model cannot be read here
    kernel: str
    cpus: int  # this process may run on
    cpus_online: int
    cpu_quota: float  # of the container, in CPUs; 0: none
    affinity_numa: tuple[int, ...]  # the nodes of those CPUs
    niceness: int
    memory_bytes: int
    memory_available_bytes: int
    container_limit_bytes: int
    container_used_bytes: int
    shm_bytes: int
    shm_free_bytes: int
    memfd_trouble: str
    huge_pages_shared: bool
    open_files: int
    memlock_bytes: int
    cache_trouble: str
    compiler: str
    environment: dict[str, str]  # UCX_*, RAPIDS_*
    ucx_transports: tuple[str, ...]  # "tcp/eth0", as UCX names them; () when it is not used
    nics: tuple[Nic, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    gpus: tuple[Gpu, ...] = ()


# ------------------------------------------------------------------------------------------ one pair


class LaneReport(Struct, frozen=True):
    """`latency_us`: asked until the bytes of one page are in the receiver's page, the shortest of some. `gbps`:
    gigabytes (1e9) per second of many pages. 0: not measured, `reason` says why."""

    lane: str
    status: str
    reason: str = ""
    latency_us: float = 0.0
    gbps: float = 0.0
    nbytes: int = 0  # that were moved for it


class PairReport(Struct, frozen=True):
    """Bytes from `source` to `receiver`. `control_us`: the shortest round trip of a control frame, 0: none came back.
    `chosen`: the lane that hand-offs would take, "": none."""

    source: WorkerId
    receiver: WorkerId
    control_us: float
    lanes: tuple[LaneReport, ...]
    chosen: str
    why: str
    trouble: str = ""  # why the pair was not measured


class Reach(Struct, frozen=True):
    """A TCP port, as tried from a host. `outcome`: "open", "refused", "no answer", or what else the system said."""

    source: str
    name: str
    address: str
    outcome: str


class ClockReport(Struct, frozen=True):
    """How far a host's wall clock is ahead of that of whoever asks, give or take `error_s`."""

    host: str
    offset_s: float
    error_s: float


# --------------------------------------------------------------------------------- asked and answered


class TellFacts(Struct, frozen=True, tag=True):
    pass


class Facts(Struct, frozen=True, tag=True):
    member: Member
    facts: HostFacts


class Meet(Struct, frozen=True, tag=True):
    """Whom to receive from, and whom to let in."""

    sources: tuple[Member, ...]
    everybody: tuple[Member, ...]


class TellTime(Struct, frozen=True, tag=True):
    pass


class WallTime(Struct, frozen=True, tag=True):
    wall_s: float


class Measure(Struct, frozen=True, tag=True):
    source: WorkerId
    within_s: float


class Measured(Struct, frozen=True, tag=True):
    report: PairReport


class TellHeard(Struct, frozen=True, tag=True):
    """Whose control frames have come in."""


class Heard(Struct, frozen=True, tag=True):
    workers: tuple[WorkerId, ...]


PORTS_AT_ONCE = 32


class TryPorts(Struct, frozen=True, tag=True):
    """`ports`: (name, host, port)."""

    ports: tuple[tuple[str, str, int], ...]
    within_s: float


class Tried(Struct, frozen=True, tag=True):
    outcomes: tuple[str, ...]


class Stop(Struct, frozen=True, tag=True):
    pass


class Done(Struct, frozen=True, tag=True):
    pass


class Failed(Struct, frozen=True, tag=True):
    """The probe lives and could not do it."""

    reason: str


Request = TellFacts | Meet | TellTime | Measure | TellHeard | TryPorts | Stop
Answer = Facts | Done | WallTime | Measured | Heard | Tried | Failed


# ----------------------------------------------------------------------------------- all of it


class Host(Struct, frozen=True):
    """One place where workers may be. `trouble`: why nothing is known of it."""

    name: str
    probes: tuple[WorkerId, ...]
    facts: HostFacts | None
    trouble: str = ""
    workers: int = 0  # that a cluster of this configuration would have here at most; 0: not known
    object_store_bytes: int = 0  # of Ray's


class Running(Struct, frozen=True):
    """A member of a cluster that runs."""

    worker: WorkerId
    role: str
    address: str
    fingerprint: dict[str, str]


class Found(Struct, frozen=True):
    """What an examination of hosts found, before anybody judges it."""

    config: ClusterConfig
    hosts: tuple[Host, ...]
    pairs: tuple[PairReport, ...] = ()
    deaf: tuple[tuple[str, str], ...] = ()  # (from, to): control frames that did not arrive
    clocks: tuple[ClockReport, ...] = ()
    ports: tuple[Reach, ...] = ()
    members: tuple[Running, ...] = ()
    left: tuple[str, ...] = ()  # probes that could not be ended
    pairs_possible: int = 0
    moved_bytes: int = 0
    took_s: float = 0.0
