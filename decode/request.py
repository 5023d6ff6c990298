"""One request on a decode worker: its identity, its tokens, its KV record, where it stands.

Owns the output tokens until the gateway has them all. Never decides anything: that is `core.DecodeCore`'s.

    Queued -> Restoring -> Incoming ---+-> Running -> Done    Restoring: a tier below the pool writes what it has
     ^ |                  | |          |     |                Incoming: bytes of a prefill worker are on their way
     | +------------------+-+          |     |                Prefilling: computed on this worker
     | |                  +-Prefilling-+     |                Storing: retracted, its pages are copied to a tier first
     | +------------------+                  |                Stopping, Leaving: over, but somebody still uses the pages
     +----------- Storing <------------------+
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from baton.common.ids import NO_SESSION, HandoffId, HandoffKey, RequestId, SessionId, Stamp, WorkerId
from baton.common.kv.prefix.interface import I32
from baton.common.kv.record import ReqKvInfo
from baton.common.kv.tiers.api import JobId
from baton.common.messages import Output, SamplingParams, Submit, TokenLogprob, unpack_tokens
from baton.common.prompt_logprobs import PromptLogprobs
from baton.common.spans import NOT_TRACED, below, span_id_of
from baton.decode.times import Times
from baton.transfer.api import SinkCommitted, SinkFailed

THINKING_TAIL = 4  # so near to the end of a prompt its template begins the thinking
RequestKey = tuple[RequestId, int]
"""Request id and placement: a placement that was given up never meets its successor."""


@dataclass(frozen=True, slots=True)
class Queued:
    """Owns nothing."""

    since_s: float


@dataclass(frozen=True, slots=True)
class Restoring:
    """Its pages belong to this job of the tiers until that has ended."""

    job: JobId


@dataclass(frozen=True, slots=True)
class Incoming:
    """Its pages belong to the hand-off `key` until that has ended."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Its missing KV up to `until` is computed here, chunk by chunk."""

    until: int


@dataclass(frozen=True, slots=True)
class Running:
    """All KV but that of the newest token is there; one token per step."""


@dataclass(frozen=True, slots=True)
class Storing:
    """Retracted: its pages are read, and given back when that has ended."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """Over, but a hand-off may still write into its pages, or a tier use them: they are kept until that has ended."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Over, but the launched step uses its pages: they are given back when it is collected."""


@dataclass(frozen=True, slots=True)
class Done:
    """Owns nothing any more."""


