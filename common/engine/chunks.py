"""A chunk of a prompt as a row of a step, for both roles. Owns no state; plans nothing."""

from __future__ import annotations

from baton.common.engine.batch import I32, NO_TOKENS, BatchRow, History
from baton.common.kv.pool import KvPool
from baton.common.kv.record import ReqKvInfo
from baton.common.messages import SamplingParams


def chunk_row(
    pool: KvPool, record: ReqKvInfo, key: int, tokens: I32, end: int, sampling: SamplingParams | None
) -> BatchRow:
    """Tokens [committed, end) of what was promised to `record`, whose step before is over. With `sampling` they are the
    whole prompt: who has put out a token already goes on from that."""
    pool.prepare_chunk(record, end)
    reshapes = sampling is not None and sampling.reshapes
    return BatchRow(
        key=key,
        input_ids=tokens[record.kv_committed_len : end],
        kv_len=end,
        pages=pool.pages_for_row(record, end),
        sampling=sampling,
        swa_pages=pool.swa_pages_for_row(record, end),
        state_slot=record.state_slot,
        history=History(tokens, NO_TOKENS) if reshapes else None,
    )
