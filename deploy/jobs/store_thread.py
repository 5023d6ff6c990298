"""The job store on a thread of its own: `await thread(JobStore.batch, owner, batch_id)`.

Owns: that thread, and where the store is when nobody said. Never: a statement.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

from baton.common import env
from baton.common.config import ClusterConfig
from baton.common.errors import RequestError
from baton.deploy.jobs.databases import open_database
from baton.deploy.jobs.store import JobStore

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


def open_store(config: ClusterConfig) -> JobStore:
    """Raises ConfigError for a place that cannot be one. A server that is away now is found later."""
    store = JobStore(open_database(config.jobs.database or str(env.state_dir() / config.cluster / "jobs.sqlite")))
    with contextlib.suppress(RequestError):
        store.migrate()
    return store


class StoreThread:
    """One verb after the other, and none of them on the loop."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs-store")

    async def __call__(
        self,
        verb: Callable[Concatenate[JobStore, ArgumentsT], ResultT],
        *arguments: ArgumentsT.args,
        **named: ArgumentsT.kwargs,
    ) -> ResultT:
        """Raises what the verb raises."""
        call = functools.partial(verb, self._store, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """When nothing is asked of it any more."""
        self._thread.submit(self._store.close)
        self._thread.shutdown()
