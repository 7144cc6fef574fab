"""Noisy neighbours: what each tenant took, and how long others waited while it had more than its share.

Rules of this file:
- Held time is weighted by the part of a device that is taken from others, as in `core.leasing.tenancy`.
- A tenant's share is its weight among the tenants that hold or wait at that moment. Waiting is
  charged to those who hold more than their share just then, in proportion to how much more. While nobody
  waits nobody is harmed, however much somebody holds.
- No more is charged than was waited. Integers, rounded down.
- A tenant is flagged with a sentence, or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sublet.core.billing.meter import billed_until
from sublet.core.journal.counters import Worked
from sublet.core.leasing.lease import LeaseRecord, LeaseState
from sublet.core.leasing.tenancy import DEFAULT_WEIGHT, PPM, rate_of
from sublet.core.values import MINUTE_US, format_duration

#: Less waiting than this is nobody's fault.
LEAST_CAUSED_US = MINUTE_US
#: So many calls, and one of so many failed: somebody should have a look.
LEAST_CALLS = 20
FAILED_OF = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourLease:
    """One lease, as far as it concerns others."""

    tenant: str
    waited_from: int
    waited_to: int
    held_from: int  # held_to and held_from are equal when it held nothing
    held_to: int
    rate_ppm: int  # devices taken from others, in millionths


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    tenant: str
    weight: int
    leases: int
    device_us: int  # time × part of the devices
    held_ppm: int  # of all that was held
    fair_ppm: int  # its weight among those who held or waited
    waited_us: int
    caused_us: int  # others waited, while it had more than its share
    calls: int
    errors: int
    launches: int
    noisy: bool
    reason: str  # '' unless noisy


def neighbour_lease_of(lease: LeaseRecord, capacities: Mapping[str, int], now: int) -> NeighbourLease:
    """`capacities` are of each device; a device that is not known any more counts as taken whole."""
    exclusivity = lease.request.exclusivity
    rate = sum(
        rate_of(exclusivity, s.vram_bytes, capacities.get(s.device_id, s.vram_bytes)) for s in lease.slices
    )
    ended = lease.state is LeaseState.ENDED
    left_waiting = lease.granted_at or (lease.ended_at if ended else now)
    held_to = (lease.ended_at if ended else billed_until(lease, now)) if lease.granted_at else left_waiting
    return NeighbourLease(
        tenant=lease.tenant,
        waited_from=lease.joined_at,
        waited_to=left_waiting,
        held_from=lease.granted_at or left_waiting,
        held_to=held_to,
        rate_ppm=rate,
    )


def neighbours(
    stays: Iterable[NeighbourLease],
    weights: Mapping[str, int],
    work: Mapping[str, Worked],
    *,
    since: int,
    now: int,
) -> list[Neighbour]:
    """The tenants that caused most waiting come first."""
    found = list(stays)
    held, waited, caused = _charged_waits(found, weights, since, now)
    leases = Counter(stay.tenant for stay in found)
    names = sorted({*leases, *work})
    total_held = sum(held.values())
    total_weight = sum(weights.get(name, DEFAULT_WEIGHT) for name in leases)
    rows = []
    for name in names:
        weight = weights.get(name, DEFAULT_WEIGHT)
        held_ppm = held[name] * PPM // total_held if total_held else 0
        fair_ppm = weight * PPM // total_weight if name in leases else 0
        done = work.get(name, Worked(tenant=name))
        reason = _reason(held_ppm, fair_ppm, caused[name], done)
        row = Neighbour(
            tenant=name,
            weight=weight,
            leases=leases[name],
            device_us=held[name],
            held_ppm=held_ppm,
            fair_ppm=fair_ppm,
            waited_us=waited[name],
            caused_us=caused[name],
            calls=done.calls,
            errors=done.errors,
            launches=done.launches,
            noisy=bool(reason),
            reason=reason,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: (-row.caused_us, -row.device_us, row.tenant))


def _reason(held_ppm: int, fair_ppm: int, caused_us: int, done: Worked) -> str:
    reasons = []
    if caused_us >= LEAST_CAUSED_US:
        reasons.append(
            f"others waited {format_duration(caused_us)} while it had more than its share: "
            f"{held_ppm // 10_000}% of the GPU time with {fair_ppm // 10_000}% of the weight"
        )
    if done.calls >= LEAST_CALLS and done.errors * FAILED_OF >= done.calls:
        reasons.append(f"{done.errors} of its {done.calls} calls failed")
    return "; ".join(reasons)


def _charged_waits(
    stays: list[NeighbourLease], weights: Mapping[str, int], since: int, now: int
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Held, waited and caused, by tenant, between `since` and `now`."""
    changes: list[tuple[int, str, int, int]] = []  # (when, who, change of rate, change of waiters)
    for stay in stays:
        for begin, end, rate, waiters in (
            (stay.waited_from, stay.waited_to, 0, 1),
            (stay.held_from, stay.held_to, stay.rate_ppm, 0),
        ):
            begin, end = max(begin, since), min(end, now)
            if begin < end:
                changes += [(begin, stay.tenant, rate, waiters), (end, stay.tenant, -rate, -waiters)]
    changes.sort(key=lambda change: change[0])
    holding: dict[str, int] = {}
    waiting: dict[str, int] = {}
    held, waited, caused = Counter[str](), Counter[str](), Counter[str]()
    before = since
    for at, who, rate, waiters in changes:
        if at > before:
            _pass(at - before, holding, waiting, weights, held, waited, caused)
            before = at
        _change(holding, who, rate)
        _change(waiting, who, waiters)
    return Counter({who: us // PPM for who, us in held.items()}), waited, caused


def _change(of: dict[str, int], who: str, by: int) -> None:
    now = of.get(who, 0) + by
    if now:
        of[who] = now
    else:
        of.pop(who, None)


def _pass(
    elapsed_us: int,
    holding: Mapping[str, int],
    waiting: Mapping[str, int],
    weights: Mapping[str, int],
    held: Counter[str],
    waited: Counter[str],
    caused: Counter[str],
) -> None:
    """Account for a span in which nothing changed."""
    for who, rate in holding.items():
        held[who] += elapsed_us * rate
    if not waiting:
        return
    for who, count in waiting.items():
        waited[who] += elapsed_us * count
    present = {*holding, *waiting}
    all_weight = sum(weights.get(who, DEFAULT_WEIGHT) for who in present)
    total = sum(holding.values())
    over = {
        who: excess
        for who, rate in holding.items()
        if (excess := rate * all_weight - total * weights.get(who, DEFAULT_WEIGHT)) > 0
    }
    for waiter, count in waiting.items():
        blamed = {who: excess for who, excess in over.items() if who != waiter}
        for who, excess in blamed.items():
            caused[who] += elapsed_us * count * excess // sum(blamed.values())
