"""What is wrong between hosts: the lane that would really be used, how fast it is, ports and clocks. Pure.

A lane that the configuration has and that both ends could have, and that is not used, is a failure: hand-offs work, at
a tenth of the speed, and nobody would hear of it. Whoever is content with that takes the lane out of `transfer.lanes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from baton.common.config import ClusterConfig
from baton.common.ids import WorkerId
from baton.deploy.doctor.findings import Finding, Severity
from baton.deploy.doctor.judge_hosts import has_rdma, ucx_has_rdma
from baton.deploy.doctor.shapes import ClockReport, Found, HostFacts, LaneReport, PairReport, Reach

CLOCK_WARN_S, CLOCK_FAIL_S = 0.1, 5.0
SHARE_OF_NIC = 0.25
"""Of what its network card says it can; less is told."""
UNEVEN = 3.0
"""One direction so many times slower than the other is told."""


class Expected(NamedTuple):
    """`lane` "": any that moves bytes without staging through messages."""

    lane: str
    why: str


def judge_pairs(found: Found) -> Iterator[Finding]:
    facts = {probe: host.facts for host in found.hosts for probe in host.probes if host.facts is not None}
    gbps = {(pair.source, pair.receiver): _chosen(pair).gbps for pair in found.pairs if pair.chosen}
    for pair in found.pairs:
        yield from _judge_pair(pair, found.config, facts, gbps.get((pair.receiver, pair.source), 0.0))
    yield from (_deaf(source, receiver) for source, receiver in found.deaf)
    yield from judge_clocks(found.clocks)
    yield from (_port(reach) for reach in found.ports)


def same_host(one: HostFacts, other: HostFacts) -> bool:
    """One kernel, whatever containers they are in."""
    return bool(one.boot_id) and one.boot_id == other.boot_id


def expected_lane(config: ClusterConfig, source: HostFacts, receiver: HostFacts) -> Expected:
    """What these two could have, going by what is there and not by what works."""
    if same_host(source, receiver) and "local" in config.transfer.lanes:
        return Expected("local", "both are on one host")
    if "ucx" in config.transfer.lanes and has_rdma(source) and has_rdma(receiver):
        return Expected("ucx", "both have RDMA")
    return Expected("", "an ordinary network")


def _judge_pair(
    pair: PairReport, config: ClusterConfig, facts: Mapping[WorkerId, HostFacts], back_gbps: float
) -> Iterator[Finding]:
    where = f"{pair.source} -> {pair.receiver}"
    if pair.trouble or pair.source not in facts or pair.receiver not in facts:
        reason = pair.trouble or "one of them said nothing"
        yield Finding("pair", Severity.FAIL, f"not measured: {reason}", "see the findings of its hosts", where=where)
        return
    source, receiver = facts[pair.source], facts[pair.receiver]
    if not pair.control_us:
        way_out = "open all TCP ports between their addresses (docs/OPERATIONS.md, Ports)"
        yield Finding("control frames", Severity.FAIL, "no answer", way_out, "an answer", where)
    expected = expected_lane(config, source, receiver)
    yield _lane(pair, expected, config, source, receiver, where)
    if not same_host(source, receiver):
        yield from _speed(pair, source, receiver, back_gbps, where)
    elif _lane_of(pair, "ucx").status == "up":
        yield from _ipc(source, receiver, where)
    if pair.control_us:
        yield from _other_lanes(pair, where)


def _lane(
    pair: PairReport, expected: Expected, config: ClusterConfig, source: HostFacts, receiver: HostFacts, where: str
) -> Finding:
    chosen = _chosen(pair)
    value = f"{_told(chosen)}" if pair.chosen else f"none: {pair.why}"
    if not pair.chosen:
        way_out = "open all TCP ports between them, or see why each lane is down: transfer.lanes"
        return Finding("lane", Severity.FAIL, value, way_out, expected.lane or "any", where)
    if expected.lane == "local" and not _is_up(pair, "local"):
        way_out = _why_not_local(source, receiver, _lane_of(pair, "local").reason)
        return Finding("lane", Severity.FAIL, f"fell back to {value}", way_out, f"local: {expected.why}", where)
    if not _is_up(pair, pair.chosen):
        return Finding("lane", Severity.FAIL, value, "it opens, and moves nothing: see control frames", "bytes", where)
    if expected.lane == "ucx" and not (pair.chosen == "ucx" and ucx_has_rdma(source) and ucx_has_rdma(receiver)):
        reason = _lane_of(pair, "ucx").reason or "UCX goes over TCP, or something was faster"
        way_out = f"{reason}; the findings RDMA and ucx of both hosts say what is missing"
        return Finding("lane", Severity.FAIL, f"fell back to {value}", way_out, f"ucx: {expected.why}", where)
    direct = [lane for lane in ("tcp", "ucx") if lane in config.transfer.lanes]
    if pair.chosen == "zmq" and direct and not expected.lane and not any(_is_up(pair, lane) for lane in direct):
        reasons = "; ".join(f"{lane}: {_lane_of(pair, lane).reason}" for lane in direct)
        return Finding("lane", Severity.FAIL, f"fell back to {value}", reasons, " or ".join(direct), where)
    if expected.lane and pair.chosen != expected.lane:
        way_out = f"{expected.lane} works, and is slower: {pair.why}"
        return Finding("lane", Severity.WARN, value, way_out, expected.lane, where)
    return Finding("lane", Severity.OK, value, where=where)


def _why_not_local(source: HostFacts, receiver: HostFacts, reason: str) -> str:
    if source.namespaces.get("pid") != receiver.namespaces.get("pid"):
        return "they have PID namespaces of their own: one container for both, or hostPID / shareProcessNamespace"
    if source.uid != receiver.uid:
        return f"they run as users {source.uid} and {receiver.uid}: let one user run both"
    return f"{reason}; leave local out of transfer.lanes if that is meant"


def _ipc(source: HostFacts, receiver: HostFacts, where: str) -> Iterator[Finding]:
    if source.namespaces.get("ipc") != receiver.namespaces.get("ipc"):
        way_out = "one container or pod for both, or hostIPC: else UCX goes over TCP from one to the other"
        yield Finding("IPC namespaces", Severity.WARN, "each has its own", way_out, "one for both", where)


def _speed(pair: PairReport, source: HostFacts, receiver: HostFacts, back_gbps: float, where: str) -> Iterator[Finding]:
    reached = _chosen(pair).gbps
    if not reached:
        return
    if back_gbps and back_gbps > UNEVEN * reached:
        value = f"{reached:.2f} GB/s, {back_gbps:.2f} the other way"
        yield Finding("speed", Severity.WARN, value, "look at this direction: a duplex or route of its own?", "", where)
    fabric = min(_fabric_gbps(source, pair.chosen), _fabric_gbps(receiver, pair.chosen))
    if fabric and reached < SHARE_OF_NIC * fabric:
        value = f"{reached:.2f} GB/s of {fabric:.1f} that the cards say"
        way_out = "is the right card used (bind_host, UCX_NET_DEVICES)? transfer.tcp_streams, MTU, other traffic"
        yield Finding("speed", Severity.WARN, value, way_out, f"{SHARE_OF_NIC * fabric:.1f} GB/s or more", where)


def _fabric_gbps(facts: HostFacts, lane: str) -> float:
    """Gigabytes per second of the fastest card that is up; 0: not known."""
    if lane == "ucx" and has_rdma(facts):
        return max(port.rate_gbps for port in facts.rdma if port.active) / 8
    return max((nic.speed_mbps for nic in facts.nics if nic.up), default=0) / 8000


def _other_lanes(pair: PairReport, where: str) -> Iterator[Finding]:
    """Configured, and down or broken, while another one serves. `local` is none between hosts, and the lane that was
    expected on one."""
    for lane in pair.lanes:
        if lane.lane not in (pair.chosen, "local") and lane.reason and lane.status != "absent":
            value = f"{lane.status}: {lane.reason}"
            yield Finding(f"lane {lane.lane}", Severity.WARN, value, "nothing to fall back on there", "up", where)


def _deaf(source: str, receiver: str) -> Finding:
    way_out = "a firewall in this direction? Open all TCP ports (docs/OPERATIONS.md, Ports)"
    return Finding(
        "reachability", Severity.FAIL, "control frames do not arrive", way_out, "they do", f"{source} -> {receiver}"
    )


def _port(reach: Reach) -> Finding:
    where, what = f"{reach.source} -> {reach.address}", f"port of {reach.name}"
    if reach.outcome == "open":
        return Finding(what, Severity.OK, "open", where=where)
    way_out = {"refused": "nobody listens there: is it running?", "no answer": "a firewall drops it"}.get(
        reach.outcome, "see the route between them"
    )
    return Finding(what, Severity.FAIL, reach.outcome, way_out, "open", where)


def judge_clocks(clocks: tuple[ClockReport, ...]) -> Iterator[Finding]:
    """Against the one in the middle: whose clock is right nobody here knows."""
    if not clocks:
        return
    middle = sorted(clock.offset_s for clock in clocks)[len(clocks) // 2]
    for clock in clocks:
        away_s = clock.offset_s - middle
        value = f"{away_s * 1000:+.1f} ms, give or take {clock.error_s * 1000:.1f}"
        sure_s = abs(away_s) - clock.error_s
        if sure_s <= CLOCK_WARN_S:
            yield Finding("clock", Severity.OK, value, where=clock.host)
            continue
        severity = Severity.FAIL if sure_s > CLOCK_FAIL_S else Severity.WARN
        way_out = "chrony or ntpd there: leases of jobs, certificates, logs and traces go by it"
        yield Finding("clock", severity, value, way_out, f"within {CLOCK_WARN_S * 1000:g} ms of the others", clock.host)


def _chosen(pair: PairReport) -> LaneReport:
    return _lane_of(pair, pair.chosen)


def _lane_of(pair: PairReport, name: str) -> LaneReport:
    return next((lane for lane in pair.lanes if lane.lane == name), LaneReport(name, "absent", "neither has it"))


def _is_up(pair: PairReport, name: str) -> bool:
    """And moved bytes."""
    lane = _lane_of(pair, name)
    return lane.status == "up" and not lane.reason


def _told(lane: LaneReport) -> str:
    if not lane.gbps:
        return f"{lane.lane}, not measured: {lane.reason}"
    return f"{lane.lane}, {lane.gbps:.2f} GB/s, {lane.latency_us:.0f} µs"
