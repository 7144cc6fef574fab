"""The page's files and the metrics: everything that is not JSON.

Rules of this file:
- Files are read once, from the package, when the service starts; no other name exists.
- The page may load only what comes from here, and may not be embedded in another page.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sublet.core.errors import Forbidden, NotFound
from sublet.core.studio.token import Scope
from sublet.studio.edge.auth import Access, admitted, terms
from sublet.studio.service import Service

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FOR_BROWSERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


def _read() -> dict[str, tuple[bytes, str, str]]:
    """The page's files by name: bytes, type and ETag."""
    found = {}
    for file in files("sublet.studio").joinpath("page").iterdir():
        kind = TYPES.get("." + file.name.rpartition(".")[2])
        if kind and file.is_file():
            data = file.read_bytes()
            found[file.name] = (data, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    return found


def add_pages(router: APIRouter, service: Service) -> None:
    known = _read()

    def file(request: Request, name: str) -> Response:
        if name not in known:
            raise NotFound(
                "there is nothing at this address; nothing was changed", remedy="GET / is the page"
            )
        data, kind, tag = known[name]
        stored = "no-store" if kind.startswith("text/html") else "no-cache"
        headers = {**_FOR_BROWSERS, "Cache-Control": stored, "ETag": tag}
        if tag in [
            part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")
        ]:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=kind, headers=headers)

    @router.get("/", include_in_schema=False)
    @terms(Access.ANYBODY, lean=True)
    async def page(request: Request) -> Response:
        return file(request, "index.html")

    @router.get("/page/{name}", include_in_schema=False)
    @terms(Access.ANYBODY, lean=True)
    async def part(request: Request) -> Response:
        return file(request, request.path_params["name"])

    @router.get("/metrics", summary="For Prometheus; an operator's token, unless --metrics-open")
    @terms(Access.ANYBODY, lean=True)
    async def metrics(request: Request) -> Response:
        if not service.metrics_open:
            who = await admitted(service, request)
            if who.scope is not Scope.OPERATOR:
                raise Forbidden
        text = await service.work(lambda: service.meters.render(service.ledger))
        return Response(text, media_type=METRICS_TYPE)
