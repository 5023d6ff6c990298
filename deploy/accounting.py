"""ASGI around a gateway's whole app: opens the account of each request, closes it, and names both in its headers.

Never: reads a body, or changes a status.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.common.errors import ErrorCode, RequestError
from baton.common.ids import RequestId
from baton.common.log import EventLog, where_of
from baton.deploy.accounts import CLIENT_CLOSED_REQUEST, CURRENT, Account, Books

_log = EventLog("baton.http")


class Accounting:
    """ASGI around the whole app: also around what makes an answer of a bug."""

    def __init__(self, app: ASGIApp, books: Books) -> None:
        self._app = app
        self._books = books

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account = self._books.open(scope["path"], Headers(scope=scope))

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                account.status = message["status"]
                _name(account, MutableHeaders(scope=message))
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                account.complete = True

        token = CURRENT.set(account)
        try:
            await self._app(scope, receive, sending)
        except ClientDisconnect:  # before the whole body was here
            account.status = CLIENT_CLOSED_REQUEST
        except Exception as error:  # noqa: BLE001 - the top frame of a request; its client has been told
            if isinstance(error.__cause__, RequestError):  # it was refused when its stream had begun: no bug
                account.reason = account.reason or str(error.__cause__.code)
            else:
                account.reason = str(ErrorCode.INTERNAL)
                _log.error("request_failed", request=account.request_id, trace=account.trace_id, where=where_of(error))
        finally:
            CURRENT.reset(token)
            self._books.close(account, scope["method"], getattr(scope.get("route"), "path", ""))


def _name(account: Account, headers: MutableHeaders) -> None:
    """Who asks once more with an `Idempotency-Key` is told of the request that works for both."""
    account.request_id = RequestId(headers.setdefault("X-Baton-Request-Id", account.request_id))
    headers["X-Request-Id"] = account.client_id or account.request_id
    if account.beginning.context:
        headers["traceparent"] = account.beginning.context
