"""Who may do what: every route says it, and one guard asks.

Rules of this file:
- A route without terms does not exist: the app refuses to be built. Nothing is open because somebody forgot.
- The tenant comes from the credential and from nowhere else. Each request looks its token up, once: a revoked one counts at once.
- The order is: token, scope, how many requests, how large a body. Nothing of a body is read before. A flood is refused before the first.
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
from sublet.core.token import Credential, Scope
from sublet.runtime.tokens import claimed, let_in
from sublet.studio.limits import BoundedBody
from sublet.studio.service import Service, Visit
from sublet.studio.wire import BodyTooLarge, TooManyNow, TooSlow

E = TypeVar("E", bound=Callable[..., Any])
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Opens(Enum):
    """What a route asks of whoever comes."""

    ANYBODY = "anybody"
    USER = "user"  # any good token, for what belongs to its tenant
    OPERATOR = "operator"


class Body(Enum):
    """How much a route reads."""

    NONE = "none"
    JSON = "json"
    CALL = "call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    opens: Opens
    body: Body = Body.NONE
    lean: bool = False  # called with the request alone: no schema is between
    stream: bool = False  # counted as a stream of its tenant by itself, not as a request


def terms(
    opens: Opens, *, body: Body = Body.NONE, lean: bool = False, stream: bool = False
) -> Callable[[E], E]:
    def mark(endpoint: E) -> E:
        endpoint.__sublet_terms__ = Terms(opens=opens, body=body, lean=lean, stream=stream)  # type: ignore[attr-defined]
        return endpoint

    return mark


def terms_of(endpoint: Callable[..., Any]) -> Terms:
    found = getattr(endpoint, "__sublet_terms__", None)
    if not isinstance(found, Terms):
        raise InvariantBroken(f"route {getattr(endpoint, '__name__', '?')} does not say who may use it")
    return found


def shown_token(scope: ASGIScope) -> str:
    """The text after Bearer. A token anywhere else, as in the address, is not looked at."""
    found = ""
    for name, value in scope["headers"]:
        if name == b"authorization":
            if found:
                return ""  # two of them: neither counts
            text: str = value.decode("latin-1")
            found = text[7:].strip() if text[:7].lower() == "bearer " else "-"
    return found


def credential(request: Request) -> Credential:
    """Of a request that has passed the guard."""
    visit: Visit = request.scope["sublet"]
    if visit.credential is None:
        raise Unauthorized
    return visit.credential


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
        most = {Body.NONE: 0, Body.JSON: service.limits.json_bytes, Body.CALL: service.limits.call_bytes}[
            own.body
        ]

        async def guarded(request: Request) -> Response:
            visit: Visit = request.scope["sublet"]
            visit.route = path
            try:
                if own.opens is not Opens.ANYBODY:
                    await _let_in(service, request, visit, own)
                return await _bounded(service, request, visit, own, most, inner)
            except Exception as error:
                # FastAPI puts an error of its own around one that came while it read the body.
                if isinstance(error, BodyTooLarge | TooSlow) or isinstance(
                    error.__cause__, BodyTooLarge | TooSlow
                ):
                    await _penalised(service, visit)
                raise

        self.guarded = guarded
        return guarded


class Shortcut:
    """Straight to the routes that are asked for most, past what the framework does for routes with schemas."""

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
    """Whose token the request shows, or `Unauthorized`. With a session, that is looked up in the same breath."""
    text = shown_token(request.scope)
    if not text:
        raise Unauthorized("no token was shown; nothing was read or changed")
    token_id, secret = claimed(text)
    token, session = await service.visited(token_id, session_id)
    who = let_in(token, secret, service.now_us())
    request.scope["sublet"].session = session
    return who


async def _let_in(service: Service, request: Request, visit: Visit, own: Terms) -> None:
    named = request.path_params.get("session_id", "") if own.lean else ""
    visit.credential = who = await admitted(service, request, named)
    if own.opens is Opens.OPERATOR and who.scope is not Scope.OPERATOR:
        raise Forbidden
    now = time.monotonic()
    over = service.tenants.take(who.tenant, now)
    if over:
        service.flooding.add(shown_token(request.scope), who, now)
        await service.penalty(who.tenant)
        raise over_rate(who, over)


async def refuse_flood(service: Service, scope: ASGIScope, visit: Visit) -> None:
    """Who was over its rate a moment ago and still is, is refused before anything is looked up."""
    shown = shown_token(scope)
    who = service.flooding.find(shown, time.monotonic()) if shown else None
    over = service.tenants.over(who.tenant, time.monotonic()) if who is not None else 0.0
    if who is not None and over:
        visit.credential = who  # for the log
        await service.penalty(who.tenant)
        raise over_rate(who, over)


def over_rate(who: Credential, seconds: float) -> TooManyNow:
    return TooManyNow(f"tenant {who.tenant} sends more requests than one may; nothing was done", seconds)


async def _penalised(service: Service, visit: Visit) -> None:
    """A refusal that cost the service a body is answered later, and counts for more than one request."""
    bucket, key = (service.tenants, visit.tenant) if visit.tenant else (service.addresses, visit.address)
    bucket.charge(key, service.limits.refused_cost, time.monotonic())
    await service.penalty(key)


async def _bounded(
    service: Service, request: Request, visit: Visit, own: Terms, most: int, inner: Handler
) -> Response:
    if visit.unread:
        length = request.headers.get("content-length", "")
        if own.body is Body.NONE and request.method in ("GET", "HEAD"):
            # Where none belongs a small one does no harm. One without a length might never end.
            most = service.limits.json_bytes if length else 0
        if (not length and not most) or (length.isdecimal() and (len(length) > 18 or int(length) > most)):
            raise BodyTooLarge(
                f"the request is larger than the {most} bytes this address takes; nothing was stored"
            )
        body = BoundedBody(request.receive, most, service.limits, service.pace, visit.tenant or visit.address)
        request = Request(request.scope, body)
        try:
            return await _counted(service, request, visit, own, inner)
        finally:
            visit.unread = body.unread
    return await _counted(service, request, visit, own, inner)


async def _counted(service: Service, request: Request, visit: Visit, own: Terms, inner: Handler) -> Response:
    if visit.credential is None or own.stream:
        return await inner(request)
    tenant = visit.credential.tenant
    service.requests.enter(tenant)
    try:
        return await inner(request)
    finally:
        service.requests.leave(tenant)
