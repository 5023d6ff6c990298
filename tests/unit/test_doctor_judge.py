"""What a doctor makes of what was found: every trouble is named where it is, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor_rig import CONFIG, VERSIONS, facts, only, pair, two_hosts, wrong
from msgspec import structs

from baton.common.config import KvConfig, ModelConfig
from baton.common.ids import WorkerId
from baton.deploy.doctor.findings import Severity
from baton.deploy.doctor.judge import judge
from baton.deploy.doctor.shapes import ClockReport, Gpu, HostFacts, Nic, PairReport, RdmaPort, Reach, Running

RDMA = (RdmaPort("mlx5_0", 1, True, 200.0, 0, "/p"),)
IB = ("rc_mlx5/mlx5_0:1", "tcp/eth0", "posix/memory")
OTHER = {"boot_id": "boot-b", "hostname": "b", "address": "10.0.0.2"}


def test_of_what_is_well_nothing_is_said_but_that() -> None:
    assert not wrong(two_hosts())
    what = {one.what for one in judge(two_hosts())}
    assert {"lane", "cores", "memory", "/dev/shm", "memfd", "version", "layout", "frames"} <= what


# ------------------------------------------------------------------------------------- silent fall-backs


def on_one_host(receiver: HostFacts, reason: str) -> list[PairReport]:
    assert receiver.boot_id == facts().boot_id
    return [pair("a", "b", "tcp", down={"local": reason}), pair("b", "a", "tcp", down={"local": reason})]


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({"namespaces": {"pid": "9", "ipc": "2"}}, "PID namespaces"),
        ({"uid": 7}, "users 1000 and 7"),
        ({}, "its memory cannot be opened"),
    ],
)
def test_two_on_one_host_that_use_the_network_are_an_alarm(changes: dict[str, object], way_out: str) -> None:
    other = facts(**changes)
    found = two_hosts(second=other, pairs=tuple(on_one_host(other, "its memory cannot be opened")))
    findings = wrong(found)
    assert [(one.what, one.severity, one.where) for one in findings] == [
        ("lane", Severity.FAIL, "a -> b"),
        ("lane", Severity.FAIL, "b -> a"),
    ]
    assert way_out in findings[0].way_out
    assert findings[0].value.startswith("fell back to tcp")
    assert findings[0].expected.startswith("local")


def test_ucx_has_no_shared_memory_across_ipc_namespaces() -> None:
    other = facts(namespaces={"pid": "1", "ipc": "8"})
    reports = tuple(pair(*way, "local", down={}) for way in (("a", "b"), ("b", "a")))
    assert [(one.what, one.severity) for one in wrong(two_hosts(second=other, pairs=reports))] == [
        ("IPC namespaces", Severity.WARN)
    ] * 2


def test_no_shared_memory_wanted_is_no_alarm() -> None:
    lanes = replace(CONFIG.transfer, lanes=("tcp", "zmq"))
    reports = tuple(pair(*way, down={"local": "", "ucx": ""}) for way in (("a", "b"), ("b", "a")))
    assert not wrong(two_hosts(second=facts(), config=replace(CONFIG, transfer=lanes), pairs=reports))


def test_rdma_that_is_there_and_not_used_is_an_alarm() -> None:
    """The wheel's libucx has no InfiniBand: everything works, over TCP."""
    one, other = facts(rdma=RDMA), facts(**OTHER, rdma=RDMA)
    findings = wrong(two_hosts(one, other, pairs=(pair("a", "b", "ucx"), pair("b", "a", "ucx"))))
    fails = {(finding.what, finding.where) for finding in findings if finding.severity is Severity.FAIL}
    assert fails == {("RDMA", "a"), ("RDMA", "b"), ("lane", "a -> b"), ("lane", "b -> a")}
    assert any("UCX_NET_DEVICES=mlx5_0:1" in one.way_out for one in findings)
    assert any("fell back to ucx, 3.00 GB/s" in one.value for one in findings)


def test_rdma_that_is_used_is_judged_by_its_speed() -> None:
    one, other = facts(rdma=RDMA, ucx_transports=IB), facts(**OTHER, rdma=RDMA, ucx_transports=IB)
    findings = wrong(two_hosts(one, other, pairs=(pair("a", "b", "ucx"), pair("b", "a", "ucx"))))
    assert [(found.what, found.severity) for found in findings] == [("speed", Severity.WARN)] * 2
    assert "3.00 GB/s of 25.0" in findings[0].value
    fast = [structs.replace(lane, gbps=20.0) if lane.lane == "ucx" else lane for lane in pair("a", "b").lanes]
    reports = (pair("a", "b", "ucx"), pair("b", "a", "ucx"))
    assert not wrong(two_hosts(one, other, pairs=tuple(structs.replace(one, lanes=tuple(fast)) for one in reports)))