State = Queued | Restoring | Incoming | Prefilling | Running | Storing | Stopping | Leaving | Done


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A `KvHolder`. `outputs` begins with what earlier placements produced (`inherited` of them)."""

    number: int  # this engine's name for it in a batch
    key: RequestKey
    gateway: Stamp
    prompt: I32
    outputs: list[int]
    sampling: SamplingParams
    deadline_s: float
    preferred: WorkerId | None
    state: State
    stop_ids: frozenset[int]
    limit: int  # most outputs: by request, or until the context is full
    reshapes: bool = False  # `sampling.reshapes`, asked in every step
    priority: int = 0
    times: Times = field(default_factory=Times)
    inherited: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of outputs[inherited:], when asked for
    scores: list[PromptLogprobs] = field(default_factory=list)  # of the prompt's tokens: whole with output 0
    kv: ReqKvInfo | None = None
    session_id: SessionId = NO_SESSION
    session_protected_len: int | None = None  # what the conversation shares with the tree, from its second turn on
    thinking_token_id: int = -1  # -1: nothing in an answer is kept out of the cache
    answered: bool = False  # it has an outcome, and that is its answer
    handoff: HandoffId | None = None  # one per stay: from admission until it is over or retracted
    attempt: int = 0  # the next one of this hand-off
    tried: set[Stamp] = field(default_factory=set)  # prefill workers that failed this stay
    tried_again: set[Stamp] = field(default_factory=set)  # of which the lane had failed, not they
    arrived_s: float = 0.0
    trace: str = NOT_TRACED  # of its stay here: what is told of it is under this
    trace_parent: str = ""
    final: Output | None = None  # the last message, once there is an outcome
    final_expires_s: float = 0.0
    final_over: bool = False  # acknowledged, or nobody is left to do so
    name: str = field(init=False)  # for people

    def __post_init__(self) -> None:
        self.name = f"{self.key[0]}#{self.key[1]}"

    @property
    def fill_tokens(self) -> I32:
        """Tokens whose KV is needed before the next decode step: all but the newest output."""
        return self.known_tokens[: self.fill_len]

    @property
    def fill_len(self) -> int:
        return len(self.prompt) + max(0, len(self.outputs) - 1)

    @property
    def known_tokens(self) -> I32:
        if not self.outputs:
            return self.prompt
        return np.concatenate((self.prompt, np.array(self.outputs, dtype=np.int32)))

    @property
    def effective_kv_committed_len(self) -> int:
        """How much of its valid KV other requests may find: all of it, or, when it is known to have been thinking, only
        the prompt's: the next turn of a conversation does not repeat the thoughts. What is the tree's stays there: one
        who comes back may find his own thoughts, where somebody has asked with them."""
        committed, protected = self.record.kv_committed_len, self.record.cache_protected_len
        return max(protected, min(committed, len(self.prompt))) if self._thought else committed

    @property
    def _thought(self) -> bool:
        """Templates may end a prompt with the token that begins the thinking; then the answer has none."""
        thinking = self.thinking_token_id
        return thinking >= 0 and (thinking in self.prompt[-THINKING_TAIL:] or thinking in self.outputs)

    @property
    def wants_first_token(self) -> bool:
        """Prefill ends by sampling output 0; a request that has outputs continues from the newest one instead."""
        return not self.outputs

    @property
    def scored(self) -> bool:
        """Whoever computes the prompt computes all of it, for its tokens' log probabilities."""
        return self.wants_first_token and self.sampling.scores_prompt

    @property
    def max_prefix(self) -> int:
        """So much of what is known already is of use. Without outputs the last prompt token is computed in any case:
        its logits choose the first output."""
        return 0 if self.scored else self.fill_len - self.wants_first_token

    @property
    def record(self) -> ReqKvInfo:
        assert self.kv is not None, f"{self.key} owns no KV"
        return self.kv

    @property
    def total_len(self) -> int:
        """Most tokens of KV it can ever hold."""
        return len(self.prompt) + self.limit

    def count_tokens(
        self,
        first: int,
        end: int,
        how: Literal["cached_tokens", "restored_tokens", "local_tokens", "transferred_tokens", "prefill_cached_tokens"],
    ) -> None:
        """Books prompt tokens [first, end) as cached, restored, local or transferred, each token once; or those of the
        transferred ones that the prefill worker had cached."""
        tokens = min(end, len(self.prompt)) - min(first, len(self.prompt))
        if not self.times.counted and tokens > 0:
            setattr(self.times, how, getattr(self.times, how) + tokens)

    def count_transfer(self, event: SinkCommitted | SinkFailed, start: int, landed_until: int) -> None:
        """A hand-off has ended; tokens [start, landed_until) are of use."""
        if landed_until > start:
            self.times.lane = event.lane
        self.times.transfer_bytes += event.nbytes
        self.count_tokens(start, landed_until, "transferred_tokens")

    def try_again(self, worker: WorkerId) -> None:
        """The lane to it broke. It has what it computed, and there may be another lane: once more, but only once."""
        again = {peer for peer in self.tried if peer.worker == worker} - self.tried_again
        self.tried -= again
        self.tried_again |= again

    def recount_cached(self, known: int) -> None:
        """What was counted beyond the first `known` tokens has to be had once more."""
        self.times.begin_count()
        self.count_tokens(0, known, "cached_tokens")


def new_request(number: int, gateway: Stamp, message: Submit, max_context_len: int, now: float) -> DecodeRequest:
    """As the gateway submitted it."""
    prompt, outputs = unpack_tokens(message.prompt), unpack_tokens(message.outputs).tolist()
    return DecodeRequest(
        number=number,
        key=(message.request_id, message.placement),
        gateway=gateway,
        prompt=prompt,
        outputs=outputs,
        sampling=message.sampling,
        deadline_s=now + message.ttl_s,
        preferred=message.prefill_worker,
        state=Queued(now),
        stop_ids=frozenset(message.sampling.stop_token_ids),
        reshapes=message.sampling.reshapes,
        priority=message.priority,
        limit=min(message.sampling.max_tokens, max_context_len - len(prompt)),
        inherited=len(outputs),
        session_id=SessionId(message.session_id),
        thinking_token_id=message.thinking_token_id,
        arrived_s=now,
        trace=below(message.trace, "decode_worker") if message.trace else NOT_TRACED,
        trace_parent=span_id_of(message.trace),
    )
