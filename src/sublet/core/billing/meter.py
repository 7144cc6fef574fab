"""What a lease used, in integers that add up.

Rules of this file:
- One interval per lease: from grant to end, closed in its own row by the transaction that ends it. Nothing is
  sampled, so nothing can overlap, leave a gap or go negative (T4).
- Time after the lease ended (a slow reaper, a long teardown) is not billed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sublet.core.leasing.lease import EndReason, LeaseRecord, LeaseState
from sublet.core.scheduling.device import Slice


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


def billed_until(lease: LeaseRecord, now: int) -> int:
    """When the right to use it ended, or now if that is earlier."""
    if not lease.granted_at:
        return 0
    end = lease.deadline_at if lease.state is LeaseState.REVOKING else lease.expires_at
    return max(lease.granted_at, min(now, end))


def close(lease: LeaseRecord, reason: EndReason, now: int) -> Usage:
    """What a lease that ends now has used."""
    return _measured(lease, billed_until(lease, now), reason.value)


def so_far(lease: LeaseRecord, now: int) -> Usage:
    """What a lease that is still held has used until now."""
    return _measured(lease, billed_until(lease, now), "")


def of_ended(lease: LeaseRecord) -> Usage:
    """What an ended lease used, by its own row: there is no second record that could disagree."""
    return _measured(lease, lease.ended_at, lease.reason.value if lease.reason else "")


def amount(elapsed_us: int, slices: Sequence[Slice]) -> tuple[int, int]:
    """The device time and the byte-seconds of holding these slices for so long."""
    held = sum(s.vram_bytes for s in slices)
    return elapsed_us * len(slices), elapsed_us * held // 1_000_000


def _measured(lease: LeaseRecord, end: int, reason: str) -> Usage:
    gpu_us, vram_byte_s = amount(end - lease.granted_at, lease.slices)
    return Usage(
        lease_id=lease.id,
        tenant=lease.tenant,
        tier=lease.request.tier.value,
        job=lease.request.job,
        from_at=lease.granted_at,
        to_at=end,
        gpu_us=gpu_us,
        vram_byte_s=vram_byte_s,
        reason=reason,
    )
