"""The compiled attention kernel against the plain reference, on shapes chosen to be awkward."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from attention_rig import make_plan, shuffled_pages

from baton.common.engine.backends import choose_backends
from baton.common.engine.kernels import CompiledPagedAttention, Kernels
from baton.common.engine.paged_attention import AttentionParams, TorchPagedAttention, reorder_keys
from baton.common.errors import ConfigError
from baton.common.kv.page_layout import PageLayout
from baton.common.memory import system_memory

# (queries, KV length)
ROWS = ((1, 1), (1, 17), (5, 5), (3, 70), (65, 130), (1, 600), (2, 1100), (130, 131), (1, 64), (1, 700))
PLAIN = TorchPagedAttention()


@pytest.fixture(scope="module")
def compiled(kernels: Kernels) -> CompiledPagedAttention:
    return CompiledPagedAttention(kernels)


@pytest.fixture(scope="module")
def panels(kernels: Kernels) -> CompiledPagedAttention:
    return CompiledPagedAttention(kernels, PageLayout.PANELS)


def in_panels(pool: torch.Tensor) -> torch.Tensor:
    """A canonical pool's copy in the other layout."""
    found = pool.clone()
    for layer in range(pool.shape[1]):
        reorder_keys(found[:, layer], PageLayout.CANONICAL, PageLayout.PANELS)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("page_size", "head_dim", "group", "kv_heads", "window", "softcap", "sinks"),
    [
        (16, 64, 3, 3, 0, 0.0, False),
        (1, 64, 1, 2, 0, 0.0, False),
        (4, 16, 5, 1, 0, 0.0, False),
        (16, 80, 2, 2, 7, 0.0, False),
        (4, 128, 8, 1, 100, 0.0, False),
        (16, 96, 7, 1, 512, 0.0, True),
        (1, 256, 2, 1, 65, 30.0, False),
        (16, 256, 4, 1, 0, 50.0, False),
        (8, 64, 6, 2, 64, 20.0, True),
        (128, 64, 1, 1, 1, 0.0, False),
        (32, 112, 3, 2, 33, 15.0, True),
    ],
)
def test_compiled_and_plain_attention_agree(
    compiled: CompiledPagedAttention,
    panels: CompiledPagedAttention,
    dtype: torch.dtype,
    page_size: int,
    head_dim: int,
    group: int,
    kv_heads: int,
    window: int,
    softcap: float,
    sinks: bool,
) -> None:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_pages = sum(-(-kv // page_size) for _, kv in ROWS) + 2
    plan = make_plan(ROWS, page_size, shuffled_pages(num_pages))
    tokens = sum(q for q, _ in ROWS)
    pool = normal(num_pages, 2, 2, kv_heads, page_size, head_dim)
    twin = pool.clone()
    paneled = in_panels(pool) if panels.page_layout.fits(page_size) else None
    query = 2 * normal(group * kv_heads, tokens, head_dim).transpose(0, 1)  # as a model hands it over: not dense
    key, value = normal(tokens, kv_heads, head_dim), normal(kv_heads, tokens, head_dim).transpose(0, 1)
    params = AttentionParams(head_dim**-0.5, window, softcap, normal(group * kv_heads).float() if sinks else None)
    ours = compiled.attend(query, key, value, pool, 1, plan, params)
    expected = PLAIN.attend(query, key, value, twin, 1, plan, params)
    assert torch.equal(pool, twin), "both write the same K and V, and nothing else"
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(ours.float(), expected.float(), atol=tolerance, rtol=tolerance)
    if paneled is not None:
        found = panels.attend(query, key, value, paneled, 1, plan, params)
        assert torch.equal(found, ours), "to the bit"
        assert torch.equal(paneled, in_panels(pool))


@pytest.mark.parametrize(("backend", "page_size"), [("compiled", 4), ("panels", 16)])
def test_a_row_has_the_same_bits_whatever_it_is_computed_with(
    backend: str, page_size: int, request: pytest.FixtureRequest
) -> None:
    """Alone, among others, as a chunk or token by token: for windows too."""
    torch.manual_seed(3)
    compiled = request.getfixturevalue(backend)
    kv_len, params = 1300, AttentionParams(0.125, 600)
    query, key, value = torch.randn(kv_len, 6, 64), torch.randn(kv_len, 2, 64), torch.randn(kv_len, 2, 64)
    pool = torch.zeros(400, 1, 2, 2, page_size, 64)
    whole = compiled.attend(
        query, key, value, pool, 0, make_plan(((kv_len, kv_len),), page_size, iter(range(1, 400))), params
    )
    for start, stop in ((1299, 1300), (1290, 1300), (517, 1188), (600, 601)):
        plan = make_plan(((stop - start, stop),), page_size, iter(range(1, 400)))
        part = compiled.attend(query[start:stop], key[start:stop], value[start:stop], pool, 0, plan, params)
        assert torch.equal(part, whole[start:stop]), (start, stop)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("backend", "page_size"), [("compiled", 24), ("panels", 16), ("panels", 1024)])
@pytest.mark.parametrize(("group", "window"), [(3, 0), (1, 0), (8, 700)])
def test_rows_over_the_same_pages_have_the_bits_of_rows_over_their_own(
    backend: str, page_size: int, group: int, window: int, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Decode rows that share a prompt, more of them than one item holds, some only its beginning, beside a chunk that
    shares it too and rows that share nothing."""
    torch.manual_seed(11)
    backend_here = request.getfixturevalue(backend)
    prompt = 2100
    shared = [(prompt, prompt + 1 + row % 70) for row in range(150)]
    rows = [(600, 601), *shared, (0, 1600), (0, 512), (1024, 1025), (0, 40), (1024, 1700)]
    queries = [1] * (len(rows) - 1) + [30]
    plan = make_plan(tuple((q, kv) for q, (_, kv) in zip(queries, rows, strict=True)), page_size, _counted())
    page_ids, donor = plan.page_ids.clone(), int(plan.page_offsets[1])
    held = int(plan.page_ids.max()) + 1
    pool = torch.randn(held, 1, 2, 2, page_size, 32).to(dtype)
    for (same, _), start in zip(rows, plan.page_offsets.tolist(), strict=False):
        pages = same // page_size
        page_ids[start : start + pages] = page_ids[donor : donor + pages]
        pool[plan.page_ids[start : start + pages]] = pool[plan.page_ids[donor : donor + pages]]
    query, key, value = (torch.randn(sum(queries), heads, 32).to(dtype) for heads in (2 * group, 2, 2))
    params = AttentionParams(0.2, window)
    apart = backend_here.attend(query, key, value, pool.clone(), 0, plan, params)
    together = dataclasses.replace(plan, page_ids=page_ids)
    assert torch.equal(backend_here.attend(query, key, value, pool.clone(), 0, together, params), apart)


def _counted() -> Iterator[int]:
    return itertools.count(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "window"), [(1, 7), (4, 64), (16, 7), (16, 100), (16, 600), (4, 1)])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_what_lies_in_dead_pages_changes_nothing(
    compiled: CompiledPagedAttention,
    panels: CompiledPagedAttention,
    page_size: int,
    window: int,
    softcap: float,
    dtype: torch.dtype,
) -> None:
    """A row's pages before the window of its first query are gone, and page 0, which stands for them, is full of NaN;
    so is what the live pages hold of tokens outside of every window."""
    torch.manual_seed(1)
    num_pages = 60 + sum(-(-kv // page_size) for _, kv in ROWS)
    plan = make_plan(ROWS, page_size, shuffled_pages(num_pages))
    clean = torch.randn(num_pages, 2, 2, 2, page_size, 64).to(dtype)
    live, page_ids = plan.slots.clone()[:0], plan.page_ids.clone()
    for (queries, kv_len), start in zip(ROWS, plan.page_offsets.tolist(), strict=False):
        first = max(0, kv_len - queries - window + 1)
        seen = torch.arange(first, kv_len)
        live = torch.cat((live, plan.page_ids[start + seen // page_size] * page_size + seen % page_size))
        page_ids[start : start + first // page_size] = 0
    poisoned = torch.full_like(clean, float("nan"))
    poisoned[live // page_size, :, :, :, live % page_size] = clean[live // page_size, :, :, :, live % page_size]
    query, key, value = (torch.randn(plan.q_offsets[-1], heads, 64).to(dtype) for heads in (4, 2, 2))
    params = AttentionParams(0.125, window, softcap)
    dead = dataclasses.replace(plan, page_ids=page_ids)
    for backend in (compiled, PLAIN, *([panels] if panels.page_layout.fits(page_size) else [])):
        held = [in_panels(pool) if backend is panels else pool.clone() for pool in (clean, poisoned)]
        expected = backend.attend(query, key, value, held[0], 1, plan, params)
        assert torch.equal(backend.attend(query, key, value, held[1], 1, dead, params), expected), backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_a_nan_shows(compiled: CompiledPagedAttention, dtype: torch.dtype, softcap: float) -> None:
    """Broken weights or pages must not become a plausible answer; and they are nobody else's."""
    torch.manual_seed(5)
    num_pages = 2 + sum(-(-kv // 16) for _, kv in ROWS)
    plan = make_plan(ROWS, 16, shuffled_pages(num_pages))
    query, key, value = (torch.randn(plan.q_offsets[-1], heads, 64).to(dtype) for heads in (4, 2, 2))
    pool, params = torch.randn(num_pages, 1, 2, 2, 16, 64).to(dtype), AttentionParams(0.125, 0, softcap)
    clean = compiled.attend(query, key, value, pool, 0, plan, params)
    broken = [0, 1, int(plan.q_offsets[4]) + 7]  # of rows of one token, and in the middle of a chunk
    query[broken, 1] = float("nan")
    found = compiled.attend(query, key, value, pool, 0, plan, params)
    assert found[broken, 1].isnan().all()
    found[broken, 1] = clean[broken, 1]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("backend", ["compiled", "panels"])
def test_offsets_beyond_two_gibi_elements(backend: str, request: pytest.FixtureRequest) -> None:
    """int32_overflow: the pool is larger than 2^31 elements; only the touched pages take memory."""
    compiled = request.getfixturevalue(backend)
    page_size, head_dim, layers = 16, 64, 16
    page_elements = layers * 2 * 2 * page_size * head_dim
    num_pages = (1 << 31) // page_elements + 8
    pool = (
        system_memory(num_pages * page_elements * 2).view(torch.bfloat16).view(num_pages, layers, 2, 2, page_size, -1)
    )
    plan = make_plan(((20, 20),), page_size, iter((num_pages - 1, num_pages - 3)))
    query, key, value = (torch.randn(20, heads, head_dim).bfloat16() for heads in (4, 2, 2))
    ours = compiled.attend(query, key, value, pool, layers - 1, plan, AttentionParams(0.125))
    small = torch.zeros(3, 1, 2, 2, page_size, head_dim, dtype=torch.bfloat16)
    expected = compiled.attend(
        query, key, value, small, 0, make_plan(((20, 20),), page_size, iter((1, 2))), AttentionParams(0.125)
    )
    assert torch.equal(ours, expected)
    assert torch.equal(pool[num_pages - 1, layers - 1], small[1, 0])


def test_a_layout_that_cannot_be_had_is_refused(kernels: Kernels) -> None:
    assert choose_backends("compiled", 64, layout="auto", page_size=32).attention.page_layout is PageLayout.PANELS
    assert choose_backends("compiled", 64, layout="auto", page_size=8).attention.page_layout is PageLayout.CANONICAL
    assert choose_backends("torch", 64, layout="auto", page_size=32).attention.page_layout is PageLayout.CANONICAL
    with pytest.raises(ConfigError, match=r"kv\.page_layout = 'panels'.*page of 8 tokens.*kv\.page_size"):
        choose_backends("compiled", 64, layout="panels", page_size=8)
    with pytest.raises(ConfigError, match=r"kv\.page_layout = 'panels'.*compiled"):
        choose_backends("torch", 64, layout="panels", page_size=16)


def test_a_head_size_that_the_kernels_cannot_do_runs_on_torch() -> None:
    said: list[str] = []
    backends = choose_backends("auto", 20, said.append)
    assert (type(backends.attention), backends.kernels) == (TorchPagedAttention, None)
    assert "head size 20" in said[-1]
    with pytest.raises(ConfigError, match=r"model\.attention.*head size 20"):
        choose_backends("compiled", 20)
