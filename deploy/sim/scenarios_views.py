"""Scenarios about what a process is told of the others, and what it is not told."""

from __future__ import annotations

from dataclasses import replace

from baton.common.ids import CONTROLLER, WorkerId
from baton.common.messages import Accept
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, body_of, must, second_of
from baton.deploy.sim.world import Report, World
from baton.transfer.api import SinkFailed


def missed_a_view(seed: int) -> Scenario:
    """A prefill worker dies with a hand-off under way, and the next view that its receiver hears has a successor in
    that seat already: the dead one is proven dead all the same, long before its silence would show."""
    liveness = replace(BASE.liveness, dead_after_s=8.0)
    plan = Plan(replace(BASE, prefill=1, decode=1, liveness=liveness), seed)
    plan.request(40)
    world, cut_s = plan.world, 2.0

    def crash_source(details: object) -> None:
        world.partition(CONTROLLER, WorkerId("decode-0"), cut_s, both=False)
        world.crash(WorkerId("prefill-0"))
        world.schedule.after(cut_s - 0.1, look)

    def look() -> None:
        [worker] = world.workers("decode")
        known, there = worker.roster.members[WorkerId("prefill-0")], world.seats[WorkerId("prefill-0")]
        if there.alive and known.stamp != there.stamp and worker.endpoint.live_sinks:
            plan.note("a successor nobody has told of")

    plan.once("hand_off_frame", lambda details: isinstance(body_of(details), Accept), crash_source)
    ended_s: list[float] = []

    def ended(_: World, details: object) -> None:
        if isinstance(second_of(details), SinkFailed):
            ended_s.append(world.now)

    world.on("engine_event", ended)
    scenario = plan.ready("a successor nobody has told of")

    def reached(report: Report) -> None:
        scenario.reached(report)
        assert ended_s, "the hand-off with a dead worker did not end"
        assert ended_s[0] < FIRST_S + 4.5, f"it ended only at {ended_s[0]:.1f} s"

    return Scenario(world, reached)


def seat_that_keeps_dying(seed: int) -> Scenario:
    """A process dies again and again: a minute has so many successors and no more, and then one comes that stays."""
    most, deadly_s = 3, 12.0
    liveness = replace(BASE.liveness, max_restarts_per_minute=most, restart_backoff_s=0.1)
    plan = Plan(replace(BASE, liveness=liveness, start_s=0.1), seed)
    plan.request(20 + seed % 5)
    world, victim = plan.world, WorkerId("decode-1")

    def strike() -> None:
        if world.seats[victim].alive:
            plan.note("death")
            world.crash(victim)
        if world.now < deadly_s:
            world.schedule.after(0.5, strike)

    world.schedule.at(FIRST_S, strike)
    scenario = plan.ready()
    world.calm_s = deadly_s + 10.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(plan.seen["death"] == most, f"it died {plan.seen['death']} times")

    return Scenario(world, reached)
