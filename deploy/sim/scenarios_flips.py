"""Scenarios about workers that change their role while something runs on them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from baton.common.ids import WorkerId
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, must, second_of, worker_of
from baton.deploy.sim.world import Report, World
from baton.transfer.session.effects import LandRegion

SHORT_DRAIN_S = 0.02


def flip_mid_handoff(seed: int) -> Scenario:
    """A worker is told to change its role in the middle of a hand-off: it finishes it, or it has too little time and is
    killed in it. Either end may be the one that leaves. Nobody's answer is lost, and the seat has its new role."""
    by_receiver, in_time = seed % 2 == 0, seed % 4 < 2
    drain_s = 30.0 if in_time else SHORT_DRAIN_S
    liveness = dataclasses.replace(BASE.liveness, drain_deadline_s=drain_s)
    plan = Plan(replace(BASE, prefill=2, decode=2, liveness=liveness, pull_lane=0.5), seed)
    for index in range(6):
        plan.request(40, max_tokens=20, at_s=FIRST_S + 0.02 * index)
    for index in range(4):
        plan.request(40, max_tokens=8, at_s=FIRST_S + 2.0 + 0.1 * index)
    flipped: list[tuple[WorkerId, str]] = []

    def meddle(world: World, details: object) -> None:
        sink, effect = worker_of(details, "decode"), second_of(details)
        if flipped or sink is None or not isinstance(effect, LandRegion) or effect.chunk.seq != 1:
            return
        source = world.worker_at(effect.peer)
        leaving = sink if by_receiver else source
        if leaving is None:
            return
        flipped.append((leaving.stamp.worker, "prefill" if by_receiver else "decode"))
        world.schedule.after(0.0, world.flip, leaving.stamp.worker)

    def flips(world: World, details: object) -> None:
        process = details[0] if isinstance(details, tuple) else None
        if any(process is worker and worker.endpoint.sessions() for worker in world.workers()):
            plan.note("told to leave in the middle of a hand-off")

    plan.world.on("land_region", meddle)
    plan.world.on("flip", flips)
    scenario = plan.ready("told to leave in the middle of a hand-off")
    plan.world.calm_s = FIRST_S + 3.5

    def reached(report: Report) -> None:
        scenario.reached(report)
        [(worker, role)] = flipped
        process = plan.world.seats[worker]
        must(process.stamp.incarnation == 2, f"{worker} was not replaced")
        assert process.role == role, f"{worker} is {process.role}"
        why = "drained" if in_time else "did not finish in time"
        told = [line for line in plan.world.controller.core.transitions if why in line]
        must(told, f"{worker} left otherwise: {plan.world.controller.core.transitions}")

    return Scenario(plan.world, reached)


SCENARIOS = (flip_mid_handoff,)
