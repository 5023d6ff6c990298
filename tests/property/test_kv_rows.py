"""RowTable against a dict of lists."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.common.kv.errors import OwnershipError
from baton.common.kv.rows import RowTable

MAX_PAGES = 6


class RowsMachine(RuleBasedStateMachine):
    @initialize(max_rows=st.integers(1, 5))
    def start(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.table = RowTable(max_rows, MAX_PAGES)
        self.model: dict[int, list[int]] = {}

    @rule()
    def acquire(self) -> None:
        row = self.table.acquire()
        if len(self.model) == self.max_rows:
            assert row is None
            return
        assert row is not None
        assert row not in self.model
        self.model[row] = [0] * MAX_PAGES

    @precondition(lambda self: self.model)
    @rule(data=st.data(), first=st.integers(0, MAX_PAGES), pages=st.lists(st.integers(1, 99), max_size=MAX_PAGES))
    def write(self, data: st.DataObject, first: int, pages: list[int]) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        entries = np.array(pages, dtype=np.int32)
        if first + len(pages) > MAX_PAGES:
            with pytest.raises(OwnershipError):
                self.table.write(row, first, entries)
            return
        self.table.write(row, first, entries)
        self.model[row][first : first + len(pages)] = pages

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        self.table.release(row)
        del self.model[row]

    @rule(row=st.integers(-2, 7))
    def release_what_is_not_taken(self, row: int) -> None:
        if row not in self.model:
            with pytest.raises(OwnershipError):
                self.table.release(row)
            with pytest.raises(OwnershipError):
                self.table.write(row, 0, np.array([1], dtype=np.int32))

    @invariant()
    def rows_read_back(self) -> None:
        assert self.table.free_rows == self.max_rows - len(self.model)
        assert self.table.taken_rows() == sorted(self.model)
        for row, pages in self.model.items():
            view = self.table.view(row, 0, MAX_PAGES)
            assert view.tolist() == pages
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 7


RowsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestRows = RowsMachine.TestCase


def test_a_table_needs_rows_and_pages() -> None:
    for shape in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="positive"):
            RowTable(*shape)
