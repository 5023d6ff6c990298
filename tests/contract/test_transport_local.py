"""The contract of every lane, for `local`, and what only this lane can get wrong: reading the wrong memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import pytest

from baton.common.engine.batch import KvMemory
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.kv.buffers import NumpyKvBuffer
from baton.common.kv.layout import Component
from baton.common.messages import LaneAddress
from baton.transfer.testing import TransportContract
from baton.transfer.testing_ends import random_pool
from baton.transfer.transports.base import Bytes, LinkDown, LinkUp, PullFailed, Rows
from baton.transfer.transports.local import LocalTransport

PEER = Stamp(WorkerId("peer"), 0, Epoch(5))


def transport(pages: int = 8, page_bytes: int = 4096, fill: int = 0) -> tuple[LocalTransport, Bytes]:
    buffer = NumpyKvBuffer(pages, page_bytes, 4, shared=True)
    if fill:
        buffer.as_bytes()[:] = random_pool(pages, page_bytes, fill)
    return LocalTransport(KvMemory.full(buffer, 4)), buffer.as_bytes()


def pull(receiver: LocalTransport, theirs: list[int] | np.ndarray, ours: list[int] | np.ndarray, end: int = 4096) -> (
    PullFailed | None
):  # fmt: skip
    source, target = (Rows(Component.FULL, np.asarray(ids, np.int32), 0, end) for ids in (theirs, ours))
    return receiver.pull(PEER, source, target)


class TestLocal(TransportContract):
    lane = "local"
    staged = False
    slotted = False


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"full_nonce": "01" * 16}, "another process"),
        ({"full_nonce": "00"}, "makes no sense"),
        ({"full_nonce": "zz"}, "makes no sense"),
        ({"full_fd": 0}, "no sealed memory"),
        ({"full_fd": 2**20}, "No such file"),
        ({"full_fd": "../environ"}, "makes no sense"),
        ({"pid": 2**22 + 1}, "No such file"),
        ({"full_unit_bytes": 8192}, "full has 8192 bytes"),
        ({"full_units": 9}, "bytes where"),
        ({"full_units": -1}, "bytes where"),
        ({"host": "elsewhere"}, "another host"),
        ({"full_units": "x"}, "makes no sense"),
    ],
)
def test_a_peer_that_is_not_proven_is_never_read(changes: Mapping[str, str | int], reason: str) -> None:
    (source, _), (receiver, _) = transport(fill=1), transport()
    receiver.open(PEER, LaneAddress(lane="local", address={**source.address().address, **changes}))
    [event] = receiver.poll()
    assert isinstance(event, LinkDown)
    assert reason in event.reason
    failed = pull(receiver, [1], [1])
    assert failed is not None
    assert "not open" in failed.reason


def test_what_a_peer_took_back_does_not_count() -> None:
    (source, _), (receiver, _) = transport(fill=1), transport()
    receiver.open(PEER, source.address())
    assert receiver.poll() == [LinkUp(PEER)]
    source.close()
    failed = pull(receiver, [1], [1])
    assert failed is not None
    assert failed.peer_lost
    assert isinstance(receiver.poll()[0], LinkDown)


@pytest.mark.parametrize("page", [-1, 8, 2**31 - 1])  # the null page is anybody's: probes move it
def test_a_page_outside_of_either_pool_is_never_touched(page: int) -> None:
    (source, _), (receiver, mine) = transport(fill=1), transport()
    receiver.open(PEER, source.address())
    for theirs, ours in (([page], [1]), ([1], [page])):
        failed = pull(receiver, theirs, ours)
        assert failed is not None
        assert "outside" in failed.reason
    assert not mine.any()


def test_rows_that_do_not_match_are_refused() -> None:
    (source, _), (receiver, mine) = transport(fill=1), transport()
    receiver.open(PEER, source.address())
    failed = pull(receiver, [1, 2], [1])
    assert failed is not None
    assert "8192 bytes for 4096" in failed.reason
    assert not mine.any()


def test_thousands_of_scattered_pages() -> None:
    pages = 5000
    (source, pool), (receiver, mine) = transport(pages, 64, 2), transport(pages, 64)
    receiver.open(PEER, source.address())
    rng = np.random.default_rng(1)
    ours, theirs = (rng.permutation(np.arange(1, pages, dtype=np.int32)) for _ in range(2))
    assert pull(receiver, theirs, ours, 64) is None
    assert np.array_equal(mine[ours], pool[theirs])
    assert not mine[0].any()


def test_some_layers_of_pages_leave_the_others_alone() -> None:
    (source, pool), (receiver, mine) = transport(fill=3), transport(fill=4)
    receiver.open(PEER, source.address())
    expected = mine.copy()
    expected[[5, 2], 1024:2048] = pool[[3, 6], 1024:2048]
    rows = [Rows(Component.FULL, np.array(ids, np.int32), 1024, 2048) for ids in ([3, 6], [5, 2])]
    assert receiver.pull(PEER, *rows) is None
    assert np.array_equal(mine, expected)


def test_the_address_names_this_process() -> None:
    source, _ = transport()
    assert source.address().address["pid"] == os.getpid()


def test_a_pool_of_its_own_can_receive_and_not_be_read() -> None:
    (source, pool), mine = transport(fill=1), NumpyKvBuffer(8, 4096, 4)
    receiver = LocalTransport(KvMemory.full(mine, 4))
    source.open(PEER, receiver.address())
    assert source.poll() == [LinkDown(PEER, "its pool of full is in memory of its own")]
    receiver.open(PEER, source.address())
    assert pull(receiver, [1, 2], [6, 5]) is None
    assert np.array_equal(mine.as_bytes()[[6, 5]], pool[[1, 2]])
