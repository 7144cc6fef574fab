"""One connection: what the server's own parser does not bound.

Rules of this file:
- A client has a time to send its headers, and a size. Without one, a few thousand idle connections are all a server can hold.
- What cannot be parsed gets the one shape of errors too.
- A peer that takes nothing at all is dropped by the kernel (`TCP_USER_TIMEOUT`), whatever was being sent.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sublet.studio.limits import Limits
from sublet.studio.wire import PLAIN, dumped, error_json

HEADERS_MOST = 100
URL_MOST_BYTES = 8192
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def connection_class(limits: Limits) -> type[HttpToolsProtocol]:
    """For one server's limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})


class Connection(HttpToolsProtocol):
    limits: Limits

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._in_headers = True
        self._header_bytes = 0
        self._late: asyncio.TimerHandle | None = None

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
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > self.limits.header_bytes:
                self._end_with(431)
            elif self._late is None:
                self._arm()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0
        self.scope["sublet.transport"] = self.transport  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._disarm()
        if len(self.headers) > HEADERS_MOST or len(self.url) > URL_MOST_BYTES:
            raise ValueError("more headers than a request has")
        super().on_headers_complete()

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
        self.transport.close()
