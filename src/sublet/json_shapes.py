"""Records as JSON: one shape for `--json` and for the studio's HTTP, described in docs/reference/json.md.

Rules of this file:
- An instant (`..._at`, `at`) is seconds since 1970, a length of time (`..._seconds`) seconds, a size
  (`..._bytes`) bytes, money decimal text. What is not known, or did not happen, is null.
- What belongs to another tenant is not in a shape made for a user: not its name, not its sentence.
  `operator=True` adds what only operators may see; the command line reads the ledger itself, so whoever uses
  it is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sublet.core.billing.allowance import Allowance
from sublet.core.billing.goodput import MICRO
from sublet.core.billing.price import class_of
from sublet.core.leasing.lease import LeaseRecord, LeaseState
from sublet.core.leasing.tenancy import Tenant
from sublet.core.progress.effect import Head
from sublet.core.queues.items import ItemState, QueueTerms, from_text
from sublet.core.scheduling.device import Device
from sublet.core.studio.isolation import HostIsolation
from sublet.core.studio.session import SessionStatus
from sublet.core.studio.session_usage import SessionUsage
from sublet.ports.items import ConsumerRecord, ItemRecord, QueueRecord, QueueStats
from sublet.ports.ledger import Answer, SessionAnswer, TeardownRecord

Shape = dict[str, Any]

_HAS_WHY = (SessionStatus.SUSPENDED, SessionStatus.REVOKING, SessionStatus.ENDED)
_STATUS_NUMBER = {status: number for number, status in enumerate(SessionStatus)}


def seconds(us: int) -> float:
    return us / 1e6


def at_or_none(us: int) -> float | None:
    return us / 1e6 if us else None


def money(micro: int | None) -> str | None:
    """Decimal text, in the currency of the price list; None where nothing has a price."""
    if micro is None:
        return None
    whole, rest = divmod(abs(micro), MICRO)
    return f"{'-' if micro < 0 else ''}{whole}.{rest:06d}"


def left_seconds(lease: LeaseRecord, at: int) -> float | None:
    if lease.state in (LeaseState.ACTIVE, LeaseState.REVOKING):
        return max(0, lease.ends_at - at) / 1e6
    return None


def seen_version(answer: SessionAnswer) -> int:
    """Differs whenever what the session is differs: its own row's version, and what its lease makes of it."""
    return answer.session.version * 16 + _STATUS_NUMBER[answer.status]


def isolation_json(isolation: HostIsolation) -> Shape:
    return {
        "mode": isolation.mode.value,
        "separates": None if isolation.elsewhere else isolation.separates,
        "in_force": list(isolation.words),
        "missing": [boundary.name for boundary in isolation.missing],
    }


def session_json(
    answer: SessionAnswer,
    usage: Shape | None = None,
    offer: Shape | None = None,
    isolation: Shape | None = None,
) -> Shape:
    session, lease, wait = answer.session, answer.lease, answer.wait
    request = session.request
    status = answer.status
    reason, detail = answer.why if status in _HAS_WHY else ("", "")
    if status is SessionStatus.WAITING and not detail:
        detail = wait.reason if wait is not None else lease.detail if lease is not None else ""
    holds = lease is not None and status in (SessionStatus.ACTIVE, SessionStatus.REVOKING)
    return {
        "id": session.id,
        "name": session.name,
        "tenant": session.tenant,
        "status": status.value,
        "reason": reason,
        "detail": detail,
        "vram_bytes": request.vram_bytes,
        "granted_bytes": lease.vram_bytes if lease is not None and holds else 0,
        "count": request.count,
        "tier": request.tier.value,
        "exclusivity": request.exclusivity.value,
        "ttl_seconds": request.ttl_us / 1e6,
        "warm_seconds": session.warm_us / 1e6,
        "checkpoint": session.checkpoint,
        "lease_id": session.lease_id,
        "epoch": lease.epoch if lease is not None else 0,
        "devices": [s.device_id for s in lease.slices] if lease is not None and holds else [],
        "host": session.host,
        "opened_at": session.opened_at / 1e6,
        "active_at": session.active_at / 1e6,
        "ended_at": at_or_none(session.ended_at),
        "granted_at": at_or_none(lease.granted_at) if lease is not None and holds else None,
        "expires_at": at_or_none(lease.ends_at) if lease is not None and holds else None,
        "seconds_left": left_seconds(lease, answer.at) if lease is not None and holds else None,
        "wait": None
        if wait is None
        else {
            "position": wait.position,
            "eta_seconds": None if wait.eta_us is None else wait.eta_us / 1e6,
            "reason": wait.reason,
        },
        "offer": offer,
        "isolation": isolation,
        "usage": usage,
        "version": seen_version(answer),
        "at": answer.at / 1e6,
    }


