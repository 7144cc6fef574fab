"""What a running service has: its ledger, its threads, its limits, and who visits.

Rules of this file:
- The service keeps nothing that matters: killed at any moment, everything it knew is in the ledger.
- The event loop waits for nobody. Small reads of an embedded ledger are made in it, since they do not block; those of a server are made
  together, for all who ask at the same time (`reads`); everything else, and every write, goes to threads of the service's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from sublet.core.errors import NotFound, SubletError
from sublet.core.token import Credential, Token
from sublet.ports.ledger import Ledger, SessionAnswer
from sublet.settings import Settings
from sublet.studio.limits import Buckets, Crowd, Flooding, Limits, Pace, Penalties, Unread
from sublet.studio.logs import Log
from sublet.studio.metrics import Meters
from sublet.studio.reads import Together
from sublet.studio.tracing import Tracing

if TYPE_CHECKING:
    from sublet.studio.live import Live
    from sublet.studio.relay import Relay

T = TypeVar("T")
THREADS = 16
#: Statements that let requests in, under way at once: one is asked while the answers of the other are sent.
JOURNEYS = 2
#: Activity is written down together, this often. What a crash loses of it only makes a lease end sooner.
TOUCH_SECONDS = 0.1


class Visit:
    """One request, from the first byte to the log line."""

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


class Touches:
    """Sessions that were used since the last time it was written down."""

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
        limits: Limits | None = None,
        log: Log | None = None,
        metrics_open: bool = False,
    ) -> None:
        self.ledger = ledger
        self.settings = settings
        self.host = settings["host"]
        self.limits = limits or Limits()
        self.log = log or Log()
        self.metrics_open = metrics_open
        self.embedded = settings["ledger"].startswith("sqlite:")
        self.addresses = Buckets(self.limits.address_rate, self.limits.burst_seconds)
        self.tenants = Buckets(self.limits.tenant_rate, self.limits.burst_seconds)
        self.penalties = Penalties(self.limits.penalty_seconds, self.limits.penalty_most_seconds)
        self.flooding = Flooding()
        self.pace = Pace(self.limits.tenant_bytes)
        self.unread = Unread(self.limits)
        self.requests = Crowd(self.limits.tenant_requests, "requests being answered")
        self.streams = Crowd(self.limits.tenant_streams, "open streams")
        self.touches = Touches(self)
        self.meters = Meters()
        self.tracing = Tracing()
        self.leaving = False
        self._clock_base = time.time_ns() // 1000 - time.monotonic_ns() // 1000
        self.live: Live
        self.relay: Relay
        self._threads = ThreadPoolExecutor(THREADS, "studio")
        #: Of their own, so that no request waits behind a listing to be let in.
        self._readers = ThreadPoolExecutor(JOURNEYS, "visits")
        self._visits = Together(self._readers, ledger.look_visits, JOURNEYS)
        #: Health must be told also while every other thread waits for a ledger that does not answer.
        self._health = ThreadPoolExecutor(2, "health")

    def set_clock(self, ledger_us: int) -> None:
        """Learnt at every look into the journal, so that no request has to ask for the time."""
        self._clock_base = ledger_us - time.monotonic_ns() // 1000

    def now_us(self) -> int:
        """The ledger's clock, nearly: tokens end by it. Leases are judged by the ledger alone."""
        return self._clock_base + time.monotonic_ns() // 1000

    async def visited(self, token_id: str, session_id: str = "") -> tuple[Token | None, SessionAnswer | None]:
        """The token as it is in the ledger now, and with it the session that is named, if it is of the token's tenant."""
        if self.embedded:
            token = self.ledger.look_token(token_id)
            if token is None or not session_id:
                return token, None
            with contextlib.suppress(NotFound):
                return token, self.ledger.look_session(session_id, token.tenant)
            return token, None
        return await self._visits.ask((token_id, session_id)) or (None, None)

    async def penalty(self, key: str) -> None:
        """The sender of what is refused waits, not the service."""
        seconds = self.penalties.next(key, time.monotonic())
        if seconds:
            await asyncio.sleep(seconds)

    async def quick(self, read: Callable[[], T]) -> T:
        """A read of a row or two."""
        if self.embedded:
            return read()
        return await self.work(read)

    async def work(self, verb: Callable[[], T]) -> T:
        """Anything else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, verb)

    async def checked(self, verb: Callable[[], T], seconds: float) -> T:
        """For health: an answer within this time, or `TimeoutError`."""
        future = asyncio.get_running_loop().run_in_executor(self._health, verb)
        async with asyncio.timeout(seconds):
            return await asyncio.shield(future)

    def leave(self) -> None:
        """Called once, in the loop: not ready any more, and every stream is told."""
        self.leaving = True
        self.live.tell_all("leaving")

    async def close(self) -> None:
        with contextlib.suppress(SubletError):
            await self.touches.flush()
        await self.live.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._health.shutdown(wait=False, cancel_futures=True)
        self.tracing.close()
        self.log.close()
