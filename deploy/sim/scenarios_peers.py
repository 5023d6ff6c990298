"""Scenarios about peers that fail others: what they do not say, what they say to nobody, and how they come back."""

from __future__ import annotations

from dataclasses import replace

from baton.common.config import LivenessConfig, TransferConfig
from baton.common.engine.core_api import Drain
from baton.common.engine.fake_runner import StepCost
from baton.common.errors import ErrorCode
from baton.common.ids import CONTROLLER, HandoffId, HandoffKey, Stamp, WorkerId
from baton.common.messages import (
    Ack,
    Body,
    Cancel,
    Cancelled,
    Commit,
    Done,
    Failed,
    Failure,
    FinishAck,
    HandoffBody,
    Nack,
    Output,
    Submit,
)
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, must, second_of, worker_of
from baton.deploy.sim.settings import LinkFaults
from baton.deploy.sim.world import Report, World
from baton.transfer.api import AbortSource, OpenSink, SinkCommitted, SinkFailed, SourceAborted
from baton.transfer.session.effects import LandRegion, SinkLaneFailed
from baton.transfer.stalls import BEHIND_SILENCE_S, LOOK_EVERY_S

FLOOD = 200
MAX_TOMBSTONES = 16


def prefill_abort_not_told(seed: int) -> Scenario:
    """A prefill worker gives up on what it was offered, and the first frame that says so is lost: the decode worker
    knows within a re-send, long before its deadline, and goes elsewhere."""
    plan = Plan(replace(BASE, prefill=2), seed)
    for _ in range(3):
        plan.request(40)
    given_up: dict[HandoffKey, float] = {}
    lost: set[HandoffKey] = set()

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        if isinstance(body, Failed) and body.key not in lost:
            lost.add(body.key)
            return -1.0
        return 0.0

    def draining(details: object) -> None:
        for prefill in plan.world.workers("prefill"):
            prefill.deliver(Drain())

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, AbortSource):
            given_up[event.key] = world.now
        if isinstance(event, SinkFailed) and event.key in given_up:
            plan.note("told although the frame was lost")
            late_s = world.now - given_up[event.key]
            assert late_s < 2 * world.settings.transfer.resend_after_s, f"told {late_s:.2f} s later"

    plan.world.network.extra_delay_s = delay_s
    plan.once("command", lambda details: isinstance(second_of(details), OpenSink), draining)
    plan.world.on("command", look)
    plan.world.on("engine_event", look)
    return plan.ready("told although the frame was lost")


def orphan_rooms(seed: int) -> Scenario:
    """A flood of frames about hand-offs that nobody ever heard of: nothing is kept of them but a bounded memory, and no
    request notices."""
    transfer = TransferConfig(credit_regions=2, handoff_ttl_s=20.0, max_tombstones=MAX_TOMBSTONES)
    plan = Plan(replace(BASE, transfer=transfer), seed)
    for index in range(4):
        plan.request(40, at_s=FIRST_S + 0.05 * index)
    failure = Failure(code=ErrorCode.CANCELLED)

    def flood() -> None:
        (source, *_), (sink, *_) = plan.world.workers("prefill"), plan.world.workers("decode")
        for number in range(FLOOD):
            key = HandoffKey(HandoffId(number + 1), 0)
            bodies: tuple[HandoffBody, ...] = (Cancel(key=key, failure=failure), Ack(key=key, seq=0, credit=9))
            for body in bodies:
                sink.send(source.stamp.worker, source.stamp.epoch, body)
            for body in (Failed(key=key, failure=failure), Done(key=key, regions=1, total_tokens=1, first_token=1)):
                source.send(sink.stamp.worker, sink.stamp.epoch, body)

    def look(world: World, details: object) -> None:
        for worker in world.workers():
            unknown = sum(count for name, count in worker.endpoint.counters.items() if ".unknown." in name)
            if unknown > FLOOD:
                plan.note("a flood of strange frames came")
            known = len(worker.endpoint.sessions()) - worker.endpoint.live_sinks - worker.endpoint.live_sources
            assert known <= 4 * MAX_TOMBSTONES, f"{worker.stamp.worker} remembers {known}"

    plan.world.schedule.at(FIRST_S + 0.1, flood)
    plan.world.on("landing_ended", look)
    plan.world.on("engine_event", look)
    return plan.ready("a flood of strange frames came")


