"""How a line of a batch is answered: as the gateway would answer its body at the batch's endpoint.

Owns: what a batch does not allow, and the outcome of a bug: an answer that says so, as for any other request. Never:
waits or tries again (`runner.py`).
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import msgspec

from baton.common.errors import ErrorCode, RequestError
from baton.common.log import EventLog, where_of
from baton.deploy.accounts import BATCH, CURRENT, Books, failed
from baton.deploy.gateway_shell import Gateway
from baton.deploy.http_parts import parse_aside
from baton.deploy.jobs.records import ClaimedLine
from baton.deploy.jobs.runner import Reply
from baton.deploy.json_bodies import refusal
from baton.deploy.openai_answers import answer_json, prepare
from baton.deploy.openai_api import ChatRequest, CompletionRequest, Sampled, parse_request
from baton.deploy.openai_replies import Usage, encode, http_error
from baton.deploy.responses_answers import prepare_response, respond
from baton.deploy.responses_api import parse_responses_request

_log = EventLog("baton.jobs")

RequestT = TypeVar("RequestT", bound=Sampled)


class LineAnswerer:
    """`priority`: of lines that name none (smaller is sooner)."""

    def __init__(self, gateway: Gateway, books: Books, timeout_s: float, priority: int) -> None:
        self._gateway = gateway
        self._books = books
        self._timeout_s = timeout_s
        self._priority = priority

    async def __call__(self, line: ClaimedLine) -> Reply:
        account = self._books.open(line.endpoint, {})
        account.labels = {"batch": line.batch_id, "line": line.line}
        token = CURRENT.set(account)
        try:
            reply = await self._reply(line, account.request_id)
            account.status, account.complete = reply.status, True
        finally:
            CURRENT.reset(token)
            self._books.close(account, BATCH, line.endpoint)
        self._gateway.metrics.http(f"batch:{line.endpoint}", reply.status)
        return reply

    async def _reply(self, line: ClaimedLine, request_id: str) -> Reply:
        try:
            body, input_tokens, output_tokens = await self._answer(line, request_id)
        except RequestError as error:
            failed(str(error.code))
            http = http_error(error)
            return Reply(request_id, http.status, encode(http.reply), retry_after_s=error.retry_after_s)
        except Exception as error:  # noqa: BLE001 - the top frame of a request: a bug in it is not the other lines' end
            failed(str(ErrorCode.INTERNAL))
            _log.error("line_failed", request=request_id, batch=line.batch_id, line=line.line, where=where_of(error))
            reason = "the gateway failed on this request; its log says why"
            return Reply(request_id, 500, encode(http_error(RequestError(ErrorCode.INTERNAL, reason)).reply))
        return Reply(request_id, 200, body, input_tokens, output_tokens)

    async def _answer(self, line: ClaimedLine, request_id: str) -> tuple[bytes, int, int]:
        """(the body, tokens of the prompt, tokens of the answer)."""
        asked = (request_id, line.owner, self._timeout_s)
        if line.endpoint == "/v1/responses":
            wanted = self._adapted(await parse_aside(parse_responses_request, line.request))
            response, _ = await respond(await prepare_response(self._gateway, wanted, *asked))
            assert response.usage is not None, "it has ended"
            return encode(response), response.usage.input_tokens, response.usage.output_tokens
        kind = ChatRequest if line.endpoint == "/v1/chat/completions" else CompletionRequest
        request = self._adapted(await parse_aside(partial(parse_request, kind), line.request))
        reply, _ = await answer_json(await prepare(self._gateway, request, *asked))
        assert isinstance(reply.usage, Usage), "it is whole"
        return encode(reply), reply.usage.prompt_tokens, reply.usage.completion_tokens

    def _adapted(self, request: RequestT) -> RequestT:
        if request.stream:
            raise refusal("stream", "the lines of a batch are answered whole (leave it out)")
        if request.priority is not None:
            return request
        return msgspec.structs.replace(request, priority=self._priority)
