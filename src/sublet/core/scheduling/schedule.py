"""One tick: what must happen now, as instructions with reasons.

Rules of this file:
- `tick` is a pure function of the view and the time. The warden applies it in one transaction and the
  simulator in virtual time; both get the same list for the same view.
- Order inside a tick: end what is over, drop waiters that have gone, hand out what is free, then make room
  for those that still wait. Room that is already being made is counted: one waiter never costs two victims.
- The ledger checks every instruction again under the row's lock before it writes (L5).
"""

from __future__ import annotations

from dataclasses import dataclass

from sublet.core.billing.allowance import left_now, needed, refilled_at, used_up
from sublet.core.leasing.lease import EndReason, LeaseRecord, LeaseState, changed, overdue
from sublet.core.leasing.tenancy import Tenant, over_quota, rate_of, tenant_changed
from sublet.core.scheduling.admission import Grant, Offer, Placed, WaitlistOrder, WaitlistWalk, as_asked
from sublet.core.scheduling.device import Exclusivity, Resident, Shape, Slice, occupy, slice_bytes
from sublet.core.scheduling.pool_index import PoolIndex, PoolView
from sublet.core.scheduling.preemption import Claim
from sublet.core.scheduling.victim_search import cheapest_room
from sublet.core.values import format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The lease is over: fence it. Its slices go back when its teardown is proven."""

    lease_id: str
    epoch: int
    end_reason: EndReason
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    lease_id: str
    epoch: int
    end_reason: EndReason
    deadline_at: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A waiter leaves the waitlist."""

    lease_id: str
    end_reason: EndReason
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """An offer nobody took: the slice goes back, the request keeps its place."""

    lease_id: str
    reason: str


Instruction = End | Revoke | Drop | Withdraw | Grant | Offer


def tick(view: PoolView | PoolIndex, now: int) -> list[Instruction]:
    pool = view.pool()
    ends = _ends(pool, now)
    drops = _drops(pool, now)
    dropped = {d.lease_id for d in drops}
    lapsed = [
        Withdraw(lease_id=w.id, reason="the offer was not taken in time")
        for w in pool.lapsed(now)
        if w.id not in dropped
    ]
    leaving = {*(e.lease_id for e in ends), *dropped, *(w.lease_id for w in lapsed)}
    unpaid = _unpaid(pool, leaving, now)
    placed: list[Placed] = []
    room: list[Revoke] = []
    with pool.scratch():
        for name in dropped:
            pool.drop_waiter(name)
        if pool.waiters:
            placed = WaitlistWalk(pool, now).run(WaitlistOrder(pool, now))
            room = _VictimSearch(pool, {*leaving, *(r.lease_id for r in unpaid)}, now).run(placed)
    handed = [p.decision(pool, now) for p in placed]
    return [*ends, *drops, *lapsed, *unpaid, *handed, *room]


def _ends(pool: PoolIndex, now: int) -> list[End]:
    found: list[End] = []
    for lease in pool.over(now):
        reason = overdue(lease, now)
        if reason is None:
            continue
        if reason is EndReason.EXPIRED and not lease.claimed:
            why = "granted, but the waiter never took it up"
        elif reason is EndReason.EXPIRED:
            why = f"not renewed within its ttl of {format_duration(lease.request.ttl_us)}"
        else:
            why = lease.detail or "its grace is over"
        found.append(End(lease_id=lease.id, epoch=lease.epoch, end_reason=reason, reason=why))
    return found


def _unpaid(pool: PoolIndex, leaving: set[str], now: int) -> list[Revoke]:
    """Leases whose tenant has no GPU time left to renew them with, a grace before what is paid for is
    over."""
    found: list[Revoke] = []
    for lease in pool.unpaid_soon(now):
        if lease.id in leaving:
            continue
        tenant = pool.tenants[lease.tenant]
        rate = sum(
            rate_of(lease.request.exclusivity, s.vram_bytes, pool.devices[s.device_id].capacity_bytes)
            for s in lease.slices
        )
        if left_now(tenant, now) >= needed(tenant, rate, lease.request.ttl_us):
            continue
        found.append(
            Revoke(
                lease_id=lease.id,
                epoch=lease.epoch,
                end_reason=EndReason.QUOTA,
                deadline_at=lease.expires_at,
                reason=f"tenant {tenant.name} has used its {format_duration(tenant.gpu_us_per_day)} of GPU "
                "time a day",
            )
        )
    return found


def _drops(pool: PoolIndex, now: int) -> list[Drop]:
    found: list[Drop] = []
    for w in pool.gone(now):
        if w.wait_until and now >= w.wait_until:
            waited = format_duration(now - w.joined_at)
            found.append(Drop(lease_id=w.id, end_reason=EndReason.REFUSED, reason=f"no GPU within {waited}"))
        else:
            found.append(
                Drop(lease_id=w.id, end_reason=EndReason.HOLDER_LOST, reason="the waiter fell silent")
            )
    return found


