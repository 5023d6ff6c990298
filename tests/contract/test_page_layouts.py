"""Pages come from a pool of another layout: the sink puts them into its own order, on every kind of lane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from baton.common.engine.batch import KvMemory
from baton.common.engine.paged_attention import reorder_keys
from baton.common.errors import ErrorCode
from baton.common.kv.layout import KvLayout
from baton.common.kv.page_layout import PAGE_LAYOUT, PageLayout
from baton.common.kv.torch_buffer import TorchKvBuffer
from baton.transfer.session.effects import SinkNotPrepared
from baton.transfer.testing import closing_both
from baton.transfer.testing_ends import End, EndKeys, EndSpec, HandOff, KvSpec, pump, small_config
from baton.transfer.transports.inproc import InprocHub

PAGES, LAYERS, HEADS, PAGE_SIZE, HEAD_DIM = 24, 2, 2, 32, 16
QUANTISED = (PageLayout.INT8, PageLayout.FP8)
OTHER = {PageLayout.CANONICAL: PageLayout.PANELS, PageLayout.PANELS: PageLayout.CANONICAL}


@dataclass(frozen=True, slots=True)
class TorchSpec(KvSpec):
    page_layout: PageLayout = PageLayout.CANONICAL

    def build(self, fill: int) -> KvMemory:
        buffer = TorchKvBuffer(
            num_pages=PAGES,
            page_size=PAGE_SIZE,
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            dtype="bfloat16",
            page_layout=self.page_layout,
            shared=True,
        )
        if fill:
            buffer.pool[:] = torch.arange(buffer.pool.numel()).view(buffer.pool.shape) % 251
        return KvMemory.full(buffer, PAGE_SIZE)


def make_pair(lane: str, source_layout: PageLayout, sink_layout: PageLayout, said: str) -> tuple[End, End]:
    keys, hub = EndKeys.generate(), InprocHub()
    ends = [
        End(
            EndSpec(name, epoch, lane, keys, small_config(lane), TorchSpec(KvLayout(PAGE_SIZE), (), LAYERS, of), fill),
            hub,
        )
        for name, epoch, of, fill in (("sink", 7, sink_layout, 0), ("source", 8, source_layout, 1))
    ]
    ends[0].set_peers([replace(ends[1].member, fingerprint={PAGE_LAYOUT: said})])
    return ends[0], ends[1]


def as_planes(pages: np.ndarray) -> torch.Tensor:
    """Bytes of pages as [pages, layers, 2, heads, page_size, head_dim]."""
    return torch.from_numpy(pages.copy()).view(torch.bfloat16).view(-1, LAYERS, 2, HEADS, PAGE_SIZE, HEAD_DIM)


@pytest.mark.parametrize("lane", ["inproc", "local", "tcp"])  # staged, pulled and direct
@pytest.mark.parametrize("sink_layout", OTHER)
def test_pages_of_the_other_layout_are_put_into_the_sinks_order(lane: str, sink_layout: PageLayout) -> None:
    source_layout = OTHER[sink_layout]
    with closing_both(make_pair(lane, source_layout, sink_layout, source_layout.value)) as (sink, source):
        hand_off = HandOff(sink, source, np.array([3, 5, 2, 9], np.int32), np.array([4, 1, 8, 7], np.int32))
        hand_off.prepare()
        plan = [(slice(0, 1), (0, 1)), (slice(1, 4), (0, 2)), (slice(1, 4), (1, 2))]  # a page, then the rest by layers
        for seq, (units, part) in enumerate(plan):
            hand_off.move(seq, units, part=part)
            assert pump([sink, source], lambda: seq in hand_off.landed()), "not landed in time"  # noqa: B023
        expected = as_planes(source.pool[hand_off.source_pages])
        for layer in range(LAYERS):
            reorder_keys(expected[:, layer], source_layout, sink_layout)
        assert torch.equal(as_planes(sink.pool[hand_off.sink_pages]), expected)
        assert not np.delete(sink.pool, hand_off.sink_pages, axis=0).any()


@pytest.mark.parametrize("lane", ["inproc", "local", "tcp"])
@pytest.mark.parametrize("layout", QUANTISED)
def test_quantised_pages_arrive_as_they_are(lane: str, layout: PageLayout) -> None:
    """Numbers and scales, whole pages and by layers."""
    with closing_both(make_pair(lane, layout, layout, layout.value)) as (sink, source):
        hand_off = HandOff(sink, source, np.array([3, 5, 2, 9], np.int32), np.array([4, 1, 8, 7], np.int32))
        hand_off.prepare()
        plan = [(slice(0, 1), (0, 1)), (slice(1, 4), (0, 2)), (slice(1, 4), (1, 2))]
        for seq, (units, part) in enumerate(plan):
            hand_off.move(seq, units, part=part)
            assert pump([sink, source], lambda: seq in hand_off.landed()), "not landed in time"  # noqa: B023
        assert np.array_equal(sink.pool[hand_off.sink_pages], source.pool[hand_off.source_pages])
        assert not np.delete(sink.pool, hand_off.sink_pages, axis=0).any()


@pytest.mark.parametrize(
    ("sink_layout", "said"),
    [
        (PageLayout.PANELS, "spirals"),
        (PageLayout.CANONICAL, "int8"),
        (PageLayout.INT8, "canonical"),
        (PageLayout.INT8, "fp8"),
    ],
)
def test_pages_that_cannot_be_turned_into_ones_own_are_refused(sink_layout: PageLayout, said: str) -> None:
    """Of a layout that is not known, or that has other numbers: groups keep them apart, and this is behind that."""
    with closing_both(make_pair("inproc", PageLayout.CANONICAL, sink_layout, said)) as (sink, source):
        hand_off = HandOff(sink, source, np.array([3], np.int32), np.array([4], np.int32))
        hand_off.ask_to_prepare()
        assert pump([sink, source], lambda: bool(hand_off.of(SinkNotPrepared)))
        (refused,) = hand_off.of(SinkNotPrepared)
        assert refused.failure.code is ErrorCode.NO_WORKER
        assert "laid out" in refused.failure.reason
