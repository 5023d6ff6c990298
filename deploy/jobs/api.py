"""`/v1/files` and `/v1/batches`, as OpenAI's clients use them.

Owns: their routes, and the bound on an upload. Never: a statement, or the answer to a line.

Clients see what was made with their own API key. Beside OpenAI's: an `Idempotency-Key` header when a file is uploaded
or a batch is created gives the same one again; windows other than "24h"; `GET /v1/batches/{id}/failures`, the error
file so far; `GET /v1/batches/{id}/events`, what became of its lines, in the order in which they ended.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from baton.common.config import JobsConfig
from baton.common.errors import ErrorCode, RequestError
from baton.deploy.http_parts import Bodies, IdempotencyKey, json_response, owner_of, refuse_declared, too_large
from baton.deploy.jobs.records import FileRecord
from baton.deploy.jobs.shapes import (
    BatchObject,
    BatchRequest,
    Deleted,
    EventPage,
    FileObject,
    Page,
    batch_object,
    file_object,
    line_event,
)
from baton.deploy.jobs.store import JobStore
from baton.deploy.jobs.store_thread import StoreThread
from baton.deploy.jobs.tables import ROWS_AT_ONCE
from baton.deploy.json_bodies import parse, refusal, shorten
from baton.deploy.openapi import body_of

PART_BYTES = 1 << 20
"""Of an upload, in the store."""
FORM_BYTES = 1 << 20
"""What a form may take beside its file."""
RETRY_UPLOAD_S = 5.0
CREATED_AT_ONCE = 16
"""Batches whose bodies, however large, are received together."""
MAX_LINE = (1 << 63) - 1
JSONL = "application/jsonl"
UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86_400.0}
UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


class JobsApi:
    """The routes of one gateway. `on_change`: there is something to run, or to stop."""

    def __init__(
        self, store: StoreThread, settings: JobsConfig, max_body_bytes: int, on_change: Callable[[], None]
    ) -> None:
        self._store = store
        self._settings = settings
        self._received = Bodies(max_body_bytes, CREATED_AT_ONCE * max_body_bytes)
        self._uploading = 0
        self._on_change = on_change

    def add_routes(self, app: FastAPI) -> tuple[type, ...]:
        """The types that the document of the API must have the schemas of."""
        app.add_api_route("/v1/files", self.upload, methods=["POST"], openapi_extra=UPLOAD)
        app.add_api_route("/v1/files", self.files, methods=["GET"])
        app.add_api_route("/v1/files/{file_id}", self.file, methods=["GET"])
        app.add_api_route("/v1/files/{file_id}", self.delete_file, methods=["DELETE"])
        app.add_api_route("/v1/files/{file_id}/content", self.content, methods=["GET"])
        app.add_api_route("/v1/batches", self.create_batch, methods=["POST"], openapi_extra=body_of(BatchRequest))
        app.add_api_route("/v1/batches", self.batches, methods=["GET"])
        app.add_api_route("/v1/batches/{batch_id}", self.batch, methods=["GET"])
        app.add_api_route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"])
        app.add_api_route("/v1/batches/{batch_id}/failures", self.failures, methods=["GET"])
        app.add_api_route("/v1/batches/{batch_id}/events", self.events, methods=["GET"])
        return (BatchRequest,)

    # -------------------------------------------------------------------------------------------- files

    async def upload(self, request: Request, idempotency_key: IdempotencyKey = None) -> Response:
        """Keeps a file with requests, one JSON object a line, for a batch."""
        most = self._settings.max_file_bytes
        refuse_declared(request, most + FORM_BYTES, "jobs.max_file_bytes")
        if self._uploading >= self._settings.max_uploads:
            reason = f"{self._uploading} files are being uploaded (jobs.max_uploads)"
            raise RequestError(ErrorCode.OVERLOADED, reason, retry_after_s=RETRY_UPLOAD_S)
        self._uploading += 1
        try:
            return json_response(file_object(await self._keep(request, most, idempotency_key)))
        finally:
            self._uploading -= 1

    async def _keep(self, request: Request, most: int, idempotency_key: str | None) -> FileRecord:
        parser = MultiPartParser(request.headers, _bounded(request, most + FORM_BYTES), max_files=1, max_fields=8)
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError) as error:  # KeyError: the header names no boundary
            raise refusal("file", f"expected multipart/form-data: {shorten(str(error))}") from error
        try:
            file = _checked(form, most)
            return await self._store(
                JobStore.add_file,
                owner_of(request),
                "batch",
                shorten(file.filename or "unnamed"),
                _parts(file),
                time.time(),
                self._settings.max_stored_bytes,
                idempotency_key,
            )
        finally:
            await form.close()

    async def files(
        self,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """Uploaded files, and what batches have come to."""
        found, more = await self._store(
            JobStore.files, owner_of(request), purpose, after, limit, newest_first=order == "desc"
        )
        return _page([file_object(file) for file in found], more)

    async def file(self, request: Request, file_id: str) -> Response:
        """One file, without its content."""
        return json_response(file_object(await self._store(JobStore.file, owner_of(request), file_id)))

    async def content(self, request: Request, file_id: str) -> Response:
        """The bytes of a file."""
        file = await self._store(JobStore.file, owner_of(request), file_id)
        first = await self._store(JobStore.content, file, -1)  # what can fail does so before the status line
        return StreamingResponse(self._content(file, first), media_type=JSONL)

    async def _content(self, file: FileRecord, first: tuple[bytes, int | None]) -> AsyncGenerator[bytes, None]:
        part, place = first
        while place is not None:
            yield part
            part, place = await self._store(JobStore.content, file, place)

    async def delete_file(self, request: Request, file_id: str) -> Response:
        """A batch that has begun needs its input file no more."""
        await self._store(JobStore.delete_file, owner_of(request), file_id)
        return json_response(Deleted(id=file_id))

    # ------------------------------------------------------------------------------------------ batches

    async def create_batch(self, request: Request, idempotency_key: IdempotencyKey = None) -> Response:
        """Answers every line of a file, whatever is restarted meanwhile."""
        wanted = parse(BatchRequest, await self._received.read(request), {"output_expires_after": ()})
        window = wanted.completion_window
        batch = await self._store(
            JobStore.create_batch,
            owner_of(request),
            wanted.endpoint,
            wanted.input_file_id,
            (window, int(window[:-1]) * UNITS_S[window[-1]]),
            wanted.metadata or {},
            time.time(),
            idempotency_key,
        )
        self._on_change()
        return json_response(batch_object(batch))

    async def batches(
        self, request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        """Newest first."""
        found, more = await self._store(JobStore.batches, owner_of(request), after, limit)
        return _page([batch_object(batch) for batch in found], more)

    async def batch(self, request: Request, batch_id: str) -> Response:
        """How far a batch is."""
        return json_response(batch_object(await self._store(JobStore.batch, owner_of(request), batch_id)))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """Ends it at once; what was answered is kept."""
        batch = await self._store(JobStore.cancel, owner_of(request), batch_id, time.time())
        self._on_change()
        return json_response(batch_object(batch))

    async def failures(
        self,
        request: Request,
        batch_id: str,
        after: Annotated[int, Query(ge=0, le=MAX_LINE)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """The lines of the error file, also while the batch runs; those behind input line `after`, which the last
        one's `X-Last-Line` names."""
        found = await self._store(JobStore.failures, owner_of(request), batch_id, after, limit)
        last = found[-1][0] if found else after
        body = b"".join(line + b"\n" for _, line in found)
        return Response(body, headers={"X-Last-Line": str(last)}, media_type=JSONL)

    async def events(
        self,
        request: Request,
        batch_id: str,
        after: Annotated[int, Query(ge=0, le=MAX_LINE)] = 0,
        limit: Annotated[int, Query(ge=1, le=ROWS_AT_ONCE)] = 100,
        answers: bool = False,
    ) -> Response:
        """The ends of lines behind the place `after`, with `answers` their lines of the output or error file, too.
        Places go from 1 without gaps: who asks again from the last one it saw misses nothing, whatever is restarted."""
        batch, ends = await self._store(JobStore.events, owner_of(request), batch_id, after, limit)
        return json_response(
            EventPage(data=[line_event(end, with_answer=answers) for end in ends], batch=batch_object(batch))
        )


async def _bounded(request: Request, most_bytes: int) -> AsyncGenerator[bytes, None]:
    taken = 0
    async for part in request.stream():
        taken += len(part)
        if taken > most_bytes:
            raise too_large(most_bytes, "jobs.max_file_bytes")
        yield part


def _checked(form: FormData, most_bytes: int) -> UploadFile:
    file, purpose = form.get("file"), form.get("purpose")
    strange = next((name for name in form if name not in ("file", "purpose")), None)
    if strange is not None:
        raise refusal(shorten(strange), "not supported by Baton (leave it out)")
    if not isinstance(file, UploadFile):
        raise refusal("file", "required, with a file name")
    if purpose != "batch":
        raise refusal("purpose", "must be 'batch'")
    if file.size is not None and file.size > most_bytes:
        raise too_large(most_bytes, "jobs.max_file_bytes")
    return file


def _parts(file: UploadFile) -> Iterator[bytes]:
    """Read on the store's thread: it may lie on a disk."""
    return iter(lambda: file.file.read(PART_BYTES), b"")


def _page(data: list[FileObject] | list[BatchObject], more: bool) -> Response:
    return json_response(
        Page(
            data=data,
            has_more=more,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
        )
    )
