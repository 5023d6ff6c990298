"""Scenarios about what is kept for later, and who waits for how long: prompts that others have, too, who gives way and
comes back, tiers that take only a part, large requests among small ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from baton.common.config import DecodeConfig, PrefillConfig, TiersConfig
from baton.common.engine.fake_runner import StepCost
from baton.common.ids import HandoffKey, SessionId, Stamp, WorkerId
from baton.common.kv.census import OwnerClass
from baton.common.kv.tiers.api import AbortStore, RestorePages, StorePages
from baton.common.messages import Body, Chunk
from baton.common.units import page_floor
from baton.decode.admission import MAX_BACKFILL
from baton.decode.core import DecodeCore
from baton.deploy.sim.clients import ClientRequest
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, asking, must, second_of, worker_of
from baton.deploy.sim.tier import page_keys_of
from baton.deploy.sim.world import Report, World
from baton.transfer.api import OfferReceived, OpenSink

SESSION = SessionId("s0")
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"window": 11}, {"state": True}, {"full": False, "window": 11})
TIERS = TiersConfig(host_bytes=1, restore_min_pages=1)
CONVERSING = DecodeConfig(num_reserved_decode_tokens=4, chunk_tokens=16, max_sessions=4, session_ttl_s=20.0)


def exchanged_while_computed(seed: int) -> Scenario:
    """A recurrent model's tree gets a prompt only when that is over, as there is no slot for a checkpoint before. A
    longer one that begins like it is being computed: its pages are exchanged for the tree's. None had been lent."""
    prefill = PrefillConfig(chunk_tokens=64, grace_s=0.0)
    settings = replace(BASE, prefill=1, state=True, state_slots=3, pull_lane=1.0, prefill_config=prefill)
    plan = Plan(replace(settings, region_s=0.001, region_pages=8, step=StepCost(0.1)), seed)
    prompt = np.random.default_rng([seed, 1]).integers(0, 258, 109 + seed % 3).astype(np.int32)
    plan.enter(asking("holds a slot", prompt[-3:], tokens=1), FIRST_S - 0.03)
    plan.enter(asking("short", prompt[:40], tokens=1), FIRST_S)
    plan.enter(asking("long", prompt, tokens=1), FIRST_S + 0.02)
    keys, before = dict[str, HandoffKey](), list[int]()

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, OfferReceived):
            keys[event.request_id] = event.key

    def computed(world: World, details: object) -> None:
        worker = worker_of(details, "prefill")
        for holding in () if worker is None else worker.core.holdings():
            if holding.owner_id == str(keys.get("long")):
                before.append(holding.record.cache_protected_len)
                if before[0] == 0 and holding.record.cache_protected_len == 40:
                    plan.note("what was computed twice was exchanged")

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        """They are read slowly."""
        return 1.0 if isinstance(body, Chunk) and body.key != keys.get("short") else 0.0

    plan.world.network.extra_delay_s = delay_s
    plan.world.on("engine_event", look)
    plan.world.on("step_over", computed)
    plan.world.on("command", computed)
    return plan.ready("what was computed twice was exchanged")


def pushed_back_when_planned(seed: int) -> Scenario:
    """Every token takes a page, and a long turn of a session, which nobody pushes back, lacks one. Who gives way has
    been promised his next one: that position was not computed, and nobody finds it, neither in the tree nor below."""
    seed = 2 * seed + 4  # with these lengths what gives way ends within a page
    decode = replace(CONVERSING, num_reserved_decode_tokens=0)
    settings = replace(BASE, decode=1, page_size=1, decode_pages=84, prefill_pages=200, decode_config=decode)
    plan = Plan(replace(settings, tiers=TIERS, tier_loss=0.0, tier_page_s=0.02, step=StepCost(0.02)), seed)
    prompts = [np.random.default_rng([seed, number]).integers(0, 258, 40).astype(np.int32) for number in range(3)]
    first = plan.enter(asking("t0", prompts[0][:30], tokens=6, session=SESSION), FIRST_S)
    first.begins_session = True
    plan.enter(asking("ends", prompts[1][: 8 + (seed + 2) % 3], tokens=14), FIRST_S + 0.5)
    plan.enter(asking("gives way", prompts[2][:10], tokens=30), FIRST_S + 0.5)

    def go_on(_: ClientRequest) -> None:
        said = np.concatenate((first.known, prompts[0][:4]))
        plan.enter(asking("t1", said, tokens=40, session=SESSION), FIRST_S + 0.56)

    def meddle(world: World, details: object) -> None:
        worker, command = worker_of(details, "decode"), second_of(details)
        for holding in () if worker is None else worker.core.holdings():
            own = isinstance(command, StorePages) and worker is not None and worker.owns(holding, command.page_ids[-1])
            if own and not holding.owner_id.startswith("t1"):
                plan.note("somebody gave way to the turn")

    first.then = go_on
    plan.world.on("tier_command", meddle)
    scenario = plan.ready("somebody gave way to the turn")
    plan.world.calm_s = FIRST_S + 2.0
    return scenario


