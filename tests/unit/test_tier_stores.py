"""Each level below the pool: what it keeps, within which bound, and what it makes of a bad medium."""

from __future__ import annotations

import errno
import logging
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tier_rig import FILE_BYTES, KEYS, PAGE_BYTES, ROOT, content, disk, external, have, host, key, put

from baton.common.config import TiersConfig
from baton.common.kv.tiers.disk import DiskStore
from baton.common.kv.tiers.external import SLACK, SharedDirectoryStore
from baton.common.kv.tiers.host import HostStore
from baton.common.kv.tiers.keys import PageKeys
from baton.common.kv.tiers.pagefile import HEADER, path_of
from baton.common.kv.tiers.store import PageStore, StoreUnavailable
from baton.common.kv.tiers.tiers import open_tiers

KINDS = ("host", "disk", "external")
FILES = ("disk", "external")
Open = Callable[[int], PageStore]


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the kind of store that the test is parametrized with; again in the same place when called again."""
    made: list[PageStore] = []

    def open_store(pages: int) -> PageStore:
        for store in made:
            store.close()
        made.clear()
        kinds = {"host": lambda: host(pages), "disk": lambda: disk(tmp_path / "kv", pages)}
        made.append(kinds.get(request.param, lambda: external(tmp_path / "kv", pages))())
        return made[0]

    yield open_store
    for store in made:
        store.close()


def file_of(directory: Path, number: int) -> Path:
    return path_of(directory / "kv", key(number))


def age(directory: Path, *numbers: int) -> None:
    """Gives files times that follow one another: oldest first. A file system's own clock may tick too slowly."""
    for at, number in enumerate(numbers, 1):
        os.utime(file_of(directory, number), ns=(at * 10**9, at * 10**9))


# --------------------------------------------------------------------------------------------- every store


@pytest.mark.parametrize("opened", KINDS, indirect=True)
def test_what_was_written_is_read(opened: Open) -> None:
    store = opened(8)
    assert have(store, range(5)) == []
    put(store, 1, 3)
    assert have(store, range(5)) == [1, 3]
    assert (store.counters.hits, store.counters.misses, store.counters.written) == (2, 8, 2)


@pytest.mark.parametrize("opened", KINDS, indirect=True)
def test_known_prefix_stops_at_the_first_gap(opened: Open) -> None:
    store = opened(8)
    put(store, 0, 1, 3)
    assert store.known_prefix([key(number) for number in range(5)]) == 2
    assert store.known_prefix([key(0), key(1)]) == 2
    assert store.known_prefix([key(2), key(3)]) == 0
    assert store.known_prefix([]) == 0
    assert store.counters.hits == store.counters.misses == 0


@pytest.mark.parametrize("opened", KINDS, indirect=True)
def test_a_page_that_is_there_is_not_written_again(opened: Open) -> None:
    store = opened(4)
    put(store, 1, 2, 1, 1)
    assert store.counters.written == 2
    assert store.used_bytes == 2 * store.capacity_bytes // 4


@pytest.mark.parametrize("opened", KINDS, indirect=True)
def test_the_bound_holds(opened: Open) -> None:
    store = opened(4)
    for number in range(20):
        put(store, number)
        assert store.used_bytes <= store.capacity_bytes
    assert have(store, range(20))[-1] == 19
    assert store.counters.evicted >= 16


@pytest.mark.parametrize("opened", ["host", "disk"], indirect=True)
def test_the_page_used_longest_ago_leaves(opened: Open) -> None:
    store = opened(3)
    put(store, 1, 2, 3)
    assert have(store, [1]) == [1]  # reading is a use
    put(store, 4)
    assert store.known_prefix([key(1)]) == store.known_prefix([key(3)]) == store.known_prefix([key(4)]) == 1
    assert store.known_prefix([key(2)]) == 0
    put(store, 3, 5)  # so is writing what is there
    assert have(store, range(6)) == [3, 4, 5]


