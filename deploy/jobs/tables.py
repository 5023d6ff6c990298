"""The tables of the job store: brought up to date, and read as records.

Owns: versions. Never: a question about jobs (`store.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import TypeVar

import msgspec
from msgspec import Struct

from baton.common.errors import ConfigError, ErrorCode, RequestError
from baton.deploy.jobs.databases import Transaction, Value
from baton.deploy.jobs.schema import MIGRATIONS

ROWS_AT_ONCE = 500
"""Of lines, in memory."""

RecordT = TypeVar("RecordT", bound=Struct)
ItemT = TypeVar("ItemT")


def migrate(tx: Transaction, lock: str) -> None:
    """Raises ConfigError when the tables are of a newer Baton."""
    if lock:
        tx.rows(lock)
    tx.run("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
    found = tx.rows("SELECT version FROM schema_version")
    version = to_int(found[0][0]) if found else 0
    if version > len(MIGRATIONS):
        reason = f"its tables have version {version}; this Baton knows {len(MIGRATIONS)}"
        raise ConfigError("jobs.database", "", reason, "use the newer Baton, or another database")
    for migration in MIGRATIONS[version:]:
        for statement in migration:
            tx.run(statement)
    if version < len(MIGRATIONS):
        write = "UPDATE schema_version SET version = ?" if found else "INSERT INTO schema_version VALUES (?)"
        tx.run(write, (len(MIGRATIONS),))


def select(tx: Transaction, kind: type[RecordT], tail: str, values: Sequence[Value] = ()) -> list[RecordT]:
    """Records of a type whose fields are columns."""
    fields = kind.__struct_fields__
    rows = tx.rows(f"SELECT {', '.join(fields)} FROM {tail}", values)
    return [msgspec.convert(dict(zip(fields, row, strict=True)), kind) for row in rows]


def only(found: list[RecordT], what: str, name: str) -> RecordT:
    if not found:
        raise RequestError(ErrorCode.NOT_FOUND, f"there is no {what} {name!r}", f"{what}_id")
    return found[0]


def page(
    tx: Transaction,
    kind: type[RecordT],
    table: str,
    wanted: Mapping[str, str],
    after: str | None,
    most: int,
    *,
    newest_first: bool,
) -> tuple[list[RecordT], bool]:
    """(those whose columns have these values, behind the one with the id `after`; whether there are more)."""
    sign, order = ("<", "DESC") if newest_first else (">", "ASC")
    where, values = " AND ".join(f"{column} = ?" for column in wanted), list(wanted.values())
    if after is not None:
        where += f" AND (created_at, id) {sign} (SELECT created_at, id FROM {table} WHERE {where} AND id = ?)"
        values += [*wanted.values(), after]
    tail = f"{table} WHERE {where} ORDER BY created_at {order}, id {order} LIMIT ?"
    found = select(tx, kind, tail, (*values, most + 1))
    return found[:most], len(found) > most


def chunks(tx: Transaction, file_id: str) -> Iterator[bytes]:
    for number in count():
        rows = tx.rows("SELECT bytes FROM chunks WHERE file_id = ? AND number = ?", (file_id, number))
        if not rows:
            return
        yield to_bytes(rows[0][0])


def grouped(items: Iterable[ItemT]) -> Iterator[list[ItemT]]:
    iterator = iter(items)
    return iter(lambda: list(islice(iterator, ROWS_AT_ONCE)), [])


def number(tx: Transaction, statement: str, values: Sequence[Value] = ()) -> int:
    return to_int(tx.rows(statement, values)[0][0])


def to_int(value: Value) -> int:
    assert isinstance(value, int), value
    return value


def to_bytes(value: Value) -> bytes:
    assert isinstance(value, bytes), value
    return value
