"""Quantised pages: the compiled kernel against plain torch, what a byte loses, and what a page's bytes depend on."""

from __future__ import annotations

import pytest
import torch
from test_paged_attention import ROWS, make_plan, shuffled_pages

from baton.common.compat import group_of
from baton.common.engine.batch import KvMemory
from baton.common.engine.kernels import CompiledPagedAttention, Kernels
from baton.common.engine.paged_attention import AttentionParams, TorchPagedAttention
from baton.common.errors import ConfigError
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.kv.cache_dtype import CacheDtype
from baton.common.kv.page_layout import LayoutChoice, PageLayout, choose_layout
from baton.common.kv.quantised_pages import FORMS, QuantisedForm, pool_width
from baton.common.kv.torch_buffer import TorchKvBuffer
from baton.common.messages import PROTOCOL_VERSION, Hello, Member
from baton.common.model.loading import Dtype
from baton.common.resolve import Layer, resolve
from baton.deploy.fitting import misfit
from baton.deploy.tokenizer import FakeModelInfo

LAYOUTS = [PageLayout.INT8, PageLayout.FP8]
PLAIN_KIND, INT8_KIND = ("auto", "bfloat16"), ("int8", "bfloat16")
MODEL_DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=LAYOUTS)
def compiled(request: pytest.FixtureRequest, kernels: Kernels) -> CompiledPagedAttention:
    return CompiledPagedAttention(kernels, request.param)


