"""What processes of two releases pickle to each other, by the names of its fields.

Owns: what becomes of a field that only one of them knows. Never: the types of values; they are pickled as they are.

A frozen dataclass with slots is pickled by position, else: one more field, and the reader has the values of others, or
attributes that are not there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from baton.common.errors import ConfigError

T = TypeVar("T")


class ByName:
    """Base of such a dataclass. A field that the writer did not know has its default. One that the reader does not know
    is left out where the writer has its default, which is to work as the release before; else the object is refused."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}  # type: ignore[arg-type]
        return read, (type(self), values, _defaulted(self, values))


def read(cls: type[T], values: Mapping[str, object], defaulted: frozenset[str]) -> T:
    """What `ByName` has written. Raises ConfigError. Its name and place are part of what is written."""
    fields = {one.name: one for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in fields and name not in defaulted:
            hint = "leave it at its default until everything is of one release"
            raise ConfigError(f"{cls.__name__}.{name}", value, "this release of Baton does not know it", hint)
    for name, one in fields.items():
        needed = one.init and one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if needed and name not in values:
            reason = "this release of Baton needs it, and the one that wrote does not have it"
            raise ConfigError(f"{cls.__name__}.{name}", None, reason, "baton deploy --replace")
    return cls(**{name: value for name, value in values.items() if name in fields})


def _defaulted(one: object, values: Mapping[str, object]) -> frozenset[str]:
    found = set()
    for field in dataclasses.fields(one):  # type: ignore[arg-type]
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if default is not dataclasses.MISSING and values[field.name] == default:
            found.add(field.name)
    return frozenset(found)
