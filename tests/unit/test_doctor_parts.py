"""Pairs, clocks and topologies of a doctor: pure, and true of any number of hosts."""

from __future__ import annotations

import random

import pytest

from baton.common.config import PlacementConfig
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.messages import LaneAddress, Member
from baton.deploy.doctor import topology
from baton.deploy.doctor.clocks import Exchange, offset_of
from baton.deploy.doctor.command import ports_of
from baton.deploy.doctor.pairs import Pair, choose_pairs, rounds_of
from baton.deploy.doctor.ray_probes import workers_on
from baton.deploy.doctor.topology import Near

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNODE\tSYS\t48-95,144-191\t1\t\tN/A\n"
    "NIC0\tSYS\tNODE\t X \tSYS\t\t\t\t\n"
    "NIC1\tPIX\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n\n"
)
"""In the format of `nvidia-smi topo -m` (driver 550): two GPUs, two cards."""
UCX = """\
#     component 1  :  tcp
#            md 1  :  component 1  tcp
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 6  :  md 5  dev 3  flags -- rc_mlx5/mlx5_0:1
"""


def names(count: int) -> list[WorkerId]:
    return [WorkerId(f"host-{number}") for number in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 17, 64])
def test_pairs_stay_few_and_leave_nobody_out(count: int) -> None:
    hosts = names(count)
    pairs = choose_pairs(hosts, random.Random(3).choice)
    assert len(set(pairs)) == len(pairs) <= 4 * count + (20 if count <= 5 else 0)
    assert all(Pair(pair.receiver, pair.source) in pairs for pair in pairs)
    assert {probe for pair in pairs for probe in pair} == (set(hosts) if count > 1 else set())
    assert len(choose_pairs(hosts, random.Random(3).choice, all_pairs=True)) == count * max(0, count - 1)


@pytest.mark.parametrize("count", [2, 5, 17, 64])
def test_in_a_round_everybody_has_one_part_at_most(count: int) -> None:
    pairs = choose_pairs(names(count), random.Random(3).choice)
    rounds = rounds_of(pairs)
    assert sorted(pair for together in rounds for pair in together) == sorted(pairs)
    for together in rounds:
        parts = [probe for pair in together for probe in pair]
        assert len(set(parts)) == len(parts)
    busiest = max(sum(host in pair for pair in pairs) for host in names(count))
    assert len(rounds) <= 2 * busiest


def test_the_shortest_exchange_knows_best() -> None:
    exchanges = [Exchange(10.0, 15.6, 11.0), Exchange(12.0, 17.011, 12.02), Exchange(13.0, 18.2, 13.3)]
    ahead = offset_of(exchanges)
    assert ahead.ahead_s == pytest.approx(5.001)
    assert ahead.error_s == pytest.approx(0.01)


def test_the_nearest_card_of_each_gpu() -> None:
    assert topology.parse_topology(TOPOLOGY) == {"GPU0": Near("mlx5_1", "PIX"), "GPU1": Near("mlx5_0", "NODE")}
    without = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t0\n"
    assert topology.parse_topology(without) == {}
    assert topology.parse_topology("nvidia-smi has failed\n") == {}


def test_nearness_by_the_tree_of_devices() -> None:
    root, port = "/sys/devices/pci0000:00", "0000:00:01.0"
    switch = f"{root}/{port}/0000:02:00.0/0000:03:08.0"
    gpu = (f"{root}/{port}/0000:02:00.0/0000:03:08.0/0000:04:00.0", 0)
    same, other = (f"{switch}/0000:05:00.0", 0), (f"{root}/{port}/0000:02:00.0/0000:03:09.0/0000:06:00.0", 0)
    beside, across = (f"{root}/0000:00:07.0/0000:09:00.0", 0), ("/sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0", 1)
    assert topology.nearest_by_sysfs(gpu, {"a": across, "b": beside, "c": other, "d": same}) == Near("d", "PIX")
    assert topology.nearest_by_sysfs(gpu, {"a": across, "b": beside, "c": other}) == Near("c", "PXB")
    assert topology.nearest_by_sysfs(gpu, {"a": across, "b": beside}) == Near("b", "NODE")
    assert topology.nearest_by_sysfs(gpu, {"a": across}) == Near("a", "SYS")
    assert topology.nearest_by_sysfs(gpu, {}) is None


def test_what_the_system_says_is_read() -> None:
    assert topology.ucx_transports(UCX) == ("self/memory", "tcp/eth0", "rc_mlx5/mlx5_0:1")
    assert topology.numa_nodes_of({2, 9}, {0: "0-3,8", 1: "4-7,9", 2: ""}) == (0, 1)
    assert topology.memory_limit(["max", "", "9223372036854771712", "4096", "8192"]) == 4096
    assert topology.memory_limit(["max"]) == 0
    assert (topology.cpu_quota("250000 100000"), topology.cpu_quota("max 100000"), topology.cpu_quota("")) == (
        2.5,
        0,
        0,
    )
    assert (topology.rate_gbps("200 Gb/sec (4X HDR)"), topology.rate_gbps("")) == (200.0, 0.0)


def test_workers_that_a_node_has_room_for() -> None:
    node = {"CPU": 8.0, "GPU": 2.0, "baton_prefill": 1.0, "baton_decode": 3.0}
    assert workers_on(node, PlacementConfig()) == 8
    assert workers_on(node, PlacementConfig(cpus=3)) == 2
    assert workers_on(node, PlacementConfig(gpus=1)) == 2
    assert workers_on(node, PlacementConfig(resources="role")) == 4
    assert workers_on({}, PlacementConfig(resources="role")) == 0


def test_the_ports_by_which_a_member_is_reached() -> None:
    lanes = (
        LaneAddress(lane="local", address={"host": "boot/1/0", "pid": 7}),
        LaneAddress(lane="tcp", address={"host": "10.0.0.1", "port": 5}),
        LaneAddress(lane="zmq", address={"tcp": "tcp://[fd00::1]:6"}),
        LaneAddress(lane="ucx", address={"worker": "00", "door": 3}),
    )
    stamp = Stamp(WorkerId("decode-0"), 1, Epoch(1))
    assert list(ports_of(Member(stamp=stamp, role="decode", address="tcp://10.0.0.1:4", lanes=lanes))) == [
        ("decode-0 control", "10.0.0.1", 4),
        ("decode-0 tcp", "10.0.0.1", 5),
        ("decode-0 zmq", "fd00::1", 6),
    ]