def lost_words_of_an_abort(seed: int) -> Scenario:
    """The first copies of all frames that end a hand-off badly are lost, and of those that ask for a damaged region:
    who still holds pages for it hears within a few re-sends."""
    plan = Plan(replace(BASE, decode=1, prefill=1, links=LinkFaults(region_damaged=0.3)), seed)
    victims = [plan.request(40, at_s=FIRST_S + 0.2 * index) for index in range(4)]
    for index in range(3):
        plan.request(30, at_s=FIRST_S + 0.3 * index)
    lost, ended = set[tuple[HandoffKey, str]](), dict[HandoffKey, float]()

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        if not isinstance(body, Cancel | Cancelled | Failed | Nack) or (body.key, type(body).__name__) in lost:
            return 0.0
        lost.add((body.key, type(body).__name__))
        plan.note(type(body).__name__)
        return -1.0

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, SinkFailed):
            assert event.failure.code is not ErrorCode.DEADLINE_EXCEEDED, event
            ended[event.key] = world.now
        if isinstance(event, SourceAborted) and event.key in ended:
            late_s = world.now - ended[event.key]
            assert late_s < 3 * world.settings.transfer.resend_after_s, f"pages came back {late_s:.1f} s later"

    for index, victim in enumerate(victims):
        plan.world.schedule.at(FIRST_S + 0.2 * index + 0.06, plan.world.cancel, victim)
    plan.world.network.extra_delay_s = delay_s
    plan.world.on("engine_event", look)
    scenario = plan.ready("Cancel", "Cancelled", "Nack")
    plan.world.calm_s = FIRST_S + 3.0
    return scenario


def third_party(seed: int) -> Scenario:
    """A member speaks of hand-offs that are none of its: nobody believes it."""
    plan = Plan(replace(BASE, prefill=2, decode=2, pull_lane=0.5), seed)
    for index in range(6):
        plan.request(40, at_s=FIRST_S + 0.05 * index)
    failure = Failure(code=ErrorCode.INTERNAL, reason="so says somebody else")

    def meddle(world: World, details: object) -> None:
        worker, effect = worker_of(details, "decode"), second_of(details)
        if worker is None or not isinstance(effect, LandRegion) or effect.chunk.seq != 2:
            return
        key, source = effect.key, effect.peer
        for other in world.workers():
            if other.stamp in (worker.stamp, source):
                continue
            done = Done(key=key, regions=3, total_tokens=40, first_token=1)
            words: list[HandoffBody] = [Failed(key=key, failure=failure), done]
            for body in words:
                world.network.send(other.stamp, worker.stamp.worker, worker.stamp.epoch, body)
            words = [Cancel(key=key, failure=failure), Commit(key=key), Ack(key=key, seq=9, credit=99)]
            for body in words:
                world.network.send(other.stamp, source.worker, source.epoch, body)
            plan.note("somebody meddled")

    def look(world: World, details: object) -> None:
        event = second_of(details)
        assert not isinstance(event, SinkFailed | SourceAborted), event

    plan.world.on("land_region", meddle)
    plan.world.on("engine_event", look)
    return plan.ready("somebody meddled")


def stale_last_word(seed: int) -> Scenario:
    """A gateway is not heard for a while, so its requests are given up; it places them once more on the same worker,
    which goes on repeating the end of the first placement: that ends nothing."""
    plan = Plan(replace(BASE, prefill=1, decode=1, step=StepCost(0.05)), seed)
    for index in range(3):
        plan.request(30, max_tokens=60, at_s=FIRST_S + 0.01 * index)
    gateway, decode = WorkerId("gateway-0"), WorkerId("decode-0")
    last: set[tuple[str, int]] = set()

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        if isinstance(body, FinishAck) and (body.request_id, body.placement) not in last:
            last.add((body.request_id, body.placement))
            return -1.0
        return 0.0

    def sent(world: World, details: object) -> None:
        assert isinstance(details, tuple)
        body = details[2]
        if isinstance(body, Output) and body.failure is not None and body.placement == 0:
            request = world.clients.requests[body.request_id]
            placed = request.gateway is not None and (request.request_id, 1) in placements
            if placed:
                plan.note("the old end came behind the new beginning")
        if isinstance(body, Submit):
            placements.add((body.request_id, body.placement))

    placements: set[tuple[str, int]] = set()
    plan.world.network.extra_delay_s = delay_s
    plan.world.on("sent", sent)
    plan.world.schedule.at(FIRST_S + 0.3, plan.world.partition, gateway, decode, 4.0, True)
    scenario = plan.ready("the old end came behind the new beginning")
    plan.world.calm_s = FIRST_S + 5.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        most = max(one.ended.placements for one in plan.requests if one.ended is not None)
        assert most == 2, f"{most} placements"

    return Scenario(plan.world, reached)


