"""Slices going out and coming back, with every sum that depends on them (L2, T2).

Rules of this file:
- `occupy` and `vacate` are the only writers of the slice table, of a device's sums and of a tenant's live
  numbers.
- The pool's lock is held. The table's CHECKs stand behind the arithmetic: an overcommit cannot be stored.
- `candidates` is `core.scheduling.device.fit` asked in SQL; a property test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from sublet.core.errors import InvariantBroken, NotFound
from sublet.core.leasing.lease import LeaseRecord
from sublet.core.leasing.tenancy import Tenant, rate_of, used_now
from sublet.core.scheduling.device import MANY_TENANTS, Device, Exclusivity, Shape, Slice, usable
from sublet.ledger.rows import SELECT_DEVICE, TENANT_BY_NAME, device_of, tenant_of
from sublet.ledger.tx import Tx

#: Who may join a device, by what is asked. `?` is the asking tenant where it appears.
_ACCEPTS = {
    Exclusivity.SHARED: ("device_leases = 0 AND (session_leases = 0 OR sole_tenant = ?)", True),
    Exclusivity.SESSION: ("device_leases = 0 AND (leases = 0 OR sole_tenant = ?)", True),
    Exclusivity.DEVICE: ("leases = 0", False),
}


def candidates(tx: Tx, shape: Shape) -> list[Device]:
    """At most `count` devices, those that `fit` would choose; for several devices on any host, all it would
    choose from."""
    accepts, names_tenant = _ACCEPTS[shape.exclusivity]
    params: list[object] = [shape.vram_bytes]
    if names_tenant:
        params.append(shape.tenant)
    where = f"free_bytes >= ? AND state = 'ready' AND {accepts}"
    if shape.host:
        where = f"host = ? AND {where}"
        params.insert(0, shape.host)
    ordered = f"{SELECT_DEVICE} WHERE {where} ORDER BY free_bytes, id"
    if shape.count > 1 and not shape.host:
        return [device_of(r) for r in tx.rows(ordered, *params)]
    return [device_of(r) for r in tx.rows(f"{ordered} LIMIT ?", *params, shape.count)]


def still_fits(tx: Tx, shape: Shape, slices: tuple[Slice, ...]) -> bool:
    """Whether a decision made on an earlier read still fits, asked before it is written."""
    for s in slices:
        row = tx.row(f"{SELECT_DEVICE} WHERE id = ?", s.device_id)
        if row is None or not usable(device_of(row), shape):
            return False
    return True


def load_tenant(tx: Tx, name: str) -> Tenant | None:
    row = tx.row(TENANT_BY_NAME, name)
    return tenant_of(row) if row else None


def unknown_tenant(name: str) -> NotFound:
    return NotFound(f"tenant {name} is unknown", remedy=f"sublet tenant add {name}")


def shift_tenant(
    tx: Tx,
    name: str,
    *,
    leases: int = 0,
    live_bytes: int = 0,
    rate_ppm: int = 0,
    waiting: int = 0,
    known: Tenant | None = None,
) -> None:
    """Bring the tenant's use forward to now, then change its rate and live numbers."""
    tenant = known or load_tenant(tx, name)
    if tenant is None:
        raise InvariantBroken(f"tenant {name} of a live lease does not exist")
    used = used_now(tenant, tx.now, tx.pool.policy.half_life_us)
    tx.run(
        "UPDATE tenant SET live_leases = live_leases + ?, live_bytes = live_bytes + ?, rate_ppm = rate_ppm "
        "+ ?, "
        "waiting = waiting + ?, used_us = ?, as_of = ? WHERE name = ?",
        leases,
        live_bytes,
        rate_ppm,
        waiting,
        used,
        tx.now,
        name,
    )


def occupy(
    tx: Tx,
    lease: LeaseRecord,
    slices: tuple[Slice, ...],
    *,
    billed: bool,
    left_waitlist: bool = False,
    tenant: Tenant | None = None,
    devices: Sequence[Device] = (),
) -> None:
    """`tenant` and `devices` are what this transaction has already read."""
    read = {d.id: (d.capacity_bytes, d.sole_tenant) for d in devices}
    request = lease.request
    total_rate = 0
    for s in slices:
        row = read.get(s.device_id) or tx.row(
            "SELECT capacity_bytes, sole_tenant FROM device WHERE id = ?", s.device_id
        )
        if row is None:
            raise InvariantBroken(f"device {s.device_id} was granted but does not exist")
        capacity, sole = row[0], row[1]
        rate = rate_of(request.exclusivity, s.vram_bytes, capacity) if billed else 0
        total_rate += rate
        tx.run(
            "UPDATE device SET free_bytes = free_bytes - ?, leases = leases + 1, session_leases = "
            "session_leases + ?, "
            "device_leases = device_leases + ?, sole_tenant = ? WHERE id = ?",
            s.vram_bytes,
            int(request.exclusivity is Exclusivity.SESSION),
            int(request.exclusivity is Exclusivity.DEVICE),
            request.tenant if sole in ("", request.tenant) else MANY_TENANTS,
            s.device_id,
        )
        tx.run(
            "INSERT INTO slice (device_id, lease_id, tenant, exclusivity, vram_bytes, rate_ppm) VALUES "
            "(?,?,?,?,?,?)",
            s.device_id,
            lease.id,
            request.tenant,
            request.exclusivity.value,
            s.vram_bytes,
            rate,
        )
    shift_tenant(
        tx,
        request.tenant,
        leases=1,
        live_bytes=sum(s.vram_bytes for s in slices),
        rate_ppm=total_rate,
        waiting=-1 if left_waitlist else 0,
        known=tenant,
    )


def vacate(
    tx: Tx,
    lease: LeaseRecord,
    part: Sequence[Slice] | None = None,
    *,
    last: bool = True,
    left_waitlist: bool = False,
) -> None:
    """Free all slices of a lease, or those of one seat: until the last it still counts as a lease of its
    tenant."""
    request = lease.request
    held = [
        row
        for s in (lease.slices if part is None else part)
        for row in tx.rows(
            "DELETE FROM slice WHERE device_id = ? AND lease_id = ? RETURNING device_id, vram_bytes, "
            "rate_ppm",
            s.device_id,
            lease.id,
        )
    ]
    for device_id, vram_bytes, _ in held:
        row = tx.row("SELECT leases, sole_tenant FROM device WHERE id = ?", device_id)
        if row is None:
            raise InvariantBroken(f"device {device_id} of lease {lease.id} does not exist")
        left, sole = row[0] - 1, row[1]
        if left == 0:
            sole = ""
        elif sole == MANY_TENANTS:
            tenants = tx.rows("SELECT DISTINCT tenant FROM slice WHERE device_id = ? LIMIT 2", device_id)
            sole = tenants[0][0] if len(tenants) == 1 else MANY_TENANTS
        tx.run(
            "UPDATE device SET free_bytes = free_bytes + ?, leases = leases - 1, "
            "session_leases = session_leases - ?, device_leases = device_leases - ?, sole_tenant = ? WHERE "
            "id = ?",
            vram_bytes,
            int(request.exclusivity is Exclusivity.SESSION),
            int(request.exclusivity is Exclusivity.DEVICE),
            sole,
            device_id,
        )
    if held or left_waitlist:
        shift_tenant(
            tx,
            request.tenant,
            leases=-1 if held and last else 0,
            live_bytes=-sum(r[1] for r in held),
            rate_ppm=-sum(r[2] for r in held),
            waiting=-1 if left_waitlist else 0,
        )
