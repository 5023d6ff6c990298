"""The tables of the job store, as a list of migrations. Pure.

Owns: the schema, in the SQL that SQLite and PostgreSQL have in common (SQLite takes any name of a type). A migration
that has been released never changes: the next one is added behind it.

`lines` has the invariant that all rests on: one row per line of a batch, whose `result` is written once.
"""

from __future__ import annotations

_FIRST = (
    """
    CREATE TABLE batches (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, idempotency_key TEXT, endpoint TEXT NOT NULL,
        input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT NOT NULL, status TEXT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION NOT NULL,
        started_at DOUBLE PRECISION, ended_at DOUBLE PRECISION, errors TEXT,
        total BIGINT NOT NULL DEFAULT 0, completed BIGINT NOT NULL DEFAULT 0, failed BIGINT NOT NULL DEFAULT 0,
        input_tokens BIGINT NOT NULL DEFAULT 0, output_tokens BIGINT NOT NULL DEFAULT 0,
        output_file_id TEXT, error_file_id TEXT,
        UNIQUE (owner, idempotency_key)
    )
    """,
    "CREATE INDEX batches_by_age ON batches (owner, created_at, id)",
    "CREATE INDEX open_batches ON batches (created_at) WHERE ended_at IS NULL",
    """
    CREATE TABLE files (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL, nbytes BIGINT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL, batch_id TEXT REFERENCES batches (id) ON DELETE CASCADE, result TEXT
    )
    """,
    "CREATE INDEX files_by_age ON files (owner, created_at, id)",
    "CREATE INDEX files_by_batch ON files (batch_id)",
    """
    CREATE TABLE chunks (
        file_id TEXT NOT NULL REFERENCES files (id) ON DELETE CASCADE, number BIGINT NOT NULL, bytes BYTEA NOT NULL,
        PRIMARY KEY (file_id, number)
    )
    """,
    # `request` until there is a result, `answer` since. `free_at`: whoever comes then may claim it.
    """
    CREATE TABLE lines (
        batch_id TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE, line BIGINT NOT NULL,
        custom_id TEXT NOT NULL, request BYTEA, runner TEXT, free_at DOUBLE PRECISION NOT NULL DEFAULT 0,
        attempts BIGINT NOT NULL DEFAULT 0, result TEXT, answer BYTEA,
        PRIMARY KEY (batch_id, line), UNIQUE (batch_id, custom_id)
    )
    """,
    "CREATE INDEX waiting_lines ON lines (batch_id, line) WHERE result IS NULL",
)

_SECOND = (
    # What a repeated key is compared with. `input_digest` outlives the file.
    "ALTER TABLE files ADD COLUMN idempotency_key TEXT",
    "ALTER TABLE files ADD COLUMN digest TEXT",
    "CREATE UNIQUE INDEX files_by_key ON files (owner, idempotency_key)",
    "ALTER TABLE batches ADD COLUMN input_digest TEXT",
    # `place`: which outcome of its batch this one is, from 1, without gaps: a batch's events in their order.
    "ALTER TABLE lines ADD COLUMN place BIGINT",
    "ALTER TABLE lines ADD COLUMN ended_at DOUBLE PRECISION",
    "CREATE INDEX ended_lines ON lines (batch_id, place) WHERE place IS NOT NULL",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_FIRST, _SECOND)
"""Version n is what the first n of them make."""
