"""What all routes of the gateway share: who asks, what was sent, and answers as JSON."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Request, Response

from baton.common.errors import ErrorCode, RequestError
from baton.deploy.openai_replies import encode, http_error

IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=256)]
"""For routes where a repeat is harmless with it (docs/CLIENT.md)."""


def owner_of(request: Request) -> str:
    """Whose sessions, files and batches a request may use; who that is was found at the door (`http_door.py`)."""
    return str(request.state.owner)


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Raises RequestError TOO_LARGE."""
    refuse_declared(request, most_bytes, "gateway.max_body_bytes")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most_bytes:
            raise too_large(most_bytes, "gateway.max_body_bytes")
    return bytes(body)


def refuse_declared(request: Request, most_bytes: int, setting: str) -> None:
    """Before any of it is read. Raises RequestError TOO_LARGE."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > most_bytes:
        raise too_large(most_bytes, setting)


def too_large(most_bytes: int, setting: str) -> RequestError:
    return RequestError(ErrorCode.TOO_LARGE, f"the body is larger than {most_bytes} bytes ({setting})")


def json_response(reply: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(reply), status, headers, "application/json")


def error_response(error: RequestError) -> Response:
    http = http_error(error)
    return json_response(http.reply, http.status, http.headers)
