"""The lines of OpenAI's batch files: how they are read, and how outcomes are written. Pure.

Owns: what makes an input file good. Never: whether a line's body is a good request; that is found when it is answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from baton.deploy.jobs.records import ClaimedLine, Invalid, Outcome

MAX_TOLD_FAULTS = 100
"""Of one file; the first ones."""


class InputLine(Struct, frozen=True, kw_only=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512, pattern="^[^\\x00]*$")]  # NUL: not in every database
    method: Literal["POST"]
    url: str
    body: Raw


class _Response(Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: Raw


class _Error(Struct, frozen=True, kw_only=True):
    code: str
    message: str


class _OutputLine(Struct, frozen=True, kw_only=True):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


_input_line = msgspec.json.Decoder(InputLine)


class _Bad(Exception):
    def __init__(self, fault: Invalid) -> None:
        self.fault = fault
        super().__init__(fault.message)


def numbered(chunks: Iterable[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(number, line) of a file that comes in pieces; blank lines count and are left out. A line that is too long is
    cut off just behind the limit."""
    number, rest = 0, b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            number += 1
            if stripped := line.strip():
                yield number, stripped
        rest = rest[: max_line_bytes + 1]
    if stripped := rest.strip():
        yield number + 1, stripped


def find_faults(
    lines: Iterable[tuple[int, bytes]], endpoint: str, max_lines: int, max_line_bytes: int
) -> tuple[int, list[Invalid]]:
    """(how many lines a batch of this file has, why there can be none)."""
    faults: list[Invalid] = []
    seen: dict[str, int] = {}
    count = 0
    for number, line in lines:
        count += 1
        if count > max_lines:
            message = f"the file has more than {max_lines} lines (jobs.max_lines)"
            return count, [Invalid(code="too_many_lines", message=message)]
        try:
            parsed = _parse(number, line, endpoint, max_line_bytes)
        except _Bad as bad:
            faults.append(bad.fault)
            if len(faults) == MAX_TOLD_FAULTS:
                break
            continue
        first = seen.setdefault(parsed.custom_id, number)
        if first != number:
            message = f"custom_id {parsed.custom_id[:100]!r} is that of line {first}, too"
            faults.append(Invalid(code="duplicate_custom_id", message=message, line=number, param="custom_id"))
    if not count:
        faults.append(Invalid(code="empty_file", message="the file has no lines"))
    return count, faults


def read_line(line: bytes) -> InputLine:
    """Of a file without faults."""
    return _input_line.decode(line)


def _parse(number: int, line: bytes, endpoint: str, max_line_bytes: int) -> InputLine:
    if len(line) > max_line_bytes:
        message = f"longer than {max_line_bytes} bytes (gateway.max_body_bytes)"
        raise _Bad(Invalid(code="line_too_long", message=message, line=number))
    try:
        parsed = _input_line.decode(line)
    except msgspec.ValidationError as error:
        raise _Bad(Invalid(code="invalid_line", message=str(error), line=number)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Bad(Invalid(code="invalid_json_line", message=f"not JSON: {error}", line=number)) from error
    if parsed.url != endpoint:
        message = f"{parsed.url[:100]!r} is not the batch's endpoint, {endpoint}"
        raise _Bad(Invalid(code="mismatched_url", message=message, line=number, param="url"))
    if not bytes(parsed.body).startswith(b"{"):
        message = "must be an object: the body of a request"
        raise _Bad(Invalid(code="invalid_line", message=message, line=number, param="body"))
    return parsed


def answered(line: ClaimedLine, request_id: str, status: int, body: bytes, tokens: tuple[int, int] = (0, 0)) -> Outcome:
    """A line that was answered, also when the answer is a refusal. `tokens`: of the prompt and of the answer."""
    response = _Response(status_code=status, request_id=request_id, body=Raw(body))
    written = _OutputLine(
        id=_line_id(line.batch_id, line.line), custom_id=line.custom_id, response=response, error=None
    )
    return Outcome(
        batch_id=line.batch_id,
        line=line.line,
        result="completed" if status == 200 else "failed",
        answer=msgspec.json.encode(written),
        input_tokens=tokens[0],
        output_tokens=tokens[1],
    )


def unanswered(batch_id: str, line: int, custom_id: str, code: str, message: str) -> Outcome:
    """A line that will never be answered."""
    error = _Error(code=code, message=message)
    written = _OutputLine(id=_line_id(batch_id, line), custom_id=custom_id, response=None, error=error)
    return Outcome(batch_id=batch_id, line=line, result="failed", answer=msgspec.json.encode(written))


def _line_id(batch_id: str, line: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line}"
