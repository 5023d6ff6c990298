"""Scenarios about who owns a page: aborts, readers and writers that outlive a hand-off, pools that are too small."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from baton.common.config import DecodeConfig, TiersConfig
from baton.common.ids import CONTROLLER, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.census import OwnerClass
from baton.common.kv.tiers.api import AbortRestore, RestorePages, StorePages
from baton.common.messages import (
    Body,
    Membership,
)
from baton.decode.core import DecodeCore
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, must, second_of, worker_of
from baton.deploy.sim.worker import WorkerProcess
from baton.deploy.sim.world import Report, World
from baton.transfer.api import OpenSink, SinkFailed, SourceAborted, SourceStopping
from baton.transfer.session.effects import Landed, LandRegion, RegionDamaged


def abort_mid_write(seed: int) -> Scenario:
    """Clients leave while regions are on their way into their pages; others want those pages at once."""
    plan = Plan(replace(BASE, decode=1, decode_pages=14, thread_hop_s=0.02, region_s=0.1), seed)
    victims = {plan.request(30, at_s=FIRST_S + 0.3 * index).request_id for index in range(6)}
    for index in range(8):
        plan.request(24, at_s=FIRST_S + 0.2 * index)

    def meddle(world: World, details: object) -> None:
        effect, worker = second_of(details), worker_of(details, "decode")
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
        worker, event = worker_of(details, "prefill"), second_of(details)
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
        event = second_of(details)
        if isinstance(event, SourceStopping):
            told.add(event.key)
        if isinstance(event, Landed | RegionDamaged) and event.key in told:
            plan.note("a region was read after the source had given up")

    plan.world.on("engine_event", look)
    plan.world.on("landing_ended", look)
    return plan.ready("a region was read after the source had given up")


def _pause_worker(plan: Plan, details: object, seconds: float) -> None:
    worker = worker_of(details, "decode")
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
        command = second_of(details)
        for request in others[::2]:
            if isinstance(command, OpenSink) and command.request_id == request.request_id:
                delay_s = world.rng.random() * 0.03
                world.schedule.after(delay_s, partial(world.cancel, request))

    plan.world.on("command", meddle)

    def look(world: World, details: object) -> None:
        worker, event = worker_of(details, "decode"), second_of(details)
        if worker is not None and isinstance(event, SinkFailed):
            shared = [one for one in worker.core.holdings() if one.record.cache_protected_len > 0]
            if shared:
                plan.note("a hand-off over a shared prefix was aborted")

    plan.world.on("engine_event", look)
    return plan.ready("a hand-off over a shared prefix was aborted")


def abort_mid_restore(seed: int) -> Scenario:
    """Clients leave while a tier writes into their pages; others want those pages at once."""
    tiers = TiersConfig(host_bytes=1, restore_min_pages=1)
    plan = Plan(replace(BASE, decode=1, decode_pages=24, tiers=tiers, tier_page_s=0.05, tier_loss=0.0), seed)
    plan.request(40, shared=40)
    victims = [plan.request(41, shared=40, at_s=FIRST_S + 6.0 + 0.3 * index) for index in range(4)]
    for index in range(8):
        plan.request(30, at_s=FIRST_S + 6.0 + 0.2 * index)
    aborted: set[tuple[WorkerId, int]] = set()

    def forget() -> None:
        """What the tiers have by now, nobody else has."""
        for worker in plan.world.workers():
            worker.pool.clear_cache()

    def meddle(world: World, details: object) -> None:
        command, worker = second_of(details), worker_of(details, "decode")
        if isinstance(command, RestorePages):
            for request in victims:
                world.schedule.after(0.05, partial(world.cancel, request))
        if isinstance(command, AbortRestore) and worker is not None:
            aborted.add((worker.stamp.worker, command.job))

    def look(world: World, details: object) -> None:
        worker, command = worker_of(details, "decode"), second_of(details)
        if isinstance(command, RestorePages) and worker is not None and (worker.stamp.worker, command.job) in aborted:
            plan.note("a tier wrote for a request that was over")

    plan.world.schedule.at(FIRST_S + 5.0, forget)
    plan.world.on("tier_command", meddle)
    plan.world.on("restored", look)
    return plan.ready("a tier wrote for a request that was over")


def retracted_while_copied(seed: int) -> Scenario:
    """A decode step does not fit: who gives way keeps his pages until a slow tier has copied them, and comes back from
    there."""
    decode = DecodeConfig(num_reserved_decode_tokens=0, chunk_tokens=16)
    tiers = TiersConfig(host_bytes=1, restore_min_pages=1)
    settings = replace(BASE, decode=1, decode_pages=24, decode_config=decode, max_tokens=40, tier_loss=0.0)
    plan = Plan(replace(settings, tiers=tiers, tier_page_s=0.05), seed)
    for index in range(5):
        plan.request(22, max_tokens=36, at_s=FIRST_S + 0.001 * index)
    scenario = plan.ready("pages of a retracted request were copied", "some of them came back")

    def look(world: World, details: object) -> None:
        worker, command = worker_of(details, "decode"), second_of(details)
        if worker is not None and isinstance(command, StorePages):
            last = int(command.page_ids[-1])
            if any(worker.owns(one, last) for one in worker.core.holdings()):  # else it is the tree's
                plan.note("pages of a retracted request were copied")
        if worker is not None and isinstance(worker.core, DecodeCore) and worker.core.restored_tokens:
            plan.note("some of them came back")

    plan.world.on("stored", look)
    plan.world.on("restored", look)
    plan.world.on("command", look)
    return scenario


def out_of_time_while_copied(seed: int) -> Scenario:
    """A tier hangs while it copies the pages of who gave way, and his time is over: he is told so then, and not when
    the tier is done."""
    decode = DecodeConfig(num_reserved_decode_tokens=0, chunk_tokens=16)
    tiers = TiersConfig(host_bytes=1, restore_min_pages=1, restore_deadline_s=20.0)
    settings = replace(BASE, decode=1, decode_pages=24, decode_config=decode, max_tokens=40, tier_loss=0.0)
    plan = Plan(replace(settings, tiers=tiers, request_timeout_s=4.0), seed)
    for index in range(5):
        plan.request(22, max_tokens=36, at_s=FIRST_S + 0.001 * index)

    def is_retracted(worker: WorkerProcess | None, command: object) -> bool:
        if worker is None or not isinstance(command, StorePages):
            return False
        last = int(command.page_ids[-1])  # else it is the tree's
        return any(worker.owns(one, last) for one in worker.core.holdings())

    def hang(world: World, details: object) -> None:
        worker = worker_of(details, "decode")
        if worker is not None and is_retracted(worker, second_of(details)):
            worker.tier.page_s = 5.0

    def look(world: World, details: object) -> None:
        if world.now > FIRST_S + 4.1 and is_retracted(worker_of(details, "decode"), second_of(details)):
            plan.note("pages of a request without time were copied")

    plan.world.on("tier_command", hang)
    plan.world.on("stored", look)
    return plan.ready("pages of a request without time were copied", all_complete=False)
