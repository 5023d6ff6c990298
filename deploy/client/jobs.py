"""Work that outlives this process: `await client.submit(prompts)` gives an `AsyncJob`, found again by its id.

Owns: what is said of batches over HTTP. Never: the state of a job, which is the cluster's: this process may end, and
another one ask for the same id, or submit with the same key again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from baton.common.errors import BatonError, ErrorCode, RequestError
from baton.deploy.client.connection import Connection, key_header
from baton.deploy.client.values import Answer, Outcome
from baton.deploy.client.wire import CHAT, lines_of, outcome_of
from baton.deploy.jobs.records import OPEN
from baton.deploy.jobs.shapes import BatchObject, EventPage, FileObject

POLL_S = 0.5
FIRST_POLL_S = 0.05
EVENTS_AT_ONCE = 100

Lines = Path | bytes | Iterable[Mapping[str, Any]]
"""A JSONL file in the format of OpenAI's batches, its content, or its lines."""


class _BatchPage(msgspec.Struct):
    data: list[BatchObject]


@dataclass(frozen=True, slots=True)
class JobEvent:
    """That one request of a job has its outcome. `place`: it is the so manieth to have one, from 1."""

    place: int
    line: int  # of the input, from 1
    custom_id: str
    ended_at: float
    completed: bool
    raw: bytes  # its line of the output or error file; b"": that file was deleted

    @property
    def outcome(self) -> Outcome:
        """Raises BatonError when it was deleted, or is no completion."""
        if not self.raw:
            raise BatonError(f"the answer of {self.custom_id!r} was deleted")
        return outcome_of(self.raw)


