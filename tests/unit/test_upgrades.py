"""Two versions in one cluster: who may work with whom, whose turn it is to go, and what becomes of a bad revision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baton.common.compat import common_wire_version, differences, group_of, rounded_weights, spoken, wire_versions
from baton.common.config import LivenessConfig, TransferConfig
from baton.common.engine.core_api import MembershipView
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.kv.layout import KvLayout
from baton.common.messages import PROTOCOL_VERSION, Heartbeat, Hello, Member, Reject
from baton.common.routing_config import RoutingConfig
from baton.deploy.controller_core import MOST_TRIES, ControllerCore
from baton.deploy.controller_seats import DrainWorker, Effect, Keep, KillWorker, Refused, Reply, SeatSpec, StartWorker
from baton.deploy.routing.router import Router
from baton.deploy.turns import Turn, next_to_replace
from baton.transfer.endpoint import Endpoint

LIVENESS = LivenessConfig(dead_after_s=3.0, restart_backoff_s=0.1)
SPECS = [SeatSpec(WorkerId(name), name.split("-")[0]) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]
EXTRA = SeatSpec(WorkerId("decode-2"), "decode", revision=2, extra=True)
OLD, NEW = {"page_size": "16", "model": "m"}, {"page_size": "32", "model": "m"}


class Cluster:
    """A core, with processes that do as they are told; `broken` revisions never get ready."""

    def __init__(self, broken: frozenset[int] = frozenset()) -> None:
        self.now = 0.0
        self.broken = broken
        self.core = ControllerCore(SPECS, LIVENESS, 1, self.now)
        self.alive: dict[WorkerId, Member] = {}
        self.asked: list[tuple[WorkerId, int]] = []
        self.effects: list[Effect] = []
        self.run(10.0)
        assert self.core.ready

    def run(self, seconds: float) -> None:
        until_s = self.now + seconds
        while self.now < until_s:
            self.now += 0.5
            for member in list(self.alive.values()):
                self.do(self.core.on_message(member.stamp, Heartbeat(), self.now))
            self.do(self.core.on_timer(self.now))

    def do(self, effects: list[Effect]) -> None:
        self.effects += effects
        for effect in effects:
            match effect:
                case StartWorker(spec, incarnation):
                    self.start(spec, incarnation)
                case DrainWorker(worker, incarnation):
                    self.asked.append((worker, incarnation))
                    live = [seat for seat in self.core.status() if seat.state == "live"]
                    alone = not self.core.book.upgrading or len(live) >= len(SPECS) - 1
                    assert alone, "C6: somebody leaves while another one is away"
                    self.do(self.core.on_drained(worker, incarnation, self.now))
                case KillWorker(worker, incarnation):
                    self.alive.pop(worker, None)
                    self.do(self.core.on_dead(worker, incarnation, self.now))
                case _:
                    pass

    def start(self, spec: SeatSpec, incarnation: int) -> None:
        if spec.revision in self.broken:
            self.do(self.core.on_start_failed(spec.worker, incarnation, "no such model", self.now))
            return
        fingerprint = spoken("1") | (NEW if spec.revision > 1 else OLD)
        stamp = Stamp(spec.worker, incarnation, Epoch(incarnation))
        member = Member(stamp=stamp, role=spec.role, address="", fingerprint=fingerprint)
        self.alive[spec.worker] = member
        self.do(self.core.on_message(member.stamp, Hello(protocol_version=PROTOCOL_VERSION, member=member), self.now))

    def upgrade(self, *extra: SeatSpec) -> None:
        specs = [replace(spec, revision=2, fallback=1) for spec in SPECS]
        self.do(self.core.change([*specs, *extra], LIVENESS, self.now))


def test_all_are_replaced_one_after_the_other_and_the_extra_one_goes() -> None:
    cluster = Cluster()
    cluster.upgrade(EXTRA)
    cluster.run(2.0)
    two = {seat.worker: seat for seat in cluster.core.status()}
    assert {seat.group for seat in two.values()} == {group_of(OLD), group_of(NEW)}
    assert two[EXTRA.worker].differs == {"page_size": "32 != 16"}
    assert cluster.core.book.changing
    cluster.run(60.0)
    assert {(seat.worker, seat.revision, seat.state) for seat in cluster.core.status()} == {
        (spec.worker, 2, "live") for spec in SPECS
    }
    assert [worker for worker, _ in cluster.asked] == ["prefill-0", "decode-0", "prefill-1", "decode-1", "decode-2"]
    assert not cluster.core.book.changing


def test_an_extra_one_goes_where_nobody_is_to_have_its_role() -> None:
    """Somebody had it when the upgrade was asked for; the controller that knew has died, and so has he."""
    cluster = Cluster()
    specs = [replace(spec, role="decode", revision=2, fallback=1) for spec in SPECS]
    extra = SeatSpec(WorkerId("prefill-2"), "prefill", revision=2, extra=True)
    cluster.alive.clear()
    cluster.core = ControllerCore([*specs, extra], LIVENESS, 1 << 20, cluster.now)
    cluster.run(60.0)
    assert {(seat.worker, seat.state) for seat in cluster.core.status()} == {(spec.worker, "live") for spec in SPECS}
    assert not cluster.core.book.changing


def test_the_last_decode_worker_stays_though_nobody_is_to_be_one() -> None:
    """The plan is older than the change of the other one's role."""
    cluster = Cluster()
    for worker in ("decode-0", "prefill-1"):
        effects = cluster.core.replace_worker(WorkerId(worker), "prefill", cluster.now)
        assert not isinstance(effects, Refused)
        cluster.do(effects)
        cluster.run(5.0)
    cluster.do(cluster.core.change(SPECS[:3], LIVENESS, cluster.now))
    cluster.run(10.0)
    assert cluster.alive[WorkerId("decode-1")].role == "decode"
    assert cluster.core.book.changing


