"""One page in one file: the format, how such files lie in a directory, and what can be wrong with them.

Owns: the header, the atomic write, the verdict of a read, the layout of a directory. Never: which pages are kept.

    magic 8 | version 8 | root 16 | key 16 | page bytes 8 | xxh3-64 of the page 8 | the page

Every byte of a file is checked on reading. A file appears complete or not at all (written beside its place and
renamed), but nothing is flushed: after a power failure a file may be short or empty, which reading finds.
Integers are little-endian: a directory may be shared between hosts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import xxhash

from baton.common.kv.tiers.keys import PageKey
from baton.common.kv.tiers.store import Bytes, StoreCounters, StoreUnavailable
from baton.common.log import EventLog
from baton.common.units import format_bytes

MAGIC = b"BATONKV\0"
VERSION = 1
HEADER = struct.Struct("<8sQ16s16sQQ")
_PAGE_FILE = re.compile(r"[0-9a-f]{32}\.kv")
_TEMP_FILE = re.compile(r"\.[0-9a-f]{32}\..*\.tmp")

_log = EventLog("baton.tiers")


class Verdict(StrEnum):
    """What reading a page file found."""

    GOOD = "good"
    MISSING = "missing"
    UNREADABLE = "unreadable"
    WRONG_SIZE = "wrong_size"
    NOT_A_PAGE = "not_a_page"
    OTHER_VERSION = "other_version"
    OTHER_MODEL = "other_model"
    OTHER_KEY = "other_key"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Of the pages of one model."""

    root: PageKey
    page_bytes: int

    @property
    def file_bytes(self) -> int:
        return HEADER.size + self.page_bytes

    def read(self, path: Path, key: PageKey, out: Bytes) -> Verdict:
        """Into `out`, whose content is the page only when the verdict is GOOD. A good page is marked as used now."""
        header = bytearray(HEADER.size)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Verdict.MISSING
        except OSError:
            return Verdict.UNREADABLE
        try:
            if os.fstat(fd).st_size != self.file_bytes or os.readv(fd, [header, out.data]) != self.file_bytes:
                return Verdict.WRONG_SIZE
            verdict = self._judge(header, key, out)
            if verdict is Verdict.GOOD:
                with contextlib.suppress(OSError):  # not ours, or a read-only medium: its age is not kept
                    os.utime(fd)
            return verdict
        except OSError:
            return Verdict.UNREADABLE
        finally:
            os.close(fd)

    def write(self, path: Path, key: PageKey, data: Bytes) -> None:
        """Raises OSError, and leaves nothing behind."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        header = HEADER.pack(MAGIC, VERSION, self.root, key, self.page_bytes, xxhash.xxh3_64_intdigest(data.data))
        fd, temp = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".tmp", dir=path.parent)
        try:
            try:
                if os.writev(fd, [header, data.data]) != self.file_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temp)
            finally:
                os.close(fd)
            os.rename(temp, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise

    def _judge(self, header: bytearray, key: PageKey, out: Bytes) -> Verdict:
        magic, version, root, named, page_bytes, digest = HEADER.unpack(header)
        checks = (
            (magic == MAGIC, Verdict.NOT_A_PAGE),
            (version == VERSION, Verdict.OTHER_VERSION),
            (root == self.root, Verdict.OTHER_MODEL),
            (named == key, Verdict.OTHER_KEY),
            (page_bytes == self.page_bytes, Verdict.WRONG_SIZE),
            (digest == xxhash.xxh3_64_intdigest(out.data), Verdict.DAMAGED),
        )
        return next((verdict for good, verdict in checks if not good), Verdict.GOOD)


def path_of(directory: Path, key: PageKey) -> Path:
    name = key.hex()
    return directory / name[:2] / f"{name}.kv"


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A file of ours in a directory; sorts by its last use. `key` is None for one that was never finished."""

    used_ns: int
    path: Path
    nbytes: int
    key: PageKey | None


def scan(directory: Path) -> Iterator[Found]:
    """All page files and unfinished ones. Files with other names are not ours and are left alone. Raises OSError."""
    with os.scandir(directory) as groups:
        for group in sorted(entry.path for entry in groups if len(entry.name) == 2 and entry.is_dir()):
            with os.scandir(group) as entries:
                for entry in entries:
                    page = _PAGE_FILE.fullmatch(entry.name)
                    if page is None and _TEMP_FILE.fullmatch(entry.name) is None:
                        continue
                    with contextlib.suppress(FileNotFoundError):  # somebody else removed it meanwhile
                        known = entry.stat(follow_symlinks=False)
                        key = None if page is None else PageKey(bytes.fromhex(entry.name[:32]))
                        yield Found(known.st_mtime_ns, Path(entry.path), known.st_size, key)


def own_directory(level: str, directory: Path) -> None:
    """Creates it, or sees that nobody else can write to it: whoever can chooses what our requests read. Raises
    StoreUnavailable."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise StoreUnavailable(f"{level} tier: {directory}: {error.strerror}") from error
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreUnavailable(f"{level} tier: {directory} can be written by other users")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StoreUnavailable(f"{level} tier: {directory} cannot be written")


class Complaints:
    """Logs trouble once per name: a medium that fails does so all the time. Of more names than `limit` none is
    logged; the counters have them all."""

    def __init__(self, level: str, limit: int = 1024) -> None:
        self._level = level
        self._limit = limit
        self._known: set[str] = set()

    def about(self, event: str, name: str, reason: str) -> None:
        if name not in self._known and len(self._known) < self._limit:
            self._known.add(name)
            _log.warning(event, level=self._level, name=name, reason=reason)


class PageFiles:
    """One level's page files: reading and writing, counted, and complained about when it fails. Raises StoreUnavailable
    when the directory cannot be used, or when the capacity holds no page."""

    def __init__(
        self, level: str, directory: Path, capacity_bytes: int, page_bytes: int, root: PageKey, counters: StoreCounters
    ) -> None:
        self.format = PageFormat(root, page_bytes)
        if capacity_bytes < self.format.file_bytes:
            raise StoreUnavailable(f"{level} tier: {format_bytes(capacity_bytes)} hold no page of {page_bytes} bytes")
        self.directory = directory
        self._counters = counters
        self._complaints = Complaints(level)
        own_directory(level, directory)

    def read(self, key: PageKey, out: Bytes) -> Verdict:
        """What is not GOOD is of no use: whoever keeps the files removes it."""
        path = path_of(self.directory, key)
        verdict = self.format.read(path, key, out)
        if verdict is Verdict.GOOD:
            self._counters.hits += 1
            return verdict
        self._counters.misses += 1
        if verdict is not Verdict.MISSING:
            self._counters.damaged += 1
            self._complaints.about("tier_page_damaged", path.name, verdict)
        return verdict

    def write(self, key: PageKey, data: Bytes) -> bool:
        """False: the medium refuses."""
        try:
            self.format.write(path_of(self.directory, key), key, data)
        except OSError as error:
            self._counters.failed_writes += 1
            self.complain("tier_write_failed", str(self.directory), error)
            return False
        self._counters.written += 1
        return True

    def complain(self, event: str, name: str, error: OSError) -> None:
        self._complaints.about(event, name, error.strerror or str(error))