class _VictimSearch:
    """Revoke for those who still wait, in order. Whoever leaves in this tick, or was revoked for an earlier
    waiter, is room already; who was placed, or has room made for it, sits on that room for all who come
    after. Changes the pool: in `scratch`."""

    def __init__(self, pool: PoolIndex, leaving: set[str], now: int) -> None:
        self._pool, self._leaving, self._now = pool, leaving, now
        self._tenants: dict[str, Tenant] = {}  # as they are once this tick has done its work
        self._in_vain: set[object] = set()  # requests no lease could be moved for, since one was moved last

    def run(self, placed: list[Placed]) -> list[Revoke]:
        pool, now = self._pool, self._now
        found: list[Revoke] = []
        if pool.nothing_to_take(now):
            return found  # whoever still waits, and for whatever
        for name in sorted(self._leaving):
            if name in pool.leases:
                pool.set_lease(_gone(pool.leases[name]))
        for p in placed:
            self._sits(p.waiter, p.slices)
            self._charge(p.waiter.tenant, sum(s.vram_bytes for s in p.slices))
        served = {p.waiter.id for p in placed}
        if pool.nothing_to_take(now) or pool.room_is_made():
            return found
        order = WaitlistOrder(pool, now)
        for waiter in order:
            if pool.nothing_to_take(now):
                break
            if waiter.id in served or (waiter.slices and waiter.id not in self._leaving):
                continue
            revoked = self._for(waiter)
            if revoked is None:
                order.pass_over()
            elif revoked or waiter.slices:
                order.come_back()
                self._in_vain.clear()
            found += revoked or ()
        return found

    def _for(self, waiter: LeaseRecord) -> list[Revoke] | None:
        """None: nothing, also for others that ask for the same, until some lease has been moved."""
        pool, now, request = self._pool, self._now, waiter.request
        shape = request.shape()
        tenant = self._tenants.get(waiter.tenant) or pool.tenants.get(waiter.tenant)
        if tenant is None or over_quota(tenant, shape.vram_bytes * shape.count):
            return []
        if tenant.gpu_us_per_day and used_up(tenant, request, pool.device_index.least_rate(request), now):
            return []
        alone = shape.exclusivity is Exclusivity.DEVICE
        asked = (as_asked(shape), request.tier.rank)
        if asked in self._in_vain:
            return None
        if alone and shape.count == 1 and self._sits_behind_one_that_leaves(waiter, shape):
            return []
        choice = cheapest_room(waiter, pool, now)
        if choice is None:
            self._in_vain.add(asked)
            return None
        victims, device_ids = choice
        slices = tuple(Slice(d, slice_bytes(pool.devices[d], shape)) for d in device_ids)
        self._charge(waiter.tenant, sum(s.vram_bytes for s in slices))
        found: list[Revoke] = []
        for victim in victims:
            if victim.claim is Claim.LEAVING:
                continue
            pool.set_lease(_gone(victim.lease))
            found.append(
                Revoke(
                    lease_id=victim.lease.id,
                    epoch=victim.lease.epoch,
                    end_reason=victim.end_reason,
                    deadline_at=now + pool.policy.grace_us,
                    reason=victim.reason,
                )
            )
        self._sits(waiter, slices)
        if alone:
            for device_id in device_ids:
                pool.close(device_id)
        return found

    def _sits_behind_one_that_leaves(self, waiter: LeaseRecord, shape: Shape) -> bool:
        """What `cheapest_room` comes to, most of the time, for one whole device: the first one that is left
        whole. Nobody else can be seated there, so the seat itself need not be noted."""
        pool = self._pool
        device_id = "" if shape.host or waiter.slices else pool.first_left_whole(shape.vram_bytes)
        if not device_id or next(pool.device_index.usable(shape), None) is not None:
            return False
        self._charge(waiter.tenant, pool.devices[device_id].capacity_bytes)
        pool.close(device_id)
        return True

    def _sits(self, waiter: LeaseRecord, slices: tuple[Slice, ...]) -> None:
        self._pool.set_lease(changed(waiter, slices=slices))
        for s in waiter.slices:
            self._returned(s.device_id)  # of the offer it did not take, which it sat on until now

    def _returned(self, device_id: str) -> None:
        device = self._pool.devices[device_id]
        staying = [
            Resident(x.tenant, x.request.exclusivity, s.vram_bytes)
            for x in self._pool.on(device_id)
            for s in x.slices
            if s.device_id == device_id
        ]
        if sum(r.vram_bytes for r in staying) <= device.capacity_bytes:
            self._pool.set_device(occupy(device, staying))

    def _charge(self, name: str, live_bytes: int) -> None:
        """What a tenant will hold once this tick has done its work."""
        tenant = self._tenants.get(name) or self._pool.tenants.get(name)
        if tenant is not None:
            self._tenants[name] = tenant_changed(
                tenant, live_leases=tenant.live_leases + 1, live_bytes=tenant.live_bytes + live_bytes
            )


def _gone(lease: LeaseRecord) -> LeaseRecord:
    return changed(lease, state=LeaseState.ENDED)


def next_look_at(view: PoolView | PoolIndex, now: int) -> int | None:
    """When time alone will change the answer; None when only an event can."""
    pool = view.pool()
    moments = []
    for w in pool.rationed():
        tenant = pool.tenants[w.tenant]
        rate = pool.device_index.least_rate(w.request)
        moments.append(refilled_at(tenant, needed(tenant, rate, w.request.ttl_us), now))
    moments.append(pool.next_moment(now) or 0)
    return min((m for m in moments if m > now), default=None)
