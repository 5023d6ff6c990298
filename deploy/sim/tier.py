"""The tiers below a simulated decode worker's pool, on virtual time: one store that all share, slow and forgetful.

Pages are read and written one by one, each some time after the one before, as the tier thread does: what is in a page
by then is what is copied. The world's oracle looks at every page that is touched. Owns the store; never decides what
goes there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.common.kv.tiers.api import (
    AbortRestore,
    AbortStore,
    JobId,
    PagesRestored,
    PagesStored,
    RestorePages,
    StorePages,
    TierCommand,
)
from baton.common.kv.tiers.keys import PageKey, PageKeys
from baton.deploy.sim.settings import WorldSettings

if TYPE_CHECKING:
    from baton.deploy.sim.worker import WorkerProcess

Bytes = npt.NDArray[np.uint8]
MAX_JOBS = 8
"""Of one worker at a time; further ones are answered as not done."""


class SharedStore:
    """Keeps the pages written last, each as it was first written."""

    def __init__(self, capacity_pages: int) -> None:
        self._capacity = capacity_pages
        self._pages: OrderedDict[PageKey, Bytes] = OrderedDict()

    def put(self, key: PageKey, page: Bytes) -> None:
        if key not in self._pages:
            self._pages[key] = page.copy()
        self._pages.move_to_end(key)
        if len(self._pages) > self._capacity:
            self._pages.popitem(last=False)

    def get(self, key: PageKey) -> Bytes | None:
        return self._pages.get(key)


def page_keys_of(settings: WorldSettings) -> PageKeys | None:
    """None: this world has no tiers."""
    if not settings.tiers.named or not settings.layout.only_full:
        return None
    return PageKeys.of_model({"weights": "fake"}, settings.page_size)


class SimTier:
    """One worker's tier thread."""

    def __init__(self, process: WorkerProcess, pages: Bytes, store: SharedStore) -> None:
        self._process = process
        self._pages = pages
        self._store = store
        self._settings = process.world.settings
        self.page_s = self._settings.tier_page_s
        self._rng = process.world.rng
        self._stores: dict[JobId, bool] = {}  # under way, and whether it was aborted
        self._restores: dict[JobId, bool] = {}
        self._being_read: set[int] = set()
        self._below: dict[int, PageKey] = {}  # by page id: what the engine was told is kept of what is in it

    @property
    def quiet(self) -> bool:
        return not self._stores and not self._restores

    def take(self, command: TierCommand) -> None:
        match command:
            case StorePages(job) if self._refuses():
                self._process.deliver(PagesStored(job, 0))
            case RestorePages(job) if self._refuses():
                self._process.deliver(PagesRestored(job, 0))
            case StorePages(job):
                self._look_at(command)
                self._stores[job] = False
                self._later(lambda: self._store_from(command, 0))
            case RestorePages(job):
                self._restores[job] = False
                self._restore_from(command, 0)
            case AbortStore(job):
                if job in self._stores:
                    self._stores[job] = True
            case AbortRestore(job):
                if job in self._restores:
                    self._restores[job] = True

    def _refuses(self) -> bool:
        busy = len(self._stores) + len(self._restores) >= MAX_JOBS
        return busy or self._rng.random() < self._settings.tier_loss

    def _later(self, action: Callable[[], None]) -> None:
        self._process.after(self._rng.random() * self.page_s, action, "tier")

    def _store_from(self, command: StorePages, at: int) -> None:
        over = at == len(command.keys) or self._stores[command.job]
        if not over and self._rng.random() >= self._settings.tier_loss:
            page = int(command.page_ids[at])
            self._process.assert_copied_from(page)
            self._process.wrote_to_tier(command.keys[at], page)
            self._store.put(command.keys[at], self._pages[page])
            self._later(lambda: self._store_from(command, at + 1))
            return
        del self._stores[command.job]
        self._being_read -= set(command.page_ids.tolist())
        self._told(command, at)
        self._process.world.probe("stored", (self._process, command))
        self._process.deliver(PagesStored(command.job, at))

    def _restore_from(self, command: RestorePages, at: int) -> None:
        if at == len(command.keys) or self._restores[command.job]:
            self._end_restore(command, at)
        else:
            self._later(lambda: self._restore_page(command, at))  # an abort does not stop it any more

    def _restore_page(self, command: RestorePages, at: int) -> None:
        page, content = int(command.page_ids[at]), self._store.get(command.keys[at])
        self._process.assert_restorable(page)
        if content is not None and self._rng.random() >= self._settings.tier_loss:
            self._pages[page] = content
            self._restore_from(command, at + 1)
        else:
            self._pages[page] = 0xEE  # what a damaged page leaves behind is never said to be there
            self._end_restore(command, at)

    def _end_restore(self, command: RestorePages, pages: int) -> None:
        del self._restores[command.job]
        self._told(command, pages)
        self._process.world.probe("restored", (self._process, command, pages))
        self._process.deliver(PagesRestored(command.job, pages))

    def _look_at(self, command: StorePages) -> None:
        """Nothing is asked for twice."""
        for key, page in zip(command.keys, command.page_ids.tolist(), strict=True):
            assert self._below.get(page) != key, f"page {page} is stored once more by the same name"
            assert page not in self._being_read, f"page {page} is being stored already"
            self._being_read.add(page)

    def _told(self, command: StorePages | RestorePages, count: int) -> None:
        """So many of them are kept below."""
        self._below |= zip(command.page_ids[:count].tolist(), command.keys[:count], strict=True)
