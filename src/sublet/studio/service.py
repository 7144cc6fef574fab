"""What a running service has: its ledger, its threads, its limits, and the requests under way.

Rules of this file:
- The service keeps no state that matters: it may be killed at any moment, and everything it knew is in the
  ledger.
- The event loop never blocks. Small reads of an embedded ledger run in it, since they do not block; those of
  a database server are batched (`batched_reads`); every other read and every write runs in the service's own
  threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from sublet.core.errors import NotFound, SubletError
from sublet.core.studio.isolation import NOT_CHECKED, HostIsolation
from sublet.core.studio.token import Credential, Token
from sublet.machine.spill import SpillRoom
from sublet.ports.ledger import Ledger, SessionAnswer
from sublet.processes.loop_watch import ProcessHealth
from sublet.settings import Settings
from sublet.studio.edge.expensive import ExpensiveReads
from sublet.studio.edge.limits import (
    ByteRate,
    ConcurrencyLimit,
    EdgeLimits,
    RateBuckets,
    RecentlyOverRate,
    RefusalDelays,
    UnreadBodies,
)
from sublet.studio.edge.logs import ServiceLog
from sublet.studio.edge.token_watch import TokenWatch
from sublet.studio.edge.tracing import Tracing
from sublet.studio.readiness import Readiness, host_warden
from sublet.studio.views.batched_reads import BatchedReads
from sublet.studio.views.metrics import Meters
from sublet.wiring import spill_room

if TYPE_CHECKING:
    from sublet.studio.edge.relay import SessionHostRelay
    from sublet.studio.views.live import LiveEvents

T = TypeVar("T")
THREADS = 16
#: How many token lookups run at once: one is asked while the answers of the other are sent.
STATEMENTS_AT_ONCE = 2
#: How often activity is written, in batches. What a crash loses of it only makes a lease end sooner.
TOUCH_SECONDS = 0.1
#: Of bodies of one tenant's requests that wait on disk until they are whole.
BODIES_MOST_BYTES = 4 << 30


class RequestContext:
    """What is known of one request, from its first byte to its log line."""

    __slots__ = ("address", "credential", "id", "route", "session", "status", "unread")

    def __init__(self, request_id: str, address: str) -> None:
        self.id = request_id
        self.address = address
        self.credential: Credential | None = None
        self.session: SessionAnswer | None = (
            None  # that the path names, as it was when the token was looked up
        )
        self.route = "-"
        self.status = 0
        self.unread = False  # a body is on its way that nobody has read

    @property
    def tenant(self) -> str:
        return self.credential.tenant if self.credential is not None else ""


class PendingTouches:
    """Sessions that were used since this was last written to the ledger."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._keys: dict[tuple[str, str], None] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, session_id: str, tenant: str) -> None:
        self._keys[(session_id, tenant)] = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._later())

    async def _later(self) -> None:
        await asyncio.sleep(TOUCH_SECONDS)
        self._task = None
        await self.flush()

    async def flush(self) -> None:
        keys, self._keys = list(self._keys), {}
        if not keys:
            return
        try:
            await self._service.work(lambda: self._service.ledger.touch_sessions(keys))
        except SubletError as e:
            self._service.log.event("touches lost", level="warning", error=e.message, count=len(keys))


