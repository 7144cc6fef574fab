"""What a lease used, in integers that add up.

Rules of this file:
- One interval per lease: from grant to end, closed in its own row by the transaction that ends it. Nothing is sampled, so
  nothing can overlap, leave a gap or go negative (T4).
- Time after the lease ended (a slow reaper, a long teardown) is not billed.
"""

from __future__ import annotations

from dataclasses import dataclass

from sublet.core.lease import EndReason, Lease, LeaseState


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    lease_id: str
    tenant: str
    tier: str
    job: str
    from_at: int
    to_at: int
    gpu_us: int  # time × devices
    vram_byte_s: int  # bytes × whole seconds-equivalent, rounded down once
    reason: str


def billed_until(lease: Lease, now: int) -> int:
    """The end of the right to use it, or now if that came first."""
    if not lease.granted_at:
        return 0
    end = lease.deadline_at if lease.state is LeaseState.REVOKING else lease.expires_at
    return max(lease.granted_at, min(now, end))


def close(lease: Lease, reason: EndReason, now: int) -> Usage:
    """What a lease that ends now has used."""
    return _measured(lease, billed_until(lease, now), reason.value)


def of_ended(lease: Lease) -> Usage:
    """What an ended lease used. Its own row says it all: there is no second record that could disagree."""
    return _measured(lease, lease.ended_at, lease.reason.value if lease.reason else "")


def _measured(lease: Lease, end: int, reason: str) -> Usage:
    elapsed = end - lease.granted_at
    held = sum(s.vram_bytes for s in lease.slices)
    return Usage(
        lease_id=lease.id,
        tenant=lease.tenant,
        tier=lease.request.tier.value,
        job=lease.request.job,
        from_at=lease.granted_at,
        to_at=end,
        gpu_us=elapsed * len(lease.slices),
        vram_byte_s=elapsed * held // 1_000_000,
        reason=reason,
    )
