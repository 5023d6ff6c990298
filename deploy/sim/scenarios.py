"""Named worlds: each drives the real cores into one interleaving that has broken other systems (docs: failures), and
says whether it was reached. A scenario that no longer reaches its danger fails: it would prove nothing.

A scenario is a function of a seed that returns a planned world and what must have happened in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from baton.common.config import DecodeConfig, PrefillConfig
from baton.common.engine.fake_runner import StepCost
from baton.common.ids import HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.census import OwnerClass
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
    SamplingParams,
    Submit,
)
from baton.decode.core import DecodeCore
from baton.deploy.sim.clients import CONNECTION_LOST, ClientRequest
from baton.deploy.sim.process import CONTROLLER, WorkerProcess
from baton.deploy.sim.settings import WorldSettings
from baton.deploy.sim.world import Report, World
from baton.transfer.api import OfferReceived, OpenSink, SinkFailed, SourceAborted, SourceReleased, SourceStopping
from baton.transfer.session.effects import Landed, LandRegion, RegionDamaged

BASE = WorldSettings(region_pages=1, region_s=0.02, arrival_s=0.1, pull_lane=0.0, fault_s=0.0)
FIRST_S = 1.5
"""Everything is up by then."""


class DangerMissed(AssertionError):
    """Nothing was wrong, but the interleaving that the scenario is for did not happen."""


def must(happened: object, what: str) -> None:
    if not happened:
        raise DangerMissed(what)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`reached` is called after the world has come to rest; it raises DangerMissed when the danger was missed."""

    world: World
    reached: Callable[[Report], None]


