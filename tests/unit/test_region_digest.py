"""What two ends compare of a region: the same for pages and staged bytes, and no misplaced or torn region passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.kv.layout import Component
from baton.transfer.device_copier import DeviceCopier
from baton.transfer.digest import BLOCK_BYTES, LINE_BYTES, RegionDigest
from baton.transfer.pool_copier import HostCopier
from baton.transfer.staging import StagingHandler
from baton.transfer.testing_device import LateDevice, copy_rows_torch
from baton.transfer.transports.base import Rows

SAMPLED, FULL = RegionDigest("sampled"), RegionDigest("full")
LINES = BLOCK_BYTES // LINE_BYTES
PAGES = np.array([5, 6, 2, 9], dtype=np.int32)


def pool(unit_bytes: int) -> np.ndarray:
    return np.random.default_rng(unit_bytes).integers(0, 256, (12, unit_bytes), dtype=np.uint8)


def as_tensors(pools: dict[Component, np.ndarray]) -> dict[Component, torch.Tensor]:
    return {component: torch.from_numpy(memory) for component, memory in pools.items()}


def gathered(memory: np.ndarray, pages: np.ndarray) -> np.ndarray:
    return memory[pages].reshape(-1)


@pytest.mark.parametrize("digest", [SAMPLED, FULL])
@pytest.mark.parametrize("unit_bytes", [8, 100, 256, 4096, 23040, 3 * 4096 + 512, 16384])
def test_pages_and_their_gathered_bytes_agree(digest: RegionDigest, unit_bytes: int) -> None:
    memory = pool(unit_bytes)
    for seq in (0, 1, 63, 64, 1000):
        found = digest.of_pages(memory, PAGES, seq)
        assert found == digest.of_staged(gathered(memory, PAGES), unit_bytes, seq)
        assert found != digest.of_pages(memory, PAGES[::-1].copy(), seq), "the order counts"
        assert found != digest.of_pages(memory, PAGES[:-1], seq)


@pytest.mark.parametrize("digest", [SAMPLED, FULL])
@pytest.mark.parametrize(("begin", "end"), [(0, 4096), (4096, 12288), (8, 24), (512, 8192)])
def test_a_part_of_every_page_is_read_alone(digest: RegionDigest, begin: int, end: int) -> None:
    memory = pool(3 * 4096)
    part = memory[:, begin:end]
    found = digest.of_pages(part, PAGES, 5)
    assert found == digest.of_staged(gathered(part, PAGES), end - begin, 5)
    memory[:, :begin] ^= 1
    memory[:, end:] ^= 1
    assert found == digest.of_pages(part, PAGES, 5)
    part ^= 1
    assert found != digest.of_pages(part, PAGES, 5)


@pytest.mark.parametrize("digest", [SAMPLED, FULL])
@pytest.mark.parametrize(("begin", "end"), [(0, 3 * 4096), (4096, 12288), (8, 24), (512, 1536), (1024, 3072)])
def test_what_is_read_of_pages_that_the_host_cannot_address_agrees_with_them(
    digest: RegionDigest, begin: int, end: int
) -> None:
    memory, region_bytes = pool(3 * 4096), len(PAGES) * 3 * 4096
    device = LateDevice()
    pools = {Component.FULL: memory}
    for copier in (HostCopier(pools), DeviceCopier(as_tensors(pools), copy_rows_torch, device, region_bytes)):
        slot = np.zeros(region_bytes, dtype=np.uint8)
        copier.use_staging(slot)
        handler = StagingHandler(copier, digest)
        for seq in (0, 5, 64):
            reading = handler.read_for_digest(Rows(Component.FULL, PAGES, begin, end), seq, slot)
            while not reading.copying.done():
                pass
            assert reading.digest() == digest.of_pages(memory[:, begin:end], PAGES, seq)
    assert device.launched == 3


def test_of_a_sample_only_its_lines_are_read() -> None:
    memory, slot = pool(3 * 4096), np.zeros(1 << 16, dtype=np.uint8)
    reading = StagingHandler(HostCopier({Component.FULL: memory}), SAMPLED).read_for_digest(
        Rows(Component.FULL, PAGES, 0, 3 * 4096), 7, slot
    )
    assert len(reading.data) == len(PAGES) * 3 * LINE_BYTES


def test_a_block_in_the_wrong_place_is_found_at_once() -> None:
    memory = pool(4 * BLOCK_BYTES)
    good = SAMPLED.of_pages(memory, PAGES, 7)
    for page in PAGES.tolist():
        for block in range(4):
            torn = memory.copy()
            torn[page, block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = memory[11, :BLOCK_BYTES]
            assert SAMPLED.of_pages(torn, PAGES, 7) != good
    shifted = np.roll(memory, LINE_BYTES, axis=1)
    assert SAMPLED.of_pages(shifted, PAGES, 7) != good


def test_every_byte_is_read_by_one_of_so_many_regions() -> None:
    memory = pool(2 * BLOCK_BYTES)
    good = [SAMPLED.of_pages(memory, PAGES, seq) for seq in range(LINES)]
    for at in (0, 63, 64, 4095, 4096, 5000, 8191):
        damaged = memory.copy()
        damaged[2, at] ^= 1
        noticed = [seq for seq in range(LINES) if SAMPLED.of_pages(damaged, PAGES, seq) != good[seq]]
        assert noticed == [at % BLOCK_BYTES // LINE_BYTES]
        assert FULL.of_pages(damaged, PAGES, 0) != FULL.of_pages(memory, PAGES, 0)


@pytest.mark.parametrize("unit_bytes", [8, 100, 256, 384])
def test_small_or_odd_units_are_read_whole(unit_bytes: int) -> None:
    memory = pool(unit_bytes)
    good = SAMPLED.of_pages(memory, PAGES, 3)
    for at in range(unit_bytes):
        damaged = memory.copy()
        damaged[9, at] ^= 1
        assert SAMPLED.of_pages(damaged, PAGES, 3) != good
