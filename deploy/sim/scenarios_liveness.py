"""Scenarios about being told and getting on: lost and late messages, deaths, silence, churn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from baton.common.config import PrefillConfig
from baton.common.engine.fake_runner import StepCost
from baton.common.ids import HandoffKey, Stamp, WorkerId
from baton.common.kv.layout import Component
from baton.common.messages import (
    Ack,
    Body,
    Chunk,
    Commit,
    Done,
    Frame,
    HandoffBody,
    Heartbeat,
    Hello,
    Membership,
    Offer,
    Output,
    Submit,
)
from baton.common.units import pages_for_tokens
from baton.deploy.sim.clients import CONNECTION_LOST
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, body_of, must, second_of, worker_of
from baton.deploy.sim.world import Report, World
from baton.transfer.api import OfferReceived, SinkCommitted, SinkFailed, SourceAborted, SourceReleased
from baton.transfer.session.effects import Landed


def cancel_before_offer(seed: int) -> Scenario:
    """The sink's Cancel overtakes its Offer."""
    plan = Plan(BASE, seed)
    victim = plan.request(30)
    plan.request(20)

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        if isinstance(body, Offer) and body.request_id == victim.request_id:
            plan.note("offer delayed")
            return 0.4
        return 0.0

    plan.world.network.extra_delay_s = delay_s
    plan.world.schedule.at(FIRST_S + 0.1, lambda: plan.world.cancel(victim))
    scenario = plan.ready("offer delayed")

    def reached(report: Report) -> None:
        scenario.reached(report)
        counters = [worker.endpoint.counters for worker in plan.world.workers("prefill")]
        must(any(one.get("source.unknown.Cancel") for one in counters), "no Cancel came before its Offer")
        late = [name for one in counters for name in one if name.startswith("source.") and ".Offer." in name]
        must(late, "the Offer never came after its Cancel")

    return Scenario(plan.world, reached)


def cancel_before_submit(seed: int) -> Scenario:
    """The gateway's CancelRequest overtakes its Submit."""
    plan = Plan(BASE, seed)
    victim = plan.request(30)

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        if isinstance(body, Submit) and body.request_id == victim.request_id:
            plan.note("submit delayed")
            return 0.3
        return 0.0

    plan.world.network.extra_delay_s = delay_s
    plan.world.schedule.at(FIRST_S + 0.1, lambda: plan.world.cancel(victim))

    def sent(world: World, details: object) -> None:
        assert isinstance(details, tuple)
        if isinstance(details[2], Offer):
            plan.note("work began")

    plan.world.on("sent", sent)
    scenario = plan.ready("submit delayed")

    def reached(report: Report) -> None:
        scenario.reached(report)
        assert not plan.seen.get("work began"), "a cancelled request was started"

    return Scenario(plan.world, reached)


def source_crash(seed: int) -> Scenario:
    """The prefill worker dies after some regions have landed: they are kept, the rest comes from elsewhere."""
    plan = Plan(replace(BASE, prefill=2, pull_lane=0.5), seed)
    for _ in range(3):
        plan.request(40)

    def crash_source(details: object) -> None:
        worker, event = worker_of(details, "decode"), second_of(details)
        assert worker is not None
        assert isinstance(event, Landed)
        (session,) = [one for one in worker.endpoint.sessions() if one.key == event.key]
        plan.world.crash(session.peer.worker)

    landed: set[tuple[HandoffKey, int]] = set()
    landed_bytes = 0

    def count(world: World, details: object) -> None:
        nonlocal landed_bytes
        event = second_of(details)
        landed_bytes += event.nbytes if isinstance(event, Landed) else 0

    plan.world.on("landing_ended", count)

    def first_two(details: object) -> bool:
        event = second_of(details)
        if isinstance(event, Landed):
            landed.add((event.key, event.seq))
            return {(event.key, 0), (event.key, 1)} <= landed
        return False

    plan.once("landing_ended", first_two, crash_source)

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, SinkFailed) and event.peer_lost and event.landed_until:
            plan.note("part of it had landed")

    plan.world.on("engine_event", look)
    scenario = plan.ready("part of it had landed")

    def reached(report: Report) -> None:
        scenario.reached(report)
        settings = plan.world.settings
        page_bytes = plan.world.workers()[0].data.pools[Component.FULL].shape[1]
        needed = sum(pages_for_tokens(len(one.prompt), settings.page_size) for one in plan.requests)
        most = needed + len(plan.requests) * settings.transfer.credit_regions  # what overtook a region that never came
        assert landed_bytes <= most * page_bytes, f"{landed_bytes // page_bytes} pages were sent, where {needed} do"

    return Scenario(plan.world, reached)


