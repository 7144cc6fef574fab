"""The routes of sessions: open, look, wait, touch, answer, resume, end.

Rules of this file:
- Every verb takes the tenant of the token. Another tenant's session, one that never was and an id that could not be one are the same 404.
- Looking and touching are on everybody's way many times a minute: one read each, and what was used is written down together, later.
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
from sublet.core.session import ID_BYTES, SessionStatus
from sublet.core.token import Credential
from sublet.ports.ledger import SessionAnswer
from sublet.studio.auth import Body, Opens, credential, is_operator, terms
from sublet.studio.bodies import OpenSession
from sublet.studio.pricing import Pricing
from sublet.studio.service import Service
from sublet.studio.shapes import Shape, seen_version, session_shape
from sublet.studio.wire import Json

SESSION_ID = re.compile(rf"S[0-9a-f]{{{2 * ID_BYTES}}}")
WAIT_MOST_SECONDS = 60.0
#: A status can change by the clock alone: an offer that runs out, a lease that expires.
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
    """As it was when the request's token was looked up: for routes that do nothing in between."""
    answer: SessionAnswer | None = request.scope["sublet"].session
    if answer is None:
        raise no_session()
    return answer


class Sessions:
    """What the routes of this file and of `calls` do to sessions."""

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
        """With where it stands in the waitlist, when it waits, and what it has used."""
        if answer.status in (SessionStatus.WAITING, SessionStatus.OFFERED) and answer.wait is None:
            answer = await self.look(answer.session.id, who, explain=True)
        usage = await self._pricing.usage_of(answer)
        return session_shape(answer, usage, await self._pricing.offer_of(answer))


def add_sessions(router: APIRouter, service: Service, pricing: Pricing) -> Sessions:
    ledger = service.ledger
    sessions = Sessions(service, pricing)

    # The two hot ones first: routes are tried in order.

    @router.get(
        "/v1/sessions/{session_id}",
        summary="A session as it stands; with ?wait= when it differs from ?version=",
    )
    @terms(Opens.USER, lean=True)
    async def look(request: Request) -> Json:
        who = credential(request)
        answer = named_session(request)
        if request.scope["query_string"]:
            answer = await _waited(service, sessions, request, who, answer)
        return Json(await sessions.shown(answer, who))

    @router.post("/v1/sessions/{session_id}/touch", summary="It is in use: its lease goes on")
    @terms(Opens.USER, body=Body.JSON, lean=True)
    async def touch(request: Request) -> Json:
        who = credential(request)
        answer = named_session(request)
        if not answer.session.ended_at:
            service.touches.add(answer.session.id, who.tenant)
        return Json(await sessions.shown(answer, who))

    @router.post(
        "/v1/sessions", status_code=201, summary="Open a session: it waits for a GPU, and keeps its place"
    )
    @terms(Opens.USER, body=Body.JSON)
    async def open_session(request: Request, body: OpenSession) -> Json:
        who = credential(request)
        session_id = body.id or f"S{secrets.token_hex(ID_BYTES)}"
        if SESSION_ID.fullmatch(session_id) is None:
            raise BadInput(f"id is S and {2 * ID_BYTES} hexadecimal digits; leave it out, and one is made")
        wish = body.request(who.tenant, session_id, service.host)
        with service.tracing.span("session.open", {"sublet.session_id": session_id}):
            await service.work(service.relay.ensure)
            answer = await service.work(
                lambda: ledger.open_session(
                    session_id,
                    who.tenant,
                    request=wish,
                    warm_us=body.warm_us(),
                    name=body.name,
                    checkpoint=body.checkpoint,
                    host=service.host,
                )
            )
        return Json(await sessions.shown(answer, who), 201, {"Location": f"/v1/sessions/{session_id}"})

    @router.get("/v1/sessions", summary="Your sessions, newest first")
    @terms(Opens.USER)
    async def list_sessions(
        request: Request,
        open: bool = True,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
        tenant: Annotated[str, Query(max_length=64)] = "",
    ) -> Json:
        who = credential(request)
        whose = tenant if is_operator(who) else who.tenant

        def read() -> tuple[list[SessionAnswer], dict[str, Shape]]:
            listed = ledger.sessions(tenant=whose, open_only=open, limit=limit)
            return listed, pricing.usages_now(whose, listed)

        found, usage = await service.work(read)
        if any(a.status is SessionStatus.OFFERED for a in found):
            await pricing.refresh()
        return Json(
            {"sessions": [session_shape(a, usage.get(a.session.id), pricing.offer_now(a)) for a in found]}
        )

    @router.post("/v1/sessions/{session_id}/accept", summary="Take the smaller slice that is offered")
    @terms(Opens.USER, body=Body.JSON)
    async def accept(request: Request, session_id: str) -> Json:
        return await _answered(request, True)

    @router.post(
        "/v1/sessions/{session_id}/decline", summary="Leave the offer, and keep the place in the waitlist"
    )
    @terms(Opens.USER, body=Body.JSON)
    async def decline(request: Request, session_id: str) -> Json:
        return await _answered(request, False)

    async def _answered(request: Request, yes: bool) -> Json:
        who, session_id = credential(request), session_id_of(request)
        await sessions.look(session_id, who)
        answer = await service.work(lambda: ledger.answer_offer(session_id, who.tenant, accept=yes))
        return Json(await sessions.shown(answer, who))

    @router.post("/v1/sessions/{session_id}/resume", summary="A suspended session wants a GPU again")
    @terms(Opens.USER, body=Body.JSON)
    async def resume(request: Request, session_id: str) -> Json:
        who, session_id = credential(request), session_id_of(request)
        await sessions.look(session_id, who)
        await service.work(service.relay.ensure)
        answer = await service.work(lambda: ledger.resume_session(session_id, who.tenant))
        return Json(await sessions.shown(answer, who))

    @router.delete(
        "/v1/sessions/{session_id}", summary="End a session: its GPU goes back, its checkpoint stays"
    )
    @terms(Opens.USER, body=Body.JSON)
    async def end(request: Request, session_id: str) -> Json:
        who, session_id = credential(request), session_id_of(request)
        await sessions.look(session_id, who)
        answer = await service.work(
            lambda: ledger.end_session(session_id, who.tenant, detail=_ENDING, actor=f"token {who.token_id}")
        )
        return Json(await sessions.shown(answer, who))

    return sessions


async def _waited(
    service: Service, sessions: Sessions, request: Request, who: Credential, answer: SessionAnswer
) -> SessionAnswer:
    """Until it differs from the version the client has, or the time is over, or the service leaves."""
    seconds, version = _wait_of(request)
    if not seconds:
        return answer
    known = seen_version(answer) if version is None else version
    until = time.monotonic() + seconds
    with service.streams.counted(who.tenant):
        while seen_version(answer) == known and not service.leaving:
            left = until - time.monotonic()
            if left <= 0:
                break
            # Watched before it is looked at again, so that nothing falls between.
            with service.live.watching(answer.session.id, answer.session.lease_id) as rung:
                answer = await sessions.look(answer.session.id, who)
                if seen_version(answer) != known:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left, LOOK_SECONDS)):
                        await rung.wait()
            answer = await sessions.look(answer.session.id, who)
    return answer


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
