"""Errors that a person sees. Each names the field, the value and the way out.

A bug raises a plain AssertionError/RuntimeError and is not caught below a process's top frame. Expected adversity
(no pages, peer lost, deadline) is a value that moves a state: see `ErrorCode`, which travels on the wire.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request ended without its answer. Stable: clients and dashboards match on these strings."""

    INVALID_REQUEST = "invalid_request"
    PROMPT_TOO_LONG = "prompt_too_long"
    MODEL_NOT_FOUND = "model_not_found"
    UNAUTHENTICATED = "invalid_api_key"  # OpenAI's word, as the next one
    ADMIN_ONLY = "admin_key_required"  # a valid key, and not one of an operator's
    FOREIGN_SITE = "foreign_site"  # a page of somebody else's, or a name that is not this gateway's
    RATE_LIMITED = "rate_limit_exceeded"
    OVERLOADED = "overloaded"
    DEADLINE_UNREACHABLE = "deadline_unreachable"  # by the measured speed of the queue
    NO_WORKER = "no_worker"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    TICKET_REFUSED = "ticket_refused"  # of a hand-off: forged, used before, or expired
    TRANSFER_CORRUPT = "transfer_corrupt"
    OUT_OF_PAGES = "out_of_pages"
    DRAINING = "draining"
    SESSION_NOT_FOUND = "session_not_found"
    SESSION_BUSY = "session_busy"
    SESSION_LOST = "session_lost"  # its KV is gone, and the configuration says not to compute it again
    NOT_FOUND = "not_found"  # a file or a batch
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"  # the key was given to another body
    IDEMPOTENCY_RUNNING = "idempotency_running"  # the first one runs, and is too large to attach to
    CONFLICT = "conflict"  # with the state that it is in
    TOO_LARGE = "too_large"
    STORE_UNAVAILABLE = "store_unavailable"  # the database behind files and batches
    INTERNAL = "internal"


class BatonError(Exception):
    """Base of every error that is meant for a person."""


class ConfigError(BatonError):
    """A setting that cannot work, found before any process starts."""

    def __init__(self, field: str, value: object, reason: str, hint: str = "") -> None:
        self.field = field
        self.value = value
        self.reason = reason
        self.hint = hint
        super().__init__(f"{field} = {value!r}: {reason}" + (f" ({hint})" if hint else ""))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        """Ray carries it from the process that found it to whoever launched the cluster."""
        return type(self), (self.field, self.value, self.reason, self.hint)


class RequestError(BatonError):
    """A request refused at the door, or ended by adversity. Carries the code that the client will see."""

    def __init__(self, code: ErrorCode, message: str, field: str | None = None, retry_after_s: float | None = None):
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        super().__init__(f"{code}: {message}")

    def __reduce__(self) -> tuple[type[RequestError], tuple[ErrorCode, str, str | None, float | None]]:
        return type(self), (self.code, self.message, self.field, self.retry_after_s)
