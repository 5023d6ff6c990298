"""An answer as it comes, also over connections that break.

Owns: an answer's key, its tries, and that a user gets each character once. Never: a job.

Each try has the same key and the same body, so all of them are one computation of the gateway, and the later ones hear
it from its beginning. If the gateway died meanwhile it is another computation, with the same seed: what it says is
compared with what was given out already, and only a different answer is an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from baton.common.errors import RequestError
from baton.deploy.client.connection import Connection, key_header, may_come_back, pause_s
from baton.deploy.client.values import Answer, ClusterUnreachable
from baton.deploy.client.wire import Collector

HANG_UP_S = 2.0


class AsyncStream:
    """`async for text in stream`; then `stream.answer`. Close it (or `async with`) to hang up early."""

    def __init__(self, deltas: AsyncGenerator[str, None], collector: Collector) -> None:
        self._deltas = deltas
        self._collector = collector

    def __aiter__(self) -> AsyncIterator[str]:
        return self._deltas

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream is used up."""
        return self._collector.answer()

    async def aclose(self) -> None:
        await self._deltas.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()


class Asking:
    """One request, until it is answered. `key`: the caller's, who may come back with it; else it gets its own."""

    def __init__(
        self, connection: Connection, path: str, body: dict[str, Any], key: str | None, retries: int, into: Collector
    ) -> None:
        self._connection = connection
        self._path = path
        self._own_key = key is None
        self._key = secrets.token_hex(16) if key is None else key
        key_header(self._key)  # refused before anything is asked
        # Of the key: the same body each time, and a gateway that lost it answers alike.
        seed = int.from_bytes(hashlib.sha256(self._key.encode()).digest()[:7])
        self._body = {"seed": seed, **body, "stream": True, "stream_options": {"include_usage": True}}
        self._retries = retries
        self._into = into

    async def deltas(self) -> AsyncGenerator[str, None]:
        """Its text. Raises RequestError, ClusterUnreachable."""
        try:
            async with aclosing(self._tries()) as deltas:
                async for text in deltas:
                    yield text
        except (GeneratorExit, asyncio.CancelledError):
            await self._hang_up()
            raise

    async def _tries(self) -> AsyncGenerator[str, None]:
        given, tries = "", 0
        while True:
            before, wait_s = len(given), pause_s(tries)
            try:
                async with aclosing(_behind(given, self._once())) as deltas:
                    async for text in deltas:
                        given += text
                        yield text
                return
            except RequestError as error:
                # Only refusals at the door carry a time to come back: nothing has been streamed then. Of a session:
                # who hangs up on a turn and asks the next one at once may be faster than the news of it.
                if tries >= self._retries or error.retry_after_s is None:
                    raise
                wait_s = error.retry_after_s
            except httpx.TransportError as error:
                if len(given) > before:  # it gets on: those before do not count
                    tries, wait_s = 0, pause_s(0)
                if tries >= self._retries or not may_come_back(error):
                    raise self._connection.unreachable(error) from error
            tries += 1
            await asyncio.sleep(wait_s)

    async def _once(self) -> AsyncGenerator[str, None]:
        self._into.restart()
        async with aclosing(self._connection.events(self._path, self._body, self._key)) as events:
            async for data in events:
                if text := self._into.feed(data):
                    yield text
        if not self._into.complete:
            raise httpx.RemoteProtocolError("the stream ended before the answer was complete")

    async def _hang_up(self) -> None:
        """A gateway cannot see whether a connection broke or its client wants no more: it is told. One with a key of
        the caller's goes on for a while."""
        if self._own_key:
            await self._connection.last_word("DELETE", f"/v1/idempotency/{quote(self._key, safe='')}", HANG_UP_S)


async def _behind(given: str, deltas: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """What comes behind the text that was given out already. Raises ClusterUnreachable when it begins otherwise."""
    known = 0
    async with aclosing(deltas):
        async for text in deltas:
            head = text[: len(given) - known]
            if not given.startswith(head, known):
                break
            known += len(head)
            if rest := text[len(head) :]:
                yield rest
        else:
            if known == len(given):
                return
    raise ClusterUnreachable("the connection broke, and the answer that was begun anew is a different one")
