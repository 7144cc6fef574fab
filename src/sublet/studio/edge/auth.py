"""Who may do what: every route declares it, and one guard checks it.

Rules of this file:
- A route without terms does not exist: the app refuses to be built, so nothing is open because somebody
  forgot.
- The tenant comes from the credential only. Each request looks its token up once, so a revoked token is
  refused at once.
- Checks run in this order: token, scope, request rate, body size. No byte of a body is read before them. A
  client that was over its rate a moment ago is refused before its token is looked up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as ASGIScope

from sublet.core.errors import Forbidden, InvariantBroken, Unauthorized
from sublet.core.studio.token import Credential, Scope
from sublet.studio.edge.limits import BoundedBody
from sublet.studio.edge.wire import BodyTooLarge, TooManyNow, TooSlow
from sublet.studio.service import RequestContext, Service
from sublet.studio.tokens import claimed, let_in

E = TypeVar("E", bound=Callable[..., Any])
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Access(Enum):
    """Who may use a route."""

    ANYBODY = "anybody"
    USER = "user"  # any valid token, for what belongs to its tenant
    OPERATOR = "operator"


class BodyLimit(Enum):
    """How large a body a route reads."""

    NONE = "none"
    JSON = "json"
    CALL = "call"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTerms:
    opens: Access
    body: BodyLimit = BodyLimit.NONE
    lean: bool = False  # called with the request alone, without schemas
    stream: bool = False  # counted as a stream of its tenant by itself, not as a request


def terms(
    opens: Access, *, body: BodyLimit = BodyLimit.NONE, lean: bool = False, stream: bool = False
) -> Callable[[E], E]:
    def mark(endpoint: E) -> E:
        own = RouteTerms(opens=opens, body=body, lean=lean, stream=stream)
        endpoint.__sublet_terms__ = own  # type: ignore[attr-defined]
        return endpoint

    return mark


def terms_of(endpoint: Callable[..., Any]) -> RouteTerms:
    found = getattr(endpoint, "__sublet_terms__", None)
    if not isinstance(found, RouteTerms):
        raise InvariantBroken(f"route {getattr(endpoint, '__name__', '?')} does not say who may use it")
    return found


def shown_token(scope: ASGIScope) -> str:
    """The text after Bearer. A token anywhere else, such as in the URL, is ignored."""
    found = ""
    for name, value in scope["headers"]:
        if name == b"authorization":
            if found:
                return ""  # with two headers, neither counts
            text: str = value.decode("latin-1")
            found = text[7:].strip() if text[:7].lower() == "bearer " else "-"
    return found


def credential(request: Request) -> Credential:
    """The credential of a request that has passed the guard."""
    context: RequestContext = request.scope["sublet"]
    if context.credential is None:
        raise Unauthorized
    return context.credential


def is_operator(who: Credential) -> bool:
    return who.scope is Scope.OPERATOR


class StudioRoute(APIRoute):
    """A route with its guard before it. `service` is set by the app that builds it."""

    service: Service
    guarded: Handler

    def get_route_handler(self) -> Handler:
        own = terms_of(self.endpoint)
        inner: Handler = self.endpoint if own.lean else super().get_route_handler()
        service, path = self.service, self.path_format
        most = {
            BodyLimit.NONE: 0,
            BodyLimit.JSON: service.limits.json_bytes,
            BodyLimit.CALL: service.limits.call_bytes,
        }[own.body]

        async def guarded(request: Request) -> Response:
            context: RequestContext = request.scope["sublet"]
            context.route = path
            try:
                if own.opens is not Access.ANYBODY:
                    await _let_in(service, request, context, own)
                return await _bounded(service, request, context, own, most, inner)
            except Exception as error:
                # FastAPI puts an error of its own around one that came while it read the body.
                if isinstance(error, BodyTooLarge | TooSlow) or isinstance(
                    error.__cause__, BodyTooLarge | TooSlow
                ):
                    await _penalised(service, context)
                raise

        self.guarded = guarded
        return guarded


class LeanRoutes:
    """Dispatches the most frequent routes directly, without the framework's work for routes with schemas."""

    def __init__(self, app: ASGIApp, routes: Iterable[StudioRoute]) -> None:
        self._app = app
        self._routes = [
            (r.path_regex, r.methods or set(), r.guarded) for r in routes if terms_of(r.endpoint).lean
        ]

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, method = scope["path"], scope["method"]
            for pattern, methods, guarded in self._routes:
                found = pattern.match(path)
                if found is not None and method in methods:
                    scope["path_params"] = found.groupdict()
                    answer = await guarded(Request(scope, receive))
                    await answer(scope, receive, send)
                    return
        await self._app(scope, receive, send)


