"""Who is turned away before a request is anybody's, and with which answer. Owns nothing, decides nothing else."""

from __future__ import annotations

from baton.common.config import DecodeConfig
from baton.common.engine.policy import ExplainGrammar, foreign_token
from baton.common.errors import ErrorCode
from baton.common.ids import SessionId
from baton.common.messages import Failure, Submit, unpack_tokens
from baton.common.prompt_logprobs import explain_too_many
from baton.decode.sessions import Sessions


class Door:
    """Of a worker whose pool holds sequences of at most `longest` tokens. Prompt and outputs are tokens of a model that
    has `vocab_size` of them, at most `max_context_len` in one sequence."""

    def __init__(
        self,
        config: DecodeConfig,
        sessions: Sessions,
        longest: int,
        max_context_len: int,
        vocab_size: int,
        explain_grammar: ExplainGrammar,
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._longest = longest
        self._max_context_len = max_context_len
        self._vocab_size = vocab_size
        self._explain_grammar = explain_grammar

    def refusal(self, message: Submit, waiting: int) -> Failure | None:
        """`waiting`: how many requests do, here. None: it may come in."""
        prompt, outputs = unpack_tokens(message.prompt), unpack_tokens(message.outputs)
        if not len(prompt):
            return Failure(code=ErrorCode.INVALID_REQUEST, reason="the prompt is empty")
        for field, tokens in (("prompt", prompt), ("outputs", outputs)):
            if foreign := foreign_token(tokens, self._vocab_size):
                return Failure(code=ErrorCode.INVALID_REQUEST, reason=field + foreign)
        if len(prompt) >= self._max_context_len or len(prompt) > self._longest:
            return Failure(code=ErrorCode.PROMPT_TOO_LONG, reason=f"{len(prompt)} tokens never fit this worker")
        if too_many := explain_too_many(len(prompt), message.sampling.prompt_logprobs):
            return Failure(code=ErrorCode.INVALID_REQUEST, reason=too_many)
        if wrong := self._explain_grammar(message.sampling.grammar):
            return Failure(code=ErrorCode.INVALID_REQUEST, reason=f"grammar: {wrong}")
        lost = message.session_turn > 0 and self._sessions.find(SessionId(message.session_id)) is None
        if lost and self._config.lost_session == "fail":
            return Failure(code=ErrorCode.SESSION_LOST, reason="this conversation's KV is not kept here any more")
        if waiting >= self._config.max_queued_requests:
            return Failure(code=ErrorCode.OVERLOADED, reason=f"{waiting} requests are waiting here")
        return None
