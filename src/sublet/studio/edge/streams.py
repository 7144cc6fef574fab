"""Answers that go on: sent as they come, ended when the reader is gone or the service leaves.

Rules of this file:
- What a stream holds (its place among the tenant's streams, a connection, a list) is released exactly once,
  even if the stream never began.
- A reader that takes nothing is cut off by the HTTP edge; one that disconnected is noticed while nothing is
  being sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

#: How often a stream looks whether it was told to end, and how long its last words may then take.
LOOK_SECONDS = 0.25
LAST_WORD_SECONDS = 0.5


class Stream(Response):
    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        media_type: str,
        *,
        close: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
        cut_when: Callable[[], bool] = lambda: False,
    ) -> None:
        """`cut_when`: whether the pieces were told to end. A reader that does not take the rest is cut."""
        self.media_type = media_type
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"X-Accel-Buffering": "no", **(headers or {})})
        # Its length is not known: `init_headers` took the empty body for it.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._pieces = pieces
        self._close = close
        self._cut_when = cut_when

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            writing = asyncio.ensure_future(self._write(send))
            gone = asyncio.ensure_future(_disconnected(receive))
            cut = asyncio.ensure_future(self._cut())
            try:
                await asyncio.wait({writing, gone, cut}, return_when=asyncio.FIRST_COMPLETED)
                if writing.done():
                    await writing
            finally:
                for task in (writing, gone, cut):
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await task
        finally:
            self._close()

    async def _cut(self) -> None:
        while not self._cut_when():
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(LAST_WORD_SECONDS)

    async def _write(self, send: Send) -> None:
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            aclose = getattr(self._pieces, "aclose", None)
            if aclose is not None:
                await aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