def one_bad_peer(seed: int) -> Scenario:
    """A lane to the only prefill worker breaks again and again; when it works again, it is used again, and nobody has
    ended for it."""
    plan = Plan(replace(BASE, links=LinkFaults(region_lost=1.0)), seed)
    for index in range(3):
        plan.request(30, at_s=FIRST_S + 0.05 * index)
    for index in range(3):
        plan.request(30, at_s=FIRST_S + 8.0 + 0.05 * index)
    bad: set[WorkerId] = set()

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, SinkLaneFailed):
            plan.note("the lane broke")
        if isinstance(event, SinkFailed):
            bad.add(event.peer)
        if isinstance(event, SinkCommitted) and event.peer in bad:
            plan.note("the same peer was used again")

    plan.world.on("landing_ended", look)
    plan.world.on("engine_event", look)
    plan.world.schedule.at(FIRST_S + 7.5, plan.world.network.calm_down)
    scenario = plan.ready("the lane broke", "the same peer was used again")
    plan.world.calm_s = FIRST_S + 8.5
    return scenario


def health_lies(seed: int) -> Scenario:
    """An engine hangs while its process says that it lives: it is replaced for what it cannot do, and what it had goes
    on elsewhere."""
    liveness = LivenessConfig(heartbeat_interval_s=0.4, start_deadline_s=20.0, engine_stuck_after_s=4.0)
    plan = Plan(replace(BASE, prefill=1, decode=2, liveness=liveness), seed)
    for index in range(4):
        plan.request(30, max_tokens=30, at_s=FIRST_S + 0.01 * index)
    victim = WorkerId(("decode-0", "prefill-0")[seed % 2])
    plan.world.schedule.at(FIRST_S + 0.1 * (seed % 2 == 0), plan.world.hang, victim)
    scenario = plan.ready()

    def reached(report: Report) -> None:
        scenario.reached(report)
        process = plan.world.seats[victim]
        must(process.stamp.incarnation > 1, f"{victim} was not replaced")

    return Scenario(plan.world, reached)


def controller_restarts(seed: int) -> Scenario:
    """The controller dies; a worker dies while it is gone, unseen; another starts in its seat afterwards, under an
    incarnation that was never given, and what runs notices nothing."""
    plan = Plan(replace(BASE, prefill=2, decode=2, pull_lane=0.5), seed)
    for index in range(8):
        plan.request(30, max_tokens=20, at_s=FIRST_S + 0.2 * index)
    world = plan.world
    victim = WorkerId(("decode-0", "prefill-0")[seed % 2])
    world.schedule.at(FIRST_S + 0.3, world.crash_controller, 1.5)
    world.schedule.at(FIRST_S + 0.5, world.crash, victim)
    scenario = plan.ready()
    world.calm_s = FIRST_S + 4.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(report.probes["controller_crash"] and world.seats[victim].stamp.incarnation > 1, "nobody was replaced")
        others = [one for one in world.specs if one.worker != victim]
        alive = [world.seats[one.worker].stamp.incarnation == 1 for one in others]
        assert all(alive), "a restart of the controller has cost workers that lived"

    return Scenario(world, reached)


def half_open(seed: int) -> Scenario:
    """A worker is replaced, and for a while nothing that is sent to its successor arrives, though it speaks itself."""
    plan = Plan(replace(BASE, prefill=1, decode=1, start_s=0.1), seed)
    for index in range(4):
        plan.request(30, max_tokens=12, at_s=FIRST_S + 0.5 * index)
    victim = WorkerId(("decode-0", "prefill-0")[seed % 2])

    def cut() -> None:
        for spec in plan.world.specs:
            if spec.worker != victim:
                plan.world.partition(spec.worker, victim, 1.5, both=False)

    def lost(world: World, details: object) -> None:
        assert isinstance(details, tuple)
        if details[1] == victim and world.seats[victim].stamp.incarnation > 1 and details[0].worker != CONTROLLER:
            plan.note("the successor did not hear what was sent")

    plan.world.schedule.at(FIRST_S + 0.2, plan.world.crash, victim)
    plan.world.schedule.at(FIRST_S + 0.25, cut)
    plan.world.on("frame_lost", lost)
    scenario = plan.ready("the successor did not hear what was sent")
    plan.world.calm_s = FIRST_S + 4.0
    return scenario


