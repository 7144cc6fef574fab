"""Rows to records and back, in one place, so that the column order is written once."""

from __future__ import annotations

from functools import lru_cache

from sublet.core.journal.chain import StrandEnd
from sublet.core.leasing.lease import EndReason, Holder, LeaseRecord, LeaseState, Request, Tier
from sublet.core.leasing.tenancy import Tenant
from sublet.core.progress.effect import Effect, Head
from sublet.core.scheduling.device import Device, DeviceState, Exclusivity, Slice
from sublet.core.scheduling.spread import Spread
from sublet.core.studio.session import OfferAnswer, StudioSession
from sublet.ledger.tx import Row


def _insert(table: str, columns: str) -> str:
    return f"INSERT INTO {table} ({columns}) VALUES ({','.join('?' * len(columns.split(',')))})"


LEASE_COLUMNS = (
    "id, tenant, job, tier, exclusivity, asked_bytes, least_bytes, wants_offers, device_count, ttl_us, "
    "wait_us, "
    "only_host, hold_cap_us, host, pid, pid_started, secret_hash, state, epoch, vram_bytes, slices, "
    "joined_at, "
    "granted_at, expires_at, deadline_at, ended_at, settled_at, reason, detail, busy, active_at, "
    "committed_at, "
    "preemptions, claimed, seen_at, wait_until, offer_until, strand_seq, strand_hash, strand_anchor, "
    "spread, seats"
)
INSERT_LEASE = _insert("lease", LEASE_COLUMNS)
SELECT_LEASE = f"SELECT {LEASE_COLUMNS} FROM lease"

LEASE_BY_ID = f"{SELECT_LEASE} WHERE id = ?"

_STATES = {s.value: s for s in LeaseState}
_DEVICE_STATES = {s.value: s for s in DeviceState}
_REASONS: dict[str, EndReason | None] = {r.value: r for r in EndReason} | {"": None}


@lru_cache(maxsize=1024)
def _request(
    tenant: str,
    vram: int,
    ttl: int,
    count: int,
    least: int,
    offers: int,
    exclusivity: str,
    tier: str,
    wait: int | None,
    cap: int | None,
    only_host: str,
    job: str,
    spread: str = "no",
) -> Request:
    return Request(
        tenant=tenant,
        vram_bytes=vram,
        ttl_us=ttl,
        count=count,
        least_bytes=least,
        wants_offers=bool(offers),
        exclusivity=Exclusivity(exclusivity),
        tier=Tier(tier),
        wait_us=wait,
        hold_cap_us=cap,
        host=only_host,
        job=job,
        spread=Spread(spread),
    )


@lru_cache(maxsize=1024)
def _holder(host: str, pid: int, started: int) -> Holder:
    return Holder(host=host, pid=pid, started=started)


def slices_text(slices: tuple[Slice, ...]) -> str:
    return ";".join(f"{s.device_id}={s.vram_bytes}" for s in slices)


@lru_cache(maxsize=1024)
def slices_of(text: str) -> tuple[Slice, ...]:
    if not text:
        return ()
    pairs = (part.rpartition("=") for part in text.split(";"))
    return tuple(Slice(device, int(size)) for device, _, size in pairs)


def lease_of(r: Row) -> LeaseRecord:
    return LeaseRecord(
        id=r[0],
        request=_request(r[1], r[5], r[9], r[8], r[6], r[7], r[4], r[3], r[10], r[12], r[11], r[2], r[40]),
        holder=_holder(r[13], r[14], r[15]),
        state=_STATES[r[17]],
        epoch=r[18],
        vram_bytes=r[19],
        slices=slices_of(r[20]),
        joined_at=r[21],
        granted_at=r[22],
        expires_at=r[23],
        deadline_at=r[24],
        ended_at=r[25],
        settled_at=r[26],
        reason=_REASONS[r[27]],
        detail=r[28],
        busy=bool(r[29]),
        active_at=r[30],
        committed_at=r[31],
        preemptions=r[32],
        claimed=bool(r[33]),
        seen_at=r[34],
        wait_until=r[35],
        offer_until=r[36],
        hold_cap_us=r[12],
        seats=r[41],
    )


def secret_hash_of(r: Row) -> str:
    return str(r[16])


def strand_end_of(r: Row) -> StrandEnd:
    return StrandEnd(r[37], r[38])


def lease_values(lease: LeaseRecord, secret_hash: str, end: StrandEnd, anchor: str) -> tuple[object, ...]:
    q = lease.request
    return (
        lease.id,
        q.tenant,
        q.job,
        q.tier.value,
        q.exclusivity.value,
        q.vram_bytes,
        q.least_bytes,
        int(q.wants_offers),
        q.count,
        q.ttl_us,
        q.wait_us,
        q.host,
        lease.hold_cap_us,
        lease.holder.host,
        lease.holder.pid,
        lease.holder.started,
        secret_hash,
        lease.state.value,
        lease.epoch,
        lease.vram_bytes,
        slices_text(lease.slices),
        lease.joined_at,
        lease.granted_at,
        lease.expires_at,
        lease.deadline_at,
        lease.ended_at,
        lease.settled_at,
        lease.reason.value if lease.reason else "",
        lease.detail,
        int(lease.busy),
        lease.active_at,
        lease.committed_at,
        lease.preemptions,
        int(lease.claimed),
        lease.seen_at,
        lease.wait_until,
        lease.offer_until,
        end.seq,
        end.hash,
        anchor,
        q.spread.value,
        lease.seats,
    )


