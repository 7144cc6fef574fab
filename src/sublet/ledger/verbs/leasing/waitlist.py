"""Asking for a lease and waiting for one: acquire, attend, offers, and handing out what is free.

Rules of this file:
- The pool is locked first, the lease row after it; no verb takes them the other way round.
- Rules live in `core`. What is here loads records, asks, and writes what the answer says.
- A verb returns an error instead of raising it when the refusal itself must be committed to the journal.
- A decision made on an earlier read is checked again before it is written.
"""

from __future__ import annotations

from dataclasses import replace

from sublet.core.errors import NotFound, QuotaReached, Stale, SubletError
from sublet.core.journal.chain import StrandEnd
from sublet.core.leasing.lease import (
    HOLDING,
    Holder,
    LeaseEvent,
    LeaseRecord,
    LeaseState,
    Request,
    after,
    changed,
)
from sublet.core.leasing.tenancy import Tenant, over_quota
from sublet.core.scheduling import admission
from sublet.core.scheduling.admission import Grant, Offer, PoolView, Refusal, Wait
from sublet.core.scheduling.device import Device, fit
from sublet.core.values import HOUR_US
from sublet.ledger.rows import (
    INSERT_LEASE,
    LEASE_BY_ID,
    SELECT_DEVICE,
    SELECT_LEASE,
    SELECT_TENANT,
    device_of,
    lease_of,
    lease_values,
    slices_text,
    tenant_of,
)
from sublet.ledger.tx import Tx, write_main
from sublet.ledger.verbs.journal.refusals import write_refusal
from sublet.ledger.verbs.leasing import allowances, gangs
from sublet.ledger.verbs.leasing import slices as slicing
from sublet.ledger.verbs.leasing.credentials import opened, proves, secret_hash, unknown
from sublet.ports.bell import SCHEDULE_TOPIC, host_topic, lease_topic
from sublet.ports.ledger import Answer


def load_view(tx: Tx, *, with_leases: bool) -> PoolView:
    """Everything a decision may look at. Waiting requests are few; leases are read only when they matter."""
    waiters = tuple(
        lease_of(r) for r in tx.rows(f"{SELECT_LEASE} WHERE state = 'waiting' ORDER BY joined_at, id")
    )
    leases: tuple[LeaseRecord, ...] = ()
    if with_leases:
        found = tx.rows(f"{SELECT_LEASE} WHERE settled_at = 0 AND slices <> '' ORDER BY id")
        leases = tuple(_with_what_it_has(tx, lease_of(r)) for r in found)
    devices = tuple(device_of(r) for r in tx.rows(f"{SELECT_DEVICE} ORDER BY id"))
    tenants = {
        t.name: t
        for t in (
            tenant_of(r)
            for r in tx.rows(
                f"{SELECT_TENANT} WHERE waiting > 0 OR live_leases > 0 OR used_us > 0 ORDER BY name"
            )
        )
    }
    return PoolView(devices=devices, leases=leases, waiters=waiters, tenants=tenants, policy=tx.pool.policy)


def _with_what_it_has(tx: Tx, lease: LeaseRecord) -> LeaseRecord:
    """A gang that is over frees its slices host by host; every other lease has all of them."""
    over = lease.seats and lease.state is LeaseState.ENDED
    return gangs.as_it_stands(tx, lease) if over else lease


# --- acquire ------------------------------------------------------------------------------------------------


