"""Who asks for what, and when: readers of public trace formats and of our own. Pure: lines in, requests out.

Owns: the formats, and how a trace is scaled. Never: opens a file, or invents arrivals.

| format | a line |
|---|---|
| Mooncake (FAST'25) | `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}` |
| Azure LLM inference 2023 | CSV: `TIMESTAMP,ContextTokens,GeneratedTokens` |
| Baton | `{"arrival_s": s, "prompt_tokens": n, "output_tokens": n, "blocks": [...], "block_tokens": n}` |

Ids name blocks of a prompt, of 512 tokens where nothing else is said; two prompts that agree in their first ids agree
in as many blocks. They may be left out, as in Azure's, where nothing is known of prefixes. Mooncake's conversations
tell time in steps of three seconds, with ten requests in each: those of one step are spread over it.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby, islice, pairwise
from typing import TypeVar

import msgspec
from msgspec import Struct

from baton.common.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
KNOWN_FORMATS = "known: Mooncake's JSONL, Azure's CSV of 2023, Baton's JSONL (docs/PLANNER.md)"
AZURE_FIELDS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`blocks` identify the prompt's beginning, `block_tokens` tokens each."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Trace:
    """At least two requests, in order of arrival, the first one at 0. `left_out`: those that no worker could hold."""

    name: str
    requests: tuple[TraceRequest, ...]
    left_out: int = 0

    @property
    def rate(self) -> float:
        """Requests per second."""
        return (len(self.requests) - 1) / self.requests[-1].arrival_s

    @property
    def mean_prompt_tokens(self) -> float:
        return sum(one.prompt_tokens for one in self.requests) / len(self.requests)

    @property
    def mean_output_tokens(self) -> float:
        return sum(one.output_tokens for one in self.requests) / len(self.requests)


class _MooncakeLine(Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class _BatonLine(Struct, frozen=True, forbid_unknown_fields=True):
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


def read_trace(lines: Iterable[str], name: str, most: int | None = None) -> Trace:
    """The first `most` requests of a trace in any of the formats. Raises ConfigError, which names the line."""
    rest = iter(lines)
    first = next(rest, "")
    if not first.strip():
        raise ConfigError(name, first, "begins with an empty line, or is empty", KNOWN_FORMATS)
    reader = _reader_of(first, name)
    found = sorted(islice(reader(first, rest, name), most), key=lambda one: one.arrival_s)
    if len(found) < 2 or found[-1].arrival_s <= found[0].arrival_s:
        raise ConfigError(name, len(found), "a trace needs two requests that arrive at different times", KNOWN_FORMATS)
    if reader is _read_mooncake:
        found = _spread(found)
    start_s = found[0].arrival_s
    return Trace(name, tuple(replace(one, arrival_s=one.arrival_s - start_s) for one in found))


def _spread(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Those that arrive at one time arrive evenly until the next time; the last ones in as long as those before."""
    times = sorted({one.arrival_s for one in requests})
    lengths = [end - begin for begin, end in pairwise(times)]
    length_of = dict(zip(times, [*lengths, lengths[-1]], strict=True))
    spread: list[TraceRequest] = []
    for at_s, group in groupby(requests, key=lambda one: one.arrival_s):
        together = list(group)
        step_s = length_of[at_s] / len(together)
        spread += [replace(one, arrival_s=at_s + number * step_s) for number, one in enumerate(together)]
    return spread


def _reader_of(first: str, name: str) -> Callable[[str, Iterator[str], str], Iterator[TraceRequest]]:
    if first.strip().split(",") == AZURE_FIELDS:
        return _read_azure
    if '"timestamp"' in first:
        return _read_mooncake
    if '"arrival_s"' in first:
        return _read_baton
    raise ConfigError(f"{name}, line 1", first.strip()[:60], "is of no format that can be read", KNOWN_FORMATS)


