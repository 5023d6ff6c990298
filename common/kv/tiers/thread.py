"""The tier thread: copies pages between a worker's pool and the levels below it; the engine never waits for a level.

Owns: the thread and its two queues. Never: decides which pages, frees or allocates one, or touches a page outside of
the job that lends it (`api` says who owns what meanwhile).

Order: restores first (a request waits for each), also between two pages of a store. Overflow: a store that finds
`max_queued_jobs` waiting is dropped and counted; a restore is answered with nothing restored, and so the request goes
to a prefill worker. While one copy of a page takes longer than `STALL_S` (a network file system that hangs), new
jobs are answered the same ways: nobody else waits for a level that does not move.

Answers: every job is answered once. The answer of a restore comes after its last byte was written: that is the fence an
abort waits for. A job that was not begun is answered at once by whoever aborts it.

An exception on this thread ends the process, as on the engine's: levels report trouble as values, so it is a bug.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from baton.common.clock import Clock
from baton.common.kv.tiers.api import (
    AbortRestore,
    AbortStore,
    JobId,
    PagesRestored,
    PagesStored,
    RestorePages,
    StorePages,
    TierCommand,
    TierEvent,
)
from baton.common.kv.tiers.store import Bytes
from baton.common.kv.tiers.tiers import Tiers
from baton.common.log import EventLog

STALL_S = 1.0

_log = EventLog("baton.tiers")


@dataclass(slots=True)
class TierCounters:
    """Since start."""

    stores: int = 0
    stored_pages: int = 0
    dropped_stores: int = 0  # too many waiting, given up by who waited, or the level in use does not move
    restores: int = 0
    restored_pages: int = 0
    refused_restores: int = 0  # too many waiting, or the level in use does not move
    aborted_restores: int = 0


@dataclass(slots=True)
class _Store:
    """`done` pages have been offered to the levels, `kept` of them without a gap."""

    command: StorePages
    done: int = 0
    kept: int = 0
    aborted: bool = False


class TierThread:
    """`pages` is the pool's live memory, [num_pages, page_bytes]. `deliver` takes answers from any thread, and never
    blocks; it may be called from within `post`."""

    def __init__(
        self,
        tiers: Tiers,
        pages: Bytes,
        deliver: Callable[[TierEvent], object],
        clock: Clock,
        *,
        max_queued_jobs: int,
        on_fatal: Callable[[], None],
    ) -> None:
        assert pages.shape[1] == tiers.page_bytes, (pages.shape, tiers.page_bytes)
        self._tiers = tiers
        self._pages = pages
        self._deliver = deliver
        self._clock = clock
        self._max_queued_jobs = max_queued_jobs
        self._on_fatal = on_fatal
        self._changed = threading.Condition()
        # Guarded by the condition:
        self._restores: deque[RestorePages] = deque()
        self._stores: deque[_Store] = deque()  # the first may have been begun
        self._restoring: JobId | None = None
        self._storing: _Store | None = None  # whose page may be being read
        self._abort = False  # of the one that is being restored
        self._copying_since_s: float | None = None
        self._closed = False
        self._counters = TierCounters()
        self._thread = threading.Thread(target=self._run, name="tiers", daemon=True)

    # ------------------------------------------------------------------------------ from any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends after the page being copied; jobs that are left are answered as not done. False when that page took
        longer than `timeout_s`."""
        with self._changed:
            self._closed = True
            restores, self._restores = self._restores, deque()
            stores = [store for store in self._stores if store is not self._storing]
            self._stores = deque(store for store in self._stores if store is self._storing)
            self._changed.notify_all()
        for restore in restores:
            self._deliver(PagesRestored(restore.job, 0))
        for store in stores:
            self._deliver(PagesStored(store.command.job, store.kept))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def post(self, command: TierCommand) -> None:
        """Never blocks. What cannot be taken is answered before this returns."""
        refusal: TierEvent | None = None
        with self._changed:
            match command:
                case StorePages():
                    refusal = self._take_store(command)
                case RestorePages():
                    refusal = self._take_restore(command)
                case AbortStore():
                    refusal = self._abort_store(command)
                case AbortRestore():
                    refusal = self._abort_restore(command)
            self._changed.notify_all()
        if refusal is not None:
            self._deliver(refusal)

    def counters(self) -> dict[str, int]:
        """Those of the thread, and of each level."""
        with self._changed:
            found = asdict(self._counters)
            found["queued_restores"] = len(self._restores)
            found["queued_stores"] = len(self._stores)
        return found | self._tiers.counters()

    def _take_store(self, command: StorePages) -> PagesStored | None:
        assert len(command.keys) == len(command.page_ids), command
        if self._closed or self._stalled() or len(self._stores) >= self._max_queued_jobs:
            self._counters.dropped_stores += 1
            return PagesStored(command.job, 0)
        self._stores.append(_Store(command))
        return None

    def _take_restore(self, command: RestorePages) -> PagesRestored | None:
        assert len(command.keys) == len(command.page_ids), command
        if self._closed or self._stalled() or len(self._restores) >= self._max_queued_jobs:
            self._counters.refused_restores += 1
            return PagesRestored(command.job, 0)
        self._restores.append(command)
        return None

    def _stalled(self) -> bool:
        since_s = self._copying_since_s
        return since_s is not None and self._clock.now() - since_s > STALL_S

    def _abort_store(self, command: AbortStore) -> PagesStored | None:
        store = next((store for store in self._stores if store.command.job == command.job), None)
        if store is None:
            return None  # it has been answered
        if store is self._storing:
            store.aborted = True
            return None
        self._stores.remove(store)
        self._counters.dropped_stores += 1
        return PagesStored(command.job, store.kept)

    def _abort_restore(self, command: AbortRestore) -> PagesRestored | None:
        if command.job == self._restoring:
            self._abort = True
            return None
        waiting = next((restore for restore in self._restores if restore.job == command.job), None)
        if waiting is None:
            return None  # it has been answered
        self._restores.remove(waiting)
        self._counters.aborted_restores += 1
        return PagesRestored(command.job, 0)

    # ---------------------------------------------------------------------------------- tier thread

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                if isinstance(work, RestorePages):
                    self._restore(work)
                else:
                    self._store_page(work)
        except BaseException:  # noqa: BLE001 - the thread's top frame
            _log.fatal("tier_thread_failed")
            self._on_fatal()

    def _next(self) -> RestorePages | _Store | None:
        """Waits for something to do; None when there will be nothing any more."""
        with self._changed:
            self._storing = None
            self._changed.wait_for(lambda: self._restores or self._stores or self._closed)
            if self._restores:
                restore = self._restores.popleft()
                self._restoring, self._abort = restore.job, False
                return restore
            self._storing = self._stores[0] if self._stores else None
            return self._storing

    def _restore(self, command: RestorePages) -> None:
        restored = 0
        self._begin_copy()
        if self._tiers.known_prefix(command.keys) >= command.at_least:
            for key, page in zip(command.keys, command.page_ids.tolist(), strict=True):
                if not self._begin_copy() or not self._tiers.read(key, self._pages[page]):
                    break
                restored += 1
        with self._changed:
            self._restoring = self._copying_since_s = None
            self._counters.restores += 1
            self._counters.restored_pages += restored
            self._counters.aborted_restores += self._abort
        self._deliver(PagesRestored(command.job, restored))

    def _store_page(self, store: _Store) -> None:
        """One page, so that a restore waits for no more than that."""
        command = store.command
        if store.done < len(command.keys) and self._begin_copy():
            kept = self._tiers.write(command.keys[store.done], self._pages[command.page_ids[store.done]])
            store.kept += kept and store.kept == store.done
            store.done += 1
            if store.done < len(command.keys):
                return
        with self._changed:
            self._stores.popleft()
            self._copying_since_s = None
            self._counters.stores += 1
            self._counters.stored_pages += store.kept
        self._deliver(PagesStored(command.job, store.kept))

    def _begin_copy(self) -> bool:
        """False: whoever lent the page wants it back, or the thread is to end."""
        with self._changed:
            self._copying_since_s = self._clock.now()
            store_over = self._storing is not None and self._storing.aborted
            return not (self._closed or store_over or (self._restoring is not None and self._abort))
