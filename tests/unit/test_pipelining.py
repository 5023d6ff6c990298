"""Into how many groups of layers a prompt's end is cut: by what it costs, and by what it saves."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.engine.batch import KvMemory
from baton.common.kv.buffers import NumpyKvBuffer
from baton.common.kv.layout import Component, KvLayout
from baton.prefill.pipelining import LEAST_REGION_BYTES, SHORT_TAIL_S, LayerGroups

LLAMA_8B = LayerGroups(layers=32, page_bytes=2 << 20, wanted="adaptive")  # pages of 16 tokens
SMALL = LayerGroups(layers=30, page_bytes=360 << 10, wanted="adaptive")


@pytest.mark.parametrize(
    ("groups", "pages", "lane_gbps", "compute_s", "expected"),
    [
        (LLAMA_8B, 32, 1.0, 0.2, 8),  # 67 ms of bytes: as many as there may be
        (LLAMA_8B, 32, 10.0, 0.2, 4),  # 6.7 ms: until 2 ms are left
        (LLAMA_8B, 32, 100.0, 0.2, 1),  # 0.7 ms
        (LLAMA_8B, 32, 10.0, 0.5, 1),  # 6.7 ms behind half a second
        (LLAMA_8B, 32, 0.0, 0.2, 1),  # nobody knows how fast the lane is
        (LLAMA_8B, 32, 1.0, 0.0, 1),  # nor how long it takes
        (SMALL, 4, 0.01, 0.2, 5),  # regions of 256 KiB at least
        (SMALL, 1, 0.01, 0.2, 1),
    ],
)
def test_as_many_as_pay_off(groups: LayerGroups, pages: int, lane_gbps: float, compute_s: float, expected: int) -> None:
    assert groups.choose(pages, lane_gbps, compute_s) == expected


def test_what_is_left_behind_the_last_layer_is_short_or_cannot_be_shorter() -> None:
    rng = np.random.default_rng(1)
    for _ in range(2000):
        layers, pages = int(rng.integers(1, 80)), int(rng.integers(1, 200))
        groups = LayerGroups(layers, layers * int(rng.integers(1, 64)) * 1024, "adaptive")
        gbps, compute_s = float(rng.uniform(0.1, 50)), float(rng.uniform(0.001, 1))
        parts = groups.choose(pages, gbps, compute_s)
        nbytes = pages * groups.page_bytes
        left_s = nbytes / parts / (gbps * 1e9)
        assert 1 <= parts <= min(layers, 8)
        assert parts == 1 or nbytes // parts >= LEAST_REGION_BYTES
        most = parts == min(layers, 8) or nbytes // (parts + 1) < LEAST_REGION_BYTES
        assert left_s <= SHORT_TAIL_S or most or left_s <= 0.02 * compute_s


def test_a_number_is_taken_at_its_word_as_far_as_there_are_layers() -> None:
    assert LayerGroups(32, 1, 4).choose(1, 0.0, 0.0) == 4
    assert LayerGroups(3, 3, 4).choose(1, 0.0, 0.0) == 3
    assert LayerGroups(32, 1, 1).choose(1000, 0.001, 9.0) == 1


def test_each_part_ends_with_a_layer_and_the_last_with_the_last() -> None:
    for layers in range(1, 40):
        for parts in range(1, min(layers, 8) + 1):
            ends = [LayerGroups(layers, layers, parts).layers_until(part, parts) for part in range(parts)]
            assert ends == sorted(set(ends))
            assert ends[0] > 0
            assert ends[-1] == layers


def test_only_full_attention_is_shipped_before_the_last_layer() -> None:
    sliding = KvMemory(KvLayout(4, full=False, window=8), {Component.SWA: NumpyKvBuffer(8, 64, 4, layers=4)})
    assert LayerGroups.of(sliding, 4).choose(9, 1.0, 1.0) == 1
    full = KvMemory.full(NumpyKvBuffer(8, 64, 4, layers=4), 4)
    assert LayerGroups.of(full, "adaptive") == LayerGroups(4, 64, "adaptive")
