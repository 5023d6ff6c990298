"""Copies between slots and pools that lie on a device: what is touched when, and how much of it at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_rig import interpreted_kernel

from baton.common.kv.layout import Component
from baton.transfer.device_copier import DEPTH, DeviceCopier, RowCopy
from baton.transfer.testing_device import LateDevice, copy_rows_torch
from baton.transfer.transports.base import Bytes, Rows

UNITS, UNIT_BYTES, REGION_BYTES = 16, 256, 1024
KERNELS = {"torch": lambda: copy_rows_torch, "triton": interpreted_kernel}


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def pool() -> Bytes:
    return np.random.default_rng(1).integers(0, 256, (UNITS, UNIT_BYTES), dtype=np.uint8)


def copier_of(pool: Bytes, device: LateDevice, copy_rows: RowCopy = copy_rows_torch) -> DeviceCopier:
    return DeviceCopier({Component.FULL: torch.from_numpy(pool)}, copy_rows, device, REGION_BYTES)


def rows(*units: int, begin: int = 0, end: int = UNIT_BYTES) -> Rows:
    return Rows(Component.FULL, np.array(units, dtype=np.int32), begin, end)


def slots(count: int) -> Bytes:
    return np.zeros((count, REGION_BYTES), dtype=np.uint8)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_was_gathered_can_be_scattered(device: LateDevice, pool: Bytes, kernel: str) -> None:
    subject, before, slot = copier_of(pool, device, KERNELS[kernel]()), pool.copy(), slots(1)[0]
    subject.use_staging(slot)
    half = slice(64, 192)
    gather = subject.gather(rows(9, 3, 5, begin=64, end=192), slot[: 3 * 128])
    while not gather.done():
        assert not slot.any(), "not done, and already there: this device works at the last moment"
    assert np.array_equal(slot[: 3 * 128].reshape(3, 128), before[[9, 3, 5], half])
    scatter = subject.scatter(rows(1, 2, 4, begin=64, end=192), slot[: 3 * 128])
    while not scatter.done():
        assert np.array_equal(pool, before)
    before[[1, 2, 4], half] = before[[9, 3, 5], half]
    assert np.array_equal(pool, before)
    assert scatter.done(), "stays done"


def test_more_copies_than_the_ring_holds_wait_and_do_not_mix(device: LateDevice, pool: Bytes) -> None:
    subject, staging = copier_of(pool, device), slots(6)
    subject.use_staging(staging.reshape(-1))
    device.held = True
    copies = [subject.gather(rows(2 * i + 1, 2 * i), staging[i][: 2 * UNIT_BYTES]) for i in range(6)]
    assert not any(copy.done() for copy in copies)
    assert device.launched == DEPTH
    device.held = False
    while not all(copy.done() for copy in copies):
        assert device.under_way <= DEPTH
    for i in range(6):
        assert np.array_equal(staging[i][: 2 * UNIT_BYTES].reshape(2, -1), pool[[2 * i + 1, 2 * i]])


def test_bytes_outside_of_the_slots_are_brought_where_the_device_reaches_them(device: LateDevice, pool: Bytes) -> None:
    subject = copier_of(pool, device)
    subject.use_staging(slots(1)[0])
    foreign = np.arange(UNIT_BYTES, dtype=np.uint8)
    scatter = subject.scatter(rows(7), foreign)
    foreign[:] = 0  # a device that still read here would have to be waited for
    while not scatter.done():
        pass
    assert np.array_equal(pool[7], np.arange(UNIT_BYTES, dtype=np.uint8))


def test_closing_waits_for_what_has_begun_and_leaves_out_the_rest(device: LateDevice, pool: Bytes) -> None:
    subject, staging = copier_of(pool, device), slots(DEPTH + 1)
    subject.use_staging(staging.reshape(-1))
    device.held = True
    copies = [subject.gather(rows(i + 1), slot[:UNIT_BYTES]) for i, slot in enumerate(staging)]
    assert device.pinned
    subject.close()
    assert device.under_way == 0
    assert not device.pinned
    assert [copy.done() for copy in copies] == [True] * DEPTH + [False]
    assert not staging[DEPTH].any()
    assert device.launched == DEPTH


def test_a_device_has_no_pools_for_lanes_without_slots(device: LateDevice, pool: Bytes) -> None:
    subject = copier_of(pool, device)
    assert not subject.host_pools
    assert subject.shape(Component.FULL) == (UNITS, UNIT_BYTES)
