"""Conversions between tokens and pages. Only what works on whole arrays of positions (packing, kernels) divides by a
page size itself."""

from __future__ import annotations


def pages_for_tokens(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens, the last one perhaps partly filled."""
    return -(-tokens // page_size)


def whole_pages(tokens: int, page_size: int) -> int:
    """Pages that ``tokens`` tokens fill completely; also the index of the page that holds token number ``tokens``."""
    return tokens // page_size


def page_floor(tokens: int, page_size: int) -> int:
    """The largest multiple of ``page_size`` that is not above ``tokens``."""
    return tokens // page_size * page_size


def page_ceil(tokens: int, page_size: int) -> int:
    """The smallest multiple of ``page_size`` that is not below ``tokens``."""
    return -(-tokens // page_size) * page_size


def format_bytes(count: float) -> str:
    """``3.2 MiB``; for people, never parsed."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
