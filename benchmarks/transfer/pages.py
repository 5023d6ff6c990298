"""Which pages a hand-off moves and what is in them: the same for Baton and for the peers that it is measured against.

Owns: the choice of pages and their content. Imports nothing but numpy: the peers' environment has no Baton.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int32]

_PAGE_STEP, _WORD_STEP = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_REUSED = np.uint64(0x5EED_5EED_5EED_5EED)
_ROWS_AT_ONCE = 512


def new_pool(pool_bytes: int, page_bytes: int) -> Bytes:
    """[1 + pages, page_bytes], every byte of it touched. Page 0 is never used: it is the null page of a KV pool."""
    pool = np.empty((1 + pool_bytes // page_bytes, page_bytes), dtype=np.uint8)
    pool[:] = 0
    return pool


def scattered(pool_bytes: int, page_bytes: int, side: str) -> Ids:
    """Every page of a pool but the null page, in an order of the side's own. Hand-offs take stretches of it."""
    seed = {"source": 1, "target": 2}[side]
    return np.random.default_rng(seed).permutation(np.arange(1, 1 + pool_bytes // page_bytes, dtype=np.int32))


def stretch(ids: Ids, first: int, pages: int) -> Ids:
    """`pages` of them from `first` on, round the end."""
    return np.take(ids, np.arange(first, first + pages), mode="wrap")


def content(ids: Ids, page_bytes: int) -> npt.NDArray[np.uint64]:
    """What the source has in these pages: every word tells its page and its place."""
    words = np.arange(page_bytes // 8, dtype=np.uint64) * _WORD_STEP
    return words[None, :] + (ids.astype(np.uint64) * _PAGE_STEP)[:, None]


def fill(pool: Bytes) -> None:
    """Makes it a source."""
    for first in range(0, len(pool), _ROWS_AT_ONCE):
        ids = np.arange(first, min(first + _ROWS_AT_ONCE, len(pool)), dtype=np.int32)
        pool[ids[0] : ids[-1] + 1].view(np.uint64)[:] = content(ids, pool.shape[1])


def wrong_pages(pool: Bytes, ours: Ids, theirs: Ids) -> int:
    """How many of `ours` do not hold what the source has in `theirs`, one for one."""
    wrong = 0
    for first in range(0, len(ours), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        wrong += int((pool[ours[part]].view(np.uint64) != content(theirs[part], pool.shape[1])).any(axis=1).sum())
    return wrong


def stray_pages(pool: Bytes, ours: Ids) -> int:
    """How many of the pages that are not `ours` hold anything but zeros."""
    others = np.setdiff1d(np.arange(len(pool), dtype=np.int32), ours)
    return sum(
        int(pool[others[first : first + _ROWS_AT_ONCE]].view(np.uint64).any(axis=1).sum())
        for first in range(0, len(others), _ROWS_AT_ONCE)
    )


def check(pool: Bytes, ids: Mapping[str, Ids], first: int, count: int) -> dict[str, int]:
    """After `count` pages from `first` on were moved into a cleared pool: how many are wrong, and how many others were
    written."""
    ours, theirs = (stretch(ids[side], first, count) for side in ("target", "source"))
    return {"wrong": wrong_pages(pool, ours, theirs), "stray": stray_pages(pool, ours)}


def reuse(pool: Bytes, ids: Ids) -> None:
    """Somebody else's content, as if the pages had been given to another request."""
    pool.view(np.uint64)[ids] = _REUSED


def foreign_pages(pool: Bytes, ids: Ids) -> int:
    """How many of the reused pages hold anything else by now."""
    return sum(
        int((pool[ids[first : first + _ROWS_AT_ONCE]].view(np.uint64) != _REUSED).any(axis=1).sum())
        for first in range(0, len(ids), _ROWS_AT_ONCE)
    )


def landed_pages(pool: Bytes, ids: Ids) -> int:
    """About how many of zeroed pages have been written so far: one in 64 is looked at, and only its last word."""
    return 64 * int((pool.view(np.uint64)[ids[::64], -1] != 0).sum())
