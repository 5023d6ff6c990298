"""A thread with an asyncio loop on which one gateway and its HTTP server live.

Owns: the listening socket, the thread, start and stop. Never: knows Ray or the cluster; whoever makes the gateway
connects it. Usable as it is in a test or in a process of one's own.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar, cast

import anyio
import uvicorn

from baton.common.clock import MonotonicClock
from baton.common.config import ClusterConfig
from baton.deploy.accounting import Accounting
from baton.deploy.accounts import Books
from baton.deploy.gateway_shell import Gateway
from baton.deploy.http_app import HttpApi
from baton.deploy.http_limits import Connections
from baton.deploy.http_protocol import Guard, GuardedProtocol
from baton.deploy.jobs.service import JobService
from baton.deploy.jobs.store import JobStore
from baton.deploy.keyed_answers import KeyedAnswers
from baton.deploy.tls import TlsFiles

CLOSE_TIMEOUT_S = 2
OTHER_DESCRIPTORS = 512
"""That a gateway has beside its connections: workers, the store, files of the model."""

ResultT = TypeVar("ResultT")


class GatewayServer:
    """`make_gateway` is called on the new loop; requests are served from then on until `stop`. Raises ConfigError for
    a certificate that cannot be used."""

    def __init__(
        self, listener: socket.socket, config: ClusterConfig, store: JobStore, make_gateway: Callable[[], Gateway]
    ) -> None:
        self._listener = listener
        self._config = config
        self._store = store
        self._make_gateway = make_gateway
        door = config.gateway
        self._tls = TlsFiles(door.tls_cert, door.tls_key) if door.tls_cert else None
        self._started: Future[Gateway] = Future()
        self._server: uvicorn.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: JobService | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{self._config.gateway.scheme}://{f'[{host}]' if ':' in host else host}:{port}"

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
        limits = self._config.gateway.http
        connections = Connections(limits, _room_for(limits.max_connections))
        guard = Guard(limits, connections, self._tls, gateway.metrics.connection_ended, gateway.metrics.connections)
        self._server = uvicorn.Server(
            uvicorn.Config(
                Accounting(api.app(), books),
                log_config=None,
                access_log=False,
                log_level="error",  # what clients do wrong is counted, not logged
                lifespan="off",
                http=cast(type[asyncio.Protocol], partial(GuardedProtocol, guard)),
                ws="none",
                proxy_headers=False,  # nobody asks for a client's address but the protocol, which sees the real one
                timeout_keep_alive=cast(int, limits.keep_alive_s),  # of asyncio's `call_later`
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
                server_header=False,
            )
        )
        async with anyio.create_task_group():
            pass  # it loads half of itself when it is first used, which would be in the first stream
        # The socket listens already: connections wait in its backlog until the server takes them.
        self._loop.call_soon(self._started.set_result, gateway)
        await self._server.serve(sockets=[self._listener])
        await jobs.close()


def _room_for(connections: int) -> int:
    """How many the process has descriptors for, if need be after it has allowed itself as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(1, soft - OTHER_DESCRIPTORS)