@pytest.mark.parametrize("opened", ["host", "disk"], indirect=True)
def test_what_leaves_is_handed_down_whole(opened: Open) -> None:
    store = opened(2)
    put(store, 1, 2)
    left: list[tuple[bytes, bytes]] = []
    for number in (3, 4):
        store.write(key(number), content(key(number)), lambda of, data: left.append((of, data.tobytes())))
    assert left == [(key(number), content(key(number)).tobytes()) for number in (1, 2)]


@pytest.mark.parametrize("opened", KINDS, indirect=True)
def test_a_store_that_holds_no_page_is_refused(opened: Open) -> None:
    with pytest.raises(StoreUnavailable, match="no page"):
        opened(0)


@pytest.mark.parametrize("capacity", [1 << 50, 1 << 70])
def test_more_host_memory_than_there_can_be_is_refused(capacity: int) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be had"):
        HostStore(capacity, 1 << 20)


def test_host_memory_is_one_block_of_whole_pages() -> None:
    store = HostStore(3 * PAGE_BYTES + PAGE_BYTES - 1, PAGE_BYTES)
    put(store, *range(9))
    assert store.used_bytes == 3 * PAGE_BYTES


# ------------------------------------------------------------------------------------------- files: damage

Damage = Callable[[Path], None]


def flip(offset: int) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x40
        path.write_bytes(data)

    return damage


def resize(change: int) -> Damage:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[:change] if change < 0 else data + bytes(change))

    return damage


def replace_by(data: bytes) -> Damage:
    return lambda path: void(path.write_bytes(data))


def void(_: object) -> None:
    return None


def foreign(path: Path) -> None:
    """A good page, of another model."""
    other = PageKeys.of_model({"model": "b"}, 4).root
    path.unlink()
    store = SharedDirectoryStore(path.parent.parent, 100 * FILE_BYTES, PAGE_BYTES, other)
    store.write(key(1), content(key(1)))
    store.close()


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    **{f"bit {offset}": flip(offset) for offset in (0, 7, 8, 15, 16, 31, 32, 47, 48, 55, 56, 63, 64, 127)},
    "a byte short": resize(-1),
    "header only": resize(-PAGE_BYTES),
    "half a header": resize(-PAGE_BYTES - 30),
    "a byte more": resize(1),
    "empty": replace_by(b""),
    "zeros": replace_by(bytes(FILE_BYTES)),
    "text": replace_by(b"hello"),
    "other model": foreign,
    "a directory": a_directory,
}


def test_the_damages_reach_every_byte_of_the_header() -> None:
    assert HEADER.size == 64
    assert FILE_BYTES == 128


@pytest.mark.parametrize("opened", FILES, indirect=True)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_a_miss_and_goes(opened: Open, damage: Damage, tmp_path: Path) -> None:
    store = opened(8)
    put(store, 1, 2)
    damage(file_of(tmp_path, 1))
    assert have(store, [1]) == []
    assert store.counters.damaged == 1
    assert store.known_prefix([key(1)]) == 0 or damage is a_directory
    assert have(store, [2]) == [2]
    if damage is not a_directory:
        put(store, 1)  # and can be written anew
        assert have(store, [1]) == [1]


@pytest.mark.parametrize("opened", FILES, indirect=True)
def test_a_page_under_another_name_is_not_taken_for_it(opened: Open, tmp_path: Path) -> None:
    store = opened(8)
    put(store, 1, 2)
    file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 2).read_bytes())
    assert have(store, [1, 2]) == [2]
    assert store.counters.damaged == 1


@pytest.mark.parametrize("opened", FILES, indirect=True)
def test_a_file_that_somebody_removed_is_a_plain_miss(opened: Open, tmp_path: Path) -> None:
    store = opened(8)
    put(store, 1)
    file_of(tmp_path, 1).unlink()
    assert have(store, [1]) == []
    assert store.counters.damaged == 0
    assert store.known_prefix([key(1)]) == 0
    put(store, 1)
    assert have(store, [1]) == [1]


