"""The outermost part: every request comes in here and leaves a line in the log.

Rules of this file:
- Plain ASGI, no framework's middleware: this is on every request's way.
- Nothing leaves without the security headers, the request's id, and one shape for errors; a bug is told as `internal` and its
  traceback stays in the log.
- Who the client is comes from the connection. `X-Forwarded-*` counts only when the connection comes from a trusted proxy.
- A request that changes something and names a foreign Origin is refused before anybody looks at its token.
- A reader that takes nothing for too long is cut, whatever it reads.
- An answer that leaves before its request has come whole is the last of its connection; what still comes is `connection`'s.
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
from sublet.studio.auth import refuse_flood
from sublet.studio.connection import Connection
from sublet.studio.service import Service, Visit
from sublet.studio.wire import Json, TooManyNow, plain_refusal, refusal

Network = IPv4Network | IPv6Network
CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
API_POLICY = b"default-src 'none'; frame-ancestors 'none'"
#: The page adds what only a browser that shows it needs.
_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cross-origin-resource-policy", b"same-origin")]
_NEVER_STORED = (b"cache-control", b"no-store")
_FOR_PROGRAMS = (b"content-security-policy", API_POLICY)
_SECURE = (b"strict-transport-security", b"max-age=31536000")


class ReaderGone(Exception):
    """Whoever asked takes nothing any more."""


class Door:
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
        visit = Visit(secrets.token_hex(8), self._arrived(scope))
        scope["sublet"] = visit
        answering = _Answering(scope, send, visit, self._service.limits.send_seconds)
        try:
            try:
                await self._admit(scope, visit)
                await self._app(scope, receive, answering)
            except ReaderGone:
                visit.status = visit.status or 499
                await answering.cut()
            except SubletError as error:
                await self._refuse(refusal(error, visit.id), scope, receive, answering)
            except Exception as error:
                self._service.log.failure("internal", error, id=visit.id, route=visit.route)
                await self._refuse(plain_refusal(500, visit.id), scope, receive, answering)
        finally:
            seconds = time.perf_counter() - begun
            self._service.meters.own.request(scope["method"], visit.route, visit.status, seconds)
            self._service.log.request(
                visit.id,
                scope["method"],
                visit.route,
                visit.status,
                seconds,
                visit.tenant,
                visit.address,
            )

    def _arrived(self, scope: Scope) -> str:
        """The client's address; behind a trusted proxy, the last one it did not make up."""
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

    async def _admit(self, scope: Scope, visit: Visit) -> None:
        headers = scope["headers"]
        method = scope["method"]
        origin = host = b""
        for name, value in headers:
            if name == b"origin":
                origin = value
            elif name == b"host":
                host = value
            elif name == b"content-length":
                visit.unread = value.strip() != b"0"
            elif name == b"transfer-encoding":
                visit.unread = True
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
        over = self._service.addresses.take(visit.address, time.monotonic())
        if over:
            await self._service.penalty(visit.address)
            raise TooManyNow("this address sends more requests than one may; nothing was done", over)
        if self._service.flooding:
            await refuse_flood(self._service, scope, visit)

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
    """A `send` that adds the headers, remembers the status and does not wait for ever."""

    __slots__ = ("_scope", "_seconds", "_send", "_visit", "begun", "over")

    def __init__(self, scope: Scope, send: Send, visit: Visit, seconds: float) -> None:
        self._scope = scope
        self._send = send
        self._visit = visit
        self._seconds = seconds
        self.begun = False
        self.over = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            self._visit.status = message["status"]
            message["headers"] = self._with_ours(message["headers"])
            await self._send(message)
            return
        self.over = not message.get("more_body", False)
        connection: Connection | None = self._scope.get("sublet.connection")
        if self.over and self._visit.unread and connection is not None and self._visit.status != 408:
            connection.swallow_after(self._scope, self._visit.tenant or self._visit.address)
        # The server waits before it writes as long as the reader has not taken what was written before. Nearly always it has.
        if connection is not None and not connection.transport.get_write_buffer_size():
            await self._send(message)
            return
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            raise ReaderGone from None

    def _with_ours(self, given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        headers = [*given, *_HEADERS, (b"x-request-id", self._visit.id.encode())]
        names = {name for name, _ in given}
        if b"cache-control" not in names:
            headers.append(_NEVER_STORED)
        if b"content-security-policy" not in names:
            headers.append(_FOR_PROGRAMS)
        if self._scope["scheme"] == "https":
            headers.append(_SECURE)
        if self._visit.unread:
            headers.append((b"connection", b"close"))
        return headers

    async def cut(self) -> None:
        """End the connection in the middle: whoever reads must not take a part for the whole."""
        connection: Connection | None = self._scope.get("sublet.connection")
        if connection is not None:
            connection.transport.abort()


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


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
