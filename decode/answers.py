"""How an answer grows, and how a request ends: with one outcome, and its pages let go of as soon as nobody uses them.

Owns nothing: the requests, and who has their pages, are in `Parts`. Never: decides who computes what, or where missing
KV comes from.
"""

from __future__ import annotations

from typing import assert_never

from baton.common.engine.batch import NO_TOKEN
from baton.common.engine.policy import finish_reason
from baton.common.errors import ErrorCode
from baton.common.messages import Failure, Output, TokenLogprob, pack_tokens
from baton.decode.parts import Parts
from baton.decode.request import (
    DecodeRequest,
    Done,
    Incoming,
    Leaving,
    Prefilling,
    Queued,
    Restoring,
    Running,
    Stopping,
    Storing,
)
from baton.decode.request_spans import request_spans
from baton.decode.steps import RUNNING
from baton.transfer.api import AbortSink

LEAVING = Leaving()
_STOPPING = Stopping()


class Answers:
    def __init__(self, parts: Parts, max_context_len: int) -> None:
        self._parts = parts
        self._max_context_len = max_context_len
        self._outbox = parts.outbox

    # ------------------------------------------------------------------------------------------- growing

    def run(
        self,
        request: DecodeRequest,
        now: float,
        first_token: int = NO_TOKEN,
        logprob: TokenLogprob | None = None,
        landed_s: float | None = None,
    ) -> None:
        """All KV is there, since `landed_s` unless since now. The prompt is shared with others from here on."""
        self._parts.caching.share_prompt(request)
        request.state = RUNNING
        request.times.runs(now, now if landed_s is None else min(now, landed_s))
        self._parts.steps.join(request)
        if request.wants_first_token:
            wanting = first_token == NO_TOKEN and request.sampling.grammar is None
            assert not wanting, f"{request.key} was filled without its first token"
            self.append(request, first_token, logprob, now)

    def append(
        self, request: DecodeRequest, token: int, logprob: TokenLogprob | None, now: float, packed: bytes | None = None
    ) -> None:
        """One more output token: tell the gateway, or finish."""
        if token == NO_TOKEN:
            self.fail(request, ErrorCode.INVALID_REQUEST, "the grammar outgrew what one step may compute", now)
            return
        request.outputs.append(token)
        if logprob is not None:
            request.logprobs.append(logprob)
        if token in request.stop_ids or len(request.outputs) >= request.limit:
            ended = self.finish_if_complete(request, now, len(request.outputs) - 1)
            assert ended, f"{request.key} goes on behind its last token"
        else:
            self._outbox.token(request, pack_tokens((token,)) if packed is None else packed)

    # ------------------------------------------------------------------------------------------- outcomes

    def finish_if_complete(self, request: DecodeRequest, now: float, first_index: int) -> bool:
        """The answer is complete, when it is; its KV stays, with the session or in the cache. The gateway has the
        outputs below `first_index`."""
        last, outputs = request.outputs[-1] if request.outputs else -1, len(request.outputs)
        reason = finish_reason(outputs, last, request.sampling, len(request.prompt), self._max_context_len)
        if reason:
            request.answered = True
            self._conclude(request, reason, None, now, first_index)
        return bool(reason)

    def fail(self, request: DecodeRequest, code: ErrorCode, reason: str, now: float) -> None:
        self._conclude(request, "", Failure(code=code, reason=reason), now, len(request.outputs))

    def _conclude(
        self, request: DecodeRequest, reason: str, failure: Failure | None, now: float, first_index: int
    ) -> None:
        """Decides the one outcome, tells it, and lets go of the KV as soon as nobody else uses it."""
        assert request.final is None, f"{request.key} has an outcome already"
        self._parts.deadlines.drop(request.key)
        final = Output(
            request_id=request.key[0],
            placement=request.key[1],
            first_index=0,
            finish_reason=reason,
            failure=failure,
            timeline=request.times.timeline(now, self._parts.stamp.worker),
        )
        self._let_go(request, failure, now)
        self._outbox.finish(request, final, first_index, now)
        if request.trace:
            self._parts.told += request_spans(request, final, now)

    def _let_go(self, request: DecodeRequest, failure: Failure | None, now: float) -> None:
        parts = self._parts
        match request.state:
            case Queued():
                parts.waiting.discard(request)
                self.done(request, now)
            case Incoming(key):
                assert failure is not None
                parts.commands.append(AbortSink(key, failure))
                request.state = _STOPPING
            case Restoring(job):
                parts.commands.append(parts.restores.abort(job))
                request.state = _STOPPING
            case Storing():
                request.state = _STOPPING
            case Prefilling() | Running():
                parts.steps.remove(request)
                if parts.steps.uses(request):
                    request.state = LEAVING
                else:
                    self.done(request, now)
            case Stopping() | Leaving() | Done():
                raise AssertionError(f"{request.key} has let go already: {request.state}")
            case _:
                assert_never(request.state)
        parts.waiting.stir()  # who leaves grows no more: that may be room for somebody

    def done(self, request: DecodeRequest, now: float) -> None:
        """Nobody else uses its pages: they stay with the session; else what is valid goes to the tree and the rest is
        freed."""
        parts = self._parts
        if request.kv is not None:
            if request.session_id and request.answered and parts.sessions.open:
                parts.sessions.keep(request, now)
            else:
                parts.caching.release(request)
            parts.waiting.stir()
        request.state = Done()
        parts.forget_if_over(request)
