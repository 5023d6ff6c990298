"""Steps that serve nobody, before a worker serves: what the chunk predictor is fitted to.

They take the way of a request: pages are promised, a chunk is packed, computed, and everything is released. A chunk
behind a history takes that of a request whose beginning was handed over; nobody wrote those pages, and what is computed
from them is never cached. Times are those that the runner reports with each step, so this knows no clock.

Owns: the holders of its pages, each until its step is over, whatever happens: the pool is free again afterwards, and
its books are checked. Never: fails a worker. What cannot be measured is a value (`Unfit`), with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baton.common.engine.batch import Batch, ModelRunner, pack_batch
from baton.common.engine.chunk_predictor import ChunkPredictor, Sample, Unfit, fit
from baton.common.engine.chunks import chunk_row
from baton.common.kv.checker import InvariantChecker
from baton.common.kv.errors import OwnershipError
from baton.common.kv.pool import KvPool, Refused
from baton.common.kv.record import ReqKvInfo
from baton.common.messages import SamplingParams
from baton.common.units import page_floor

MOST_PROFILE_S = 2.0
"""Of computing. What has been measured by then must do."""
MOST_HISTORY = 2048
ROUNDS = 2
"""The faster counts: a step can be disturbed, but not helped; and the first of its size pays for what is made once."""
_ROW_KEY = 0


class _Nobody:
    """Holds what is measured with."""

    def __init__(self) -> None:
        self.kv: ReqKvInfo | None = None


def predictor_for(pool: KvPool, runner: ModelRunner, chunk_tokens: int, target_s: float) -> ChunkPredictor | Unfit:
    """Profiles steps of at most `chunk_tokens`, and predicts from them for steps of at most `target_s`."""
    try:
        samples = _profile(pool, runner, chunk_tokens)
    except OwnershipError:
        raise  # a bug, also when nobody is served yet
    except (RuntimeError, ValueError, MemoryError, OSError) as error:  # of the runner: torch raises RuntimeError
        return Unfit(f"a step failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    finally:
        InvariantChecker().check(pool, ())
    if isinstance(samples, Unfit):
        return samples
    cost = fit(samples)
    return cost if isinstance(cost, Unfit) else ChunkPredictor(cost, target_s)


def _profile(pool: KvPool, runner: ModelRunner, chunk_tokens: int) -> list[Sample] | Unfit:
    samples: list[Sample] = []
    spent_s = 0.0
    for history, tokens in _points(pool, chunk_tokens):
        best_s = float("inf")
        for _ in range(ROUNDS):
            took_s = _measure(pool, runner, history, tokens)
            if isinstance(took_s, Refused):
                return Unfit(f"the pool has no room for {history + tokens} tokens: {took_s.reason}")
            best_s = min(best_s, took_s)
            spent_s += took_s
        samples.append(Sample(history, tokens, best_s))
        if spent_s > MOST_PROFILE_S:
            break
    return samples


def _points(pool: KvPool, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """(history, tokens), cheap ones first. Histories are whole pages."""
    largest = max(1, min(chunk_tokens, pool.longest, pool.max_context_len) // 2)
    lengths = sorted({max(1, largest // share) for share in (16, 4, 1)})
    room = min(pool.longest, pool.max_context_len) - lengths[-1]
    history = page_floor(min(MOST_HISTORY, room), pool.page_size)
    for tokens in lengths:
        yield 0, tokens
        if history > 0:
            yield history, tokens


def _measure(pool: KvPool, runner: ModelRunner, history: int, tokens: int) -> float | Refused:
    """Seconds of one step of one chunk."""
    nobody, end = _Nobody(), history + tokens
    ids = np.arange(end, dtype=np.int32) % runner.vocab_size
    try:
        if history:
            promised = pool.pre_alloc(nobody, ids, history, 0)
            if isinstance(promised, Refused):
                return promised
            assert nobody.kv is not None
            pool.open_incoming(nobody.kv, 0)
            pool.commit_incoming(nobody.kv, history)
        promised = pool.pre_alloc(nobody, ids, end, history)
        if isinstance(promised, Refused):
            return promised
        assert nobody.kv is not None
        took_s = runner.collect(runner.launch(_batch(pool, nobody.kv, ids, end))).compute_s
        pool.commit_incoming(nobody.kv, end)
        return took_s
    finally:
        if nobody.kv is not None:
            pool.release_kv_cache(nobody, ids, is_insert=False)


def _batch(pool: KvPool, record: ReqKvInfo, ids: np.ndarray, end: int) -> Batch:
    row = chunk_row(pool, record, _ROW_KEY, ids, end, SamplingParams(max_tokens=1))
    return pack_batch([row], pool.page_size, pool.take_state_copies([record]))
