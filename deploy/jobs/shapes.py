"""What `/v1/files` and `/v1/batches` accept and answer, in OpenAI's shapes. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from baton.deploy.jobs.records import BatchRecord, FileRecord, Invalid, LineEnd, Result, Status

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class BatchRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    input_file_id: Annotated[str, Meta(max_length=100)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]{0,3}[mhd]$")]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None


class FileObject(Struct, frozen=True, kw_only=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class RequestCounts(Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    failed: int


class InputDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0  # not added up


class OutputDetails(Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class BatchUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens_details: OutputDetails = OutputDetails()


class Faults(Struct, frozen=True, kw_only=True):
    data: list[Invalid]
    object: str = "list"


class BatchObject(Struct, frozen=True, kw_only=True):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str]
    errors: Faults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    object: str = "batch"


class Page(Struct, frozen=True, kw_only=True):
    data: list[FileObject] | list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class LineEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`answer`: its line of the output or error file, when it was asked for and is still there."""

    place: int
    line: int
    custom_id: str
    result: Result
    ended_at: float
    answer: Raw | UnsetType = UNSET


class EventPage(Struct, frozen=True, kw_only=True):
    """`batch`: how it stands, no later than `data`. When it has ended, all its events are there to be asked for."""

    data: list[LineEvent]
    batch: BatchObject
    object: str = "list"


class Deleted(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


def file_object(file: FileRecord) -> FileObject:
    return FileObject(
        id=file.id, bytes=file.nbytes, created_at=int(file.created_at), filename=file.filename, purpose=file.purpose
    )


def line_event(end: LineEnd, *, with_answer: bool) -> LineEvent:
    return LineEvent(
        place=end.place,
        line=end.line,
        custom_id=end.custom_id,
        result=end.result,
        ended_at=end.ended_at,
        answer=Raw(end.answer) if with_answer and end.answer is not None else UNSET,
    )


def batch_object(batch: BatchRecord) -> BatchObject:
    ended_at = None if batch.ended_at is None else int(batch.ended_at)
    at = {batch.status: ended_at}
    faults = None if batch.errors is None else msgspec.json.decode(batch.errors, type=list[Invalid])
    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        status=batch.status,
        created_at=int(batch.created_at),
        expires_at=int(batch.expires_at),
        request_counts=RequestCounts(total=batch.total, completed=batch.completed, failed=batch.failed),
        usage=BatchUsage(
            input_tokens=batch.input_tokens,
            output_tokens=batch.output_tokens,
            total_tokens=batch.input_tokens + batch.output_tokens,
        ),
        metadata=msgspec.json.decode(batch.metadata, type=dict[str, str]),
        errors=None if faults is None else Faults(data=faults),
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        in_progress_at=None if batch.started_at is None else int(batch.started_at),
        finalizing_at=at.get("completed"),
        completed_at=at.get("completed"),
        failed_at=at.get("failed"),
        expired_at=at.get("expired"),
        cancelling_at=at.get("cancelled"),
        cancelled_at=at.get("cancelled"),
    )
