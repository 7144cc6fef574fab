"""How much one client may ask of the service, so that the others do not notice.

Rules of this file:
- Requests: a bucket per address before anybody is known, and one per tenant. Who is over it is told when to come back, and the answer
  itself comes a little later each time, so that a flood costs the service nearly nothing. Those of one moment are answered at different
  ones: a flood that is refused together comes back together, and everybody else waits behind it.
- A credential that was over its rate is refused again by what it shows, without a look into the ledger, for as long as its bucket is empty.
- Bodies: a size for each route, checked before and while it is read; a pace below which the sender is cut, and one of all bodies of a
  tenant above which it waits. One that was refused late counts as many requests.
- Refused bodies: most clients send all of one before they read why it was refused, so what still comes is taken and thrown away, unparsed.
  So many bytes, so many seconds, so many of a client at once, and all of a client's together at a pace that costs next to nothing.
- Streams: so many at once per tenant, and a bounded list of what is not sent yet for each.
- Nothing here knows the ledger: a limit is about this process's time and memory. Quotas of GPUs are the ledger's.
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

from sublet.core.token import Credential
from sublet.studio.wire import BodyTooLarge, TooManyNow, TooSlow

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All of them. Zero for a rate: no limit."""

    json_bytes: int = MIB
    call_bytes: int = 256 * MIB
    address_rate: float = 500.0  # requests a second
    tenant_rate: float = 200.0
    burst_seconds: float = 2.0  # so many seconds' worth may come at once
    tenant_bytes: int = 64 * MIB  # of bodies, a second; twice as much at once
    refused_cost: float = 20.0  # a body that was too large or too slow counts as so many requests
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
    unread_rate: int = 16 * MIB  # of all that one client sends for nothing, a second
    unread_connections: int = 8  # of one client at once; the next is ended at once
    send_seconds: float = 20.0  # without the reader taking anything
    stream_events: int = 1000  # not yet taken by one reader
    penalty_seconds: float = 0.25  # the first refusal comes so late, and each one later
    penalty_most_seconds: float = 2.0


class Buckets:
    """Token buckets by key. Full ones are forgotten."""

    KEYS_MAX = 10_000

    def __init__(self, rate: float, burst_seconds: float) -> None:
        self.rate = rate
        self.most = max(1.0, rate * burst_seconds)
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, key: str, now: float) -> float:
        """0 when it may pass, else the seconds until it may."""
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
        """As `take`, and nothing is taken."""
        if not self.rate:
            return 0.0
        level, at = self._levels.get(key, (self.most, now))
        level = min(self.most, level + (now - at) * self.rate)
        return (1.0 - level) / self.rate if level < 1.0 else 0.0

    def charge(self, key: str, cost: float, now: float) -> None:
        """For what was refused late: whoever sends much of it is soon refused early."""
        if self.rate:
            level, at = self._levels.get(key, (self.most, now))
            level = min(self.most, level + (now - at) * self.rate) - cost
            self._levels[key] = (max(level, -self.most), now)

    def _forget(self, now: float) -> None:
        full = [k for k, (level, at) in self._levels.items() if level + (now - at) * self.rate >= self.most]
        for key in full:
            del self._levels[key]
        if not full:  # more keys at once than anybody honest has
            self._levels.clear()


class Penalties:
    """How late a refusal is told."""

    HALF_SECONDS = 10.0  # after so long, half of them are forgotten
    EACH = 1 / 8  # of the first one, for each that came before

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._counts: dict[str, tuple[float, float]] = {}

    def next(self, key: str, now: float) -> float:
        """Seconds."""
        count, at = self._counts.get(key, (0.0, now))
        count *= math.exp2((at - now) / self.HALF_SECONDS)
        if len(self._counts) >= Buckets.KEYS_MAX and key not in self._counts:
            self._counts.clear()
        self._counts[key] = (count + 1.0, now)
        return min(self._most, self._first * (1.0 + count * self.EACH)) * random.uniform(0.75, 1.25)


class Flooding:
    """What clients showed that were let in and were over their rate: their next request is known by it."""

    SECONDS = 5.0  # then it is looked up again, and may have been revoked

    def __init__(self) -> None:
        self._shown: dict[str, tuple[Credential, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._shown)

    def add(self, shown: str, who: Credential, now: float) -> None:
        if len(self._shown) >= Buckets.KEYS_MAX:
            self._shown.clear()
        self._shown[shown] = (who, now + self.SECONDS)

    def find(self, shown: str, now: float) -> Credential | None:
        found = self._shown.get(shown)
        if found is None or now < found[1]:
            return found[0] if found else None
        del self._shown[shown]
        return None


class Pace:
    """Bytes a second of each tenant: who sends faster waits, and nobody is refused for it."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._levels: dict[str, tuple[float, float]] = {}

    def spend(self, key: str, size: int, now: float) -> float:
        """Seconds to wait before more is read."""
        most = 2.0 * self._rate
        level, at = self._levels.get(key, (most, now))
        level = min(most, level + (now - at) * self._rate) - size
        if len(self._levels) >= Buckets.KEYS_MAX and key not in self._levels:
            self._levels.clear()
        self._levels[key] = (level, now)
        return max(0.0, -level / self._rate)


class Crowd:
    """How many things of one kind each tenant has open."""

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
    """A `receive` that refuses what is too large or too slow."""

    __slots__ = ("_begun", "_limits", "_most", "_pace", "_receive", "_size", "_tenant", "unread")

    def __init__(self, receive: Receive, most: int, limits: Limits, pace: Pace, tenant: str) -> None:
        self._receive = receive
        self._pace, self._tenant = pace, tenant
        self._most = most
        self._limits = limits
        self._size = 0
        self._begun = time.monotonic()
        self.unread = True

    async def __call__(self) -> Message:
        if not self.unread:
            return await self._receive()  # only a disconnect is left to hear of
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
            self._begun += wait  # not its sender's slowness
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


class Unread:
    """What clients still send of bodies that nobody will read."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._pace = Pace(limits.unread_rate)
        self._open: Counter[str] = Counter()

    def enter(self, key: str) -> bool:
        """False when this client has as many as it may."""
        if self._open[key] >= self.limits.unread_connections:
            return False
        self._open[key] += 1
        return True

    def leave(self, key: str) -> None:
        self._open[key] -= 1
        if self._open[key] <= 0:
            del self._open[key]

    def spend(self, key: str, size: int, now: float) -> float:
        """Seconds to wait before more is taken."""
        return self._pace.spend(key, size, now)

    def count(self, key: str) -> int:
        return self._open[key]