def lease_json(answer: Answer, *, operator: bool = False) -> Shape:
    lease, wait = answer.lease, answer.wait
    shape: Shape = {
        "id": lease.id,
        "state": lease.state.value,
        "reason": lease.reason.value if lease.reason else None,
        "detail": wait.reason if wait is not None else lease.detail,
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
        "busy": lease.busy,
        "ttl_seconds": seconds(lease.request.ttl_us),
        "joined_at": at_or_none(lease.joined_at),
        "granted_at": at_or_none(lease.granted_at),
        "expires_at": at_or_none(lease.expires_at),
        "ends_at": at_or_none(lease.ends_at),
        "ended_at": at_or_none(lease.ended_at),
        "settled_at": at_or_none(lease.settled_at),
        "seconds_left": left_seconds(lease, answer.at),
        "position": wait.position if wait else None,
        "eta_seconds": None if wait is None or wait.eta_us is None else seconds(wait.eta_us),
        "at": seconds(answer.at),
    }
    return shape | {"pid": lease.holder.pid} if operator else shape


def waiting_json(answer: Answer) -> Shape:
    lease, wait = answer.lease, answer.wait
    return {
        "lease_id": lease.id,
        "tenant": lease.tenant,
        "tier": lease.request.tier.value,
        "vram_bytes": lease.request.vram_bytes,
        "count": lease.request.count,
        "job": lease.request.job,
        "position": wait.position if wait else None,
        "eta_seconds": None if wait is None or wait.eta_us is None else seconds(wait.eta_us),
        "reason": wait.reason if wait else lease.detail,
        "joined_at": seconds(lease.joined_at),
    }


def bars_json(lease: LeaseRecord, since: int) -> list[Shape]:
    """A lease as it stood on each of its devices."""
    over = lease.state is LeaseState.ENDED
    return [
        {
            "lease_id": lease.id,
            "tenant": lease.tenant,
            "device": s.device_id,
            "from": seconds(max(lease.granted_at, since)),
            "to": seconds(lease.ended_at) if over else None,
            "tier": lease.request.tier.value,
            "state": lease.state.value,
            "reason": lease.reason.value if lease.reason else "",
            "detail": lease.detail,
            "vram_bytes": s.vram_bytes,
        }
        for s in lease.slices
    ]


def devices_json(devices: Iterable[Device], live: Iterable[LeaseRecord], *, operator: bool) -> list[Shape]:
    on: dict[str, list[LeaseRecord]] = {}
    for lease in live:
        for s in lease.slices:
            on.setdefault(s.device_id, []).append(lease)
    return [device_json(d, on.get(d.id, []), operator=operator) for d in devices]


def device_json(device: Device, on_it: list[LeaseRecord], *, operator: bool) -> Shape:
    """`on_it` are those of its leases that whoever asks may see."""
    leases = [
        {
            "id": lease.id,
            "tenant": lease.tenant,
            "tier": lease.request.tier.value,
            "state": lease.state.value,
            "vram_bytes": next(s.vram_bytes for s in lease.slices if s.device_id == device.id),
        }
        for lease in on_it
    ]
    shape: Shape = {
        "id": device.id,
        "class": class_of(device),
        "name": device.name,
        "driver": device.driver,
        "capacity_bytes": device.capacity_bytes,
        "free_bytes": device.free_bytes,
        "state": device.state.value,
        "leases": leases,
    }
    if operator:
        shape |= {
            "host": device.host,
            "ordinal": device.ordinal,
            "note": device.note,
            "lease_count": device.leases,
        }
    return shape


