"""Scenarios about what is kept for later: prompts that others have, too, conversations that turn back, tiers that take
only a part, and who waits for how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from baton.common.config import DecodeConfig, PrefillConfig, TiersConfig
from baton.common.engine.fake_runner import StepCost
from baton.common.ids import NO_SESSION, HandoffKey, RequestId, SessionId, Stamp, WorkerId
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.prefix.interface import I32
from baton.common.kv.tiers.api import AbortStore, RestorePages, StorePages
from baton.common.messages import Body, Chunk, SamplingParams
from baton.decode.admission import MAX_BACKFILL
from baton.deploy.sim.clients import ClientRequest
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, must, second_of, worker_of
from baton.deploy.sim.tier import page_keys_of
from baton.deploy.sim.worker import WorkerProcess
from baton.deploy.sim.world import Report, World
from baton.transfer.api import OfferReceived, OpenSink

SESSION = SessionId("s0")
UNBROKEN_TURNS = 3
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
    plan.enter(_request("holds a slot", prompt[-3:], tokens=1), FIRST_S - 0.03)
    plan.enter(_request("short", prompt[:40], tokens=1), FIRST_S)
    plan.enter(_request("long", prompt, tokens=1), FIRST_S + 0.02)
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
    decode = replace(CONVERSING, num_reserved_decode_tokens=0)
    settings = replace(BASE, decode=1, page_size=1, decode_pages=84, prefill_pages=200, decode_config=decode)
    plan = Plan(replace(settings, tiers=TIERS, tier_loss=0.0, tier_page_s=0.02, step=StepCost(0.02)), seed)
    prompts = [np.random.default_rng([seed, number]).integers(0, 258, 40).astype(np.int32) for number in range(3)]
    first = plan.enter(_request("t0", prompts[0][:30], tokens=6, session=SESSION), FIRST_S)
    first.begins_session = True
    plan.enter(_request("ends", prompts[1][: 8 + (seed + 2) % 3], tokens=14), FIRST_S + 0.5)
    plan.enter(_request("gives way", prompts[2][:10], tokens=30), FIRST_S + 0.5)

    def go_on(_: ClientRequest) -> None:
        said = np.concatenate((first.known, prompts[0][:4]))
        plan.enter(_request("t1", said, tokens=40, session=SESSION), FIRST_S + 0.6)

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


def session_that_turns_back(seed: int) -> Scenario:
    """Turns of a session begin anew further back, with less than it holds; then before all that it shares with others,
    and at last with something else. As long as it goes on, it shares what its first turn shared."""
    layout: Mapping[str, Any] = LAYOUTS[seed % len(LAYOUTS)]
    plan = Plan(replace(BASE, decode=1, decode_pages=64, decode_config=CONVERSING, **layout), seed)
    rng = np.random.default_rng([seed, 2])
    first, more, other = (rng.integers(0, 258, count).astype(np.int32) for count in (26 + seed % 5, 9, 12))
    turns: list[Callable[[], I32]] = [
        lambda: first,
        lambda: np.concatenate((plan.requests[0].known, more)),
        lambda: plan.requests[0].known[: len(first) + 3],
        lambda: first[:-9],
        lambda: np.concatenate((plan.requests[3].known, more)),
        lambda: other,
    ]
    shared: list[int] = []

    def go_on(_: ClientRequest | None = None) -> None:
        turn = len(plan.requests)
        if turn:
            plan.world.schedule.after(0.2, look)
        if turn < len(turns):
            request = _request(f"t{turn}", turns[turn](), session=SESSION)
            request.begins_session, request.then = turn == 0, go_on
            plan.enter(request, max(FIRST_S, plan.world.now + 0.3))

    def look() -> None:
        """Between two turns."""
        (kept,) = [one for worker in plan.world.workers("decode") for one in _sessions(worker)]
        shared.append(kept.record.cache_protected_len)
        same = shared[:UNBROKEN_TURNS]
        assert len(set(same)) == 1, f"later turns share {same[1:]} tokens, where the first one shared {same[0]}"

    go_on()
    scenario = plan.ready()
    plan.world.calm_s = FIRST_S + 6.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(len(shared) == len(turns), "it was not kept after each turn")

    return Scenario(plan.world, reached)


def session_that_moves(seed: int) -> Scenario:
    """A gateway does not hear a conversation's worker for a while, so the next turn goes to another one: the first
    one's slot is given up as soon as that has answered, and not when its time is over."""
    plan = Plan(replace(BASE, decode=2, decode_config=CONVERSING, step=StepCost(0.05)), seed)
    rng = np.random.default_rng([seed, 3])
    prompt = rng.integers(0, 258, 20).astype(np.int32)
    first = plan.enter(_request("t0", prompt, session=SESSION), FIRST_S)
    first.begins_session = True
    gateway = WorkerId("gateway-0")

    def go_on(_: ClientRequest) -> None:
        kept = [worker for worker in plan.world.workers("decode") if _sessions(worker)]
        if kept:
            plan.note("the first worker kept it")
            plan.world.partition(gateway, kept[0].stamp.worker, 5.0, True)
        said = np.concatenate((first.known, prompt[:5]))
        second = _request("t1", said, 90, SESSION)
        second.then = ended
        plan.enter(second, plan.world.now + 3.8)

    def ended(request: ClientRequest) -> None:
        plan.world.schedule.after(1.0, look)

    def look() -> None:
        kept = [worker.stamp.worker for worker in plan.world.workers("decode") if _sessions(worker)]
        assert len(kept) < 2, f"the session lies on {kept}"
        if kept:
            plan.note("it lies on one")

    first.then = go_on
    scenario = plan.ready("the first worker kept it", "it lies on one")
    plan.world.calm_s = FIRST_S + 12.0
    return scenario


def restored_to_the_last_page(seed: int) -> Scenario:
    """All pages of a prompt are in a tier: its last token is computed for its logits, and no page is asked for that
    would be of no use. Another one's pages were taken in part: they are stored when that prompt comes again."""
    settings = replace(BASE, decode=1, decode_pages=60, tiers=TIERS, tier_loss=0.0, tier_page_s=0.01)
    plan = Plan(settings, seed)
    rng = np.random.default_rng([seed, 4])
    prompts = [rng.integers(0, 258, 24).astype(np.int32) for _ in range(2)]
    for number, (prompt, at_s) in enumerate(zip((*prompts, *prompts), (0.0, 1.0, 3.0, 2.0), strict=True)):
        plan.enter(_request(f"r{number}", prompt, tokens=1), FIRST_S + at_s)
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


def _request(name: str, prompt: I32, tokens: int = 8, session: SessionId = NO_SESSION) -> ClientRequest:
    sampling = SamplingParams(temperature=0.7, seed=len(prompt), max_tokens=tokens)
    return ClientRequest(RequestId(name), prompt, sampling, None, session)


def _sessions(worker: WorkerProcess) -> list[Holding]:
    return [one for one in worker.core.holdings() if one.owner_class is OwnerClass.SESSION]


SCENARIOS = (
    exchanged_while_computed,
    pushed_back_when_planned,
    grows_beside_a_hand_off,
    session_that_turns_back,
    session_that_moves,
    restored_to_the_last_page,
    nobody_starves,
)
