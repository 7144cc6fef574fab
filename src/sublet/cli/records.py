"""Leases as the command line shows them, in words."""

from __future__ import annotations

from sublet.core.leasing.lease import EndReason, LeaseRecord, LeaseState
from sublet.core.values import format_duration
from sublet.ports.ledger import Answer, Ledger

_ENDED = {
    EndReason.RELEASED: "CD",
    EndReason.EXPIRED: "TO",
    EndReason.PREEMPTED: "PR",
    EndReason.REVOKED: "CA",
    EndReason.HOLD_CAP: "PR",
    EndReason.IDLE: "PR",
    EndReason.QUOTA: "PR",
    EndReason.DEVICE_LOST: "NF",
    EndReason.HOLDER_LOST: "NF",
    EndReason.REFUSED: "F",
}


def short_state(answer: Answer) -> str:
    """Slurm's letters: R runs, PD waits, CG is leaving, CD TO CA PR NF F are ends."""
    lease = answer.lease
    if lease.state is LeaseState.WAITING:
        return "PD"
    if lease.state is LeaseState.ACTIVE:
        return "R"
    if lease.state is LeaseState.REVOKING or not lease.settled_at:
        return "CG"
    return _ENDED[lease.reason] if lease.reason else "CD"


def reason_of(answer: Answer) -> str:
    lease, wait = answer.lease, answer.wait
    if lease.state is LeaseState.WAITING:
        if lease.slices:
            return f"offer: {lease.detail}"
        place = f"#{wait.position} " if wait else ""
        eta = f", about {format_duration(wait.eta_us)}" if wait and wait.eta_us is not None else ""
        return f"{place}{wait.reason if wait else lease.detail}{eta}"
    if lease.state is LeaseState.REVOKING:
        left = format_duration(max(0, lease.deadline_at - answer.at))
        return f"{lease.reason.value if lease.reason else 'revoked'} in {left}: {lease.detail}"
    if lease.state is LeaseState.ENDED:
        return f"{lease.reason.value if lease.reason else 'ended'}: {lease.detail}"
    if not lease.busy:
        return f"idle for {format_duration(answer.at - lease.active_at)}"
    return lease.detail


def running_us(answer: Answer) -> int:
    lease = answer.lease
    if lease.state is LeaseState.WAITING:
        return answer.at - lease.joined_at
    end = lease.ended_at if lease.state is LeaseState.ENDED else answer.at
    return max(0, end - (lease.granted_at or lease.joined_at))


def left_us(answer: Answer) -> int | None:
    lease = answer.lease
    if lease.state in (LeaseState.ACTIVE, LeaseState.REVOKING):
        return max(0, lease.ends_at - answer.at)
    return None


def live_leases(ledger: Ledger) -> list[LeaseRecord]:
    """Every lease that holds or waits for something, for the list of what is on a device."""
    return [answer.lease for answer in ledger.leases(live_only=True, limit=1_000_000)]
