"""The outermost layer: every request enters here and leaves one line in the log.

Rules of this file:
- This is plain ASGI without framework middleware, because every request passes through it.
- Every answer has the security headers, the request's id and the one error shape. A bug is reported as
  `internal`, and its traceback stays in the log.
- The client's address is the connection's. `X-Forwarded-*` counts only on connections from a trusted proxy.
- A request that changes something and names a foreign Origin is refused before its token is looked at.
- A reader that takes no bytes for too long is cut off.
- An answer sent before its request was read whole is the last of its connection; `connection` discards the
  remainder.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sublet.core.errors import Forbidden, SubletError
from sublet.studio.edge.auth import refuse_flood
from sublet.studio.edge.connection import Connection
from sublet.studio.edge.wire import Json, TooManyNow, plain_refusal, refusal
from sublet.studio.service import RequestContext, Service

Network = IPv4Network | IPv6Network
CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
API_POLICY = b"default-src 'none'; frame-ancestors 'none'"
#: The page adds what only a browser that shows it needs.
_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cross-origin-resource-policy", b"same-origin")]
_NEVER_STORED = (b"cache-control", b"no-store")
_FOR_PROGRAMS = (b"content-security-policy", API_POLICY)
_SECURE = (b"strict-transport-security", b"max-age=31536000")


class ReaderGone(Exception):
    """The client does not accept bytes any more."""


class HttpEdge:
    def __init__(self, app: ASGIApp, service: Service, proxies: Sequence[Network] = ()) -> None:
        self._app = app
        self._service = service
        self._proxies = tuple(proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        begun = time.perf_counter()
        context = RequestContext(secrets.token_hex(8), self._arrived(scope))
        scope["sublet"] = context
        answering = _Answering(scope, send, context, self._service.limits.send_seconds)
        try:
            try:
                await self._admit(scope, context)
                await self._app(scope, receive, answering)
            except ReaderGone:
                context.status = context.status or 499
                await answering.cut()
            except SubletError as error:
                await self._refuse(refusal(error, context.id), scope, receive, answering)
            except Exception as error:
                self._service.log.failure("internal", error, id=context.id, route=context.route)
                await self._refuse(plain_refusal(500, context.id), scope, receive, answering)
        finally:
            seconds = time.perf_counter() - begun
            self._service.meters.own.request(scope["method"], context.route, context.status, seconds)
            self._service.log.request(
                context.id,
                scope["method"],
                context.route,
                context.status,
                seconds,
                context.tenant,
                context.address,
            )

    def _arrived(self, scope: Scope) -> str:
        """The client's address; behind trusted proxies, the last one that they vouch for."""
        client = scope.get("client")
        address = client[0] if client else "unix"
        if not self._proxies or not _within(address, self._proxies):
            return str(address)
        for name, value in scope["headers"]:
            if name == b"x-forwarded-for":
                for part in reversed(value.decode("latin-1").split(",")):
                    candidate = part.strip()
                    if not _is_address(candidate):
                        break
                    address = candidate
                    if not _within(candidate, self._proxies):
                        break
            elif name == b"x-forwarded-proto" and value in (b"http", b"https"):
                scope["scheme"] = value.decode()
            elif name == b"x-forwarded-host":
                scope["sublet.host"] = value
        return str(address)

    async def _admit(self, scope: Scope, context: RequestContext) -> None:
        headers = scope["headers"]
        method = scope["method"]
        origin = host = b""
        for name, value in headers:
            if name == b"origin":
                origin = value
            elif name == b"host":
                host = value
            elif name == b"content-length":
                context.unread = value.strip() != b"0"
            elif name == b"transfer-encoding":
                context.unread = True
        is_foreign = (
            origin
            and method in CHANGING
            and not _same_origin(origin, scope.get("sublet.host", host), scope["scheme"])
        )
        if is_foreign:
            raise Forbidden(
                "the request comes from a page of another origin; nothing was changed",
                remedy="use the studio's own page, or a program",
            )
        over = self._service.addresses.take(context.address, time.monotonic())
        if over:
            await self._service.penalty(context.address)
            raise TooManyNow("this address sends more requests than one may; nothing was done", over)
        if self._service.flooding:
            await refuse_flood(self._service, scope, context)

    async def _refuse(self, answer: Json, scope: Scope, receive: Receive, answering: _Answering) -> None:
        if answering.over:
            return
        if answering.begun:
            await answering.cut()
            return
        try:
            await answer(scope, receive, answering)
        except ReaderGone:
            await answering.cut()


class _Answering:
    """A `send` that adds our headers, records the status and does not wait for ever."""

    __slots__ = ("_context", "_scope", "_seconds", "_send", "begun", "over")

    def __init__(self, scope: Scope, send: Send, context: RequestContext, seconds: float) -> None:
        self._scope = scope
        self._send = send
        self._context = context
        self._seconds = seconds
        self.begun = False
        self.over = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            self._context.status = message["status"]
            message["headers"] = self._with_ours(message["headers"])
            await self._send(message)
            return
        self.over = not message.get("more_body", False)
        connection: Connection | None = self._scope.get("sublet.connection")
        if self.over and self._context.unread and connection is not None and self._context.status != 408:
            connection.swallow_after(self._scope, self._context.tenant or self._context.address)
        # The server waits before it writes as long as the reader has not taken what was written before.
        # Nearly always it has.
        if connection is not None and not connection.transport.get_write_buffer_size():
            await self._send(message)
            return
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            raise ReaderGone from None

    def _with_ours(self, given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        headers = [*given, *_HEADERS, (b"x-request-id", self._context.id.encode())]
        names = {name for name, _ in given}
        if b"cache-control" not in names:
            headers.append(_NEVER_STORED)
        if b"content-security-policy" not in names:
            headers.append(_FOR_PROGRAMS)
        if self._scope["scheme"] == "https":
            headers.append(_SECURE)
        if self._context.unread:
            headers.append((b"connection", b"close"))
        return headers

    async def cut(self) -> None:
        """Aborts the connection, so that the reader does not take a part for the whole."""
        connection: Connection | None = self._scope.get("sublet.connection")
        if connection is not None:
            connection.transport.abort()


def _is_address(text: str) -> bool:
    """Whether it is one that may stand in a log line. The zone of an IPv6 address may be any text at all."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def _within(text: str, networks: Sequence[Network]) -> bool:
    try:
        address = ip_address(text)
    except ValueError:
        return False
    return any(address.version == n.version and address in n for n in networks)


def _same_origin(origin: bytes, host: bytes, scheme: str) -> bool:
    try:
        parts = urlsplit(origin.decode("ascii"))
        ours = urlsplit(f"{scheme}://{host.decode('ascii')}")
        usual = {"http": 80, "https": 443}
        return (parts.scheme, parts.hostname, parts.port or usual.get(parts.scheme)) == (
            ours.scheme,
            ours.hostname,
            ours.port or usual.get(ours.scheme),
        )
    except (UnicodeDecodeError, ValueError):
        return False
