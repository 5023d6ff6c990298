"""What the job store keeps, as typed values. Pure.

Owns: the names of statuses and outcomes. Never: what a client sees of it (`api.py`) or how it is kept (`schema.py`).

Times are seconds of the wall clock. `owner` is the hash of the API key that everything is kept under.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Status = Literal["validating", "in_progress", "completed", "failed", "expired", "cancelled"]
OPEN: tuple[Status, ...] = ("validating", "in_progress")
Result = Literal["completed", "failed"]
"""Of one line: its answer is in the output file, or what went wrong is in the error file."""
LineKey = tuple[str, int]
"""(batch, number of the line in its file, from 1)."""


class FileRecord(Struct, frozen=True, kw_only=True):
    """An uploaded file, whose bytes are kept as chunks; or half of a batch's outcomes, whose bytes are its lines."""

    id: str
    owner: str
    purpose: str
    filename: str
    nbytes: int
    created_at: float
    digest: str | None = None  # SHA-256 of what was uploaded
    batch_id: str | None = None  # of outcomes
    result: Result | None = None  # of outcomes: which of them


class BatchRecord(Struct, frozen=True, kw_only=True):
    """`completed + failed == total` when it has ended, however it did; only one that never began has no lines."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: str  # JSON
    status: Status
    created_at: float
    expires_at: float
    started_at: float | None = None
    ended_at: float | None = None
    errors: str | None = None  # JSON: why it failed, when no line of it was tried
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    input_digest: str | None = None  # of the input file, which may be gone


class ClaimedLine(Struct, frozen=True, kw_only=True):
    """A line that one runner may answer until its lease ends."""

    batch_id: str
    line: int
    custom_id: str
    request: bytes  # the JSON of its body
    attempts: int  # this one included
    endpoint: str
    owner: str

    @property
    def key(self) -> LineKey:
        return self.batch_id, self.line


class Outcome(Struct, frozen=True, kw_only=True):
    """What a line came to. The first one that is recorded counts."""

    batch_id: str
    line: int
    result: Result
    answer: bytes  # its line of the output or error file, without the end of line
    input_tokens: int = 0
    output_tokens: int = 0


class LineEnd(Struct, frozen=True, kw_only=True):
    """That a line has its outcome. `place`: it is the so manieth of its batch, from 1."""

    place: int
    line: int
    custom_id: str
    result: Result
    ended_at: float
    answer: bytes | None  # None: deleted with its file


class Invalid(Struct, frozen=True, kw_only=True):
    """One fault of an input file, as OpenAI's batches tell it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None
