"""Measures on this machine what the planner needs to know: steps of the real engine, hand-offs of the real plane.

Owns: what is measured, and in which order. Never: a formula (`cost`, `fit`). Steps are those of one worker with its
cores, as `baton serve` would run it; a step takes what the fastest of some rounds took, in processor time where one
thread computes it: on an idle machine that is the same, and on a busy one it is not other processes' time. Hand-offs
are told by the clock, the median. Then a real cluster tells how much longer a step takes in service, and what a request
takes beside its steps.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from baton.common.config import FAKE_MODEL, ClusterConfig
from baton.common.engine.batch import BatchRow, ModelRunner, pack_batch
from baton.common.engine.chunk_predictor import pairs_of
from baton.common.errors import ConfigError
from baton.common.ids import WorkerId
from baton.common.least_squares import F64, non_negative_fit
from baton.common.messages import SamplingParams
from baton.common.units import pages_for_tokens
from baton.deploy.planner.cost import (
    CostModel,
    DecodeCost,
    FitError,
    Fits,
    LaneCost,
    PrefillCost,
    Service,
)
from baton.deploy.planner.fit import fit_error
from baton.deploy.planner.lane_meter import MeasuredHandoff, measure_handoffs
from baton.deploy.planner.service_meter import MeasuredService, measure_service
from baton.transfer.keys import NOWHERE
from baton.transfer.model_runner import make_runner
from baton.transfer.process import ProcessSpec

Told = Callable[[str], None]
GREEDY = SamplingParams()
PREFILL_TOKENS = (16, 64, 128, 256, 512)
PREFILL_BEFORE = (0, 512, 2048)
"""Tokens of a prompt that were computed in earlier chunks."""
DECODE_ROWS = (1, 2, 4, 8, 16, 32)
DECODE_KEYS = (64, 512, 2048)
MIXED = ((4, 512, 128), (16, 128, 256))
"""Running requests, keys of each, tokens of the prompt beside them."""
HANDOFF_BYTES = (0, 4 << 20, 16 << 20, 48 << 20)
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A step that was measured: what it computed, and how long it took."""

    tokens: int
    pairs: float
    rows: int
    keys: int
    took_s: float


