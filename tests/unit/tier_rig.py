"""Pages whose bytes follow from their key, so that a wrong page is seen at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from baton.common.kv.tiers.disk import DiskStore
from baton.common.kv.tiers.external import SharedDirectoryStore
from baton.common.kv.tiers.host import HostStore
from baton.common.kv.tiers.keys import PageKey, PageKeys
from baton.common.kv.tiers.pagefile import HEADER
from baton.common.kv.tiers.store import Bytes, PageStore

PAGE_BYTES = 64
FILE_BYTES = HEADER.size + PAGE_BYTES
KEYS = PageKeys.of_model({"model": "a"}, 4)
ROOT = KEYS.root


def key(number: int) -> PageKey:
    return KEYS.of(np.full(4, number, np.int32))[0]


def content(of: PageKey, page_bytes: int = PAGE_BYTES) -> Bytes:
    seed = int.from_bytes(of[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, page_bytes, dtype=np.uint8)


def put(store: PageStore, *numbers: int) -> None:
    for number in numbers:
        assert store.write(key(number), content(key(number)))


def have(store: PageStore, numbers: Iterable[int]) -> list[int]:
    """Which of them it has; checks what it gives. Each is used by asking."""
    found = []
    for number in numbers:
        out = np.zeros(PAGE_BYTES, np.uint8)
        if store.read(key(number), out):
            assert np.array_equal(out, content(key(number))), f"page {number} holds something else"
            found.append(number)
    return found


def host(pages: int) -> HostStore:
    return HostStore(pages * PAGE_BYTES, PAGE_BYTES)


def disk(directory: Path, pages: int) -> DiskStore:
    return DiskStore(directory, pages * FILE_BYTES, PAGE_BYTES, ROOT)


def external(directory: Path, pages: int) -> SharedDirectoryStore:
    return SharedDirectoryStore(directory, pages * FILE_BYTES, PAGE_BYTES, ROOT)
