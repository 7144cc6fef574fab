"""Whose lease is taken when somebody who may take it waits.

Rules of this file:
- In this order: leases already on their way out, idle ones, ones past their hold cap, lower tiers. Nobody
  busy is disturbed while an idle lease would do.
- Among lower tiers: lowest tier first, then least work since its last commit. A job that never committed
  counts as `neutral_work_us`, so never committing is no shield and no death sentence.
- A lease runs `min_run_us` before it can be preempted, doubled for each time its job was preempted lately;
  tiers are a strict order, so A cannot preempt B and B then A.
- A lease goes whole, with all its devices, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from sublet.core.leasing.lease import EndReason, LeaseRecord, LeaseState
from sublet.core.leasing.policy import Policy
from sublet.core.scheduling.device import Device, DeviceState, Resident, occupy, usable
from sublet.core.values import format_duration


class Claim(IntEnum):
    """Why a lease may be taken, gentlest first."""

    LEAVING = 0
    IDLE = 1
    HOLD_CAP = 2
    LOWER_TIER = 3


Cost = tuple[int, int, int, str]


@dataclass(frozen=True, slots=True)
class Victim:
    lease: LeaseRecord
    claim: Claim
    cost: Cost
    reason: str

    @property
    def end_reason(self) -> EndReason:
        return {
            Claim.IDLE: EndReason.IDLE,
            Claim.HOLD_CAP: EndReason.HOLD_CAP,
        }.get(self.claim, EndReason.PREEMPTED)


def work_at_risk(lease: LeaseRecord, policy: Policy, now: int) -> int:
    """GPU time that a loss now would throw away."""
    if not lease.committed_at:
        return policy.neutral_work_us * max(1, len(lease.slices))
    return max(0, now - lease.committed_at) * max(1, len(lease.slices))


def protected_us(lease: LeaseRecord, policy: Policy) -> int:
    return policy.min_run_us * min(policy.max_min_run_factor, 1 << min(lease.preemptions, 16))


def cap_notice_at(lease: LeaseRecord, policy: Policy) -> int:
    """When a capped lease gets its notice: a grace before its cap, so that the cap is the deadline (L4)."""
    return lease.granted_at + lease.hold_cap_us - min(policy.grace_us, lease.hold_cap_us // 2)


def claim_on(lease: LeaseRecord, waiter: LeaseRecord, policy: Policy, now: int) -> Victim | None:
    if lease.state is LeaseState.REVOKING or lease.state is LeaseState.ENDED:
        return Victim(lease, Claim.LEAVING, (0, 0, 0, lease.id), "already on its way out")
    if lease.state is LeaseState.WAITING:
        return None  # it holds an offer, which lapses by itself
    idle_us = now - lease.active_at
    if not lease.busy and idle_us >= policy.idle_after_us:
        return Victim(
            lease,
            Claim.IDLE,
            (Claim.IDLE, -idle_us, 0, lease.id),
            f"idle for {format_duration(idle_us)} while {waiter.tenant} waits",
        )
    if lease.hold_cap_us and now >= cap_notice_at(lease, policy):
        return Victim(
            lease,
            Claim.HOLD_CAP,
            (Claim.HOLD_CAP, lease.granted_at, 0, lease.id),
            f"held for {format_duration(now - lease.granted_at)}, the cap is "
            f"{format_duration(lease.hold_cap_us)} while {waiter.tenant} waits",
        )
    mine, theirs = waiter.request.tier, lease.request.tier
    if theirs.rank > mine.rank and now - lease.granted_at >= protected_us(lease, policy):
        work = work_at_risk(lease, policy, now)
        return Victim(
            lease,
            Claim.LOWER_TIER,
            (Claim.LOWER_TIER, -theirs.rank, work, lease.id),
            f"preempted: {theirs.value} makes room for {mine.value}; "
            f"{format_duration(work)} of work since the last commit",
        )
    return None


def room_on(
    device: Device, leases: Sequence[LeaseRecord], waiter: LeaseRecord, policy: Policy, now: int
) -> list[Victim] | None:
    """The cheapest victims on one device that let the waiter in, or None."""
    shape = waiter.request.shape()
    if device.state is not DeviceState.READY or device.capacity_bytes < shape.vram_bytes:
        return None
    if shape.host and device.host != shape.host:
        return None
    claims = sorted(
        (v for lease in leases if (v := claim_on(lease, waiter, policy, now)) is not None),
        key=lambda v: v.cost,
    )
    taken: list[Victim] = []
    for victim in [None, *claims]:
        if victim is not None:
            taken.append(victim)
        if _lets_in(waiter, device, leases, taken):
            needed = _without_needless(taken, device, leases, waiter)
            return _one_instead_of_many(needed, claims, device, leases, waiter)
    return None


def _lets_in(
    waiter: LeaseRecord, device: Device, leases: Sequence[LeaseRecord], gone: Sequence[Victim]
) -> bool:
    """Would the waiter fit on the device without these?"""
    ids = {v.lease.id for v in gone}
    residents = [
        Resident(x.tenant, x.request.exclusivity, s.vram_bytes)
        for x in leases
        if x.id not in ids
        for s in x.slices
        if s.device_id == device.id
    ]
    if sum(r.vram_bytes for r in residents) > device.capacity_bytes:
        return False  # an earlier waiter sits on room that is only being made
    return usable(occupy(device, residents), waiter.request.shape())


def _without_needless(
    taken: list[Victim], device: Device, leases: Sequence[LeaseRecord], waiter: LeaseRecord
) -> list[Victim]:
    """Drop victims, dearest first, that turned out not to be needed."""
    needed = list(taken)
    for victim in reversed(taken):
        fewer = [v for v in needed if v is not victim]
        if _lets_in(waiter, device, leases, fewer):
            needed = fewer
    return needed


def _one_instead_of_many(
    needed: list[Victim],
    claims: Sequence[Victim],
    device: Device,
    leases: Sequence[LeaseRecord],
    waiter: LeaseRecord,
) -> list[Victim]:
    """Where several were found, one of the same kind that is enough by itself costs fewer people their
    lease."""
    disturbed = [v for v in needed if v.claim is not Claim.LEAVING]
    if len(disturbed) < 2:
        return needed
    leaving = [v for v in needed if v.claim is Claim.LEAVING]
    worst = max(disturbed, key=lambda v: v.cost[:2] if v.claim is Claim.LOWER_TIER else (v.claim, 0))
    for victim in claims:
        same = victim.claim is worst.claim and victim.lease.request.tier is worst.lease.request.tier
        if same and _lets_in(waiter, device, leases, [*leaving, victim]):
            return [*leaving, victim]
    return needed