@pytest.mark.parametrize("extra", [(), (EXTRA,)])
def test_a_revision_that_does_not_come_up_is_given_up(extra: tuple[SeatSpec, ...]) -> None:
    cluster = Cluster(broken=frozenset({2}))
    cluster.upgrade(*extra)
    cluster.run(60.0)
    seats = {(seat.worker, seat.revision, seat.state) for seat in cluster.core.status()}
    assert seats == {(spec.worker, 1, "live") for spec in SPECS}
    given_up = cluster.core.book.given_up
    assert given_up is not None
    assert given_up.revision == 2
    assert "no such model" in given_up.reason
    assert len(cluster.asked) == (0 if extra else 1), "whoever serves was not touched before somebody new was there"
    restarts = sum(seat.restarts for seat in cluster.core.status())
    assert restarts == (0 if extra else MOST_TRIES + 1)


def keeps(cluster: Cluster) -> list[Keep]:
    return [effect for effect in cluster.effects if isinstance(effect, Keep)]


@pytest.mark.parametrize("extra", [(), (EXTRA,)])
def test_what_came_of_an_upgrade_is_told_once(extra: tuple[SeatSpec, ...]) -> None:
    for broken, revision in ((frozenset({2}), 1), (frozenset[int](), 2)):
        cluster = Cluster(broken)
        cluster.upgrade(*extra)
        cluster.run(60.0)
        [kept] = keeps(cluster)
        assert kept.serves == revision
        assert (kept.given_up is not None) == bool(broken)
        lasting = [spec for spec in kept.specs if not spec.extra]
        assert lasting == [replace(spec, revision=revision) for spec in SPECS], "and nothing to go back to any more"
        successor = ControllerCore(kept.specs, LIVENESS, 1 << 20, cluster.now)
        for member in cluster.alive.values():
            successor.adopt(member, cluster.now, revision=revision)
        successor.on_timer(cluster.now)
        assert not successor.book.changing, "which has nothing left to do"


def test_a_controller_that_begins_in_the_middle_gives_up_what_does_not_come_up() -> None:
    """Nobody of the new revision was ever there, and it is not taken for one that has proven itself."""
    cluster = Cluster(broken=frozenset({2}))
    anew = [replace(spec, revision=2, fallback=1) for spec in SPECS]
    cluster.core = ControllerCore([*anew, EXTRA], LIVENESS, 1 << 20, cluster.now)
    for member in cluster.alive.values():
        cluster.core.adopt(member, cluster.now)
    cluster.run(60.0)
    [kept] = keeps(cluster)
    assert kept.given_up is not None
    assert {(seat.revision, seat.state) for seat in cluster.core.status()} == {(1, "live")}


