"""When a worker should change its role: a policy over the demand of requests. Pure: what was asked for and who is there
in, changes out.

Owns: what the same demand would have done to every possible split, and when the last change was. Never: drains or
starts anybody (the controller does), or looks at what waits: that is what demand has left behind, and comes too late.

Each split of P prefill and D decode workers has a *virtual cluster*: q seconds of prefill work that wait, r requests
that run. Of the n prompts that arrive in a look of t seconds, `cost` says that they take w seconds. With T the promised
time to the first token, less a prompt's own prefill,

    q <- min(max(0, q + w - P t), 2 P T)        late: those of the n for which q + x w > P T, x from 0 to 1

What has been computed, n' requests, goes on to decode. Answers have m tokens, a step of r / D requests takes s seconds:

    r <- min(max(0, r + n' - t r / (m s)), 2 D B)       late: all of the n while r > D B

with B as many as one worker may run: no step longer than the promised gap, no more KV than its pool. m, and the share
of prompts that is computed, are those of the last requests (`Shape`). Each split has a *regret*: the requests that were
late here, and would not have been there. It fades, and is never negative: what was bad for yesterday's demand may be
good today.

    regret <- max(0, fade regret + late here - late there)

Workers go one way at a time, a third of them at most, towards the split of the largest regret (of several, towards the
one that is strained least: whose q / P T and r / D B are smallest), when

- it is larger than half of the requests that come while a worker is missed, until it has finished what it has and its
  successor has loaded: as much was lost by staying as a change may cost. Who pays that late never pays more than twice
  what was needed, whatever comes (a ski is bought when renting has cost as much);
- no change is under way, and the last change in the other direction is `dwell_s` ago.

So nothing moves while all promises are kept, however the split looks, and A -> B -> A takes at least `dwell_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import structs

from baton.common.by_name import ByName
from baton.common.ids import WorkerId
from baton.common.messages import Demand
from baton.deploy.planner.cost import CostModel
from baton.deploy.planner.outcome import Slo

Role = Literal["prefill", "decode"]
LOST = 0.5
"""Of what comes while a worker is missed."""
ALIKE = 0.9
"""Splits whose regrets differ by less are alike: of them the one that is strained least is wanted."""
STRAIN_HALF_LIFE_S = 15.0
FEWEST = 8
"""Requests that must have ended before anything is concluded from them."""
UNBOUND_S = 1e6
"""A promise of nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(ByName):
    """`workers`: of both roles together. `half_life_s`: of what was late, half counts after so long."""

    cost: CostModel
    slo: Slo
    workers: int
    most_rows: int = 64  # that one decode worker runs: its setting
    chunk_tokens: int = 512  # of a step of prefill: its setting
    half_life_s: float = 120.0
    shape_requests: float = 50.0  # of what requests are like, half counts after so many
    dwell_s: float = 120.0
    restart_s: float = 30.0  # from the end of a process until its successor takes requests
    min_prefill: int = 1
    min_decode: int = 1

    @property
    def gap_s(self) -> float:
        """Promised between two tokens."""
        return min(self.slo.itl_s, self.slo.tpot_s)


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker that takes requests. `requests`: how many it has."""

    role: Role
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Flip:
    """What is to be done, and why."""

    worker: WorkerId
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the last requests: sums that fade, whose ratios count. `work_s`: of prefill, for the `arrived`."""

    arrived: float = 0.0
    work_s: float = 0.0
    ended: float = 0.0
    outputs: float = 0.0
    said: float = 0.0
    prompts: float = 0.0
    computed: float = 0.0

    def then(self, more: Demand, policy: Policy) -> Shape:
        work_s, _ = prefill_s(more, self, policy)
        fade, fade_ended = (0.5 ** (count / policy.shape_requests) for count in (more.requests, more.ended))
        return Shape(
            fade * self.arrived + more.requests,
            fade * self.work_s + work_s,
            fade_ended * self.ended + more.ended,
            fade_ended * self.outputs + more.outputs,
            fade_ended * self.said + more.said,
            fade_ended * self.prompts + more.prompts,
            fade_ended * self.computed + more.computed,
        )

    @property
    def answer_tokens(self) -> float:
        """Of answers that ended, long ones come last; all that was said, per answer that ended, is too much while
        longer ones begin. The geometric mean is between the two, and each of them when nothing changes."""
        return math.sqrt(self.outputs * max(self.said, self.outputs)) / max(1.0, self.ended)


