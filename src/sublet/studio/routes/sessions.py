"""The routes of sessions: open, look, wait, touch, answer, resume, end.

Rules of this file:
- Every verb takes the token's tenant. Another tenant's session, an unknown one and an impossible id are the
  same 404.
- Looking and touching happen many times a minute for every session: each costs one read, and touches are
  written in batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request

from sublet.core.errors import BadInput, NotFound
from sublet.core.studio.isolation import refusal
from sublet.core.studio.session import ID_BYTES, SessionStatus, StudioSession
from sublet.core.studio.token import Credential
from sublet.json_shapes import Shape, isolation_json, seen_version, session_json
from sublet.ports.ledger import SessionAnswer
from sublet.studio.edge.auth import Access, BodyLimit, credential, is_operator, terms
from sublet.studio.edge.wire import Json
from sublet.studio.routes.requests import OpenSession
from sublet.studio.service import Service
from sublet.studio.views.pricing import Pricing

SESSION_ID = re.compile(rf"S[0-9a-f]{{{2 * ID_BYTES}}}")
WAIT_MOST_SECONDS = 60.0
#: A status can change by the clock alone, when an offer runs out or a lease expires.
LOOK_SECONDS = 1.0
_ENDING = "ended by its tenant"


def no_session() -> NotFound:
    return NotFound(
        "there is no such session", remedy="GET /v1/sessions lists yours; a checkpoint outlives its session"
    )


def session_id_of(request: Request) -> str:
    text: str = request.path_params["session_id"]
    if SESSION_ID.fullmatch(text) is None:
        raise no_session()
    return text


def named_session(request: Request) -> SessionAnswer:
    """The session as read together with the request's token, for routes that do nothing in between."""
    answer: SessionAnswer | None = request.scope["sublet"].session
    if answer is None:
        raise no_session()
    return answer


class SessionReads:
    """Reads of sessions that the routes of this file and of `calls` share."""

    def __init__(self, service: Service, pricing: Pricing) -> None:
        self._service = service
        self._ledger = service.ledger
        self._pricing = pricing

    async def look(self, session_id: str, who: Credential, *, explain: bool = False) -> SessionAnswer:
        tenant = who.tenant
        try:
            if explain:
                return await self._service.work(
                    lambda: self._ledger.look_session(session_id, tenant, explain=True)
                )
            return await self._service.quick(lambda: self._ledger.look_session(session_id, tenant))
        except NotFound:
            raise no_session() from None

    async def shown(self, answer: SessionAnswer, who: Credential) -> Shape:
        """The session as JSON, with its place in the waitlist while it waits, and its usage."""
        if answer.status in (SessionStatus.WAITING, SessionStatus.OFFERED) and answer.wait is None:
            answer = await self.look(answer.session.id, who, explain=True)
        usage = await self._pricing.usage_of(answer)
        return session_json(
            answer, usage, await self._pricing.offer_of(answer), self.isolation_of(answer.session)
        )

    def isolation_of(self, session: StudioSession) -> Shape | None:
        """What keeps it apart from other tenants' sessions; None for a session of another host."""
        here = session.host == self._service.host
        return isolation_json(self._service.isolation) if here else None


