"""Files, batches and the lines of batches, kept in a database: what is told to a client is kept, whoever dies.

Owns: who may see what, and who may answer which line. With `outcomes`, which has what lines come to, it has every
statement about the tables of `schema.py`. Never: time (handed in), threads, or what a request is.

Each verb is one transaction. Who writes to a batch's lines and counts locks the batch's row first; who only claims or
renews lines locks lines alone, in their order: so nobody waits for each other in a circle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from baton.common.errors import ErrorCode, RequestError
from baton.deploy.jobs.databases import Database, Row, Transaction
from baton.deploy.jobs.lines import find_faults, numbered, read_line
from baton.deploy.jobs.outcomes import answers, end, end_early, write
from baton.deploy.jobs.records import (
    OPEN,
    BatchRecord,
    ClaimedLine,
    FileRecord,
    Invalid,
    LineEnd,
    LineKey,
    Outcome,
)
from baton.deploy.jobs.tables import (
    ROWS_AT_ONCE,
    chunks,
    grouped,
    migrate,
    number,
    only,
    page,
    select,
    to_bytes,
    to_int,
)


class JobStore:
    """One process's access to it, from one thread. Raises RequestError: NOT_FOUND for what is not there or somebody
    else's, STORE_UNAVAILABLE while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._migrated = False

    def migrate(self) -> None:
        """Brings the tables to this version; the first verb does it, too. Raises ConfigError when they are of a newer
        one."""
        if not self._migrated:
            with self._database.transaction() as tx:
                migrate(tx, self._database.migration_lock)
            self._migrated = True

    def close(self) -> None:
        self._database.close()

    # -------------------------------------------------------------------------------------------- files

    def add_file(
        self,
        owner: str,
        purpose: str,
        filename: str,
        parts: Iterable[bytes],
        now_s: float,
        max_stored_bytes: int,
        idempotency_key: str | None = None,
    ) -> FileRecord:
        """All of it, or nothing. With a key that a file of these bytes was given before: that file."""
        file_id, nbytes, digest = f"file-{secrets.token_hex(12)}", 0, hashlib.sha256()
        with self._transaction() as tx:
            stored = number(tx, "SELECT CAST(COALESCE(SUM(nbytes), 0) AS BIGINT) FROM files")
            created = tx.run(
                "INSERT INTO files (id, owner, purpose, filename, nbytes, created_at, idempotency_key)"
                " VALUES (?, ?, ?, ?, 0, ?, ?) ON CONFLICT DO NOTHING",
                (file_id, owner, purpose, filename, now_s, idempotency_key),
            )
            if not created:
                where = "files WHERE owner = ? AND idempotency_key = ?"
                first = only(select(tx, FileRecord, where, (owner, idempotency_key)), "file", file_id)
                for part in parts:
                    digest.update(part)
                if (first.purpose, first.digest) != (purpose, digest.hexdigest()):
                    raise _mismatch(f"{first.id}, a file with other bytes")
                return first
            for place, part in enumerate(parts):
                digest.update(part)
                nbytes += len(part)
                if stored + nbytes > max_stored_bytes:
                    reason = f"the job store is full ({max_stored_bytes} bytes, jobs.max_stored_bytes): delete files"
                    raise RequestError(ErrorCode.OVERLOADED, reason, "file")
                tx.run("INSERT INTO chunks VALUES (?, ?, ?)", (file_id, place, part))
            tx.run("UPDATE files SET nbytes = ?, digest = ? WHERE id = ?", (nbytes, digest.hexdigest(), file_id))
        return FileRecord(
            id=file_id,
            owner=owner,
            purpose=purpose,
            filename=filename,
            nbytes=nbytes,
            created_at=now_s,
            digest=digest.hexdigest(),
        )

    def file(self, owner: str, file_id: str) -> FileRecord:
        with self._transaction() as tx:
            return only(select(tx, FileRecord, "files WHERE owner = ? AND id = ?", (owner, file_id)), "file", file_id)

    def files(
        self, owner: str, purpose: str | None, after: str | None, most: int, *, newest_first: bool
    ) -> tuple[list[FileRecord], bool]:
        """(a page of them, whether there are more)."""
        wanted = {"owner": owner} if purpose is None else {"owner": owner, "purpose": purpose}
        with self._transaction() as tx:
            return page(tx, FileRecord, "files", wanted, after, most, newest_first=newest_first)

    def content(self, file: FileRecord, after: int) -> tuple[bytes, int | None]:
        """(some of its bytes, where the next ones are). Begin after -1; a place of None: there are no more. A file of
        outcomes is made from the lines as they stand."""
        with self._transaction() as tx:
            if file.batch_id is None:
                rows = tx.rows(
                    "SELECT number, bytes FROM chunks WHERE file_id = ? AND number > ? ORDER BY number LIMIT 1",
                    (file.id, after),
                )
                return (bytes(to_bytes(rows[0][1])), to_int(rows[0][0])) if rows else (b"", None)
            lines = answers(tx, file.batch_id, file.result or "completed", after, ROWS_AT_ONCE)
        return b"".join(answer + b"\n" for _, answer in lines), lines[-1][0] if lines else None

    def delete_file(self, owner: str, file_id: str) -> None:
        """Its bytes are gone, too. An output file's lines keep that they had an answer, and lose it."""
        file = self.file(owner, file_id)
        with self._transaction() as tx:
            if file.batch_id is not None:
                tx.run("UPDATE lines SET answer = NULL WHERE batch_id = ? AND result = ?", (file.batch_id, file.result))
            tx.run("DELETE FROM files WHERE id = ?", (file_id,))

    # ------------------------------------------------------------------------------------------ batches

    def create_batch(
        self,
        owner: str,
        endpoint: str,
        input_file_id: str,
        window: tuple[str, float],
        metadata: Mapping[str, str],
        now_s: float,
        idempotency_key: str | None,
    ) -> BatchRecord:
        """The batch; or that which was created with the same key, for the same, before. `window`: how long it may take,
        in the client's words and in seconds."""
        file = self.file(owner, input_file_id)
        if file.purpose != "batch":
            reason = f"the purpose of {file.id} is {file.purpose!r}; a batch is made of a file with purpose 'batch'"
            raise RequestError(ErrorCode.INVALID_REQUEST, reason, "input_file_id")
        batch = BatchRecord(
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window[0],
            metadata=json.dumps(dict(metadata)),
            status="validating",
            created_at=now_s,
            expires_at=now_s + window[1],
            input_digest=file.digest,
        )
        fields = msgspec.structs.asdict(batch) | {"idempotency_key": idempotency_key}
        columns, marks = ", ".join(fields), ", ".join("?" * len(fields))
        with self._transaction() as tx:
            created = tx.run(
                f"INSERT INTO batches ({columns}) VALUES ({marks}) ON CONFLICT DO NOTHING", tuple(fields.values())
            )
            if created:
                return batch
            where = "batches WHERE owner = ? AND idempotency_key = ?"
            first = only(select(tx, BatchRecord, where, (batch.owner, idempotency_key)), "batch", batch.id)
            if _asked(first) != _asked(batch):
                raise _mismatch(f"{first.id}, which has other lines, or another endpoint, window or metadata")
            return first

    def batch(self, owner: str, batch_id: str) -> BatchRecord:
        with self._transaction() as tx:
            return self._batch(tx, owner, batch_id)

    def batches(self, owner: str, after: str | None, most: int) -> tuple[list[BatchRecord], bool]:
        """(a page of them, newest first; whether there are more)."""
        with self._transaction() as tx:
            return page(tx, BatchRecord, "batches", {"owner": owner}, after, most, newest_first=True)

    def failures(self, owner: str, batch_id: str, after: int, most: int) -> list[tuple[int, bytes]]:
        """(line, what the error file says or will say of it), so far."""
        with self._transaction() as tx:
            return answers(tx, self._batch(tx, owner, batch_id).id, "failed", after, most)

    def events(self, owner: str, batch_id: str, after: int, most: int) -> tuple[BatchRecord, list[LineEnd]]:
        """(how it stands, what became of its lines behind the place `after`, in the order in which they ended). One
        that has ended has no more events than these when they are fewer than `most`."""
        with self._transaction() as tx:
            batch = self._batch(tx, owner, batch_id)  # first: who sees its end sees the ends of all lines
            where = "lines WHERE batch_id = ? AND place > ? ORDER BY place LIMIT ?"
            return batch, select(tx, LineEnd, where, (batch.id, after, most))

    def cancel(self, owner: str, batch_id: str, now_s: float) -> BatchRecord:
        """At once: what is being answered counts no more. Cancelling again changes nothing."""
        with self._transaction() as tx:
            batch = self._batch(tx, owner, batch_id, self._database.for_update)
            if batch.status in OPEN:
                end_early(tx, batch, "cancelled", now_s)
            elif batch.status != "cancelled":
                reason = f"{batch_id} is {batch.status} already: it cannot be cancelled"
                raise RequestError(ErrorCode.CONFLICT, reason, "batch_id")
            return self._batch(tx, owner, batch_id)

    # ------------------------------------------------------------------------------------ for the runner

    def tend(self, now_s: float, max_lines: int, max_line_bytes: int) -> None:
        """Reads the files of new batches, and ends those whose time is over."""
        with self._transaction() as tx:
            waiting = select(tx, BatchRecord, "batches WHERE ended_at IS NULL ORDER BY created_at")
        for one in waiting:
            if one.status == "in_progress" and one.expires_at > now_s:
                continue
            with self._transaction() as tx:
                batch = self._batch(tx, one.owner, one.id, self._database.for_update)  # as it stands now
                if batch.status in OPEN and batch.expires_at <= now_s:
                    end_early(tx, batch, "expired", now_s)
                elif batch.status == "validating":
                    self._begin(tx, batch, now_s, max_lines, max_line_bytes)

    def claim(
        self, runner: str, most: int, now_s: float, lease_until_s: float, own: Mapping[str, int]
    ) -> list[ClaimedLine]:
        """Lines that nobody has, evenly of all batches; those of which `own` says that the runner has fewer come
        first. They are its own until the lease ends, or for longer if it renews them."""
        claimed: list[ClaimedLine] = []
        with self._transaction() as tx:
            batches = select(tx, BatchRecord, "batches WHERE status = 'in_progress' ORDER BY created_at")
            batches.sort(key=lambda batch: own.get(batch.id, 0))
            for index, batch in enumerate(batches):
                if len(claimed) == most:
                    break
                share = -(-(most - len(claimed)) // (len(batches) - index))
                rows = tx.rows(
                    "SELECT line, custom_id, request, attempts FROM lines WHERE batch_id = ? AND result IS NULL"
                    f" AND free_at <= ? ORDER BY line LIMIT ?{self._database.skip_locked}",
                    (batch.id, now_s, share),
                )
                claimed += [_claimed(batch, row) for row in rows]
            tx.run_each(
                "UPDATE lines SET runner = ?, free_at = ?, attempts = attempts + 1 WHERE batch_id = ? AND line = ?",
                [(runner, lease_until_s, *one.key) for one in sorted(claimed, key=lambda one: one.key)],
            )
        return claimed

    def renew(self, runner: str, keys: Iterable[LineKey], lease_until_s: float) -> set[LineKey]:
        """Those that are still the runner's: not ended with their batch, not taken over."""
        statement = "UPDATE lines SET free_at = ? WHERE batch_id = ? AND line = ? AND runner = ? AND result IS NULL"
        with self._transaction() as tx:
            return {key for key in sorted(keys) if tx.run(statement, (lease_until_s, *key, runner))}

    def release(self, runner: str, keys: Iterable[LineKey], free_at_s: float) -> None:
        """Gives lines back, to be claimed from then on."""
        with self._transaction() as tx:
            tx.run_each(
                "UPDATE lines SET runner = NULL, free_at = ?"
                " WHERE batch_id = ? AND line = ? AND runner = ? AND result IS NULL",
                [(free_at_s, *key, runner) for key in sorted(keys)],
            )

    def record(self, outcomes: Sequence[Outcome], now_s: float) -> None:
        """What lines came to, by whomever. A line that has an outcome keeps it; a batch whose last one this is ends."""
        ordered = sorted(outcomes, key=lambda outcome: (outcome.batch_id, outcome.line))
        for batch_id, group in groupby(ordered, lambda outcome: outcome.batch_id):
            with self._transaction() as tx:
                found = select(tx, BatchRecord, f"batches WHERE id = ?{self._database.for_update}", (batch_id,))
                if found and found[0].status == "in_progress":
                    batch = write(tx, found[0], group, now_s)
                    if batch.completed + batch.failed == batch.total:
                        end(tx, batch, "completed", now_s)

    def sweep(self, before_s: float) -> None:
        """Forgets batches that ended, and files that were uploaded, before then."""
        with self._transaction() as tx:
            tx.run("DELETE FROM batches WHERE ended_at < ?", (before_s,))
            tx.run(
                "DELETE FROM files WHERE created_at < ? AND batch_id IS NULL"
                " AND id NOT IN (SELECT input_file_id FROM batches WHERE ended_at IS NULL)",
                (before_s,),
            )

    # ------------------------------------------------------------------------------------------- parts

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Transaction]:
        self.migrate()
        with self._database.transaction() as tx:
            yield tx

    def _batch(self, tx: Transaction, owner: str, batch_id: str, lock: str = "") -> BatchRecord:
        where = f"batches WHERE owner = ? AND id = ?{lock}"
        return only(select(tx, BatchRecord, where, (owner, batch_id)), "batch", batch_id)

    def _begin(self, tx: Transaction, batch: BatchRecord, now_s: float, max_lines: int, max_line_bytes: int) -> None:
        file_id = batch.input_file_id
        if tx.rows("SELECT id FROM files WHERE id = ?", (file_id,)):
            lines = numbered(chunks(tx, file_id), max_line_bytes)
            total, faults = find_faults(lines, batch.endpoint, max_lines, max_line_bytes)
        else:
            total, faults = 0, [Invalid(code="input_file_gone", message=f"{file_id} has been deleted")]
        if faults:
            tx.run(
                "UPDATE batches SET status = 'failed', ended_at = ?, errors = ? WHERE id = ?",
                (now_s, msgspec.json.encode(faults).decode(), batch.id),
            )
            return
        for group in grouped(numbered(chunks(tx, file_id), max_line_bytes)):
            parsed = [(at, read_line(line)) for at, line in group]
            tx.run_each(
                "INSERT INTO lines (batch_id, line, custom_id, request) VALUES (?, ?, ?, ?)",
                [(batch.id, at, line.custom_id, bytes(line.body)) for at, line in parsed],
            )
        tx.run(
            "UPDATE batches SET status = 'in_progress', started_at = ?, total = ? WHERE id = ?",
            (now_s, total, batch.id),
        )


def _claimed(batch: BatchRecord, row: Row) -> ClaimedLine:
    line, custom_id, request, attempts = row
    return ClaimedLine(
        batch_id=batch.id,
        line=to_int(line),
        custom_id=str(custom_id),
        request=to_bytes(request),
        attempts=to_int(attempts) + 1,
        endpoint=batch.endpoint,
        owner=batch.owner,
    )


def _asked(batch: BatchRecord) -> tuple[str, str, str, str]:
    """What a client wants of it. The same bytes in another file are the same lines."""
    metadata = json.dumps(json.loads(batch.metadata), sort_keys=True)
    return batch.endpoint, batch.completion_window, metadata, batch.input_digest or batch.input_file_id


def _mismatch(first: str) -> RequestError:
    reason = f"this key was given to {first}: a repeat has the same body, and other work another key"
    return RequestError(ErrorCode.IDEMPOTENCY_MISMATCH, reason, "Idempotency-Key")
