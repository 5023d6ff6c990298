"""What lies where in a page, and who may exchange pages with whom."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from baton.common.compat import differences, group_of
from baton.common.engine.batch import KvMemory
from baton.common.kv.page_layout import PageLayout, layout_of
from baton.common.kv.tiers.keys import PageKeys
from baton.common.kv.torch_buffer import TorchKvBuffer

PLAIN = CANONICAL, PANELS = PageLayout.CANONICAL, PageLayout.PANELS


def make_buffer(page_layout: PageLayout, dtype: Literal["float32", "bfloat16"]) -> TorchKvBuffer:
    return TorchKvBuffer(
        num_pages=5, page_size=32, num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype, page_layout=page_layout
    )


@pytest.mark.parametrize(("dtype", "width"), [("float32", 1), ("bfloat16", 2)])
def test_a_panel_is_words_by_tokens(dtype: Literal["float32", "bfloat16"], width: int) -> None:
    canonical, panels = make_buffer(CANONICAL, dtype), make_buffer(PANELS, dtype)
    canonical.pool[:] = torch.randint(256, canonical.pool.shape)
    panels.pool[:] = canonical.pool
    panels.adopt(torch.tensor([2, 4], dtype=torch.int32).numpy(), slice(1, 3), CANONICAL)
    keys = panels.pool[:, :, 0].reshape(5, 3, 2, 2, 8 // width, 16, width)  # pages .. panels, words, tokens
    for page, layer, head, token, dim in ((2, 1, 0, 0, 0), (4, 2, 1, 17, 5), (2, 2, 1, 31, 7), (4, 1, 0, 15, 1)):
        found = keys[page, layer, head, token // 16, dim // width, token % 16, dim % width]
        assert found == canonical.pool[page, layer, 0, head, token, dim]
    assert torch.equal(panels.pool[:, :, 1], canonical.pool[:, :, 1]), "values stay"
    assert torch.equal(panels.pool[:, 0], canonical.pool[:, 0]), "as do other layers"
    assert torch.equal(panels.pool[[0, 1, 3]], canonical.pool[[0, 1, 3]]), "and other pages"
    canonical.pool[[2, 4], 1:] = panels.pool[[2, 4], 1:]
    canonical.adopt(torch.tensor([4, 2], dtype=torch.int32).numpy(), slice(1, 3), PANELS)
    assert torch.equal(canonical.pool, make_canonical(panels, dtype).pool), "and back"


def make_canonical(panels: TorchKvBuffer, dtype: Literal["float32", "bfloat16"]) -> TorchKvBuffer:
    """By hand, of pages 2 and 4, layers 1 and 2."""
    made = make_buffer(CANONICAL, dtype)
    made.pool[:] = panels.pool
    width = 1 if dtype == "float32" else 2
    keys = panels.pool[[2, 4], 1:, 0].reshape(2, 2, 2, 2, 8 // width, 16, width)
    made.pool[[2, 4], 1:, 0] = keys.transpose(4, 5).reshape(2, 2, 2, 32, 8)
    return made


def test_two_layouts_are_of_one_group_and_have_no_page_of_a_store_in_common() -> None:
    names = [KvMemory.full(make_buffer(layout, "float32"), 32).fingerprint() for layout in PLAIN]
    assert not differences(*names)
    assert group_of(names[0]) == group_of(names[1])
    assert [layout_of(name) for name in names] == list(PLAIN)
    roots = {PageKeys.of_model(name, 32).root for name in names}
    assert len(roots) == 2, "a store has bytes"


def test_of_a_layout_from_elsewhere_nothing_is_known() -> None:
    assert layout_of({"kv_page_layout": "spirals"}) is None
    assert layout_of({}) is CANONICAL
