"""The page at `/ui`: a chat that shows where the time of each answer went, and the cluster as it works.

Owns: the routes of its files in `web/`, which need no build and load nothing from elsewhere. Never: anything that
the page shows; it asks the same endpoints as every client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse

FILES = {
    "/ui": ("index.html", "text/html"),
    "/ui/app.js": ("app.js", "text/javascript"),
    "/ui/style.css": ("style.css", "text/css"),
}
HEADERS = {
    # Answers are a stranger's text. What is not ours neither runs nor is asked for.
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_routes(app: FastAPI) -> None:
    folder = files("baton.deploy") / "web"
    for path, (name, kind) in FILES.items():
        response = Response((folder / name).read_bytes(), media_type=f"{kind}; charset=utf-8", headers=HEADERS)
        app.add_api_route(path, _always(response), methods=["GET"], include_in_schema=False, name=name)
    to_the_page = RedirectResponse("/ui")
    app.add_api_route("/", _always(to_the_page), methods=["GET"], include_in_schema=False, name="root")


def _always(response: Response) -> Callable[[], Awaitable[Response]]:
    async def endpoint() -> Response:
        return response

    return endpoint
