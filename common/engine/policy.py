"""Small decisions that several roles share, as pure functions: chunk boundaries, stop conditions, worker preference.

Owns no state. Never: allocates, sends, or looks at a clock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from baton.common.ids import WorkerId
from baton.common.messages import Grammar, SamplingParams
from baton.common.units import page_floor

AFFINITY_TOKENS = 64
"""Prompts that agree in this many tokens prefer the same worker, which then has their prefix cached."""


ExplainGrammar = Callable[[Grammar | None], str]
"""What is wrong with a grammar ("": nothing): the same at every call, and known by then (`guiding.Guides.explain`)."""


def chunk_end(done: int, total: int, budget: int, page_size: int, cut: int = 0) -> int:
    """Where the next chunk of a prompt ends: at `total`, or at a page boundary within the budget. Returns `done` when
    the budget does not reach the next boundary. No chunk goes beyond `cut` (page-aligned) that begins before it."""
    if done < cut < total:
        total = cut
    if total - done <= budget:
        return total
    return max(done, page_floor(done + budget, page_size))


def finish_reason(outputs: int, last_token: int, sampling: SamplingParams, prompt_tokens: int, max_context: int) -> str:
    """Why a sequence with `outputs` tokens, the last one `last_token`, is complete; "" when it goes on. A stop token is
    part of the answer. The newest token needs no KV, so a context is full only when the *sequence* has its length."""
    if outputs == 0:
        return ""
    if last_token in sampling.stop_token_ids:
        return "stop"
    if outputs >= sampling.max_tokens or prompt_tokens + outputs >= max_context:
        return "length"
    return ""


def foreign_token(tokens: npt.NDArray[np.int32], vocab_size: int) -> str:
    """Names the first of `tokens` that the model does not have, with its place; "" when it has all of them. Computing
    it would read outside of the embeddings: for whoever takes tokens from another process."""
    if not len(tokens) or (np.minimum.reduce(tokens) >= 0 and np.maximum.reduce(tokens) < vocab_size):
        return ""
    strange = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    return f"[{strange[0]}] = {tokens[strange[0]]}: not one of the model's {vocab_size} tokens"


def affinity_key(tokens: npt.NDArray[np.int32]) -> bytes:
    """What stays equal between prompts that share a long beginning."""
    return np.ascontiguousarray(tokens[:AFFINITY_TOKENS], dtype="<i4").tobytes()


@functools.lru_cache(maxsize=8192)
def _seed(worker: WorkerId) -> int:
    return xxhash.xxh3_64_intdigest(worker.encode())


def affinity_seeds(workers: Iterable[WorkerId]) -> npt.NDArray[np.uint64]:
    """What `affinity_weights` knows workers by."""
    return np.array([_seed(worker) for worker in workers], dtype=np.uint64)


def affinity_weights(key: bytes, seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Per worker; the least is preferred for `key`. When a worker leaves, only its own keys move (rendezvous
    hashing)."""
    mixed = (seeds ^ np.uint64(xxhash.xxh3_64_intdigest(key))) * np.uint64(0xBF58476D1CE4E5B9)
    weights: npt.NDArray[np.uint64] = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return weights


def rendezvous_order(key: bytes, workers: Iterable[WorkerId]) -> list[WorkerId]:
    """Workers by preference for `key`."""
    names = list(workers)
    weights = affinity_weights(key, affinity_seeds(names)).tolist()
    return [worker for _, worker in sorted(zip(weights, names, strict=True))]
