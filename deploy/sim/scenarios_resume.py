"""Scenarios about what is not done twice: sinks that die in the middle of a prompt, conversations that go on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from baton.common.config import DecodeConfig, PrefillConfig
from baton.common.engine.fake_runner import StepCost, fake_answer
from baton.common.ids import HandoffKey, RequestId, SessionId
from baton.common.messages import SamplingParams
from baton.deploy.sim.clients import ClientRequest
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, must, second_of, worker_of
from baton.deploy.sim.settings import LinkFaults, WorldSettings
from baton.deploy.sim.world import Report, World
from baton.prefill.core import PrefillCore
from baton.transfer.api import OfferReceived, SinkCommitted, SourceAborted
from baton.transfer.session.effects import Landed, LandRegion

CHUNK = 4
VICTIMS = 3
TURNS = 5
CONVERSING = replace(
    BASE,
    pull_lane=0.5,
    prefill_pages=128,
    decode_pages=128,
    max_context_len=400,
    prefill_config=PrefillConfig(chunk_tokens=16, kv_return="on"),
)


def sink_crash_mid_prompt(seed: int) -> Scenario:
    """Decode workers die, one after the other, each in the middle of a prompt, and nothing is shared between requests:
    the next one is given what was computed, and no token is computed twice (but where the next offer overtook the news
    of the death, and was begun by then)."""
    prefill = PrefillConfig(chunk_tokens=CHUNK, grace_s=5.0)
    settings = replace(BASE, pull_lane=0.5, prefill_config=prefill, step=StepCost(0.02), prefix_cache="chunk")
    plan = Plan(settings, seed)
    for index in range(VICTIMS):
        plan.request(60, at_s=FIRST_S + 4.0 * index)
    struck: set[str] = set()
    offered: dict[str, set[HandoffKey]] = {}
    over: set[HandoffKey] = set()
    overtook: set[str] = set()

    def strike(world: World, details: object) -> None:
        worker, event = worker_of(details, "decode"), second_of(details)
        if worker is None or not isinstance(event, Landed) or event.seq != 2:
            return
        request = worker.owners[event.key]
        if request not in struck:
            struck.add(request)
            world.schedule.after(0.0, lambda: world.crash(worker.stamp.worker))

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, SourceAborted):
            over.add(event.key)
        if isinstance(event, OfferReceived):
            before = offered.setdefault(event.request_id, set())
            if not before <= over:
                overtook.add(event.request_id)
            before.add(event.key)

    plan.world.on("landing_ended", strike)
    plan.world.on("engine_event", look)
    scenario = plan.ready()
    plan.world.calm_s = FIRST_S + 4.0 * VICTIMS

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(len(struck) == VICTIMS and all(len(keys) > 1 for keys in offered.values()), "a sink outlived its prompt")
        (core,) = [worker.core for worker in plan.world.workers("prefill")]
        assert isinstance(core, PrefillCore)
        twice = core.computed_tokens - sum(len(one.prompt) for one in plan.requests)
        most = sum(len(one.prompt) for one in plan.requests if one.request_id in overtook)
        assert twice <= most, f"{twice} tokens were computed twice, not {most} at most"

    return Scenario(plan.world, reached)


def conversation_comes_back(seed: int) -> Scenario:
    """A conversation of five turns: what the decode worker has of it goes back to the prefill worker, which computes
    what nobody has, and nothing else."""
    plan = _conversation(CONVERSING, seed)
    scenario = plan.ready("a return ended well")
    offered = 0

    def look(world: World, details: object) -> None:
        nonlocal offered
        event = second_of(details)
        if isinstance(event, SinkCommitted) and event.key.attempt < 0:
            plan.note("a return ended well")
        if isinstance(event, OfferReceived) and event.key.attempt >= 0:
            offered += len(event.tokens) - event.start

    plan.world.on("engine_event", look)
    plan.world.calm_s = FIRST_S + 3.0 * TURNS

    def reached(report: Report) -> None:
        scenario.reached(report)
        (core,) = [worker.core for worker in plan.world.workers("prefill")]
        assert isinstance(core, PrefillCore)
        assert core.computed_tokens == offered, f"{core.computed_tokens} tokens were computed for {offered}"

    return Scenario(plan.world, reached)


def crash_mid_return(seed: int) -> Scenario:
    """One of the two workers dies, or hangs, in the middle of a return: the answer is right, and nothing is left."""
    plan = _conversation(replace(CONVERSING, region_s=0.1), seed)
    how = seed % 4

    def strike(details: object) -> None:
        worker, effect = worker_of(details, "prefill"), second_of(details)
        assert worker is not None
        assert isinstance(effect, LandRegion)
        plan.note("in the middle of a return")
        victim = worker.stamp.worker if how % 2 else effect.peer.worker
        if how < 2:
            plan.world.crash(victim)
        else:
            plan.world.pause(victim, 30.0)

    def returns(details: object) -> bool:
        effect = second_of(details)
        return isinstance(effect, LandRegion) and effect.key.attempt < 0

    plan.once("land_region", returns, strike)
    scenario = plan.ready("in the middle of a return")
    plan.world.calm_s = FIRST_S + 3.0 * TURNS
    return scenario


def returns_under_churn(seed: int) -> Scenario:
    """Returns on links that lose, repeat, reorder and damage, while clients leave in the middle of them and workers
    die."""
    links = LinkFaults(loss=0.05, duplicate=0.05, reorder=0.1, region_damaged=0.05, region_lost=0.03)
    plan = _conversation(replace(CONVERSING, links=links, region_s=0.1, thread_hop_s=0.05), seed)
    for salt in range(1, 5):
        plan.conversation(plan.turns(TURNS, first=70 + salt, more=30, salt=salt), every_s=2.5)
    rng = plan.world.rng
    plan.world.faulty = True
    for index in range(3):
        victim = rng.choice([spec.worker for spec in plan.world.specs if spec.role != "gateway"])
        plan.world.schedule.at(FIRST_S + 3.0 + 3.0 * index, partial(plan.world.crash, victim, index > 0))

    def meddle(world: World, details: object) -> None:
        worker, effect = worker_of(details, "prefill"), second_of(details)
        if worker is None or not isinstance(effect, LandRegion) or effect.key.attempt >= 0:
            return
        plan.note("a return was under way")
        if rng.random() < 0.7:
            request = world.clients.requests[RequestId(worker.owners[effect.key])]
            world.schedule.after(rng.random() * 0.1, partial(world.cancel, request))

    plan.world.on("land_region", meddle)
    scenario = plan.ready("a return was under way")
    plan.world.calm_s = FIRST_S + 3.0 * TURNS
    return scenario


def session_that_was_edited(seed: int) -> Scenario:
    """The next turn of a session leaves what was said in the middle of the answer: what both have is used, and not a
    token of what differs."""
    decode = DecodeConfig(num_reserved_decode_tokens=4, chunk_tokens=16, max_sessions=4, session_ttl_s=2.0)
    plan = Plan(replace(BASE, decode=1, decode_pages=64, decode_config=decode), seed)
    session = SessionId("s0")
    (prompt,) = plan.turns(1, first=21 + seed % 4, more=0)
    sampling = SamplingParams(temperature=0.7, seed=1, max_tokens=12)
    said = fake_answer(prompt, sampling, plan.world.settings.max_context_len).tokens
    changed = (said[7] + 1) % 258
    edited = np.concatenate([prompt, said[:7], [changed, *said[8:]], [5, 6, 7]]).astype(np.int32)
    for turn, asked in enumerate((prompt, edited)):
        request = ClientRequest(RequestId(f"t{turn}"), asked, sampling, None, session, begins_session=not turn)
        plan.enter(request, FIRST_S + 1.0 * turn)
    scenario = plan.ready()

    def reached(report: Report) -> None:
        scenario.reached(report)
        timeline = plan.requests[1].ended.timeline if plan.requests[1].ended is not None else None
        most = len(prompt) + 7
        must(timeline is not None and timeline.cached_tokens, "the session was not gone on with")
        assert timeline is not None
        assert timeline.cached_tokens <= most, (
            f"{timeline.cached_tokens} tokens of the session, where {most} are shared"
        )

    return Scenario(plan.world, reached)


def _conversation(settings: WorldSettings, seed: int) -> Plan:
    plan = Plan(settings, seed)
    plan.conversation(plan.turns(TURNS, first=80, more=30), every_s=3.0)
    return plan