class Service:
    def __init__(
        self,
        ledger: Ledger,
        settings: Settings,
        *,
        limits: EdgeLimits | None = None,
        log: ServiceLog | None = None,
        metrics_open: bool = False,
        warden: Callable[[], ProcessHealth | None] | None = None,
        isolation: HostIsolation = NOT_CHECKED,
    ) -> None:
        """`warden` tells of this host's; a test without one gives another. `isolation` is what keeps tenants
        apart here."""
        self.ledger = ledger
        self.settings = settings
        self.host = settings["host"]
        self.isolation = isolation
        self.limits = limits or EdgeLimits()
        self.log = log or ServiceLog()
        self.metrics_open = metrics_open
        self.embedded = settings["ledger"].startswith("sqlite:")
        self.addresses = RateBuckets(self.limits.address_rate, self.limits.burst_seconds)
        self.tenants = RateBuckets(self.limits.tenant_rate, self.limits.burst_seconds)
        self.penalties = RefusalDelays(self.limits.penalty_seconds, self.limits.penalty_most_seconds)
        self.flooding = RecentlyOverRate()
        self.pace = ByteRate(self.limits.tenant_bytes)
        self.unread = UnreadBodies(self.limits)
        self.requests = ConcurrencyLimit(self.limits.tenant_requests, "requests being answered")
        self.streams = ConcurrencyLimit(self.limits.tenant_streams, "open streams")
        self.expensive = ExpensiveReads(self.limits)
        self.touches = PendingTouches(self)
        self.tokens = TokenWatch(self)
        warden = warden or (lambda: host_warden(settings))
        self.readiness = Readiness(self, warden)
        self.meters = Meters(
            loops=lambda: {"warden": warden(), "session_host": self.relay.health()},
            isolation=lambda: self.isolation,
        )
        self.tracing = Tracing()
        self.leaving = False
        self._rooms: WeakValueDictionary[str, SpillRoom] = WeakValueDictionary()
        self._clock_base = time.time_ns() // 1000 - time.monotonic_ns() // 1000
        self.live: LiveEvents
        self.relay: SessionHostRelay
        self._threads = ThreadPoolExecutor(THREADS, "studio")
        #: Threads of their own, so that token lookups do not wait behind a listing.
        self._readers = ThreadPoolExecutor(STATEMENTS_AT_ONCE, "lookups")
        self._lookups = BatchedReads(self._readers, ledger.token_and_session, STATEMENTS_AT_ONCE)
        self._writer = ThreadPoolExecutor(1, "health-write")
        #: Health must be reported even while every other thread waits for a ledger that does not answer.
        self._health = ThreadPoolExecutor(2, "health")

    def room_of(self, tenant: str) -> SpillRoom:
        """Where bodies of a tenant's requests wait until they are whole."""
        found = self._rooms.get(tenant)
        if found is None:
            found = self._rooms[tenant] = spill_room(self.settings, BODIES_MOST_BYTES)
        return found

    def set_clock(self, ledger_us: int) -> None:
        """Called at every read of the journal, so that no request has to ask the ledger for the time."""
        self._clock_base = ledger_us - time.monotonic_ns() // 1000

    def now_us(self) -> int:
        """The ledger's clock, approximately. Tokens expire by it; leases are judged by the ledger alone."""
        return self._clock_base + time.monotonic_ns() // 1000

    async def look_up(self, token_id: str, session_id: str = "") -> tuple[Token | None, SessionAnswer | None]:
        """The token as it is in the ledger now, and the named session if it belongs to the token's tenant."""
        if self.embedded:
            token = self.ledger.look_token(token_id)
            if token is None or not session_id:
                return token, None
            with contextlib.suppress(NotFound):
                return token, self.ledger.look_session(session_id, token.tenant)
            return token, None
        return await self._lookups.ask((token_id, session_id)) or (None, None)

    async def penalty(self, key: str) -> None:
        """Delays a refusal: the sender waits, not the service."""
        seconds = self.penalties.next(key, time.monotonic())
        if seconds:
            await asyncio.sleep(seconds)

    async def quick(self, read: Callable[[], T]) -> T:
        """Runs a read of a row or two."""
        if self.embedded:
            return read()
        return await self.work(read)

    async def work(self, verb: Callable[[], T]) -> T:
        """Runs any other verb, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, verb)

    async def checked(self, verb: Callable[[], T], seconds: float) -> T:
        """Runs a health check; raises `TimeoutError` after this time."""
        future = asyncio.get_running_loop().run_in_executor(self._health, verb)
        async with asyncio.timeout(seconds):
            return await asyncio.shield(future)

    async def work_aside(self, verb: Callable[[], T]) -> T:
        """Runs the write of a health check, in a thread that serves nothing else, because it may hang."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, verb)

    def leave(self) -> None:
        """Called once, in the event loop: the service is not ready any more, and every stream ends."""
        self.leaving = True
        self.live.tell_all("leaving")

    async def close(self) -> None:
        with contextlib.suppress(SubletError):
            await self.touches.flush()
        await self.live.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self.expensive.close()
        self._health.shutdown(wait=False, cancel_futures=True)
        self.tracing.close()
        self.log.close()
