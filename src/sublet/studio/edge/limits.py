"""How much one client may ask of the service, so that the others do not notice.

Rules of this file:
- Requests have a rate bucket per address and one per tenant. A refusal says when to come back, and is itself
  delayed a little longer each time with some jitter, so that a flood costs nearly nothing and does not return
  all at once.
- A credential that was over its rate is refused again without a look into the ledger while its bucket is
  empty.
- Bodies have a size limit per route, checked before and while they are read. A sender below a minimum pace is
  cut off, and a tenant above its byte rate waits. A body that was refused late counts as many requests.
- Most clients send a whole body before they read the refusal, so the remainder is read and thrown away
  unparsed, within limits on bytes, seconds, connections per client and bytes per second.
- Streams are limited in number per tenant, and each has a bounded list of events that are not sent yet.
- Nothing here knows the ledger: these limits protect this process's time and memory. GPU quotas are the
  ledger's.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import Message, Receive

from sublet.core.studio.token import Credential
from sublet.studio.edge.wire import BodyTooLarge, TooManyNow, TooSlow

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLimits:
    """All limits of one service. A rate of zero means no limit."""

    json_bytes: int = MIB
    call_bytes: int = 256 * MIB
    address_rate: float = 500.0  # requests a second
    tenant_rate: float = 200.0
    burst_seconds: float = 2.0  # so many seconds' worth may come at once
    tenant_bytes: int = 64 * MIB  # of bodies, a second; twice as much at once
    refused_cost: float = 20.0  # a body that was too large or too slow counts as so many requests
    read_share: float = 0.05  # of the time, for one tenant's long reads
    read_burst_seconds: float = 6.0  # so much of it may come at once
    tenant_requests: int = 128  # being answered at once
    tenant_streams: int = 64  # open at once: events, calls, long polls
    connections: int = 2000
    header_bytes: int = 32 * 1024
    header_seconds: float = 10.0
    body_seconds: float = 15.0  # without a byte
    body_floor: int = 2048  # bytes a second, counted from `body_grace_seconds` on
    body_grace_seconds: float = 10.0
    unread_bytes: int = 64 * MIB  # of a body that was refused
    unread_seconds: float = 20.0
    unread_silent_seconds: float = 2.0
    unread_rate: int = 16 * MIB  # of all unread bytes of one client, a second
    unread_connections: int = 8  # of one client at once; the next is ended at once
    send_seconds: float = 20.0  # without the reader taking anything
    stream_events: int = 1000  # not yet taken by one reader
    stream_bytes: int = 2 * MIB  # and so many bytes of them
    penalty_seconds: float = 0.25  # the first refusal comes so late, and each one later
    penalty_most_seconds: float = 2.0


class RateBuckets:
    """Token buckets by key. Full buckets are forgotten."""

    KEYS_MAX = 10_000

    def __init__(self, rate: float, burst_seconds: float) -> None:
        self.rate = rate
        self.most = max(1.0, rate * burst_seconds)
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, key: str, now: float) -> float:
        """Takes a token; returns 0, or the seconds to wait if there is none."""
        if not self.rate:
            return 0.0
        level, at = self._levels.get(key, (self.most, now))
        level = min(self.most, level + (now - at) * self.rate)
        if level < 1.0:
            self._levels[key] = (level, now)
            return (1.0 - level) / self.rate
        if len(self._levels) >= self.KEYS_MAX and key not in self._levels:
            self._forget(now)
        self._levels[key] = (level - 1.0, now)
        return 0.0

    def over(self, key: str, now: float) -> float:
        """The seconds to wait, as `take` would return, without taking a token."""
        if not self.rate:
            return 0.0
        level, at = self._levels.get(key, (self.most, now))
        level = min(self.most, level + (now - at) * self.rate)
        return (1.0 - level) / self.rate if level < 1.0 else 0.0

    def charge(self, key: str, cost: float, now: float) -> None:
        """Charges for a late refusal, so that a client that causes many is soon refused early."""
        if self.rate:
            level, at = self._levels.get(key, (self.most, now))
            level = min(self.most, level + (now - at) * self.rate) - cost
            self._levels[key] = (max(level, -self.most), now)

    def _forget(self, now: float) -> None:
        full = [k for k, (level, at) in self._levels.items() if level + (now - at) * self.rate >= self.most]
        for key in full:
            del self._levels[key]
        if not full:  # more active keys than honest clients have
            self._levels.clear()


class RefusalDelays:
    """How long a refusal is delayed."""

    HALF_SECONDS = 10.0  # after so long, half of them are forgotten
    EACH = 1 / 8  # of the first one, for each that came before

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._counts: dict[str, tuple[float, float]] = {}

    def next(self, key: str, now: float) -> float:
        """The delay in seconds of this refusal."""
        count, at = self._counts.get(key, (0.0, now))
        count *= math.exp2((at - now) / self.HALF_SECONDS)
        if len(self._counts) >= RateBuckets.KEYS_MAX and key not in self._counts:
            self._counts.clear()
        self._counts[key] = (count + 1.0, now)
        return min(self._most, self._first * (1.0 + count * self.EACH)) * random.uniform(0.75, 1.25)


class RecentlyOverRate:
    """Tokens of clients that were just over their rate, to recognise their next request without the
    ledger."""

    SECONDS = 5.0  # then the token is looked up again, and may have been revoked

    def __init__(self) -> None:
        self._shown: dict[str, tuple[Credential, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._shown)

    def add(self, shown: str, who: Credential, now: float) -> None:
        if len(self._shown) >= RateBuckets.KEYS_MAX:
            self._shown.clear()
        self._shown[shown] = (who, now + self.SECONDS)

    def find(self, shown: str, now: float) -> Credential | None:
        found = self._shown.get(shown)
        if found is None or now < found[1]:
            return found[0] if found else None
        del self._shown[shown]
        return None


class ByteRate:
    """A byte rate per tenant: a faster sender waits, and is never refused for it."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._levels: dict[str, tuple[float, float]] = {}

    def spend(self, key: str, size: int, now: float) -> float:
        """The seconds to wait before more is read."""
        most = 2.0 * self._rate
        level, at = self._levels.get(key, (most, now))
        level = min(most, level + (now - at) * self._rate) - size
        if len(self._levels) >= RateBuckets.KEYS_MAX and key not in self._levels:
            self._levels.clear()
        self._levels[key] = (level, now)
        return max(0.0, -level / self._rate)


