"""A gateway's part in jobs: the routes, the runner on its loop, and the store on a thread.

Owns: their wiring, start and end. Never: anything about a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time

from baton.common.config import ClusterConfig
from baton.common.errors import RequestError
from baton.common.log import EventLog
from baton.deploy.accounts import Books
from baton.deploy.gateway_shell import Gateway
from baton.deploy.jobs.answering import LineAnswerer
from baton.deploy.jobs.api import JobsApi
from baton.deploy.jobs.runner import JobRunner
from baton.deploy.jobs.store import JobStore
from baton.deploy.jobs.store_thread import StoreThread

_log = EventLog("baton.jobs")


class JobService:
    """Made on the loop that it runs on; it runs from then on until `stop`."""

    def __init__(self, store: JobStore, gateway: Gateway, books: Books, config: ClusterConfig) -> None:
        self._store = StoreThread(store)
        self._answer = LineAnswerer(gateway, books, config.gateway.request_timeout_s, config.jobs.priority)
        self._config = config
        self._runner = self._new_runner()
        self.api = JobsApi(self._store, config.jobs, config.gateway.max_body_bytes, lambda: self._runner.poke())
        self._running = asyncio.create_task(self._run())

    def _new_runner(self) -> JobRunner:
        name, config = secrets.token_hex(8), self._config
        return JobRunner(name, self._store, self._answer, config.jobs, config.gateway.max_body_bytes, time.time)

    async def _run(self) -> None:
        while True:
            try:
                await self._runner.run()
            except Exception:  # noqa: BLE001 - a runner's top frame: requests go on, and a line that did it is given up
                _log.fatal("job_runner_failed")
            await asyncio.sleep(self._config.jobs.lease_s)  # then its lines are free
            self._runner = self._new_runner()

    async def stop(self) -> None:
        """What this gateway was answering is others' to answer, at once. Files and batches can still be asked for."""
        if self._running.done():
            return
        self._running.cancel()
        await asyncio.wait({self._running})
        with contextlib.suppress(RequestError):  # the leases end anyhow
            await self._runner.give_back()

    async def close(self) -> None:
        await self.stop()
        self._store.close()
