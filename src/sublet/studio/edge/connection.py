"""One connection: the limits that the server's own parser does not have.

Rules of this file:
- A client has limited time and size for its headers. Without that, a few thousand idle connections would fill
  a server.
- A request that cannot be parsed is answered in the same error shape as any other.
- A client that is refused while it still sends may finish, within bounds (`limits.UnreadBodies`): closing a
  connection with unread bytes resets it, and the reset discards the refusal before the client has read it.
- A peer that accepts no bytes at all is dropped by the kernel (`TCP_USER_TIMEOUT`).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sublet.studio.edge.limits import EdgeLimits, UnreadBodies
from sublet.studio.edge.wire import PLAIN, dumped, error_json

HEADERS_MOST = 100
URL_MOST_BYTES = 8192
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


#: What is refused before it is a request, while its client may still send.
_UNREADABLE = (400, 431)


def connection_class(unread: UnreadBodies) -> type[HttpToolsProtocol]:
    """The connection class for one server's limits."""
    return type("LimitedConnection", (Connection,), {"limits": unread.limits, "unread": unread})


class UnreadRemainder:
    """Reads and discards what a client still sends after it was refused, and soon closes the connection."""

    def __init__(self, transport: asyncio.Transport, unread: UnreadBodies, key: str) -> None:
        self._transport = transport
        self._unread = unread
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + unread.limits.unread_seconds
        self._bytes = 0
        self._seen = 0  # bytes at the last look
        self._paused = False
        self._timer = self._later()

    def came(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._unread.limits.unread_bytes:
            self._transport.close()
            return
        wait = self._unread.spend(self._key, size, self._loop.time())
        if wait and not self._paused:
            self._paused = True
            self._transport.pause_reading()
            self._loop.call_later(wait, self._go_on)

    def over(self) -> None:
        self._timer.cancel()
        self._unread.leave(self._key)

    def _go_on(self) -> None:
        self._paused = False
        self._seen = -1  # it was paused by us, not silent
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _later(self) -> asyncio.TimerHandle:
        return self._loop.call_later(self._unread.limits.unread_silent_seconds, self._look)

    def _look(self) -> None:
        if self._loop.time() >= self._until or (self._bytes == self._seen and not self._paused):
            self._transport.close()
            return
        self._seen = self._bytes
        self._timer = self._later()


class Connection(HttpToolsProtocol):
    limits: EdgeLimits
    unread: UnreadBodies

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._in_headers = True
        self._header_bytes = 0
        self._late: asyncio.TimerHandle | None = None
        self._refused: str | None = None  # whose request it was that is not read
        self._rest: UnreadRemainder | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._end_with(503, "the service has as many connections as it can hold; nothing was done")
            return
        found = transport.get_extra_info("socket")
        if found is not None and found.family in (socket.AF_INET, socket.AF_INET6):
            patience = int(1000 * (self.limits.send_seconds + 5))
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._rest is not None:
            self._rest.over()
            self._rest = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._rest is not None:
            self._rest.came(len(data))
            return
        # In pieces of what headers may have, so that no more than that is parsed before it is counted.
        most = self.limits.header_bytes
        for at in range(0, len(data), most):
            self._parse(data[at : at + most])
            if self._rest is not None or self.transport.is_closing():
                return

    def _parse(self, data: bytes) -> None:
        room = self.limits.header_bytes - self._header_bytes
        if self._in_headers and len(data) > room:
            if room:
                super().data_received(data[:room])
                self._count(room)
            if self._in_headers:
                self._end_with(431)
                return
            data = data[room:]
            if self._rest is not None or self.transport.is_closing():
                return
        super().data_received(data)
        self._count(len(data))

    def _count(self, size: int) -> None:
        if self._in_headers and self._rest is None and not self.transport.is_closing():
            self._header_bytes += size
            if self._late is None:
                self._arm()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0
        self.scope["sublet.connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._disarm()
        if len(self.headers) > HEADERS_MOST or len(self.url) > URL_MOST_BYTES:
            raise ValueError("more headers than a request has")
        super().on_headers_complete()

    def swallow_after(self, scope: Any, key: str) -> None:
        """Called before the last piece of an answer is sent, to discard what still comes of its request."""
        if self.cycle.scope is scope and self.cycle.more_body:
            self._refused = key
            self.cycle.keep_alive = (
                True  # else the server ends the connection with the last byte of the answer
            )

    def on_response_complete(self) -> None:
        if self._refused is None:
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self._swallow(self._refused)

    def _swallow(self, key: str) -> None:
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if not self.unread.enter(key):
            self.transport.close()
            return
        self._rest = UnreadRemainder(self.transport, self.unread, key)
        if self.transport.can_write_eof():
            self.transport.write_eof()  # a client that reads to the end has the answer now
        self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        self._end_with(400)

    def _arm(self) -> None:
        self._late = self.loop.call_later(self.limits.header_seconds, self._too_late)

    def _disarm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if self._in_headers and not self.transport.is_closing():
            self._end_with(408)

    def _end_with(self, status: int, message: str = "") -> None:
        self._disarm()
        request_id = secrets.token_hex(8)
        code, usual, remedy = PLAIN[status]
        body = dumped(error_json(code, message or usual, remedy, request_id))
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %s\r\n"
            b"cache-control: no-store\r\nx-content-type-options: nosniff\r\nconnection: close\r\n\r\n%s"
            % (status, _REASONS[status], len(body), request_id.encode(), body)
        )
        if status in _UNREADABLE and (self.cycle is None or self.cycle.response_complete):
            self._swallow(self.client[0] if self.client else "unix")
        else:
            self.transport.close()
