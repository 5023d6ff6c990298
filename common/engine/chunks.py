"""A chunk of a prompt as a row of a step, and what is left of a step for more of them; for both roles. Never: decides
whose turn it is."""

from __future__ import annotations

from baton.common.engine.batch import I32, NO_TOKENS, BatchRow, History, Scoring
from baton.common.engine.chunk_predictor import StepRoom
from baton.common.engine.policy import chunk_end
from baton.common.kv.pool import KvPool
from baton.common.kv.record import ReqKvInfo
from baton.common.messages import SamplingParams

SCORED_TOKENS_PER_STEP = 256
"""Of prompts whose own tokens are scored: each has logits as wide as the vocabulary, where else a chunk has one."""


class ChunkBudget:
    """Tokens that a step may still compute of prompts; with `room`, also the time that it may still take."""

    def __init__(self, pool: KvPool, tokens: int, room: StepRoom | None = None) -> None:
        self._pool = pool
        self._tokens = max(tokens, pool.page_size)
        self._scored = max(SCORED_TOKENS_PER_STEP, pool.page_size)
        self._room = room
        self._begun = False

    def take(self, done: int, total: int, *, scored: bool) -> int:
        """Where the next chunk of a prompt ends; at `done` when no chunk fits any more. The first of a step fits in any
        case, if only to the next page boundary."""
        most = min(self._tokens, self._scored) if scored else self._tokens
        if self._room is not None:
            most = min(most, max(self._room.most_tokens(done), 0 if self._begun else self._pool.page_size))
        end = chunk_end(done, total, most, self._pool.page_size, self._pool.checkpoint_at(total))
        self._tokens -= end - done
        self._scored -= (end - done) * scored
        if self._room is not None:
            self._room.take(done, end)
        self._begun = True
        return end


def chunk_row(
    pool: KvPool,
    record: ReqKvInfo,
    key: int,
    tokens: I32,
    end: int,
    sampling: SamplingParams | None,
    scored_top: int = -1,
) -> BatchRow:
    """Tokens [committed, end) of what was promised to `record`, whose step before is over. With `sampling` they are the
    whole prompt: who has put out a token already goes on from that. With `scored_top` >= 0 each is asked about the one
    behind it, and so many alternatives."""
    pool.prepare_chunk(record, end)
    begin = record.kv_committed_len
    reshapes = sampling is not None and sampling.reshapes
    return BatchRow(
        key=key,
        input_ids=tokens[begin:end],
        kv_len=end,
        pages=pool.pages_for_row(record, end),
        sampling=sampling,
        swa_pages=pool.swa_pages_for_row(record, end),
        state_slot=record.state_slot,
        history=History(tokens, NO_TOKENS) if reshapes else None,
        scoring=Scoring(tokens[begin + 1 : end + 1], scored_top) if scored_top >= 0 else None,
    )