async def admitted(service: Service, request: Request, session_id: str = "") -> Credential:
    """The credential of the request's token, or `Unauthorized`. A session is looked up in the same read."""
    text = shown_token(request.scope)
    if not text:
        raise Unauthorized("no token was shown; nothing was read or changed")
    token_id, secret = claimed(text)
    token, session = await service.look_up(token_id, session_id)
    who = let_in(token, secret, service.now_us())
    request.scope["sublet"].session = session
    return who


async def _let_in(service: Service, request: Request, context: RequestContext, own: RouteTerms) -> None:
    named = request.path_params.get("session_id", "") if own.lean else ""
    context.credential = who = await admitted(service, request, named)
    if own.opens is Access.OPERATOR and who.scope is not Scope.OPERATOR:
        raise Forbidden
    now = time.monotonic()
    over = service.tenants.take(who.tenant, now)
    if over:
        service.flooding.add(shown_token(request.scope), who, now)
        await service.penalty(who.tenant)
        raise over_rate(who, over)


async def refuse_flood(service: Service, scope: ASGIScope, context: RequestContext) -> None:
    """Refuses a client that was over its rate a moment ago and still is, before anything is looked up."""
    shown = shown_token(scope)
    who = service.flooding.find(shown, time.monotonic()) if shown else None
    over = service.tenants.over(who.tenant, time.monotonic()) if who is not None else 0.0
    if who is not None and over:
        context.credential = who  # for the log
        await service.penalty(who.tenant)
        raise over_rate(who, over)


def over_rate(who: Credential, seconds: float) -> TooManyNow:
    return TooManyNow(f"tenant {who.tenant} sends more requests than one may; nothing was done", seconds)


async def _penalised(service: Service, context: RequestContext) -> None:
    """Delays a refusal that cost the service a body, and counts it as several requests."""
    bucket, key = (
        (service.tenants, context.tenant) if context.tenant else (service.addresses, context.address)
    )
    bucket.charge(key, service.limits.refused_cost, time.monotonic())
    await service.penalty(key)


async def _bounded(
    service: Service, request: Request, context: RequestContext, own: RouteTerms, most: int, inner: Handler
) -> Response:
    if context.unread:
        length = request.headers.get("content-length", "")
        if own.body is BodyLimit.NONE and request.method in ("GET", "HEAD"):
            # A small body on a GET does no harm. One without a length might never end.
            most = service.limits.json_bytes if length else 0
        if (not length and not most) or (length.isdecimal() and (len(length) > 18 or int(length) > most)):
            raise BodyTooLarge(
                f"the request is larger than the {most} bytes this address takes; nothing was stored"
            )
        body = BoundedBody(
            request.receive, most, service.limits, service.pace, context.tenant or context.address
        )
        request = Request(request.scope, body)
        try:
            return await _counted(service, request, context, own, inner)
        finally:
            context.unread = body.unread
    return await _counted(service, request, context, own, inner)


async def _counted(
    service: Service, request: Request, context: RequestContext, own: RouteTerms, inner: Handler
) -> Response:
    if context.credential is None or own.stream:
        return await inner(request)
    tenant = context.credential.tenant
    service.requests.enter(tenant)
    try:
        return await inner(request)
    finally:
        service.requests.leave(tenant)