def test_rdma_without_ucx_locked_memory_or_a_choice_of_it() -> None:
    without = only(
        two_hosts(facts(rdma=RDMA, versions=VERSIONS | {"ucxx": ""}), facts(**OTHER, versions=VERSIONS | {"ucxx": ""}))
    )
    assert (without.what, without.severity, without.where) == ("ucx", Severity.FAIL, "a")
    locked = only(two_hosts(facts(rdma=RDMA, ucx_transports=IB, memlock_bytes=64 << 10)))
    assert (locked.what, locked.expected) == ("locked memory", "unlimited")


def test_messages_where_tcp_was_to_be_used_are_an_alarm() -> None:
    down = {"local": "another host", "ucx": "no answer", "tcp": "no answer"}
    findings = wrong(two_hosts(pairs=(pair("a", "b", "zmq", down=down), pair("b", "a"))))
    assert [(one.what, one.severity, one.where) for one in findings if one.what == "lane"] == [
        ("lane", Severity.FAIL, "a -> b")
    ]


def test_a_lane_that_opens_and_moves_nothing_is_a_failure() -> None:
    stuck = [
        structs.replace(lane, gbps=0.0, reason="not all came") for lane in pair("a", "b").lanes if lane.lane == "tcp"
    ]
    found = only(two_hosts(pairs=(structs.replace(pair("a", "b"), lanes=tuple(stuck)), pair("b", "a"))))
    assert (found.what, found.severity, found.where) == ("lane", Severity.FAIL, "a -> b")


def test_a_lane_that_is_up_and_slower_than_another_is_told() -> None:
    reports = (pair("a", "b", "tcp", down={}), pair("b", "a", "local", down={}))
    found = only(two_hosts(second=facts(), pairs=reports))
    assert (found.what, found.severity, found.where, found.expected) == ("lane", Severity.WARN, "a -> b", "local")


def test_one_direction_that_is_slow_and_a_card_that_could_more_are_told() -> None:
    slow = [structs.replace(lane, gbps=0.2) if lane.lane == "tcp" else lane for lane in pair("a", "b").lanes]
    found = two_hosts(pairs=(structs.replace(pair("a", "b"), lanes=tuple(slow)), pair("b", "a")))
    assert (only(found).what, only(found).value) == ("speed", "0.20 GB/s, 2.50 the other way")
    nic = (Nic("eth0", True, 200_000, 0, "/p"), Nic("eth1", False, 400_000, 0, "/q"))
    findings = wrong(two_hosts(facts(nics=nic), facts(**OTHER, nics=nic)))
    assert [one.value for one in findings] == ["2.50 GB/s of 25.0 that the cards say"] * 2


# ------------------------------------------------------------------------------------- between hosts


def test_who_cannot_be_reached_is_named_by_direction() -> None:
    silent = structs.replace(pair("a", "b"), control_us=0.0, lanes=(), chosen="", why="no answer")
    findings = wrong(two_hosts(pairs=(silent, pair("b", "a")), deaf=(("b", "a"),)))
    assert {(one.what, one.where) for one in findings} == {
        ("control frames", "a -> b"),
        ("lane", "a -> b"),
        ("reachability", "b -> a"),
    }
    assert {one.severity for one in findings} == {Severity.FAIL}


def test_a_host_that_hangs_is_a_finding_and_its_pairs_are() -> None:
    lost = PairReport(WorkerId("a"), WorkerId("b"), 0.0, (), "", "", trouble="no answer within 15 s")
    found = two_hosts(pairs=(lost,))
    hosts = (found.hosts[0], structs.replace(found.hosts[1], facts=None, trouble="b: no answer within 60 s"))
    findings = wrong(structs.replace(found, hosts=hosts))
    assert [(one.what, one.severity, one.where) for one in findings] == [
        ("probe", Severity.FAIL, "b"),
        ("pair", Severity.FAIL, "a -> b"),
    ]


def test_clocks_are_judged_by_what_is_sure() -> None:
    clocks = tuple(
        ClockReport(host, offset_s, error_s)
        for host, offset_s, error_s in (
            ("a", 0.0, 0.001),
            ("b", 0.01, 0.001),
            ("c", 0.2, 0.5),
            ("d", 0.5, 0.01),
            ("e", -9.0, 0.1),
        )
    )
    findings = wrong(two_hosts(clocks=clocks))
    assert [(one.where, one.severity) for one in findings] == [("d", Severity.WARN), ("e", Severity.FAIL)]
    assert findings[0].value == "+490.0 ms, give or take 10.0"


def test_ports_of_a_running_cluster_that_are_shut() -> None:
    ports = (Reach("b", "decode-0", "10.0.0.1:4711", "no answer"), Reach("a", "decode-0", "10.0.0.1:4711", "open"))
    shut = only(two_hosts(ports=ports))
    assert (shut.what, shut.where, shut.severity) == ("port of decode-0", "b -> 10.0.0.1:4711", Severity.FAIL)
    assert "firewall" in shut.way_out


