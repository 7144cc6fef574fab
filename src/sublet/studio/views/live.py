"""The live stream: every journal row, once and in order, to whoever may see it.

Rules of this file:
- One reader of the journal serves all listeners. A bell wakes it, and it looks twice a second anyway.
- Rows leave in the order of their numbers, and a number is skipped only when no running transaction can still
  fill it: on a ledger with many writers a lower number can become visible after a higher one. So a client
  that has seen number N has seen all it may see up to N, and resumes from N, here or at another instance.
- A listener's list is bounded. When it is full the stream ends with a `gap`, and the client resumes from its
  last row.
- A tenant sees its own rows, an operator all. The stream of a revoked or expired token ends
  (`edge.token_watch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence

from fastapi import APIRouter
from starlette.requests import Request

from sublet.core.errors import BadInput, SubletError
from sublet.core.journal.chain import Entry
from sublet.core.studio.token import Credential
from sublet.ports.bell import JOURNAL_TOPIC
from sublet.ports.ledger import Followed
from sublet.studio.edge.auth import Access, credential, is_operator, terms
from sublet.studio.edge.streams import Stream
from sublet.studio.edge.token_watch import TokenHold
from sublet.studio.edge.wire import dumped
from sublet.studio.service import Service

LOOK_US = 500_000
PAGE = 1000
#: Rows read again when the service starts, so that none that was being written just then is missed.
WINDOW = 1000
#: How long after taking its number a transaction may become visible as running.
SETTLE_SECONDS = 0.25
BEAT_SECONDS = 15.0
#: A client that missed more rows than this gets a `gap` and reloads everything instead.
BACKLOG_ROWS = 20_000
#: What an event that waits costs beside its bytes, about.
EVENT_OVERHEAD = 200


class JournalOrder:
    """Takes journal rows as they become visible, and yields them in order of their numbers."""

    def __init__(self, reached: int) -> None:
        self.reached = reached
        self._dead_below = reached + 1  # a missing number below this will never appear
        self._blocked: tuple[int, int, float] | None = (
            None  # missing below this; begun before this; since when
        )

    def advance(self, found: Followed, now: float) -> Iterator[tuple[int, Entry]]:
        if self._blocked is not None:
            below, begun_before, since = self._blocked
            if found.running_from >= begun_before and now - since >= SETTLE_SECONDS:
                self._dead_below, self._blocked = below, None
        for number, entry in found.rows:
            if number <= self.reached:
                continue
            if max(self.reached + 1, self._dead_below) < number:
                if self._blocked is None:
                    self._blocked = (number, found.begun_before, now)
                return
            self.reached = number
            yield number, entry

    @property
    def blocked(self) -> bool:
        return self._blocked is not None


class EventListener:
    def __init__(self, who: Credential, most: int, most_bytes: int) -> None:
        self.who = who
        self.tenant = "" if is_operator(who) else who.tenant
        self.ended = ""  # why, when it is over
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._items: deque[tuple[int, bytes]] = deque()
        self._woken = asyncio.Event()

    def put(self, number: int, event: bytes) -> None:
        if self.ended:
            return
        size = len(event) + EVENT_OVERHEAD
        if len(self._items) >= self._most or (self._items and self._bytes + size > self._most_bytes):
            self.end("gap")
            return
        self._items.append((number, event))
        self._bytes += size
        self._woken.set()

    def end(self, why: str) -> None:
        self.ended = self.ended or why
        self._woken.set()

    async def next(self, seconds: float) -> list[tuple[int, bytes]]:
        """The waiting events, or none after so many seconds."""
        if not self._items and not self.ended:
            self._woken.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._woken.wait()
            except TimeoutError:
                return []
        taken = list(self._items)
        self._items.clear()
        self._bytes = 0
        return taken


class LiveEvents:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._order = JournalOrder(0)
        self._listeners: set[EventListener] = set()
        self._watched: dict[str, set[asyncio.Event]] = {}
        self._rung = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = threading.Event()

    @property
    def reached(self) -> int:
        """The row up to which everything has been seen."""
        return self._order.reached

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    async def start(self) -> None:
        newest = await self._service.work(lambda: self._service.ledger.tail(limit=1))
        self._service.set_clock(
            await self._service.work(self._service.ledger.now)
        )  # before the first request
        self._order = JournalOrder(max(0, newest[-1][0] - WINDOW) if newest else 0)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read()), loop.create_task(self._service.tokens.run())]
        threading.Thread(target=self._hear, args=(loop,), name="journal-bell", daemon=True).start()

    def tell_all(self, why: str) -> None:
        """Ends every stream with this reason."""
        for listener in self._listeners:
            listener.end(why)

    async def close(self) -> None:
        self._stopped.set()
        self.tell_all("leaving")
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # reading

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in its own thread, because waiting for a bell blocks."""
        while not self._stopped.is_set():
            try:
                bell = self._service.ledger.bell()
                try:
                    bell.listen(JOURNAL_TOPIC)
                    while not self._stopped.is_set():
                        if bell.wait(LOOK_US):
                            loop.call_soon_threadsafe(self._rung.set)
                finally:
                    bell.close()
            except (SubletError, OSError):
                self._stopped.wait(1.0)  # the ledger cannot be reached; rows are polled for meanwhile
            except RuntimeError:
                return  # the loop is gone

    async def _read(self) -> None:
        while True:
            try:
                more = await self._look()
            except asyncio.CancelledError:
                raise
            except SubletError as e:
                self._service.log.event("journal not read", level="warning", error=e.message)
                await asyncio.sleep(1.0)
                continue
            except Exception as e:
                self._service.log.failure("journal not read", e)
                await asyncio.sleep(1.0)
                continue
            if more:
                continue
            self._rung.clear()
            pause = SETTLE_SECONDS if self._order.blocked else LOOK_US / 1e6
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._rung.wait()

    async def _look(self) -> bool:
        """Reads and delivers one page; True when there may be more."""
        before = self._order.reached
        found = await self._service.work(lambda: self._service.ledger.follow(after=before, limit=PAGE))
        self._service.set_clock(found.at)
        for number, entry in self._order.advance(found, time.monotonic()):
            self._deliver(number, entry)
        return len(found.rows) == PAGE and self._order.reached > before

    def _deliver(self, number: int, entry: Entry) -> None:
        for watcher in self._watched.get(entry.subject, ()):
            watcher.set()
        event: bytes | None = None
        for listener in self._listeners:
            if not listener.tenant or listener.tenant == entry.tenant:
                event = event or event_bytes(number, entry)
                listener.put(number, event)

    # listening

    def join(self, listener: EventListener) -> int:
        """Adds a listener; returns the row after which it gets everything."""
        self._listeners.add(listener)
        return self.reached

    def leave(self, listener: EventListener) -> None:
        self._listeners.discard(listener)

    @contextlib.contextmanager
    def watching(self, *subjects: str) -> Iterator[asyncio.Event]:
        """An event that is set when a row about one of these subjects is written."""
        event = asyncio.Event()
        for subject in subjects:
            self._watched.setdefault(subject, set()).add(event)
        try:
            yield event
        finally:
            for subject in subjects:
                left = self._watched.get(subject, set())
                left.discard(event)
                if not left:
                    self._watched.pop(subject, None)