def noise_pool(pages: int, layers: int, kv_heads: int, page_size: int, dim: int) -> torch.Tensor:
    """Of any bytes: what a page holds that a worker has given back."""
    shape = (pages, layers, 2, kv_heads, page_size, pool_width(PageLayout.INT8, dim))
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(2)).byte()


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize(
    ("page_size", "head_dim", "group", "kv_heads", "window", "softcap", "sinks"),
    [
        (16, 64, 3, 3, 0, 0.0, False),
        (1, 64, 1, 2, 0, 0.0, False),
        (4, 16, 5, 1, 0, 0.0, False),
        (16, 80, 2, 2, 7, 0.0, False),
        (8, 64, 6, 2, 64, 20.0, True),
        (32, 256, 4, 1, 100, 0.0, False),
        (128, 64, 1, 1, 1, 0.0, False),
    ],
)
def test_compiled_and_plain_attention_agree(
    compiled: CompiledPagedAttention,
    dtype: torch.dtype,
    page_size: int,
    head_dim: int,
    group: int,
    kv_heads: int,
    window: int,
    softcap: float,
    sinks: bool,
) -> None:
    """To the byte in what they write, to rounding in what they say; of a window's dead pages neither reads anything."""
    form = FORMS[compiled.page_layout]
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    num_pages = sum(-(-kv // page_size) for _, kv in ROWS) + 2
    plan = make_plan(ROWS, page_size, shuffled_pages(num_pages))
    tokens = sum(q for q, _ in ROWS)
    pool = noise_pool(num_pages, 2, kv_heads, page_size, head_dim)
    for slot in range(0, num_pages * page_size, 1 << 12):  # numbers everywhere, of any size
        slots = torch.arange(slot, min(slot + (1 << 12), num_pages * page_size))
        sizes = [2.0 ** torch.randint(-20, 3, (len(slots), 1, 1), generator=generator) for _ in "kv"]
        past = [normal(len(slots), kv_heads, head_dim) * size for size in sizes]
        form.write(pool, 1, slots, *past)
    pool[0] = 0xFF
    twin = pool.clone()
    query = (2 * normal(group * kv_heads, tokens, head_dim)).to(dtype).transpose(0, 1)  # as a model has it: not dense
    key, value = normal(tokens, kv_heads, head_dim).to(dtype), normal(kv_heads, tokens, head_dim).to(dtype)
    key[0], key[1] = 0, key[1] * 1e-38
    if window:
        for row, (queries, kv_len) in enumerate(ROWS):
            dead = max(0, kv_len - queries - window + 1) // page_size
            first = int(plan.page_offsets[row])
            plan.page_ids[first : first + dead] = 0
    params = AttentionParams(head_dim**-0.5, window, softcap, normal(group * kv_heads) if sinks else None)
    value = value.transpose(0, 1)
    plain = TorchPagedAttention(compiled.page_layout)
    ours = compiled.attend(query, key, value, pool, 1, plan, params)
    theirs = plain.attend(query, key, value, twin, 1, plan, params)
    assert torch.equal(pool, twin), "both write the same bytes, and nothing else"
    exact = plain.attend(query.float(), key.float(), value.float(), twin, 1, plan, params)
    assert torch.equal(pool, twin)
    rounding = 0.0 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(ours.float(), exact, atol=2e-5, rtol=2e-5 + rounding)
    # There, a page's numbers and probabilities are rounded to the model's type as well.
    off = float((theirs.float() - exact).norm() / exact.norm())
    assert off <= 2 * rounding


def test_a_row_has_the_same_bits_whatever_it_is_computed_with(compiled: CompiledPagedAttention) -> None:
    """As a chunk or token by token: what it says, and the bytes of its pages."""
    torch.manual_seed(3)
    page_size, kv_len, params = 16, 700, AttentionParams(0.125, 600)
    query, key, value = torch.randn(kv_len, 6, 64), torch.randn(kv_len, 2, 64), torch.randn(kv_len, 2, 64)
    pool = torch.zeros(60, 1, 2, 2, page_size, pool_width(compiled.page_layout, 64), dtype=torch.uint8)
    whole = compiled.attend(
        query, key, value, pool, 0, make_plan(((kv_len, kv_len),), page_size, iter(range(1, 60))), params
    )
    written = pool.clone()
    for start, stop in ((699, 700), (517, 688), (600, 601)):
        plan = make_plan(((stop - start, stop),), page_size, iter(range(1, 60)))
        part = compiled.attend(query[start:stop], key[start:stop], value[start:stop], pool, 0, plan, params)
        assert torch.equal(part, whole[start:stop]), (start, stop)
        assert torch.equal(pool, written), (start, stop)


@pytest.mark.parametrize("form", FORMS.values(), ids=LAYOUTS)
def test_what_a_byte_loses(form: QuantisedForm) -> None:
    """Half a step of int8, or half of the last of fp8's four digits; the scale's rounding is in the step already."""
    torch.manual_seed(0)
    numbers = torch.randn(300, 64) * 10.0 ** torch.linspace(-30, 30, 300)[:, None]
    numbers[7] = 0
    codes, scales = form.quantise(numbers)
    again = codes.float() * scales.float()[:, None]
    largest = numbers.abs().amax(-1, keepdim=True)
    steps = largest / 254 if form.dtype == torch.int8 else torch.maximum(numbers.abs() / 16, largest / 448 * 2.0**-10)
    assert ((again - numbers).abs() <= 1.01 * steps + 1e-38).all()
    assert torch.equal(again[7], numbers[7])
    codes_twice, scales_twice = form.quantise(numbers.flip(0))
    assert torch.equal(codes_twice.view(torch.uint8).flip(0), codes.view(torch.uint8))
    assert torch.equal(scales_twice.flip(0), scales)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_broken_shows(compiled: CompiledPagedAttention, bad: float) -> None:
    plan, params = make_plan(((1, 1),), 16, iter([1])), AttentionParams(0.25)
    pool = torch.zeros(2, 1, 2, 1, 16, pool_width(compiled.page_layout, 16), dtype=torch.uint8)
    value = torch.ones(1, 1, 16)
    value[0, 0, 5] = bad
    for backend in (compiled, TorchPagedAttention(compiled.page_layout)):
        said = backend.attend(torch.ones(1, 1, 16), torch.ones(1, 1, 16), value, pool, 0, plan, params)
        assert not said.isfinite().all(), backend.name


def buffer(cache_dtype: CacheDtype, dtype: Dtype = "bfloat16") -> TorchKvBuffer:
    return TorchKvBuffer(
        num_pages=3,
        page_size=16,
        num_layers=5,
        num_kv_heads=2,
        head_dim=64,
        dtype=dtype,
        page_layout=PageLayout.CANONICAL if cache_dtype == "auto" else PageLayout(cache_dtype),
    )


def test_each_format_is_a_group_of_its_own() -> None:
    """Hand-offs and answers that have begun stay within a group (`test_upgrades`). A worker that is of another one than
    the rest of its revision is refused, in words that name the difference."""
    said = {
        (cache_dtype, dtype): KvMemory.full(buffer(cache_dtype, dtype), 16).fingerprint()
        for cache_dtype in ("auto", "int8", "fp8")
        for dtype in ("bfloat16", "float32")
    }
    assert len({group_of(fingerprint) for fingerprint in said.values()}) == len(said)
    old, new = (member(worker, said[kind]) for worker, kind in (("prefill-0", PLAIN_KIND), ("decode-0", INT8_KIND)))
    refusal = misfit(Hello(protocol_version=PROTOCOL_VERSION, member=new), 1, [(1, old)])
    assert refusal is not None
    assert refusal.differences["kv_dtype"] == "int8 != bfloat16"
    assert refusal.differences["kv_layout"] == "page-layer-kv-head-int8-scales/1 != page-layer-kv-head-plane/2"
    assert misfit(Hello(protocol_version=PROTOCOL_VERSION, member=new), 1, [(0, old)]) is None, (
        "an upgrade may bring it"
    )


def member(worker: str, fingerprint: dict[str, str]) -> Member:
    stamp = Stamp(WorkerId(worker), 1, Epoch(1))
    return Member(
        stamp=stamp, role=worker.split("-")[0], address="", fingerprint=fingerprint, group=group_of(fingerprint)
    )


def test_a_page_takes_half_and_is_equal_stretches_of_layers() -> None:
    plain, quantised = buffer("auto"), buffer("int8")
    assert quantised.page_bytes == 5 * 2 * 2 * 16 * (64 + 2)
    assert quantised.as_bytes().shape == (3, quantised.page_bytes)
    assert plain.page_bytes / quantised.page_bytes == pytest.approx(1.94, abs=0.01)
    quantised.as_bytes()[2, 3 * quantised.page_bytes // 5 :] = 7  # from the fourth layer on
    assert quantised.pool[2, :3].eq(0).all()
    assert quantised.pool[2, 3:].eq(7).all()


def test_the_fake_model_is_not_quantised() -> None:
    config = {"model": {"model": "fake"}, "kv": {"cache_dtype": "int8"}}
    with pytest.raises(ConfigError, match="hashes") as caught:
        resolve([Layer("test", config)], lambda name: FakeModelInfo())
    assert caught.value.field == "kv.cache_dtype"


def test_a_format_that_the_model_does_not_compute_in_is_refused() -> None:
    config = {"model": {"model": "fake", "dtype": "float32"}, "kv": {"cache_dtype": "bfloat16"}}
    with pytest.raises(ConfigError, match="only int8 and fp8 convert") as caught:
        resolve([Layer("test", config)], lambda name: FakeModelInfo())
    assert caught.value.field == "kv.cache_dtype"


@pytest.mark.parametrize(("cache_dtype", "layout"), [("int8", "panels"), ("fp8", "int8"), ("auto", "int8")])
def test_a_layout_that_does_not_fit_the_format_is_refused(cache_dtype: CacheDtype, layout: LayoutChoice) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_layout(layout, 16, compiled=True, cache_dtype=cache_dtype)
    assert (caught.value.field, caught.value.value) == ("kv.page_layout", layout)


def test_a_gpu_does_not_quantise() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(
            [Layer("test", {"model": {"device": "cuda"}, "kv": {"cache_dtype": "fp8"}})], lambda name: FakeModelInfo()
        )
    assert (caught.value.field, caught.value.value) == ("kv.cache_dtype", "fp8")


def test_a_format_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([Layer("test", {"kv": {"cache_dtype": "int4"}})], lambda name: FakeModelInfo())
    assert (caught.value.field, caught.value.value) == ("kv.cache_dtype", "int4")
    assert "int8, fp8" in caught.value.reason