def grows_beside_a_hand_off(seed: int) -> Scenario:
    """A short prompt runs, and needs a page, while a long one beside it holds the rest and is on its way: nobody can
    give way, so it waits. It is promised what it has, and no more for having asked."""
    decode = DecodeConfig(num_reserved_decode_tokens=0, chunk_tokens=16)
    settings = replace(BASE, decode=1, window=5, decode_pages=22, prefill_pages=80, decode_config=decode)
    plan = Plan(replace(settings, region_s=0.1, step=StepCost(0.001)), seed)
    plan.request(18, max_tokens=30)
    plan.request(62 + seed % 3, max_tokens=12, at_s=FIRST_S + 0.001)

    def look(world: World, details: object) -> None:
        worker = worker_of(details, "decode")
        if worker is None or worker.pool.available_pages:
            return
        classes = {one.owner_class for one in worker.core.holdings()}
        if classes == {OwnerClass.INCOMING, OwnerClass.REQUEST}:
            plan.note("no page was left beside a hand-off")

    plan.world.on("land_region", look)
    return plan.ready("no page was left beside a hand-off")


def duplicates_make_room(seed: int) -> Scenario:
    """The same prompt twice, and a third request for which there is no page, on one of the workers: there is when the
    tree has one of the two, and nobody has to end for it."""
    decode_pages, prefill_pages = (29, 90) if seed % 2 else (90, 29)
    settings = replace(BASE, prefill=1, decode=1, pull_lane=1.0, max_context_len=48, region_s=0.001)
    prefill = PrefillConfig(chunk_tokens=128)
    settings = replace(settings, prefill_pages=prefill_pages, decode_pages=decode_pages, step=StepCost(0.05))
    plan = Plan(replace(settings, prefill_config=prefill), seed)
    prompts = [np.random.default_rng([seed, number]).integers(0, 258, 40).astype(np.int32) for number in (8, 9)]
    plan.enter(asking("computed while they come", prompts[0][-3:], tokens=1), FIRST_S - 0.03)
    for number, prompt in enumerate((prompts[0], prompts[0], prompts[1])):
        plan.enter(asking(f"r{number}", prompt), FIRST_S + 0.001 * number)

    def look(world: World, details: object) -> None:
        for worker in world.workers():
            if worker.core.load().queued:
                plan.note("somebody waited for a page")

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        """Slow readers, where it is the prefill worker that is small."""
        return 0.5 if isinstance(body, Chunk) and not seed % 2 else 0.0

    plan.world.network.extra_delay_s = delay_s
    plan.world.on("step_over", look)
    return plan.ready("somebody waited for a page")


def cancel_stops_the_work(seed: int) -> Scenario:
    """A client leaves in the middle of a long answer: nothing is computed or kept for it a moment later."""
    plan = Plan(replace(BASE, decode=1, step=StepCost(0.05)), seed)
    request = plan.request(20, max_tokens=90)
    plan.world.schedule.at(FIRST_S + 1.0, plan.world.cancel, request)

    def look() -> None:
        held = [one.owner_id for worker in plan.world.workers("decode") for one in worker.core.holdings()]
        assert not held, f"{held} is held for nobody"
        plan.note("it had begun" if request.tokens else "it had not")

    plan.world.schedule.at(FIRST_S + 1.5, look)
    scenario = plan.ready("it had begun")
    plan.world.calm_s = FIRST_S + 2.0
    return scenario


