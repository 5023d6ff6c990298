"""Facts of hosts that are well, pairs that are as they should be, and what a judge says of what is changed in them."""

from __future__ import annotations

from msgspec import structs

from baton.common.config import ClusterConfig, ModelConfig
from baton.common.ids import WorkerId
from baton.deploy.doctor.findings import Finding, Severity
from baton.deploy.doctor.judge import judge
from baton.deploy.doctor.shapes import Found, Host, HostFacts, LaneReport, PairReport

CONFIG = ClusterConfig(model=ModelConfig(model="fake"), bind_host="node")
VERSIONS = {
    "baton": "0.1.0",
    "ray": "2.60.0",
    "python": "3.11.7",
    "torch": "2.13.0",
    "pyzmq": "27.3.0",
    "ucxx": "0.52.0",
}


def facts(boot_id: str = "boot-a", **changes: object) -> HostFacts:
    well = HostFacts(
        hostname="a",
        address="10.0.0.1",
        boot_id=boot_id,
        namespaces={"pid": "1", "ipc": "2", "net": "3"},
        uid=1000,
        pid=4711,
        versions=VERSIONS,
        wire="2-3",
        layout={"model": "fake", "kv_page_size": "16"},
        model_trouble="",
        kernel="6.1",
        cpus=16,
        cpus_online=16,
        cpu_quota=0.0,
        affinity_numa=(0,),
        niceness=0,
        memory_bytes=64 << 30,
        memory_available_bytes=60 << 30,
        container_limit_bytes=0,
        container_used_bytes=0,
        shm_bytes=32 << 30,
        shm_free_bytes=32 << 30,
        memfd_trouble="",
        huge_pages_shared=True,
        open_files=65536,
        memlock_bytes=-1,
        cache_trouble="",
        compiler="/usr/bin/c++",
        environment={},
        ucx_transports=("tcp/eth0", "posix/memory", "cma/memory"),
    )
    return structs.replace(well, **changes)


def pair(source: str, receiver: str, chosen: str = "tcp", *, down: dict[str, str] | None = None) -> PairReport:
    """All lanes but those in `down` work; `local` is in there between hosts."""
    down = {"local": "another host, pid namespace or user"} if down is None else down
    lanes = [
        LaneReport(lane, "down", down[lane])
        if lane in down
        else LaneReport(lane, "up", latency_us=100.0, gbps=gbps, nbytes=1)
        for lane, gbps in (("local", 8.0), ("ucx", 3.0), ("tcp", 2.5), ("zmq", 1.5))
    ]
    return PairReport(WorkerId(source), WorkerId(receiver), 90.0, tuple(lanes), chosen, "preferred over the rest")


def two_hosts(first: HostFacts | None = None, second: HostFacts | None = None, **more: object) -> Found:
    """Two that are well, with what is changed in them."""
    one, other = first or facts(), second or facts("boot-b", hostname="b", address="10.0.0.2")
    found = Found(
        CONFIG,
        (Host("a", (WorkerId("a"),), one, workers=2), Host("b", (WorkerId("b"),), other, workers=2)),
        (pair("a", "b"), pair("b", "a")),
    )
    return structs.replace(found, **more)


def wrong(found: Found) -> list[Finding]:
    """All that is not ok; each says a way out, and what was found."""
    findings = [one for one in judge(found) if one.severity is not Severity.OK]
    assert all(one.way_out and one.value and one.where for one in findings if one.what != "cluster interface"), findings
    return findings


def only(found: Found) -> Finding:
    """The one thing that is wrong."""
    (finding,) = wrong(found)
    return finding
