"""Looks at the host it runs on: `facts_here`. Owns what is read, and where. Never: an opinion (judge_hosts.py), or a
change, but for one descriptor that is closed again.

What cannot be read is left at "unknown": containers hide much, and a doctor that needs to be root is of little use.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import zmq

from baton.common import env
from baton.common.compat import WIRE, spoken
from baton.common.config import ClusterConfig
from baton.common.errors import BatonError, ConfigError
from baton.common.huge_pages import shared_huge_pages
from baton.common.shared_memory import NotShared, SharedBlock, SharedView
from baton.deploy.doctor import topology
from baton.deploy.doctor.layouts import layout_of
from baton.deploy.doctor.shapes import Gpu, HostFacts, Nic, RdmaPort

PACKAGES = {"baton": ("baton-pd",), "ucxx": ("ucxx-cu12", "ucxx-cu13", "ucxx")} | {
    name: (name,) for name in ("torch", "ray", "transformers", "pyzmq", "msgspec", "xxhash")
}
"""By which of these names it is installed."""
NVIDIA_S = 10.0
_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")
_SYS = Path("/sys")
_CGROUP = _SYS / "fs/cgroup"


def facts_here(config: ClusterConfig, address: str, ucx_info: str) -> HostFacts:
    """`address`: where this host is reached. `ucx_info`: how UCX describes itself, "" where it is not used."""
    try:
        layout, model_trouble = layout_of(config), ""
    except ConfigError as error:
        layout, model_trouble = {}, f"{error.value}: {error.reason}" + (f" ({error.hint})" if error.hint else "")
    cpus = os.sched_getaffinity(0)
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    rdma, nics = tuple(_rdma_ports()), tuple(_nics())
    return HostFacts(
        hostname=socket.gethostname(),
        address=address,
        boot_id=_text(Path("/proc/sys/kernel/random/boot_id")),
        namespaces={name: _namespace(name) for name in ("pid", "ipc", "net")},
        uid=os.getuid(),
        pid=os.getpid(),
        versions=versions_here(),
        wire=spoken("")[WIRE],
        layout=layout,
        model_trouble=model_trouble,
        kernel=platform.release(),
        cpus=len(cpus),
        cpus_online=os.cpu_count() or 0,
        cpu_quota=topology.cpu_quota(_text(_CGROUP / "cpu.max")),
        affinity_numa=topology.numa_nodes_of(cpus, _numa_cpus()),
        niceness=os.getpriority(os.PRIO_PROCESS, 0),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_available_bytes=available_memory(),
        container_limit_bytes=topology.memory_limit(list(_memory_files("memory.max", "memory.limit_in_bytes"))),
        container_used_bytes=next(
            (int(text) for text in _memory_files("memory.current", "memory.usage_in_bytes") if text.isdecimal()), 0
        ),
        shm_bytes=shm.f_blocks * shm.f_frsize if shm else 0,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else 0,
        memfd_trouble=_memfd_trouble(),
        huge_pages_shared=shared_huge_pages(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        cache_trouble=cache_trouble(env.cache_dir()),
        compiler=shutil.which(env.compiler()) or "",
        environment=env.ucx_settings(),
        ucx_transports=topology.ucx_transports(ucx_info),
        nics=nics,
        rdma=rdma,
        gpus=tuple(_gpus(rdma, nics)),
    )


def versions_here() -> dict[str, str]:
    found = {"python": platform.python_version(), "libzmq": zmq.zmq_version()}
    for name, packages in PACKAGES.items():
        found[name] = ""
        for package in packages:
            with contextlib.suppress(PackageNotFoundError):
                found[name] = found[name] or version(package)
    return found


def ucx_info() -> str:
    """How UCX describes itself, with what it is told in this process's environment."""
    try:
        import ucxx._lib.libucxx as native
    except ImportError:
        return ""
    try:
        return str(native.UCXContext().info)
    except native.UCXError:
        return ""


def available_memory() -> int:
    """Bytes, with what the kernel would give up for it: free pages alone are few wherever files have been read."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    raise BatonError("/proc/meminfo has no MemAvailable")


def cache_trouble(folder: Path) -> str:
    """Why it cannot be written; "" when it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def _memfd_trouble() -> str:
    """The whole way of the local lane, within this process."""
    try:
        block = SharedBlock(1 << 16)
        SharedView(os.getpid(), block.fd, block.nonce, 1 << 16)
    except (OSError, NotShared, AttributeError) as error:
        return str(error)
    return ""


def _namespace(name: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{name}").stat().st_ino)
    except OSError:
        return ""


def _memory_files(now: str, before: str) -> Iterator[str]:
    """What the process's control groups say, of either version, those around it included as far as they are seen."""
    own = "/".join(line.rpartition(":")[2] for line in _text(Path("/proc/self/cgroup")).splitlines() if "::" in line)
    yield from (_text(_CGROUP / own.strip("/") / now), _text(_CGROUP / now))
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _text(_CGROUP / "memory" / path.strip("/") / before)
    yield _text(_CGROUP / "memory" / before)


def _numa_cpus() -> Mapping[int, str]:
    nodes = (_SYS / "devices/system/node").glob("node[0-9]*")
    return {int(node.name.removeprefix("node")): _text(node / "cpulist") for node in nodes}


def _nics() -> Iterator[Nic]:
    for folder in sorted((_SYS / "class/net").glob("*")):
        device = folder / "device"
        if device.exists():  # not loopback, bridges or other things of the kernel's own
            up = _text(folder / "operstate") in ("up", "unknown")
            yield Nic(folder.name, up, max(0, _number(folder / "speed", 0)), _numa(device), _pci(device))


def _rdma_ports() -> Iterator[RdmaPort]:
    for device in sorted((_SYS / "class/infiniband").glob("*")):
        for port in sorted((device / "ports").glob("[0-9]*")):
            active = "ACTIVE" in _text(port / "state")
            rate = topology.rate_gbps(_text(port / "rate"))
            there = device / "device"
            yield RdmaPort(device.name, int(port.name), active, rate, _numa(there), _pci(there))


def _gpus(rdma: tuple[RdmaPort, ...], nics: tuple[Nic, ...]) -> Iterator[Gpu]:
    cards = {one.device: (one.pci, one.numa) for one in rdma} or {one.name: (one.pci, one.numa) for one in nics}
    told = topology.parse_topology(_nvidia_topology())
    number = 0
    for device in sorted((_SYS / "bus/pci/devices").glob("*")):
        if _text(device / "vendor") != _NVIDIA_VENDOR or not _text(device / "class").startswith(_DISPLAY_CLASSES):
            continue
        name, pci, numa = f"GPU{number}", os.path.realpath(device), _numa(device)
        near = told.get(name) or topology.nearest_by_sysfs((pci, numa), cards)
        yield Gpu(name, pci, numa, *(near or ("", "")))
        number += 1


def _nvidia_topology() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        return subprocess.run(
            [command, "topo", "-m"], capture_output=True, text=True, timeout=NVIDIA_S, check=False
        ).stdout
    except (subprocess.TimeoutExpired, OSError):
        return ""


def _numa(device: Path) -> int:
    return _number(device / "numa_node", -1)


def _pci(device: Path) -> str:
    return os.path.realpath(device) if device.exists() else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path, unknown: int) -> int:
    try:
        return int(_text(path))
    except ValueError:
        return unknown