class Plan:
    """A world in the making, and notes of what was seen in it."""

    def __init__(self, settings: WorldSettings, seed: int) -> None:
        self.world = World(settings, seed)
        self.requests: list[ClientRequest] = []
        self.seen: dict[str, int] = {}

    def request(self, length: int, max_tokens: int = 8, at_s: float = FIRST_S, shared: int = 0) -> ClientRequest:
        """Enters one request; the first `shared` prompt tokens are those of all others."""
        number = len(self.requests)
        rng = np.random.default_rng([self.world.seed, number])
        prompt = np.concatenate([np.arange(shared), rng.integers(0, 258, length - shared)]).astype(np.int32)
        sampling = SamplingParams(temperature=0.7, seed=number, max_tokens=max_tokens)
        request = ClientRequest(RequestId(f"r{number}"), prompt, sampling, None)
        self.requests.append(request)
        self.world.clients.planned += 1
        self.world.schedule.at(at_s, lambda: self.world.submit(request))
        return request

    def note(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def once(self, probe: str, wanted: Callable[[object], bool], action: Callable[[object], None]) -> None:
        """`action` for the first hit of `probe` that is wanted, just after it."""
        done = False

        def hook(world: World, details: object) -> None:
            nonlocal done
            if not done and wanted(details):
                done = True
                world.schedule.after(0.0, lambda: action(details))

        self.world.on(probe, hook)

    def ready(self, *musts: str, all_complete: bool = True) -> Scenario:
        """`musts` must have been noted."""
        self.world.calm_s = FIRST_S + 1.0

        def reached(report: Report) -> None:
            missing = [one for one in musts if not self.seen.get(one)]
            must(not missing, f"never seen: {', '.join(missing)} (seen {self.seen})")
            for request in self.requests:
                complete = request.outcome in ("stop", "length")
                assert complete or request.cancelled or not all_complete, f"{request.request_id}: {request.ended}"

        return Scenario(self.world, reached)


def _worker(details: object, role: str) -> WorkerProcess | None:
    process = details[0] if isinstance(details, tuple) else None
    return process if isinstance(process, WorkerProcess) and process.role == role else None


def _body(details: object) -> object:
    """The frame's body, of a probe (process, frame)."""
    second = details[1] if isinstance(details, tuple) else None
    return second.body if isinstance(second, Frame) else None


def _event(details: object) -> object:
    return details[1] if isinstance(details, tuple) else None


# ------------------------------------------------------------------------------------------------------- memory


def abort_mid_write(seed: int) -> Scenario:
    """Clients leave while regions are on their way into their pages; others want those pages at once."""
    plan = Plan(replace(BASE, decode=1, decode_pages=14, thread_hop_s=0.02, region_s=0.1), seed)
    victims = {plan.request(30, at_s=FIRST_S + 0.3 * index).request_id for index in range(6)}
    for index in range(8):
        plan.request(24, at_s=FIRST_S + 0.2 * index)

    def meddle(world: World, details: object) -> None:
        effect, worker = _event(details), _worker(details, "decode")
        if isinstance(effect, LandRegion) and worker is not None:
            owner = RequestId(worker.owners[effect.key])
            if owner in victims:
                world.schedule.after(0.0, partial(world.cancel, world.clients.requests[owner]))

    plan.world.on("bytes_moving", meddle)
    plan.world.on("late_region_dropped", lambda *_: plan.note("a region came after the fence"))
    return plan.ready("a region came after the fence")


def sink_stopped_while_pulling(seed: int) -> Scenario:
    """The receiver of a pull hangs: its read may come at any time, so the source's pages stay quarantined until it is
    proven dead."""
    plan = Plan(replace(BASE, pull_lane=1.0, region_s=0.05), seed)
    plan.request(30)
    plan.once("land_region", lambda details: True, lambda details: _pause_worker(plan, details, 60.0))

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        """Silence is noticed first, the proof comes later."""
        return 2.0 if isinstance(body, Membership) and plan.world.now > FIRST_S else 0.0

    plan.world.network.extra_delay_s = delay_s

    def look(world: World, details: object) -> None:
        worker, event = _worker(details, "prefill"), _event(details)
        if worker is not None and isinstance(event, SourceStopping):
            plan.note("source told to stop before there was proof")
        if worker is not None and isinstance(event, SourceAborted):
            quarantined = [one for one in worker.core.holdings() if one.owner_class is OwnerClass.QUARANTINED]
            if quarantined:
                plan.note("pages were quarantined until the proof came")

    plan.world.on("engine_event", look)
    return plan.ready("source told to stop before there was proof", "pages were quarantined until the proof came")


def sink_resumes_after_silence(seed: int) -> Scenario:
    """The receiver of a pull was taken for dead, but nobody has killed it: it wakes up and reads. The source's pages
    must still be there."""
    plan = Plan(replace(BASE, pull_lane=1.0, region_s=0.05), seed)
    plan.request(30)
    plan.request(34)
    told: set[HandoffKey] = set()

    def stop(details: object) -> None:
        plan.world.pause(CONTROLLER, 8.0)
        _pause_worker(plan, details, 4.5)

    plan.once("land_region", lambda details: True, stop)

    def look(world: World, details: object) -> None:
        event = _event(details)
        if isinstance(event, SourceStopping):
            told.add(event.key)
        if isinstance(event, Landed | RegionDamaged) and event.key in told:
            plan.note("a region was read after the source had given up")

    plan.world.on("engine_event", look)
    plan.world.on("landing_ended", look)
    return plan.ready("a region was read after the source had given up")


def _pause_worker(plan: Plan, details: object, seconds: float) -> None:
    worker = _worker(details, "decode")
    assert worker is not None
    plan.world.pause(worker.stamp.worker, seconds)


def prealloc_fills_pool(seed: int) -> Scenario:
    """More prompts than the pool can promise pages to, with answers that grow: some wait, some are pushed back."""
    decode = DecodeConfig(num_reserved_decode_tokens=0, chunk_tokens=16)
    plan = Plan(replace(BASE, decode=1, decode_pages=20, decode_config=decode, max_tokens=40), seed)
    for index in range(6):
        plan.request(22, max_tokens=36, at_s=FIRST_S + 0.001 * index)
    scenario = plan.ready()

    def reached(report: Report) -> None:
        scenario.reached(report)
        timelines = [one.ended.timeline for one in plan.requests if one.ended is not None]
        must(any(timeline is not None and timeline.reserve_wait_s > 0 for timeline in timelines), "nobody waited")
        cores = [worker.core for worker in plan.world.workers("decode")]
        must(any(isinstance(core, DecodeCore) and core.retractions for core in cores), "nobody was pushed back")

    return Scenario(plan.world, reached)


def decode_radix_abort(seed: int) -> Scenario:
    """Aborts meet prefixes shared with others, at every stage."""
    plan = Plan(replace(BASE, decode=1, decode_pages=40), seed)
    plan.request(40, shared=36)
    others = [plan.request(40 + index, shared=36, at_s=FIRST_S + 0.4 + 0.005 * index) for index in range(8)]

    def meddle(world: World, details: object) -> None:
        command = _event(details)
        for request in others[::2]:
            if isinstance(command, OpenSink) and command.request_id == request.request_id:
                delay_s = world.rng.random() * 0.03
                world.schedule.after(delay_s, partial(world.cancel, request))

    plan.world.on("command", meddle)

    def look(world: World, details: object) -> None:
        worker, event = _worker(details, "decode"), _event(details)
        if worker is not None and isinstance(event, SinkFailed):
            shared = [one for one in worker.core.holdings() if one.record.cache_protected_len > 0]
            if shared:
                plan.note("a hand-off over a shared prefix was aborted")

    plan.world.on("engine_event", look)
    return plan.ready("a hand-off over a shared prefix was aborted")


# ------------------------------------------------------------------------------------------ liveness, propagation


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
        worker, event = _worker(details, "decode"), _event(details)
        assert worker is not None
        assert isinstance(event, Landed)
        (session,) = [one for one in worker.endpoint.sessions() if one.key == event.key]
        plan.world.crash(session.peer.worker)

    landed: set[tuple[HandoffKey, int]] = set()

    def first_two(details: object) -> bool:
        event = _event(details)
        if isinstance(event, Landed):
            landed.add((event.key, event.seq))
            return {(event.key, 0), (event.key, 1)} <= landed
        return False

    plan.once("landing_ended", first_two, crash_source)

    def look(world: World, details: object) -> None:
        event = _event(details)
        if isinstance(event, SinkFailed) and event.peer_lost and event.landed_until:
            plan.note("part of it had landed")

    plan.world.on("engine_event", look)
    return plan.ready("part of it had landed")


def sink_crash(seed: int) -> Scenario:
    """The decode worker dies while it receives: the source gets its pages back, the stream goes on elsewhere."""
    plan = Plan(replace(BASE, pull_lane=0.5), seed)
    for _ in range(3):
        plan.request(40)

    def crash_sink(details: object) -> None:
        worker = _worker(details, "decode")
        assert worker is not None
        if any(one.endpoint.live_sources for one in plan.world.workers("prefill")):
            plan.note("a source was sending")
        plan.world.crash(worker.stamp.worker)

    plan.once("land_region", lambda details: True, crash_sink)

    def look(world: World, details: object) -> None:
        if _worker(details, "prefill") is not None and isinstance(_event(details), SourceAborted):
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
        worker = _worker(details, "prefill")
        assert worker is not None
        plan.note("stopped")
        plan.world.pause(worker.stamp.worker, 1000.0)

    plan.once("hand_off_frame", lambda details: isinstance(_body(details), Ack), stop)

    def look(world: World, details: object) -> None:
        event = _event(details)
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
        event = _event(details)
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
        return isinstance(_event(details), OfferReceived)

    plan.once(
        "engine_event",
        offered,
        lambda _: plan.world.schedule.after(0.1, lambda: plan.world.cancel(victim)),
    )

    def look(world: World, details: object) -> None:
        worker = _worker(details, "prefill")
        if worker is not None and isinstance(_event(details), SourceAborted):
            for holding in worker.core.holdings():
                if 0 < holding.record.kv_committed_len < len(victim.prompt):
                    plan.note("stopped in the middle of the prompt")

    plan.world.on("engine_event", look)
    return plan.ready("stopped in the middle of the prompt")


def lost_control_frame(seed: int) -> Scenario:
    """The first copy of every kind of frame is lost, for every process."""
    plan = Plan(replace(BASE, prefill=1, decode=1), seed)
    for _ in range(3):
        plan.request(30)
    plan.world.faulty = True
    lost: set[tuple[WorkerId, str]] = set()

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        if isinstance(body, Heartbeat | Hello | Membership):
            return 0.0
        kind = type(body).__name__
        if isinstance(body, Output):
            kind += "-last" if body.finish_reason else ""
        if (worker, kind) in lost:
            return 0.0
        lost.add((worker, kind))
        plan.note(kind)
        return -1.0

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
        event = _event(details)
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
        if isinstance(_event(details), SourceReleased):
            plan.note("released")

    plan.world.on("engine_event", look)
    scenario = plan.ready("commit lost")

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(not plan.seen.get("released"), "the source heard of the commit")

    return Scenario(plan.world, reached)


SCENARIOS: dict[str, Callable[[int], Scenario]] = {
    one.__name__: one
    for one in (
        abort_mid_write,
        cancel_before_offer,
        cancel_before_submit,
        decode_radix_abort,
        first_token_disconnect,
        gateway_lost,
        late_success_after_fail,
        lost_control_frame,
        prealloc_fills_pool,
        request_lost_under_churn,
        restart_same_address,
        retry_same_room,
        sink_crash,
        sink_resumes_after_silence,
        sink_stopped_while_pulling,
        source_crash,
        source_crash_after_release,
        source_goes_silent,
    )
}


def run_scenario(name: str, seed: int) -> Report:
    """Raises AssertionError when something is wrong, DangerMissed when nothing was put to the test."""
    scenario = SCENARIOS[name](seed)
    report = scenario.world.run()
    scenario.reached(report)
    return report
