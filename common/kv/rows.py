"""`RowTable`: the map from (row, page index) to page id, one row per record. Owns the rows; never a page.

Invariant: a row is free, or belongs to one record. The entries of a free row are the null page. A record with pages in
two pools has the same row in two tables (`beside`).
"""

from __future__ import annotations

import numpy as np

from baton.common.kv.errors import OwnershipError
from baton.common.kv.prefix.interface import I32


class RowTable:
    """int32 [max_rows, max_pages]."""

    def __init__(self, max_rows: int, max_pages: int) -> None:
        if max_rows < 1 or max_pages < 1:
            raise ValueError(f"max_rows = {max_rows}, max_pages = {max_pages}: both must be positive")
        self.max_rows = max_rows
        self.max_pages = max_pages
        self._table: I32 = np.zeros((max_rows, max_pages), dtype=np.int32)
        self._readable = self._table.view()
        self._readable.flags.writeable = False
        self._free = list(range(max_rows - 1, -1, -1))
        self._taken = [False] * max_rows
        self._beside: list[RowTable] = []

    def beside(self) -> RowTable:
        """A second table of the same rows: taken and released with this one."""
        other = RowTable(self.max_rows, self.max_pages)
        other._free, other._taken = self._free, self._taken
        self._beside.append(other)
        return other

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def acquire(self) -> int | None:
        """A row of null pages, or None when all are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self._taken[row] = True
        return row

    def release(self, row: int) -> None:
        """Raises OwnershipError when the row is not taken."""
        self._own(row)
        for table in (self, *self._beside):
            table._table[row] = 0
        self._taken[row] = False
        self._free.append(row)

    def write(self, row: int, first_page: int, pages: I32) -> None:
        """Entries [first_page, first_page + len(pages)) of a taken row."""
        self._own(row)
        if first_page + len(pages) > self.max_pages:
            raise OwnershipError(f"row {row} has {self.max_pages} entries, not {first_page + len(pages)}")
        self._table[row, first_page : first_page + len(pages)] = pages

    def view(self, row: int, first_page: int, end_page: int) -> I32:
        """A read-only view of live entries: valid until the row changes. Copy what outlives the step."""
        return self._readable[row, first_page:end_page]

    @property
    def table(self) -> I32:
        """All entries, read-only; where they lie never changes."""
        return self._readable

    @property
    def marks(self) -> bytes:
        """Of each row, 1 if it is taken."""
        return bytes(self._taken)

    def taken_rows(self) -> list[int]:
        return [row for row, taken in enumerate(self._taken) if taken]

    def _own(self, row: int) -> None:
        if not (0 <= row < self.max_rows and self._taken[row]):
            raise OwnershipError(f"row {row} is not taken")
