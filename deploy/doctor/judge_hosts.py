"""What is wrong with a host by itself. Pure: facts in, findings out; each says what was found, and the way out."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from baton.common.config import FAKE_MODEL, ClusterConfig
from baton.common.units import format_bytes
from baton.deploy.doctor.findings import Finding, Severity
from baton.deploy.doctor.shapes import Host, HostFacts

OPEN_FILES = 4096
"""A worker has a few sockets with each peer, a gateway one for each client."""
LEAST_SHM_BYTES = 256 << 20
"""Docker gives 64 MiB, which UCX and Ray's object store outgrow."""
NEAR_LINKS = ("PIX", "PXB")
RDMA_TRANSPORTS = ("rc", "dc", "ud", "ib", "srd")
SHARED_TRANSPORTS = ("posix", "sysv", "cma", "xpmem", "knem")

CACHE_WAY_OUT = "set BATON_CACHE_DIR to a folder that can be written: converted weights and kernels are kept there"
UCX_WANTED = {
    "UCX_CMA_MEMORY_INVALIDATE": ("y", "without it UCX drops shared memory: 1 GB/s instead of 9"),
    "UCX_TCP_TX_SEG_SIZE": ("512K", "the default is three times slower"),
    "UCX_TCP_RX_SEG_SIZE": ("512K", "the default is three times slower"),
}


def judge_host(host: Host, config: ClusterConfig) -> Iterator[Finding]:
    """All of one host, those that are well too."""
    return (structs.replace(finding, where=host.name) for finding in _judge(host, config))


def _judge(host: Host, config: ClusterConfig) -> Iterator[Finding]:
    facts = host.facts
    if host.trouble:
        way_out = "is the host up, has it this Baton and Ray, is the process stopped? The peers' findings say more"
        yield Finding("probe", Severity.FAIL, host.trouble, way_out, "an answer")
    if facts is None:
        return
    yield _model(facts, config)
    yield _cores(host, facts, config)
    yield _numa(facts, config)
    yield _niceness(facts)
    yield _memory(host, facts, config)
    yield _shm(host, facts, config)
    if "local" in config.transfer.lanes:
        yield _memfd(facts)
        yield _huge_pages(facts)
    yield _open_files(facts)
    yield _cache(facts)
    yield _compiler(facts)
    if "ucx" in config.transfer.lanes:
        yield from judge_ucx(facts)
    yield from judge_gpus(facts)


def _model(facts: HostFacts, config: ClusterConfig) -> Finding:
    if facts.model_trouble:
        return Finding("model", Severity.FAIL, facts.model_trouble, "every host needs its files, at the same place")
    if config.model.model == FAKE_MODEL:
        return Finding("model", Severity.OK, "fake: for trying Baton out, not an answer in it means anything")
    return Finding("model", Severity.OK, config.model.model)


def _cores(host: Host, facts: HostFacts, config: ClusterConfig) -> Finding:
    workers = min(host.workers, config.prefill + config.decode)
    usable = min(facts.cpus, facts.cpu_quota) if facts.cpu_quota else facts.cpus
    value = f"{usable:g} of {facts.cpus_online} for at most {workers} workers"
    if usable < workers * config.placement.cpus:
        way_out = f"workers share cores and slow each other down: at most {int(usable)} here (--prefill, --decode)"
        return Finding("cores", Severity.WARN, value, way_out, f"{workers * config.placement.cpus}")
    left = int(usable) - workers * config.placement.cpus
    if config.pin_cores:
        value += f", a core each; gateways on the other {left}" if left else ", a core each; gateways on the same"
    return Finding("cores", Severity.OK, value)


def _numa(facts: HostFacts, config: ClusterConfig) -> Finding:
    nodes = ", ".join(map(str, facts.affinity_numa)) or "unknown"
    if len(facts.affinity_numa) > 1 and not config.pin_cores:
        way_out = "pin them: pin_cores on one machine; else start one Ray node per NUMA node, under numactl"
        return Finding("NUMA", Severity.WARN, f"workers wander over nodes {nodes}", way_out, "one node")
    return Finding("NUMA", Severity.OK, f"CPUs of node {nodes}")


