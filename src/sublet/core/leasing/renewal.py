"""When a holder renews, when it must stop, and what it says before that.

Rules of this file:
- The first try falls at 60-70 % of the ttl, by a jitter seeded with the lease, so that a thousand leases of
  one moment do not renew in one moment; retries fill the band to 80 %, where the holder stops by itself (L6).
- Only work renews. A lease nobody uses runs out, and the holder is told so before it does.
- All instants are the holder's own monotonic clock, taken before the message was sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FIRST_TRY_PER_1000 = 600
LAST_FIRST_TRY_PER_1000 = 700
STOP_PER_1000 = 800
RETRY_FLOOR_US = 10_000
RETRY_CEILING_US = 5_000_000


def local_deadline(sent_at: int, ttl_us: int) -> int:
    """After this no new device work is submitted, whatever the ledger may say later (L6)."""
    return sent_at + ttl_us * STOP_PER_1000 // 1000


def mix(seed: int) -> int:
    """A 64-bit mixer: the same seed gives the same jitter on every machine."""
    seed = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return seed ^ (seed >> 31)


def first_try_at(sent_at: int, ttl_us: int, seed: int) -> int:
    low = ttl_us * FIRST_TRY_PER_1000 // 1000
    width = ttl_us * (LAST_FIRST_TRY_PER_1000 - FIRST_TRY_PER_1000) // 1000
    return sent_at + low + (mix(seed) % (width + 1))


def retry_at(now: int, ttl_us: int, attempt: int, seed: int) -> int:
    """Doubling pauses, sized to the ttl so that a short lease also gets several tries before its deadline."""
    base = max(RETRY_FLOOR_US, ttl_us // 200)
    pause = min(base << min(attempt, 10), RETRY_CEILING_US)
    return now + pause // 2 + mix(seed + attempt) % (pause // 2 + 1)


class RenewalAction(Enum):
    SLEEP = "sleep"
    RENEW = "renew"
    WARN_IDLE = "warn_idle"
    WARN_UNREACHABLE = "warn_unreachable"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """A holder's view of one lease between two renewals."""

    ttl_us: int
    sent_at: int  # just before the last grant or renewal was asked for
    seed: int
    worked: bool  # work in flight, or some since the last renewal
    attempt: int = 0  # failed tries since then
    tried_at: int = 0
    warned: bool = False
    calling: bool = False  # a try is on its way and has not been answered


@dataclass(frozen=True, slots=True)
class Move:
    todo: RenewalAction
    at: int  # when to do it, or when to look again
    reason: str


def next_move(tenure: Tenure, now: int) -> Move:
    first = first_try_at(tenure.sent_at, tenure.ttl_us, tenure.seed)
    stop = local_deadline(tenure.sent_at, tenure.ttl_us)
    if now >= stop:
        why = "the ledger did not answer" if tenure.attempt else "there was no work to renew for"
        return Move(RenewalAction.STOP, now, f"the lease could not be renewed in time: {why}")
    if now < first:
        return Move(RenewalAction.SLEEP, first, "not due")
    if not tenure.worked:
        if not tenure.warned:
            return Move(
                RenewalAction.WARN_IDLE, now, "idle: no work since the last renewal, so it will run out"
            )
        # Work may begin at any moment, and then the lease is renewed after all.
        return Move(RenewalAction.SLEEP, min(stop, now + max(RETRY_FLOOR_US, (stop - first) // 10)), "idle")
    if tenure.attempt == 0 and not tenure.calling:
        return Move(RenewalAction.RENEW, now, "due")
    middle = first + (stop - first) // 2
    if not tenure.warned and now >= middle:
        # Before any further try: one that hangs until the stop must not swallow the warning.
        return Move(RenewalAction.WARN_UNREACHABLE, now, "the ledger does not answer; the lease may be lost")
    if tenure.calling:
        return Move(RenewalAction.SLEEP, stop if tenure.warned else middle, "waiting for an answer")
    due = retry_at(tenure.tried_at, tenure.ttl_us, tenure.attempt, tenure.seed)
    if now >= due:
        return Move(RenewalAction.RENEW, now, f"try {tenure.attempt + 1}")
    return Move(RenewalAction.SLEEP, min(due, stop) if tenure.warned else min(due, middle), "retrying")
