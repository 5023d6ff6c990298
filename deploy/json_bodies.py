"""A JSON body as a typed value, or an error that says which field is wrong and what would be right. Pure.

Owns: the wording of such errors; every one names its field. Never: knows any particular request.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from baton.common.errors import ErrorCode, RequestError

MAX_SHOWN_CHARS = 100
"""Of what a client sent, in a message about it. The body may be megabytes."""

MAX_VALUES = 1 << 18
"""Of one body: as many take up to a twentieth of a second to read. A prompt of more token ids can be sent as text."""
CONTAINER_VALUES = 8
"""As so many counts a list or an object: that is what it costs."""

_WHERE = re.compile(r"(?P<reason>.*) - at (?P<key>`key` in )?`\$(?P<path>.*)`", re.DOTALL)

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def refusal(field: str, reason: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"{field}: {reason}", field)


def shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def decode_object(body: bytes) -> dict[str, Any]:
    """The fields, or RequestError INVALID_REQUEST, TOO_LARGE."""
    if len(body) > MAX_VALUES and _values_in(body) > MAX_VALUES:
        raise RequestError(
            ErrorCode.TOO_LARGE,
            f"the body has more than {MAX_VALUES} values (lists and objects count as {CONTAINER_VALUES})",
        )
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(ErrorCode.INVALID_REQUEST, "the body must be a JSON object")
    return fields


def _values_in(body: bytes) -> int:
    """About how many, and keys, if it is JSON. Takes milliseconds: megabytes of `[],[],[],` take seconds to decode."""
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 2 * MAX_VALUES:
        return MAX_VALUES + 1
    outside = b"".join(bare.split(b'"')[::2])
    return outside.count(b",") + CONTAINER_VALUES * (outside.count(b"[") + outside.count(b"{"))


def parse(kind: type[BodyT], body: bytes, neutral: Mapping[str, tuple[Any, ...]]) -> BodyT:
    """The request, or RequestError INVALID_REQUEST that names the parameter and what is wrong with it. `neutral` are
    the parameters that others have and we do not, with the values that ask for nothing."""
    return parse_fields(kind, decode_object(body), neutral)


def parse_fields(kind: type[BodyT], fields: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> BodyT:
    """The same of a body that was decoded already; takes what is neutral out of `fields`."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name in [name for name in fields if name not in known]:
        _refuse_unless_neutral(name, fields.pop(name), known, neutral)
    return convert(fields, kind)


def _refuse_unless_neutral(name: str, value: Any, known: set[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    if name not in neutral:
        raise unknown_parameter(name, known)
    # 1 == True in Python, but {"best_of": true} asks for something else than {"best_of": 1}.
    asks_nothing = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral[name])
    if value is not None and not asks_nothing:
        raise refusal(name, "not supported by Baton (leave it out)")


def unknown_parameter(name: str, known: set[str]) -> RequestError:
    shown = shorten(name)  # comparing takes seconds for a name of megabytes, on the loop that serves everybody
    near = difflib.get_close_matches(shown, known, n=1)
    return refusal(shown, "unknown parameter" + (f"; did you mean {near[0]}?" if near else ""))


def convert(fields: dict[str, Any], kind: type[BodyT]) -> BodyT:
    """Typed, or RequestError INVALID_REQUEST that names the field and what is wrong with it."""
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error), fields, kind) from error


def _explain(error: str, fields: dict[str, Any], kind: type) -> RequestError:
    found = _WHERE.fullmatch(error)
    reason, path = (found["reason"], found["path"].strip(".")) if found else (error, "")
    if reason.startswith("Object missing required field"):
        missing = reason.split("`")[1]
        return refusal(f"{path}.{missing}" if path else missing, "required")
    field = path.removesuffix("[...]")  # of an object with keys of the client's choice
    got = fields.get(field)
    shown = f", got {shorten(repr(got))}" if isinstance(got, str | int | float) else ""
    if reason.startswith("Invalid enum value"):
        right = ", ".join(map(repr, _values_at(inspect.type_info(kind), re.findall(r"\w+|\[", _without_indices(path)))))
        shown = f"; it is one of {right}"
    key = "a key: " if found and found["key"] else ""
    return refusal(field, key + shorten(reason[:1].lower() + reason[1:]) + shown)


def _without_indices(path: str) -> str:
    return re.sub(r"\[\d+\]", "[", path)


def _values_at(info: inspect.Type, steps: list[str]) -> tuple[object, ...]:
    """What the schema wants at the end of the path: names of fields, and "[" into a list."""
    match info:
        case inspect.UnionType(types=types):
            return next((found for one in types if (found := _values_at(one, steps))), ())
        case inspect.Metadata(type=inner):
            return _values_at(inner, steps)
        case inspect.ListType(item_type=item) if steps[:1] == ["["]:
            return _values_at(item, steps[1:])
        case inspect.StructType(fields=fields) if steps:
            return next((_values_at(one.type, steps[1:]) for one in fields if one.encode_name == steps[0]), ())
        case inspect.LiteralType(values=values) if not steps:
            return tuple(values)
        case _:
            return ()
