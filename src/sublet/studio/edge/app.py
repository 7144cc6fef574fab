"""The service put together: routes, the guard on each, and one answer for every error.

Rules of this file:
- A route is added by the file of its noun, and cannot be added without terms (`auth`).
- FastAPI reads schemas and writes the OpenAPI description. Its own error answers are replaced by those of
  `wire`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp

from sublet.core.errors import BadInput, Disconnected, Misconfigured, SubletError
from sublet.studio.edge.auth import Access, BodyLimit, LeanRoutes, StudioRoute, terms, terms_of
from sublet.studio.edge.http_edge import HttpEdge, Network
from sublet.studio.edge.relay import SessionHostRelay
from sublet.studio.edge.wire import Json, Malformed, WrongType, plain_refusal, refusal, shown
from sublet.studio.routes.calls import add_calls
from sublet.studio.routes.checkpoints import add_checkpoints
from sublet.studio.routes.health import add_health
from sublet.studio.routes.operations import add_operations
from sublet.studio.routes.pages import add_pages
from sublet.studio.routes.sessions import add_sessions
from sublet.studio.service import Service
from sublet.studio.views.dashboard import add_dashboard
from sublet.studio.views.live import LiveEvents, add_events
from sublet.studio.views.pricing import Pricing

_DESCRIPTION = "Borrow a GPU for minutes. Lose it at any moment. Lose nothing."


def make_app(service: Service, proxies: Sequence[Network] = ()) -> ASGIApp:
    """The ASGI app that a server runs."""
    service.live = LiveEvents(service)
    service.relay = SessionHostRelay(service.settings)
    app = make_routes(service)
    edge = HttpEdge(LeanRoutes(app, [r for r in app.routes if isinstance(r, StudioRoute)]), service, proxies)
    return service.tracing.around(edge)


def make_routes(service: Service) -> FastAPI:
    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        await service.live.start()
        yield
        await service.close()

    app = FastAPI(
        title="sublet studio",
        description=_DESCRIPTION,
        version=version("sublet"),
        lifespan=running,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    router = app.router
    router.route_class = type("ServiceRoute", (StudioRoute,), {"service": service})
    pricing = Pricing(service)
    sessions = add_sessions(router, service, pricing)
    add_calls(router, service, sessions)
    add_events(router, service)
    add_dashboard(router, service, pricing)
    add_operations(router, service)
    add_checkpoints(router, service)
    add_pages(router, service)
    add_health(router, service)

    @router.get("/openapi.json", include_in_schema=False)
    @terms(Access.ANYBODY, lean=True)
    async def described(request: Request) -> Json:
        return Json(description(app))

    app.add_exception_handler(Exception, _bug)
    app.add_exception_handler(SubletError, _ours)
    app.add_exception_handler(HTTPException, _plain)
    app.add_exception_handler(RequestValidationError, _invalid)
    return app


def _id_of(request: Request) -> str:
    return str(request.scope["sublet"].id)


async def _ours(request: Request, error: Exception) -> Json:
    assert isinstance(error, SubletError)
    if isinstance(error, Misconfigured | Disconnected):
        request.scope["app"].router.route_class.service.log.event(
            "refused", level="warning", id=_id_of(request), code=error.code, error=error.message
        )
    return refusal(error, _id_of(request))


async def _bug(request: Request, error: Exception) -> Json:
    return plain_refusal(500, _id_of(request))  # the HTTP edge logs it


async def _plain(request: Request, error: Exception) -> Json:
    assert isinstance(error, HTTPException)
    if isinstance(
        error.__cause__, SubletError
    ):  # FastAPI reports any error while it reads the body as invalid JSON
        return await _ours(request, error.__cause__)
    if error.status_code == 400:
        return refusal(Malformed("the body is not JSON in UTF-8; nothing was changed"), _id_of(request))
    return plain_refusal(error.status_code, _id_of(request), headers=error.headers)


async def _invalid(request: Request, error: Exception) -> Json:
    """Says which field is wrong and why, but never its value, which may be a misplaced secret."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if any(e["type"] == "json_invalid" for e in found):
        return refusal(Malformed("the body is not JSON; nothing was changed"), _id_of(request))
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    sent = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    if sent and content != "application/json" and any(e["loc"][:1] == ("body",) for e in found):
        return refusal(WrongType(), _id_of(request))
    words = "; ".join(
        f"{'.'.join(str(part) for part in e['loc'][1:]) or 'body'}: {e['msg']}" for e in found[:5]
    )
    return refusal(
        BadInput(f"the request does not fit: {shown(words, 600)}; nothing was changed"), _id_of(request)
    )


def description(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description, with who may use each route and the one error shape."""
    if app.openapi_schema:
        return app.openapi_schema
    schema = FastAPI.openapi(app)
    schema.setdefault("components", {}).setdefault("securitySchemes", {})["token"] = {
        "type": "http",
        "scheme": "bearer",
    }
    schema["components"].setdefault("schemas", {})["Error"] = {
        "type": "object",
        "required": ["code", "message", "remedy", "id"],
        "properties": {name: {"type": "string"} for name in ("code", "message", "remedy", "id")},
    }
    failed = {
        "description": "what went wrong",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for route in app.routes:
        if not isinstance(route, APIRoute) or not route.include_in_schema:
            continue
        own = terms_of(route.endpoint)
        for method in route.methods or ():
            operation = schema["paths"][route.path_format][method.lower()]
            operation["x-opens"] = own.opens.value
            operation["security"] = [] if own.opens is Access.ANYBODY else [{"token": []}]
            operation["responses"].pop("422", None)
            given = operation.setdefault("parameters", [])
            known = {parameter["name"] for parameter in given}
            for name in re.findall(r"{(\w+)}", route.path_format):
                if name not in known:  # a lean route reads its path itself
                    given.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
            operation["responses"]["default"] = failed
            if own.body is BodyLimit.NONE:
                operation.pop("requestBody", None)
    return schema
