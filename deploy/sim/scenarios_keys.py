"""Scenarios about several API keys whose requests wait at one gateway. `watch_admission` judges every step of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from baton.common.config import DecodeConfig
from baton.common.errors import ErrorCode
from baton.common.ids import RequestId
from baton.common.messages import SamplingParams
from baton.deploy.admission_queue import Tenant
from baton.deploy.sim.clients import ClientRequest
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario
from baton.deploy.sim.world import Report, World

LITTLE_ROOM = replace(BASE, decode=1, rows=2, dispatch_ahead=1, decode_config=DecodeConfig(chunk_tokens=16))
EVERY_S = 0.05


def keys_share_by_weight(seed: int) -> Scenario:
    """One key asks for far more than can be served; another one, of more weight, joins it, and a third one comes when
    both have been served for long. Each has its share while it waits; nobody has saved up anything."""
    plan = Plan(LITTLE_ROOM, seed)
    flood, heavy, late = (
        Tenant(name=name, weight=weight) for name, weight in (("flood", 1), ("heavy", 4), ("late", 1))
    )
    for index in range(60):
        _ask(plan, flood, 30, 2, FIRST_S + 0.001 * index)
    for index in range(30):
        _ask(plan, heavy, 30, 2, FIRST_S + 0.1 + 0.001 * index)
    for index in range(15):
        _ask(plan, late, 30, 2, FIRST_S + 1.0 + 0.001 * index)

    def look() -> None:
        waiting = _waiting(plan)
        if {"flood", "heavy"} <= waiting:
            plan.note("two keys wait")
        if {"flood", "late"} <= waiting and plan.world.now > FIRST_S + 1.0:
            plan.note("one waits that came late")

    _look_often(plan, look, 60)
    return plan.ready("two keys wait", "one waits that came late")


def answers_are_work(seed: int) -> Scenario:
    """One key has short prompts and long answers, another one long prompts and short answers."""
    plan = Plan(LITTLE_ROOM, seed)
    for index in range(40):
        _ask(plan, Tenant(name="talks"), 2, 12, FIRST_S + 0.001 * index)
        _ask(plan, Tenant(name="reads"), 26, 1, FIRST_S + 0.001 * index)

    def look() -> None:
        if len(_waiting(plan)) == 2:
            plan.note("both wait")

    _look_often(plan, look, 60)
    return plan.ready("both wait")


def full_gateway_gives_way(seed: int) -> Scenario:
    """A key has taken all places of a gateway when another one comes: who waits last of the first one gives way."""
    plan = Plan(replace(LITTLE_ROOM, max_inflight_requests=10), seed)
    for index in range(16):
        _ask(plan, Tenant(name="first"), 30, 6, FIRST_S + 0.001 * index)
    second = [_ask(plan, Tenant(name="second"), 30, 6, FIRST_S + 0.05 + 0.001 * index) for index in range(3)]
    scenario = plan.ready(all_complete=False)

    def reached(report: Report) -> None:
        scenario.reached(report)
        assert all(one.outcome in ("length", "stop") for one in second), [one.ended for one in second]
        refused = [one for one in plan.requests if one.outcome == ErrorCode.OVERLOADED.value]
        assert len(refused) == 9, [one.request_id for one in refused]

    return Scenario(plan.world, reached)


def _ask(plan: Plan, tenant: Tenant, length: int, max_tokens: int, at_s: float) -> ClientRequest:
    number = len(plan.requests)
    prompt = np.random.default_rng([plan.world.seed, number]).integers(0, 258, length).astype(np.int32)
    sampling = SamplingParams(temperature=0.7, seed=number, max_tokens=max_tokens)
    return plan.enter(ClientRequest(RequestId(f"r{number}"), prompt, sampling, None, tenant=tenant), at_s)


def _waiting(plan: Plan) -> set[str]:
    """Keys that have somebody who has asked and is nowhere yet."""
    asked = plan.world.clients.requests.values()
    return {one.tenant.name for one in asked if not one.placements and not one.outcome}


def _look_often(plan: Plan, look: Callable[[], None], times: int) -> None:
    world: World = plan.world
    for number in range(times):
        world.schedule.at(FIRST_S + EVERY_S * number, look)


SCENARIOS = (keys_share_by_weight, answers_are_work, full_gateway_gives_way)
