"""Scenarios about clusters that are upgraded while they answer: for a while there are two revisions of everything."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from baton.deploy.controller_seats import Keep, SeatSpec
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
    plan, scenario = _given_up(seed)
    world, surge = plan.world, seed % 2

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(world.controller.core.book.given_up, "the upgrade went on")
        assert set(report.outcomes) == {"length"}, report.outcomes
        seats = {seat.worker: (seat.state, seat.revision) for seat in world.controller.core.status()}
        assert seats == {spec.worker: ("live", 1) for spec in world.specs}, seats
        replaced = {spec.worker for spec in world.specs if world.seats[spec.worker].stamp.incarnation > 1}
        assert len(replaced) == 1 - surge, replaced

    return Scenario(world, reached)


def scaled_after_an_upgrade_was_given_up(seed: int) -> Scenario:
    """More workers are asked for when an upgrade has been given up: they are of the revision that serves."""
    plan, scenario = _given_up(seed)
    world = plan.world
    danger = "workers are added to a cluster whose upgrade was given up"

    def add() -> None:
        plan.note(danger)
        world.scale("decode", 4)

    plan.once("upgrade_over", lambda _: True, lambda _: world.schedule.after(1.0, add))
    wanted = {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "decode-3", "gateway-0"}
    return _all_of_revision_1(plan, scenario, danger, wanted)


def controller_dies_after_an_upgrade_was_given_up(seed: int) -> Scenario:
    """The controller dies when an upgrade has been given up: its successor does not begin it again."""
    plan, scenario = _given_up(seed)
    danger = "a controller dies whose upgrade was given up"

    def die(_: object) -> None:
        plan.note(danger)
        plan.world.crash_controller(0.5)

    plan.once("upgrade_over", lambda _: True, die)
    return _all_of_revision_1(plan, scenario, danger, {spec.worker for spec in plan.world.specs})


def controller_dies_before_an_upgrade_is_given_up(seed: int) -> Scenario:
    """The controller dies while it tries to start the first of a revision that does not come up: its successor gives it
    up, too."""
    plan, scenario = _given_up(seed)
    danger = "a controller dies while nobody of the new revision is there"

    def die(_: object) -> None:
        plan.note(danger)
        plan.world.crash_controller(0.5)

    plan.once("bad_start", lambda _: True, die)
    return _all_of_revision_1(plan, scenario, danger, {spec.worker for spec in plan.world.specs})


def _given_up(seed: int) -> tuple[Plan, Scenario]:
    liveness = dataclasses.replace(BASE.liveness, restart_backoff_s=0.1)
    plan = Plan(replace(BASE, prefill=2, decode=2, surge=seed % 2, liveness=liveness), seed)
    for index in range(20):
        plan.request(40, max_tokens=30, at_s=FIRST_S + 0.2 * index)
    plan.world.bad_revisions.add(2)
    plan.world.schedule.at(FIRST_S + 0.5, plan.world.upgrade)
    scenario = plan.ready()
    plan.world.calm_s = FIRST_S + UPGRADE_S
    return plan, scenario


def _all_of_revision_1(plan: Plan, scenario: Scenario, danger: str, wanted: set[str]) -> Scenario:
    """These are there in the end, and of revision 2 there was never anybody after it was given up."""
    tried: list[SeatSpec] = []
    over = False

    def watch(_: World, spec: object) -> None:
        if over and isinstance(spec, SeatSpec):
            tried.append(spec)

    def end(_: World, kept: object) -> None:
        nonlocal over
        over = isinstance(kept, Keep) and kept.given_up is not None

    plan.world.on("bad_start", watch)
    plan.world.on("upgrade_over", end)

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(plan.seen.get(danger), danger)
        must(over, "the upgrade went on")
        assert not tried, f"{tried} after the revision was given up"
        assert set(report.outcomes) == {"length"}, report.outcomes
        seats = {seat.worker: (seat.state, seat.revision) for seat in plan.world.controller.core.status()}
        assert seats == dict.fromkeys(wanted, ("live", 1)), seats

    return Scenario(plan.world, reached)


SCENARIOS = (
    upgrade_to_another_layout,
    upgrade_that_does_not_come_up,
    scaled_after_an_upgrade_was_given_up,
    controller_dies_after_an_upgrade_was_given_up,
    controller_dies_before_an_upgrade_is_given_up,
)
