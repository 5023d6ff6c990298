"""What a step of the engine and a hand-off take: a few measured coefficients, and the file they are kept in.

Owns: the formulas, the format of a cost file and its validity. Never: measures anything (`calibrate` does), or reads a
file. Seconds, tokens and bytes throughout.

A step computes query tokens of prompts (a prefill) and one token of running requests (a decode). With

    T  prompt tokens      P  pairs (query token of a prompt, key it sees)
    B  running requests   K  keys that these read, all together

it takes `prefill.base_s + per_token_s T + per_pair_s P` when only prompts are computed, `decode.base_s + per_row_s B +
per_key_s K` when only running requests are, and of both together all of it, with the larger base alone: weights are
read once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct

from baton.common.engine.batch import Batch
from baton.common.engine.chunk_predictor import pairs_of
from baton.common.errors import ConfigError

VERSION = 1
REMEDY = "make it again: baton calibrate"


class PrefillCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a step that computes prompts."""

    base_s: float
    per_token_s: float
    per_pair_s: float


class DecodeCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a step that computes one token of each running request."""

    base_s: float
    per_row_s: float
    per_key_s: float


class LaneCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a hand-off: from asking until the KV is the receiver's, less what it computes."""

    name: str
    latency_s: float
    bytes_per_s: float


class FitError(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the formula is from what was measured, as shares of the measured times."""

    points: int
    mean: float
    worst: float


class Fits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`mixed` was not fitted to: steps of both kinds of work, which the formula adds up."""

    prefill: FitError
    decode: FitError
    mixed: FitError
    lane: FitError


class Service(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many times as long a step took in a cluster whose workers are busy as the formula says of one alone; it is
    in the coefficients already."""

    prefill: float
    decode: float


class CostModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker of one kind of machine with one model. `overhead_s`: of a request, outside of engine and lane: the
    gateway, and frames to and from the worker."""

    version: Literal[1] = 1
    model: str
    dtype: str
    machine: str
    threads: int
    kv_bytes_per_token: int
    pool_tokens: int  # of KV in one worker's pool
    overhead_s: float
    prefill: PrefillCost
    decode: DecodeCost
    lane: LaneCost
    service: Service | None = None  # None: nobody measured it
    fits: Fits | None = None

    def in_service(self, service: Service) -> CostModel:
        """Of steps measured alone: with steps so many times as long."""
        prefill, decode = self.prefill, self.decode
        return msgspec.structs.replace(
            self,
            service=service,
            prefill=PrefillCost(
                base_s=prefill.base_s * service.prefill,
                per_token_s=prefill.per_token_s * service.prefill,
                per_pair_s=prefill.per_pair_s * service.prefill,
            ),
            decode=DecodeCost(
                base_s=decode.base_s * service.decode,
                per_row_s=decode.per_row_s * service.decode,
                per_key_s=decode.per_key_s * service.decode,
            ),
        )

    def prefill_step_s(self, tokens: int, pairs: float) -> float:
        return self.prefill.base_s + self.prefill.per_token_s * tokens + self.prefill.per_pair_s * pairs

    def decode_step_s(self, rows: int, keys: float) -> float:
        return self.decode.base_s + self.decode.per_row_s * rows + self.decode.per_key_s * keys

    def mixed_step_s(self, tokens: int, pairs: float, rows: int, keys: float) -> float:
        """Either may be nothing."""
        if not rows:
            return self.prefill_step_s(tokens, pairs)
        if not tokens:
            return self.decode_step_s(rows, keys)
        both_s = self.prefill_step_s(tokens, pairs) + self.decode_step_s(rows, keys)
        return both_s - min(self.prefill.base_s, self.decode.base_s)

    def transfer_s(self, tokens: int) -> float:
        """Of the bytes alone."""
        return tokens * self.kv_bytes_per_token / self.lane.bytes_per_s


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step's cost for the simulator's runner. A row of one query token that has a past is a running request's."""

    cost: CostModel

    def of(self, batch: Batch) -> float:
        queries, keys = np.diff(batch.q_offsets), batch.kv_lens
        runs = (queries == 1) & (keys > 1)
        chunks = zip(queries[~runs].tolist(), keys[~runs].tolist(), strict=True)
        pairs = sum(pairs_of(end - tokens, end) for tokens, end in chunks)
        return self.cost.mixed_step_s(int(queries[~runs].sum()), pairs, int(runs.sum()), float(keys[runs].sum()))


def encode_cost(cost: CostModel) -> bytes:
    """As a cost file."""
    return msgspec.json.format(msgspec.json.encode(cost), indent=2) + b"\n"


def decode_cost(data: bytes, name: str) -> CostModel:
    """Of a cost file called `name`. Raises ConfigError for the first thing in it that cannot be."""
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ConfigError(name, _beginning(data), f"is no JSON: {error}", REMEDY) from error
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise ConfigError(f"{name}: version", version, f"this Baton reads version {VERSION}", REMEDY)
    try:
        cost = msgspec.convert(found, CostModel)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`") or "(top level)"
        raise ConfigError(f"{name}: {field}", _value_at(found, field), what, REMEDY) from error
    for field, value in _numbers(cost):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name}: {field}", value, "must be finite and not negative", REMEDY)
    for field, value in _positive(cost):
        if value <= 0:
            raise ConfigError(f"{name}: {field}", value, "must be positive", REMEDY)
    return cost


def _beginning(data: bytes) -> str:
    return data[:20].decode(errors="replace")


def _value_at(found: object, path: str) -> object:
    """Of a field, as far as it is there."""
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _numbers(cost: CostModel) -> Iterator[tuple[str, float]]:
    yield "overhead_s", cost.overhead_s
    for group in ("prefill", "decode", "lane"):
        for name, value in msgspec.structs.asdict(getattr(cost, group)).items():
            if isinstance(value, int | float):
                yield f"{group}.{name}", value


def _positive(cost: CostModel) -> Iterator[tuple[str, float]]:
    yield "kv_bytes_per_token", cost.kv_bytes_per_token
    yield "pool_tokens", cost.pool_tokens
    yield "lane.bytes_per_s", cost.lane.bytes_per_s
    yield "prefill", cost.prefill_step_s(1, 1)
    yield "decode", cost.decode_step_s(1, 1)
