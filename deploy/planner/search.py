"""Which split of workers keeps most promises, and whether to split at all. Pure.

Goodput is the highest rate of requests at which `target` of them are kept all promises (docs/PLANNER.md). A split is
worth it when it carries at least `MARGIN` times what the same workers carry colocated: the model is not more exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from baton.common.errors import ConfigError
from baton.deploy.planner.cluster import Knobs, Split, serve
from baton.deploy.planner.cost import CostModel
from baton.deploy.planner.outcome import Outcome, Slo
from baton.deploy.planner.traces import Trace, at_rate, one_by_one

MARGIN = 1.05
PRECISION = 1.02
"""A goodput is known to this factor."""
APART_S = 1e4
"""Between requests at a trickle: one at a time."""
AT_ONCE_S = 1e-3
"""A trace that is over in this time comes at once."""
MOST_WORKERS = 64
CURVE = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
"""Rates of the curve, as shares of the best goodput."""
SHORT_S = 60.0
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Load:
    """A split under a rate of requests, in short."""

    rate: float
    attainment: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    itl_p99_s: float
    missed_ttft: float  # share of requests
    missed_itl: float  # of the gaps' promises, single or mean
    prefill_busy: float  # share of the time, of prefill workers
    decode_busy: float


@dataclass(frozen=True, slots=True)
class Option:
    """`goodput` 0.0: the promises are not kept even to requests that come one at a time; None: it is less than another
    split's. `at_goodput`: how it is then; where there is none, at that other split's, or at a trickle."""

    split: Split
    goodput: float | None
    at_goodput: Load
    curve: tuple[Load, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `wanted_rate`: what the number of workers was made for; None: the number was given."""

    trace: Trace
    slo: Slo
    target: float
    wanted_rate: float | None
    colocated: Option
    best: Option  # of those with prefill workers
    others: tuple[Option, ...]
    short: bool  # the trace is over too soon at these rates: queues had no time to grow

    @property
    def disaggregate(self) -> bool:
        """Fewer workers where that is the question, else more goodput."""
        if self.best.split.workers != self.colocated.split.workers:
            return self.best.split.workers < self.colocated.split.workers
        return (self.best.goodput or 0.0) > (self.colocated.goodput or 0.0) * MARGIN

    @property
    def chosen(self) -> Option:
        return self.best if self.disaggregate else self.colocated


class Search:
    """Of one trace on workers of one cost."""

    def __init__(self, cost: CostModel, trace: Trace, slo: Slo, target: float, knobs: Knobs, told: Told) -> None:
        self._cost, self._trace, self._slo, self._target, self._knobs = cost, trace, slo, target, knobs
        self._told = told

    def load(self, split: Split, rate: float) -> Load:
        """At a rate of 0: a trickle."""
        trace = at_rate(self._trace, rate) if rate else one_by_one(self._trace, APART_S)
        return summed_up(serve(self._cost, split, self._slo, trace, self._knobs), split, rate)

    def keeps(self, split: Split, rate: float) -> bool:
        return self.load(split, rate).attainment >= self._target

    def option(self, split: Split, at_least: float = 0.0) -> Option:
        """With its goodput, or None when that is not above `at_least`."""
        if at_least and (load := self.load(split, at_least)).attainment < self._target:
            return Option(split, None, load)
        low, high = self._bracket(split, at_least)
        while low and high > low * PRECISION:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.keeps(split, middle) else (low, middle)
        found = Option(split, low, self.load(split, low))
        self._told(f"{split}: {low:.3g} requests/s")
        return found

    def _bracket(self, split: Split, at_least: float) -> tuple[float, float]:
        """Kept at the first rate, not at the second. (0, 0): not even at a trickle. Raises ConfigError when the trace
        cannot tell."""
        low = at_least or self._trace.rate
        if self.keeps(split, low):
            high = 2 * low
            while self.keeps(split, high):
                if len(self._trace.requests) < high * AT_ONCE_S:
                    reason = f"is over too soon: {split} keep what is promised though all of it comes at once"
                    raise ConfigError(self._trace.name, len(self._trace.requests), reason, "more of it: --requests")
                low, high = high, 2 * high
            return low, high
        if not self.keeps(split, 0.0):
            return 0.0, 0.0
        high, low = low, low / 2
        while not self.keeps(split, low):
            high, low = low, low / 2
            if low * APART_S < 1:
                return 0.0, 0.0
        return low, high

    def with_curve(self, option: Option, top: float) -> Option:
        curve = tuple(self.load(option.split, top * share) for share in CURVE) if top else ()
        return Option(option.split, option.goodput, option.at_goodput, curve)

    def fewest(self, rate: float, splits_of: Callable[[int], Iterable[Split]], first: int) -> Split | None:
        """The smallest cluster that keeps the promises at `rate`; None: none that is small enough to be tried."""

        def fit(workers: int) -> Split | None:
            return next((split for split in splits_of(workers) if self.keeps(split, rate)), None)

        too_few, enough = first - 1, first
        if not any(self.keeps(split, 0.0) for split in splits_of(first)):
            return None  # more workers make nothing faster for requests that come one at a time
        while (found := fit(enough)) is None:
            too_few, enough = enough, 2 * enough
            if enough > MOST_WORKERS:
                return None
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            smaller = fit(middle)
            if smaller is None:
                too_few = middle
            else:
                found, enough = smaller, middle
        self._told(f"{found} keep them at {rate:.3g} requests/s")
        return found

    def prefill_share(self) -> float:
        """Of all work, what prefill workers have, as far as steps without company tell."""
        outcome = serve(self._cost, Split(1, 1), self._slo, at_rate(self._trace, self._trace.rate), self._knobs)
        return outcome.busy_s["prefill"] / (outcome.busy_s["prefill"] + outcome.busy_s["decode"])

    def near(self, workers: int, share: float) -> list[Split]:
        """The splits of so many workers, the likeliest first; of many workers those nearby."""
        wanted = min(max(1, round(workers * share)), workers - 1)
        splits = sorted(range(1, workers), key=lambda prefill: abs(prefill - wanted))
        return [Split(prefill, workers - prefill) for prefill in splits[:7]]


