"""Scenarios about what is not done twice: sinks that die in the middle of a prompt."""

from __future__ import annotations

from dataclasses import replace

from baton.common.config import PrefillConfig
from baton.common.engine.fake_runner import StepCost
from baton.common.ids import HandoffKey
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, must, second_of, worker_of
from baton.deploy.sim.world import Report, World
from baton.prefill.core import PrefillCore
from baton.transfer.api import OfferReceived, SourceAborted
from baton.transfer.session.effects import Landed

CHUNK = 4
VICTIMS = 3


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