def _niceness(facts: HostFacts) -> Finding:
    if facts.niceness > 0:
        way_out = "start Ray with RAY_worker_niceness=0: whatever else runs there starves the workers, and heartbeats"
        return Finding("priority", Severity.WARN, f"niceness {facts.niceness}", way_out, "0")
    return Finding("priority", Severity.OK, f"niceness {facts.niceness}")


def _memory(host: Host, facts: HostFacts, config: ClusterConfig) -> Finding:
    workers = min(host.workers, config.prefill + config.decode)
    limit = facts.container_limit_bytes or facts.memory_bytes
    available = facts.memory_available_bytes
    if facts.container_limit_bytes:
        available = min(available, facts.container_limit_bytes - facts.container_used_bytes)
    whose = "of the container" if facts.container_limit_bytes else "of the host"
    value = f"{format_bytes(available)} available, {format_bytes(limit)} {whose}"
    needed = workers * config.kv.pool_bytes if config.model.model != FAKE_MODEL else 0
    expected = f"{format_bytes(needed)} for the pools of {workers} workers, and their weights"
    if needed > limit:
        return Finding("memory", Severity.FAIL, value, "smaller pools (kv.pool_bytes), or a larger limit", expected)
    if needed > available:
        return Finding("memory", Severity.WARN, value, "free some, or make pools smaller: kv.pool_bytes", expected)
    return Finding("memory", Severity.OK, value)


def _shm(host: Host, facts: HostFacts, config: ClusterConfig) -> Finding:
    """Pools are memfds, which count as memory and need no room there."""
    value = f"{format_bytes(facts.shm_bytes)}, {format_bytes(facts.shm_free_bytes)} free"
    least = max(host.object_store_bytes, LEAST_SHM_BYTES if "ucx" in config.transfer.lanes else 0)
    if facts.shm_bytes < least:
        way_out = "docker run --shm-size, or a memory emptyDir at /dev/shm: Ray's object store and UCX live there"
        return Finding("/dev/shm", Severity.WARN, value, way_out, f"{format_bytes(least)} or more")
    return Finding("/dev/shm", Severity.OK, value)


def _memfd(facts: HostFacts) -> Finding:
    if facts.memfd_trouble:
        way_out = "the lane local cannot work: allow memfd_create and /proc/PID/fd to the container, or leave it out"
        return Finding("memfd", Severity.FAIL, facts.memfd_trouble, way_out, "sealed shared memory")
    return Finding("memfd", Severity.OK, "sealed shared memory works")


def _huge_pages(facts: HostFacts) -> Finding:
    if facts.huge_pages_shared:
        return Finding("huge pages", Severity.OK, "given to shared memory that asks for them")
    way_out = "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    value = "not given to shared memory: the local lane is up to a third slower"
    return Finding("huge pages", Severity.WARN, value, way_out, "advise")


def _open_files(facts: HostFacts) -> Finding:
    if 0 <= facts.open_files < OPEN_FILES:
        way_out = f"ulimit -n {16 * OPEN_FILES}, before Ray is started there"
        return Finding("open files", Severity.WARN, f"{facts.open_files} allowed", way_out, f"{OPEN_FILES} or more")
    return Finding("open files", Severity.OK, f"{facts.open_files} allowed" if facts.open_files >= 0 else "unlimited")


def _cache(facts: HostFacts) -> Finding:
    if facts.cache_trouble:
        return Finding("cache", Severity.FAIL, facts.cache_trouble, CACHE_WAY_OUT, "can be written")
    return Finding("cache", Severity.OK, "can be written")


def _compiler(facts: HostFacts) -> Finding:
    if facts.compiler:
        return Finding("compiler", Severity.OK, facts.compiler)
    way_out = "install g++ or set CXX, or share BATON_CACHE_DIR with a host that has one; else a slower path is taken"
    return Finding("compiler", Severity.WARN, "none", way_out, "a C++ compiler")


# ---------------------------------------------------------------------------------------------- UCX


def has_rdma(facts: HostFacts) -> bool:
    """The host has a port that is up; whether UCX uses it is another question."""
    return any(port.active for port in facts.rdma)


