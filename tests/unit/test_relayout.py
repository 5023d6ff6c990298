"""Re-layout plans of real shapes: who sends what, in how few copies, how much of it, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from relayout_rig import Side, carry_out, written

from baton.common.errors import ConfigError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.state_shape import StateShape
from baton.common.kv.torch_buffer import TorchKvBuffer, TorchStateBuffer
from baton.common.model.groups import LayerGroups
from baton.common.units import page_floor
from baton.transfer.relayout.execute import apply, gather, scatter
from baton.transfer.relayout.geometry import Loop, Run
from baton.transfer.relayout.models import PAGE_ORDER, ConvPart, Cut, ModelKv, describe_side, split_heads
from baton.transfer.relayout.planner import Relayout, plan_relayout
from baton.transfer.relayout.sides import Axis, Field, FieldLayout, PoolLayout, SideLayout, dense_placement

FULL, SWA, STATE = Component
DENSE = ModelKv(LayerGroups(full=tuple(range(5))), kv_heads=3, head_dim=4)
HYBRID = ModelKv(
    LayerGroups((0, 3), (1, 4), window=20, recurrent=(2, 5, 6), state=StateShape((20, 3), (6, 2, 4))),
    kv_heads=2,
    head_dim=4,
    conv_parts=(ConvPart(6, 2), ConvPart(2, 2), ConvPart(2, 2)),
)
LARGE = ModelKv(LayerGroups(full=tuple(range(32))), kv_heads=8, head_dim=128)
TOKEN_MAJOR = ("layer", "kv", "token", "head", "head_dim")


def move_all(relayout: Relayout, source: Side, sink: Side, start: int, total: int) -> None:
    """And checks that each byte came once, from the right place."""
    for segment in relayout.segments(start, total):
        tokens = range(segment.first_token, segment.end_token)
        expected, marks = sink.expected(source.layout, segment.component, tokens)
        moves = relayout.bind(segment, segment.first_token, segment.end_token)
        carry_out(moves, source, sink)
        if not moves.whole_pages:
            assert np.array_equal(written(moves, sink), marks)
            assert np.array_equal(sink.flat(segment.component), expected)


def bind_whole(relayout: Relayout, component: Component, total: int):
    segment = next(segment for segment in relayout.segments(0, total) if segment.component is component)
    return relayout.bind(segment, segment.first_token, segment.end_token)


@pytest.mark.parametrize("model", [DENSE, HYBRID], ids=["three-heads", "hybrid"])
@pytest.mark.parametrize("tensors", [(1, 1), (1, 2), (2, 4), (4, 3), (3, 1), (8, 2), (2, 8), (8, 8)])
@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (64, 16), (16, 24), (4, 1)])
def test_ranks_and_pages_of_any_number_and_size(
    model: ModelKv, tensors: tuple[int, int], sizes: tuple[int, int]
) -> None:
    layouts = [describe_side(model, Cut(tensor), size, "float32") for tensor, size in zip(tensors, sizes, strict=True)]
    source, sink = Side(layouts[0], 70, seed=1).tag(), Side(layouts[1], 70, seed=2)
    move_all(plan_relayout(*layouts), source, sink, start=0, total=70)


@pytest.mark.parametrize(("here", "there"), [((7,), (3, 4)), ((2, 5), (6, 1)), ((3, 1, 3), (1, 6)), ((3, 4), ())])
def test_stages_of_any_length(here: tuple[int, ...], there: tuple[int, ...]) -> None:
    """A stage need not have layers of each kind."""
    layouts = [
        describe_side(HYBRID, Cut(2, stages), 16, "bfloat16", order)
        for stages, order in ((here, PAGE_ORDER), (there, TOKEN_MAJOR))
    ]
    source, sink = Side(layouts[0], 50, seed=1).tag(), Side(layouts[1], 50, seed=2)
    move_all(plan_relayout(*layouts), source, sink, start=16, total=50)


def test_a_round_through_four_sides_ends_where_it_began() -> None:
    cuts = [(1, 16), (2, 4), (4, 24), (3, 1), (1, 16)]
    sides = [Side(describe_side(DENSE, Cut(tensor), size, "float32"), 90, seed=tensor) for tensor, size in cuts]
    sides[0].tag()
    for here, there in pairwise(sides):
        carry_out(bind_whole(plan_relayout(here.layout, there.layout), FULL, 90), here, there)
    page_rows = [side.pools[FULL][0][side.tables[FULL][0]] for side in (sides[0], sides[-1])]
    as_tokens = [
        rows.reshape(6, 5, 2, 3, 16, 16).transpose(0, 4, 1, 2, 3, 5).reshape(96, -1)[:90] for rows in page_rows
    ]
    assert np.array_equal(*as_tokens)


class TestWholePages:
    def test_sides_that_are_alike_move_whole_pages(self) -> None:
        side = describe_side(DENSE, Cut(2, (2, 3)), 16, "float32")
        relayout = plan_relayout(side, side)
        assert relayout.alike
        moves = bind_whole(relayout, FULL, 50)
        assert moves.whole_pages
        assert [(move.source, move.sink) for move in moves.moves] == [(0, 0), (1, 1), (2, 2), (3, 3)]
        assert moves.planned_bytes == 4 * sum(side.pool(FULL).page_bytes)
        assert moves.least_bytes * 64 == moves.planned_bytes * 50, "the unused tail of the last page travels"
        source, sink = Side(side, 50, seed=1), Side(side, 50, seed=2)
        carry_out(moves, source, sink)
        for rank in range(4):
            tables = source.tables[FULL][rank], sink.tables[FULL][rank]
            assert np.array_equal(source.pools[FULL][rank][tables[0]], sink.pools[FULL][rank][tables[1]])

    def test_windows_and_states_too(self) -> None:
        side = describe_side(HYBRID, Cut(2), 16, "bfloat16")
        relayout = plan_relayout(side, side)
        assert len(bind_whole(relayout, SWA, 70).moves[0].meeting.sink_pages) == 2  # [51, 70) is live: pages 3 and 4
        state = bind_whole(relayout, STATE, 70)
        assert state.planned_bytes == sum(side.pool(STATE).page_bytes) >= state.least_bytes

    def test_a_format_that_nobody_knows_travels_between_equal_sides(self) -> None:
        side = describe_side(DENSE, Cut(2), 16, "bfloat16")
        kept = replace(side.pools[0].fields[0], dtype="int4_g32")
        side = replace(side, pools=(replace(side.pools[0], fields=(kept,)),))
        moves = bind_whole(plan_relayout(side, side), FULL, 32)
        assert moves.planned_bytes == moves.least_bytes == 2 * sum(side.pool(FULL).page_bytes)

    @pytest.mark.parametrize(("first", "end"), [(8, 50), (0, 24)])
    def test_parts_of_pages_are_not_planned(self, first: int, end: int) -> None:
        side = describe_side(DENSE, Cut(), 16, "float32")
        relayout = plan_relayout(side, side)
        with pytest.raises(AssertionError, match="inside a page"):
            relayout.bind(relayout.segments(0, 50)[0], first, end)


class TestWhoSends:
    @pytest.mark.parametrize("model", [DENSE, HYBRID, LARGE], ids=["three-heads", "hybrid", "large"])
    @pytest.mark.parametrize("tensor", [1, 3, 4, 8, 16])
    def test_to_a_side_that_differs_in_pages_only_each_rank_sends_to_itself(self, model: ModelKv, tensor: int) -> None:
        sides = [describe_side(model, Cut(tensor), size, "bfloat16") for size in (16, 64)]
        relayout = plan_relayout(*sides)
        for component in sides[0].layout.components:
            pairs = bind_whole(relayout, component, 100).bytes_by_pair()
            assert sorted(pairs) == [(rank, rank) for rank in range(tensor)]

    @pytest.mark.parametrize("sinks", [1, 2, 3, 4, 8, 16])
    def test_replicas_share_the_work(self, sinks: int) -> None:
        """Two heads on eight ranks: each source sends the same, to within a layer."""
        model = replace(LARGE, kv_heads=2)
        relayout = plan_relayout(
            describe_side(model, Cut(8), 16, "float32"),
            describe_side(model, Cut(sinks), 16, "bfloat16"),
            {"float32->bfloat16"},
        )
        moves = bind_whole(relayout, FULL, 32)
        sent: Counter[int] = Counter()
        for (source, _), nbytes in moves.bytes_by_pair().items():
            sent[source] += nbytes
        layer_bytes = 32 * 2 * 128 * 2
        assert len(sent) == 8
        for head in (range(4), range(4, 8)):
            share = sum(sent[rank] for rank in head) / 4
            assert all(abs(sent[rank] - share) <= layer_bytes for rank in head), sent

    def test_heads_that_do_not_divide(self) -> None:
        assert split_heads(3, 2) == ((0, 2), (2, 3))
        assert split_heads(8, 4) == ((0, 2), (2, 4), (4, 6), (6, 8))
        assert split_heads(2, 8) == ((0, 1),) * 4 + ((1, 2),) * 4
        assert split_heads(3, 4) == ((0, 1), (0, 1), (1, 2), (2, 3))

    def test_channels_of_a_convolution_are_cut_part_by_part(self) -> None:
        side = describe_side(HYBRID, Cut(2), 16, "float32")
        kept = [placement.axes[1] for placement in side.pool(STATE).fields[0].ranks]
        assert [[(run.first, run.end) for run in runs] for runs in kept] == [
            [(0, 6), (12, 14), (16, 18)],
            [(6, 12), (14, 16), (18, 20)],
        ]


class TestCopies:
    def test_more_ranks_take_one_strided_copy_each(self) -> None:
        """Layers and K/V are one loop; inside of it the tokens of a head follow one another on both sides."""
        relayout = plan_relayout(*(describe_side(LARGE, Cut(tensor), 16, "bfloat16") for tensor in (4, 8)))
        moves = bind_whole(relayout, FULL, 2048).moves
        assert [(move.source, move.sink) for move in moves] == [(rank // 2, rank) for rank in range(8)]
        head = 16 * 128 * 2
        for move in moves:
            assert [box.loops for box in move.boxes] == [(Loop(64, 2 * head, head), Loop(16 * 128, 2, 2))]
            assert move.boxes[0].run_elements(2, 2) == 2048

    def test_a_page_that_is_the_same_on_both_sides_is_one_run(self) -> None:
        relayout = plan_relayout(
            describe_side(LARGE, Cut(1, (16, 16)), 16, "bfloat16"), describe_side(LARGE, Cut(), 16, "bfloat16")
        )
        half = relayout.sink.pools[0].page_bytes[0] // 2
        moves = bind_whole(relayout, FULL, 2048).moves
        assert [move.boxes[0].loops for move in moves] == [(Loop(half // 2, 2, 2),)] * 2
        assert [move.boxes[0].sink_offset for move in moves] == [0, half]

    def test_small_pages_into_large_ones(self) -> None:
        """A page of 64 has four places for one of 16."""
        relayout = plan_relayout(*(describe_side(LARGE, Cut(), size, "bfloat16") for size in (16, 64)))
        moves = bind_whole(relayout, FULL, 2048).moves
        assert sorted(move.meeting.sink_token for move in moves) == [0, 16, 32, 48]
        assert all(len(move.meeting.sink_pages) == 32 for move in moves)
        assert all(len(move.boxes) == 1 for move in moves)

    def test_another_order_inside_of_the_page(self) -> None:
        relayout = plan_relayout(
            *(describe_side(LARGE, Cut(), 16, "bfloat16", order) for order in (PAGE_ORDER, TOKEN_MAJOR))
        )
        (move,) = bind_whole(relayout, FULL, 2048).moves
        (box,) = move.boxes
        assert box.run_elements(2, 2) == 128
        assert box.elements == 32 * 2 * 8 * 16 * 128

    def test_an_axis_in_blocks_is_one_more_loop(self) -> None:
        """Keys as [head_dim / 8, token, 8] for the sake of a kernel, from [token, head_dim]."""
        plain = one_field_side([[(0, 1)]], page_size=16, head_dim=32)
        kept = plain.pools[0].fields[0]
        (place,) = kept.ranks
        blocks = tuple(Run(first, 8, first // 8 * 16 * 8 * 4, 4) for first in range(0, 32, 8))
        blocked = replace(place, axes=(*place.axes[:2], blocks), tokens=(Run(0, 16, 0, 8 * 4),))
        sink = replace(plain, pools=(replace(plain.pools[0], fields=(replace(kept, ranks=(blocked,)),)),))
        (move,) = bind_whole(plan_relayout(plain, sink), FULL, 32).moves
        (box,) = move.boxes
        block = 8 * 4
        assert box.loops[-3:] == (Loop(4, block, 16 * block), Loop(16, 32 * 4, block), Loop(8, 4, 4))
        source, target = Side(plain, 40, seed=1).tag(), Side(sink, 40, seed=2)
        move_all(plan_relayout(plain, sink), source, target, start=0, total=40)

    def test_only_neighbours_are_joined(self) -> None:
        """The rank in the middle sends the first layers of one head, and the last ones of the other."""
        layouts = one_field_side([[(1, 2)], [(0, 2)], [(0, 1)]], page_size=4), one_field_side([[(0, 2)]], page_size=16)
        relayout = plan_relayout(*layouts)
        assert [len(route.boxes) for route in relayout.routes[FULL]] == [1, 2, 1]
        source, sink = Side(layouts[0], 30, seed=1).tag(), Side(layouts[1], 30, seed=2)
        move_all(relayout, source, sink, start=0, total=30)


def one_field_side(heads: list[list[tuple[int, int]]], page_size: int, head_dim: int = 2) -> SideLayout:
    """Four layers; `heads` of each rank."""
    places, sizes = [], []
    for kept in heads:
        axes = [("layer", [(0, 4)]), ("head", kept), ("head_dim", [(0, head_dim)])]
        places.append(dense_placement(axes, ("layer", "head", "token", "head_dim"), page_size, 4))
        sizes.append(4 * sum(end - first for first, end in kept) * page_size * head_dim * 4)
    field = Field(
        "keys", (Axis("layer", 4), Axis("head", max(kept[-1][1] for kept in heads)), Axis("head_dim", head_dim))
    )
    pool = PoolLayout(FULL, (FieldLayout(field, "float32", tuple(places)),), tuple(sizes))
    return SideLayout(KvLayout(page_size), len(heads), (pool,))


class TestWindow:
    def relayout(self, source: int, sink: int, window: int = 20) -> Relayout:
        model = ModelKv(LayerGroups((), (0, 1), window=window), kv_heads=1, head_dim=2)
        return plan_relayout(*(describe_side(model, Cut(), size, "float32") for size in (source, sink)))

    def test_the_live_pages_of_the_sink_travel(self) -> None:
        (segment,) = self.relayout(24, 4).segments(0, 70)  # tokens from 51 on are seen; the source has them from 48 on
        assert (segment.first_token, segment.needed_token, segment.missing_tokens) == (48, 51, 0)

    def test_a_page_that_begins_before_the_source_has_it_is_short_of_tokens(self) -> None:
        (segment,) = self.relayout(4, 24).segments(0, 71)  # tokens from 52 on are seen; the sink's page begins at 48
        assert (segment.first_token, segment.needed_token, segment.missing_tokens) == (52, 52, 4)

    def test_a_source_that_has_more_fills_it(self) -> None:
        (segment,) = self.relayout(4, 24).segments(0, 71, window_held_from=44)
        assert (segment.first_token, segment.missing_tokens) == (48, 0)

    def test_what_the_sink_has_is_not_sent(self) -> None:
        (segment,) = self.relayout(4, 16).segments(64, 71)
        assert (segment.first_token, segment.needed_token, segment.missing_tokens) == (64, 64, 0)
        assert self.relayout(4, 16).segments(64, 64) == ()

    @pytest.mark.parametrize("source", [1, 4, 16, 24])
    @pytest.mark.parametrize("sink", [1, 4, 16, 24])
    @pytest.mark.parametrize("window", [1, 5, 16, 33])
    def test_whatever_the_next_query_sees_is_there(self, source: int, sink: int, window: int) -> None:
        for total in range(1, 80):
            (segment,) = self.relayout(source, sink, window).segments(0, total) or (None,)
            seen = max(0, total - window + 1)
            if segment is None:
                assert seen == total
                continue
            assert segment.first_token <= seen
            assert segment.first_token - segment.missing_tokens == page_floor(seen, sink)


class TestRefusals:
    SIDE = describe_side(DENSE, Cut(), 16, "float32")

    def refusal(self, source: SideLayout, sink: SideLayout, lossy: tuple[str, ...] = ()) -> ConfigError:
        with pytest.raises(ConfigError) as error:
            plan_relayout(source, sink, lossy)
        return error.value

    @pytest.mark.parametrize(
        ("model", "field", "value"),
        [
            (replace(DENSE, kv_heads=4), "full.kv.head", "3 -> 4"),
            (replace(DENSE, head_dim=8), "full.kv.head_dim", "4 -> 8"),
            (replace(DENSE, groups=LayerGroups((0, 1))), "full.kv.layer", "5 -> 2"),
            (HYBRID, "components", "full -> full+swa+state"),
        ],
    )
    def test_another_model(self, model: ModelKv, field: str, value: str) -> None:
        error = self.refusal(self.SIDE, describe_side(model, Cut(2), 16, "float32"))
        assert (error.field, error.value) == (field, value)
        assert "one model" in error.hint

    def test_another_window(self) -> None:
        wider = replace(HYBRID, groups=replace(HYBRID.groups, window=21))
        error = self.refusal(*(describe_side(model, Cut(), 16, "float32") for model in (HYBRID, wider)))
        assert (error.field, error.value) == ("window", "20 -> 21")

    def test_states_of_another_kind(self) -> None:
        groups = LayerGroups((), recurrent=(0,), state=StateShape((4, 3)))
        both = [ModelKv(kept, 1, 1) for kept in (groups, replace(groups, state=StateShape((4, 3), (2, 2))))]
        error = self.refusal(*(describe_side(model, Cut(), 16, "float32") for model in both))
        assert (error.field, error.value) == ("state.fields", "conv -> conv+recurrent")

    def test_rounding(self) -> None:
        sink = describe_side(DENSE, Cut(), 16, "bfloat16")
        error = self.refusal(self.SIDE, sink)
        assert (error.field, error.value) == ("full.kv.dtype", "float32->bfloat16")
        assert "allow float32->bfloat16" in error.hint
        plan_relayout(self.SIDE, sink, {"float32->bfloat16"})
        plan_relayout(sink, self.SIDE)

    def test_an_unknown_format(self) -> None:
        kept = replace(self.SIDE.pools[0].fields[0], dtype="int4_g32")
        odd = replace(self.SIDE, pools=(replace(self.SIDE.pools[0], fields=(kept,)),))
        assert self.refusal(self.SIDE, odd).value == "int4_g32"
        with pytest.raises(ConfigError, match="dtype = 'int4_g32'"):
            describe_side(DENSE, Cut(), 16, "int4_g32")

    def test_stages_that_do_not_add_up(self) -> None:
        with pytest.raises(ConfigError, match=r"stages = \(2, 2\): do not add up to the model's 5 layers"):
            describe_side(DENSE, Cut(1, (2, 2)), 16, "float32")

    def test_a_side_without_a_part_of_the_model(self) -> None:
        two = describe_side(DENSE, Cut(2), 16, "float32")
        kept = two.pools[0].fields[0]
        for side, rank in (("source", 0), ("sink", 1)):
            some = replace(kept, ranks=tuple(None if r != rank else place for r, place in enumerate(kept.ranks)))
            lacking = replace(two, pools=(replace(two.pools[0], fields=(some,)),))
            both = (lacking, self.SIDE) if side == "source" else (self.SIDE, lacking)
            error = self.refusal(*both)
            assert error.field == f"{side}.full.kv"
            assert f"no rank of the {side}" in error.reason
            assert ("head (2, 3)" if rank == 0 else "head (0, 2)") in str(error.value)

    def test_elements_on_top_of_each_other(self) -> None:
        kept = self.SIDE.pools[0].fields[0]
        (place,) = kept.ranks
        narrow = replace(place, tokens=(replace(place.tokens[0], stride=8),))  # head_dim is 16 bytes
        odd = replace(self.SIDE, pools=(replace(self.SIDE.pools[0], fields=(replace(kept, ranks=(narrow,)),)),))
        error = self.refusal(self.SIDE, odd)
        assert (error.field, error.value) == ("sink.full", "rank 0")
        assert "share bytes" in error.reason

    def test_elements_outside_of_the_page(self) -> None:
        (size,) = self.SIDE.pools[0].page_bytes
        odd = replace(self.SIDE, pools=(replace(self.SIDE.pools[0], page_bytes=(size - 1,)),))
        assert "leave the page" in self.refusal(odd, self.SIDE).reason

    def test_a_page_without_all_of_its_tokens(self) -> None:
        kept = self.SIDE.pools[0].fields[0]
        (place,) = kept.ranks
        short = replace(place, tokens=(replace(place.tokens[0], count=15),))
        odd = replace(self.SIDE, pools=(replace(self.SIDE.pools[0], fields=(replace(kept, ranks=(short,)),)),))
        assert self.refusal(odd, self.SIDE).field == "source.full.kv.token"

    def test_coordinates_that_the_model_does_not_have(self) -> None:
        kept = self.SIDE.pools[0].fields[0]
        (place,) = kept.ranks
        layers = replace(place.axes[0][0], first=1)
        beyond = replace(place, axes=((layers,), *place.axes[1:]))
        odd = replace(self.SIDE, pools=(replace(self.SIDE.pools[0], fields=(replace(kept, ranks=(beyond,)),)),))
        assert self.refusal(odd, self.SIDE).field == "source.full.kv.layer"

    def test_axes_of_other_names(self) -> None:
        kept = self.SIDE.pools[0].fields[0]
        axes = tuple(replace(axis, name="lane") if axis.name == "head" else axis for axis in kept.field.axes)
        renamed = replace(kept, field=Field("kv", axes))
        odd = replace(self.SIDE, pools=(replace(self.SIDE.pools[0], fields=(renamed,)),))
        assert self.refusal(odd, self.SIDE).field == "full.kv.axes"


class TestExecution:
    def sides(self) -> tuple[Relayout, Side, Side]:
        layouts = describe_side(DENSE, Cut(3), 4, "bfloat16"), describe_side(DENSE, Cut(2), 16, "float32")
        return plan_relayout(*layouts), Side(layouts[0], 30, seed=1).tag(), Side(layouts[1], 30, seed=2)

    def test_what_is_packed_is_what_was_planned(self) -> None:
        relayout, source, sink = self.sides()
        moves = bind_whole(relayout, FULL, 30)
        expected, _ = sink.expected(source.layout, FULL, range(30))
        for (here, there), nbytes in moves.bytes_by_pair().items():
            packed = gather(moves, here, there, source.pools[FULL][here], source.tables[FULL][here])
            assert len(packed) == nbytes
            scatter(moves, here, there, packed, sink.pools[FULL][there], sink.tables[FULL][there])
        assert np.array_equal(sink.flat(FULL), expected)
        assert moves.planned_bytes == 30 * 5 * 2 * 3 * 4 * 2, "in the smaller format"

    def test_pairs_without_common_heads_exchange_nothing(self) -> None:
        relayout, source, _ = self.sides()
        moves = bind_whole(relayout, FULL, 30)
        assert moves.between(0, 1) == ()
        assert len(gather(moves, 0, 1, source.pools[FULL][0], source.tables[FULL][0])) == 0

    def test_bytes_that_were_not_planned_are_not_taken(self) -> None:
        relayout, source, sink = self.sides()
        moves = bind_whole(relayout, FULL, 30)
        packed = gather(moves, 0, 0, source.pools[FULL][0], source.tables[FULL][0])
        longer = np.concatenate([packed, packed[:1]])
        with pytest.raises(AssertionError, match="belong there"):
            scatter(moves, 0, 0, longer, sink.pools[FULL][0], sink.tables[FULL][0])

    def test_the_null_page_is_neither_read_nor_written(self) -> None:
        relayout, source, sink = self.sides()
        moves = bind_whole(relayout, FULL, 30)
        for side in (source, sink):
            side.tables[FULL][0][1] = 0
            with pytest.raises(AssertionError, match="null page"):
                carry_out(moves, source, sink)


class TestOurBuffers:
    """The descriptions are those of the real buffers."""

    def test_keys_and_values(self) -> None:
        model = replace(DENSE, kv_heads=4)
        one = TorchKvBuffer(num_pages=5, page_size=16, num_layers=5, num_kv_heads=4, head_dim=4, dtype="bfloat16")
        two = [
            TorchKvBuffer(num_pages=11, page_size=6, num_layers=5, num_kv_heads=2, head_dim=4, dtype="float32")
            for _ in range(2)
        ]
        one.pool.copy_(torch.randn(one.pool.shape))
        relayout = plan_relayout(
            describe_side(model, Cut(), 16, "bfloat16"), describe_side(model, Cut(2), 6, "float32")
        )
        tables = np.arange(1, 5, dtype=np.int32)[::-1].copy(), np.arange(1, 11, dtype=np.int32)
        apply(
            bind_whole(relayout, FULL, 60),
            [one.as_bytes()],
            [tables[0]],
            [rank.as_bytes() for rank in two],
            [tables[1]] * 2,
        )
        here = one.pool[tables[0]].permute(1, 2, 3, 0, 4, 5).reshape(5, 2, 4, 64, 4)[:, :, :, :60].float()
        there = torch.cat(
            [rank.pool[tables[1]].permute(1, 2, 3, 0, 4, 5).reshape(5, 2, 2, 60, 4) for rank in two], dim=2
        )
        assert torch.equal(here, there)

    def test_states(self) -> None:
        shape = HYBRID.groups.state
        assert shape is not None
        one = TorchStateBuffer(num_slots=3, num_layers=3, shape=shape, dtype="bfloat16")
        two = [
            TorchStateBuffer(num_slots=2, num_layers=3, shape=StateShape((10, 3), (3, 2, 4)), dtype="bfloat16")
            for _ in range(2)
        ]
        for layer in range(3):
            one.conv[layer].copy_(torch.randn(one.conv[layer].shape))
            one.recurrent[layer].copy_(torch.randn(one.recurrent[layer].shape))
        relayout = plan_relayout(*(describe_side(HYBRID, Cut(tensor), 16, "bfloat16") for tensor in (1, 2)))
        slots = np.array([2], dtype=np.int32), np.array([1], dtype=np.int32)
        apply(
            bind_whole(relayout, STATE, 9),
            [one.as_bytes()],
            [slots[0]],
            [rank.as_bytes() for rank in two],
            [slots[1]] * 2,
        )
        channels = [[*range(6), 12, 13, 16, 17], [*range(6, 12), 14, 15, 18, 19]]
        for layer in range(3):
            for rank, kept in zip(two, channels, strict=True):
                assert torch.equal(rank.conv[layer][1], one.conv[layer][2, kept])
            heads = torch.cat([rank.recurrent[layer][1] for rank in two])
            assert torch.equal(heads, one.recurrent[layer][2])