def acquire(tx: Tx, lease_id: str, secret: str, request: Request, holder: Holder) -> Answer | SubletError:
    pool, now = tx.pool, tx.now
    known = tx.row(LEASE_BY_ID, lease_id)
    if known is not None:
        # The first call's answer was lost on the way: this is how its caller finds out what it was (S5).
        return Answer(lease=lease_of(known), at=now) if proves(known, secret) else unknown(lease_id)
    tenant = slicing.load_tenant(tx, request.tenant)
    if tenant is None:
        return slicing.unknown_tenant(request.tenant)
    newcomer = LeaseRecord(
        id=lease_id,
        request=request,
        holder=holder,
        state=LeaseState.WAITING,
        joined_at=now,
        seen_at=now,
        active_at=now,
        busy=True,
        hold_cap_us=admission.hold_cap_of(request, pool.policy),
        wait_until=now + request.wait_us if request.wait_us else 0,
        preemptions=_recent_preemptions(tx, request, now),
    )
    decision: Grant | Offer | Wait | Refusal | None = None
    devices: list[Device] = []
    if pool.waiting == 0:
        # Nobody waits and it fits: what `admit` would answer, without reading the whole pool.
        shape = request.shape()
        devices = slicing.candidates(tx, shape)
        found = fit(shape, devices)
        # GPU time by the day is `admit`'s to judge: it takes the whole pool to say what a request takes at
        # least.
        if (
            found is not None
            and not tenant.gpu_us_per_day
            and not over_quota(tenant, sum(s.vram_bytes for s in found))
        ):
            decision = Grant(
                lease_id=lease_id, slices=found, vram_bytes=request.vram_bytes, reason="capacity is free"
            )
    if decision is None:
        view = load_view(tx, with_leases=True)
        view = replace(view, tenants={**view.tenants, tenant.name: tenant})
        decision = admission.admit(newcomer, view, now)
    if isinstance(decision, Refusal):
        write_refusal(tx, "lease.refused", request.tenant, lease_id, decision.error.code, decision.reason)
        return decision.error(decision.reason)
    if isinstance(decision, Grant):
        granted = _granted(tx, newcomer, decision, claimed=True, tenant=tenant)
        slicing.occupy(tx, granted, decision.slices, billed=True, tenant=tenant, devices=devices)
        anchor = _journal_grant(tx, granted, decision.reason)
        _insert(tx, granted, secret, anchor)
        if granted.seats:
            gangs.lay(tx, granted)
        tx.rings.add(host_topic(holder.host))
        return Answer(lease=granted, at=now)
    return _join_waitlist(tx, newcomer, secret, decision)


def _join_waitlist(tx: Tx, newcomer: LeaseRecord, secret: str, decision: Wait | Offer) -> Answer:
    request = newcomer.request
    pool = tx.pool
    pool.waiting += 1
    pool.dirty = True
    slicing.shift_tenant(tx, request.tenant, waiting=1)
    newcomer = replace(newcomer, detail=decision.reason)
    body: dict[str, object] = {
        "reason": decision.reason,
        "asked_bytes": request.vram_bytes,
        "count": request.count,
        "tier": request.tier.value,
    }
    if isinstance(decision, Wait):
        body["position"] = decision.position
    _insert(tx, newcomer, secret, write_main(tx, "lease.waiting", request.tenant, newcomer.id, body))
    if isinstance(decision, Offer):
        newcomer = _apply_offer(tx, newcomer, decision)
    tx.rings.update((SCHEDULE_TOPIC, host_topic(newcomer.holder.host)))
    return Answer(lease=newcomer, at=tx.now, wait=decision if isinstance(decision, Wait) else None)


def _recent_preemptions(tx: Tx, request: Request, now: int) -> int:
    if not request.job:
        return 0
    row = tx.row(
        "SELECT count(*) FROM lease WHERE tenant = ? AND job = ? AND reason = 'preempted' AND ended_at > ?",
        request.tenant,
        request.job,
        now - HOUR_US,
    )
    return int(row[0]) if row else 0


