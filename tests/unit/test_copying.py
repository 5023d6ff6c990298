"""The page copies: every byte of the rows, and no other, whatever their size, alignment and number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from triton_rig import interpreted_copy

from baton.common import log
from baton.common.native import BuildError, built
from baton.transfer import copying
from baton.transfer.copying import LIBRARY, Copy, compiled_copy, copy_rows_numpy

ON_HOST = {"compiled": lambda: compiled_copy(built(LIBRARY)), "numpy": lambda: copy_rows_numpy}
COPIES = ON_HOST | {"triton": interpreted_copy}


@pytest.fixture(params=COPIES)
def copy(request: pytest.FixtureRequest) -> Copy:
    return COPIES[request.param]()


@pytest.fixture(params=ON_HOST)
def host_copy(request: pytest.FixtureRequest) -> Copy:
    """Not Triton's interpreter, where a program of the kernel takes milliseconds."""
    return ON_HOST[request.param]()


def rows(count: int, row_bytes: int, seed: int, offset: int = 0) -> np.ndarray:
    """Random rows whose first byte lies `offset` bytes behind a line boundary."""
    memory = np.random.default_rng(seed).integers(0, 256, count * row_bytes + 128, dtype=np.uint8)
    first = -memory.ctypes.data % 64 + offset
    return memory[first : first + count * row_bytes].reshape(count, row_bytes)


@pytest.mark.parametrize(("row_bytes", "count"), [(1, 3), (100, 7), (512, 4), (4096, 9), (23040, 3)])
@pytest.mark.parametrize("offset", [0, 1, 64])
def test_rows_arrive_whole_and_nothing_else_changes(copy: Copy, row_bytes: int, count: int, offset: int) -> None:
    check_rows(copy, row_bytes, count, offset)


# Below and above the sizes from which on the caches are bypassed and a second thread helps.
@pytest.mark.parametrize(("row_bytes", "count"), [(4096, 70), (23040, 200), (720 << 10, 5)])
@pytest.mark.parametrize("offset", [0, 1, 64])
def test_many_rows_arrive_as_few(host_copy: Copy, row_bytes: int, count: int, offset: int) -> None:
    check_rows(host_copy, row_bytes, count, offset)


def check_rows(copy: Copy, row_bytes: int, count: int, offset: int) -> None:
    rng = np.random.default_rng(count)
    total = 2 * count + 1
    source, target = rows(total, row_bytes, 1, offset), rows(total, row_bytes, 2)
    theirs, ours = (rng.permutation(np.arange(total, dtype=np.int32))[:count] for _ in range(2))
    expected = target.copy()
    expected[ours] = source[theirs]
    copy(target, ours, source, theirs)
    assert np.array_equal(target, expected)


def test_a_part_of_each_row_leaves_the_rest_of_it_alone(copy: Copy) -> None:
    source, target = rows(40, 4096, 1), rows(40, 4096, 2)
    ids = np.array([7, 3, 20], dtype=np.int32)
    expected = target.copy()
    expected[ids, 1024:3072] = source[ids[::-1], 1024:3072]
    copy(target[:, 1024:3072], ids, source[:, 1024:3072], np.ascontiguousarray(ids[::-1]))
    assert np.array_equal(target, expected)


def test_gather_and_scatter_are_copies_with_ids_on_one_side(copy: Copy) -> None:
    pool, other = rows(64, 8192, 1), rows(64, 8192, 2)
    ids = np.random.default_rng(3).permutation(np.arange(1, 64, dtype=np.int32))[:50]
    staged = np.zeros((50, 8192), np.uint8)
    copy(staged, None, pool, ids)
    assert np.array_equal(staged, pool[ids])
    copy(other, ids, staged, None)
    assert np.array_equal(other[ids], pool[ids])


def test_nothing_is_copied_for_no_rows(copy: Copy) -> None:
    source, target = rows(4, 64, 1), rows(4, 64, 2)
    none = np.empty(0, dtype=np.int32)
    before = target.copy()
    copy(target, none, source, none)
    assert np.array_equal(target, before)


def test_rows_that_do_not_fit_each_other_are_a_bug() -> None:
    copy = compiled_copy(built(LIBRARY))
    one, two = np.array([1], np.int32), np.array([1, 2], np.int32)
    with pytest.raises(AssertionError, match="rows for rows"):
        copy(rows(4, 64, 1), one, rows(4, 64, 2), two)
    with pytest.raises(AssertionError, match="rows of 64 bytes for rows of 32"):
        copy(rows(4, 32, 1), one, rows(4, 64, 2), one)
    with pytest.raises(AssertionError, match="side by side"):
        copy(rows(4, 64, 1)[:, ::2], one, rows(4, 32, 2), one)


def test_a_read_only_source_is_enough(host_copy: Copy) -> None:
    source, target = rows(4, 64, 1), rows(4, 64, 2)
    source.flags.writeable = False
    host_copy(target, None, source, None)
    assert np.array_equal(target, source)


def test_a_process_with_one_core_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {1: 1, 2: 2, 64: copying.MOST_THREADS}
    for cores, threads in counted.items():
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cores=cores: set(range(cores)))
        assert copying._threads() == threads


def test_without_a_compiler_it_works_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, fresh_copy: Callable[[], None]
) -> None:
    warned: list[str] = []

    def fail(*_: object) -> None:
        raise BuildError("there is no C++ compiler")

    monkeypatch.setattr(copying, "built", fail)
    monkeypatch.setattr(log.EventLog, "warning", lambda _self, event, **_fields: warned.append(event))
    fresh_copy()
    source, target = rows(8, 64, 1), rows(8, 64, 2)
    for _ in range(2):
        copying.copy_rows(target, None, source, None)
    assert np.array_equal(target, source)
    assert warned == ["page_copies_slow"]


@pytest.fixture
def fresh_copy() -> Callable[[], None]:
    yield copying._copy.cache_clear
    copying._copy.cache_clear()
