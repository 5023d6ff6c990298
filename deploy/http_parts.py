"""What all routes of the gateway share: who asks, what was sent, and answers as JSON.

Owns: the bounds on bodies, each and all together. Never: the rate at which they come (`http_protocol.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, TypeVar, final

from fastapi import Header, Request, Response

from baton.common.errors import ErrorCode, RequestError
from baton.deploy.openai_replies import encode, http_error

IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=256)]
"""For routes where a repeat is harmless with it (docs/CLIENT.md)."""


ASIDE_BYTES = 32 << 10

ParsedT = TypeVar("ParsedT")


def owner_of(request: Request) -> str:
    """Whose sessions, files and batches a request may use; who that is was found at the door (`http_door.py`)."""
    return str(request.state.owner)


@final
class Bodies:
    """JSON bodies, as they are received: of so many bytes each, and all that are being received."""

    def __init__(self, most_bytes: int, most_receiving_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._most_receiving_bytes = most_receiving_bytes
        self._receiving_bytes = 0

    async def read(self, request: Request) -> bytes:
        """Raises RequestError TOO_LARGE, OVERLOADED; ClientDisconnect."""
        refuse_declared(request, self._most_bytes, "gateway.max_body_bytes")
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                self._receiving_bytes += len(part)
                if len(body) > self._most_bytes:
                    raise too_large(self._most_bytes, "gateway.max_body_bytes")
                if self._receiving_bytes > self._most_receiving_bytes:
                    reason = "too many requests are being received"
                    raise RequestError(ErrorCode.OVERLOADED, reason, retry_after_s=1.0)
            return bytes(body)
        finally:
            self._receiving_bytes -= len(body)


async def parse_aside(parse: Callable[[bytes], ParsedT], body: bytes) -> ParsedT:
    """What it makes of the body, without keeping the loop, which has streams to serve."""
    return await asyncio.to_thread(parse, body) if len(body) > ASIDE_BYTES else parse(body)


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