def _read_mooncake(first: str, rest: Iterator[str], name: str) -> Iterator[TraceRequest]:
    for where, one in _json_lines(first, rest, name, _MooncakeLine):
        yield _checked(where, TraceRequest(one.timestamp / 1000.0, one.input_length, one.output_length, one.hash_ids))


def _read_baton(first: str, rest: Iterator[str], name: str) -> Iterator[TraceRequest]:
    for where, one in _json_lines(first, rest, name, _BatonLine):
        yield _checked(
            where,
            TraceRequest(one.arrival_s, one.prompt_tokens, one.output_tokens, one.blocks, one.block_tokens),
        )


LineT = TypeVar("LineT", bound=Struct)


def _json_lines(first: str, rest: Iterator[str], name: str, kind: type[LineT]) -> Iterator[tuple[str, LineT]]:
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(_chain(first, rest), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            yield where, decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(where, line.strip()[:60], str(error), KNOWN_FORMATS) from error


def _read_azure(first: str, rest: Iterator[str], name: str) -> Iterator[TraceRequest]:
    for number, row in enumerate(csv.reader(rest), 2):
        if not row:
            continue
        where = f"{name}, line {number}"
        try:
            at, prompt, output = row
            # Seven digits of a second: one too many.
            arrival_s = datetime.fromisoformat(at[:26]).replace(tzinfo=UTC).timestamp()
            yield _checked(where, TraceRequest(arrival_s, int(prompt), int(output)))
        except ValueError as error:
            raise ConfigError(where, ",".join(row)[:60], str(error), "a line is TIMESTAMP,tokens,tokens") from error


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _checked(where: str, request: TraceRequest) -> TraceRequest:
    for field, value in (
        ("prompt_tokens", request.prompt_tokens),
        ("output_tokens", request.output_tokens),
        ("block_tokens", request.block_tokens),
    ):
        if value < 1 and not (field == "output_tokens" and value == 0):
            raise ConfigError(f"{where}: {field}", value, "must be positive", KNOWN_FORMATS)
    return replace(request, output_tokens=max(1, request.output_tokens))


# --------------------------------------------------------------------------------------------------- scaling


def at_rate(trace: Trace, rate: float) -> Trace:
    """The same requests, so many per second: bursts stay bursts."""
    assert rate > 0
    factor = trace.rate / rate
    return replace(trace, requests=tuple(replace(one, arrival_s=one.arrival_s * factor) for one in trace.requests))


def one_by_one(trace: Trace, apart_s: float) -> Trace:
    """Each long after the one before."""
    requests = tuple(replace(one, arrival_s=number * apart_s) for number, one in enumerate(trace.requests))
    return replace(trace, requests=requests)


def with_lengths(trace: Trace, factor: float) -> Trace:
    """Prompts, answers and blocks `factor` times as long, for a model whose context is shorter than the trace's. At
    least one token each."""
    assert factor > 0

    def scaled(tokens: int) -> int:
        return max(1, round(tokens * factor))

    return replace(
        trace,
        requests=tuple(
            replace(
                one,
                prompt_tokens=scaled(one.prompt_tokens),
                output_tokens=scaled(one.output_tokens),
                block_tokens=scaled(one.block_tokens),
            )
            for one in trace.requests
        ),
    )


def within(trace: Trace, most_tokens: int) -> Trace:
    """Without the requests that need more KV than that. Raises ConfigError when hardly anything is left."""
    kept = tuple(one for one in trace.requests if one.prompt_tokens + one.output_tokens <= most_tokens)
    if len(kept) < 2 or kept[-1].arrival_s <= kept[0].arrival_s:
        reason = f"no two of its requests fit into a worker's {most_tokens} tokens of KV"
        raise ConfigError(trace.name, len(trace.requests), reason, "--scale-lengths 0.1 makes them shorter")
    start_s = kept[0].arrival_s
    return Trace(
        trace.name,
        tuple(replace(one, arrival_s=one.arrival_s - start_s) for one in kept),
        trace.left_out + len(trace.requests) - len(kept),
    )
