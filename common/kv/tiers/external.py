"""`SharedDirectoryStore`: pages in a directory that many workers, also of other hosts, read and write at once: the
external store. docs/adr/0009 says why it is this and not LMCache.

Owns: nothing alone. Never: keeps an index of what others change under it, or takes a lock.

It works because a page's name says what it holds. Two writers of one key write the same; a file appears complete by its
rename, and a reader whose file is removed meanwhile still reads it to the end. Everything else is a miss.

The bound is kept by all writers together: each counts what it wrote, and after a sixteenth of the capacity looks at the
whole directory and removes what was used longest ago. So it is exceeded by at most a sixteenth per writer. Unfinished
files of writers that died count and age like pages, and leave the same way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from baton.common.kv.tiers.keys import PageKey
from baton.common.kv.tiers.pagefile import PageFiles, Verdict, path_of, scan
from baton.common.kv.tiers.store import Bytes, Demote, StoreCounters

SLACK = 16
"""The part of the capacity between two looks at the directory, and how much of it a look frees."""


class SharedDirectoryStore:
    """The last level. Every process that uses it runs as the same user. Raises StoreUnavailable when the directory
    cannot be used."""

    name = "external"

    def __init__(self, directory: Path, capacity_bytes: int, page_bytes: int, root: PageKey) -> None:
        self.page_bytes = page_bytes
        self.capacity_bytes = capacity_bytes
        self.counters = StoreCounters()
        self._files = PageFiles(self.name, directory, capacity_bytes, page_bytes, root, self.counters)
        self._directory = directory
        self._used_bytes = 0  # as of the last look, and what was written since
        self._unseen_bytes = 0
        self._trim()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def known_prefix(self, keys: Sequence[PageKey]) -> int:
        for index, key in enumerate(keys):
            if not os.path.exists(path_of(self._directory, key)):  # any trouble is "not there"
                return index
        return len(keys)

    def read(self, key: PageKey, out: Bytes) -> bool:
        verdict = self._files.read(key, out)
        if verdict not in (Verdict.GOOD, Verdict.MISSING):
            with contextlib.suppress(OSError):  # it stays, and is a miss each time
                path_of(self._directory, key).unlink()
        return verdict is Verdict.GOOD

    def write(self, key: PageKey, data: Bytes, demote: Demote | None = None) -> bool:
        assert demote is None, "there is no level below this one"
        with contextlib.suppress(OSError):
            os.utime(path_of(self._directory, key))
            return True  # it was there
        if not self._files.write(key, data):
            return False
        self._used_bytes += self._files.format.file_bytes
        self._unseen_bytes += self._files.format.file_bytes
        if self._unseen_bytes >= self.capacity_bytes // SLACK:
            self._trim()
        return True

    def close(self) -> None:
        """Nothing is held."""

    def _trim(self) -> None:
        """Looks at everything; over the bound, removes the pages used longest ago, and some more."""
        try:
            found = sorted(scan(self._directory))
        except OSError as error:
            self._files.complain("tier_scan_failed", str(self._directory), error)
            return
        used = sum(file.nbytes for file in found)
        if used > self.capacity_bytes:
            for file in found:
                if used <= self.capacity_bytes - self.capacity_bytes // SLACK:
                    break
                with contextlib.suppress(OSError):
                    file.path.unlink()
                    self.counters.evicted += 1
                used -= file.nbytes
        self._used_bytes = used
        self._unseen_bytes = 0
