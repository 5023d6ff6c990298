"""PageAllocator against a set."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.common.kv.allocator import PageAllocator
from baton.common.kv.errors import OwnershipError


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(2, 40))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.everything = set(range(1, num_pages))
        self.out: set[int] = set()

    @rule(count=st.integers(0, 45))
    def allocate(self, count: int) -> None:
        pages = self.allocator.allocate(count)
        if count > len(self.everything) - len(self.out):
            assert pages is None
            return
        assert pages is not None
        assert pages.dtype == np.int32
        got = set(pages.tolist())
        assert len(got) == count
        assert got <= self.everything - self.out
        self.out |= got

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.out)), unique=True))
        self.allocator.free(np.array(pages, dtype=np.int32))
        self.out -= set(pages)

    @rule(data=st.data())
    def free_what_is_not_yours(self, data: st.DataObject) -> None:
        free = sorted(self.everything - self.out)
        wrong = data.draw(st.sampled_from([0, -1, len(self.everything) + 1, *free]))
        pages = [*sorted(self.out), wrong]
        with pytest.raises(OwnershipError):
            self.allocator.free(np.array(pages, dtype=np.int32))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def free_twice_in_one_call(self, data: st.DataObject) -> None:
        twice = data.draw(st.sampled_from(sorted(self.out)))
        with pytest.raises(OwnershipError, match="twice"):
            self.allocator.free(np.array([*sorted(self.out), twice], dtype=np.int32))

    @invariant()
    def books_add_up(self) -> None:
        free = self.everything - self.out
        assert self.allocator.total_pages == len(self.everything)
        assert self.allocator.free_pages == len(free)
        assert set(self.allocator.free_page_ids().tolist()) == free
        assert all(self.allocator.is_free(page) == (page in free) for page in self.everything | {0})
        self.allocator.check()


AllocatorMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestAllocator = AllocatorMachine.TestCase


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(ValueError, match="null page"):
        PageAllocator(1)


def test_check_finds_a_free_list_that_disagrees_with_its_marks() -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(3)
    assert pages is not None
    allocator.free_pages += 1  # what a lost update would do
    with pytest.raises(OwnershipError, match="disagree"):
        allocator.check()
