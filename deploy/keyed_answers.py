"""Answers under an `Idempotency-Key`: the same key and the same body start one computation, however often they come.

Owns: what a gateway remembers of keys, in its memory and within bounds. Never: computes an answer, or decides one.

A computation is not its connection's. While it runs, a repeat attaches: it gets everything from the beginning. When the
last client has hung up, it goes on for `linger_s` and is cancelled then, unless one comes back. An answer with a status
below 400 is told again for `keep_s`; what was refused or failed is forgotten at once, and a repeat is a new try.

Bounds: what is remembered takes at most `max_bytes`. Beyond it the oldest answer that has ended is forgotten; if none
has, the one that grows is *loose*: what its clients have read is let go, so nobody can attach any more (409), and it is
forgotten with its end. When the gateway dies, so do its computations, and all of this with them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any, final

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from baton.common.config import IdempotencyConfig
from baton.common.errors import ErrorCode, RequestError

ENTRY_BYTES = 2048
"""What a key takes beside its answer, about."""
RUNNING_RETRY_AFTER_S = 1.0

Start = Callable[[], Coroutine[Any, Any, Response]]
Name = tuple[str, str]
"""(whose, the key)."""


@final
class _Reader:
    """One client, and how many parts it has taken."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = 0


@final
class _Answer:
    """One computation and what it has said, for as many as want to hear it."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.head: asyncio.Future[tuple[int, dict[str, str], bool]] = asyncio.get_running_loop().create_future()
        self.head.add_done_callback(lambda head: head.cancelled() or head.exception())  # nobody may be left to hear it
        self.parts: deque[bytes] = deque()
        self.dropped = 0  # parts that are there no more; only when loose
        self.nbytes = ENTRY_BYTES
        self.ended = False
        self.loose = False
        self.error: BaseException | None = None
        self.readers: set[_Reader] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self._more = asyncio.Event()

    def add(self, part: bytes) -> None:
        self.parts.append(part)
        self.nbytes += len(part)
        self.wake()

    def wake(self) -> None:
        more, self._more = self._more, asyncio.Event()
        more.set()

    def trim(self) -> int:
        """Of a loose one: lets go what everybody has read, and returns how many bytes that were."""
        read = min((reader.at for reader in self.readers), default=self.dropped + len(self.parts))
        freed = sum(len(self.parts.popleft()) for _ in range(read - self.dropped))
        self.dropped, self.nbytes = read, self.nbytes - freed
        return freed

    async def read(self, reader: _Reader) -> AsyncGenerator[bytes, None]:
        """All of it, as it comes."""
        while True:
            while reader.at < self.dropped + len(self.parts):
                reader.at += 1
                yield self.parts[reader.at - 1 - self.dropped]
            if self.ended:
                break
            await self._more.wait()
        if self.error is not None:
            raise self.error  # its client sees the connection break: what it has is not all


class _Telling(StreamingResponse):
    """To one client, who is counted for as long as it listens."""

    def __init__(
        self, parts: AsyncGenerator[bytes, None], status: int, headers: dict[str, str], leave: Callable[[], None]
    ) -> None:
        super().__init__(parts, status, headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


class KeyedAnswers:
    """Of one gateway, on its loop."""

    def __init__(self, settings: IdempotencyConfig) -> None:
        self._settings = settings
        self._answers: dict[Name, _Answer] = {}
        self._ended: dict[Name, None] = {}  # the oldest first
        self._nbytes = 0

    async def respond(self, owner: str, path: str, key: str, body: bytes, start: Start) -> Response:
        """The response to this body, by `start` or by an earlier one with this key. Raises RequestError, also what
        `start` raises. Cancelled when this client hangs up."""
        name, digest = (owner, key), hashlib.sha256(path.encode() + b"\n" + body).digest()
        answer = self._answers.get(name)
        extra = {} if answer is None else {"Idempotent-Replayed": "true"}
        if answer is None:
            answer = self._begin(name, digest, start)
        elif answer.digest != digest:
            reason = "this key was given with another body: a repeat has the same one, and other work another key"
            raise RequestError(ErrorCode.IDEMPOTENCY_MISMATCH, reason, "Idempotency-Key")
        elif answer.loose:
            reason = "the request with this key still runs, and has said too much already for another to hear it all"
            raise RequestError(ErrorCode.IDEMPOTENCY_RUNNING, reason, "Idempotency-Key", RUNNING_RETRY_AFTER_S)
        reader = self._enter(answer)
        left = False
        try:
            status, headers, streamed = await asyncio.shield(answer.head)
            if streamed:
                left = True  # later
                leave = partial(self._leave, name, answer, reader)
                return _Telling(answer.read(reader), status, headers | extra, leave)
            whole = b"".join([part async for part in answer.read(reader)])
            return Response(whole, status, headers | extra)
        finally:
            if not left:
                self._leave(name, answer, reader)

    def forget(self, owner: str, key: str) -> None:
        """Ends what runs under it."""
        answer = self._answers.get((owner, key))
        if answer is not None:
            self._drop((owner, key), answer)

    # ------------------------------------------------------------------------------------------- readers

    def _enter(self, answer: _Answer) -> _Reader:
        reader = _Reader()
        answer.readers.add(reader)
        if answer.timer is not None and not answer.ended:
            answer.timer.cancel()
            answer.timer = None
        return reader

    def _leave(self, name: Name, answer: _Answer, reader: _Reader) -> None:
        answer.readers.discard(reader)
        if answer.readers or answer.ended:
            return
        linger_s = 0.0 if answer.loose else self._settings.linger_s
        answer.timer = asyncio.get_running_loop().call_later(linger_s, self._drop, name, answer)

    # --------------------------------------------------------------------------------------- computations

    def _begin(self, name: Name, digest: bytes, start: Start) -> _Answer:
        answer = self._answers[name] = _Answer(digest)
        self._nbytes += answer.nbytes
        answer.task = asyncio.create_task(self._run(name, answer, start))
        answer.task.add_done_callback(partial(self._over, name, answer))
        return answer

    async def _run(self, name: Name, answer: _Answer, start: Start) -> None:
        response = await start()
        headers = {name: value for name, value in response.headers.items() if name != "content-length"}
        if not isinstance(response, StreamingResponse):
            self._add(answer, bytes(response.body))
            answer.head.set_result((response.status_code, headers, False))
            return
        answer.head.set_result((response.status_code, headers, True))
        async for part in response.body_iterator:
            self._add(answer, part.encode() if isinstance(part, str) else bytes(part))

    def _add(self, answer: _Answer, part: bytes) -> None:
        answer.add(part)
        self._nbytes += len(part)
        while self._nbytes > self._settings.max_bytes and self._ended:
            oldest = next(iter(self._ended))
            self._drop(oldest, self._answers[oldest])
        if self._nbytes > self._settings.max_bytes:
            answer.loose = True
        if answer.loose:
            self._nbytes -= answer.trim()

    def _over(self, name: Name, answer: _Answer, task: asyncio.Task[None]) -> None:
        """It has said all, or has failed: then whoever waits for it hears why."""
        answer.ended = True
        if task.cancelled():
            reason = "the request with this key was cancelled"
            answer.error = RequestError(ErrorCode.CANCELLED, reason, "Idempotency-Key")
        else:
            answer.error = task.exception()
        if answer.error is not None and not answer.head.done():
            answer.head.set_exception(answer.error)
        answer.wake()
        if self._answers.get(name) is not answer:
            return
        if answer.timer is not None:
            answer.timer.cancel()
        if answer.error is not None or answer.loose or answer.head.result()[0] >= 400:
            self._drop(name, answer)
            return
        self._ended[name] = None
        answer.timer = asyncio.get_running_loop().call_later(self._settings.keep_s, self._drop, name, answer)

    def _drop(self, name: Name, answer: _Answer) -> None:
        if self._answers.get(name) is not answer:
            return
        del self._answers[name]
        self._ended.pop(name, None)
        self._nbytes -= answer.nbytes
        if answer.timer is not None:
            answer.timer.cancel()
        if answer.task is not None:
            answer.task.cancel()
