"""Records as the command line shows them, in words and as JSON."""

from __future__ import annotations

from dataclasses import asdict

from sublet.core.allowance import Allowance
from sublet.core.device import Device
from sublet.core.lease import EndReason, LeaseState
from sublet.core.tenancy import Tenant
from sublet.core.values import format_duration
from sublet.ports.ledger import Answer, Teardown

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


def lease_json(answer: Answer) -> dict[str, object]:
    lease, wait = answer.lease, answer.wait
    return {
        "id": lease.id,
        "state": lease.state.value,
        "reason": lease.reason.value if lease.reason else None,
        "detail": reason_of(answer),
        "tenant": lease.tenant,
        "job": lease.request.job,
        "tier": lease.request.tier.value,
        "exclusivity": lease.request.exclusivity.value,
        "asked_bytes": lease.request.vram_bytes,
        "vram_bytes": lease.vram_bytes,
        "count": lease.request.count,
        "devices": [s.device_id for s in lease.slices],
        "epoch": lease.epoch,
        "host": lease.holder.host,
        "pid": lease.holder.pid,
        "busy": lease.busy,
        "ttl_us": lease.request.ttl_us,
        "joined_at": lease.joined_at,
        "granted_at": lease.granted_at,
        "expires_at": lease.expires_at,
        "ends_at": lease.ends_at,
        "ended_at": lease.ended_at,
        "settled_at": lease.settled_at,
        "position": wait.position if wait else None,
        "eta_us": wait.eta_us if wait else None,
        "at": answer.at,
    }


def device_json(device: Device) -> dict[str, object]:
    return {
        "id": device.id,
        "host": device.host,
        "driver": device.driver,
        "ordinal": device.ordinal,
        "name": device.name,
        "capacity_bytes": device.capacity_bytes,
        "free_bytes": device.free_bytes,
        "state": device.state.value,
        "leases": device.leases,
        "note": device.note,
    }


def receipt_json(torn: Teardown) -> dict[str, object]:
    return {
        "lease": torn.lease_id,
        "tenant": torn.tenant,
        "settled_at": torn.at,
        "devices": list(torn.devices),
        "host": torn.host,
        **asdict(torn.receipt),
    }


def tenant_json(
    tenant: Tenant, used_us: int, time: Allowance, sessions: int, stored_bytes: int
) -> dict[str, object]:
    return {
        "name": tenant.name,
        "weight": tenant.weight,
        "max_leases": tenant.max_leases,
        "max_vram_bytes": tenant.max_vram_bytes,
        "max_waiting": tenant.max_waiting,
        "max_sessions": tenant.max_sessions,
        "max_storage_bytes": tenant.max_storage_bytes,
        "sessions": sessions,
        "stored_bytes": stored_bytes,
        "live_leases": tenant.live_leases,
        "live_bytes": tenant.live_bytes,
        "waiting": tenant.waiting,
        "recent_gpu_us": used_us,
        "gpu_us_per_day": tenant.gpu_us_per_day,
        "gpu_us_left": time.left_us if tenant.gpu_us_per_day else None,
        "gpu_us_paid_ahead": time.ahead_us if tenant.gpu_us_per_day else None,
        "full_at": time.full_at if tenant.gpu_us_per_day else None,
    }