def test_workers_that_are_asked_for_meanwhile_are_there_when_an_upgrade_is_given_up() -> None:
    cluster = Cluster(broken=frozenset({2}))
    more = SeatSpec(WorkerId("decode-3"), "decode", revision=2, fallback=1)
    cluster.upgrade(EXTRA, more)
    cluster.run(60.0)
    assert cluster.alive.keys() == {spec.worker for spec in SPECS} | {more.worker}
    assert {seat.revision for seat in cluster.core.status()} == {1}


def test_more_and_fewer_workers() -> None:
    cluster = Cluster()
    more = [*SPECS, SeatSpec(WorkerId("decode-2"), "decode"), SeatSpec(WorkerId("decode-3"), "decode")]
    cluster.do(cluster.core.change(more, LIVENESS, cluster.now))
    cluster.run(5.0)
    assert len(cluster.alive) == 6
    cluster.do(cluster.core.change([SPECS[0], SPECS[2]], LIVENESS, cluster.now))
    cluster.run(5.0)
    assert set(cluster.alive) == {"prefill-0", "decode-0"}
    assert {seat.worker for seat in cluster.core.status()} == {"prefill-0", "decode-0"}
    cluster.do(cluster.core.change(more, LIVENESS, cluster.now))
    cluster.run(5.0)
    assert cluster.alive[WorkerId("decode-3")].stamp.incarnation == 2, "C3: an incarnation is given once"


def test_a_seat_that_is_wanted_again_has_the_role_that_was_asked_for() -> None:
    """Somebody with another one, which he had been given before, still leaves there."""
    cluster = Cluster()
    cluster.do(cluster.core.change([*SPECS, SeatSpec(WorkerId("decode-2"), "decode")], LIVENESS, cluster.now))
    cluster.run(10.0)
    effects = cluster.core.replace_worker(WorkerId("decode-2"), "prefill", cluster.now)
    assert not isinstance(effects, Refused)
    cluster.do(effects)
    cluster.run(10.0)
    assert cluster.alive[EXTRA.worker].role == "prefill"
    cluster.core.change(SPECS, LIVENESS, cluster.now)  # told to leave, and has something left to do
    cluster.upgrade(EXTRA)
    cluster.do(cluster.core.on_drained(EXTRA.worker, cluster.alive[EXTRA.worker].stamp.incarnation, cluster.now))
    cluster.run(1.0)
    assert cluster.alive[EXTRA.worker].role == "decode"


def test_who_says_that_it_was_told_to_stop_leaves_and_is_succeeded() -> None:
    cluster = Cluster()
    member = cluster.alive[WorkerId("decode-0")]
    cluster.do(cluster.core.on_message(member.stamp, Heartbeat(leaving=True), cluster.now))
    cluster.run(1.0)
    assert cluster.asked == [(WorkerId("decode-0"), 1)]
    assert cluster.alive[WorkerId("decode-0")].stamp.incarnation == 2


def test_a_process_that_differs_from_its_own_revision_is_refused_by_field() -> None:
    core = ControllerCore(SPECS, LIVENESS, 1, 0.0)
    core.on_timer(0.0)
    replies: list[object] = []
    for worker, fingerprint in (("prefill-0", OLD), ("decode-0", NEW)):
        stamp = Stamp(WorkerId(worker), 1, Epoch(1))
        member = Member(stamp=stamp, role=worker.split("-")[0], address="", fingerprint=fingerprint)
        effects = core.on_message(stamp, Hello(protocol_version=PROTOCOL_VERSION, member=member), 0.0)
        replies += [one.body for one in effects if isinstance(one, Reply)]
    [reject] = replies
    assert isinstance(reject, Reject)
    assert reject.differences == {"page_size": "32 != 16"}


