"""What lines come to: written once, numbered in their order, and made the files of their batch.

Owns: that a line has one outcome, that a batch's counts agree with its lines, and what its end is. Never: a
transaction, or the lock on the batch's row, which its callers hold (`store.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count

import msgspec

from baton.deploy.jobs.databases import Transaction, Value
from baton.deploy.jobs.lines import unanswered
from baton.deploy.jobs.records import BatchRecord, Outcome, Result, Status
from baton.deploy.jobs.tables import ROWS_AT_ONCE, number, to_bytes, to_int

_WHY_ENDED: Mapping[Status, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered"),
    "expired": ("batch_expired", "this line could not be answered before the completion window expired"),
}

_WRITE_OUTCOME = (
    "UPDATE lines SET result = ?, answer = ?, place = ?, ended_at = ?, request = NULL, runner = NULL"
    " WHERE batch_id = ? AND line = ? AND result IS NULL"
)


def write(tx: Transaction, batch: BatchRecord, outcomes: Iterable[Outcome], now_s: float) -> BatchRecord:
    """The outcomes of lines that have none yet, and the counts; the batch with them."""
    written: list[Outcome] = []
    for one in outcomes:
        place = batch.completed + batch.failed + len(written) + 1
        if tx.run(_WRITE_OUTCOME, _outcome_values(one, place, now_s)):
            written.append(one)
    completed = sum(outcome.result == "completed" for outcome in written)
    counted = msgspec.structs.replace(
        batch,
        completed=batch.completed + completed,
        failed=batch.failed + len(written) - completed,
        input_tokens=batch.input_tokens + sum(outcome.input_tokens for outcome in written),
        output_tokens=batch.output_tokens + sum(outcome.output_tokens for outcome in written),
    )
    tx.run(
        "UPDATE batches SET completed = ?, failed = ?, input_tokens = ?, output_tokens = ? WHERE id = ?",
        (counted.completed, counted.failed, counted.input_tokens, counted.output_tokens, batch.id),
    )
    return counted


def end_early(tx: Transaction, batch: BatchRecord, status: Status, now_s: float) -> None:
    """Its lines get their last outcome all together: nobody else writes one while the batch is locked."""
    code, message = _WHY_ENDED[status]
    place = count(batch.completed + batch.failed + 1)
    while rows := tx.rows(
        "SELECT line, custom_id FROM lines WHERE batch_id = ? AND result IS NULL ORDER BY line LIMIT ?",
        (batch.id, ROWS_AT_ONCE),
    ):
        left = [unanswered(batch.id, to_int(line), str(custom_id), code, message) for line, custom_id in rows]
        tx.run_each(_WRITE_OUTCOME, [_outcome_values(one, next(place), now_s) for one in left])
        tx.run("UPDATE batches SET failed = failed + ? WHERE id = ?", (len(left), batch.id))
    end(tx, batch, status, now_s)


def end(tx: Transaction, batch: BatchRecord, status: Status, now_s: float) -> None:
    tx.run("UPDATE batches SET status = ?, ended_at = ? WHERE id = ?", (status, now_s, batch.id))
    _add_outcomes(tx, batch, "completed", "output", now_s)
    _add_outcomes(tx, batch, "failed", "error", now_s)


def _add_outcomes(tx: Transaction, batch: BatchRecord, result: Result, name: str, now_s: float) -> None:
    nbytes = number(
        tx,
        "SELECT CAST(COALESCE(SUM(LENGTH(answer) + 1), 0) AS BIGINT) FROM lines WHERE batch_id = ? AND result = ?",
        (batch.id, result),
    )
    if not nbytes:
        return
    file_id = f"file-{batch.id.removeprefix('batch_')}-{name}"
    tx.run(
        "INSERT INTO files (id, owner, purpose, filename, nbytes, created_at, batch_id, result)"
        " VALUES (?, ?, 'batch_output', ?, ?, ?, ?, ?)",
        (file_id, batch.owner, f"{batch.id}_{name}.jsonl", nbytes, now_s, batch.id, result),
    )
    tx.run(f"UPDATE batches SET {name}_file_id = ? WHERE id = ?", (file_id, batch.id))


def answers(tx: Transaction, batch_id: str, result: Result, after: int, most: int) -> list[tuple[int, bytes]]:
    rows = tx.rows(
        "SELECT line, answer FROM lines WHERE batch_id = ? AND result = ? AND line > ? AND answer IS NOT NULL"
        " ORDER BY line LIMIT ?",
        (batch_id, result, after, most),
    )
    return [(to_int(line), to_bytes(answer)) for line, answer in rows]


def _outcome_values(outcome: Outcome, place: int, now_s: float) -> tuple[Value, ...]:
    return outcome.result, outcome.answer, place, now_s, outcome.batch_id, outcome.line
