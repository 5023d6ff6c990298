"""The page at `/docs`: the API, described and to be tried out, without asking anybody but this gateway.

Owns: the routes of the page. Swagger UI itself (Apache-2.0) comes with the package `fastapi-offline` (MIT), of which
nothing else is used. Never: the description; that is `/openapi.json`.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Response

OURS = {"/docs": ("docs.html", "text/html"), "/docs/docs.js": ("docs.js", "text/javascript")}
THEIRS = {
    "/docs/swagger-ui.css": ("swagger-ui.css", "text/css"),
    "/docs/swagger-ui-bundle.js": ("swagger-ui-bundle.js", "text/javascript"),
}
HEADERS = {
    # Swagger UI writes styles, and icons as data.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_routes(app: FastAPI) -> None:
    for path, (name, kind) in OURS.items():
        _add(app, path, "baton.deploy", f"web/{name}", kind)
    for path, (name, kind) in THEIRS.items():
        _add(app, path, "fastapi_offline", f"static/{name}", kind)


def _add(app: FastAPI, path: str, package: str, name: str, kind: str) -> None:
    async def file() -> Response:
        """Read when it is asked for: it is large, and few ask."""
        return Response(
            files(package).joinpath(name).read_bytes(), media_type=f"{kind}; charset=utf-8", headers=HEADERS
        )

    app.add_api_route(path, file, methods=["GET"], include_in_schema=False)
