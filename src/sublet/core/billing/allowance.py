"""GPU time by the day: a bucket that a tenant's leases pay from, and that refills evenly over 24 hours.

Rules of this file:
- A lease is paid for ahead: granted and renewed only until a time the tenant can pay, and what it did not use
  comes back when it ends. So all live leases together never use more than there is, and nothing here sums
  over leases.
- GPU time is weighted by the part of the device taken, as for fair shares: half the VRAM of a shared device
  is half its time.
- The row keeps (left, as of): refill is brought forward when something is paid or given back. Time whose
  refill is not a whole microsecond yet stays for the next time, so looking often loses next to nothing; and
  no moment is counted twice.
- Paying rounds up, giving back rounds down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sublet.core.leasing.lease import LeaseRecord, Request
from sublet.core.leasing.tenancy import PPM, Tenant, rate_of
from sublet.core.scheduling.device import Device, DeviceState, Exclusivity, Slice
from sublet.core.values import DAY_US, SECOND_US, format_duration

#: A lease that could be paid for less than this is not worth its start. A shorter ttl asks for less.
SPELL_US = 10 * SECOND_US
LEAST_PER_DAY_US = SECOND_US
MOST_PER_DAY_US = 100_000 * DAY_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """An allowance as users see it: what live leases have paid for and not used yet counts as left."""

    per_day_us: int
    left_us: int
    ahead_us: int  # of it, paid for by live leases
    full_at: int  # if nobody uses any meanwhile
    at: int


def brought_forward(tenant: Tenant, now: int) -> Tenant:
    """The same bucket as of now."""
    cap, elapsed = tenant.gpu_us_per_day, now - tenant.left_at
    if not cap or elapsed <= 0:
        return tenant
    gained, rest = divmod(cap * elapsed, DAY_US)
    if tenant.left_us + gained >= cap:
        return replace(tenant, left_us=cap, left_at=now)
    return replace(tenant, left_us=tenant.left_us + gained, left_at=now - rest // cap)


def left_now(tenant: Tenant, now: int) -> int:
    return brought_forward(tenant, now).left_us


def cost(rate_ppm: int, us: int) -> int:
    return -(-rate_ppm * us // PPM)


def payable_us(tenant: Tenant, rate_ppm: int, now: int) -> int | None:
    """How much time at this rate can be paid for now; None means without limit."""
    if not tenant.gpu_us_per_day:
        return None
    return max(0, left_now(tenant, now)) * PPM // max(1, rate_ppm)


def paid(tenant: Tenant, rate_ppm: int, us: int, now: int) -> Tenant:
    known = brought_forward(tenant, now)
    return replace(known, left_us=known.left_us - cost(rate_ppm, us))


def settled(tenant: Tenant, rate_ppm: int, unused_us: int, now: int) -> Tenant:
    """Give back what an ended lease paid for and did not use. It is negative when a grace outran what was
    paid."""
    if unused_us <= 0:
        return paid(tenant, rate_ppm, -unused_us, now)
    known = brought_forward(tenant, now)
    return replace(known, left_us=min(known.gpu_us_per_day, known.left_us + rate_ppm * unused_us // PPM))


def changed_quota(tenant: Tenant, per_day_us: int, ahead_us: int, now: int) -> Tenant:
    """What was used stays used. `ahead_us` is what live leases would have paid under a quota."""
    if per_day_us == tenant.gpu_us_per_day:
        return tenant
    known = brought_forward(tenant, now)
    used = known.gpu_us_per_day - known.left_us if known.gpu_us_per_day else ahead_us
    return replace(known, gpu_us_per_day=per_day_us, left_us=max(0, per_day_us - max(0, used)), left_at=now)


def rate_on(exclusivity: Exclusivity, slices: Iterable[Slice], capacity_bytes: dict[str, int]) -> int:
    return sum(rate_of(exclusivity, s.vram_bytes, capacity_bytes[s.device_id]) for s in slices)


def least_rate(request: Request, devices: Iterable[Device]) -> int:
    """The least that a grant of this request costs, wherever it lands."""
    each = request.least_bytes or request.vram_bytes
    largest = max(
        (
            d.capacity_bytes
            for d in devices
            if d.state not in (DeviceState.LOST, DeviceState.TAKEN)
            and request.host in ("", d.host)
            and d.capacity_bytes >= each
        ),
        default=each,
    )
    return rate_of(request.exclusivity, each, largest) * request.count


def needed(tenant: Tenant, rate_ppm: int, ttl_us: int) -> int:
    """What must be left for a lease to be worth its start, and never more than a full bucket."""
    return min(tenant.gpu_us_per_day, cost(rate_ppm, min(ttl_us, SPELL_US)))


def refilled_at(tenant: Tenant, wanted_us: int, now: int) -> int:
    """When this much is left, if nobody pays more meanwhile."""
    known = brought_forward(tenant, now)
    missing = wanted_us - known.left_us
    return now if missing <= 0 else known.left_at - (-missing * DAY_US // known.gpu_us_per_day)


def used_up(tenant: Tenant, request: Request, rate_ppm: int, now: int) -> str:
    """Why the tenant may use no more GPU time now, or ''."""
    if not tenant.gpu_us_per_day:
        return ""
    left, need = left_now(tenant, now), needed(tenant, rate_ppm, request.ttl_us)
    if left >= need:
        return ""
    at = refilled_at(tenant, need, now)
    return (
        f"tenant {tenant.name} asked for {format_duration(cost(rate_ppm, request.ttl_us))} of GPU time, left "
        f"are {format_duration(max(0, left))} of {format_duration(tenant.gpu_us_per_day)} a day, refill at "
        f"{_clock(at)} (in {format_duration(at - now)})"
    )


def notice_at(lease: LeaseRecord, grace_us: int) -> int:
    """When to warn a lease that cannot be paid for any longer: a grace before its deadline."""
    return lease.expires_at - min(grace_us, (lease.expires_at - lease.granted_at) // 2)


def allowance(tenant: Tenant, ahead_us: int, now: int) -> Allowance:
    cap = tenant.gpu_us_per_day
    left = min(cap, left_now(tenant, now) + ahead_us)
    full_at = now + -(-(cap - left) * DAY_US // cap) if cap else now
    return Allowance(per_day_us=cap, left_us=left, ahead_us=ahead_us, full_at=full_at, at=now)


def _clock(us: int) -> str:
    return datetime.fromtimestamp(-(-us // SECOND_US), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