class AsyncJob:
    """One job. Everything it tells is asked from the cluster, again and again while nobody is there."""

    def __init__(self, connection: Connection, job_id: str) -> None:
        self.id = job_id
        self._connection = connection

    async def status(self) -> BatchObject:
        """How far it is: `status`, `request_counts`, `usage`, and when what happened."""
        return msgspec.json.decode(await self._connection.insist("GET", f"/v1/batches/{self.id}"), type=BatchObject)

    async def progress(self, poll_s: float = POLL_S) -> AsyncGenerator[BatchObject, None]:
        """Its status, again and again until it has ended, however it did; its end is the last one."""
        for turn in count():
            status = await self.status()
            yield status
            if status.status not in OPEN:
                return
            await asyncio.sleep(_pause_s(turn, poll_s))

    async def wait(self, timeout_s: float | None = None) -> BatchObject:
        """Its end, however it ended. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            async for status in self.progress():
                last = status
            return last

    async def cancel(self) -> BatchObject:
        """At once; what was answered is kept. Again: changes nothing."""
        answer = await self._connection.insist("POST", f"/v1/batches/{self.id}/cancel")
        return msgspec.json.decode(answer, type=BatchObject)

    async def events(self, after: int = 0, poll_s: float = POLL_S) -> AsyncGenerator[JobEvent, None]:
        """Each request's outcome, in the order in which they came, until the job has ended. `after`: the place of the
        last one that was seen, also by a process that is gone."""
        turn = 0
        while True:
            query = f"after={after}&limit={EVENTS_AT_ONCE}&answers=true"
            page = msgspec.json.decode(
                await self._connection.insist("GET", f"/v1/batches/{self.id}/events?{query}"), type=EventPage
            )
            for event in page.data:
                raw = event.answer if isinstance(event.answer, msgspec.Raw) else b""
                after = event.place
                yield JobEvent(
                    place=event.place,
                    line=event.line,
                    custom_id=event.custom_id,
                    ended_at=event.ended_at,
                    completed=event.result == "completed",
                    raw=bytes(raw),
                )
            if page.data:
                turn = 0
            elif page.batch.status in OPEN:
                await asyncio.sleep(_pause_s(turn, poll_s))
                turn += 1
            else:
                _check_begun(page.batch)
                return

    async def results(self, timeout_s: float | None = None) -> list[Outcome]:
        """Of all requests, in the order in which they were given; waits for them. What was refused or failed is a
        RequestError in the list. Raises TimeoutError; RequestError when the job could not begin."""
        async with asyncio.timeout(timeout_s):
            found = {event.line: event.outcome async for event in self.events()}
        return [found[line] for line in sorted(found)]

    async def result(self, timeout_s: float | None = None) -> Answer:
        """Of a job of one request; waits for it. Raises what it came to, when that is no answer; TimeoutError."""
        outcomes = await self.results(timeout_s)
        if len(outcomes) != 1:
            raise BatonError(f"{self.id} has {len(outcomes)} requests: `results` gives all their answers")
        if isinstance(outcomes[0], RequestError):
            raise outcomes[0]
        return outcomes[0]

    async def failures(self) -> list[dict[str, Any]]:
        """What the error file has so far; at most a thousand lines."""
        lines = await self._connection.insist("GET", f"/v1/batches/{self.id}/failures?limit=1000")
        return [msgspec.json.decode(line) for line in lines.splitlines()]

    async def output(self) -> AsyncGenerator[dict[str, Any], None]:
        """The lines of the output file, as they are, in the order of the input. Raises BatonError while it runs."""
        async with aclosing(self.content()) as parts:
            async for line in lines_of(parts):
                yield msgspec.json.decode(line)

    async def errors(self) -> AsyncGenerator[dict[str, Any], None]:
        """The lines of the error file. Raises BatonError while it runs."""
        async with aclosing(self.content(errors=True)) as parts:
            async for line in lines_of(parts):
                yield msgspec.json.decode(line)

    async def content(self, *, errors: bool = False) -> AsyncGenerator[bytes, None]:
        """The bytes of the output file, or of the error file, in pieces. Raises BatonError while it runs."""
        ended = await self.status()
        if ended.status in OPEN:
            counts = ended.request_counts
            done = counts.completed + counts.failed
            raise BatonError(f"{self.id} is {ended.status}: {done} of {counts.total} lines; its files come at its end")
        file_id = ended.error_file_id if errors else ended.output_file_id
        if file_id is not None:
            async with self._connection.download(f"/v1/files/{file_id}/content") as parts, aclosing(parts):
                async for part in parts:
                    yield part


async def submit_lines(
    connection: Connection,
    lines: Lines,
    endpoint: str | None,
    window: str,
    metadata: Mapping[str, str] | None,
    key: str | None,
) -> AsyncJob:
    """Uploads and begins; once, however often it takes."""
    name, content = _content(lines)
    headers = key_header(secrets.token_hex(16) if key is None else key)

    def upload() -> dict[str, Any]:
        return {"files": {"file": (name, content)}, "data": {"purpose": "batch"}, "headers": headers}

    file = msgspec.json.decode(await connection.insist("POST", "/v1/files", upload), type=FileObject)
    body = {
        "input_file_id": file.id,
        "endpoint": endpoint or _first_url(content),
        "completion_window": window,
        "metadata": dict(metadata or {}),
    }
    batch = await connection.insist("POST", "/v1/batches", lambda: {"json": body, "headers": headers})
    return AsyncJob(connection, msgspec.json.decode(batch, type=BatchObject).id)


async def newest(connection: Connection, most: int) -> list[BatchObject]:
    return msgspec.json.decode(await connection.insist("GET", f"/v1/batches?limit={most}"), type=_BatchPage).data


def _pause_s(turn: int, poll_s: float) -> float:
    return min(poll_s, FIRST_POLL_S * 2.0 ** min(turn, 10))


def _check_begun(batch: BatchObject) -> None:
    if batch.status == "failed":
        faults = batch.errors.data if batch.errors is not None else []
        reason = "; ".join(fault.message for fault in faults[:3])
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{batch.id} could not begin: {reason}", "prompts")


def _content(lines: Lines) -> tuple[str, bytes]:
    if isinstance(lines, Path):
        return lines.name, lines.read_bytes()
    return "lines.jsonl", lines if isinstance(lines, bytes) else b"".join(
        msgspec.json.encode(line) + b"\n" for line in lines
    )


def _first_url(content: bytes) -> str:
    """What the first line asks for; the server says what is wrong with a file that has none."""
    try:
        url = msgspec.json.decode(content.partition(b"\n")[0])["url"]
    except (msgspec.DecodeError, KeyError, TypeError):
        url = None
    return url if isinstance(url, str) else CHAT