def event_bytes(number: int, entry: Entry) -> bytes:
    """One server-sent event. `body` is JSON text already, in one line."""
    head = dumped(
        {
            "id": number,
            "at": entry.at / 1e6,
            "kind": entry.kind,
            "tenant": entry.tenant,
            "subject": entry.subject,
        }
    )
    noun = entry.kind.partition(".")[0]
    body = entry.body.encode()
    return b'id: %d\nevent: %s\ndata: %s,"body":%s}\n\n' % (number, noun.encode(), head[:-1], body)


def resume_point(request: Request) -> int | None:
    """The last row the client has seen, or None if it wants only new rows."""
    text = request.headers.get("last-event-id") or request.query_params.get("after")
    if text is None or text == "":
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise BadInput("Last-Event-ID and after are the number of the last row you have seen, such as 1234")
    return int(text)


async def _events(service: Service, listener: EventListener, after: int | None) -> AsyncIterator[bytes]:
    live = service.live
    joined = live.join(listener)
    at = joined if after is None else after
    yield b": sublet\nretry: 1000\n\n"
    if at < joined:
        async for piece in _backlog(service, listener, at, joined):
            yield piece
    elif at > joined + BACKLOG_ROWS:  # the number is from another ledger
        yield _ending("gap", joined)
        at = joined
    at = max(at, joined)
    beaten = time.monotonic()
    while True:
        for number, event in await listener.next(min(BEAT_SECONDS, 5.0)):
            if number > at:
                at = number
                yield event
                beaten = time.monotonic()
        if listener.ended:
            yield _ending(listener.ended, at)
            return
        if time.monotonic() - beaten >= BEAT_SECONDS:
            beaten = time.monotonic()
            yield b": beat\n\n"


async def _backlog(service: Service, listener: EventListener, after: int, until: int) -> AsyncIterator[bytes]:
    if until - after > BACKLOG_ROWS:
        after = until - BACKLOG_ROWS
        yield _ending("gap", after)
    while after < until:
        rows: Sequence[tuple[int, Entry]] = await service.work(
            lambda after=after: service.ledger.tail(after=after, limit=PAGE)  # type: ignore[misc]
        )
        mine = [
            event_bytes(number, entry)
            for number, entry in rows
            if number <= until and (not listener.tenant or listener.tenant == entry.tenant)
        ]
        if mine:
            yield b"".join(mine)
        if not rows or listener.ended:
            return
        after = rows[-1][0]


def _ending(what: str, after: int) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (what.encode(), dumped({"after": after}))


def add_events(router: APIRouter, service: Service) -> None:
    @router.get("/v1/events", summary="Every journal row you may see, as it is written (server-sent events)")
    @terms(Access.USER, lean=True, stream=True)
    async def events(request: Request) -> Stream:
        who = credential(request)
        after = resume_point(request)
        service.streams.enter(who.tenant)
        over = service.meters.own.stream("events")
        listener = EventListener(who, service.limits.stream_events, service.limits.stream_bytes)
        hold = service.tokens.join(TokenHold(who.token_id, lambda why: listener.end(f"token_{why}")))
        if service.leaving:
            listener.end("leaving")

        def close() -> None:
            service.live.leave(listener)
            service.tokens.leave(hold)
            over()
            service.streams.leave(who.tenant)

        return Stream(
            _events(service, listener, after),
            "text/event-stream",
            close=close,
            cut_when=lambda: bool(hold.why),
        )