def sink_crash(seed: int) -> Scenario:
    """The decode worker dies while it receives: the source gets its pages back, the stream goes on elsewhere."""
    plan = Plan(replace(BASE, pull_lane=0.5), seed)
    for _ in range(3):
        plan.request(40)

    def crash_sink(details: object) -> None:
        worker = worker_of(details, "decode")
        assert worker is not None
        if any(one.endpoint.live_sources for one in plan.world.workers("prefill")):
            plan.note("a source was sending")
        plan.world.crash(worker.stamp.worker)

    plan.once("land_region", lambda details: True, crash_sink)

    def look(world: World, details: object) -> None:
        if worker_of(details, "prefill") is not None and isinstance(second_of(details), SourceAborted):
            plan.note("the source let go")

    plan.world.on("engine_event", look)
    scenario = plan.ready("a source was sending", "the source let go")

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(any(one.ended is not None and one.ended.placements > 1 for one in plan.requests), "nobody moved")

    return Scenario(plan.world, reached)


def source_goes_silent(seed: int) -> Scenario:
    """The prefill worker hangs (it is alive, it says nothing): noticed by silence, replaced, nobody waits for ever."""
    plan = Plan(replace(BASE, prefill=1), seed)
    plan.request(40)

    def stop(details: object) -> None:
        worker = worker_of(details, "prefill")
        assert worker is not None
        plan.note("stopped")
        plan.world.pause(worker.stamp.worker, 1000.0)

    plan.once("hand_off_frame", lambda details: isinstance(body_of(details), Ack), stop)

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, SinkFailed) and event.peer_lost:
            plan.note("given up by the sink")

    plan.world.on("engine_event", look)
    return plan.ready("stopped", "given up by the sink")


def late_success_after_fail(seed: int) -> Scenario:
    """Everything has landed and Done is on its way when the attempt is given up: the late success changes nothing."""
    plan = Plan(BASE, seed)
    victim = plan.request(30)
    plan.request(20)

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        return 0.6 if isinstance(body, Done) else 0.0

    plan.world.network.extra_delay_s = delay_s
    plan.world.schedule.at(FIRST_S + 0.45, lambda: plan.world.cancel(victim))

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, SinkFailed) and event.landed_until == len(victim.prompt):
            plan.note("failed with everything landed")

    plan.world.on("engine_event", look)
    scenario = plan.ready("failed with everything landed")

    def reached(report: Report) -> None:
        scenario.reached(report)
        counters = [worker.endpoint.counters for worker in plan.world.workers("decode")]
        late = [name for one in counters for name in one if name.startswith("sink.") and ".Done." in name]
        must(late, "no late Done")

    return Scenario(plan.world, reached)


def restart_same_address(seed: int) -> Scenario:
    """Frames for a dead process reach its successor in the same seat."""
    plan = Plan(replace(BASE, start_s=0.02), seed)
    for _ in range(3):
        plan.request(40)

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        return 1.5 if isinstance(body, Ack) and plan.world.now < FIRST_S + 0.3 else 0.0

    plan.world.network.extra_delay_s = delay_s

    def crash_source(details: object) -> None:
        source = next(worker for worker in plan.world.workers("prefill") if worker.endpoint.live_sources)
        plan.world.crash(source.stamp.worker)

    plan.once("landing_ended", lambda details: True, crash_source)

    def foreign(world: World, details: object) -> None:
        if isinstance(details, Frame) and isinstance(details.body, HandoffBody):
            plan.note("a hand-off frame reached the successor")

    plan.world.on("frame_for_another_epoch", foreign)
    scenario = plan.ready("a hand-off frame reached the successor")
    plan.world.calm_s = FIRST_S + 3.0
    return scenario


def first_token_disconnect(seed: int) -> Scenario:
    """The client leaves while its prompt is being computed: the prefill worker stops at the next chunk."""
    prefill = PrefillConfig(chunk_tokens=4)
    plan = Plan(replace(BASE, prefill_config=prefill, step=StepCost(0.02)), seed)
    victim = plan.request(60)

    def offered(details: object) -> bool:
        return isinstance(second_of(details), OfferReceived)

    plan.once(
        "engine_event",
        offered,
        lambda _: plan.world.schedule.after(0.1, lambda: plan.world.cancel(victim)),
    )

    def look(world: World, details: object) -> None:
        worker = worker_of(details, "prefill")
        if worker is not None and isinstance(second_of(details), SourceAborted):
            for holding in worker.core.holdings():
                if 0 < holding.record.kv_committed_len < len(victim.prompt):
                    plan.note("stopped in the middle of the prompt")

    plan.world.on("engine_event", look)
    return plan.ready("stopped in the middle of the prompt")


