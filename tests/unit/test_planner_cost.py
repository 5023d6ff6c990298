"""Cost files say what is wrong with them; formulas count tokens, pairs, rows and keys; fits find what was put in."""

from __future__ import annotations

import json

import numpy as np
import pytest
from planner_rig import COST, costing

from baton.common.config import FAKE_MODEL, ClusterConfig, ModelConfig
from baton.common.engine.batch import BatchRow, pack_batch
from baton.common.engine.chunk_predictor import pairs_of
from baton.common.errors import ConfigError
from baton.common.least_squares import non_negative_fit
from baton.common.messages import SamplingParams
from baton.deploy.planner.calibrate import StepPoint, calibrate, fit_decode, fit_lane, fit_prefill, with_service
from baton.deploy.planner.cost import (
    DecodeCost,
    LaneCost,
    MeasuredStep,
    PrefillCost,
    decode_cost,
    encode_cost,
)
from baton.deploy.planner.lane_meter import MeasuredHandoff
from baton.deploy.planner.service_meter import MeasuredService


def test_a_model_that_computes_nothing_has_no_cost() -> None:
    with pytest.raises(ConfigError, match="computes nothing: there is no cost"):
        calibrate(ClusterConfig(model=ModelConfig(model=FAKE_MODEL)), lambda _: None)


def test_a_cost_file_comes_back_as_it_was() -> None:
    assert decode_cost(encode_cost(COST), "cost.json") == COST


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version = 2: this Baton reads version 1 (make it again: baton calibrate)"),
        ({"decode": {"base_s": "x", "per_row_s": 0, "per_key_s": 0}}, "cost.json: decode.base_s = 'x'"),
        ({"decode": {"base_s": -1.0, "per_row_s": 1, "per_key_s": 0}}, "decode.base_s = -1.0: must be finite and not"),
        ({"decode": {"base_s": 0.0, "per_row_s": 0, "per_key_s": 0}}, "decode = 0.0: must be positive"),
        ({"lane": {"name": "local", "latency_s": 0.0, "bytes_per_s": 0.0}}, "lane.bytes_per_s = 0.0: must be positive"),
        ({"pool_tokens": 0}, "pool_tokens = 0: must be positive"),
        ({"frobs": 3}, "unknown field `frobs`"),
    ],
)
def test_a_cost_file_that_cannot_be_is_refused(change: dict[str, object], says: str) -> None:
    data = json.loads(encode_cost(COST)) | change
    with pytest.raises(ConfigError) as refused:
        decode_cost(json.dumps(data).encode(), "cost.json")
    assert says in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"3"])
def test_what_is_no_cost_file_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="baton calibrate"):
        decode_cost(data, "cost.json")


def test_pairs_are_those_of_causal_attention() -> None:
    assert pairs_of(0, 3) == 1 + 2 + 3
    assert pairs_of(2, 4) == 3 + 4


def test_a_batch_is_taken_apart_into_chunks_and_running_requests() -> None:
    cost = costing(
        prefill=PrefillCost(base_s=1.0, per_token_s=0.1, per_pair_s=0.001),
        decode=DecodeCost(base_s=2.0, per_row_s=0.3, per_key_s=0.01),
    )

    def row(key: int, tokens: int, end: int) -> BatchRow:
        pages = np.arange(1, 2 + (end - 1) // 16, dtype=np.int32)
        return BatchRow(key, np.zeros(tokens, dtype=np.int32), end, pages, SamplingParams())

    step = MeasuredStep(cost)
    assert step.of(pack_batch([row(0, 1, 20), row(1, 1, 30)], 16)) == pytest.approx(2.0 + 2 * 0.3 + 50 * 0.01)
    assert step.of(pack_batch([row(0, 4, 10)], 16)) == pytest.approx(1.0 + 0.4 + 0.001 * (7 + 8 + 9 + 10))
    both = step.of(pack_batch([row(0, 1, 20), row(1, 4, 10)], 16))
    assert both == pytest.approx(2.0 + 0.3 + 0.2 + 0.4 + 0.034), "one base: weights are read once"
    assert step.of(pack_batch([row(0, 1, 1)], 16)) == pytest.approx(1.0 + 0.1 + 0.001), "a prompt of one token"


def test_a_fit_finds_what_was_put_in_and_is_never_negative() -> None:
    rng = np.random.default_rng(1)
    features = np.hstack([np.ones((40, 1)), rng.random((40, 2)) * [100, 5000]])
    assert non_negative_fit(features, features @ [0.5, 0.02, 0.001]) == pytest.approx([0.5, 0.02, 0.001])
    falling = non_negative_fit(features, 10.0 - 0.001 * features[:, 2])
    assert (falling >= 0).all()
    assert falling[2] == 0


def test_what_was_measured_becomes_costs_and_an_error() -> None:
    prefill = [StepPoint(t, pairs_of(b, b + t), 0, 0, 0.01 + 1e-3 * t + 1e-6 * pairs_of(b, b + t)) for t, b in
               ((16, 0), (64, 0), (256, 0), (64, 512), (256, 512))]  # fmt: skip
    cost, error = fit_prefill(prefill)
    assert (cost.base_s, cost.per_token_s, cost.per_pair_s) == pytest.approx((0.01, 1e-3, 1e-6))
    assert error.points == 5
    assert error.worst < 1e-6
    decode = [StepPoint(0, 0.0, r, r * k, (0.01 + 1e-3 * r + 1e-6 * r * k) * noise) for r, k, noise in
              ((1, 64, 1.1), (1, 64, 0.9), (8, 64, 1.0), (8, 512, 1.1), (32, 512, 0.9))]  # fmt: skip
    _, error = fit_decode(decode)
    assert 0.03 < error.mean < error.worst < 0.2
    handoffs = [MeasuredHandoff("tcp", n, 0.002 + n / 2e9) for n in (1_000, 1_000_000, 50_000_000)]
    lane, _ = fit_lane([*handoffs, MeasuredHandoff("tcp", 1_000, 5.0), MeasuredHandoff("tcp", 1_000, 0.002)])
    assert lane.bytes_per_s == pytest.approx(2e9, rel=0.01), "medians: one bad round does not count"
    busy, _ = fit_lane([MeasuredHandoff("tcp", n, 0.002) for n in (1_000, 50_000_000)])
    assert isinstance(busy, LaneCost)
    assert busy.bytes_per_s > 0


def test_steps_are_as_long_as_they_were_in_service() -> None:
    alone = costing(lane=LaneCost(name="local", latency_s=0.002, bytes_per_s=1e9))
    prompt_s, gap_s = alone.prefill_step_s(512, pairs_of(0, 512)), alone.decode_step_s(4, 400)
    seen = MeasuredService(
        first_token_s=0.007, prompt_tokens=512, prompt_s=1.2 * prompt_s, rows=4, keys=400, gap_s=1.1 * gap_s
    )
    cost = with_service(alone, seen)
    assert cost.prefill_step_s(512, pairs_of(0, 512)) == pytest.approx(1.2 * prompt_s)
    assert cost.decode_step_s(4, 400) == pytest.approx(1.1 * gap_s)
    assert cost.overhead_s == pytest.approx(0.005), "its hand-off is counted apart"
    assert cost.service is not None
    assert (cost.service.prefill, cost.service.decode) == pytest.approx((1.2, 1.1))
    assert decode_cost(encode_cost(cost), "file") == cost