class ConcurrencyLimit:
    """Limits how many things of one kind each tenant has open at once."""

    def __init__(self, most: int, words: str) -> None:
        self._most = most
        self._words = words
        self._open: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        if self._open[tenant] >= self._most:
            raise TooManyNow(f"tenant {tenant} has {self._most} {self._words} already; nothing was done", 1.0)
        self._open[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._open[tenant] -= 1
        if self._open[tenant] <= 0:
            del self._open[tenant]

    @contextmanager
    def counted(self, tenant: str) -> Iterator[None]:
        self.enter(tenant)
        try:
            yield
        finally:
            self.leave(tenant)

    def count(self, tenant: str = "") -> int:
        return self._open[tenant] if tenant else sum(self._open.values())


class BoundedBody:
    """A `receive` that refuses a body that is too large or too slow."""

    __slots__ = ("_begun", "_limits", "_most", "_pace", "_receive", "_size", "_tenant", "unread")

    def __init__(self, receive: Receive, most: int, limits: EdgeLimits, pace: ByteRate, tenant: str) -> None:
        self._receive = receive
        self._pace, self._tenant = pace, tenant
        self._most = most
        self._limits = limits
        self._size = 0
        self._begun = time.monotonic()
        self.unread = True

    async def __call__(self) -> Message:
        if not self.unread:
            return await self._receive()  # only a disconnect can come
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                message = await self._receive()
        except TimeoutError:
            raise TooSlow from None
        if message["type"] != "http.request":
            return message
        arrived = len(message.get("body", b""))
        self._size += arrived
        wait = self._pace.spend(self._tenant, arrived, time.monotonic())
        if wait:
            self._begun += wait  # we waited, not the sender
            await asyncio.sleep(wait)
        if self._size > self._most:
            raise BodyTooLarge(
                f"the request is larger than the {self._most} bytes this address takes; nothing was stored"
            )
        if not message.get("more_body", False):
            self.unread = False
            return message
        late = time.monotonic() - self._begun - self._limits.body_grace_seconds
        if late > 0 and self._size < late * self._limits.body_floor:
            raise TooSlow
        return message


class UnreadBodies:
    """Limits what clients may still send of bodies that were refused."""

    def __init__(self, limits: EdgeLimits) -> None:
        self.limits = limits
        self._pace = ByteRate(limits.unread_rate)
        self._open: Counter[str] = Counter()

    def enter(self, key: str) -> bool:
        """False when this client has as many as allowed."""
        if self._open[key] >= self.limits.unread_connections:
            return False
        self._open[key] += 1
        return True

    def leave(self, key: str) -> None:
        self._open[key] -= 1
        if self._open[key] <= 0:
            del self._open[key]

    def spend(self, key: str, size: int, now: float) -> float:
        """The seconds to wait before more is read."""
        return self._pace.spend(key, size, now)

    def count(self, key: str) -> int:
        return self._open[key]
