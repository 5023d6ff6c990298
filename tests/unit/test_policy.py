"""Chunk boundaries, stop conditions, worker preference, deadlines, routing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.common.deadlines import Deadlines
from baton.common.engine.policy import chunk_end, finish_reason, rendezvous_order
from baton.common.ids import WorkerId
from baton.common.messages import SamplingParams


@given(
    pages=st.integers(0, 20),
    total=st.integers(1, 400),
    budget=st.integers(0, 100),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_chunks_end_at_pages_or_at_the_end(pages: int, total: int, budget: int, page_size: int) -> None:
    done = min(pages * page_size, total)
    end = chunk_end(done, total, budget, page_size)
    assert done <= end <= min(total, done + budget)
    assert end == total or end % page_size == 0
    assert end > done or budget < page_size or done == total


def test_finish_reasons() -> None:
    sampling = SamplingParams(max_tokens=3, stop_token_ids=(7,))
    assert finish_reason(0, -1, sampling, 5, 100) == ""
    assert finish_reason(1, 6, sampling, 5, 100) == ""
    assert finish_reason(1, 7, sampling, 5, 100) == "stop"
    assert finish_reason(3, 7, sampling, 5, 100) == "stop"
    assert finish_reason(3, 6, sampling, 5, 100) == "length"
    assert finish_reason(2, 6, sampling, 5, 7) == "length"


def test_rendezvous_moves_only_the_keys_of_a_leaver() -> None:
    workers = [WorkerId(f"w{index}") for index in range(5)]
    for number in range(50):
        order = rendezvous_order(str(number).encode(), workers)
        rest = [worker for worker in workers if worker != order[2]]
        assert rendezvous_order(str(number).encode(), rest) == [worker for worker in order if worker != order[2]]


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 50))), max_size=80))
def test_deadlines_equal_a_dictionary(changes: list[tuple[int, int | None]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, float] = {}
    for name, at in changes:
        if at is None:
            deadlines.drop(name)
            model.pop(name, None)
        else:
            deadlines.set(name, at)
            model[name] = at
        assert deadlines.next_s() == min(model.values(), default=None)
    due = deadlines.pop_due(25)
    assert sorted(due) == sorted(name for name, at in model.items() if at <= 25)
    assert [model[name] for name in due] == sorted(model[name] for name in due)
    assert len(deadlines) == len(model) - len(due)
