"""`Tiers` over real stores against dicts: which level has which page after any sequence of reads, writes and damage,
written through and written back; and that a page that is read is the page that was written."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.common.kv.tiers.disk import DiskStore
from baton.common.kv.tiers.external import SharedDirectoryStore
from baton.common.kv.tiers.host import HostStore
from baton.common.kv.tiers.keys import PageKey, PageKeys
from baton.common.kv.tiers.pagefile import HEADER, path_of
from baton.common.kv.tiers.store import Bytes, PageStore
from baton.common.kv.tiers.tiers import Tiers, WritePolicy

PAGE_BYTES = 64
FILE_BYTES = HEADER.size + PAGE_BYTES
CAPACITY = (2, 3, 32)  # pages of host, disk, external: the last one never trims here
DISK = 1
KEYS = PageKeys.of_model({"model": "tiny"}, 2)
CHAIN = KEYS.of(np.arange(16, dtype=np.int32))  # one prompt of eight pages

numbers = st.integers(0, len(CHAIN) - 1)


def content(key: PageKey) -> Bytes:
    return np.frombuffer(key * (PAGE_BYTES // len(key)), dtype=np.uint8)


class TiersMachine(RuleBasedStateMachine):
    policy: WritePolicy = "through"

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="tiers-"))
        self.stores: tuple[PageStore, ...] = (
            HostStore(CAPACITY[0] * PAGE_BYTES, PAGE_BYTES),
            DiskStore(self.directory / "disk", CAPACITY[1] * FILE_BYTES, PAGE_BYTES, KEYS.root),
            SharedDirectoryStore(self.directory / "external", CAPACITY[2] * FILE_BYTES, PAGE_BYTES, KEYS.root),
        )
        self.tiers = Tiers(self.stores, self.policy)
        self.levels: tuple[dict[PageKey, None], ...] = ({}, {}, {})  # least recently used first
        self.damaged: set[PageKey] = set()  # of the disk's

    def teardown(self) -> None:
        self.tiers.close()
        shutil.rmtree(self.directory)

    # ------------------------------------------------------------------------------------ the model

    def touch(self, level: int, key: PageKey) -> None:
        self.levels[level][key] = self.levels[level].pop(key, None)

    def forget(self, level: int, key: PageKey) -> bool:
        """Whether it was still good."""
        del self.levels[level][key]
        good = level != DISK or key not in self.damaged
        if level == DISK:
            self.damaged.discard(key)
        return good

    def keep(self, level: int, key: PageKey) -> None:
        here = self.levels[level]
        while key not in here and len(here) >= CAPACITY[level]:
            oldest = next(iter(here))
            good = self.forget(level, oldest)
            if self.policy == "back" and good:
                self.keep(level + 1, oldest)
        self.touch(level, key)

    def finds(self, key: PageKey) -> bool:
        for level in range(len(CAPACITY)):
            if key not in self.levels[level]:
                continue
            if level == DISK and key in self.damaged:
                self.forget(level, key)
                continue
            self.touch(level, key)
            for above in range(level):
                self.keep(above, key)
            return True
        return False

    # ------------------------------------------------------------------------------------ rules

    @rule(number=numbers)
    def write(self, number: int) -> None:
        key = CHAIN[number]
        assert self.tiers.write(key, content(key))
        for level in range(len(CAPACITY)) if self.policy == "through" else [0]:
            self.keep(level, key)

    @rule(number=numbers)
    def read(self, number: int) -> None:
        key = CHAIN[number]
        out = np.zeros(PAGE_BYTES, np.uint8)
        assert self.tiers.read(key, out) == self.finds(key)
        if key in self.levels[0]:
            assert np.array_equal(out, content(key))

    @precondition(lambda self: self.levels[DISK])
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.levels[DISK])))
        path = path_of(self.directory / "disk", key)
        good = bytearray(path.read_bytes())
        good[data.draw(st.integers(0, FILE_BYTES - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(good)
        # A second flip may repair the first.
        (self.damaged.add if bytes(good) != self.whole(key) else self.damaged.discard)(key)

    def whole(self, key: PageKey) -> bytes:
        other = SharedDirectoryStore(self.directory / "other", CAPACITY[2] * FILE_BYTES, PAGE_BYTES, KEYS.root)
        other.write(key, content(key))
        return path_of(self.directory / "other", key).read_bytes()

    @invariant()
    def each_level_has_what_the_model_says(self) -> None:
        for store, level in zip(self.stores, self.levels, strict=True):
            assert [store.known_prefix([key]) for key in CHAIN] == [int(key in level) for key in CHAIN], store.name
            assert store.used_bytes <= store.capacity_bytes
        known = [any(key in level for level in self.levels) for key in CHAIN]
        assert self.tiers.known_prefix(CHAIN) == (known.index(False) if False in known else len(CHAIN))


class TiersBackMachine(TiersMachine):
    policy: WritePolicy = "back"


for machine in (TiersMachine, TiersBackMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

TestThrough = TiersMachine.TestCase
TestBack = TiersBackMachine.TestCase


def test_written_back_slow_levels_see_only_what_fast_ones_give_up(tmp_path: Path) -> None:
    host = HostStore(2 * PAGE_BYTES, PAGE_BYTES)
    disk = DiskStore(tmp_path, 8 * FILE_BYTES, PAGE_BYTES, KEYS.root)
    tiers = Tiers([host, disk], "back")
    for key in CHAIN[:4]:
        tiers.write(key, content(key))
    assert (host.counters.written, disk.counters.written) == (4, 2)
    assert disk.known_prefix(CHAIN) == 2
    tiers.close()


@pytest.mark.parametrize("policy", ["through", "back"])
def test_what_a_level_cannot_take_goes_on_to_the_next(policy: WritePolicy, tmp_path: Path) -> None:
    disk = DiskStore(tmp_path / "disk", 8 * FILE_BYTES, PAGE_BYTES, KEYS.root)
    external = SharedDirectoryStore(tmp_path / "ext", 8 * FILE_BYTES, PAGE_BYTES, KEYS.root)
    tiers = Tiers([disk, external], policy)
    (tmp_path / "disk").rename(tmp_path / "gone")
    assert tiers.write(CHAIN[0], content(CHAIN[0]))
    assert external.known_prefix(CHAIN[:1]) == 1
    (tmp_path / "ext").rename(tmp_path / "gone too")
    assert not tiers.write(CHAIN[1], content(CHAIN[1]))
    tiers.close()