def prefill_s(more: Demand, shape: Shape, policy: Policy) -> tuple[float, float]:
    """Of all prompts that came, and of the one that a token is most likely in."""
    if not more.tokens:
        return 0.0, 0.0
    prefill = policy.cost.prefill
    share = min(1.0, shape.computed / shape.prompts) if shape.prompts else 1.0
    per_token_s = share * (prefill.per_token_s + prefill.base_s / policy.chunk_tokens)
    per_square_s = share * (2 - share) / 2 * prefill.per_pair_s
    likely = more.squares / more.tokens
    return more.tokens * per_token_s + more.squares * per_square_s, likely * per_token_s + likely**2 * per_square_s


@dataclass(frozen=True, slots=True)
class Virtual:
    """What demand would have left behind in one split. `late`: of the requests of the last look."""

    queue_s: float = 0.0
    running: float = 0.0
    strain: float = 0.0  # the larger of q / P T and r / D B, of late the largest
    late: float = 0.0
    regret: float = 0.0

    def then(self, prefill: int, decode: int, more: Demand, shape: Shape, policy: Policy, seconds: float) -> Virtual:
        """One look later. `shape` knows of `more` already."""
        work_s, one_s = prefill_s(more, shape, policy)
        patience_s = prefill * max(0.0, min(policy.slo.ttft_s, UNBOUND_S) - one_s)
        waits = min(1.0, max(0.0, (self.queue_s + work_s - patience_s) / work_s)) if work_s else 0.0
        served_s = min(self.queue_s + work_s, prefill * seconds)
        queue_s = min(self.queue_s + work_s - served_s, 2 * patience_s)
        passed = served_s * shape.arrived / shape.work_s if shape.work_s else 0.0
        running, most = self._running_after(decode, passed, shape, policy, seconds)
        late = 1.0 if running > most else waits
        strain = max(running / most, queue_s / patience_s if patience_s else 0.0)
        return replace(
            self,
            queue_s=queue_s,
            running=min(running, 2 * most),
            strain=max(strain, self.strain * 0.5 ** (seconds / STRAIN_HALF_LIFE_S)),
            late=late * more.requests,
        )

    def _running_after(
        self, decode: int, joined: float, shape: Shape, policy: Policy, seconds: float
    ) -> tuple[float, float]:
        """And as many as may run."""
        outputs = shape.answer_tokens
        prompt = shape.prompts / max(1.0, shape.ended)
        context = prompt + outputs / 2
        most = decode * rows_within(policy, context, prompt + outputs)
        rows = min(self.running, most) / decode
        if not rows or not outputs:
            return self.running + joined, most
        left = seconds * rows * decode / (outputs * policy.cost.decode_step_s(math.ceil(rows), rows * context))
        return max(0.0, self.running + joined - left), most


def rows_within(policy: Policy, context: float, whole: float) -> float:
    """Requests that one decode worker runs at a time within the promised gap and its pool; at least one."""
    cost, gap_s = policy.cost, policy.gap_s
    rows = min(float(policy.most_rows), cost.pool_tokens / max(1.0, whole))
    each_s = cost.decode.per_row_s + cost.decode.per_key_s * context
    if gap_s < math.inf and each_s > 0:
        rows = min(rows, (gap_s - cost.decode.base_s) / each_s)
    return max(1.0, rows)


