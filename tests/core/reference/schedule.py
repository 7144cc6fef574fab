"""How `core.scheduling.schedule` decided before, as walks over everything."""

from __future__ import annotations

from dataclasses import replace

from sublet.core.billing.allowance import (
    least_rate,
    left_now,
    needed,
    notice_at,
    rate_on,
    refilled_at,
    used_up,
)
from sublet.core.leasing.lease import EndReason, LeaseRecord, LeaseState, overdue
from sublet.core.leasing.tenancy import Tenant, over_quota
from sublet.core.scheduling.admission import Grant, Offer
from sublet.core.scheduling.device import Slice, slice_bytes
from sublet.core.scheduling.pool_index import PoolView
from sublet.core.scheduling.preemption import Claim, cap_notice_at, protected_us
from sublet.core.scheduling.schedule import Drop, End, Instruction, Revoke, Withdraw
from sublet.core.values import format_duration
from tests.core.reference.admission import in_order, place
from tests.core.reference.preemption import choose


def tick(view: PoolView, now: int) -> list[Instruction]:
    ends = _ends(view, now)
    drops = _drops(view, now)
    dropped = {d.lease_id for d in drops}
    lapsed = [
        Withdraw(lease_id=w.id, reason="the offer was not taken in time")
        for w in view.waiters
        if w.id not in dropped and w.slices and now >= w.offer_until
    ]
    view = replace(view, waiters=tuple(w for w in view.waiters if w.id not in dropped))
    order = in_order(view, now)
    placed = place(view, now, order)
    leaving = {*(e.lease_id for e in ends), *dropped, *(w.lease_id for w in lapsed)}
    unpaid = _unpaid(view, leaving, now)
    leaving |= {r.lease_id for r in unpaid}
    return [*ends, *drops, *lapsed, *unpaid, *placed, *_make_room(view, order, placed, leaving, now)]


def _ends(view: PoolView, now: int) -> list[End]:
    found: list[End] = []
    for lease in view.leases:
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


def _unpaid(view: PoolView, leaving: set[str], now: int) -> list[Revoke]:
    """Leases whose tenant has no GPU time left to renew them with, a grace before what is paid for is over."""
    found: list[Revoke] = []
    capacities = {d.id: d.capacity_bytes for d in view.devices}
    for lease in view.leases:
        tenant = view.tenants.get(lease.tenant)
        if tenant is None or not tenant.gpu_us_per_day or lease.state is not LeaseState.ACTIVE:
            continue
        if lease.id in leaving or now < notice_at(lease, view.policy.grace_us):
            continue
        rate = rate_on(lease.request.exclusivity, lease.slices, capacities)
        left = left_now(tenant, now)
        if left >= needed(tenant, rate, lease.request.ttl_us):
            continue
        found.append(
            Revoke(
                lease_id=lease.id,
                epoch=lease.epoch,
                end_reason=EndReason.QUOTA,
                deadline_at=lease.expires_at,
                reason=f"tenant {tenant.name} has used its {format_duration(tenant.gpu_us_per_day)} of GPU time a day",
            )
        )
    return found


def _drops(view: PoolView, now: int) -> list[Drop]:
    found: list[Drop] = []
    for w in view.waiters:
        if w.wait_until and now >= w.wait_until:
            waited = format_duration(now - w.joined_at)
            found.append(Drop(lease_id=w.id, end_reason=EndReason.REFUSED, reason=f"no GPU within {waited}"))
        elif now - max(w.seen_at, w.joined_at) >= view.policy.waiter_silence_us:
            found.append(
                Drop(lease_id=w.id, end_reason=EndReason.HOLDER_LOST, reason="the waiter fell silent")
            )
    return found