def test_several_hosts_that_listen_on_their_loopback() -> None:
    found = only(two_hosts(config=replace(CONFIG, bind_host="127.0.0.1")))
    assert (found.what, found.severity, found.way_out) == ("cluster interface", Severity.FAIL, "--set bind_host=node")


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [
        ("baton", "0.2.0", Severity.WARN),
        ("python", "3.12.1", Severity.FAIL),
        ("torch", "2.12.0", Severity.WARN),
        ("pyzmq", "26.0.0", Severity.WARN),
        ("ucxx", "", Severity.WARN),
    ],
)
def test_versions_that_differ(name: str, value: str, severity: Severity) -> None:
    found = only(two_hosts(second=facts(**OTHER, versions=VERSIONS | {name: value})))
    assert (found.what, found.severity, found.where) == ("version", severity, "b")
    assert name in found.value
    patch = facts(**OTHER, versions=VERSIONS | {"python": "3.11.9"})
    assert not wrong(two_hosts(second=patch))


def test_layouts_that_differ_name_the_fields() -> None:
    other = facts(**OTHER, layout={"model": "fake", "kv_page_size": "4", "files": "abc"})
    found = only(two_hosts(second=other))
    assert (found.what, found.severity, found.where) == ("layout", Severity.FAIL, "b")
    assert found.value == "kv_page_size = 4, files = abc"
    assert found.expected == "kv_page_size = 16, files = missing"
    told = (("decode-0", "decode", "float32"), ("prefill-0", "prefill", "bfloat16"), ("gateway-0", "gateway", ""))
    members = tuple(
        Running(WorkerId(name), role, "tcp://10.0.0.1:1", {"kv_dtype": dtype}) for name, role, dtype in told
    )
    named = only(two_hosts(members=members))
    assert (named.what, named.where, named.value) == ("layout of workers", "prefill-0", "kv_dtype = bfloat16")
    assert named.severity is Severity.WARN  # an upgrade has such days


def test_versions_of_frames_must_have_one_in_common() -> None:
    assert not wrong(two_hosts(second=facts(**OTHER, wire="3-4")))
    found = only(two_hosts(second=facts(**OTHER, wire="4-5")))
    assert (found.what, found.severity, found.where) == ("frames", Severity.FAIL, "b")


# ------------------------------------------------------------------------------------- one host


@pytest.mark.parametrize(
    ("changes", "what", "severity"),
    [
        ({"model_trouble": "./x: there is no such directory"}, "model", Severity.FAIL),
        ({"cpus": 1}, "cores", Severity.WARN),
        ({"cpu_quota": 1.0}, "cores", Severity.WARN),
        ({"niceness": 15}, "priority", Severity.WARN),
        ({"shm_bytes": 64 << 20}, "/dev/shm", Severity.WARN),
        ({"memfd_trouble": "Operation not permitted"}, "memfd", Severity.FAIL),
        ({"huge_pages_shared": False}, "huge pages", Severity.WARN),
        ({"open_files": 1024}, "open files", Severity.WARN),
        ({"cache_trouble": "/root/.cache: Read-only file system"}, "cache", Severity.FAIL),
        ({"compiler": ""}, "compiler", Severity.WARN),
        ({"ucx_transports": ("tcp/eth0",)}, "ucx on one host", Severity.WARN),
        ({"environment": {"UCX_TLS": "tcp,self"}}, "UCX settings", Severity.WARN),
        ({"environment": {"UCX_CMA_MEMORY_INVALIDATE": "n"}}, "UCX settings", Severity.WARN),
        ({"environment": {"UCX_TCP_TX_SEG_SIZE": "8K"}}, "UCX settings", Severity.WARN),
        ({"gpus": (Gpu("GPU0", "/p", 0, "mlx5_1", "SYS"),)}, "GPU0 to network", Severity.WARN),
    ],
)
def test_of_a_host_that_is_not_well(changes: dict[str, object], what: str, severity: Severity) -> None:
    found = only(two_hosts(facts(**changes)))
    assert (found.what, found.severity, found.where) == (what, severity, "a")


def test_what_is_unlimited_near_or_as_it_should_be_is_well() -> None:
    assert not wrong(
        two_hosts(facts(open_files=-1, gpus=(Gpu("GPU0", "/p", 0, "mlx5_0", "PIX"), Gpu("GPU1", "/q", 0))))
    )


def test_workers_that_wander_over_numa_nodes() -> None:
    wide = facts(affinity_numa=(0, 1))
    assert not wrong(two_hosts(wide))
    assert only(two_hosts(wide, config=replace(CONFIG, pin_cores=False))).what == "NUMA"


def test_pools_must_fit_into_the_memory_of_the_host_or_its_container() -> None:
    config = replace(CONFIG, model=ModelConfig(model="smollm2"), kv=KvConfig(pool_bytes=8 << 30))
    assert not wrong(two_hosts(config=config))
    tight = facts(container_limit_bytes=12 << 30, container_used_bytes=1 << 30)
    found = only(two_hosts(tight, config=config))
    assert (found.what, found.severity, found.expected[:8]) == ("memory", Severity.FAIL, "16.0 GiB")
    busy = facts(container_limit_bytes=20 << 30, container_used_bytes=8 << 30)
    assert only(two_hosts(busy, config=config)).severity is Severity.WARN