def asked_again(seed: int) -> Scenario:
    """A prompt comes again, and nothing was evicted: all whole pages but the one with its last token are found, on
    one of the workers; those of the answer, too, where a model's layers all attend to everything."""
    layout: Mapping[str, Any] = LAYOUTS[seed % len(LAYOUTS)]
    plan = Plan(replace(BASE, decode=1, prefill_pages=96, decode_pages=96, **layout), seed)
    prompt = np.random.default_rng([seed, 7]).integers(0, 258, 33 + seed % 7).astype(np.int32)
    first = plan.enter(asking("first", prompt, tokens=14), FIRST_S)
    plan.enter(asking("again", prompt, tokens=2), FIRST_S + 1.5)

    def go_on(_: ClientRequest) -> None:
        plan.enter(asking("next", first.known, tokens=2), FIRST_S + 3.0)

    first.then = go_on
    scenario = plan.ready()
    plan.world.calm_s = FIRST_S + 4.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(len(plan.requests) == 3, "there was no next turn")
        for request in plan.requests[1 : 3 if not layout else 2]:
            assert request.ended is not None
            timeline = request.ended.timeline
            assert timeline is not None
            found = timeline.cached_tokens + timeline.prefill_cached_tokens
            whole = page_floor(len(request.prompt) - 1, BASE.page_size)
            assert found >= whole, f"{found} tokens of {request.request_id} were found, {whole} were there"

    return Scenario(plan.world, reached)


def cheapest_gives_way(seed: int) -> Scenario:
    """Pages run out: who has the least to bring back gives way, and comes back before those who waited meanwhile."""
    decode = DecodeConfig(num_reserved_decode_tokens=0, chunk_tokens=16)
    settings = replace(BASE, decode=1, decode_pages=27, prefix_cache="chunk", decode_config=decode)
    plan = Plan(replace(settings, region_s=0.01, step=StepCost(0.01)), seed)
    cheap = plan.request(9 + seed % 3, max_tokens=40)
    for number in (1, 2):
        plan.request(34, max_tokens=24, at_s=FIRST_S + 0.001 * number)
    waits = plan.request(9, max_tokens=4, at_s=FIRST_S + 0.125)
    let_in: list[str] = []

    def look(world: World, details: object) -> None:
        worker, command = worker_of(details, "decode"), second_of(details)
        if isinstance(command, OpenSink) and worker is not None:
            let_in.append(command.request_id)
            if command.request_id == waits.request_id and plan.seen:
                plan.note("one was let in when others had given way")

    def computed(world: World, details: object) -> None:
        worker = worker_of(details, "decode")
        if worker is not None and isinstance(worker.core, DecodeCore) and worker.core.retractions:
            plan.note("somebody gave way")

    plan.world.on("step_over", computed)
    plan.world.on("command", look)
    scenario = plan.ready()
    plan.world.calm_s = FIRST_S + 2.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        again = [name for place, name in enumerate(let_in) if name in let_in[:place]]
        must(again, "nobody gave way, or had anything left to bring back")
        assert again[0] == cheap.request_id, f"let in: {let_in}; {cheap.request_id} was the cheapest"
        if "one was let in when others had given way" not in plan.seen:
            return  # it was quicker
        back = len(let_in) - 1 - let_in[::-1].index(cheap.request_id)
        assert back < let_in.index(waits.request_id), f"let in: {let_in}; {waits.request_id} came first"

    return Scenario(plan.world, reached)


def tier_too_slow(seed: int) -> Scenario:
    """A tier takes long for each page: a restore is cut short, and so is the copy of one who gives way."""
    deadline_s = 0.3
    tiers = replace(TIERS, restore_deadline_s=deadline_s)
    decode = DecodeConfig(num_reserved_decode_tokens=0, chunk_tokens=16)
    settings = replace(BASE, decode=1, decode_pages=24, decode_config=decode, tiers=tiers, tier_loss=0.0)
    plan = Plan(replace(settings, tier_page_s=0.002), seed)
    plan.request(60, max_tokens=2, shared=60)
    plan.request(61, max_tokens=2, at_s=FIRST_S + 3.0, shared=60)
    for index in range(3):
        plan.request(22, max_tokens=36, at_s=FIRST_S + 14.0 + 0.001 * index)

    def slow_down() -> None:
        for worker in plan.world.workers():
            worker.pool.clear_cache()
            worker.tier.page_s = 1.0

    plan.world.schedule.at(FIRST_S + 2.8, slow_down)
    scenario = plan.ready()
    plan.world.calm_s = FIRST_S + 16.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        timelines = [one.ended.timeline for one in plan.requests if one.ended is not None]
        restores = [(one.restore_s, 1 + one.retractions) for one in timelines if one is not None]
        must(restores[1][0] > 0, "nothing was restored")
        late = [restore_s for restore_s, times in restores if restore_s > times * (deadline_s + 1.1)]
        assert not late, f"restores took {late} s, where {deadline_s} s and a page were allowed"

    return Scenario(plan.world, reached)


