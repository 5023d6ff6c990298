"""Scenarios about what is scarce and what is used again: staging, pools, windows, and aborts that come at the worst
moment."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from baton.common.config import DecodeConfig, PrefillConfig, TiersConfig, TransferConfig
from baton.common.engine.fake_runner import StepCost
from baton.common.ids import HandoffKey, RequestId
from baton.common.kv.tiers.api import StorePages
from baton.common.messages import Output
from baton.decode.core import DecodeCore
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, second_of, worker_of
from baton.deploy.sim.world import World
from baton.transfer.api import AbortSink, OpenSink, ShipRegion, SinkCommitted, SinkFailed
from baton.transfer.session.effects import LandRegion


def abort_at_finish(seed: int) -> Scenario:
    """Aborts cross the commit of a hand-off on its way to the engine, and the last output on its way to the gateway."""
    plan = Plan(replace(BASE, decode=1, thread_hop_s=0.03, pull_lane=0.5), seed)
    early = [plan.request(20, at_s=FIRST_S + 0.3 * index) for index in range(10)]
    late = [plan.request(12, max_tokens=4, at_s=FIRST_S + 0.3 * index) for index in range(4)]
    landing, committed = {one.request_id for one in early}, set[HandoffKey]()

    def meddle(world: World, details: object) -> None:
        worker, effect = worker_of(details, "decode"), second_of(details)
        if worker is not None and isinstance(effect, LandRegion) and effect.chunk.seq == 4:  # the last one
            owner = RequestId(worker.owners[effect.key])
            if owner in landing:
                world.schedule.after(world.rng.random() * 0.03, partial(world.cancel, world.clients.requests[owner]))

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, SinkCommitted):
            committed.add(event.key)
        if isinstance(event, AbortSink) and event.key in committed:
            plan.note("an abort crossed the commit")

    def sent(world: World, details: object) -> None:
        assert isinstance(details, tuple)
        body = details[2]
        if isinstance(body, Output) and body.finish_reason and body.request_id in {one.request_id for one in late}:
            plan.note("cancelled when the end was on its way")
            world.schedule.after(0.0, partial(world.cancel, world.clients.requests[body.request_id]))

    plan.world.on("bytes_moving", meddle)
    plan.world.on("engine_event", look)
    plan.world.on("command", look)
    plan.world.on("sent", sent)
    scenario = plan.ready("an abort crossed the commit", "cancelled when the end was on its way")
    plan.world.calm_s = FIRST_S + 4.0
    return scenario


def index_reuse_storm(seed: int) -> Scenario:
    """Staging slots go from one hand-off to the next while bytes for the one before are still on their way."""
    transfer = TransferConfig(credit_regions=2, handoff_ttl_s=20.0)
    plan = Plan(replace(BASE, decode=1, staging_slots=2, region_s=0.05, transfer=transfer), seed)
    victims = {plan.request(30, at_s=FIRST_S + 0.1 * index).request_id for index in range(8)}
    for index in range(4):
        plan.request(26, at_s=FIRST_S + 0.2 * index)

    def meddle(world: World, details: object) -> None:
        worker, effect = worker_of(details, "decode"), second_of(details)
        if worker is not None and isinstance(effect, LandRegion):
            owner = RequestId(worker.owners[effect.key])
            if owner in victims:
                world.schedule.after(0.01, partial(world.cancel, world.clients.requests[owner]))

    def dropped(world: World, details: object) -> None:
        worker = worker_of(details, "decode")
        if worker is not None and worker.endpoint.live_sinks:
            plan.note("bytes came late while their slot was another hand-off's")

    plan.world.on("land_region", meddle)
    plan.world.on("late_region_dropped", dropped)
    return plan.ready("bytes came late while their slot was another hand-off's")


def prefix_hit_changes_chunk_plan(seed: int) -> Scenario:
    """The decode worker learns a prompt's beginning from one hand-off while another one brings it, too: what was
    planned stays planned, and the duplicates are given back."""
    plan = Plan(replace(BASE, decode=1, decode_pages=48), seed)
    for index in range(3):
        plan.request(48, shared=40, at_s=FIRST_S + 0.02 * index)
    starts: dict[HandoffKey, OpenSink] = {}

    def look(world: World, details: object) -> None:
        worker, event = worker_of(details, "decode"), second_of(details)
        if isinstance(event, OpenSink):
            starts[event.key] = event
        if worker is not None and isinstance(event, SinkCommitted):
            opened = starts[event.key]
            if worker.pool.match_len(opened.tokens) > opened.start:
                plan.note("the prefix was there by the time its bytes were")

    plan.world.on("command", look)
    plan.world.on("engine_event", look)
    return plan.ready("the prefix was there by the time its bytes were")


def buffer_full_mid_prefill(seed: int) -> Scenario:
    """Both staging slots are taken in the middle of long prompts, the pool has no page for the next one, and whoever
    waits holds nothing that another one waits for."""
    settings = replace(BASE, prefill=2, decode=1, staging_slots=2, decode_pages=52, region_s=0.05)
    plan = Plan(settings, seed)
    for index in range(7):
        plan.request(60, max_tokens=4, at_s=FIRST_S + 0.001 * index)

    def look(world: World, details: object) -> None:
        worker, effect = worker_of(details, "decode"), second_of(details)
        if worker is None or not isinstance(effect, LandRegion) or effect.chunk.seq == 0:
            return
        if worker.data.waiting and worker.core.load().queued:
            plan.note("slots and pages ran out in the middle of a prompt")

    plan.world.on("land_region", look)
    return plan.ready("slots and pages ran out in the middle of a prompt")


def retracted_then_aborted(seed: int) -> Scenario:
    """Who was pushed back leaves while his pages are copied to a tier: they come back, and the copy is nobody's."""
    decode = DecodeConfig(num_reserved_decode_tokens=0, chunk_tokens=16)
    tiers = TiersConfig(host_bytes=1, restore_min_pages=1)
    settings = replace(BASE, decode=1, decode_pages=24, decode_config=decode, max_tokens=40, tier_loss=0.0)
    plan = Plan(replace(settings, tiers=tiers, tier_page_s=0.05), seed)
    for index in range(5):
        plan.request(22, max_tokens=36, at_s=FIRST_S + 0.001 * index)

    def meddle(world: World, details: object) -> None:
        worker, command = worker_of(details, "decode"), second_of(details)
        if worker is None or not isinstance(command, StorePages):
            return
        for holding in worker.core.holdings():
            if worker.owns(holding, int(command.page_ids[-1])):
                plan.note("left while it was pushed back")
                request = world.clients.requests[RequestId(holding.owner_id.split("#")[0])]
                world.schedule.after(0.0, partial(world.cancel, request))

    plan.world.on("tier_command", meddle)
    return plan.ready("left while it was pushed back")