def _granted(
    tx: Tx, lease: LeaseRecord, decision: Grant | Offer, *, claimed: bool, tenant: Tenant | None = None
) -> LeaseRecord:
    now = tx.now
    ttl = lease.request.ttl_us
    # A waiter may have died while it waited: it gets its ttl when it takes the grant up.
    span = ttl if claimed else min(ttl, tx.pool.policy.claim_us)
    span = allowances.pay_grant(tx, lease.request, decision.slices, span, tenant)
    return changed(
        lease,
        state=after(lease.state, LeaseEvent.GRANT),
        epoch=tx.pool.next_epoch(),
        slices=decision.slices,
        vram_bytes=decision.slices[0].vram_bytes,
        granted_at=now,
        expires_at=now + span,
        active_at=now,
        busy=True,
        claimed=claimed,
        detail=decision.reason,
        offer_until=0,
        seats=len(gangs.laid_out(tx, lease.request, decision.slices)),
    )


def _journal_grant(tx: Tx, lease: LeaseRecord, reason: str) -> str:
    request = lease.request
    body: dict[str, object] = {
        "epoch": lease.epoch,
        "slices": slices_text(lease.slices),
        "exclusivity": request.exclusivity.value,
        "tier": request.tier.value,
        "expires_at": lease.expires_at,
        "ttl_us": request.ttl_us,
        "reason": reason,
    }
    if lease.seats:
        body["seats"] = lease.seats
    return write_main(tx, "lease.granted", request.tenant, lease.id, body)


def _insert(tx: Tx, lease: LeaseRecord, secret: str, anchor: str) -> None:
    values = lease_values(lease, secret_hash(secret), StrandEnd(0, anchor), anchor)
    tx.run(INSERT_LEASE, *values)


# --- waiting ------------------------------------------------------------------------------------------------


def attend(tx: Tx, lease_id: str, secret: str, explain: bool) -> Answer | SubletError:
    # Waiting alone locks the pool too, on purpose: a waiter is a few bytes and one update.
    _ = tx.pool
    row = opened(tx, lease_id, secret)
    if isinstance(row, NotFound):
        return row
    lease = lease_of(row)
    if lease.state is not LeaseState.WAITING:
        return Answer(lease=lease, at=tx.now)
    tx.run("UPDATE lease SET seen_at = ? WHERE id = ?", tx.now, lease_id)
    lease = replace(lease, seen_at=tx.now)
    if not explain:
        return Answer(lease=lease, at=tx.now)
    return Answer(lease=lease, at=tx.now, wait=explained(tx, lease))


def explained(tx: Tx, lease: LeaseRecord) -> Wait | None:
    """Position, ETA and reason of one waiter."""
    if lease.state is not LeaseState.WAITING:
        return None
    return admission.expect(lease, load_view(tx, with_leases=tx.pool.waiting <= 64), tx.now)


def accept(tx: Tx, lease_id: str, secret: str) -> Answer | SubletError:
    _ = tx.pool
    row = opened(tx, lease_id, secret)
    if isinstance(row, NotFound):
        return row
    lease = lease_of(row)
    if lease.state in HOLDING:
        return Answer(lease=lease, at=tx.now)  # accepted before, and the answer was lost
    if lease.state is not LeaseState.WAITING or not lease.slices or tx.now >= lease.offer_until:
        return Stale("the offer is no longer open; the request keeps its place if it still waits")
    used_up = allowances.used_up(tx, lease.request)
    if used_up:
        return QuotaReached(f"quota: {used_up}")
    slicing.vacate(tx, lease)
    taken = Grant(
        lease_id=lease.id, slices=lease.slices, vram_bytes=lease.slices[0].vram_bytes, reason="offer accepted"
    )
    granted = _apply_grant(tx, replace(lease, slices=()), taken, claimed=True)
    return Answer(lease=granted, at=tx.now)


def decline(tx: Tx, lease_id: str, secret: str) -> Answer | SubletError:
    _ = tx.pool
    row = opened(tx, lease_id, secret)
    if isinstance(row, NotFound):
        return row
    lease = lease_of(row)
    if lease.state is LeaseState.WAITING and lease.slices:
        lease = withdraw_offer(tx, lease, "declined")
        hand_out(tx)
    return Answer(lease=lease, at=tx.now)


