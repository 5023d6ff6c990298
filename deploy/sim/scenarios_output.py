"""Scenarios about what comes out: prompts that are too long, first tokens, ids, and tokens counted once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from baton.common.config import DecodeConfig, TiersConfig
from baton.common.engine.fake_runner import StepCost
from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey, RequestId, Stamp, WorkerId
from baton.common.messages import Body, Done, Timeline
from baton.deploy.sim.clients import ClientRequest
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, must, second_of, worker_of
from baton.deploy.sim.world import Report, World
from baton.transfer.api import FirstTokenReady, OpenSink, SinkFailed
from baton.transfer.session.effects import Landed


def over_length_prompt(seed: int) -> Scenario:
    """Prompts longer than the model, than a decode worker's pool and than a prefill worker's: the first two are refused
    at the door, the third is computed where it fits, and no prompt is cut."""
    settings = replace(BASE, decode=1, prefill_pages=12, decode_pages=24, max_prompt=200)
    plan = Plan(settings, seed)
    too_long = [plan.request(130), plan.request(97)]
    plan.request(60)
    plan.request(20)

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, SinkFailed) and event.failure.code is ErrorCode.PROMPT_TOO_LONG:
            plan.note("a prefill worker has refused one that its pool cannot hold")

    plan.world.on("engine_event", look)
    scenario = plan.ready("a prefill worker has refused one that its pool cannot hold", all_complete=False)

    def reached(report: Report) -> None:
        scenario.reached(report)
        outcomes = [one.outcome for one in plan.requests]
        assert outcomes[:2] == [ErrorCode.PROMPT_TOO_LONG] * 2, outcomes
        assert all(one in ("stop", "length") for one in outcomes[2:]), outcomes
        assert not any(one.tokens for one in too_long)

    return Scenario(plan.world, reached)


def first_token_lost(seed: int) -> Scenario:
    """The first token and its log probabilities go ahead of the pages; then the prefill worker dies. Nobody sees the
    token twice, and nothing of it is missing."""
    plan = Plan(replace(BASE, prefill=2, region_s=0.05, layers=4, bytes_per_token=32), seed)
    for _ in range(4):
        plan.request(40, logprobs=2)
    early: set[HandoffKey] = set()

    def crash(details: object) -> None:
        worker, event = worker_of(details, "decode"), second_of(details)
        assert worker is not None
        assert isinstance(event, FirstTokenReady)
        (session,) = [one for one in worker.endpoint.sessions() if one.key == event.key]
        plan.world.crash(session.peer.worker)

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, FirstTokenReady):
            early.add(event.key)
        if isinstance(event, SinkFailed) and event.key in early:
            plan.note("the pages did not follow the first token")

    plan.once("engine_event", lambda details: isinstance(second_of(details), FirstTokenReady), crash)
    plan.world.on("engine_event", look)
    return plan.ready("the pages did not follow the first token")


def all_landed_but_the_token(seed: int) -> Scenario:
    """Every page has landed, and the frame with the first token dies with the prefill worker: the token is computed,
    from what is there."""
    plan = Plan(replace(BASE, prefill=2, pull_lane=0.5), seed)
    for _ in range(3):
        plan.request(40, logprobs=0)
    landed: dict[HandoffKey, int] = {}

    def delay_s(sender: Stamp, worker: WorkerId, body: Body) -> float:
        return -1.0 if isinstance(body, Done) and body.key.attempt == 0 else 0.0

    def crash_when_all(world: World, details: object) -> None:
        worker, event = worker_of(details, "decode"), second_of(details)
        if worker is None or not isinstance(event, Landed):
            return
        landed[event.key] = landed.get(event.key, 0) + 1
        if landed[event.key] == 10 and not plan.seen.get("crash"):
            plan.note("crash")
            (session,) = [one for one in worker.endpoint.sessions() if one.key == event.key]
            world.schedule.after(0.01, world.crash, session.peer.worker)

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, SinkFailed) and event.landed_until == 40:
            plan.note("all had landed, without the first token")

    plan.world.network.extra_delay_s = delay_s
    plan.world.on("landing_ended", crash_when_all)
    plan.world.on("engine_event", look)
    return plan.ready("all had landed, without the first token")


def recompute_path(seed: int) -> Scenario:
    """A hand-off fails in its middle, and nobody else is there to ask: the rest is computed on the decode worker,
    behind pages that were computed elsewhere."""
    plan = Plan(replace(BASE, prefill=1, region_s=0.05, pull_lane=0.5, max_prompt=60), seed)
    for index in range(3):
        plan.request(50 + index)

    def crash(details: object) -> None:
        plan.world.settings = replace(plan.world.settings, start_s=20.0)  # of its successor
        plan.world.crash(WorkerId("prefill-0"))

    def third(details: object) -> bool:
        event = second_of(details)
        return isinstance(event, Landed) and event.seq == 3

    plan.once("landing_ended", third, crash)
    scenario = plan.ready()

    def reached(report: Report) -> None:
        scenario.reached(report)
        mixed = [one for one in _timelines(plan.requests) if one.local_tokens and one.transferred_tokens]
        must(mixed, "no prompt came half from there, half from here")

    return Scenario(plan.world, reached)


def prefix_match_abort(seed: int) -> Scenario:
    """Of requests whose ids begin alike, one is aborted in each state; the others do not notice."""
    plan = Plan(replace(BASE, decode=1, step=StepCost(0.02)), seed)
    for index in range(14):
        plan.request(24, max_tokens=16, at_s=FIRST_S + 0.02 * index)
    victim = plan.world.clients
    one = RequestId("r1")

    def cancel() -> None:
        running = [name for name, request in victim.requests.items() if not request.outcome and name.startswith(one)]
        if one in running and len(running) > 2:
            plan.note("aborted while its namesakes ran")
            plan.world.cancel(victim.requests[one])

    for number in range(10):
        plan.world.schedule.at(FIRST_S + 0.02 * (12 + seed % 3 + number), cancel)
    return plan.ready("aborted while its namesakes ran")


def double_counted_metrics(seed: int) -> Scenario:
    """Tokens of a prompt that come from the cache, a tier, a peer and from here, over retractions and failed hand-offs:
    every account adds up to the prompt (as in every world), and all four were there."""
    tiers = TiersConfig(host_bytes=1, restore_min_pages=1)
    decode = DecodeConfig(num_reserved_decode_tokens=0, chunk_tokens=16, local_prefill_max_tokens=4)
    settings = replace(BASE, decode=1, decode_pages=40, decode_config=decode, tiers=tiers, tier_loss=0.0)
    plan = Plan(settings, seed)
    for index in range(12):
        plan.request(24 + index, max_tokens=24, at_s=FIRST_S + 0.25 * index, shared=20)
    for index in range(12):
        plan.request(40 + index, max_tokens=8, at_s=FIRST_S + 4.0 + 0.2 * index, shared=20 + index)

    def forget() -> None:
        """What the tiers have by now, nobody else has."""
        for worker in plan.world.workers():
            worker.pool.clear_cache()

    plan.world.schedule.at(FIRST_S + 3.9, forget)
    plan.world.schedule.at(FIRST_S + 1.0, partial(plan.world.crash, WorkerId("prefill-0")))
    scenario = plan.ready()
    plan.world.calm_s = FIRST_S + 7.0

    def reached(report: Report) -> None:
        scenario.reached(report)
        for part in ("cached_tokens", "restored_tokens", "local_tokens", "transferred_tokens"):
            must(sum(getattr(one, part) for one in _timelines(plan.requests)), f"no {part}")

    return Scenario(plan.world, reached)


def slower_than_colocated(seed: int) -> Scenario:
    """What a step computes sooner than a hand-off would bring it is computed where it is decoded; long prompts are
    handed over, and the steps of short ones do not wait for them."""
    decode = DecodeConfig(num_reserved_decode_tokens=4, chunk_tokens=16, local_prefill_max_tokens=12)
    plan = Plan(replace(BASE, decode_config=decode, step=StepCost(0.01)), seed)
    short = {plan.request(12, at_s=FIRST_S + 0.02 * index).request_id for index in range(4)}
    long = {plan.request(50, at_s=FIRST_S + 0.02 * index).request_id for index in range(4)}

    def look(world: World, details: object) -> None:
        command = second_of(details)
        if isinstance(command, OpenSink):
            assert command.request_id not in short, f"{command.request_id} was handed over for {len(command.tokens)}"
            plan.note("a long prompt was handed over")

    plan.world.on("command", look)
    scenario = plan.ready("a long prompt was handed over")

    def reached(report: Report) -> None:
        scenario.reached(report)
        local = [one.request_id for one in plan.requests if (line := _timeline(one)) and not line.transferred_tokens]
        must(short <= set(local) and not long & set(local), f"computed here: {local}")

    return Scenario(plan.world, reached)


def _timeline(request: ClientRequest) -> Timeline | None:
    return None if request.ended is None else request.ended.timeline


def _timelines(requests: list[ClientRequest]) -> list[Timeline]:
    return [line for one in requests if (line := _timeline(one)) is not None]


SCENARIOS = (
    over_length_prompt,
    first_token_lost,
    all_landed_but_the_token,
    recompute_path,
    prefix_match_abort,
    double_counted_metrics,
    slower_than_colocated,
)