def test_roles_do_not_change_while_the_cluster_does() -> None:
    cluster = Cluster()
    more = [*SPECS, SeatSpec(WorkerId("decode-3"), "decode")]
    upgraded = [replace(spec, revision=2) for spec in more]
    cluster.do(cluster.core.change(upgraded, LIVENESS, cluster.now))
    refused = cluster.core.replace_worker(WorkerId("decode-1"), "prefill", cluster.now)
    assert refused == Refused("the cluster is changing: roles change before that or afterwards")


def turn(worker: str, *, there: bool = True, outdated: bool = True, alone: bool = False) -> Turn:
    return Turn(WorkerId(worker), worker.split("-")[0], there, outdated, alone)


@pytest.mark.parametrize(
    ("seats", "next_one"),
    [
        ([turn("prefill-0"), turn("decode-0"), turn("gateway-0")], "decode-0"),
        ([turn("prefill-0"), turn("decode-0", outdated=False), turn("gateway-0")], "prefill-0"),
        ([turn("decode-0", outdated=False), turn("gateway-0", alone=True)], "gateway-0"),
        ([turn("prefill-0"), turn("decode-0", there=False, outdated=False)], None),
        ([turn("prefill-0"), turn("decode-0", alone=True)], "prefill-0"),
        ([turn("prefill-0", outdated=False), turn("decode-0", alone=True), turn("gateway-0")], "decode-0"),
        ([turn("decode-0", alone=True), turn("decode-1", there=False, outdated=False)], None),
        ([turn("prefill-0", alone=True), turn("decode-0"), turn("decode-1", outdated=False)], "decode-0"),
    ],
)
def test_whose_turn_it_is(seats: list[Turn], next_one: str | None) -> None:
    assert next_to_replace(seats) == next_one


def test_what_versions_have_in_common() -> None:
    assert wire_versions({"wire": "2-4"}, 9) == range(2, 5)
    assert wire_versions({}, 9) == wire_versions({"wire": "4-2"}, 9) == wire_versions({"wire": "x"}, 9) == range(9, 10)
    assert common_wire_version(range(2, 5), range(4, 8)) == 4
    assert common_wire_version(range(2, 4), range(4, 8)) is None
    assert group_of(spoken("1") | OLD) == group_of(OLD) != group_of(NEW)
    assert group_of(spoken("1")) == ""
    assert group_of(rounded_weights("dtype") | OLD) == group_of(OLD), "of a release that knew nothing of formats"
    assert group_of(rounded_weights("int8") | OLD) not in (group_of(OLD), group_of(NEW))
    assert differences(spoken("2") | NEW, spoken("1") | OLD) == {"page_size": "32 != 16"}


def member(worker: str, group: str) -> Member:
    role = worker.split("-")[0]
    return Member(stamp=Stamp(WorkerId(worker), 1, Epoch(1)), role=role, address="", group=group)


def test_a_router_keeps_to_the_group_and_prefers_one_with_both_roles() -> None:
    router = Router(RoutingConfig(policy="round_robin"), 16, 0.5)
    view = MembershipView(1, (member("prefill-0", "a"), member("decode-0", "a"), member("decode-1", "b")))
    router.on_view(view)
    prompt = np.arange(20, dtype=np.int32)

    def chosen(role: str, group: str | None, *refused_by: Stamp) -> str | None:
        assert role in ("prefill", "decode")
        placed = router.place("prefill" if role == "prefill" else "decode", prompt, 1, refused_by, group=group)
        return None if placed is None else placed.stamp.worker

    assert {chosen("decode", None) for _ in range(4)} == {"decode-0"}
    assert {chosen("decode", "b") for _ in range(4)} == {"decode-1"}
    assert chosen("decode", None, view.members[1].stamp) == "decode-1"
    assert chosen("prefill", "b") is None
    assert chosen("decode", "c") is None


def test_an_endpoint_makes_no_hand_off_with_another_group() -> None:
    endpoint = Endpoint(Stamp(WorkerId("decode-0"), 1, Epoch(1)), TransferConfig(), KvLayout(4), ("zmq",))
    own = member("decode-0", "a")
    endpoint.on_membership(MembershipView(1, (own, member("prefill-0", "a"), member("prefill-1", "b"))), 0.0)
    assert set(endpoint.partners()) == {"prefill-0"}
