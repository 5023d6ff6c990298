"""Which network card is near which GPU, from what `nvidia-smi topo -m` and sysfs say; what UCX says of itself, and
control groups of their limits. Pure: text in, values out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

LINKS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Nearest first: one switch, several, the CPU's root complex, one NUMA node, across the CPUs."""
UNLIMITED_FROM = 1 << 60
"""A control group of the first version says "no limit" with the largest page-aligned number."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NIC_NAME = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$")
_UCX_RESOURCE = re.compile(r"^#\s+resource\s+\d+\s*:.*--\s*(\S+)\s*$")


class Near(NamedTuple):
    """A card, and how it is connected (of LINKS)."""

    nic: str
    link: str


def parse_topology(text: str) -> dict[str, Near]:
    """Of `nvidia-smi topo -m`: "GPU0" -> the nearest card. GPUs without any are left out."""
    lines = [_ESCAPES.sub("", line) for line in text.splitlines()]
    header = next((line.split("\t") for line in lines if "GPU0" in line and line.startswith(("\t", " "))), [])
    columns = [name.strip() for name in header]
    names = {found[1]: found[2] for line in lines if (found := _NIC_NAME.match(line))}
    nearest: dict[str, Near] = {}
    for line in lines:
        cells = [cell.strip() for cell in line.split("\t")]
        if not re.fullmatch(r"GPU\d+", cells[0]):
            continue
        links = {
            names.get(column, column): cell
            for column, cell in zip(columns[1:], cells[1:], strict=False)
            if re.fullmatch(r"NIC\d+|mlx\d+_\d+", column) and cell in LINKS
        }
        if links:
            nic = min(links, key=lambda name: LINKS.index(links[name]))
            nearest[cells[0]] = Near(nic, links[nic])
    return nearest


def nearest_by_sysfs(gpu: tuple[str, int], nics: Mapping[str, tuple[str, int]]) -> Near | None:
    """`gpu` and each card: (path of the device in sysfs, NUMA node or -1). The more of the path two devices share, the
    nearer they are: the last component is the device, the first the root complex."""
    found = [(_link(gpu, nic), name) for name, nic in nics.items()]
    if not found:
        return None
    link, name = min(found, key=lambda one: (LINKS.index(one[0]), one[1]))
    return Near(name, link)


def _link(one: tuple[str, int], other: tuple[str, int]) -> str:
    shared = 0
    first, second = ([part for part in path.split("/") if part] for path in (one[0], other[0]))
    for left, right in zip(first[:-1], second[:-1], strict=False):
        if left != right:
            break
        shared += 1
    bridges = len([part for part in first[:shared] if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", part)])
    if bridges:  # a root port alone is a way through the root complex; the switch is below it
        return "PIX" if bridges > 1 and shared == len(first) - 1 == len(second) - 1 else "PXB" if bridges > 1 else "PHB"
    if one[1] >= 0 and one[1] == other[1]:
        return "NODE"
    return "SYS"


def ucx_transports(info: str) -> tuple[str, ...]:
    """Of a UCX context's description: "tcp/eth0", "rc_mlx5/mlx5_0:1", "cma/memory", ..."""
    return tuple(dict.fromkeys(found[1] for line in info.splitlines() if (found := _UCX_RESOURCE.match(line))))


def parse_cpu_list(text: str) -> frozenset[int]:
    """ "0-3,8" """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def numa_nodes_of(cpus: Iterable[int], node_cpus: Mapping[int, str]) -> tuple[int, ...]:
    """`node_cpus`: each node's list of CPUs, as sysfs has it."""
    wanted = frozenset(cpus)
    return tuple(sorted(node for node, text in node_cpus.items() if wanted & parse_cpu_list(text)))


def memory_limit(texts: Sequence[str]) -> int:
    """The tightest of what a process's control groups say; 0: no limit."""
    limits = [int(text) for text in texts if text.strip().isdecimal()]
    return min((limit for limit in limits if limit < UNLIMITED_FROM), default=0)


def cpu_quota(cpu_max: str) -> float:
    """Of `cpu.max`, "200000 100000": two CPUs; 0: no limit."""
    quota, _, period = cpu_max.strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else 0.0


def rate_gbps(text: str) -> float:
    """Of an InfiniBand port's `rate`: "200 Gb/sec (4X HDR)"."""
    found = re.match(r"\s*([0-9.]+)\s*Gb", text)
    return float(found[1]) if found else 0.0