@pytest.mark.parametrize("opened", FILES, indirect=True)
def test_damage_is_logged_once_by_name(opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(8)
    with caplog.at_level(logging.WARNING, "baton.tiers"):
        for _ in range(3):
            put(store, 1)
            flip(100)(file_of(tmp_path, 1))
            assert have(store, [1]) == []
    assert [record.getMessage() for record in caplog.records] == ["tier_page_damaged"]
    assert store.counters.damaged == 3


# ------------------------------------------------------------------------------------------- files: trouble


@contextmanager
def full_disk() -> Iterator[None]:
    """Nothing longer than 100 bytes can be written: half a page file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("opened", FILES, indirect=True)
def test_a_full_disk_is_counted_and_leaves_nothing_behind(opened: Open, tmp_path: Path) -> None:
    store = opened(8)
    put(store, 1)
    with full_disk():
        assert not store.write(key(2), content(key(2)))
    assert store.counters.failed_writes == 1
    assert have(store, [1, 2]) == [1]
    assert [path.name for path in (tmp_path / "kv").rglob("*.*") if path.suffix != ".lock"] == [
        file_of(tmp_path, 1).name
    ]
    put(store, 2)
    assert have(store, [1, 2]) == [1, 2]


@pytest.mark.parametrize("opened", FILES, indirect=True)
def test_a_directory_that_vanishes_is_trouble_of_the_medium(opened: Open, tmp_path: Path) -> None:
    store = opened(8)
    put(store, 1)
    (tmp_path / "kv").rename(tmp_path / "gone")
    assert have(store, [1]) == []
    assert not store.write(key(2), content(key(2)))
    assert store.counters.failed_writes == 1


def test_a_share_that_went_stale_is_trouble_of_the_medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system says so where others say that there is no such file."""
    store = external(tmp_path, 8)
    put(store, 1)

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    for name in ("stat", "open", "utime", "mkdir", "scandir"):
        monkeypatch.setattr(os, name, stale)
    assert store.known_prefix([key(1)]) == 0
    assert not store.read(key(1), np.zeros(PAGE_BYTES, np.uint8))
    assert not store.write(key(2), content(key(2)))


@pytest.mark.parametrize("opened", FILES, indirect=True)
def test_a_place_that_cannot_be_a_directory_is_refused(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("in the way")
    with pytest.raises(StoreUnavailable, match=r"tier: .*kv"):
        opened(8)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("opened", FILES, indirect=True)
def test_an_unwritable_directory_is_refused(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o500)
    with pytest.raises(StoreUnavailable, match="written"):
        opened(8)


@pytest.mark.parametrize("opened", FILES, indirect=True)
@pytest.mark.parametrize("others", [stat.S_IWGRP, stat.S_IWOTH])
def test_a_directory_that_others_may_write_is_refused(opened: Open, others: int, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o700 | others)
    with pytest.raises(StoreUnavailable, match="other users"):
        opened(8)


@pytest.mark.parametrize("opened", FILES, indirect=True)
def test_what_is_written_is_private(opened: Open, tmp_path: Path) -> None:
    put(opened(8), 1)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path


# ------------------------------------------------------------------------------------------------- restart


@pytest.mark.parametrize("opened", FILES, indirect=True)
def test_pages_survive_a_restart(opened: Open) -> None:
    put(opened(8), 1, 2)
    store = opened(8)
    assert store.used_bytes == 2 * FILE_BYTES
    assert have(store, range(4)) == [1, 2]


@pytest.mark.parametrize("opened", FILES, indirect=True)
@pytest.mark.parametrize("order", [(3, 1, 4, 2), (2, 4, 1, 3), (1, 2, 3, 4), (4, 3, 2, 1)])
def test_a_smaller_bound_after_a_restart_drops_the_oldest(opened: Open, order: tuple[int, ...], tmp_path: Path) -> None:
    put(opened(8), *order)
    age(tmp_path, *order)
    store = opened(2)
    assert store.used_bytes <= 2 * FILE_BYTES
    found = have(store, range(5))
    assert set(found) <= set(order[2:])
    assert order[3] in found


def test_reading_makes_a_file_young(tmp_path: Path) -> None:
    store = disk(tmp_path / "kv", 8)
    put(store, 1, 2, 3)
    age(tmp_path, 1, 2, 3)
    assert have(store, [1]) == [1]
    put(store, 2)
    store.close()
    store = disk(tmp_path / "kv", 2)
    assert have(store, [1, 2, 3]) == [1, 2]
    store.close()


@pytest.mark.parametrize("opened", FILES, indirect=True)
def test_another_model_finds_nothing_and_ages_out(opened: Open, tmp_path: Path) -> None:
    put(opened(8), 1, 2)
    age(tmp_path, 1, 2)
    other = PageKeys.of_model({"model": "b"}, 4)
    store = SharedDirectoryStore(tmp_path / "kv", 3 * FILE_BYTES, PAGE_BYTES, other.root)
    keys = [other.of(np.full(4, number, np.int32))[0] for number in range(3)]
    assert store.known_prefix(keys) == 0
    for one in keys:
        assert store.write(one, content(one))
    assert store.used_bytes <= 3 * FILE_BYTES
    assert not file_of(tmp_path, 1).exists()


def test_what_a_dead_writer_left_is_removed(tmp_path: Path) -> None:
    store = disk(tmp_path / "kv", 8)
    put(store, 1)
    store.close()
    group = file_of(tmp_path, 1).parent
    (group / f".{key(1).hex()}.abc.tmp").write_bytes(b"half")
    (group / "notes.txt").write_text("not ours")
    store = disk(tmp_path / "kv", 8)
    assert sorted(path.name for path in group.iterdir()) == sorted([file_of(tmp_path, 1).name, "notes.txt"])
    assert store.used_bytes == FILE_BYTES
    store.close()


def test_a_disk_directory_has_one_owner(tmp_path: Path) -> None:
    first = disk(tmp_path / "kv", 8)
    with pytest.raises(StoreUnavailable, match="used by another process"):
        disk(tmp_path / "kv", 8)
    first.close()
    disk(tmp_path / "kv", 8).close()


# ----------------------------------------------------------------------------------------------- external


def test_workers_share_an_external_store(tmp_path: Path) -> None:
    one, other = external(tmp_path / "kv", 64), external(tmp_path / "kv", 64)
    put(one, 1)
    put(other, 2)
    assert have(one, range(4)) == have(other, range(4)) == [1, 2]
    put(other, 1)
    assert other.counters.written == 1


def test_writers_keep_the_bound_together(tmp_path: Path) -> None:
    writers = [external(tmp_path / "kv", 32) for _ in range(3)]
    for number in range(120):
        put(writers[number % 3], number)
        used = sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*.kv"))
        assert used <= 32 * FILE_BYTES * (1 + 3 / SLACK)


def test_unfinished_files_of_others_age_out(tmp_path: Path) -> None:
    store = external(tmp_path / "kv", 4)
    put(store, 1)
    left = file_of(tmp_path, 1).parent / f".{key(1).hex()}.abc.tmp"
    left.write_bytes(bytes(FILE_BYTES))
    os.utime(left, ns=(1, 1))
    put(store, *range(2, 8))
    assert not left.exists()


WRITER = """
import sys
from pathlib import Path
import tier_rig
store = tier_rig.external(Path(sys.argv[1]), int(sys.argv[2]))
print("open", flush=True)
for turn in range(int(sys.argv[3])):
    tier_rig.put(store, turn % 40)
"""


def test_a_process_reads_while_another_writes_and_trims(tmp_path: Path) -> None:
    """The real thing: another process, the same directory. Whatever is found is whole."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "kv"), "24", "250"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "open\n"
            store = external(tmp_path / "kv", 24)
            while writer.poll() is None:
                have(store, range(40))
                put(store, 100)
        finally:
            writer.kill()
    assert writer.returncode == 0
    assert store.counters.hits > 0
    assert store.counters.damaged == 0


# -------------------------------------------------------------------------------------------------- opening


def test_the_configured_levels_are_opened_from_fast_to_slow(tmp_path: Path) -> None:
    config = TiersConfig(host_bytes=4 * PAGE_BYTES, disk_path=str(tmp_path / "disk"), external=f"file://{tmp_path}/ext")
    (tmp_path / "ext").mkdir()
    tiers = open_tiers(config, "decode-0", ROOT, PAGE_BYTES)
    assert tiers is not None
    assert tiers.write(key(1), content(key(1)))
    assert [tiers.counters()[f"{level}.written"] for level in KINDS] == [1, 1, 1]
    assert path_of(tmp_path / "disk" / "decode-0", key(1)).exists()
    assert path_of(tmp_path / "ext", key(1)).exists()
    tiers.close()


def test_a_shared_directory_is_not_made_where_nothing_is_mounted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "baton.tiers"):
        assert open_tiers(TiersConfig(external=f"file://{tmp_path}/ext"), "decode-0", ROOT, PAGE_BYTES) is None
    assert not (tmp_path / "ext").exists()
    assert f"{tmp_path}/ext is not there" in str(vars(caplog.records[0]))


def test_a_level_that_cannot_be_opened_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "disk").write_text("in the way")
    config = TiersConfig(host_bytes=4 * PAGE_BYTES, disk_path=str(tmp_path / "disk"))
    with caplog.at_level(logging.ERROR, "baton.tiers"):
        tiers = open_tiers(config, "decode-0", ROOT, PAGE_BYTES)
    assert tiers is not None
    assert "disk.hits" not in tiers.counters()
    assert [record.getMessage() for record in caplog.records] == ["tier_unavailable"]
    assert open_tiers(TiersConfig(), "decode-0", ROOT, PAGE_BYTES) is None


# ----------------------------------------------------------------------------------------------------- keys


def test_a_key_says_all_that_came_before() -> None:
    tokens = np.arange(17, dtype=np.int32)
    keys = KEYS.of(tokens)
    assert len(keys) == 4
    assert len(set(keys)) == 4
    for changed in range(16):
        other = tokens.copy()
        other[changed] += 1
        same = [one == two for one, two in zip(keys, KEYS.of(other), strict=True)]
        assert same == [page < changed // 4 for page in range(4)]


def test_keys_grow_with_the_tokens() -> None:
    tokens = np.arange(40, dtype=np.int32)
    known = KEYS.of(tokens[:18])
    assert KEYS.of(tokens, known) == KEYS.of(tokens)
    assert KEYS.of(tokens[:18], known) == known
    assert KEYS.of(tokens[:3]) == []


def test_keys_are_the_same_in_every_process() -> None:
    """They name files. A change of this value orphans every store."""
    assert KEYS.of(np.arange(4, dtype=np.int32))[0].hex() == "d986d5f9d0aaf229ae5c88e8a646210a"


@pytest.mark.parametrize(
    "other",
    [
        PageKeys.of_model({"model": "b"}, 4),
        PageKeys.of_model({"model": "a", "dtype": "x"}, 4),
        PageKeys.of_model({"mode": "la"}, 4),
        PageKeys.of_model({"model": "a"}, 2),
    ],
)
def test_another_model_or_layout_has_other_keys(other: PageKeys) -> None:
    tokens = np.arange(4, dtype=np.int32)
    assert KEYS.of(tokens)[0] not in other.of(tokens)


def test_the_order_of_a_fingerprint_does_not_matter() -> None:
    assert PageKeys.of_model({"a": "1", "b": "2"}, 4) == PageKeys.of_model({"b": "2", "a": "1"}, 4)


def test_a_store_is_told_apart_by_root_not_only_by_key(tmp_path: Path) -> None:
    """A key that meets another root's file: as a bug in making keys would have it."""
    store = disk(tmp_path / "kv", 8)
    put(store, 1)
    store.close()
    other = DiskStore(tmp_path / "kv", 8 * FILE_BYTES, PAGE_BYTES, PageKeys.of_model({"model": "b"}, 4).root)
    assert have(other, [1]) == []
    assert other.counters.damaged == 1
    other.close()
