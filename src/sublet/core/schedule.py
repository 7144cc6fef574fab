"""One tick: what must happen now, as instructions with reasons.

Rules of this file:
- `tick` is a pure function of the view and the time. The warden applies it in one transaction and the simulator in
  virtual time; both get the same list for the same view.
- Order inside a tick: end what is over, drop who has gone, hand out what is free, then make room for who still
  waits. Room that is already being made is counted, so one waiter never costs two victims.
- The ledger checks every instruction again under the row's lock before it writes (L5).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sublet.core.admission import Grant, Offer, View, in_order, place
from sublet.core.lease import EndReason, Lease, LeaseState, overdue
from sublet.core.preemption import Claim, choose
from sublet.core.tenancy import over_quota
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


def tick(view: View, now: int) -> list[Instruction]:
    instructions: list[Instruction] = []
    instructions += _ends(view, now)
    gone = _drops(view, now)
    instructions += gone
    lapsed = [
        Withdraw(lease_id=w.id, reason="the offer was not taken in time")
        for w in view.waiters
        if w.offer_until and now >= w.offer_until and w.slices
    ]
    instructions += lapsed
    dropped = {d.lease_id for d in gone}
    staying = tuple(w for w in view.waiters if w.id not in dropped)
    view = replace(view, waiters=staying)
    placed = place(view, now)
    instructions += placed
    instructions += _make_room(view, {p.lease_id for p in placed}, placed, now)
    return instructions


def _ends(view: View, now: int) -> list[Instruction]:
    found: list[Instruction] = []
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


def _drops(view: View, now: int) -> list[Drop]:
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


def _make_room(view: View, served: set[str], placed: list[Grant | Offer], now: int) -> list[Instruction]:
    """Revoke for those who still wait, in order. A device chosen for one is not counted for the next."""
    found: list[Instruction] = []
    taken = {s.device_id for p in placed for s in p.slices}
    holding: list[Lease] = [x for x in view.leases if x.holds_slices]
    already: set[str] = set()
    for waiter in in_order(view, now):
        if waiter.id in served or waiter.slices:
            continue
        tenant = view.tenants.get(waiter.tenant)
        if tenant is None or over_quota(tenant, waiter.request.vram_bytes * waiter.request.count):
            continue
        open_devices = [d for d in view.devices if d.id not in taken]
        choice = choose(waiter, open_devices, holding, view.policy, now)
        if choice is None:
            continue
        victims, device_ids = choice
        taken.update(device_ids)
        for victim in victims:
            if victim.claim is Claim.LEAVING or victim.lease.id in already:
                continue
            already.add(victim.lease.id)
            found.append(
                Revoke(
                    lease_id=victim.lease.id,
                    epoch=victim.lease.epoch,
                    end_reason=victim.end_reason,
                    deadline_at=now + view.policy.grace_us,
                    reason=victim.reason,
                )
            )
    return found


def next_look_at(view: View, now: int) -> int | None:
    """When time alone will change the answer; None when only an event can."""
    moments = [lease.ends_at for lease in view.leases if lease.state is not LeaseState.ENDED]
    for w in view.waiters:
        moments += [m for m in (w.wait_until, w.offer_until) if m]
    if view.waiters:
        for lease in view.leases:
            if not lease.busy:
                moments.append(lease.active_at + view.policy.idle_after_us)
            if lease.hold_cap_us:
                moments.append(lease.granted_at + lease.hold_cap_us)
    ahead = [m for m in moments if m > now]
    return min(ahead) if ahead else None