@dataclass(frozen=True, slots=True)
class Scaler:
    """What is remembered between two looks. `splits[k - 1]`: with k prefill workers."""

    policy: Policy
    splits: tuple[Virtual, ...] = ()
    shape: Shape = Shape()
    arrived: float = 0.0  # requests, in `span_s`; both fade as regrets do
    span_s: float = 0.0
    demand: Demand | None = None
    seen_s: float = 0.0
    changed_s: float = -math.inf
    changed_to: Role | None = None

    def look(
        self, demand: Demand, seats: Mapping[WorkerId, Seat], changing: bool, now: float
    ) -> tuple[Scaler, tuple[Flip, ...]]:
        """The next scaler, and what to do now. `demand` counts from the beginning; `seats`: who takes requests;
        `changing`: a change is under way."""
        policy = self.policy
        if self.demand is None:
            return replace(self, splits=(Virtual(),) * (policy.workers - 1), demand=demand, seen_s=now), ()
        if now <= self.seen_s:
            return self, ()
        prefill = sum(seat.role == "prefill" for seat in seats.values())
        after = self._seen(difference(demand, self.demand), prefill, now - self.seen_s)
        after = replace(after, demand=demand, seen_s=now)
        flips = () if changing else after._wanted(seats, prefill, now)
        return (replace(after, changed_s=now, changed_to=flips[0].role) if flips else after), flips

    def _seen(self, more: Demand, here: int, seconds: float) -> Scaler:
        policy = self.policy
        shape = self.shape.then(more, policy)
        fade = 0.5 ** (seconds / policy.half_life_s)
        splits = [
            one.then(prefill, policy.workers - prefill, more, shape, policy, seconds)
            for prefill, one in enumerate(self.splits, 1)
        ]
        own = splits[min(max(here, 1), len(splits)) - 1]  # has a regret after a change: that of others is less by it
        splits = [
            replace(one, regret=max(0.0, fade * max(0.0, one.regret - own.regret) + own.late - one.late))
            for one in splits
        ]
        return replace(
            self,
            shape=shape,
            splits=tuple(splits),
            arrived=fade * self.arrived + more.requests,
            span_s=fade * self.span_s + seconds,
        )

    def _wanted(self, seats: Mapping[WorkerId, Seat], prefill: int, now: float) -> tuple[Flip, ...]:
        policy, workers = self.policy, self.policy.workers
        choices = range(policy.min_prefill, workers - policy.min_decode + 1)
        if len(seats) != workers or prefill not in choices or self.shape.ended < FEWEST:
            return ()  # somebody is missing, who comes back
        regrets = {split: self.splits[split - 1].regret for split in choices}
        most = max(regrets.values())
        best = min(
            (split for split in choices if regrets[split] >= ALIKE * most),
            key=lambda split: (self.splits[split - 1].strain, abs(split - prefill)),
        )
        role: Role = "prefill" if best > prefill else "decode"
        if best == prefill or (role != self.changed_to and now - self.changed_s < policy.dwell_s):
            return ()
        if regrets[best] <= LOST * self.arrived / self.span_s * self._away_s(role):
            return ()
        leaving = [one for one, seat in seats.items() if seat.role != role]
        leaving.sort(key=lambda one: (seats[one].requests, one))
        at_once = min(abs(best - prefill), max(1, workers // 3))
        here, there = f"{prefill}P+{workers - prefill}D", f"{best}P+{workers - best}D"
        reason = f"{here} was too late for {regrets[best]:.0f} requests that {there} would have served in time"
        return tuple(Flip(worker, role, reason) for worker in leaving[:at_once])

    def _away_s(self, role: Role) -> float:
        """How long a worker that takes this role is missed: it finishes what it has, and its successor loads."""
        policy, shape = self.policy, self.shape
        finish_s = policy.gap_s * shape.answer_tokens if role == "prefill" else policy.slo.ttft_s
        return policy.restart_s + (finish_s if finish_s < math.inf else 0.0)


def difference(after: Demand, before: Demand) -> Demand:
    """What came in between. Where a count went back, somebody has begun anew: as if nothing had come."""
    earlier = structs.asdict(before)
    return Demand(**{name: max(0, count - earlier[name]) for name, count in structs.asdict(after).items()})