class SessionRoutes:
    def __init__(self, service: Service, sessions: SessionReads, pricing: Pricing) -> None:
        self._service = service
        self._ledger = service.ledger
        self._sessions = sessions
        self._pricing = pricing

    @terms(Access.USER, lean=True)
    async def look(self, request: Request) -> Json:
        who = credential(request)
        answer = named_session(request)
        if request.scope["query_string"]:
            answer = await self._waited(request, who, answer)
        return Json(await self._sessions.shown(answer, who))

    @terms(Access.USER, body=BodyLimit.JSON, lean=True)
    async def touch(self, request: Request) -> Json:
        who = credential(request)
        answer = named_session(request)
        if not answer.session.ended_at:
            self._service.touches.add(answer.session.id, who.tenant)
        return Json(await self._sessions.shown(answer, who))

    @terms(Access.USER, body=BodyLimit.JSON)
    async def open_session(self, request: Request, body: OpenSession) -> Json:
        who = credential(request)
        session_id = body.id or f"S{secrets.token_hex(ID_BYTES)}"
        if SESSION_ID.fullmatch(session_id) is None:
            raise BadInput(f"id is S and {2 * ID_BYTES} hexadecimal digits; leave it out, and one is made")
        wish = body.request(who.tenant, session_id, self._service.host)
        isolation = self._service.isolation
        with self._service.tracing.span("session.open", {"sublet.session_id": session_id}):
            await self._service.work(self._service.relay.ensure)
            answer = await self._service.work(
                lambda: self._ledger.open_session(
                    session_id,
                    who.tenant,
                    request=wish,
                    warm_us=body.warm_us(),
                    name=body.name,
                    checkpoint=body.checkpoint,
                    host=self._service.host,
                    alone=None if isolation.admits_others else refusal(isolation.missing),
                )
            )
        return Json(await self._sessions.shown(answer, who), 201, {"Location": f"/v1/sessions/{session_id}"})

    @terms(Access.USER)
    async def list_sessions(
        self,
        request: Request,
        open: bool = True,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
        tenant: Annotated[str, Query(max_length=64)] = "",
    ) -> Json:
        who = credential(request)
        whose = tenant if is_operator(who) else who.tenant

        def read() -> tuple[list[SessionAnswer], dict[str, Shape]]:
            listed = self._ledger.sessions(tenant=whose, open_only=open, limit=limit)
            return listed, self._pricing.usages_now(whose, listed)

        found, usage = await self._service.work(read)
        if any(a.status is SessionStatus.OFFERED for a in found):
            await self._pricing.refresh()
        return Json(
            {
                "sessions": [
                    session_json(
                        a,
                        usage.get(a.session.id),
                        self._pricing.offer_now(a),
                        self._sessions.isolation_of(a.session),
                    )
                    for a in found
                ]
            }
        )

    @terms(Access.USER, body=BodyLimit.JSON)
    async def accept(self, request: Request, session_id: str) -> Json:
        return await self._answered(request, True)

    @terms(Access.USER, body=BodyLimit.JSON)
    async def decline(self, request: Request, session_id: str) -> Json:
        return await self._answered(request, False)

    async def _answered(self, request: Request, yes: bool) -> Json:
        who, session_id = credential(request), session_id_of(request)
        await self._sessions.look(session_id, who)
        answer = await self._service.work(
            lambda: self._ledger.answer_offer(session_id, who.tenant, accept=yes)
        )
        return Json(await self._sessions.shown(answer, who))

    @terms(Access.USER, body=BodyLimit.JSON)
    async def resume(self, request: Request, session_id: str) -> Json:
        who, session_id = credential(request), session_id_of(request)
        await self._sessions.look(session_id, who)
        await self._service.work(self._service.relay.ensure)
        answer = await self._service.work(lambda: self._ledger.resume_session(session_id, who.tenant))
        return Json(await self._sessions.shown(answer, who))

    @terms(Access.USER, body=BodyLimit.JSON)
    async def end(self, request: Request, session_id: str) -> Json:
        who, session_id = credential(request), session_id_of(request)
        await self._sessions.look(session_id, who)
        answer = await self._service.work(
            lambda: self._ledger.end_session(
                session_id, who.tenant, detail=_ENDING, actor=f"token {who.token_id}"
            )
        )
        return Json(await self._sessions.shown(answer, who))

    async def _waited(self, request: Request, who: Credential, answer: SessionAnswer) -> SessionAnswer:
        """Waits until the session differs from the client's version, the time is over, or the service
        leaves."""
        seconds, version = _wait_of(request)
        if not seconds:
            return answer
        known = seen_version(answer) if version is None else version
        until = time.monotonic() + seconds
        with self._service.streams.counted(who.tenant):
            while seen_version(answer) == known and not self._service.leaving:
                left = until - time.monotonic()
                if left <= 0:
                    break
                # Watch before looking again, so that no change is missed in between.
                with self._service.live.watching(answer.session.id, answer.session.lease_id) as rung:
                    answer = await self._sessions.look(answer.session.id, who)
                    if seen_version(answer) != known:
                        break
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(left, LOOK_SECONDS)):
                            await rung.wait()
                answer = await self._sessions.look(answer.session.id, who)
        return answer


def add_sessions(router: APIRouter, service: Service, pricing: Pricing) -> SessionReads:
    sessions = SessionReads(service, pricing)
    routes = SessionRoutes(service, sessions, pricing)
    # The two that are asked most come first: routes are tried in order.
    router.get(
        "/v1/sessions/{session_id}",
        summary="A session as it stands; with ?wait= when it differs from ?version=",
    )(routes.look)
    router.post("/v1/sessions/{session_id}/touch", summary="It is in use: its lease goes on")(routes.touch)
    router.post(
        "/v1/sessions", status_code=201, summary="Open a session: it waits for a GPU, and keeps its place"
    )(routes.open_session)
    router.get("/v1/sessions", summary="Your sessions, newest first")(routes.list_sessions)
    router.post("/v1/sessions/{session_id}/accept", summary="Take the smaller slice that is offered")(
        routes.accept
    )
    router.post(
        "/v1/sessions/{session_id}/decline", summary="Leave the offer, and keep the place in the waitlist"
    )(routes.decline)
    router.post("/v1/sessions/{session_id}/resume", summary="A suspended session wants a GPU again")(
        routes.resume
    )
    router.delete(
        "/v1/sessions/{session_id}", summary="End a session: its GPU goes back, its checkpoint stays"
    )(routes.end)
    return sessions


def _wait_of(request: Request) -> tuple[float, int | None]:
    given = request.query_params
    unknown = set(given) - {"wait", "version"}
    if unknown:
        raise BadInput("this address knows the parameters wait and version")
    wait, version = given.get("wait", "0"), given.get("version")
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", wait, re.ASCII):
        raise BadInput("wait is a number of seconds, such as 20")
    if version is not None and not re.fullmatch(r"[0-9]{1,18}", version, re.ASCII):
        raise BadInput("version is the number that was in the session you have")
    return min(float(wait), WAIT_MOST_SECONDS), int(version) if version is not None else None
