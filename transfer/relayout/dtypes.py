"""Number formats of KV: which conversion keeps every value, and all of them on numpy arrays.

Every format fits float32, so a conversion is at most one rounding, to nearest, ties to even. What is too large for an
8-bit float becomes its largest value, as in inference kernels; what is too large for float16 becomes infinite.
Never: scales. A format with scales beside its numbers is another layout, and travels only between equal sides.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.common.errors import ConfigError

Bits = npt.NDArray[np.unsignedinteger[Any]]
F32 = npt.NDArray[np.float32]
BLOCK = 1 << 16
"""Numbers converted at a time: what is made of them on the way stays in the cache."""


@dataclass(frozen=True, slots=True)
class Format:
    """`significand` bits count the implied one. Powers of two: of the smallest value, and of the largest one."""

    bits: int
    significand: int
    least: int
    greatest: int

    @property
    def itemsize(self) -> int:
        return self.bits // 8

    def keeps(self, other: Format) -> bool:
        """Every value of `other` is one of this format."""
        return self.significand >= other.significand and self.least <= other.least and self.greatest >= other.greatest


FORMATS = {
    "float32": Format(32, 24, -149, 127),
    "bfloat16": Format(16, 8, -133, 127),
    "float16": Format(16, 11, -24, 15),
    "float8_e4m3fn": Format(8, 4, -9, 8),
    "float8_e5m2": Format(8, 3, -16, 15),
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """From the source's format to the sink's. The smaller of both is what travels: who has the larger one converts."""

    source: str
    sink: str

    @property
    def name(self) -> str:
        return f"{self.source}->{self.sink}"

    @property
    def source_itemsize(self) -> int:
        return FORMATS[self.source].itemsize

    @property
    def sink_itemsize(self) -> int:
        return FORMATS[self.sink].itemsize

    @property
    def wire(self) -> str:
        return self.sink if self.sink_itemsize < self.source_itemsize else self.source

    @property
    def wire_itemsize(self) -> int:
        return FORMATS[self.wire].itemsize

    @property
    def exact(self) -> bool:
        return FORMATS[self.sink].keeps(FORMATS[self.source])


def conversion_of(field: str, source: str, sink: str, lossy: Collection[str]) -> Conversion:
    """Raises ConfigError for a format that is not known, or an inexact conversion whose name is not in `lossy`."""
    for dtype in (source, sink):
        if dtype not in FORMATS:
            known = ", ".join(FORMATS)
            hint = f"known: {known}; any other travels only between workers that are laid out alike"
            raise ConfigError(field, dtype, "a number format that cannot be converted, or taken apart", hint)
    conversion = Conversion(source, sink)
    if not conversion.exact and conversion.name not in lossy:
        hint = f"give both sides one dtype, or allow {conversion.name} as lossy"
        raise ConfigError(field, conversion.name, "this conversion rounds, and was not allowed", hint)
    return conversion


def check_lossy(lossy: Collection[str]) -> None:
    """Raises ConfigError for a name that is no inexact conversion."""
    every = [Conversion(a, b).name for a in FORMATS for b in FORMATS if not Conversion(a, b).exact]
    for name in lossy:
        if name not in every:
            near = difflib.get_close_matches(name, every, n=1)
            raise ConfigError("lossy", name, "no conversion that rounds", f"did you mean {near[0]}?" if near else "")


def bits_type(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(f"u{FORMATS[dtype].itemsize}")


def convert(bits: Bits, source: str, sink: str) -> Bits:
    """Numbers of format `source`, as unsigned integers, in format `sink`."""
    if source == sink:
        return bits
    if FORMATS[source].bits == 16 and FORMATS[sink].bits == 8 and bits.size > BLOCK:  # looked up: rounding is slow
        found: Bits = convert(np.arange(1 << 16, dtype=np.uint16), source, sink)[bits]
        return found
    converted = np.empty(bits.shape, dtype=bits_type(sink))
    flat, out = bits.reshape(-1), converted.reshape(-1)
    for at in range(0, flat.size, BLOCK):
        out[at : at + BLOCK] = _from_float32(_to_float32(flat[at : at + BLOCK], source), sink)
    return converted


def _to_float32(bits: Bits, dtype: str) -> F32:
    if dtype == "float32":
        return np.ascontiguousarray(bits).view(np.float32)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float16":
        with np.errstate(invalid="ignore"):  # some NaNs are said to be
            return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    magnitudes = _magnitudes(dtype)
    values: F32 = np.concatenate([magnitudes, -magnitudes])[bits]
    return values


def _from_float32(values: F32, dtype: str) -> Bits:
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "bfloat16":
        wide = values.view(np.uint32)
        upper = wide >> np.uint32(16)
        rounded = (wide + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(values), upper | np.uint32(0x40), rounded).astype(np.uint16)
    if dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(np.float16).view(np.uint16)
    magnitudes = _magnitudes(dtype)
    finite = magnitudes[np.isfinite(magnitudes)]
    middles = (finite[:-1] + finite[1:]) / 2  # value k is nearest between middles k - 1 and k
    size = np.abs(values)
    code = np.searchsorted(middles, size)
    code += (np.searchsorted(middles, size, side="right") > code) & (code % 2 == 1)  # on a middle: the even one
    code = np.where(np.isnan(values), 0x7F, code)
    return (code + np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def _magnitudes(dtype: str) -> F32:
    """The values of codes 0 to 127 of an 8-bit format, ascending; infinity and NaNs at their end."""
    fraction_bits = FORMATS[dtype].significand - 1
    exponent, fraction = np.divmod(np.arange(128), 1 << fraction_bits)
    scaled = np.where(exponent == 0, fraction, fraction + (1 << fraction_bits)).astype(np.float32)
    values = np.ldexp(scaled, np.maximum(exponent, 1) - 1 + FORMATS[dtype].least)
    if dtype == "float8_e5m2":
        values[0x7C:] = [np.inf, np.nan, np.nan, np.nan]
    else:
        values[0x7F] = np.nan
    magnitudes: F32 = values.astype(np.float32)
    return magnitudes
