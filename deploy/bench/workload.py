"""What a benchmark asks, and when. Pure: the same seed asks the same.

Owns: the tokens of prompts and the times of arrival. Never: sends anything.

Prompts are token ids, so that their lengths are exact; drawn from those of single bytes, which every tokenizer of a
language model has. Prompts of a trace that agree in their first blocks agree in those tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from baton.common.errors import ConfigError
from baton.deploy.planner.traces import Trace, TraceRequest

FIRST_ID, LAST_ID = 32, 249
LENGTHS_EXAMPLE = "--lengths 512:128, prompt and answer"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, `at_s` after the beginning."""

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int


def parse_lengths(text: str) -> tuple[int, int]:
    """Of 512:128. Raises ConfigError."""
    prompt, colon, answer = text.partition(":")
    if not colon or not prompt.isdecimal() or not answer.isdecimal() or not int(prompt) or not int(answer):
        raise ConfigError("--lengths", text, "is not two numbers of tokens", LENGTHS_EXAMPLE)
    return int(prompt), int(answer)


def parse_rates(text: str) -> tuple[float, ...]:
    """Of 1,2,4.5. Raises ConfigError."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError("--rates", text, "are not numbers", "--rates 1,2,4, requests per second") from error
    if not all(0 < rate < float("inf") for rate in rates):
        raise ConfigError("--rates", text, "must be positive and finite", "--rates 1,2,4, requests per second")
    return rates


def same_lengths(prompt_tokens: int, output_tokens: int, count: int, seed: int) -> Trace:
    """Independent prompts of one length that arrive at random, one per second on average."""
    rng = random.Random(seed)
    gaps = [0.0, *(rng.expovariate(1.0) for _ in range(count - 1))]
    requests = (TraceRequest(at_s, prompt_tokens, output_tokens) for at_s in accumulate(gaps))
    return Trace(f"{prompt_tokens}:{output_tokens}", tuple(requests))


def asks_of(trace: Trace, seed: str) -> list[Ask]:
    """`seed` draws the tokens: with another one no server finds them in its cache."""
    rng = random.Random(seed)
    return [Ask(one.arrival_s, _prompt(one, seed, rng), one.output_tokens) for one in trace.requests]


def _prompt(request: TraceRequest, seed: str, rng: random.Random) -> tuple[int, ...]:
    ids: list[int] = []
    for block in request.blocks[: -(-request.prompt_tokens // request.block_tokens)]:
        ids += _ids(random.Random(f"{seed}/{block}"), request.block_tokens)
    ids += _ids(rng, request.prompt_tokens - len(ids))
    return tuple(ids[: request.prompt_tokens])


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]