def plan_for_workers(search: Search, trace: Trace, slo: Slo, target: float, workers: int) -> Plan:
    """How to split a given number. Raises ConfigError."""
    if workers < 2:
        raise ConfigError("--workers", workers, "prefill and decode apart need at least two", "--workers 2")
    colocated = search.option(Split(0, workers))
    return _compared(search, trace, slo, target, None, colocated, _options(search, workers))


def plan_for_rate(search: Search, trace: Trace, slo: Slo, target: float, rate: float) -> Plan:
    """The smallest number for a given rate, and its split. Raises ConfigError when none is large enough."""
    share = search.prefill_share()
    together = search.fewest(rate, lambda workers: [Split(0, workers)], first=1)
    apart = search.fewest(rate, lambda workers: search.near(workers, share), first=2)
    if together is None and apart is None:
        idle = search.load(Split(1, 1), 0.0)
        reason = (
            f"up to {MOST_WORKERS} workers do not keep it at {rate:.3g} requests/s; of requests that come one at a time"
            f" {idle.missed_ttft:.0%} miss ttft, {idle.missed_itl:.0%} their gaps"
        )
        raise ConfigError("--slo", str(slo), reason, "promise less, lower --target, or compute larger chunks")
    if together is None or (apart is not None and apart.workers <= together.workers):
        assert apart is not None
        same = Split(0, apart.workers)
        colocated = search.option(same if together is None or together == same else together)
        return _compared(search, trace, slo, target, rate, colocated, _options(search, apart.workers))
    colocated = search.option(together)
    workers = max(2, together.workers) if apart is None else apart.workers
    return _compared(search, trace, slo, target, rate, colocated, _options(search, workers))


def _options(search: Search, workers: int) -> list[Option]:
    """Splits that cannot be the best one any more are not looked into."""
    found: list[Option] = []
    for split in search.near(workers, search.prefill_share()):
        best = max((one.goodput or 0.0 for one in found), default=0.0)
        found.append(search.option(split, best * PRECISION))
    return found


def _compared(
    search: Search,
    trace: Trace,
    slo: Slo,
    target: float,
    rate: float | None,
    colocated: Option,
    options: list[Option],
) -> Plan:
    best = max(options, key=lambda one: one.goodput or 0.0)
    top = max(best.goodput or 0.0, colocated.goodput or 0.0)
    others = tuple(one for one in options if one is not best)
    short = top > 0 and len(trace.requests) / top < SHORT_S
    colocated, best = search.with_curve(colocated, top), search.with_curve(best, top)
    others = tuple(search.with_curve(one, top) for one in others[:2])
    return Plan(trace, slo, target, rate, colocated, best, others, short)


def summed_up(outcome: Outcome, split: Split, rate: float) -> Load:
    answers, slo = outcome.answers, outcome.slo
    lasted_s = max(one.last_s for one in answers)
    missed_ttft = sum(one.ttft_s > slo.ttft_s for one in answers) / len(answers)
    missed_itl = sum(not one.keeps(slo) and one.ttft_s <= slo.ttft_s for one in answers) / len(answers)
    ttft_p50_s, ttft_p99_s = np.percentile(outcome.ttft_s, [50, 99]).tolist()
    tpot_s = outcome.tpot_s
    return Load(
        rate=rate,
        attainment=outcome.attainment,
        ttft_p50_s=ttft_p50_s,
        ttft_p99_s=ttft_p99_s,
        tpot_p50_s=float(np.median(tpot_s)) if len(tpot_s) else math.nan,
        itl_p99_s=outcome.gaps.percentile(0.99),
        missed_ttft=missed_ttft,
        missed_itl=missed_itl,
        prefill_busy=outcome.busy_s["prefill"] / (split.prefill * lasted_s) if split.prefill else 0.0,
        decode_busy=outcome.busy_s["decode"] / (split.decode * lasted_s),
    )
