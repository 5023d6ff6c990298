"""What two ends compare to know that a region is what was sent: xxh3-64 over its bytes, or over a sample of them.

Owns no state. `full` reads every byte once more on either side, which costs about as much as moving them. `sampled`
reads a line of every block of every unit, another line from region to region: whatever is torn, shifted, swapped or in
the wrong place is found at once; damage to single bytes within a block (the wire's own checks and the encryption's are
for that) is found in one region of `BLOCK_BYTES // LINE_BYTES`. Both ends must do the same: the kind is a part of what
workers compare when they register.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np
import xxhash

from baton.common.config import DigestKind
from baton.transfer.transports.base import Bytes, UnitIds

LINE_BYTES = 64
BLOCK_BYTES = 4096
_LEAST_BLOCK_BYTES = 512
"""Units that do not consist of blocks at least so large are read whole."""


@dataclass(frozen=True, slots=True)
class Lines:
    """What of each row is the sample: `count` lines of LINE_BYTES, the first one `begin` bytes behind the beginning of
    the row, each `apart` bytes behind the one before."""

    begin: int
    apart: int
    count: int

    @property
    def nbytes(self) -> int:
        """Of one row."""
        return self.count * LINE_BYTES


class RegionDigest:
    """Of region `seq` of a hand-off; the same for its pages and for their bytes one after the other."""

    def __init__(self, kind: DigestKind) -> None:
        self._sampled = kind == "sampled"

    def of_staged(self, data: Bytes, row_bytes: int, seq: int) -> int:
        lines = self._lines(data.reshape(-1, row_bytes), seq)
        return digest_of(data) if lines is None else digest_of(np.ascontiguousarray(lines))

    def of_pages(self, pool: Bytes, units: UnitIds, seq: int) -> int:
        """`pool` may be the same stretch of every unit of a pool."""
        lines = self._lines(pool, seq)
        return digest_of_pages(pool, units) if lines is None else digest_of(lines[units])

    def lines(self, row_bytes: int, seq: int) -> Lines | None:
        """The sample, for who brings it from where it lies: `digest_of` its lines, row by row. None: all bytes count,
        `digest_of` them."""
        block_bytes = gcd(row_bytes, BLOCK_BYTES)
        if not self._sampled or block_bytes < _LEAST_BLOCK_BYTES:
            return None
        return Lines(seq % (block_bytes // LINE_BYTES) * LINE_BYTES, block_bytes, row_bytes // block_bytes)

    def _lines(self, rows: Bytes, seq: int) -> Bytes | None:
        """A view [units, blocks] of lines; None: all bytes count."""
        lines = self.lines(rows.shape[1], seq)
        if lines is None:
            return None
        # Void items: numpy copies each in one piece.
        items = rows.view(f"V{LINE_BYTES}").reshape(len(rows), lines.count, -1)
        return items[:, :, lines.begin // LINE_BYTES]


def digest_of(data: Bytes) -> int:
    """xxh3-64 of contiguous bytes."""
    return int(xxhash.xxh3_64_intdigest(data.data))


def digest_of_pages(pool: Bytes, pages: UnitIds) -> int:
    """xxh3-64 of the pages' bytes, as if gathered."""
    hasher = xxhash.xxh3_64()
    page_bytes = pool.shape[1]
    if not pool.flags.c_contiguous:
        for page in pages.tolist():
            hasher.update(pool[page].data)
        return int(hasher.intdigest())
    memory = pool.reshape(-1).data  # slicing a memoryview costs a tenth of slicing an array
    for first, count in runs(pages):
        hasher.update(memory[first * page_bytes : (first + count) * page_bytes])
    return int(hasher.intdigest())


def runs(pages: UnitIds) -> Iterator[tuple[int, int]]:
    """(first page, count) of each stretch of consecutive page ids."""
    if len(pages) == 0:
        return
    starts = np.flatnonzero(np.diff(pages) != 1) + 1
    bounds = [0, *starts.tolist(), len(pages)]
    firsts = pages[bounds[:-1]].tolist()
    for first, (at, end) in zip(firsts, pairwise(bounds), strict=True):
        yield first, end - at
