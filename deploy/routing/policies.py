"""Who of the workers that could take a prompt shall have it: policies, by name. Pure functions of a `Choice`.

A policy is given all that is known and returns the place of its worker in it, one whose `takes` is true; None when
there is none. It knows no clock and draws nothing itself: `draw` is a number that is made of the request's name and of
how often it has been placed, so that the same question has the same answer everywhere. A policy of your own is a
function of the same kind, `routing.policy: package.module:function` (`own_policy.py`). See docs/ROUTING.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from baton.common.routing_config import PolicyName

Role = Literal["prefill", "decode"]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

SLACK = 4
"""So many requests more than the least loaded worker has may be on one that suits a prompt better."""
COMPUTE_WEIGHT = 2.0
"""What a token that must be computed counts beside one that is waited for: it also keeps others waiting."""
CLOSE = 0.5
"""Costs that differ by less than this share of the prompt are as good as equal: news of what is waited for are late."""
_NEVER = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One prompt and the workers of a role, by place. Heartbeats lag behind: `requests` are the larger of what a worker
    said and of what this gateway has placed there, tokens what this gateway has placed and what was others' then.

    `matched`: tokens of the prompt that are cached there, 0 where that is not known; `current`: nothing that it said of
    its cache is missing; `requests`: that it has;
    `waiting_tokens`: of prompts that are not computed (prefill) or admitted (decode) yet; `tokens_per_s`: 0 where
    nothing was measured; `affinity`: a hash of the worker and of how the prompt begins, the least is preferred;
    `turn`: how many choices there were before."""

    role: Role
    prompt_tokens: int
    page_size: int
    takes: Bools
    matched: I64
    current: Bools
    requests: I64
    waiting_tokens: I64
    free_pages: I64
    tokens_per_s: F64
    affinity: U64
    turn: int
    draw: int


Policy = Callable[[Choice], int | None]


def rendezvous(choice: Choice) -> int | None:
    """Who prefers prompts that begin like this one, of those who have at most SLACK requests more than the least."""
    return _preferred(choice, _within_slack(choice))


def least_loaded(choice: Choice) -> int | None:
    """The fewest requests; of equal ones the one that prefers such prompts."""
    return _preferred(choice, _least(choice.requests, choice.takes))


def power_of_two(choice: Choice) -> int | None:
    """Two are drawn, and the one with fewer requests has it: what many gateways with late news do well with."""
    return _of_two(choice, choice.requests)


def round_robin(choice: Choice) -> int | None:
    """One after the other."""
    able = np.flatnonzero(choice.takes)
    return int(able[choice.turn % len(able)]) if len(able) else None


def prefix_aware(choice: Choice) -> int | None:
    """Prefill: where the prompt is computed soonest, when what must be computed counts COMPUTE_WEIGHT times; of those
    who are CLOSE to that, who has the most of it cached. Decode: of those who have at most SLACK requests more than the
    least and room for the prompt, who has the most of it cached. Where nobody is known to have any of it, and news of
    somebody are missing: the power of two choices, by the same costs."""
    lost = not (choice.matched * choice.takes).any() and not choice.current[choice.takes].all()
    if choice.role == "decode":
        return _of_two(choice, choice.requests) if lost else _prefix_aware_decode(choice)
    cost = prefill_cost(choice)
    if lost:
        return _of_two(choice, cost)
    able = choice.takes & (cost <= cost.min(initial=np.inf, where=choice.takes) + CLOSE * choice.prompt_tokens)
    return _preferred(choice, _most_matched(choice, able))


def _prefix_aware_decode(choice: Choice) -> int | None:
    if not (choice.matched * choice.takes).any():
        return least_loaded(choice)
    able = _within_slack(choice)
    pages = -(-(choice.prompt_tokens - choice.matched) // choice.page_size)
    roomy = able & (choice.free_pages >= pages)
    able = roomy if roomy.any() else able
    return _preferred(choice, _most_matched(choice, able))


def prefill_cost(choice: Choice) -> F64:
    """How long until the prompt is computed there, nearly, in tokens that a worker of average speed computes meanwhile;
    who has told no speed counts as average."""
    cost: F64 = choice.waiting_tokens + COMPUTE_WEIGHT * (choice.prompt_tokens - choice.matched)
    speeds = choice.tokens_per_s
    known = speeds[speeds > 0]
    if len(known):
        average = float(known.mean())
        cost *= average / np.where(speeds > 0, speeds, average)
    return cost


def _most_matched(choice: Choice, able: Bools) -> Bools:
    best: Bools = able & (choice.matched == choice.matched.max(initial=0, where=able))
    return best


def _within_slack(choice: Choice) -> Bools:
    able = choice.requests[choice.takes]
    return choice.takes & (choice.requests <= (able.min() if len(able) else 0) + SLACK)


def _least(cost: I64 | F64, takes: Bools) -> Bools:
    able = cost[takes]
    return takes & (cost == able.min()) if len(able) else takes


def _preferred(choice: Choice, able: Bools) -> int | None:
    return int(np.where(able, choice.affinity, _NEVER).argmin()) if able.any() else None


def _of_two(choice: Choice, cost: I64 | F64) -> int | None:
    able = np.flatnonzero(choice.takes)
    if not len(able):
        return None
    first = choice.draw % len(able)
    second = (first + 1 + mixed(choice.draw) % max(1, len(able) - 1)) % len(able)
    one, other = int(able[first]), int(able[second])
    return other if cost[other] < cost[one] else one


def mixed(number: int) -> int:
    """64 bits that look random (the finalizer of splitmix64)."""
    number = (number + 0x9E37_79B9_7F4A_7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return number ^ (number >> 31)


POLICIES: Mapping[PolicyName, Policy] = {
    "prefix_aware": prefix_aware,
    "rendezvous": rendezvous,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "round_robin": round_robin,
}
