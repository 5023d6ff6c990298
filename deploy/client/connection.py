"""One gateway, over HTTP: calls, and patience with it.

Owns: the connections, and when a call is made again: only where that is harmless. Never: what is asked.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import httpx

from baton.common import env
from baton.common.errors import ErrorCode, RequestError
from baton.deploy.client.values import ClusterUnreachable
from baton.deploy.client.wire import lines_of, response_error

CONNECT_TIMEOUT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
_AWAY = frozenset({ErrorCode.STORE_UNAVAILABLE, ErrorCode.DRAINING, ErrorCode.NO_WORKER})


def pause_s(attempt: int) -> float:
    """Before the next one; many clients that lost a gateway together do not come back together."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt, 10)) * random.uniform(0.5, 1.0)


def may_come_back(error: httpx.TransportError) -> bool:
    """A gateway that took too long will not be faster when it is asked again."""
    return not isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout | httpx.PoolTimeout)


def gateway_url(given: str) -> str:
    """With a scheme, without what lies below the gateway's root."""
    url = given if "://" in given else f"http://{given}"
    return url.rstrip("/").removesuffix("/v1")


def trust(ca_file: str | None = None) -> ssl.SSLContext | bool:
    """httpx's `verify`: of this file, else of $BATON_CA_FILE, else what httpx trusts. Raises ClusterUnreachable."""
    path = ca_file or env.ca_file()
    if path is None:
        return True
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # as those of `ssl` are
        raise ClusterUnreachable(f"{path}: no file of certificates: {error.strerror or error}") from error


MAX_KEY_BYTES = 256


def key_header(key: str) -> dict[bytes, bytes]:
    """Raises RequestError for what no header can hold."""
    if not key.isprintable() or not 0 < len(key.encode()) <= MAX_KEY_BYTES:
        reason = f"{key[:40]!r}: one to {MAX_KEY_BYTES} bytes, without line breaks and the like"
        raise RequestError(ErrorCode.INVALID_REQUEST, reason, "key")
    return {b"Idempotency-Key": key.encode()}


class Connection:
    """`patience_s`: how long a call that may be repeated is made again while nobody is there."""

    def __init__(
        self, base_url: str | None, api_key: str | None, timeout_s: float, patience_s: float, ca_file: str | None = None
    ) -> None:
        self.base_url = gateway_url(base_url or env.cluster_url())
        self._patience_s = patience_s
        key = api_key or env.api_key()
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            verify=trust(ca_file),
            limits=httpx.Limits(max_connections=None),
        )
        self.last_words: set[asyncio.Task[None]] = set()

    async def last_word(self, method: str, path: str, within_s: float) -> None:
        """A call that is made to its end also when whoever makes it is cancelled; nobody hears what comes of it."""

        async def say() -> None:
            with suppress(RequestError, ClusterUnreachable):
                await self.call(method, path, timeout=within_s)

        task = asyncio.create_task(say())
        self.last_words.add(task)
        task.add_done_callback(self.last_words.discard)
        await asyncio.shield(task)

    async def call(self, method: str, path: str, **options: Any) -> bytes:
        """Once. Raises RequestError, ClusterUnreachable."""
        try:
            response = await self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise self.unreachable(error) from error
        if response.is_error:
            raise response_error(response)
        return response.content

    async def insist(
        self,
        method: str,
        path: str,
        options: Callable[[], dict[str, Any]] = dict,
        *,
        retries: int | None = None,
    ) -> bytes:
        """A call that changes nothing when it is made twice, made again while nobody is there or there is no room: so
        many times, or for as long as there is patience. `options` are made anew for each try. Raises RequestError,
        ClusterUnreachable."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._patience_s
        for tries in count():
            last = loop.time() >= give_up_s if retries is None else tries >= retries
            wait_s = pause_s(tries)
            try:
                response = await self._http.request(method, path, **options())
                if not response.is_error:
                    return response.content
                refused = response_error(response)
                come_back = refused.retry_after_s is not None or refused.code in _AWAY
                if last or not come_back:
                    raise refused
                wait_s = refused.retry_after_s or wait_s
            except httpx.TransportError as error:
                if last or not may_come_back(error):
                    raise self.unreachable(error) from error
            await asyncio.sleep(wait_s)
        raise AssertionError("one of them was the last one")

    @asynccontextmanager
    async def download(self, path: str) -> AsyncGenerator[AsyncGenerator[bytes, None], None]:
        """A body, in pieces. Raises RequestError, ClusterUnreachable."""
        try:
            async with self._http.stream("GET", path) as response:
                if response.is_error:
                    await response.aread()
                    raise response_error(response)
                yield _pieces(response)
        except httpx.TransportError as error:
            raise self.unreachable(error) from error

    async def events(self, path: str, body: dict[str, Any], key: str) -> AsyncGenerator[bytes, None]:
        """The data of server-sent events. Raises RequestError, and httpx.TransportError for whoever can go on."""
        async with self._http.stream("POST", path, json=body, headers=key_header(key)) as response:
            if response.is_error:
                await response.aread()
                raise response_error(response)
            async for line in lines_of(response.aiter_bytes()):
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield line.removeprefix(b"data: ")

    def unreachable(self, error: httpx.TransportError) -> ClusterUnreachable:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return ClusterUnreachable(f"the certificate of {self.base_url} is not trusted (BATON_CA_FILE): {error}")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ClusterUnreachable(f"nobody answers at {self.base_url}: is `baton serve` running there?")
        return ClusterUnreachable(f"the connection to {self.base_url} broke: {error or type(error).__name__}")

    async def close(self) -> None:
        await asyncio.gather(*self.last_words)
        await self._http.aclose()


async def _pieces(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    async for piece in response.aiter_bytes():
        yield piece
