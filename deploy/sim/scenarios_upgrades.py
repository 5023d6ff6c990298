"""Scenarios about clusters that are upgraded while they answer: for a while there are two revisions of everything."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, must
from baton.deploy.sim.world import Report, World

STAYS_S = 0.5
UPGRADE_S = 20.0


def upgrade_to_another_layout(seed: int) -> Scenario:
    """All processes are replaced under load by such with another layout: hand-offs, and answers that have begun, stay
    with those that are alike, also when one of them dies. Nobody's answer is lost."""
    liveness = dataclasses.replace(BASE.liveness, dead_after_s=STAYS_S, heartbeat_interval_s=0.1)
    plan = Plan(replace(BASE, prefill=2, decode=3, new_layouts=True, liveness=liveness, pull_lane=0.5), seed)
    for index in range(60):
        plan.request(40, max_tokens=80, at_s=FIRST_S + 0.15 * index)
    plan.world.schedule.at(FIRST_S + 0.5, plan.world.upgrade)
    danger = "a decode worker dies with answers, and there are two groups"

    def look(world: World, details: object) -> None:
        layouts = {worker.layout for worker in world.workers("prefill")}
        old = [one for one in world.workers("decode") if one.layout == "v1"]
        if plan.seen.get(danger) or len(layouts) < 2 or len(old) < 2:
            return
        busy = max(old, key=lambda one: one.core.load().running)
        if busy.core.load().running > 1:
            plan.note(danger)
            world.crash(busy.stamp.worker)

    plan.world.on("land_region", look)
    scenario = plan.ready(danger)
    plan.world.calm_s = FIRST_S + UPGRADE_S

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(set(report.outcomes) == {"length"}, f"{report.outcomes}")
        revisions = {seat.worker: seat.revision for seat in plan.world.controller.core.status()}
        assert revisions == {spec.worker: 2 for spec in plan.world.specs}, revisions

    return Scenario(plan.world, reached)


def upgrade_that_does_not_come_up(seed: int) -> Scenario:
    """Nobody of the new revision gets ready. The upgrade is given up, and everybody of the old one is still there, or
    is back."""
    liveness = dataclasses.replace(BASE.liveness, restart_backoff_s=0.1)
    surge = seed % 2
    plan = Plan(replace(BASE, prefill=2, decode=2, surge=surge, liveness=liveness), seed)
    world = plan.world
    for index in range(20):
        plan.request(40, max_tokens=30, at_s=FIRST_S + 0.2 * index)
    plan.world.bad_revisions.add(2)
    world.schedule.at(FIRST_S + 0.5, world.upgrade)
    scenario = plan.ready()
    world.calm_s = FIRST_S + UPGRADE_S

    def reached(report: Report) -> None:
        scenario.reached(report)
        must("did not come up" in world.controller.core.book.halted, "the upgrade went on")
        assert set(report.outcomes) == {"length"}, report.outcomes
        seats = {seat.worker: (seat.state, seat.revision) for seat in world.controller.core.status()}
        assert seats == {spec.worker: ("live", 1) for spec in world.specs}, seats
        replaced = {spec.worker for spec in world.specs if world.seats[spec.worker].stamp.incarnation > 1}
        assert len(replaced) == 1 - surge, replaced

    return Scenario(world, reached)


SCENARIOS = (upgrade_to_another_layout, upgrade_that_does_not_come_up)
