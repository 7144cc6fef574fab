"""What a session used: the sum over the leases it had.

Rules of this file:
- Time is cut as in a report (`core.billing.goodput`), so that sessions and reports say the same. A live lease
  counts until now.
- Nobody pays for waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from sublet.core.billing.goodput import CommitUse, stretches
from sublet.core.billing.meter import billed_until
from sublet.core.billing.price import Tariff
from sublet.core.leasing.lease import LeaseRecord, LeaseState
from sublet.core.studio.session import StudioSession


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUsage:
    session_id: str
    tenant: str
    name: str
    opened_at: int
    ended_at: int
    leases: int
    gpu_us: int  # time × devices
    vram_byte_s: int
    wait_us: int
    refund_us: int
    cost_micro: int | None  # less refunds; None: nothing it used has a price
    calls: int
    errors: int
    launches: int
    checkpoint_bytes: int


def used(
    session: StudioSession,
    leases: Sequence[LeaseRecord],
    committing: Collection[str],
    tariff: Callable[[LeaseRecord], Tariff | None],
    *,
    since: int,
    now: int,
) -> SessionUsage:
    """`committing`: which of its jobs have committed steps, and so may be refunded."""
    commits = [CommitUse(lease="", job=job, at=since - 1, steps=0, compute_us=0) for job in committing]
    commits += [
        CommitUse(lease=x.id, job=x.request.job, at=x.committed_at, steps=0, compute_us=0)
        for x in leases
        if x.committed_at
    ]
    parts = stretches(leases, commits, since=since, now=now)
    tariffs = {x.id: found for x in leases if (found := tariff(x)) is not None}
    costs = [tariffs[p.lease].cost(p.held_us - p.refund_us) for p in parts if p.lease in tariffs]
    return SessionUsage(
        session_id=session.id,
        tenant=session.tenant,
        name=session.name,
        opened_at=session.opened_at,
        ended_at=session.ended_at,
        leases=len(leases),
        gpu_us=sum(p.held_us for p in parts),
        vram_byte_s=sum(
            _held_us(x, since, now) * sum(s.vram_bytes for s in x.slices) // 1_000_000 for x in leases
        ),
        wait_us=sum(_waited_us(x, since, now) for x in leases),
        refund_us=sum(p.refund_us for p in parts),
        cost_micro=sum(costs) if costs else None,
        calls=session.calls,
        errors=session.errors,
        launches=session.launches,
        checkpoint_bytes=session.checkpoint_bytes,
    )


def _held_us(lease: LeaseRecord, since: int, now: int) -> int:
    if not lease.granted_at:
        return 0
    end = lease.ended_at if lease.state is LeaseState.ENDED else billed_until(lease, now)
    return max(0, end - max(lease.granted_at, since))


def _waited_us(lease: LeaseRecord, since: int, now: int) -> int:
    until = lease.granted_at or lease.ended_at or now
    return max(0, until - max(lease.joined_at, since))
