"""The autoscaling policy: against every static split on the planner's model, and look by look."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from planner_rig import costing

from baton.common.config import DecodeConfig, PrefillConfig
from baton.common.ids import WorkerId
from baton.common.messages import Demand
from baton.deploy.autoscale import Flip, Policy, Role, Scaler, Seat
from baton.deploy.planner.cluster import Knobs, Split, serve
from baton.deploy.planner.outcome import Slo
from baton.deploy.planner.scaling import ScaledCluster
from baton.deploy.planner.traces import Trace, TraceRequest

COST = costing(pool_tokens=200_000)
SLO = Slo(ttft_s=3.0, itl_s=0.04)
KNOBS = Knobs(PrefillConfig(), DecodeConfig(max_running_requests=128))
WORKERS = 4
POLICY = Policy(cost=COST, slo=SLO, workers=WORKERS, most_rows=128, restart_s=5.0)
READING, WRITING = (5.0, 4000, 15), (5.0, 200, 400)
"""Requests per second, their prompts and answers on average: one wants 3P+1D, the other 2P+2D."""
Kind = tuple[float, int, int]


def trace_of(phases: Iterable[tuple[Kind, float]], seed: int = 5) -> Trace:
    """Phases of so many seconds, each of one kind of requests that arrive at random."""
    rng = np.random.default_rng(seed)
    requests: list[TraceRequest] = []
    begin_s = 0.0
    for (rate, prompt, output), seconds in phases:
        arrivals = np.sort(rng.uniform(begin_s, begin_s + seconds, int(rate * seconds)))
        lengths = rng.uniform(0.5, 1.5, (len(arrivals), 2)) * (prompt, output)
        requests += [
            TraceRequest(float(at), max(1, int(p)), max(1, int(o)))
            for at, (p, o) in zip(arrivals, lengths, strict=True)
        ]
        begin_s += seconds
    return Trace("made up", tuple(requests))


def static(split: Split, trace: Trace) -> float:
    return serve(COST, split, SLO, trace, KNOBS).attainment


@cache
def scaled(phases: tuple[tuple[Kind, float], ...], prefill: int) -> tuple[float, tuple[tuple[float, Flip], ...]]:
    cluster = ScaledCluster(POLICY, Split(prefill, WORKERS - prefill), KNOBS)
    return cluster.serve(trace_of(phases)).attainment, tuple(cluster.flips)


def assert_calm(flips: tuple[tuple[float, Flip], ...]) -> None:
    """No A -> B -> A within the dwell."""
    for (before_s, before), (after_s, after) in pairwise(flips):
        assert before.role == after.role or after_s - before_s >= POLICY.dwell_s, flips


def test_where_the_mix_shifts_the_policy_keeps_more_than_any_split() -> None:
    phases = ((READING, 200.0), (WRITING, 200.0), (READING, 200.0))
    best = max(static(Split(prefill, WORKERS - prefill), trace_of(phases)) for prefill in (1, 2, 3))
    kept, flips = scaled(phases, 2)
    assert kept > best + 0.1, (kept, best, flips)
    assert [flip.role for _, flip in flips] == ["prefill", "decode", "prefill"], flips
    assert_calm(flips)


@pytest.mark.parametrize(("kind", "prefill"), [(READING, 3), (WRITING, 2)])
def test_where_it_does_not_shift_nobody_moves(kind: Kind, prefill: int) -> None:
    kept, flips = scaled(((kind, 300.0),), prefill)
    assert kept == static(Split(prefill, WORKERS - prefill), trace_of([(kind, 300.0)]))
    assert flips == ()


@pytest.mark.parametrize(("kind", "prefill"), [(READING, 2), (WRITING, 3)])
def test_from_the_wrong_split_it_finds_the_right_one_and_stays(kind: Kind, prefill: int) -> None:
    _, flips = scaled(((kind, 300.0),), prefill)
    [(flipped_s, flip)] = flips
    assert flip.role == ("prefill" if prefill == 2 else "decode")
    assert flipped_s < 60.0


def test_planner_oscillates() -> None:
    """The mix turns faster than a worker can follow. Elsewhere an autoscaler went to and fro with it: here a change has
    to be paid by what was lost before, and none is undone within the dwell."""
    phases = tuple((kind, 30.0) for _ in range(10) for kind in (READING, WRITING))
    kept, flips = scaled(phases, 2)
    assert_calm(flips)
    assert len(flips) <= 600.0 / POLICY.dwell_s
    assert kept > static(Split(2, 2), trace_of(phases)) - 0.15, flips


# ------------------------------------------------------------------------------------------ look by look

SEATS = {WorkerId(f"w{number}"): Seat("prefill" if number < 2 else "decode", number) for number in range(WORKERS)}


def demand_after(seconds: int, kind: Kind = READING) -> Demand:
    rate, prompt, output = kind
    count = int(rate * seconds)
    return Demand(
        requests=count,
        tokens=count * prompt,
        squares=count * prompt**2,
        ended=count,
        outputs=count * output,
        prompts=count * prompt,
        computed=count * prompt,
    )


def first_flips(
    policy: Policy = POLICY, seats: dict[WorkerId, Seat] = SEATS, kind: Kind = READING, changing: bool = False
) -> tuple[Flip, ...]:
    scaler = Scaler(policy)
    for second in range(120):
        scaler, flips = scaler.look(demand_after(second, kind), seats, changing, float(second))
        if flips:
            return flips
    return ()


def test_the_least_busy_worker_leaves_and_the_reason_names_both_splits() -> None:
    [flip] = first_flips()
    assert (flip.worker, flip.role) == (WorkerId("w2"), "prefill")
    assert flip.reason.startswith("2P+2D was too late for ")
    assert "3P+1D" in flip.reason


def test_nobody_moves_while_a_change_is_under_way_or_somebody_is_missing() -> None:
    assert first_flips(changing=True) == ()
    assert first_flips(seats={name: seat for name, seat in SEATS.items() if name != "w0"}) == ()


ALL_WRITE: Kind = (9.0, 200, 400)


@pytest.mark.parametrize(("kind", "bound"), [(READING, {"min_decode": 2}), (ALL_WRITE, {"min_prefill": 2})])
def test_bounds_hold(kind: Kind, bound: dict[str, int]) -> None:
    assert first_flips(kind=kind)
    assert first_flips(replace(POLICY, **bound), kind=kind) == ()  # type: ignore[arg-type]


def test_a_gateway_that_begins_anew_is_no_demand() -> None:
    scaler = Scaler(POLICY)
    for second in (0, 1, 0, 1, 0, 1):
        scaler, flips = scaler.look(demand_after(10_000 * second), SEATS, True, 0.0 + second)
        assert flips == ()
    before = scaler
    scaler, _ = scaler.look(demand_after(0), SEATS, False, 2.0)
    assert scaler.shape == before.shape


def test_a_promise_of_nothing_is_always_kept() -> None:
    assert first_flips(replace(POLICY, slo=Slo())) == ()


def test_the_way_back_waits_for_the_dwell() -> None:
    roles: dict[WorkerId, Role] = {name: seat.role for name, seat in SEATS.items()}
    scaler, flipped = Scaler(POLICY), list[tuple[int, Role]]()
    demand, counts = Demand(), [0] * len(Demand.__struct_fields__)
    for second in range(400):
        kind = READING if second < 60 else ALL_WRITE
        counts = [a + b for a, b in zip(counts, _values(demand_after(1, kind)), strict=True)]
        demand = Demand(**dict(zip(Demand.__struct_fields__, counts, strict=True)))
        seats = {name: Seat(role) for name, role in roles.items()}
        scaler, flips = scaler.look(demand, seats, False, float(second))
        for flip in flips:
            roles[flip.worker] = flip.role
            flipped.append((second, flip.role))
    assert [role for _, role in flipped] == ["prefill", "decode", "decode"]
    assert flipped[1][0] - flipped[0][0] >= POLICY.dwell_s


def _values(demand: Demand) -> list[int]:
    return [getattr(demand, name) for name in Demand.__struct_fields__]
