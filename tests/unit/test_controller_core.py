"""The controller's brain: who is a member, when a process is killed, and what proves a death."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from baton.common.config import LivenessConfig
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.messages import PROTOCOL_VERSION, Heartbeat, Hello, Load, Member, Reject
from baton.deploy.controller_core import BURST_S, ControllerCore
from baton.deploy.controller_seats import (
    DrainWorker,
    Effect,
    KillWorker,
    Publish,
    Refused,
    Reply,
    SeatSpec,
    StartWorker,
)

LIVENESS = LivenessConfig(
    heartbeat_interval_s=0.2,
    republish_interval_s=1.0,
    dead_after_s=3.0,
    engine_stuck_after_s=10.0,
    start_deadline_s=100.0,
    restart_backoff_s=1.0,
    restart_forgiven_after_s=30.0,
    max_restarts_per_minute=5,
)
P0, D0, D1, GW = WorkerId("prefill-0"), WorkerId("decode-0"), WorkerId("decode-1"), WorkerId("gateway-0")
SEATS = [SeatSpec(P0, "prefill"), SeatSpec(D0, "decode"), SeatSpec(D1, "decode"), SeatSpec(GW, "gateway")]
FINGERPRINT = {"layout": "a", "page_size": "16"}


def member(
    worker: WorkerId, incarnation: int = 1, *, epoch: int | None = None, fingerprint: dict[str, str] = FINGERPRINT
) -> Member:
    role = worker.split("-")[0]
    stamp = Stamp(worker, incarnation, Epoch(epoch or 1000 + incarnation))
    return Member(
        stamp=stamp, role=role, address="tcp://127.0.0.1:1", fingerprint={} if role == "gateway" else fingerprint
    )


def hello(core: ControllerCore, who: Member, now: float, version: int = PROTOCOL_VERSION) -> list[Effect]:
    return core.on_message(who.stamp, Hello(protocol_version=version, member=who), now)


def started_core(now: float = 0.0) -> ControllerCore:
    core = ControllerCore(SEATS, LIVENESS, first_version=7, now=now)
    core.on_timer(now)
    return core


def live_core(now: float = 0.0) -> ControllerCore:
    core = started_core(now)
    for seat in SEATS:
        hello(core, member(seat.worker), now)
    core.on_timer(now + BURST_S)  # the rest of the burst is told
    assert core.ready
    return core


def test_a_burst_of_news_is_told_at_once_and_then_together() -> None:
    core = started_core()
    told = [of_type(hello(core, member(seat.worker), 1.0), Publish) for seat in SEATS]
    assert [len(effects) for effects in told] == [1, 0, 0, 0]
    assert core.next_deadline() == 1.0 + BURST_S
    [published] = core.on_timer(1.0 + BURST_S)
    assert isinstance(published, Publish)
    assert len(published.membership.members) == len(SEATS)
    assert published.membership.version == 7 + len(SEATS)
    assert core.on_timer(1.0 + 2 * BURST_S) == []


def test_who_stays_is_known_before_somebody_leaves() -> None:
    """Though a burst of news would be told together, later."""
    core = started_core()
    for worker in (P0, D0, D1):
        hello(core, member(worker), 1.0)
    effects = core.replace_worker(D0, "decode", 1.0)
    assert not isinstance(effects, Refused)
    known, asked = effects
    assert isinstance(known, Publish)
    assert {one.stamp.worker for one in known.membership.members} == {P0, D0, D1}
    assert isinstance(asked, DrainWorker)


def members_of(core: ControllerCore) -> set[tuple[str, int]]:
    return {(m.stamp.worker, m.stamp.incarnation) for m in core.membership().members}


def beat_all(core: ControllerCore, now: float, but: WorkerId | None = None, load: Load = Load()) -> None:  # noqa: B008
    for m in core.membership().members:
        if m.stamp.worker != but:
            core.on_message(m.stamp, Heartbeat(load=load), now)


def of_type(effects: list[Effect], kind: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_every_seat_is_started_once_with_its_first_incarnation() -> None:
    core = ControllerCore(SEATS, LIVENESS, first_version=7, now=0.0)
    assert of_type(core.on_timer(0.0), StartWorker) == [StartWorker(seat, 1) for seat in SEATS]
    assert of_type(core.on_timer(0.1), StartWorker) == []
    assert not core.ready


def test_an_admitted_process_is_published_under_a_new_version_and_a_repeated_hello_is_answered() -> None:
    core = started_core()
    [published] = hello(core, member(P0), 1.0)
    assert isinstance(published, Publish)
    assert published.membership.version == 8
    assert members_of(core) == {(P0, 1)}
    [again] = hello(core, member(P0), 1.1)
    assert isinstance(again, Publish)
    assert again.membership.version == 8
    assert again.readers == (member(P0),)


def test_membership_is_repeated_to_those_who_go_by_an_older_one() -> None:
    core = live_core()
    membership = core.membership()
    beat_all(core, 1.1)
    [published] = core.on_timer(1.1)
    assert published == Publish(membership, membership.members)
    behind, *others = membership.members
    for one in others:
        core.on_message(one.stamp, Heartbeat(view=membership.version), 1.2)
    core.on_message(behind.stamp, Heartbeat(view=membership.version - 1), 1.2)
    assert core.on_timer(2.2) == [Publish(membership, (behind,))]
    core.on_message(behind.stamp, Heartbeat(view=membership.version), 2.3)
    assert core.on_timer(3.3) == []


def test_another_fingerprint_is_refused_by_field_and_the_process_replaced() -> None:
    core = started_core()
    hello(core, member(P0), 0.0)
    effects = hello(core, member(D0, fingerprint={"layout": "b", "page_size": "16"}), 0.0)
    [reply] = of_type(effects, Reply)
    assert isinstance(reply, Reply)
    assert isinstance(reply.body, Reject)
    assert reply.body.differences == {"layout": "b != a"}
    assert [kill.worker for kill in effects if isinstance(kill, KillWorker)] == [D0]
    assert (D0, 1) not in members_of(core)


def test_gateways_have_no_pages_to_compare() -> None:
    core = started_core()
    hello(core, member(P0), 0.0)
    hello(core, member(GW), 0.0)
    assert members_of(core) == {(P0, 1), (GW, 1)}


def test_another_protocol_version_is_told_so() -> None:
    core = started_core()
    [reply] = of_type(hello(core, member(P0), 0.0, version=PROTOCOL_VERSION + 1), Reply)
    assert isinstance(reply, Reply)
    assert isinstance(reply.body, Reject)
    assert "protocol_version" in reply.body.differences
    assert members_of(core) == set()


def test_a_silent_process_is_killed_but_stays_a_member_until_it_is_proven_dead() -> None:
    core = live_core()
    for now in (1.0, 2.0, 2.9):
        beat_all(core, now, but=D0)
        assert of_type(core.on_timer(now), KillWorker) == []
    beat_all(core, 3.1, but=D0)
    [kill] = of_type(core.on_timer(3.1), KillWorker)
    assert isinstance(kill, KillWorker)
    assert (kill.worker, kill.incarnation) == (D0, 1)
    assert (D0, 1) in members_of(core)
    effects = core.on_dead(D0, 1, 3.2)
    [published] = of_type(effects, Publish)
    assert isinstance(published, Publish)
    assert (D0, 1) not in members_of(core)
    assert core.on_timer(3.2) == [StartWorker(SeatSpec(D0, "decode"), 2)]


def test_a_kill_is_repeated_until_it_is_proven() -> None:
    core = live_core()
    killed_at = []
    for tenth in range(1, 130):
        now = tenth / 10
        beat_all(core, now, but=D0)
        killed_at += [now for effect in core.on_timer(now) if isinstance(effect, KillWorker)]
    assert killed_at[0] == 3.0
    assert len(killed_at) == 4
    assert (D0, 1) in members_of(core)


def test_a_killed_process_that_speaks_again_is_not_let_back() -> None:
    core = live_core()
    for now in (1.0, 2.0, 3.1):
        beat_all(core, now, but=D0)
        core.on_timer(now)
    core.on_message(member(D0).stamp, Heartbeat(), 3.2)
    assert hello(core, member(D0), 3.3) == []
    core.on_dead(D0, 1, 3.4)
    assert (D0, 1) not in members_of(core)


def test_a_wedged_engine_is_killed_though_its_heartbeats_come() -> None:
    core = live_core()
    core.on_message(member(D0).stamp, Heartbeat(load=Load(step_age_s=10.5)), 0.5)
    [kill] = of_type(core.on_timer(0.5), KillWorker)
    assert isinstance(kill, KillWorker)
    assert kill.worker == D0
    assert "10.5 s" in kill.reason


def test_a_death_that_ray_reports_needs_no_silence() -> None:
    core = live_core()
    assert of_type(core.on_dead(P0, 1, 0.1), Publish)
    assert core.on_timer(0.1) == [StartWorker(SeatSpec(P0, "prefill"), 2)]


def test_late_and_repeated_reports_of_a_predecessors_death_change_nothing() -> None:
    core = live_core()
    core.on_dead(P0, 1, 0.1)
    core.on_timer(0.1)
    hello(core, member(P0, 2), 0.5)
    before = core.membership()
    assert core.on_dead(P0, 1, 0.6) == []
    assert core.membership() == before


def test_the_hello_of_a_superseded_process_is_rejected_and_the_process_killed() -> None:
    core = live_core()
    core.on_dead(P0, 1, 0.1)
    core.on_timer(0.1)
    effects = hello(core, member(P0, 1, epoch=77), 0.2)
    assert [type(effect) for effect in effects] == [Reply, KillWorker]
    assert (P0, 1) not in members_of(core)


def test_a_stranger_is_rejected() -> None:
    effects = hello(live_core(), member(WorkerId("decode-9")), 0.2)
    assert [type(effect) for effect in effects] == [Reply]


def test_someone_elses_hello_is_ignored() -> None:
    core = started_core()
    assert core.on_message(member(D1).stamp, Hello(protocol_version=PROTOCOL_VERSION, member=member(D0)), 0.0) == []


def test_restarts_back_off_and_are_bounded_per_minute() -> None:
    core = live_core()
    starts = [0.0]
    now, incarnation = 0.0, 1
    while len(starts) < 8:
        core.on_dead(D0, incarnation, now)
        for _ in range(100_000):
            beat_all(core, now)
            started = [e for e in core.on_timer(now) if isinstance(e, StartWorker)]
            if started:
                break
            now += 0.1
        incarnation = started[0].incarnation
        starts.append(now)
    gaps = [round(later - earlier) for earlier, later in itertools.pairwise(starts)]
    assert gaps[:4] == [0, 1, 2, 4]
    assert incarnation == 8
    for at in starts:
        assert len([s for s in starts if at <= s < at + 59.9]) <= LIVENESS.max_restarts_per_minute


def test_a_process_that_served_for_long_is_replaced_at_once() -> None:
    core = live_core()
    core.on_dead(D0, 1, 0.0)
    core.on_timer(0.0)
    hello(core, member(D0, 2), 1.0)
    for second in range(1, 40):
        beat_all(core, float(second))
        core.on_timer(float(second))
    core.on_dead(D0, 2, 40.0)
    assert core.on_timer(40.0) == [StartWorker(SeatSpec(D0, "decode"), 3)]


def test_a_failed_start_is_killed_first_and_tried_again_after_its_proof() -> None:
    core = started_core()
    [kill] = core.on_start_failed(D0, 1, "no such model", 1.0)
    assert isinstance(kill, KillWorker)
    assert of_type(core.on_timer(1.1), StartWorker) == []
    core.on_dead(D0, 1, 1.2)
    assert of_type(core.on_timer(1.3), StartWorker) == [StartWorker(SeatSpec(D0, "decode"), 2)]
    assert [s.detail for s in core.status() if s.worker == D0] == ["start failed: no such model"]


def test_a_start_that_takes_for_ever_is_given_up() -> None:
    core = started_core()
    kills = of_type(core.on_timer(100.0), KillWorker)
    assert {kill.worker for kill in kills if isinstance(kill, KillWorker)} == {P0, D0, D1, GW}


def test_a_controller_that_did_not_run_blames_nobody() -> None:
    core = live_core()
    assert of_type(core.on_timer(50.0), KillWorker) == []
    beat_all(core, 51.0, but=D0)
    core.on_timer(51.0)
    beat_all(core, 52.0, but=D0)
    core.on_timer(52.0)
    beat_all(core, 53.0, but=D0)
    assert [k.worker for k in core.on_timer(53.0) if isinstance(k, KillWorker)] == [D0]


def test_a_restarted_controller_adopts_the_living_and_fills_the_rest_with_new_incarnations() -> None:
    core = ControllerCore(SEATS, LIVENESS, first_version=100, now=0.0)
    core.note_incarnation(D1, 4)
    core.adopt(member(P0, 3), 0.0)
    core.adopt_starting(D0, 2, "decode", 0.0)
    effects = core.on_timer(0.0)
    [published] = of_type(effects, Publish)
    assert isinstance(published, Publish)
    assert published.membership.version > 100
    assert of_type(effects, StartWorker) == [
        StartWorker(SeatSpec(D1, "decode"), 5),
        StartWorker(SeatSpec(GW, "gateway"), 1),
    ]
    hello(core, member(D0, 2), 0.1)
    assert members_of(core) == {(P0, 3), (D0, 2)}


def test_a_seat_that_may_have_been_used_gets_a_higher_incarnation_and_the_living_keep_theirs() -> None:
    core = ControllerCore(SEATS, LIVENESS, first_version=100, now=0.0)
    for seat in SEATS:
        core.note_incarnation(seat.worker, 40)
    core.adopt(member(P0, 3), 0.0)
    core.on_timer(0.0)
    assert {s.worker: s.incarnation for s in core.status()} == {P0: 3, D0: 41, D1: 41, GW: 41}
    assert not core.ready
    hello(core, member(D0, 41), 0.1)
    assert members_of(core) == {(P0, 3), (D0, 41)}


def test_shutdown_ends_everyone_and_starts_no_one() -> None:
    core = live_core()
    core.on_dead(D1, 1, 0.0)
    kills = core.shut_down(0.1)
    assert {k.worker for k in kills if isinstance(k, KillWorker)} == {P0, D0, GW}
    for worker in (P0, D0, GW):
        assert not core.finished
        core.on_dead(worker, 1, 0.2)
    assert core.finished
    assert of_type(core.on_timer(500.0), StartWorker) == []


def asked_to_leave(core: ControllerCore, worker: WorkerId, role: str, now: float) -> DrainWorker:
    effects = core.replace_worker(worker, role, now)
    assert not isinstance(effects, Refused), effects
    [drain] = effects
    assert isinstance(drain, DrainWorker)
    return drain


def test_a_worker_changes_its_role_when_it_has_finished() -> None:
    core = live_core()
    drain = asked_to_leave(core, D1, "prefill", 1.0)
    assert (drain.worker, drain.incarnation) == (D1, 1)
    beat_all(core, 2.0)
    assert of_type(core.on_timer(2.0), KillWorker) == [], "it still has something to do"
    assert (D1, 1) in members_of(core)
    [kill] = core.on_drained(D1, 1, 2.5)
    assert isinstance(kill, KillWorker)
    assert (D1, 1) in members_of(core), "not proven dead"
    core.on_dead(D1, 1, 2.6)
    assert of_type(core.on_timer(2.6), StartWorker) == [StartWorker(SeatSpec(D1, "prefill"), 2)]
    hello(core, structs.replace(member(D1, 2), role="prefill"), 3.0)
    assert core.ready
    assert {(s.worker, s.role, s.restarts) for s in core.status()} >= {(D1, "prefill", 1), (D0, "decode", 0)}
    back = asked_to_leave(core, D1, "decode", 4.0)
    assert back.incarnation == 2


def test_a_worker_that_does_not_finish_in_time_is_replaced_all_the_same() -> None:
    core = live_core()
    drain = asked_to_leave(core, D1, "prefill", 1.0)
    late_s = 1.0 + drain.timeout_s
    now = 1.0
    while now < late_s:
        beat_all(core, now)
        assert of_type(core.on_timer(now), KillWorker) == []
        now += 0.5
    beat_all(core, late_s)
    assert [kill.worker for kill in core.on_timer(late_s) if isinstance(kill, KillWorker)] == [D1]


def test_a_worker_that_dies_while_it_leaves_is_followed_by_the_wanted_role() -> None:
    core = live_core()
    asked_to_leave(core, D1, "prefill", 1.0)
    core.on_dead(D1, 1, 1.1)
    assert of_type(core.on_timer(1.1), StartWorker) == [StartWorker(SeatSpec(D1, "prefill"), 2)]
    assert core.on_drained(D1, 1, 1.2) == [], "its last word comes late"


def test_the_last_live_worker_of_a_role_is_not_let_go() -> None:
    core = live_core()
    assert isinstance(core.replace_worker(P0, "decode", 1.0), Refused)
    assert isinstance(core.replace_worker(P0, "prefill", 1.0), Refused)
    asked_to_leave(core, D1, "prefill", 1.0)
    assert isinstance(core.replace_worker(D0, "prefill", 1.0), Refused), "the other one takes nothing new any more"
    core.on_dead(D1, 1, 1.1)
    core.on_timer(1.1)
    hello(core, structs.replace(member(D1, 2), role="prefill"), 1.2)
    asked_to_leave(core, P0, "decode", 1.3)


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    core = live_core()
    for worker, role, reason in (
        (GW, "decode", "there is no worker 'gateway-0': there are prefill-0, decode-0, decode-1"),
        (D0, "gateway", "no worker can become 'gateway': decode or prefill"),
    ):
        assert core.replace_worker(worker, role, 1.0) == Refused(reason)
    asked_to_leave(core, D1, "decode", 1.0)
    assert core.replace_worker(D1, "prefill", 1.0) == Refused(
        "decode-1 is leaving: only a live worker can be asked to leave"
    )


def test_a_process_of_another_role_than_its_seats_is_refused() -> None:
    core = started_core()
    effects = hello(core, structs.replace(member(D0), role="prefill"), 0.1)
    assert [kill.worker for kill in effects if isinstance(kill, KillWorker)] == [D0]
    assert (D0, 1) not in members_of(core)


def test_a_restarted_controller_knows_who_leaves_and_what_everybody_has_become() -> None:
    core = ControllerCore(SEATS, LIVENESS, first_version=100, now=0.0)
    core.note_incarnation(D0, 4, "decode")
    core.note_incarnation(P0, 7, "decode")
    core.note_incarnation(P0, 3, "prefill")
    effects = core.adopt(structs.replace(member(D1, 2), role="prefill"), 0.0, leaving=True)
    assert effects == [DrainWorker(D1, 2, LIVENESS.drain_deadline_s)]
    starts = of_type(core.on_timer(0.0), StartWorker)
    assert starts == [
        StartWorker(SeatSpec(P0, "decode"), 8),
        StartWorker(SeatSpec(D0, "decode"), 5),
        StartWorker(SeatSpec(GW, "gateway"), 1),
    ]
    core.on_drained(D1, 2, 0.1)
    core.on_dead(D1, 2, 0.2)
    assert of_type(core.on_timer(0.2), StartWorker) == [StartWorker(SeatSpec(D1, "prefill"), 3)]


class ControllerMachine(RuleBasedStateMachine):
    """Random lives and deaths against a model that knows which processes exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core = ControllerCore(SEATS, LIVENESS, first_version=1, now=0.0)
        self.alive: dict[WorkerId, Member] = {}  # processes that exist, admitted or not
        self.proven_dead: set[tuple[str, int]] = set()
        self.kills: list[tuple[WorkerId, int]] = []
        self.leaving: list[tuple[WorkerId, int]] = []
        self.seen_version = 0
        self.seen_members: set[tuple[str, int]] = set()

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, StartWorker):
                worker = effect.spec.worker
                assert worker not in self.alive, "C2: two processes in one seat"
                assert (worker, effect.incarnation) not in self.proven_dead, "C3: an incarnation used twice"
                self.alive[worker] = structs.replace(member(worker, effect.incarnation), role=effect.spec.role)
            elif isinstance(effect, KillWorker):
                self.kills.append((effect.worker, effect.incarnation))
            elif isinstance(effect, DrainWorker):
                self.leaving.append((effect.worker, effect.incarnation))
            elif isinstance(effect, Publish):
                version = effect.membership.version
                members = {(m.stamp.worker, m.stamp.incarnation) for m in effect.membership.members}
                assert version >= self.seen_version
                assert version > self.seen_version or members == self.seen_members or not self.seen_members
                assert self.seen_members - members <= self.proven_dead, "C1: missing but not proven dead"
                self.seen_version, self.seen_members = version, members

    @rule(seconds=st.sampled_from([0.05, 0.2, 0.9, 2.0, 5.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.apply(self.core.on_timer(self.now))

    @rule(worker=st.sampled_from([P0, D0, D1, GW]))
    def says_hello(self, worker: WorkerId) -> None:
        if worker in self.alive:
            self.apply(hello(self.core, self.alive[worker], self.now))

    @rule(worker=st.sampled_from([P0, D0, D1, GW]), age=st.sampled_from([0.0, 0.0, 0.0, 11.0]))
    def beats(self, worker: WorkerId, age: float) -> None:
        if worker in self.alive:
            self.apply(self.core.on_message(self.alive[worker].stamp, Heartbeat(load=Load(step_age_s=age)), self.now))

    @rule(worker=st.sampled_from([P0, D0, D1, GW]))
    def dies(self, worker: WorkerId) -> None:
        process = self.alive.pop(worker, None)
        if process is not None:
            self.proven_dead.add((worker, process.stamp.incarnation))
            self.apply(self.core.on_dead(worker, process.stamp.incarnation, self.now))

    @precondition(lambda self: self.kills)
    @rule()
    def a_kill_succeeds(self) -> None:
        worker, incarnation = self.kills.pop(0)
        if worker in self.alive and self.alive[worker].stamp.incarnation == incarnation:
            del self.alive[worker]
        self.proven_dead.add((worker, incarnation))
        self.apply(self.core.on_dead(worker, incarnation, self.now))

    @rule(worker=st.sampled_from([P0, D0, D1]), role=st.sampled_from(["prefill", "decode"]))
    def is_to_be_replaced(self, worker: WorkerId, role: str) -> None:
        roles = {seat.worker: seat.role for seat in self.core.status() if seat.state == "live"}
        effects = self.core.replace_worker(worker, role, self.now)
        if not isinstance(effects, Refused):
            assert list(roles.values()).count(roles[worker]) > 1, "C5: nobody of its role is left"
            self.apply(effects)

    @precondition(lambda self: self.leaving)
    @rule()
    def one_has_drained(self) -> None:
        self.apply(self.core.on_drained(*self.leaving.pop(0), self.now))

    @rule(worker=st.sampled_from([P0, D0, D1, GW]))
    def start_fails(self, worker: WorkerId) -> None:
        if worker in self.alive:
            self.apply(self.core.on_start_failed(worker, self.alive[worker].stamp.incarnation, "no", self.now))

    @invariant()
    def members_exist(self) -> None:
        for process in self.core.membership().members:
            assert (process.stamp.worker, process.stamp.incarnation) not in self.proven_dead

    def teardown(self) -> None:
        """Whatever happened: when all speak and nobody dies any more, every seat is filled again."""
        for _ in range(2000):
            self.now += 0.2
            while self.leaving:
                self.one_has_drained()
            while self.kills:
                self.a_kill_succeeds()
            for worker in list(self.alive):
                self.says_hello(worker)
                self.beats(worker, 0.0)
            self.apply(self.core.on_timer(self.now))
            if self.core.ready:
                return
        raise AssertionError(f"seats stay empty: {self.core.status()}")


ControllerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestControllerMachine = ControllerMachine.TestCase


def test_status_names_what_a_person_needs() -> None:
    core = live_core()
    core.on_dead(D0, 1, 0.0, "process died")
    [status] = [s for s in core.status() if s.worker == D0]
    assert replace(status, detail="") == replace(status, state="vacant", restarts=1, incarnation=1, detail="")
    assert status.detail == "process died"
