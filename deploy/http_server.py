"""A thread with an asyncio loop on which one gateway and its HTTP server live.

Owns: the listening socket, the thread, start and stop. Never: knows Ray or the cluster; whoever makes the gateway
connects it. Usable as it is in a test or in a process of one's own.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvicorn

from baton.common.clock import MonotonicClock
from baton.common.config import ClusterConfig
from baton.deploy.accounting import Accounting
from baton.deploy.accounts import Books
from baton.deploy.gateway_shell import Gateway
from baton.deploy.http_app import HttpApi
from baton.deploy.jobs.service import JobService
from baton.deploy.jobs.store import JobStore
from baton.deploy.keyed_answers import KeyedAnswers

KEEP_ALIVE_S = 30
CLOSE_TIMEOUT_S = 2

ResultT = TypeVar("ResultT")


class GatewayServer:
    """`make_gateway` is called on the new loop; requests are served from then on until `stop`."""

    def __init__(
        self, listener: socket.socket, config: ClusterConfig, store: JobStore, make_gateway: Callable[[], Gateway]
    ) -> None:
        self._listener = listener
        self._config = config
        self._store = store
        self._make_gateway = make_gateway
        self._started: Future[Gateway] = Future()
        self._server: uvicorn.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: JobService | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self, timeout_s: float = 30.0) -> Gateway:
        """Returns when requests are served."""
        self._thread.start()
        return self._started.result(timeout_s)

    def begin(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """From another thread: runs `work` on the gateway's loop."""
        assert self._loop is not None, "not started"
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def stop_jobs(self) -> None:
        """On the gateway's loop: answers no line of a batch any more."""
        assert self._jobs is not None, "not started"
        await self._jobs.stop()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Closes the door and every connection."""
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        gateway = self._make_gateway()
        books = Books(MonotonicClock(), gateway.spans, self._config.tracing.sample_ratio)
        self._jobs = jobs = JobService(self._store, gateway, books, self._config)
        keyed = KeyedAnswers(self._config.idempotency)
        api = HttpApi(gateway, jobs.api, keyed, self._config.gateway)
        self._server = uvicorn.Server(
            uvicorn.Config(
                Accounting(api.app(), books),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
                server_header=False,
            )
        )
        # The socket listens already: connections wait in its backlog until the server takes them.
        self._loop.call_soon(self._started.set_result, gateway)
        await self._server.serve(sockets=[self._listener])
        await jobs.close()