def _apply_offer(tx: Tx, lease: LeaseRecord, offer: Offer) -> LeaseRecord:
    slicing.occupy(tx, lease, offer.slices, billed=False)
    tx.run(
        "UPDATE lease SET slices = ?, offer_until = ?, detail = ? WHERE id = ?",
        slices_text(offer.slices),
        offer.until,
        offer.reason,
        lease.id,
    )
    write_main(
        tx,
        "lease.offered",
        lease.tenant,
        lease.id,
        {"slices": slices_text(offer.slices), "until": offer.until, "reason": offer.reason},
    )
    tx.rings.add(lease_topic(lease.id))
    return replace(lease, slices=offer.slices, offer_until=offer.until, detail=offer.reason)


def withdraw_offer(tx: Tx, lease: LeaseRecord, why: str) -> LeaseRecord:
    """`offer_until` stays set, in the past: one request is offered a smaller slice once."""
    slicing.vacate(tx, lease)
    tx.run("UPDATE lease SET slices = '', offer_until = ? WHERE id = ?", tx.now, lease.id)
    write_main(tx, "lease.offer_withdrawn", lease.tenant, lease.id, {"reason": why})
    tx.rings.add(lease_topic(lease.id))
    return replace(lease, slices=(), offer_until=tx.now)


def _apply_grant(tx: Tx, lease: LeaseRecord, grant: Grant, *, claimed: bool) -> LeaseRecord:
    """A waiter becomes a holder."""
    granted = _granted(tx, lease, grant, claimed=claimed)
    slicing.occupy(tx, granted, grant.slices, billed=True, left_waitlist=True)
    tx.pool.waiting -= 1
    anchor = _journal_grant(tx, granted, grant.reason)
    tx.run(
        "UPDATE lease SET state = ?, epoch = ?, slices = ?, vram_bytes = ?, granted_at = ?, expires_at = ?, "
        "active_at = ?, busy = 1, claimed = ?, detail = ?, offer_until = 0, strand_seq = 0, strand_hash = ?, "
        "strand_anchor = ?, seats = ? WHERE id = ?",
        granted.state.value,
        granted.epoch,
        slices_text(granted.slices),
        granted.vram_bytes,
        granted.granted_at,
        granted.expires_at,
        granted.active_at,
        int(claimed),
        granted.detail,
        anchor,
        anchor,
        granted.seats,
        lease.id,
    )
    if granted.seats:
        gangs.lay(tx, granted)
    tx.rings.update((lease_topic(lease.id), host_topic(lease.holder.host)))
    return granted


def apply_placement(tx: Tx, decision: Grant | Offer) -> LeaseRecord | None:
    row = tx.locked(LEASE_BY_ID, decision.lease_id)
    if row is None:
        return None
    waiter = lease_of(row)
    if waiter.state is not LeaseState.WAITING or waiter.slices:
        return None
    if not slicing.still_fits(tx, waiter.request.shape(decision.vram_bytes), decision.slices):
        return None
    if isinstance(decision, Offer):
        return _apply_offer(tx, waiter, decision)
    return _apply_grant(tx, waiter, decision, claimed=False)


def hand_out(tx: Tx) -> None:
    """Grant free capacity to the first in order, in the transaction that freed it."""
    if tx.pool.waiting == 0:
        return
    for decision in admission.place(load_view(tx, with_leases=False), tx.now):
        apply_placement(tx, decision)


def waits(tx: Tx, found: list[LeaseRecord]) -> dict[str, Wait]:
    """Position and reason of every waiter, in one pass."""
    if not any(x.state is LeaseState.WAITING for x in found):
        return {}
    view = load_view(tx, with_leases=False)
    return {
        w.id: Wait(position=i, eta_us=None, reason=admission.why_waiting(w, view, tx.now))
        for i, w in enumerate(admission.in_order(view, tx.now), 1)
    }