def restored_to_the_last_page(seed: int) -> Scenario:
    """All pages of a prompt are in a tier: its last token is computed for its logits, and no page is asked for that
    would be of no use. Another one's pages were taken in part: they are stored when that prompt comes again."""
    settings = replace(BASE, decode=1, decode_pages=60, tiers=TIERS, tier_loss=0.0, tier_page_s=0.01)
    plan = Plan(settings, seed)
    rng = np.random.default_rng([seed, 4])
    prompts = [rng.integers(0, 258, 24).astype(np.int32) for _ in range(2)]
    for number, (prompt, at_s) in enumerate(zip((*prompts, *prompts), (0.0, 1.0, 3.0, 2.0), strict=True)):
        plan.enter(asking(f"r{number}", prompt, tokens=1), FIRST_S + at_s)
    cut: list[StorePages] = []

    def meddle(world: World, details: object) -> None:
        worker, command = worker_of(details, "decode"), second_of(details)
        if worker is None:
            return
        if isinstance(command, RestorePages):
            plan.note("all of a prompt was below")
        if isinstance(command, StorePages) and not cut and world.now > FIRST_S + 1.0:
            cut.append(command)
            world.schedule.after(0.015, lambda: worker.tier.take(AbortStore(command.job)))

    def forget() -> None:
        for worker in plan.world.workers():
            worker.pool.clear_cache()

    plan.world.schedule.at(FIRST_S + 2.8, forget)
    plan.world.on("tier_command", meddle)
    scenario = plan.ready("all of a prompt was below")
    plan.world.calm_s = FIRST_S + 5.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(cut, "no store was cut short")
        keys = page_keys_of(settings)
        assert keys is not None
        missing = [key.hex() for key in keys.of(prompts[1]) if plan.world.tier_store.get(key) is None]
        assert not missing, f"{len(missing)} pages were not stored when they came again"

    return Scenario(plan.world, reached)


def nobody_starves(seed: int) -> Scenario:
    """A large request waits for room while small ones come without end: some overtake it, and then no more."""
    decode = DecodeConfig(num_reserved_decode_tokens=4, chunk_tokens=16, max_queued_requests=200)
    settings = replace(BASE, decode=1, decode_pages=26, rows=16, max_tokens=60, decode_config=decode)
    plan = Plan(replace(settings, step=StepCost(0.01)), seed)
    plan.request(20, max_tokens=40)
    large = plan.request(80, max_tokens=6, at_s=FIRST_S + 0.1)
    for index in range(100):
        plan.request(4, max_tokens=16, at_s=FIRST_S + 0.15 + 0.04 * index)
    let_in: list[str] = []

    def look(world: World, details: object) -> None:
        command = second_of(details)
        if isinstance(command, OpenSink) and command.request_id not in let_in:
            let_in.append(command.request_id)

    plan.world.on("command", look)
    scenario = plan.ready()
    plan.world.calm_s = FIRST_S + 5.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        overtook = let_in.index(large.request_id) - 1  # the first one was there before
        must(overtook > 1, "nobody overtook it")
        assert overtook <= MAX_BACKFILL, f"{overtook} overtook it"

    return Scenario(plan.world, reached)


SCENARIOS = (
    exchanged_while_computed,
    pushed_back_when_planned,
    grows_beside_a_hand_off,
    duplicates_make_room,
    cancel_stops_the_work,
    asked_again,
    cheapest_gives_way,
    tier_too_slow,
    restored_to_the_last_page,
    nobody_starves,
)
