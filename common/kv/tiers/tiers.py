"""`Tiers`: the levels below the pool as one place. Owns the order of the levels and what moves between them.

Never: decides what is stored or restored (the engine core does), or on which thread.

A page is read from the first level that has it, and kept in all levels above it from then on. Written through, a page
goes to every level at once, and a level that is full forgets. Written back, a page goes to the first level, and moves
down when a level must give it up: fewer writes to slow levels, and what the fast ones hold is lost with the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from baton.common.config import TiersConfig
from baton.common.kv.tiers.disk import DiskStore
from baton.common.kv.tiers.external import SharedDirectoryStore
from baton.common.kv.tiers.host import HostStore
from baton.common.kv.tiers.keys import PageKey
from baton.common.kv.tiers.store import Bytes, PageStore, StoreUnavailable
from baton.common.log import EventLog

WritePolicy = Literal["through", "back"]

_log = EventLog("baton.tiers")


class Tiers:
    """`stores` from the fastest to the slowest; at least one. Used by one thread."""

    def __init__(self, stores: Sequence[PageStore], write: WritePolicy) -> None:
        assert stores, "tiers without a level"
        assert len({store.page_bytes for store in stores}) == 1, "all levels keep the same pages"
        self._stores = tuple(stores)
        self._through = write == "through"
        self.page_bytes = stores[0].page_bytes

    def known_prefix(self, keys: Sequence[PageKey]) -> int:
        """How many of these, from the first on, some level has. A hint, as with a store's."""
        known, before = 0, -1
        while before < known < len(keys):
            before = known
            for store in self._stores:
                known += store.known_prefix(keys[known:])
        return known

    def read(self, key: PageKey, out: Bytes) -> bool:
        """False: no level has it; what lies in `out` then is undefined."""
        for level, store in enumerate(self._stores):
            if store.read(key, out):
                for above in range(level):
                    self._write_at(above, key, out)
                return True
        return False

    def write(self, key: PageKey, data: Bytes) -> bool:
        """False: no level could keep it."""
        if self._through:
            kept = [store.write(key, data) for store in self._stores]
            return any(kept)
        return self._write_at(0, key, data)

    def counters(self) -> dict[str, int]:
        """By level and name: "disk.hits". From any thread."""
        found: dict[str, int] = {}
        for store in self._stores:
            found |= {f"{store.name}.{name}": value for name, value in dataclasses.asdict(store.counters).items()}
            found[f"{store.name}.used_bytes"] = store.used_bytes
            found[f"{store.name}.capacity_bytes"] = store.capacity_bytes
        return found

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def _write_at(self, level: int, key: PageKey, data: Bytes) -> bool:
        """To this level; written back, what it gives up or cannot take goes to the next."""
        below = level + 1
        if self._through or below == len(self._stores):
            return self._stores[level].write(key, data)
        if self._stores[level].write(key, data, partial(self._demote, below)):
            return True
        return self._write_at(below, key, data)

    def _demote(self, level: int, key: PageKey, data: Bytes) -> None:
        self._write_at(level, key, data)


def open_tiers(config: TiersConfig, worker: str, root: PageKey, page_bytes: int) -> Tiers | None:
    """The configured levels that can be opened, of one worker; None when there is none. A level that cannot be is
    logged and left out: a cache is no reason not to serve."""
    wanted: list[Callable[[], PageStore]] = []
    if config.host_bytes:
        wanted.append(lambda: HostStore(config.host_bytes, page_bytes))
    if config.disk_path:
        # A directory per worker: several on one host share the disk, not the files.
        wanted.append(lambda: DiskStore(Path(config.disk_path) / worker, config.disk_bytes, page_bytes, root))
    if config.external:
        shared = Path(urlsplit(config.external).path)
        wanted.append(lambda: SharedDirectoryStore(_there(shared), config.external_bytes, page_bytes, root))
    stores: list[PageStore] = []
    for open_store in wanted:
        try:
            stores.append(open_store())
        except StoreUnavailable as error:
            _log.error("tier_unavailable", reason=str(error))
    if not stores:
        return None
    _log.info("tiers", levels=", ".join(store.name for store in stores), write=config.write)
    return Tiers(stores, config.write)


def _there(directory: Path) -> Path:
    """A directory that workers share is mounted, or made, before they start: what would be made here instead would be
    this host's own, and would fill its disk."""
    if not directory.is_dir():
        raise StoreUnavailable(f"external tier: {directory} is not there: mount it, or make it")
    return directory
