"""Scenarios about sessions: conversations that turn back, move, are lost, and end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from baton.common.engine.fake_runner import StepCost, fake_answer
from baton.common.ids import NO_SESSION, WorkerId
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.prefix.interface import I32
from baton.common.units import page_floor
from baton.deploy.sim.clients import ClientRequest
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, asking, must
from baton.deploy.sim.scenarios_kept import CONVERSING, LAYOUTS, SESSION, TIERS
from baton.deploy.sim.worker import WorkerProcess
from baton.deploy.sim.world import Report

UNBROKEN_TURNS = 3
TURNS_BACK = 7


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
            request = asking(f"t{turn}", turns[turn](), session=SESSION)
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


def session_goes_back_a_little(seed: int) -> Scenario:
    """Turns of a session go on a few tokens before the end of what it holds, each a token further back than the one
    before: what a window or a state has left behind there is not gone on with."""
    layout: Mapping[str, Any] = LAYOUTS[(seed + 1) % len(LAYOUTS)]  # windows and states first
    plan = Plan(replace(BASE, decode=1, decode_pages=64, decode_config=CONVERSING, **layout), seed)
    rng = np.random.default_rng([seed, 3])
    parts = [rng.integers(0, 258, count).astype(np.int32) for count in (17 + seed % 4, *[5] * TURNS_BACK)]
    kept: list[int] = []

    def go_on(before: ClientRequest | None = None) -> None:
        turn = len(plan.requests)
        if turn <= TURNS_BACK:
            said = parts[0] if before is None else np.concatenate((before.known[: 1 - turn or None], parts[turn]))
            request = asking(f"t{turn}", said, session=SESSION)
            request.begins_session, request.then = turn == 0, go_on
            plan.world.schedule.after(0.2, look)
            plan.enter(request, max(FIRST_S, plan.world.now + 0.3))

    def look() -> None:
        """Between two turns."""
        kept.extend(one.record.kv_committed_len for worker in plan.world.workers("decode") for one in _sessions(worker))

    go_on()
    scenario = plan.ready()
    plan.world.calm_s = FIRST_S + 8.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(len(kept) == TURNS_BACK, f"it was not kept after each turn: {kept}")

    return Scenario(plan.world, reached)


def session_that_moves(seed: int) -> Scenario:
    """A gateway does not hear a conversation's worker for a while, so the next turn goes to another one: the first
    one's slot is given up as soon as that has answered, and not when its time is over."""
    plan = Plan(replace(BASE, decode=2, decode_config=CONVERSING, step=StepCost(0.05)), seed)
    rng = np.random.default_rng([seed, 3])
    prompt = rng.integers(0, 258, 20).astype(np.int32)
    first = plan.enter(asking("t0", prompt, session=SESSION), FIRST_S)
    first.begins_session = True
    gateway = WorkerId("gateway-0")

    def go_on(_: ClientRequest) -> None:
        kept = [worker for worker in plan.world.workers("decode") if _sessions(worker)]
        if kept:
            plan.note("the first worker kept it")
            plan.world.partition(gateway, kept[0].stamp.worker, 5.0, True)
        said = np.concatenate((first.known, prompt[:5]))
        second = asking("t1", said, 90, SESSION)
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


def session_that_is_lost(seed: int) -> Scenario:
    """A turn comes after its session's time: it is computed anew, or refused by that name, as was asked for."""
    how: Literal["fail", "prefill"] = "prefill" if seed % 2 else "fail"
    decode = replace(CONVERSING, session_ttl_s=1.0, lost_session=how)
    plan = Plan(replace(BASE, decode=1, decode_config=decode), seed)
    prompt = np.random.default_rng([seed, 5]).integers(0, 258, 22).astype(np.int32)
    first = plan.enter(asking("t0", prompt, session=SESSION), FIRST_S)
    first.begins_session = True

    def go_on(_: ClientRequest) -> None:
        plan.enter(asking("t1", np.concatenate((first.known, prompt[:5])), session=SESSION), plan.world.now + 2.5)

    first.then = go_on
    scenario = plan.ready(all_complete=False)
    plan.world.calm_s = FIRST_S + 4.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(len(plan.requests) == 2, "there was no second turn")
        expected = "session_lost" if how == "fail" else "length"
        assert plan.requests[1].outcome == expected, f"it ended with {plan.requests[1].outcome}, not {expected}"

    return Scenario(plan.world, reached)