def tenant_json(
    tenant: Tenant,
    used_us: int,
    time: Allowance | None,
    *,
    sessions: int | None = None,
    stored_bytes: int | None = None,
) -> Shape:
    """`sessions` and `stored_bytes` are null where they were not counted."""
    return {
        "name": tenant.name,
        "weight": tenant.weight,
        "quotas": {
            "weight": tenant.weight,
            "max_leases": tenant.max_leases,
            "max_vram_bytes": tenant.max_vram_bytes,
            "max_waiting": tenant.max_waiting,
            "max_sessions": tenant.max_sessions,
            "max_storage_bytes": tenant.max_storage_bytes,
            "gpu_seconds_per_day": seconds(tenant.gpu_us_per_day),
        },
        "live": tenant.live_leases,
        "live_bytes": tenant.live_bytes,
        "waiting": tenant.waiting,
        "sessions": sessions,
        "stored_bytes": stored_bytes,
        "recent_gpu_seconds": seconds(used_us),
        "cooldown_until": at_or_none(tenant.cooldown_until),
        "allowance": None
        if time is None or not time.per_day_us
        else {
            "per_day_seconds": seconds(time.per_day_us),
            "left_seconds": seconds(max(0, time.left_us)),
            "paid_ahead_seconds": seconds(time.ahead_us),
            "full_at": seconds(time.full_at),
        },
    }


def receipt_json(torn: TeardownRecord, *, operator: bool) -> Shape:
    receipt = torn.receipt
    shape: Shape = {
        "lease_id": torn.lease_id,
        "tenant": torn.tenant,
        "settled_at": seconds(torn.at),
        "devices": list(torn.devices),
        "proven": receipt.proven,
        "ladder": receipt.ladder,
        "containment": receipt.containment,
        "freed_bytes": receipt.freed_bytes,
        "scrubbed_bytes": receipt.scrubbed_bytes,
        "duration_seconds": seconds(receipt.duration_us),
        "detail": receipt.detail,
    }
    return shape | {"host": torn.host, "pids": list(receipt.pids)} if operator else shape


def job_json(head: Head, goodput: float | None) -> Shape:
    return {
        "job": head.job,
        "tenant": head.tenant,
        "goodput": goodput,
        "step": head.step,
        "version": head.version,
        "committed_at": at_or_none(head.committed_at),
    }


def queue_json(queue: QueueRecord, stats: QueueStats) -> Shape:
    return {
        "name": queue.name,
        "tenant": queue.tenant,
        "paused": queue.paused,
        **{state.value: getattr(stats, state.value) for state in ItemState},
        "depth": stats.depth,
        "rate": round(stats.rate, 3),
        "eta_seconds": None if stats.eta_us is None else seconds(stats.eta_us),
        "oldest_at": at_or_none(stats.oldest_at),
        "published": stats.published,
        "completed": stats.completed,
        "failed": stats.failed,
        "stale": stats.stale,
        "purged": stats.purged,
        "work_seconds": seconds(stats.work_us),
        "workers": stats.workers,
        "at": seconds(stats.at),
    }


def queue_terms_json(terms: QueueTerms) -> Shape:
    return {
        "visibility_seconds": seconds(terms.visibility_us),
        "tries": terms.tries,
        "losses": terms.losses,
        "backoff_seconds": seconds(terms.backoff_us),
        "concurrency": terms.concurrency,
    }


def consumer_json(consumer: ConsumerRecord, items: int) -> Shape:
    """`items` is how many it has now."""
    return {
        "consumer": consumer.id,
        "host": consumer.host,
        "pid": consumer.pid,
        "items": items,
        "opened_at": at_or_none(consumer.opened_at),
        "completed": consumer.completed,
        "failed": consumer.failed,
        "stale": consumer.stale,
        "work_seconds": seconds(consumer.work_us),
    }


def item_json(item: ItemRecord) -> Shape:
    return {
        "id": item.id,
        "key": item.key,
        "state": item.state.value,
        "priority": item.priority,
        "visible_at": at_or_none(item.visible_at),
        "delivery": item.delivery,
        "failures": item.failures,
        "losses": item.losses,
        "consumer": item.owner or None,
        "published_at": at_or_none(item.published_at),
        "done_at": at_or_none(item.done_at),
        "work_seconds": seconds(item.work_us),
        "body": from_text(item.body),
        "result": from_text(item.result) if item.result else None,
        "error": item.error,
    }


def usage_json(used: SessionUsage) -> Shape:
    return {
        "gpu_seconds": used.gpu_us / 1e6,
        "vram_gb_seconds": used.vram_byte_s / 1e9,
        "cost": money(used.cost_micro),
        "wait_seconds": used.wait_us / 1e6,
        "refund_seconds": used.refund_us / 1e6,
        "launches": used.launches,
        "errors": used.errors,
        "calls": used.calls,
        "checkpoint_bytes": used.checkpoint_bytes,
        "leases": used.leases,
    }
