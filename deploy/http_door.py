"""Before every route: who asks. Without a valid API key, where there are keys, nothing of a request is read; where
there are none, nothing of what another site's page asks (`http_sites.py`).

Owns: which paths are open, and the answer to a stranger. Never: the keys (`api_keys.py`), or what a key may.

Open are the probes (a balancer has no key, and they say yes or no, and why not), /metrics unless it is closed, and what
is the same for everybody: the page at /ui, which asks with its user's key for what it shows, and the API's document.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.common.errors import ErrorCode, RequestError
from baton.deploy import api_page, web_page
from baton.deploy.accounts import asked_by, failed
from baton.deploy.api_keys import NAMED, Keys
from baton.deploy.http_parts import error_response
from baton.deploy.http_sites import Sites

PROBES = frozenset({"/live", "/ready", "/health"})
OPEN = PROBES | {"/", "/openapi.json", *web_page.FILES, *api_page.OURS, *api_page.THEIRS}
METRICS = "/metrics"


class Door:
    """An ASGI middleware. `sites` None: there are keys. `on_stranger`: called for each who is turned away."""

    def __init__(
        self, app: ASGIApp, keys: Keys, sites: Sites | None, open_metrics: bool, on_stranger: Callable[[int], None]
    ) -> None:
        self._app = app
        self._keys = keys
        self._sites = sites
        self._open = OPEN | {METRICS} if open_metrics else OPEN
        self._on_stranger = on_stranger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._let_in(scope)
            except RequestError as error:
                failed(str(error.code))
                response = error_response(error)
                self._on_stranger(response.status_code)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _let_in(self, scope: Scope) -> None:
        """Raises RequestError UNAUTHENTICATED, FOREIGN_SITE."""
        if self._sites is not None and scope["path"] not in PROBES:
            self._sites.check(scope["method"], scope["headers"])
        if scope["path"] in self._open:
            return
        owner = self._keys.owner_of(_authorization(scope))
        scope.setdefault("state", {})["owner"] = owner
        if owner.startswith(NAMED):
            asked_by(owner.removeprefix(NAMED))


def _authorization(scope: Scope) -> str:
    """Raises RequestError when there are two: nobody is to choose between them."""
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(found) > 1:
        raise RequestError(ErrorCode.UNAUTHENTICATED, "one Authorization header is expected")
    return str(found[0].decode("latin-1")) if found else ""
