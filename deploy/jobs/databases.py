"""A relational database as the job store uses it: SQLite in a file, or a PostgreSQL server.

Owns: connections, transactions, the differences between the two dialects, and what "not there just now" looks like.
Never: knows a table. Used from one thread; several processes may use one database at once.

Statements have `?` where a value comes, and no other `?` or `%`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baton.common.config import POSTGRES
from baton.common.errors import ConfigError, ErrorCode, RequestError

if TYPE_CHECKING:
    import psycopg

BUSY_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5
UNAVAILABLE_RETRY_AFTER_S = 1.0

Value = str | bytes | int | float | None
Row = tuple[Value, ...]


class Transaction(Protocol):
    """Everything in it happens, or nothing of it."""

    def rows(self, statement: str, values: Sequence[Value] = ()) -> list[Row]:
        """What it returns."""

    def run(self, statement: str, values: Sequence[Value] = ()) -> int:
        """How many rows it wrote."""

    def run_each(self, statement: str, rows: Iterable[Sequence[Value]]) -> None:
        """Once for each."""


class Database(Protocol):
    """`migration_lock`: a statement that keeps other processes from migrating at once. `for_update`: at the end of a
    SELECT whose rows nobody else shall write until the transaction ends; `skip_locked`: those that somebody has locked
    are left out."""

    migration_lock: str
    for_update: str
    skip_locked: str

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Raises RequestError STORE_UNAVAILABLE when the database is not there, before or in it."""

    def close(self) -> None: ...


def open_database(place: str) -> Database:
    """A file's path, or postgresql://... Raises ConfigError for what can never work."""
    return PostgresDatabase(place) if place.startswith(POSTGRES) else SqliteDatabase(Path(place))


def _unavailable(error: Exception) -> RequestError:
    reason = f"the job store is not there: {str(error).strip() or type(error).__name__}"
    return RequestError(ErrorCode.STORE_UNAVAILABLE, reason, None, UNAVAILABLE_RETRY_AFTER_S)


class SqliteDatabase:
    """On a local disk: SQLite's write-ahead log does not work on a network file system."""

    migration_lock = ""
    for_update = ""  # BEGIN IMMEDIATE has locked all of it
    skip_locked = ""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._connection = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")  # what was acknowledged survives a loss of power
            self._connection.execute("PRAGMA foreign_keys=ON")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError("jobs.database", str(path), f"cannot be opened: {error}") from error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield _SqliteTransaction(self._connection)
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
        except sqlite3.OperationalError as error:  # locked for too long, disk full, gone
            raise _unavailable(error) from error

    def close(self) -> None:
        self._connection.close()


class _SqliteTransaction:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, statement: str, values: Sequence[Value] = ()) -> list[Row]:
        return self._connection.execute(statement, values).fetchall()

    def run(self, statement: str, values: Sequence[Value] = ()) -> int:
        return self._connection.execute(statement, values).rowcount

    def run_each(self, statement: str, rows: Iterable[Sequence[Value]]) -> None:
        self._connection.executemany(statement, rows)


class PostgresDatabase:
    """Connects when it is used, and again after it was lost."""

    migration_lock = "SELECT pg_advisory_xact_lock(623784512)"
    for_update = " FOR UPDATE"
    skip_locked = " FOR UPDATE SKIP LOCKED"

    def __init__(self, url: str) -> None:
        try:
            import psycopg
            from psycopg.conninfo import conninfo_to_dict
        except ImportError as error:
            hint = "pip install 'baton-pd[postgres]'"
            raise ConfigError(
                "jobs.database", "postgresql://...", f"needs the package psycopg: {error}", hint
            ) from error
        try:
            conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:  # the URL may hold a password: it is not shown
            raise ConfigError("jobs.database", "postgresql://...", str(error).strip()) from error
        self._psycopg = psycopg
        self._url = url
        self._connection: psycopg.Connection | None = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        errors = self._psycopg
        try:
            if self._connection is None:
                self._connection = errors.connect(self._url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S)
            with self._connection.transaction():
                yield _PostgresTransaction(self._connection)
        except errors.DataError as error:  # a NUL in a name, say, which SQLite would have looked for
            raise RequestError(ErrorCode.INVALID_REQUEST, f"the job store cannot keep that: {error}") from error
        except (errors.OperationalError, errors.InterfaceError) as error:
            self.close()
            raise _unavailable(error) from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _PostgresTransaction:
    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def rows(self, statement: str, values: Sequence[Value] = ()) -> list[Row]:
        found: list[Row] = self._connection.execute(_as_postgres(statement), values).fetchall()
        return found

    def run(self, statement: str, values: Sequence[Value] = ()) -> int:
        written: int = self._connection.execute(_as_postgres(statement), values).rowcount
        return written

    def run_each(self, statement: str, rows: Iterable[Sequence[Value]]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(_as_postgres(statement), rows)


@lru_cache
def _as_postgres(statement: str) -> bytes:
    return statement.replace("?", "%s").encode()