DEVICE_COLUMNS = (
    "id, host, driver, ordinal, name, capacity_bytes, free_bytes, state, leases, session_leases, "
    "device_leases, "
    "sole_tenant, note"
)
SELECT_DEVICE = f"SELECT {DEVICE_COLUMNS} FROM device"


def device_of(r: Row) -> Device:
    return Device(
        id=r[0],
        host=r[1],
        driver=r[2],
        ordinal=r[3],
        name=r[4],
        capacity_bytes=r[5],
        free_bytes=r[6],
        state=_DEVICE_STATES[r[7]],
        leases=r[8],
        session_leases=r[9],
        device_leases=r[10],
        sole_tenant=r[11],
        note=r[12],
    )


TENANT_COLUMNS = (
    "name, weight, max_leases, max_vram_bytes, max_waiting, live_leases, live_bytes, waiting, used_us, "
    "rate_ppm, "
    "as_of, cooldown_until, gpu_us_per_day, left_us, left_at, max_sessions, max_storage_bytes"
)
SELECT_TENANT = f"SELECT {TENANT_COLUMNS} FROM tenant"
TENANT_BY_NAME = f"{SELECT_TENANT} WHERE name = ?"


def tenant_of(r: Row) -> Tenant:
    return Tenant(
        name=r[0],
        weight=r[1],
        max_leases=r[2],
        max_vram_bytes=r[3],
        max_waiting=r[4],
        live_leases=r[5],
        live_bytes=r[6],
        waiting=r[7],
        used_us=r[8],
        rate_ppm=r[9],
        as_of=r[10],
        cooldown_until=r[11],
        gpu_us_per_day=r[12],
        left_us=r[13],
        left_at=r[14],
        max_sessions=r[15],
        max_storage_bytes=r[16],
    )


HEAD_COLUMNS = (
    "job, tenant, version, step, digest, cursor_text, epoch, committed_at, "
    "strand_seq, strand_hash, floor, sweeps"
)


def head_of(r: Row) -> Head:
    return Head(
        job=r[0],
        tenant=r[1],
        version=r[2],
        step=r[3],
        digest=r[4],
        cursor=r[5],
        epoch=r[6],
        committed_at=r[7],
        floor=r[10],
        sweeps=r[11],
    )


EFFECT_COLUMNS = "key, fingerprint, job, owner, epoch, completed, outcome, version"


def effect_of(r: Row) -> Effect:
    return Effect(
        key=r[0],
        fingerprint=r[1],
        job=r[2],
        owner=r[3],
        epoch=r[4],
        completed=bool(r[5]),
        outcome=r[6],
        version=r[7],
    )


SESSION_COLUMNS = (
    "id, tenant, name, host, checkpoint, warm_us, asked_bytes, least_bytes, wants_offers, device_count, "
    "ttl_us, exclusivity, "
    "tier, wait_us, hold_cap_us, only_host, job, lease_id, leases, wanted, answer, opened_at, active_at, "
    "ended_at, detail, "
    "calls, errors, launches, checkpoint_bytes, version"
)
INSERT_SESSION = _insert("studio_session", SESSION_COLUMNS)
_SESSION_WIDTH = len(SESSION_COLUMNS.split(","))


def of_table(name: str, columns: str) -> str:
    return ", ".join(f"{name}.{column.strip()}" for column in columns.split(","))


#: A session's columns, then those of its current lease, which are NULL while there is none.
SESSION_AND_LEASE = f"{of_table('s', SESSION_COLUMNS)}, {of_table('l', LEASE_COLUMNS)}"
SELECT_SESSION = f"SELECT {SESSION_AND_LEASE} FROM studio_session s LEFT JOIN lease l ON l.id = s.lease_id"

_ANSWERS = {a.value: a for a in OfferAnswer}


def session_of(r: Row) -> StudioSession:
    return StudioSession(
        id=r[0],
        tenant=r[1],
        name=r[2],
        host=r[3],
        checkpoint=r[4],
        warm_us=r[5],
        request=_request(r[1], r[6], r[10], r[9], r[7], r[8], r[11], r[12], r[13], r[14], r[15], r[16]),
        lease_id=r[17],
        leases=r[18],
        wanted=r[19],
        answer=_ANSWERS[r[20]],
        opened_at=r[21],
        active_at=r[22],
        ended_at=r[23],
        detail=r[24],
        calls=r[25],
        errors=r[26],
        launches=r[27],
        checkpoint_bytes=r[28],
        version=r[29],
    )


def session_values(s: StudioSession) -> tuple[object, ...]:
    q = s.request
    return (
        s.id,
        s.tenant,
        s.name,
        s.host,
        s.checkpoint,
        s.warm_us,
        q.vram_bytes,
        q.least_bytes,
        int(q.wants_offers),
        q.count,
        q.ttl_us,
        q.exclusivity.value,
        q.tier.value,
        q.wait_us,
        q.hold_cap_us,
        q.host,
        q.job,
        s.lease_id,
        s.leases,
        s.wanted,
        s.answer.value,
        s.opened_at,
        s.active_at,
        s.ended_at,
        s.detail,
        s.calls,
        s.errors,
        s.launches,
        s.checkpoint_bytes,
        s.version,
    )


def session_lease_of(r: Row) -> LeaseRecord | None:
    """The lease in a row of `SELECT_SESSION`."""
    return lease_of(r[_SESSION_WIDTH:]) if r[_SESSION_WIDTH] is not None else None