def unheard_peer(seed: int) -> Scenario:
    """Nothing that a prefill worker says reaches the decode worker whose hand-off it has; all others hear it: given up
    for its silence, not at a deadline; used again when it is heard, though there is no hand-off to hear of."""
    transfer = TransferConfig(credit_regions=2, handoff_ttl_s=6.0, tombstone_ttl_s=1.0)
    plan = Plan(replace(BASE, prefill=2, decode=1, transfer=transfer), seed)
    world, liveness = plan.world, plan.world.settings.liveness
    for index in range(3):
        plan.request(40, at_s=FIRST_S + 0.05 * index)
    late = plan.request(40, at_s=FIRST_S + 6.0)
    decode, unheard = WorkerId("decode-0"), set[WorkerId]()

    def cut(details: object) -> None:
        command = second_of(details)
        assert isinstance(command, OpenSink)
        unheard.add(command.peer)
        world.partition(command.peer, decode, 12.0, both=False)

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, SinkFailed) and event.peer in unheard:
            assert event.peer_lost, event
            late_s = world.now - FIRST_S - liveness.dead_after_s - 3 * liveness.heartbeat_interval_s
            assert late_s < 0.2, f"given up {late_s:.1f} s late"
            plan.note("given up for its silence")
        if isinstance(event, OpenSink) and event.request_id == late.request_id and event.peer not in unheard:
            plan.note("another one was chosen while it was silent")

    plan.once("command", lambda details: isinstance(second_of(details), OpenSink), cut)
    world.on("engine_event", look)
    world.on("command", look)
    scenario = plan.ready("given up for its silence", "another one was chosen while it was silent")
    world.calm_s = FIRST_S + 14.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        [worker] = world.workers("decode")
        assert not worker.roster.silent, f"{worker.roster.silent} is never heard again"

    return Scenario(world, reached)


def lane_hangs(seed: int) -> Scenario:
    """The lane of a hand-off takes what is sent and delivers nothing more; its peer lives and speaks. It is given up a
    while after silence would have been noticed, and the same peer goes on, on another lane."""
    transfer = TransferConfig(credit_regions=2, handoff_ttl_s=20.0)
    plan = Plan(replace(BASE, prefill=1, decode=1, direct_lane=0.5, transfer=transfer), seed)
    world = plan.world
    stalled_s = world.settings.liveness.dead_after_s + BEHIND_SILENCE_S
    for index in range(3):
        plan.request(40, at_s=FIRST_S + 0.05 * index)
    hung: dict[HandoffId, str] = {}
    since_s = 0.0

    def hang(details: object) -> None:
        nonlocal since_s
        effect = second_of(details)
        assert isinstance(effect, LandRegion)
        since_s = world.now
        hung[effect.key.handoff] = effect.lane
        world.hang_lane(effect.peer.worker, WorkerId("decode-0"), effect.lane, 30.0)

    def is_third_region(details: object) -> bool:
        effect = second_of(details)
        return isinstance(effect, LandRegion) and effect.chunk.seq == 2

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, SinkFailed) and event.key.handoff in hung:
            assert event.failure.code is not ErrorCode.DEADLINE_EXCEEDED, event
        if isinstance(event, SinkLaneFailed) and event.key.handoff in hung and event.key.attempt == 0:
            late_s = world.now - since_s - stalled_s
            assert 0 < late_s < 4 * LOOK_EVERY_S, f"given up {late_s:.1f} s late"
            plan.note("given up for what did not come")
        if isinstance(event, LandRegion) and event.key.attempt > 0 and event.key.handoff in hung:
            assert event.lane != hung[event.key.handoff], f"{event.lane} once more"
            plan.note("the same peer went on by another lane")

    plan.once("land_region", is_third_region, hang)
    world.on("landing_ended", look)
    world.on("engine_event", look)
    world.on("land_region", look)
    return plan.ready("given up for what did not come", "the same peer went on by another lane")


SCENARIOS = (
    prefill_abort_not_told,
    orphan_rooms,
    lost_words_of_an_abort,
    third_party,
    stale_last_word,
    one_bad_peer,
    health_lies,
    controller_restarts,
    half_open,
    unheard_peer,
    lane_hangs,
)
