"""The way to the session host: frames in, frames out, opened by nobody here.

Rules of this file:
- One connection to the session host's socket is one operation. Bytes pass in bounded pieces; what a call
  sends and answers is never held whole here, and never unpickled.
- Tenant and session in a head are written by the service. A client's own head is read for target, parts and
  flags only.
- The session host is started when it does not run. An operation that could not begin is `Disconnected`:
  nothing ran.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from typing import Any

from sublet.core.errors import BadInput, Disconnected, SubletError, error_by_code
from sublet.core.studio import frames
from sublet.processes.loop_watch import ProcessHealth
from sublet.settings import Settings
from sublet.studio.holder.finding import (
    connected,
    ensure_session_host,
    session_host_alive,
    session_host_health,
)

CHUNK_BYTES = 1 << 16
#: The session host beats every 10 s: silent for longer than this, it is gone.
SILENCE_SECONDS = 45.0


class SessionHostRelay:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def ensure(self) -> None:
        """Starts a session host unless one runs, and blocks until it takes calls."""
        ensure_session_host(self._settings)

    def alive(self) -> bool:
        return session_host_alive(self._settings)

    def health(self) -> ProcessHealth | None:
        return session_host_health(self._settings)

    def problem(self) -> str:
        """What is wrong with the session host, in words; '' while it takes calls and its loops turn."""
        if not self.alive():
            return "unreachable"
        found = self.health()
        return found.problem if found is not None and found.late else ""

    @contextlib.asynccontextmanager
    async def operation(self) -> AsyncIterator[RelayedOperation]:
        made = await self.begin()
        try:
            yield made
        finally:
            made.close()

    async def begin(self) -> RelayedOperation:
        """Opens a connection that the caller closes."""
        loop = asyncio.get_running_loop()
        try:
            sock = connected(self._settings)
        except Disconnected:
            await loop.run_in_executor(None, self.ensure)
            sock = connected(self._settings)
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=CHUNK_BYTES)
        return RelayedOperation(reader, writer)


class RelayedOperation:
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
            return  # the reason is in the answer it sent before it closed

    async def receive(self) -> bytes:
        """The next bytes, or none when the connection is over."""
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                return await self._reader.read(CHUNK_BYTES)
        except (OSError, TimeoutError):
            return b""

    async def soon(self, seconds: float) -> bytes | None:
        """The next bytes; none when the connection is over; None when nothing came in time."""
        try:
            async with asyncio.timeout(seconds):
                return await self._reader.read(CHUNK_BYTES)
        except TimeoutError:
            return None
        except OSError:
            return b""

    async def answer(self, most: int) -> tuple[dict[str, Any], list[bytes]]:
        """The head of DONE and its parts for an operation with one answer; raises the error that FAIL
        names."""
        reader = frames.FrameReader(frames.ANSWER_KINDS, total_most=most)
        head: dict[str, Any] | None = None
        parts: list[bytes] = []
        while data := await self.receive():
            for kind, payload in reader.feed(data):
                if kind == frames.FAIL:
                    raise failure(frames.read_head(payload))
                if kind == frames.DONE:
                    head = frames.read_head(payload)
                elif kind == frames.PART and head is not None:
                    parts.append(payload)
            if head is not None and len(parts) >= frames.count_of(head, "parts", default=0):
                return head, parts
        raise Disconnected(
            "the process that holds the session went away before it answered",
            remedy="look at the session's status, then try again",
        )

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()


def failure(head: dict[str, Any]) -> SubletError:
    """The error that a FAIL frame names, as a `SubletError`."""
    code = frames.text_of(head, "code", most=64, default="error")
    message = frames.text_of(head, "message", most=4000, default="")
    remedy = frames.text_of(head, "remedy", most=4000, default="")
    kind = error_by_code(code)
    try:
        return kind(message, remedy=remedy)
    except TypeError:
        return SubletError(message, remedy=remedy)


class FrameFollower:
    """Follows frames while their bytes pass, and keeps only the payloads of small kinds."""

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
        """Yields each frame that ends in this data, with its payload if that kind is kept."""
        at, size = 0, len(data)
        while at < size:
            if not self._kind:
                taken = min(frames.HEADER.size - len(self._head), size - at)
                self._head += bytes(data[at : at + taken])
                at += taken
                if len(self._head) < frames.HEADER.size:
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
        self._kind, self._need = frames.HEADER.unpack(self._head)
        self._head = b""
        self._payload.clear()
        if self._kind not in self._kinds:
            raise BadInput(
                f"a frame of kind {self._kind} does not belong here",
                remedy="use one version of sublet on both sides",
            )
        frames.header(self._kind, self._need)  # refuses what its kind may not have


class AnswerEnd:
    """Recognises the last frame of a call's answer."""

    __slots__ = ("_parts_left", "_passing", "over")

    def __init__(self) -> None:
        self._passing = FrameFollower(frames.ANSWER_KINDS, keep=(frames.DONE,))
        self._parts_left = -1  # after DONE
        self.over = False

    @property
    def between_frames(self) -> bool:
        return self._passing.whole

    def watch(self, data: bytes) -> None:
        for kind, payload in self._passing.watch(data):
            if kind == frames.DONE:
                self._parts_left = frames.count_of(frames.read_head(payload), "parts", default=0)
            elif kind == frames.PART and self._parts_left > 0:
                self._parts_left -= 1
            if kind == frames.FAIL or self._parts_left == 0:
                self.over = True