def ucx_has_rdma(facts: HostFacts) -> bool:
    return any(name.startswith(RDMA_TRANSPORTS) for name in facts.ucx_transports)


def judge_ucx(facts: HostFacts) -> Iterator[Finding]:
    """The lane `ucx` on one host: installed, told right, with the fabric that is there."""
    rdma = [f"{port.device}:{port.port}" for port in facts.rdma if port.active]
    if not facts.versions.get("ucxx"):
        severity = Severity.FAIL if rdma else Severity.OK
        way_out = "pip install 'baton-pd[ucx]': nothing else uses RDMA" if rdma else ""
        value = f"not installed{f', and {rdma[0]} is up' if rdma else ', and there is no RDMA'}"
        yield Finding("ucx", severity, value, way_out, "ucxx" if rdma else "")
        return
    yield from _ucx_told(facts)
    if rdma and not ucx_has_rdma(facts):
        chosen = facts.environment.get("UCX_NET_DEVICES", "")
        way_out = (
            f"name it: UCX_NET_DEVICES={rdma[0]}; libucx from PyPI has no InfiniBand: install the system's, and set "
        )
        way_out += "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
        value = f"UCX uses {', '.join(facts.ucx_transports) or 'nothing'}" + (f" (devices: {chosen})" if chosen else "")
        yield Finding("RDMA", Severity.FAIL, value, way_out, f"{rdma[0]}")
    elif rdma:
        yield Finding("RDMA", Severity.OK, ", ".join(facts.ucx_transports))
    else:
        yield Finding("RDMA", Severity.OK, f"no port is up; UCX uses {', '.join(facts.ucx_transports) or 'nothing'}")
    if facts.ucx_transports and not any(name.startswith(SHARED_TRANSPORTS) for name in facts.ucx_transports):
        way_out = "UCX_TLS must not rule them out: leave it unset"
        value = f"UCX uses {', '.join(facts.ucx_transports)}"
        yield Finding("ucx on one host", Severity.WARN, value, way_out, "posix, sysv or cma")
    if rdma and 0 <= facts.memlock_bytes < facts.memory_bytes:
        value = f"{format_bytes(facts.memlock_bytes)} may be locked"
        yield Finding("locked memory", Severity.FAIL, value, "ulimit -l unlimited; a container: IPC_LOCK", "unlimited")
    else:
        locked = "unlimited" if facts.memlock_bytes < 0 else format_bytes(facts.memlock_bytes)
        yield Finding("locked memory", Severity.OK, locked)


def _ucx_told(facts: HostFacts) -> Iterator[Finding]:
    told = facts.environment
    wrong = [
        (name, told[name], wanted, why)
        for name, (wanted, why) in UCX_WANTED.items()
        if told.get(name, wanted) != wanted
    ]
    for name, value, wanted, why in wrong:
        yield Finding("UCX settings", Severity.WARN, f"{name}={value}: {why}", f"unset {name}", wanted)
    transports = told.get("UCX_TLS", "all")
    if set(transports.split(",")) <= {"tcp", "self"}:
        way_out = "unset UCX_TLS, unless this is a test"
        yield Finding("UCX settings", Severity.WARN, f"UCX_TLS={transports}: TCP and nothing else", way_out, "all")
    elif not wrong:
        yield Finding("UCX settings", Severity.OK, "as Baton sets them")


# --------------------------------------------------------------------------------------------- GPUs


def judge_gpus(facts: HostFacts) -> Iterator[Finding]:
    """How far each is from a network card: KV that crosses the CPUs' link shares it with everything else."""
    for gpu in facts.gpus:
        what = f"{gpu.name} to network"
        if not gpu.link:
            yield Finding(what, Severity.OK, "no card is known")
        elif gpu.link in NEAR_LINKS:
            yield Finding(what, Severity.OK, f"{gpu.nearest} by {gpu.link}")
        else:
            way_out = "put the worker of this GPU where a card is near, or name one for it in UCX_NET_DEVICES"
            yield Finding(what, Severity.WARN, f"{gpu.nearest} by {gpu.link}", way_out, "PIX or PXB: one PCIe switch")