def session_that_was_stopped(seed: int) -> Scenario:
    """A gateway finds a stop string in the answer of a turn: the client has its answer, so the worker, which is told to
    stop, keeps what it has for the next turn."""
    plan = Plan(replace(BASE, decode=1, decode_config=replace(CONVERSING, lost_session="fail")), seed)
    prompt = np.random.default_rng([seed, 11]).integers(0, 258, 20).astype(np.int32)
    first = plan.enter(asking("t0", prompt, tokens=40, session=SESSION), FIRST_S)
    first.begins_session, first.stop_after = True, 3 + seed % 3

    def go_on(_: ClientRequest) -> None:
        if first.stopped:
            plan.note("it was stopped")
        second = asking("t1", np.concatenate((first.known, prompt[:5])), session=SESSION)
        plan.enter(second, plan.world.now + 0.5)

    first.then = go_on
    scenario = plan.ready("it was stopped")
    plan.world.calm_s = FIRST_S + 2.0
    return scenario


def session_closed_too_soon(seed: int) -> Scenario:
    """A session is closed while a turn of it is answered: the turn has its answer, and nothing is kept behind it."""
    plan = Plan(replace(BASE, decode=1, decode_config=CONVERSING), seed)
    prompt = np.random.default_rng([seed, 12]).integers(0, 258, 20 + seed % 5).astype(np.int32)
    request = plan.enter(asking("t0", prompt, tokens=40, session=SESSION), FIRST_S)
    request.begins_session = True

    def close(details: object) -> None:
        if not request.outcome:
            plan.note("closed while it was answered")
        plan.world.close_session(SESSION, 0)

    def look() -> None:
        kept = [worker.stamp.worker for worker in plan.world.workers("decode") if _sessions(worker)]
        assert not kept, f"{kept} keep a session that was closed"

    plan.once("step_over", lambda details: len(request.tokens) > 2, close)
    request.then = lambda _: plan.world.schedule.after(0.5, look)
    scenario = plan.ready("closed while it was answered")
    plan.world.calm_s = FIRST_S + 2.0
    return scenario


def session_goes_below(seed: int) -> Scenario:
    """A session that ends is in the tree, and from there in a tier, answer and all."""
    settings = replace(BASE, decode=1, tiers=TIERS, tier_loss=0.0, decode_config=CONVERSING)
    plan = Plan(settings, seed)
    prompt = np.random.default_rng([seed, 6]).integers(0, 258, 18).astype(np.int32)
    first = plan.enter(asking("t0", prompt, tokens=12, session=SESSION), FIRST_S)
    first.begins_session = True

    def go_on(_: ClientRequest) -> None:
        plan.world.schedule.after(0.3, lambda: plan.world.close_session(SESSION, 0))
        plan.world.schedule.after(1.0, forget)
        plan.enter(asking("again", np.concatenate((first.known, prompt[:3]))), plan.world.now + 1.2)

    def forget() -> None:
        for worker in plan.world.workers():
            worker.pool.clear_cache()

    first.then = go_on
    scenario = plan.ready()
    plan.world.calm_s = FIRST_S + 4.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        must(len(plan.requests) == 2, "nobody asked again")
        ended = plan.requests[1].ended
        assert ended is not None
        assert ended.timeline is not None
        whole = page_floor(len(first.known) - 1, settings.page_size)
        assert ended.timeline.restored_tokens == whole, f"{ended.timeline.restored_tokens} of {whole} came back"

    return Scenario(plan.world, reached)


def thoughts_are_forgotten(seed: int) -> Scenario:
    """A model begins to think in the middle of its answer, in a session or not: what comes of it is not cached."""
    prompt = np.random.default_rng([seed, 10]).integers(0, 258, 21 + seed % 4).astype(np.int32)
    request = asking("thinks", prompt, tokens=24, session=SESSION if seed % 2 else NO_SESSION)
    thinking = fake_answer(prompt, request.sampling, BASE.max_context_len).tokens[2]
    decode = replace(CONVERSING, session_ttl_s=1.0)
    plan = Plan(replace(BASE, decode=1, thinking_token_id=thinking, decode_config=decode), seed)
    plan.enter(request, FIRST_S).begins_session = bool(seed % 2)
    scenario = plan.ready()

    def reached(report: Report) -> None:
        scenario.reached(report)
        kept = [worker.pool.match_len(request.known) for worker in plan.world.workers("decode")]
        must(max(kept) > 0, "nothing of it was cached")

    return Scenario(plan.world, reached)


def _sessions(worker: WorkerProcess) -> list[Holding]:
    return [one for one in worker.core.holdings() if one.owner_class is OwnerClass.SESSION]


SCENARIOS = (
    session_that_turns_back,
    session_that_moves,
    session_that_is_lost,
    session_that_was_stopped,
    session_closed_too_soon,
    session_goes_below,
    thoughts_are_forgotten,
)
