"""The noisy-neighbour view, for `/v1/neighbours` and `sublet report --neighbours`."""

from __future__ import annotations

from sublet.core.billing.neighbours import Neighbour, neighbour_lease_of, neighbours
from sublet.core.leasing.tenancy import PPM
from sublet.core.values import DAY_US, SECOND_US
from sublet.ports.ledger import Ledger


def find(ledger: Ledger, *, days: float = 7) -> list[Neighbour]:
    """The tenants, those that caused most waiting first, with the calls and launches of sessions open in that
    time."""
    since = max(0, ledger.now() - round(days * DAY_US))
    found = ledger.lease_history(since=since)
    capacities = {device.id: device.capacity_bytes for device in ledger.devices()}
    weights = {tenant.name: tenant.weight for tenant in ledger.tenants()}
    work = {done.tenant: done for done in found.work}
    stays = [neighbour_lease_of(lease, capacities, found.at) for lease in found.leases]
    return neighbours(stays, weights, work, since=since, now=found.at)


def view(ledger: Ledger, *, days: float = 7) -> list[dict[str, object]]:
    """The tenants as JSON, with times in seconds and shares from 0 to 1."""
    return [as_json(row) for row in find(ledger, days=days)]


def as_json(row: Neighbour) -> dict[str, object]:
    return {
        "tenant": row.tenant,
        "weight": row.weight,
        "leases": row.leases,
        "gpu_seconds": row.device_us / SECOND_US,
        "held_share": row.held_ppm / PPM,
        "fair_share": row.fair_ppm / PPM,
        "waited_seconds": row.waited_us / SECOND_US,
        "caused_wait_seconds": row.caused_us / SECOND_US,
        "calls": row.calls,
        "errors": row.errors,
        "error_rate": row.errors / row.calls if row.calls else None,
        "launches": row.launches,
        "noisy": row.noisy,
        "reason": row.reason,
    }