def swa_double_free_with_drafts(seed: int) -> Scenario:
    """Requests end, are aborted and pushed back after their window has left pages behind, with room promised ahead."""
    decode = DecodeConfig(num_reserved_decode_tokens=0, chunk_tokens=16)
    settings = replace(BASE, decode=1, window=5, decode_pages=22, swa_pages=22, decode_config=decode, max_tokens=40)
    plan = Plan(replace(settings, step=StepCost(0.01)), seed)
    requests = [plan.request(20, max_tokens=30, at_s=FIRST_S + 0.001 * index) for index in range(5)]

    def meddle(world: World) -> None:
        (worker,) = world.workers("decode")
        for holding in worker.core.holdings():
            record = holding.record
            if record.swa_evicted_seqlen > record.cache_protected_len:
                plan.note("a window had moved on")
                victim = world.clients.requests[RequestId(holding.owner_id.split("#")[0])]
                if victim in requests[::2]:
                    plan.note("and its request was aborted")
                    world.cancel(victim)

    def retracted(world: World, details: object) -> None:
        worker = worker_of(details, "decode")
        if worker is not None and isinstance(worker.core, DecodeCore) and worker.core.retractions:
            plan.note("somebody was pushed back")

    for number in range(40):
        plan.world.schedule.at(FIRST_S + 0.2 + 0.05 * number, meddle, plan.world)
    plan.world.on("command", retracted)
    return plan.ready("a window had moved on", "and its request was aborted", "somebody was pushed back")


def shipped_by_layers(seed: int) -> Scenario:
    """The same prompt three times in one step, each leaving by layers while it is computed: what is read stays where it
    is, though the tree takes only one of them; and no layer leaves before it is there."""
    prefill = PrefillConfig(chunk_tokens=128, layer_groups=4)
    settings = replace(BASE, prefill=1, layers=4, bytes_per_token=32, pull_lane=1.0, region_s=0.1, step=StepCost(1.0))
    plan = Plan(replace(settings, prefill_config=prefill), seed)
    for salt in range(3):
        (prompt,) = plan.turns(1, first=30, more=0, salt=salt)
        plan.conversation([prompt] * 3, every_s=0.0)
    parts: set[HandoffKey] = set()

    def look(world: World, details: object) -> None:
        command = second_of(details)
        if isinstance(command, ShipRegion) and command.parts > 1:
            parts.add(command.key)
        if len(parts) > 2:
            plan.note("several left by layers at a time")

    plan.world.on("command", look)
    return plan.ready("several left by layers at a time")


def direct_lane_cut_mid_region(seed: int) -> Scenario:
    """A lane from page to page has half of a region in its pages when the hand-off is given up: nothing more is written
    once others have them."""
    settings = replace(BASE, decode=1, decode_pages=16, pull_lane=0.0, direct_lane=1.0, region_pages=4, region_s=0.2)
    plan = Plan(replace(settings, thread_hop_s=0.01), seed)
    victims = {plan.request(30, at_s=FIRST_S + 0.3 * index).request_id for index in range(6)}
    for index in range(8):
        plan.request(24, at_s=FIRST_S + 0.2 * index)
    failed: set[HandoffKey] = set()

    def meddle(world: World, details: object) -> None:
        worker, effect = worker_of(details, "decode"), second_of(details)
        if worker is not None and isinstance(effect, LandRegion):
            owner = RequestId(worker.owners[effect.key])
            if owner in victims:
                world.schedule.after(0.0, partial(world.cancel, world.clients.requests[owner]))

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, SinkFailed):
            failed.add(event.key)

    def dropped(world: World, details: object) -> None:
        if failed and worker_of(details, "decode") is not None:
            plan.note("the rest of a region came after the fence")

    plan.world.on("bytes_moving", meddle)
    plan.world.on("engine_event", look)
    plan.world.on("late_region_dropped", dropped)
    return plan.ready("the rest of a region came after the fence")


SCENARIOS = (
    abort_at_finish,
    index_reuse_storm,
    prefix_hit_changes_chunk_plan,
    buffer_full_mid_prefill,
    retracted_then_aborted,
    swa_double_free_with_drafts,
    shipped_by_layers,
    direct_lane_cut_mid_region,
)