class Bench:
    """Steps over one runner's pool. What the pages hold does not matter: it costs the same. `clock`: seconds."""

    def __init__(self, runner: ModelRunner, num_pages: int, rounds: int, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._page_size = runner.memory.layout.page_size
        self._num_pages = num_pages
        self._rounds = rounds

    def fits(self, rows: int, keys: int, tokens: int, before: int) -> bool:
        """Enough pages, and positions."""
        needed = rows * pages_for_tokens(keys, self._page_size) + pages_for_tokens(before + tokens, self._page_size)
        return needed <= self._num_pages and max(keys, before + tokens) <= self._runner.max_positions

    def step(self, rows: int, keys: int, tokens: int, before: int) -> StepPoint:
        """`rows` running requests that see `keys` keys each, and a chunk of `tokens` behind `before`, if any."""
        batch_rows: list[BatchRow] = []
        first = 1
        for length, end in [(1, keys)] * rows + [(tokens, before + tokens)] * bool(tokens):
            count = pages_for_tokens(end, self._page_size)
            ids = np.arange(10, 10 + length, dtype=np.int32)
            pages = np.arange(first, first + count, dtype=np.int32)
            batch_rows.append(BatchRow(len(batch_rows), ids, end, pages, GREEDY))
            first += count
        batch = pack_batch(batch_rows, self._page_size)
        took_s = []
        for _ in range(1 + self._rounds):  # the first one warms up
            started = self._clock()
            self._runner.collect(self._runner.launch(batch))
            took_s.append(self._clock() - started)
        return StepPoint(tokens, pairs_of(before, before + tokens), rows, rows * keys, min(took_s[1:]))


def measure_steps(bench: Bench, told: Told) -> dict[str, list[StepPoint]]:
    """Prefill, decode and mixed ones, as far as they fit."""
    wanted = {
        "prefill": [(0, 0, tokens, before) for before in PREFILL_BEFORE for tokens in PREFILL_TOKENS],
        "decode": [(rows, keys, 0, 0) for keys in DECODE_KEYS for rows in DECODE_ROWS],
        "mixed": [(rows, keys, tokens, 0) for rows, keys, tokens in MIXED],
    }
    found: dict[str, list[StepPoint]] = {}
    for kind, shapes in wanted.items():
        found[kind] = [bench.step(*shape) for shape in shapes if bench.fits(*shape)]
        told(f"{kind}: {len(found[kind])} steps measured")
        if len(found[kind]) < 3 and kind != "mixed":
            raise ConfigError(
                "kv.pool_bytes", len(found[kind]), f"the pool is too small to measure {kind} steps", "more"
            )
    return found


def fit_prefill(points: Sequence[StepPoint]) -> tuple[PrefillCost, FitError]:
    features = np.array([[1.0, one.tokens, one.pairs] for one in points])
    seconds = np.array([one.took_s for one in points])
    base_s, per_token_s, per_pair_s = (found := non_negative_fit(features, seconds)).tolist()
    cost = PrefillCost(base_s=base_s, per_token_s=per_token_s, per_pair_s=per_pair_s)
    return cost, fit_error(features @ found, seconds)


def fit_decode(points: Sequence[StepPoint]) -> tuple[DecodeCost, FitError]:
    features = np.array([[1.0, one.rows, one.keys] for one in points])
    seconds = np.array([one.took_s for one in points])
    base_s, per_row_s, per_key_s = (found := non_negative_fit(features, seconds)).tolist()
    return DecodeCost(base_s=base_s, per_row_s=per_row_s, per_key_s=per_key_s), fit_error(features @ found, seconds)


def fit_lane(handoffs: Sequence[MeasuredHandoff]) -> tuple[LaneCost, FitError]:
    """Of the medians of each size."""
    sizes = sorted({one.nbytes for one in handoffs})
    seconds = np.array([statistics.median(one.took_s for one in handoffs if one.nbytes == size) for size in sizes])
    features: F64 = np.array([[1.0, float(size)] for size in sizes])
    latency_s, per_byte_s = (found := non_negative_fit(features, seconds)).tolist()
    if per_byte_s <= 0:  # the machine was too busy to see the difference
        per_byte_s = float(seconds[-1]) / sizes[-1]
        found = np.array([latency_s, per_byte_s])
    lane = LaneCost(name=handoffs[-1].lane, latency_s=latency_s, bytes_per_s=1.0 / per_byte_s)
    return lane, fit_error(features @ found, seconds)


def calibrate(config: ClusterConfig, told: Told) -> CostModel:
    """Of a resolved configuration. Raises ConfigError for models of which the planner knows nothing."""
    if config.model.model == FAKE_MODEL:
        raise ConfigError("model.model", FAKE_MODEL, "computes nothing: there is no cost to measure", "a real model")
    alone = calibrate_alone(config, told)
    told("a cluster of 1 prefill and 1 decode worker: what service adds")
    return with_service(alone, measure_service(config))


def with_service(alone: CostModel, seen: MeasuredService) -> CostModel:
    """`alone`, with steps as long as they were in a cluster, and a request's overhead there."""
    prompt_s = alone.prefill_step_s(seen.prompt_tokens, pairs_of(0, seen.prompt_tokens))
    service = Service(prefill=seen.prompt_s / prompt_s, decode=seen.gap_s / alone.decode_step_s(seen.rows, seen.keys))
    overhead_s = max(0.0, seen.first_token_s - alone.lane.latency_s)
    return msgspec.structs.replace(alone.in_service(service), overhead_s=overhead_s)


def calibrate_alone(config: ClusterConfig, told: Told) -> CostModel:
    """Steps of one engine that nothing disturbs, and hand-offs; no overhead."""
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[:1] if config.pin_cores else cores
    page_size = config.kv.page_size
    num_pages = config.kv.num_pages
    assert num_pages is not None, "resolved"
    os.sched_setaffinity(0, mine)
    try:
        runner = make_runner(_as_a_worker(config, tuple(mine)), told)
        if not runner.memory.layout.only_full:
            reason = "has layers that do not attend to every token, which the planner's formulas know nothing of"
            raise ConfigError("model.model", config.model.model, reason, "calibrate a model of full attention")
        clock = time.process_time if len(mine) == 1 else time.perf_counter
        bench = Bench(runner, num_pages, ROUNDS, clock)
        points = measure_steps(bench, told)
        page_bytes = runner.memory.main.page_bytes
        counts = tuple(sorted({max(1, nbytes // page_bytes) for nbytes in HANDOFF_BYTES}))
        others = tuple(one for one in cores if one not in mine) or tuple(mine)
        handoffs = measure_handoffs(config, page_bytes, counts, 3 * ROUNDS, others[:1])
    finally:
        os.sched_setaffinity(0, cores)
    told(f"hand-offs: {len(handoffs)} measured over {handoffs[-1].lane}")
    prefill, prefill_error = fit_prefill(points["prefill"])
    decode, decode_error = fit_decode(points["decode"])
    lane, lane_error = fit_lane(handoffs)
    cost = CostModel(
        model=config.model.model,
        dtype=config.model.dtype,
        machine=f"{processor_name()}, {len(cores)} cores",
        threads=len(mine),
        kv_bytes_per_token=page_bytes // page_size,
        pool_tokens=num_pages * page_size,
        overhead_s=0.0,
        prefill=prefill,
        decode=decode,
        lane=lane,
    )
    mixed = mixed_error(cost, points["mixed"])
    fits = Fits(prefill=prefill_error, decode=decode_error, mixed=mixed, lane=lane_error)
    return msgspec.structs.replace(cost, fits=fits)


def _as_a_worker(config: ClusterConfig, cores: tuple[int, ...]) -> ProcessSpec:
    """What a decode worker would be told of its model."""
    return ProcessSpec(
        worker=WorkerId("decode-0"),
        role="decode",
        incarnation=1,
        controller=NOWHERE,
        config=config,
        cores=cores,
        run_dir="",
    )


def mixed_error(cost: CostModel, points: Sequence[StepPoint]) -> FitError:
    """Of steps that nothing was fitted to."""
    if not points:
        return FitError(points=0, mean=0.0, worst=0.0)
    predicted = np.array([cost.mixed_step_s(one.tokens, one.pairs, one.rows, one.keys) for one in points])
    return fit_error(predicted, np.array([one.took_s for one in points]))


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
