"""The contract of every lane, for `local`, and what only this lane can get wrong: reading the wrong memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import pytest

from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.kv.layout import Component
from baton.common.messages import LaneAddress
from baton.transfer.testing import TransportContract
from baton.transfer.testing_ends import random_pool
from baton.transfer.transports.base import Bytes, LinkDown, LinkUp, Rows
from baton.transfer.transports.local import LocalTransport

PEER = Stamp(WorkerId("peer"), 0, Epoch(5))


def transport(pool: Bytes) -> LocalTransport:
    return LocalTransport({Component.FULL: pool})


def rows(*units: int, begin: int = 0, size: int = 4096) -> Rows:
    return Rows(Component.FULL, np.array(units, dtype=np.int32), begin, begin + size)


class TestLocal(TransportContract):
    lane = "local"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nonce": "00" * 16}, "another process"),
        ({"nonce": "00"}, "makes no sense"),
        ({"nonce": "zz"}, "makes no sense"),
        ({"nonce_at": 16}, "Bad address"),
        ({"pid": 2**22 + 1}, "No such process"),
        ({"full_unit_bytes": 8192}, "full has 8192 bytes"),
        ({"host": "elsewhere"}, "another host"),
        ({"full_base": "x"}, "makes no sense"),
    ],
)
def test_a_peer_that_is_not_proven_is_never_read(changes: Mapping[str, str | int], reason: str) -> None:
    source, receiver = transport(random_pool(8, 4096, 1)), transport(np.zeros((8, 4096), np.uint8))
    receiver.open(PEER, LaneAddress(lane="local", address={**source.address().address, **changes}))
    [event] = receiver.poll()
    assert isinstance(event, LinkDown)
    assert reason in event.reason
    failed = receiver.pull(PEER, rows(1), rows(1))
    assert failed is not None
    assert "not open" in failed.reason


def test_a_peer_that_was_replaced_at_its_address_is_noticed_before_its_bytes_count() -> None:
    source, receiver = transport(random_pool(8, 4096, 1)), transport(np.zeros((8, 4096), np.uint8))
    receiver.open(PEER, source.address())
    assert receiver.poll() == [LinkUp(PEER)]
    source.close()  # its nonce is gone, as after a restart with a recycled pid
    failed = receiver.pull(PEER, rows(1), rows(1))
    assert failed is not None
    assert failed.peer_lost
    assert isinstance(receiver.poll()[0], LinkDown)


@pytest.mark.parametrize("source_page", [0, -1, 8, 2**31 - 1])
def test_a_page_outside_of_the_peers_pool_is_never_read(source_page: int) -> None:
    pool = random_pool(8, 4096, 1)
    receiver = transport(np.zeros((8, 4096), np.uint8))
    source = transport(pool)
    receiver.open(PEER, source.address())
    failed = receiver.pull(PEER, rows(source_page), rows(1))
    assert failed is not None
    assert "outside" in failed.reason


def test_thousands_of_scattered_pages_go_in_batches() -> None:
    pages = 5000
    pool = random_pool(pages, 64, 2)
    mine = np.zeros((pages, 64), np.uint8)
    source, receiver = transport(pool), transport(mine)
    receiver.open(PEER, source.address())
    rng = np.random.default_rng(1)
    ours, theirs = (rng.permutation(np.arange(1, pages, dtype=np.int32)) for _ in range(2))
    assert receiver.pull(PEER, rows(*theirs, size=64), rows(*ours, size=64)) is None
    assert np.array_equal(mine[ours], pool[theirs])
    assert not mine[0].any()


def test_neighbouring_pages_on_one_side_only_are_copied_right() -> None:
    pool, mine = random_pool(64, 64, 3), np.zeros((64, 64), np.uint8)
    receiver, source = transport(mine), transport(pool)
    receiver.open(PEER, source.address())
    theirs, ours = np.arange(10, 30, dtype=np.int32), np.arange(40, 20, -1, dtype=np.int32)
    assert receiver.pull(PEER, rows(*theirs, size=64), rows(*ours, size=64)) is None
    assert np.array_equal(mine[ours], pool[theirs])
    assert os.getpid() == source.address().address["pid"]


def test_a_part_of_every_page_is_copied_and_the_rest_of_it_left_alone() -> None:
    pool, mine = random_pool(2000, 64, 3), np.zeros((2000, 64), np.uint8)
    receiver, source = transport(mine), transport(pool)
    receiver.open(PEER, source.address())
    theirs, ours = np.arange(500, 1800, dtype=np.int32), np.arange(1, 1301, dtype=np.int32)
    assert receiver.pull(PEER, rows(*theirs, begin=24, size=16), rows(*ours, begin=24, size=16)) is None
    assert np.array_equal(mine[ours, 24:40], pool[theirs, 24:40])
    mine[ours, 24:40] = 0
    assert not mine.any()