def lost_control_frame(seed: int) -> Scenario:
    """The first copies of every kind of frame are lost, of each hand-off and for each process: one, two or three."""
    plan = Plan(replace(BASE, prefill=1, decode=1), seed)
    for _ in range(3):
        plan.request(30)
    plan.world.faulty = True
    lost: Counter[tuple[HandoffKey | WorkerId, str]] = Counter()

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        if isinstance(body, Heartbeat | Hello | Membership):
            return 0.0
        kind = type(body).__name__
        if isinstance(body, Output):
            kind += "-last" if body.finish_reason else ""
        whose = body.key if isinstance(body, HandoffBody) else worker
        if lost[whose, kind] > seed % 3:
            return 0.0
        lost[whose, kind] += 1
        plan.note(kind)
        return -1.0

    def look(world: World, details: object) -> None:
        event = second_of(details)
        assert not isinstance(event, SinkFailed | SourceAborted), f"{event}: what was lost was not sent again"
        if isinstance(event, SinkCommitted):
            committed[event.key] = world.now
        if isinstance(event, SourceReleased):
            late_s = world.now - committed[event.key]
            most_s = (4 + 3 * (seed % 3)) * world.settings.transfer.resend_after_s
            assert late_s < most_s, f"released {late_s:.1f} s after the commit"

    committed: dict[HandoffKey, float] = {}
    plan.world.on("engine_event", look)
    plan.world.network.extra_delay_s = delay_s
    kinds = [one.__name__ for one in (Offer, Chunk, Ack, Done, Commit, Submit)]
    return plan.ready(*kinds, "Accept", "Submitted", "Output", "Output-last", "FinishAck")


def gateway_lost(seed: int) -> Scenario:
    """The gateway dies with requests in every state: its workers let go of all of them."""
    plan = Plan(BASE, seed)
    for index in range(5):
        plan.request(30, max_tokens=40, at_s=FIRST_S + 0.05 * index)
    plan.world.schedule.at(FIRST_S + 0.4, lambda: plan.world.crash(WorkerId("gateway-0")))
    scenario = plan.ready(all_complete=False)

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(report.outcomes[CONNECTION_LOST], "everything was answered before the gateway died")

    return Scenario(plan.world, reached)


def retry_same_room(seed: int) -> Scenario:
    """An attempt fails, the next one of the same hand-off goes to the same or another worker: they never mix."""
    plan = Plan(replace(BASE, prefill=2), seed)
    for _ in range(3):
        plan.request(40)
    aborted = 0

    def abort(details: object) -> bool:
        nonlocal aborted
        aborted += 1
        return aborted == 4

    def cut(details: object) -> None:
        source = next(worker for worker in plan.world.workers("prefill") if worker.endpoint.live_sources)
        for sink in plan.world.workers("decode"):
            plan.world.partition(source.stamp.worker, sink.stamp.worker, 4.0, both=True)

    plan.once("landing_ended", abort, cut)

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, OfferReceived) and event.key.attempt > 0:
            plan.note("a second attempt was offered")

    plan.world.on("engine_event", look)
    return plan.ready("a second attempt was offered")


def request_lost_under_churn(seed: int) -> Scenario:
    """Workers come and go all the time while many requests run: each is answered once."""
    plan = Plan(replace(BASE, prefill=2, decode=3, pull_lane=0.5, arrival_s=3.0), seed)
    world = plan.world
    for index in range(40):
        plan.request(20 + index, max_tokens=12, at_s=FIRST_S + 0.08 * index, shared=10)
    for index in range(8):
        victims = ("decode-0", "prefill-0", "decode-1", "prefill-1")
        victim = WorkerId(victims[index % 4])
        world.schedule.at(FIRST_S + 0.2 + 0.4 * index, partial(world.crash, victim, index % 3 > 0))
    world.on("crash", lambda *_: plan.note("crash"))
    scenario = plan.ready("crash")
    world.calm_s = FIRST_S + 4.0
    return scenario


def source_crash_after_release(seed: int) -> Scenario:
    """Commit is lost and the source dies before it hears: the sink has everything and goes on."""
    plan = Plan(BASE, seed)
    plan.request(30)

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        if isinstance(body, Commit):
            plan.note("commit lost")
            return -1.0
        return 0.0

    plan.world.network.extra_delay_s = delay_s

    def crash_source(details: object) -> None:
        plan.world.crash(WorkerId("prefill-0"))

    plan.once("sent", lambda details: isinstance(details, tuple) and isinstance(details[2], Commit), crash_source)

    def look(world: World, details: object) -> None:
        if isinstance(second_of(details), SourceReleased):
            plan.note("released")

    plan.world.on("engine_event", look)
    scenario = plan.ready("commit lost")

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(not plan.seen.get("released"), "the source heard of the commit")

    return Scenario(plan.world, reached)
