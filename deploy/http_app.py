"""HTTP in front of a `Gateway`: the OpenAI-compatible endpoints, tokens, health, metrics, status, their documentation,
and a page for people.

Owns: routes, status codes and headers, the size limit of bodies, and noticing that a client is gone. Never: knows the
cluster; a request's id, worker and addresses are never taken from a client.

An answer's first event is awaited before its status line is sent, so that whatever goes wrong until then is a real
HTTP status. What goes wrong later is an `error` event in the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from baton.common.config import GatewayConfig
from baton.common.config_checks import is_loopback
from baton.common.errors import ErrorCode, RequestError
from baton.common.ids import SessionId
from baton.common.kv.layout import Component
from baton.deploy import api_page, web_page
from baton.deploy.accounts import CLIENT_CLOSED_REQUEST, current_request_id, failed
from baton.deploy.chrome_trace import chrome_trace
from baton.deploy.gateway_shell import Gateway
from baton.deploy.http_door import Door
from baton.deploy.http_parts import Bodies, IdempotencyKey, error_response, json_response, owner_of, parse_aside
from baton.deploy.http_sites import Sites
from baton.deploy.jobs.api import JobsApi
from baton.deploy.keyed_answers import KeyedAnswers
from baton.deploy.openai_answers import answer_json, prepare
from baton.deploy.openai_api import ChatRequest, CompletionRequest, parse_request
from baton.deploy.openai_replies import (
    ErrorDetail,
    ErrorReply,
    ModelCard,
    ModelList,
    SessionCard,
)
from baton.deploy.openai_streams import answer_stream
from baton.deploy.openapi import body_of, with_schemas
from baton.deploy.responses_answers import prepare_response, respond, respond_stream
from baton.deploy.responses_api import ResponsesRequest, parse_responses_request
from baton.deploy.tokenize_api import DetokenizeRequest, TokenizeChat, TokenizePrompt, detokenize, tokenize

MAX_TRACE_S = 60.0
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

ResultT = TypeVar("ResultT")
_Answer = Callable[[bytes, str, str], Coroutine[Any, Any, Response]]
"""Of a body, under our name for the request, to whoever asks."""


class _ClientGone(Exception):
    pass


class HttpApi:
    """The routes of one gateway."""

    def __init__(self, gateway: Gateway, jobs: JobsApi, keyed: KeyedAnswers, settings: GatewayConfig) -> None:
        self._gateway = gateway
        self._keyed = keyed
        self._jobs = jobs
        self._received = Bodies(settings.max_body_bytes, settings.http.max_receiving_bytes)
        self._request_timeout_s = settings.request_timeout_s
        self._open_metrics = settings.open_metrics
        self._sites = _sites_of(settings)
        self._created = int(time.time())  # a date for clients, not a clock
        self._bodies: tuple[type, ...] = ()  # of which the OpenAPI document has the schemas

    def app(self) -> FastAPI:
        app = FastAPI(title="Baton", version=self._gateway.version, docs_url=None, redoc_url=None)
        app.openapi = partial(self._openapi, app)  # type: ignore[method-assign]  # as FastAPI documents it
        for path, kind in (("/v1/chat/completions", ChatRequest), ("/v1/completions", CompletionRequest)):
            self._add_post(app, path, self._generation(path, partial(self._complete, kind)), kind)
        self._add_post(app, "/v1/responses", self._generation("/v1/responses", self._respond), ResponsesRequest)
        self._add_post(app, "/tokenize", self.tokenize, TokenizePrompt, TokenizeChat)
        self._add_post(app, "/detokenize", self.detokenize, DetokenizeRequest)
        pages: dict[str, Callable[..., Awaitable[Response]]] = {
            "/v1/models": self.models,
            "/v1/models/{model_id:path}": self.model,
            "/live": self.live,
            "/ready": self.ready,
            "/health": self.health,
            "/metrics": self.metrics,
            "/version": self.version,
        }
        of_operators: dict[str, tuple[str, Callable[..., Awaitable[Response]]]] = {
            "/status": ("GET", self.status),
            "/kv/{worker}/{page}": ("GET", self.page_owner),
            "/handoffs/{worker}": ("GET", self.handoffs),
            "/trace": ("POST", self.trace),
        }
        gateway = self._gateway
        app.add_middleware(
            Door,
            keys=gateway.keys,
            sites=self._sites,
            open_metrics=self._open_metrics,
            on_stranger=partial(gateway.metrics.http, "stranger"),
        )
        web_page.add_routes(app)
        api_page.add_routes(app)
        self._bodies += self._jobs.add_routes(app)
        app.add_api_route("/v1/idempotency/{key:path}", self.forget_key, methods=["DELETE"])
        app.add_api_route("/v1/sessions", self.open_session, methods=["POST"])
        app.add_api_route("/v1/sessions/{session_id}", self.close_session, methods=["DELETE"])
        for path, handler in pages.items():
            app.add_api_route(path, handler, methods=["GET"])
        for path, (method, handler) in of_operators.items():
            app.add_api_route(path, handler, methods=[method], dependencies=[Depends(self._only_operators)])
        app.add_exception_handler(HTTPException, self.not_found)
        app.add_exception_handler(RequestError, self.refused)
        app.add_exception_handler(RequestValidationError, self.malformed_path)
        app.add_exception_handler(ClientDisconnect, self.hung_up)
        app.add_exception_handler(Exception, self.internal_error)
        return app

    def _openapi(self, app: FastAPI) -> dict[str, Any]:
        """Made when it is asked for: that takes a tenth of a second."""
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = with_schemas(document, self._bodies, self._gateway.model.name)
        return app.openapi_schema

    def _add_post(self, app: FastAPI, path: str, handler: Callable[..., Awaitable[Response]], *kinds: type) -> None:
        """A route whose body is one of these."""
        app.add_api_route(path, handler, methods=["POST"], openapi_extra=body_of(*kinds))
        self._bodies += kinds

    # ------------------------------------------------------------------------------------------- answers

    def _generation(self, path: str, answer: _Answer) -> Callable[..., Awaitable[Response]]:
        async def handle(request: Request, idempotency_key: IdempotencyKey = None) -> Response:
            """An answer, or, with `stream`, server-sent events."""
            request_id, owner, key = current_request_id(), owner_of(request), idempotency_key
            try:
                body = await self._received.read(request)

                async def respond() -> Response:
                    response = await answer(body, request_id, owner)
                    response.headers["X-Baton-Request-Id"] = request_id
                    return response

                work = respond() if key is None else self._keyed.respond(owner, path, key, body, respond)
                response = await _unless_gone(request, work)
            except RequestError as error:
                response = _refused(error)
            except _ClientGone:
                response = Response(status_code=CLIENT_CLOSED_REQUEST)
            self._gateway.metrics.http(path, response.status_code)
            return response

        return handle

    async def forget_key(self, request: Request, key: str) -> Response:
        """Ends what runs under an `Idempotency-Key`, and forgets what it came to."""
        as_header = key.encode(errors="replace").decode("latin-1")  # a path is read as UTF-8
        self._keyed.forget(owner_of(request), as_header)
        return Response(status_code=204)

    async def _complete(
        self, kind: type[ChatRequest] | type[CompletionRequest], body: bytes, request_id: str, owner: str
    ) -> Response:
        request = await parse_aside(partial(parse_request, kind), body)
        answering = await prepare(self._gateway, request, request_id, owner, self._request_timeout_s)
        if not request.stream:
            reply, timing = await answer_json(answering)
            return json_response(reply, 200, {"Server-Timing": timing})
        return await _streaming(answer_stream(answering))

    async def _respond(self, body: bytes, request_id: str, owner: str) -> Response:
        request = await parse_aside(parse_responses_request, body)
        responding = await prepare_response(self._gateway, request, request_id, owner, self._request_timeout_s)
        if not request.stream:
            reply, timing = await respond(responding)
            return json_response(reply, 200, {"Server-Timing": timing})
        return await _streaming(respond_stream(responding))

    # ------------------------------------------------------------------------------------------ sessions

    async def open_session(self, request: Request) -> Response:
        """Its KV stays on its decode worker between turns; requests name it as `session_id`."""
        return json_response(SessionCard(id=self._gateway.open_session(owner_of(request))), 201)

    async def close_session(self, request: Request, session_id: str) -> Response:
        self._gateway.close_session(SessionId(session_id), owner_of(request))
        return Response(status_code=204)

    # -------------------------------------------------------------------------------------------- others

    async def models(self) -> Response:
        """What is served here: one model."""
        return json_response(ModelList(data=[self._model_card()]))

    async def model(self, model_id: str) -> Response:
        """One model, by its name."""
        self._gateway.model.check_name(model_id)
        return json_response(self._model_card())

    def _model_card(self) -> ModelCard:
        model = self._gateway.model
        return ModelCard(id=model.name, created=self._created, max_model_len=model.max_model_len)

    async def tokenize(self, request: Request) -> Response:
        """What a prompt or a conversation is to the model."""
        return json_response(await tokenize(self._gateway.model, await self._received.read(request)))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        return json_response(await detokenize(self._gateway.model, await self._received.read(request)))

    async def live(self) -> Response:
        """This process turns its loop."""
        return json_response({"live": True})

    async def ready(self) -> Response:
        """Requests can be answered: a decode worker is there and is heard."""
        ready, reason = self._gateway.readiness()
        return json_response({"ready": ready, "reason": reason}, 200 if ready else 503)

    async def health(self) -> Response:
        """Ready, and no worker's engine is stuck in a step: what a load balancer should look at."""
        healthy, reason = self._gateway.health()
        return json_response({"healthy": healthy, "reason": reason}, 200 if healthy else 503)

    async def metrics(self) -> Response:
        return Response(await self._gateway.metrics_page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self) -> Response:
        return json_response({"version": self._gateway.version, "model": self._gateway.model.name})

    async def _only_operators(self, request: Request) -> None:
        """Raises RequestError ADMIN_ONLY: what these pages show is of everybody's requests."""
        if not self._gateway.keys.is_admin(owner_of(request)):
            reason = "this shows what everybody does, and wants a key of an operator's (`baton keys new --admin`)"
            raise RequestError(ErrorCode.ADMIN_ONLY, reason)

    async def status(self) -> Response:
        return json_response(await self._gateway.status())

    async def page_owner(self, worker: str, page: int, component: Component | None = None) -> Response:
        """Who holds one KV page or state slot of a worker, and its last transitions."""
        return json_response({"owner": await self._gateway.workers.page_owner(worker, page, component)})

    async def handoffs(self, worker: str) -> Response:
        """A worker's last hand-offs and the open ones, with the times of their lives."""
        return json_response(await self._gateway.workers.handoffs(worker))

    async def trace(self, request: Request, seconds: float = 5.0) -> Response:
        """Chrome trace events of all workers, of so many seconds from now on: opens in ui.perfetto.dev."""
        if not 0.0 < seconds <= MAX_TRACE_S:
            reason = f"a trace takes up to {MAX_TRACE_S:.0f} seconds"
            raise RequestError(ErrorCode.INVALID_REQUEST, reason, "seconds")
        events = await self._gateway.workers.record(seconds)
        await self._only_operators(request)  # his key may have been taken out meanwhile
        return json_response(chrome_trace(events))

    async def refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return self._counted(request, _refused(error))

    def _counted(self, request: Request, response: Response) -> Response:
        """Whoever tries ids that are not his is seen to do so. Under the route, never under what he wrote."""
        self._gateway.metrics.http(getattr(request.scope.get("route"), "path", "unknown"), response.status_code)
        return response

    async def not_found(self, request: Request, error: Exception) -> Response:
        """Unknown paths and methods, in the API's own error shape."""
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        detail = ErrorDetail(message=message, type="invalid_request_error", param=None, code="not_found")
        return self._counted(request, json_response(ErrorReply(error=detail), error.status_code))

    async def hung_up(self, request: Request, error: Exception) -> Response:
        """While its body was read."""
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def malformed_path(self, request: Request, error: Exception) -> Response:
        """A page that is no number, a component that no model has. Bodies are not FastAPI's to read here."""
        assert isinstance(error, RequestValidationError)
        found = error.errors()[0]
        refused = RequestError(ErrorCode.INVALID_REQUEST, str(found["msg"]), str(found["loc"][-1]))
        return self._counted(request, error_response(refused))

    async def internal_error(self, request: Request, error: Exception) -> Response:
        """A bug in the gateway. The client gets a clear answer; where it happened goes to the log (`accounts.py`)."""
        return error_response(RequestError(ErrorCode.INTERNAL, "the gateway failed on this request; its log says why"))


def _sites_of(settings: GatewayConfig) -> Sites | None:
    """Whose pages may ask. None: everybody shows a key."""
    if settings.api_keys_file:
        return None
    named = bool(settings.allowed_hosts) or is_loopback(settings.host)
    return Sites(settings.allowed_hosts if named else None)


def _refused(error: RequestError) -> Response:
    failed(str(error.code))
    return error_response(error)


async def _streaming(events: AsyncGenerator[bytes, None]) -> Response:
    first = await anext(events)

    async def body() -> AsyncGenerator[bytes, None]:
        async with aclosing(events):  # a client that goes away cancels its request here
            yield first
            async for event in events:
                yield event

    return StreamingResponse(body(), media_type="text/event-stream", headers=_STREAM_HEADERS)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`, which is cancelled when the client hangs up first (then: _ClientGone)."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise _ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