def _make_room(
    view: PoolView, order: list[LeaseRecord], placed: list[Grant | Offer], leaving: set[str], now: int
) -> list[Revoke]:
    """Revoke for those who still wait, in order. Whoever leaves in this tick, or was revoked for an earlier waiter, is room
    already; who was placed, or has room made for it, sits on that room for all who come after."""
    found: list[Revoke] = []
    tenants = dict(view.tenants)
    devices = {d.id: d for d in view.devices}
    waiting = {w.id: w for w in view.waiters}
    served = {p.lease_id for p in placed}
    holding = {x.id: _gone(x) if x.id in leaving else x for x in view.leases if x.holds_slices}
    for p in placed:
        holding[p.lease_id] = replace(waiting[p.lease_id], slices=p.slices)
        _charge(tenants, waiting[p.lease_id].tenant, sum(s.vram_bytes for s in p.slices))
    for waiter in order:
        if waiter.id in served or (waiter.slices and waiter.id not in leaving):
            continue
        shape = waiter.request.shape()
        tenant = tenants.get(waiter.tenant)
        if tenant is None or over_quota(tenant, shape.vram_bytes * shape.count):
            continue
        if used_up(tenant, waiter.request, least_rate(waiter.request, view.devices), now):
            continue
        choice = choose(waiter, view.devices, list(holding.values()), view.policy, now)
        if choice is None:
            continue
        victims, device_ids = choice
        slices = tuple(Slice(d, slice_bytes(devices[d], shape)) for d in device_ids)
        _charge(tenants, waiter.tenant, sum(s.vram_bytes for s in slices))
        for victim in victims:
            if victim.claim is Claim.LEAVING:
                continue
            holding[victim.lease.id] = _gone(victim.lease)
            found.append(
                Revoke(
                    lease_id=victim.lease.id,
                    epoch=victim.lease.epoch,
                    end_reason=victim.end_reason,
                    deadline_at=now + view.policy.grace_us,
                    reason=victim.reason,
                )
            )
        holding[waiter.id] = replace(waiter, slices=slices)
    return found


def _gone(lease: LeaseRecord) -> LeaseRecord:
    return replace(lease, state=LeaseState.ENDED)


def _charge(tenants: dict[str, Tenant], name: str, live_bytes: int) -> None:
    """What a tenant will hold once this tick has done its work."""
    tenant = tenants.get(name)
    if tenant is not None:
        tenants[name] = replace(
            tenant, live_leases=tenant.live_leases + 1, live_bytes=tenant.live_bytes + live_bytes
        )


def next_look_at(view: PoolView, now: int) -> int | None:
    """When time alone will change the answer; None when only an event can."""
    policy = view.policy
    moments = [lease.ends_at for lease in view.leases if lease.state is not LeaseState.ENDED]
    for lease in view.leases:
        tenant = view.tenants.get(lease.tenant)
        if tenant is not None and tenant.gpu_us_per_day and lease.state is LeaseState.ACTIVE:
            moments.append(notice_at(lease, policy.grace_us))
    for w in view.waiters:
        tenant = view.tenants.get(w.tenant)
        if tenant is not None and tenant.gpu_us_per_day:
            rate = least_rate(w.request, view.devices)
            moments.append(refilled_at(tenant, needed(tenant, rate, w.request.ttl_us), now))
        moments += [m for m in (w.wait_until, w.offer_until) if m]
        moments.append(max(w.seen_at, w.joined_at) + policy.waiter_silence_us)
        every = policy.batch_promote_after_us if w.request.tier.rank else policy.promote_after_us
        promotions = max(0, now - w.joined_at) // max(1, every) + 1
        moments.append(w.joined_at + promotions * every)
    if view.waiters:
        moments += [t.cooldown_until for t in view.tenants.values() if t.cooldown_until > now]
        for lease in view.leases:
            moments.append(lease.granted_at + protected_us(lease, policy))
            if not lease.busy:
                moments.append(lease.active_at + policy.idle_after_us)
            if lease.hold_cap_us:
                moments.append(cap_notice_at(lease, policy))
    ahead = [m for m in moments if m > now]
    return min(ahead) if ahead else None
