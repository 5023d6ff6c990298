"""Conversions against torch, bit for bit; and which of them keep every value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.errors import ConfigError
from baton.transfer.relayout.dtypes import BLOCK, FORMATS, Conversion, bits_type, check_lossy, conversion_of, convert

TORCH = {name: getattr(torch, name) for name in FORMATS}
INTS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
PAIRS = [(source, sink) for source in FORMATS for sink in FORMATS if source != sink]


def patterns(dtype: str) -> np.ndarray:
    """All of them; of float32 those near each value of a smaller format and between two of them, and random ones."""
    if dtype != "float32":
        return np.arange(1 << FORMATS[dtype].bits, dtype=bits_type(dtype))
    near = [convert(patterns(name), name, "float32") for name in FORMATS if name != "float32"]
    ends = np.concatenate([*near, np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)])
    steps = (0, 1, -1, 1 << 15, (1 << 15) - 1, 1 << 12, (1 << 12) - 1, 1 << 19, (1 << 19) + 1, 1 << 20, 1 << 21)
    return np.concatenate([ends + np.uint32(step % (1 << 32)) for step in steps])


def by_torch(bits: np.ndarray, source: str, sink: str) -> np.ndarray:
    """Through float32, which has all values. Torch makes NaN of what an 8-bit float has no room for; kernels do not."""
    values = torch.from_numpy(bits).view(TORCH[source]).to(torch.float32)
    if FORMATS[sink].bits == 8:
        greatest = torch.finfo(TORCH[sink]).max
        values = values.clamp(-greatest, greatest)
    return values.to(TORCH[sink]).view(INTS[FORMATS[sink].itemsize]).numpy()


@pytest.mark.parametrize(("source", "sink"), PAIRS)
def test_conversions_are_those_of_torch(source: str, sink: str) -> None:
    bits = patterns(source)
    found, wanted = convert(bits, source, sink), by_torch(bits, source, sink)
    numbers = ~np.isnan(convert(wanted, sink, "float32").view(np.float32))
    assert np.array_equal(found[numbers], wanted[numbers])
    assert np.isnan(convert(found[~numbers], sink, "float32").view(np.float32)).all(), "what is no number stays none"


@pytest.mark.parametrize(("source", "sink"), PAIRS)
def test_exact_means_that_every_number_comes_back(source: str, sink: str) -> None:
    bits = patterns(source)
    values = convert(bits, source, "float32").view(np.float32)
    bits = bits[np.isfinite(values)]
    back = convert(convert(bits, source, sink), sink, source)
    assert np.array_equal(back, bits) == Conversion(source, sink).exact


@pytest.mark.parametrize(("source", "sink"), PAIRS)
def test_many_numbers_are_converted_like_few(source: str, sink: str) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << FORMATS[source].bits, (3, BLOCK), dtype=bits_type(source))
    bits = bits[:, ::-1]  # not contiguous, as what is taken out of a page may be
    parts = [convert(part, source, sink) for row in bits for part in np.array_split(row, 7)]
    assert np.array_equal(convert(bits, source, sink).reshape(-1), np.concatenate(parts))


def test_the_smaller_format_travels() -> None:
    assert Conversion("float32", "bfloat16").wire == "bfloat16"
    assert Conversion("bfloat16", "float32").wire == "bfloat16"
    assert Conversion("bfloat16", "float16").wire == "bfloat16"


def test_what_rounds_must_be_allowed_by_its_name() -> None:
    assert conversion_of("dtype", "bfloat16", "float32", ()).exact
    assert conversion_of("dtype", "float8_e4m3fn", "bfloat16", ()).exact
    with pytest.raises(ConfigError, match=r"dtype = 'float32->bfloat16': .* allow float32->bfloat16 as lossy"):
        conversion_of("dtype", "float32", "bfloat16", {"float32->float16"})
    assert not conversion_of("dtype", "float32", "bfloat16", {"float32->bfloat16"}).exact


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dtype = 'int4_g32': .*known: float32, bfloat16"):
        conversion_of("dtype", "bfloat16", "int4_g32", ())
    check_lossy({"float32->bfloat16"})
    with pytest.raises(ConfigError, match="did you mean float32->bfloat16"):
        check_lossy({"float32->bfloat61"})
    with pytest.raises(ConfigError, match="no conversion that rounds"):
        check_lossy({"bfloat16->float32"})
