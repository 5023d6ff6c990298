"""States of a request at a gateway, and what its core tells: the words of `gateway_core`. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from baton.common.engine.core_api import SendTo
from baton.common.ids import RequestId, Stamp
from baton.common.messages import Body, Failure, Timeline, TokenLogprob
from baton.common.prompt_logprobs import PromptLogprobs

# --------------------------------------------------------------------------------------------- towards the client


class TokensArrived(Struct, frozen=True):
    """Output tokens number `first_index`, `first_index` + 1, ... In order, without gap, each exactly once."""

    request_id: RequestId
    first_index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: PromptLogprobs | None = None  # with token 0, where they are wanted


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The one outcome: `finish_reason` ("stop" | "length") or `failure`. `retry_after_s` is advice to the client;
    `timeline` is the worker's account."""

    request_id: RequestId
    finish_reason: str
    failure: Failure | None
    timeline: Timeline | None
    placements: int
    retry_after_s: float | None = None
    waited_s: float = 0.0  # for its turn at the gateway


GatewayEffect = SendTo | TokensArrived | RequestEnded


# ----------------------------------------------------------------------------------------------- states


@dataclass(frozen=True, slots=True)
class Waiting:
    """For its turn, or for a decode worker that can take it. Given up at `give_up_s` if there is none."""

    give_up_s: float


@dataclass(frozen=True, slots=True)
class Placing:
    """Submit was sent, and is sent again until answered."""

    worker: Stamp


class Streaming(Struct, frozen=True):
    """The worker has it. `heard_s`: its last sign of life for this request."""

    worker: Stamp
    heard_s: float


State = Waiting | Placing | Streaming


def to_worker(worker: Stamp, body: Body) -> SendTo:
    return SendTo(worker.worker, worker.epoch, body)
