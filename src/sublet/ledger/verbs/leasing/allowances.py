"""Paying for GPU time by the day, as leases are granted, renewed and ended (T2).

Rules of this file:
- The only writer of a tenant's `left_us` and `left_at`; what to write is `core.billing.allowance`'s.
- Called in the transaction that grants, renews or ends, under the pool's lock. A tenant without such a quota
  costs at most one read.
"""

from __future__ import annotations

from dataclasses import dataclass

from sublet.core.billing import allowance
from sublet.core.billing.allowance import Allowance
from sublet.core.leasing.lease import HOLDING, LeaseRecord, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.scheduling.device import Slice
from sublet.ledger.rows import LEASE_BY_ID, SELECT_DEVICE, device_of, lease_of
from sublet.ledger.tx import Tx
from sublet.ledger.verbs.leasing.slices import load_tenant


def pay_grant(
    tx: Tx, request: Request, slices: tuple[Slice, ...], span_us: int, tenant: Tenant | None
) -> int:
    """Pay for a grant. Returns how much of the span is paid. `tenant` is what was read of it already."""
    tenant = tenant or load_tenant(tx, request.tenant)
    if tenant is None or not tenant.gpu_us_per_day:
        return span_us
    capacities = {
        s.device_id: row[0]
        for s in slices
        if (row := tx.row("SELECT capacity_bytes FROM device WHERE id = ?", s.device_id)) is not None
    }
    rate = allowance.rate_on(request.exclusivity, slices, capacities)
    most = allowance.payable_us(tenant, rate, tx.now)
    assert most is not None
    span_us = min(span_us, most)
    _write(tx, allowance.paid(tenant, rate, span_us, tx.now))
    return span_us


@dataclass(frozen=True, slots=True)
class RenewalBudget:
    """What a lease is renewed from, read once."""

    tenant: Tenant
    rate_ppm: int

    def payable_us(self, now: int) -> int | None:
        return allowance.payable_us(self.tenant, self.rate_ppm, now)


def renewal_budget(tx: Tx, lease: LeaseRecord) -> RenewalBudget | None:
    """None: its tenant has no such quota."""
    tenant = _paying(tx, lease.tenant)
    return RenewalBudget(tenant, _rate(tx, lease)) if tenant is not None else None


def pay_renewal(tx: Tx, renewal_budget: RenewalBudget, more_us: int) -> None:
    _write(tx, allowance.paid(renewal_budget.tenant, renewal_budget.rate_ppm, more_us, tx.now))


def settle(tx: Tx, lease: LeaseRecord, ended_at: int) -> None:
    """Give back what the ended lease did not use. Called while its slices are still there."""
    tenant = _paying(tx, lease.tenant)
    if tenant is not None:
        _write(tx, allowance.settled(tenant, _rate(tx, lease), lease.expires_at - ended_at, tx.now))


def used_up(tx: Tx, request: Request) -> str:
    tenant = load_tenant(tx, request.tenant)
    if tenant is None or not tenant.gpu_us_per_day:
        return ""
    devices = [device_of(r) for r in tx.rows(SELECT_DEVICE)]
    return allowance.used_up(tenant, request, allowance.least_rate(request, devices), tx.now)


def change(tx: Tx, tenant: Tenant, per_day_us: int) -> None:
    # Locked: where renewing takes no lock of the pool, none may slip through between counting and the new
    # quota.
    ahead = _paid_ahead(tx, tenant.name, locked=True)
    _write(tx, allowance.changed_quota(tenant, per_day_us, ahead, tx.now))


def look(tx: Tx, tenant: Tenant) -> Allowance:
    ahead = _paid_ahead(tx, tenant.name, locked=False) if tenant.gpu_us_per_day else 0
    return allowance.allowance(tenant, ahead, tx.now)


def _paid_ahead(tx: Tx, tenant: str, *, locked: bool) -> int:
    """What live leases have paid for and not used yet."""
    total = 0
    for (lease_id,) in tx.rows(
        "SELECT id FROM lease WHERE settled_at = 0 AND tenant = ? ORDER BY id", tenant
    ):
        row = tx.locked(LEASE_BY_ID, lease_id) if locked else tx.row(LEASE_BY_ID, lease_id)
        lease = lease_of(row) if row is not None else None
        if lease is not None and lease.state in HOLDING:
            total += allowance.cost(_rate(tx, lease), max(0, lease.expires_at - tx.now))
    return total


def _paying(tx: Tx, name: str) -> Tenant | None:
    """The tenant, if it has such a quota. Most have none, and renewing must stay cheap: one number is read to
    know it."""
    row = tx.row("SELECT gpu_us_per_day FROM tenant WHERE name = ?", name)
    return load_tenant(tx, name) if row is not None and row[0] else None


def _rate(tx: Tx, lease: LeaseRecord) -> int:
    """The lease's rate, as written when it was granted."""
    found = (
        tx.row("SELECT rate_ppm FROM slice WHERE device_id = ? AND lease_id = ?", s.device_id, lease.id)
        for s in lease.slices
    )
    return sum(int(row[0]) for row in found if row is not None)


def _write(tx: Tx, tenant: Tenant) -> None:
    tx.run(
        "UPDATE tenant SET gpu_us_per_day = ?, left_us = ?, left_at = ? WHERE name = ?",
        tenant.gpu_us_per_day,
        tenant.left_us,
        tenant.left_at,
        tenant.name,
    )
