"""Any order of asking, hanging up, speaking, ending, failing and forgetting under a few keys, in little memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.common.config import IdempotencyConfig
from baton.common.errors import ErrorCode, RequestError
from baton.deploy.keyed_answers import ENTRY_BYTES, KeyedAnswers

KEYS = ("a", "b", "c")
PART_BYTES = 50
TURNS = 20
"""Of the loop, after which everything that can happen has happened."""

Step = tuple[str, str]
steps = st.lists(
    st.tuples(st.sampled_from(("ask", "hang up", "say", "say", "say", "end", "fail", "forget")), st.sampled_from(KEYS)),
    max_size=40,
)


class Computation:
    """What runs under a key: it says what it is told to."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.over = False
        self.well = False
        self._words: asyncio.Queue[bytes | RequestError | None] = asyncio.Queue()

    def do(self, word: bytes | RequestError | None) -> None:
        if not self.over:
            if isinstance(word, bytes):
                self.said.append(word)
            else:
                self.over, self.well = True, word is None
            self._words.put_nowait(word)

    async def start(self) -> Response:
        return StreamingResponse(self._parts())

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        try:
            while (word := await self._words.get()) is not None:
                if isinstance(word, RequestError):
                    raise word
                yield word
        finally:
            self.over = True


class Reader:
    """One client."""

    def __init__(self, asking: Coroutine[Any, Any, Response]) -> None:
        self.heard = b""
        self.whole = False
        self.refused: RequestError | None = None
        self.task = asyncio.create_task(self._listen(asking))

    async def _listen(self, asking: Coroutine[Any, Any, Response]) -> None:
        try:
            response = await asking
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, self._never, self._hear)
            self.whole = True
        except RequestError as error:
            self.refused = error

    async def _hear(self, message: Any) -> None:
        self.heard += message.get("body", b"")

    async def _never(self) -> Any:
        await asyncio.Event().wait()


async def settle() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def live(plan: list[Step], linger_s: float, max_bytes: int) -> None:
    keyed = KeyedAnswers(IdempotencyConfig(linger_s=linger_s, keep_s=1e6, max_bytes=max_bytes))
    began: dict[str, list[Computation]] = {key: [] for key in KEYS}
    readers: list[tuple[str, Reader]] = []

    def begin(key: str) -> Coroutine[Any, Any, Response]:
        assert all(one.over for one in began[key]), "one at a time"
        began[key].append(Computation())
        return began[key][-1].start()

    for verb, key in plan:
        running = began[key][-1:]
        match verb:
            case "ask":
                asking = keyed.respond("me", "/path", key, b"body", lambda key=key: begin(key))  # type: ignore[misc]
                readers.append((key, Reader(asking)))
            case "hang up":
                for _, reader in [pair for pair in readers if pair[0] == key and not pair[1].task.done()][:1]:
                    reader.task.cancel()
            case "forget":
                keyed.forget("me", key)
            case _:
                for computation in running:
                    part = f"{len(computation.said)}.".encode().ljust(PART_BYTES, b"-")
                    computation.do({"say": part, "end": None, "fail": RequestError(ErrorCode.INTERNAL, "failed")}[verb])
        await settle()

    for key, reader in readers:
        assert any(b"".join(one.said).startswith(reader.heard) for one in began[key])
        assert not reader.whole or reader.heard in [b"".join(one.said) for one in began[key] if one.well]
        if reader.refused is not None:
            assert reader.refused.code in (ErrorCode.INTERNAL, ErrorCode.CANCELLED, ErrorCode.IDEMPOTENCY_RUNNING)
    for key in KEYS:
        keyed.forget("me", key)
    await settle()
    assert all(reader.task.done() for _, reader in readers)
    assert all(reader.task.cancelled() or reader.task.exception() is None for _, reader in readers)
    assert all(one.over for computations in began.values() for one in computations)
    await nothing_was_leaked(keyed, max_bytes)


async def nothing_was_leaked(keyed: KeyedAnswers, max_bytes: int) -> None:
    """There is room again for what there was room for at first."""
    starts = 0

    async def start() -> Response:
        nonlocal starts
        starts += 1
        return Response(b"x" * (max_bytes - ENTRY_BYTES))

    for _ in range(2):
        await keyed.respond("me", "/path", "large", b"body", start)
        await settle()
    assert starts == 1
    keyed.forget("me", "large")


@settings(max_examples=150, deadline=None)
@given(
    plan=steps,
    linger_s=st.sampled_from((0.0, 1e6)),
    max_bytes=st.sampled_from((ENTRY_BYTES + 120, 2 * ENTRY_BYTES + 300, 9 * ENTRY_BYTES)),
)
@example(plan=[("ask", "a"), *[("say", "a")] * 4, ("ask", "a")], linger_s=1e6, max_bytes=ENTRY_BYTES + 120)
def test_keys_in_any_order(plan: list[Step], linger_s: float, max_bytes: int) -> None:
    asyncio.run(live(plan, linger_s, max_bytes))
