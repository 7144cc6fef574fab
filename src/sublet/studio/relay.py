"""The way to the attendant: frames in, frames out, opened by nobody here.

Rules of this file:
- One connection of the attendant's socket is one operation. Bytes pass in bounded pieces; what a call sends and answers is never held whole
  here, and never unpickled.
- Tenant and session in a head are the service's own words. What a client sends as a head is read for its target, parts and flags only.
- The attendant is started when it is not there. An operation that could not be begun is `Disconnected`: nothing ran.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from typing import Any

from sublet.core.errors import BadInput, Disconnected, SubletError, error_by_code
from sublet.ports import sealed
from sublet.settings import Settings
from sublet.studio.attendant.finding import attendant_alive, connected, ensure_attendant

CHUNK_BYTES = 1 << 16
#: The attendant beats every 10 s: silent for longer than this, it is gone.
SILENCE_SECONDS = 45.0


class Relay:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def ensure(self) -> None:
        """Blocking: start one unless one runs, and wait until it takes calls."""
        ensure_attendant(self._settings)

    def alive(self) -> bool:
        return attendant_alive(self._settings)

    @contextlib.asynccontextmanager
    async def operation(self) -> AsyncIterator[Operation]:
        made = await self.begin()
        try:
            yield made
        finally:
            made.close()

    async def begin(self) -> Operation:
        """A connection that its user closes."""
        loop = asyncio.get_running_loop()
        try:
            sock = connected(self._settings)
        except Disconnected:
            await loop.run_in_executor(None, self.ensure)
            sock = connected(self._settings)
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=CHUNK_BYTES)
        return Operation(reader, writer)


class Operation:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, pieces: Iterable[bytes | memoryview]) -> None:
        try:
            for piece in pieces:
                self._writer.write(piece)
                async with asyncio.timeout(SILENCE_SECONDS):
                    await self._writer.drain()
        except (OSError, TimeoutError):
            return  # why is in what it answered before it went

    async def receive(self) -> bytes:
        """Some bytes, or none when it is over."""
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                return await self._reader.read(CHUNK_BYTES)
        except (OSError, TimeoutError):
            return b""

    async def soon(self, seconds: float) -> bytes | None:
        """Some bytes; none when it is over; None when nothing came in this time."""
        try:
            async with asyncio.timeout(seconds):
                return await self._reader.read(CHUNK_BYTES)
        except TimeoutError:
            return None
        except OSError:
            return b""

    async def answer(self, most: int) -> tuple[dict[str, Any], list[bytes]]:
        """Of an operation that is answered once: the head of DONE and its parts, or the error that FAIL names."""
        frames = sealed.Frames(sealed.ANSWER_KINDS, total_most=most)
        head: dict[str, Any] | None = None
        parts: list[bytes] = []
        while data := await self.receive():
            for kind, payload in frames.feed(data):
                if kind == sealed.FAIL:
                    raise failure(sealed.read_head(payload))
                if kind == sealed.DONE:
                    head = sealed.read_head(payload)
                elif kind == sealed.PART and head is not None:
                    parts.append(payload)
            if head is not None and len(parts) >= sealed.count_of(head, "parts", default=0):
                return head, parts
        raise Disconnected(
            "the process that holds the session went away before it answered",
            remedy="look at the session's status, then try again",
        )

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()


def failure(head: dict[str, Any]) -> SubletError:
    """The error a FAIL frame tells of, as one of ours."""
    code = sealed.text_of(head, "code", most=64, default="error")
    message = sealed.text_of(head, "message", most=4000, default="")
    remedy = sealed.text_of(head, "remedy", most=4000, default="")
    kind = error_by_code(code)
    try:
        return kind(message, remedy=remedy)
    except TypeError:
        return SubletError(message, remedy=remedy)


class Passing:
    """Follows frames while their bytes pass, and keeps nothing of them but the payloads of small kinds."""

    __slots__ = ("_head", "_keep", "_kind", "_kinds", "_need", "_payload")

    def __init__(self, kinds: Collection[int], keep: Collection[int] = ()) -> None:
        self._kinds = kinds
        self._keep = keep
        self._head = b""
        self._kind = 0  # of the frame whose payload passes; 0: a header is expected
        self._need = 0  # bytes of it still to come
        self._payload = bytearray()

    @property
    def whole(self) -> bool:
        """Whether the stream may end here."""
        return not self._kind and not self._head

    def watch(self, data: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
        """Each frame that ends in here; its payload only if it is kept."""
        at, size = 0, len(data)
        while at < size:
            if not self._kind:
                taken = min(sealed.HEADER.size - len(self._head), size - at)
                self._head += bytes(data[at : at + taken])
                at += taken
                if len(self._head) < sealed.HEADER.size:
                    return
                self._begin()
            taken = min(self._need, size - at)
            if self._kind in self._keep:
                self._payload += data[at : at + taken]
            at += taken
            self._need -= taken
            if self._need:
                return
            kind, self._kind = self._kind, 0
            yield kind, bytes(self._payload)

    def _begin(self) -> None:
        self._kind, self._need = sealed.HEADER.unpack(self._head)
        self._head = b""
        self._payload.clear()
        if self._kind not in self._kinds:
            raise BadInput(
                f"a frame of kind {self._kind} does not belong here",
                remedy="use one version of sublet on both sides",
            )
        sealed.header(self._kind, self._need)  # refuses what its kind may not have


class Ending:
    """Knows when the last frame of a call's answer has passed."""

    __slots__ = ("_parts_left", "_passing", "over")

    def __init__(self) -> None:
        self._passing = Passing(sealed.ANSWER_KINDS, keep=(sealed.DONE,))
        self._parts_left = -1  # after DONE
        self.over = False

    def watch(self, data: bytes) -> None:
        for kind, payload in self._passing.watch(data):
            if kind == sealed.DONE:
                self._parts_left = sealed.count_of(sealed.read_head(payload), "parts", default=0)
            elif kind == sealed.PART and self._parts_left > 0:
                self._parts_left -= 1
            if kind == sealed.FAIL or self._parts_left == 0:
                self.over = True
