"""Records for the tests of `core`, short to write and always consistent with each other.

`view_of` recomputes every sum (device rows, tenant rows) from the leases, so a test can only build a state that
the ledger could have written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from sublet.core.leasing.lease import Holder, LeaseRecord, LeaseState, Request, Tier
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.tenancy import Tenant
from sublet.core.scheduling.admission import PoolView
from sublet.core.scheduling.device import Device, DeviceState, Exclusivity, Resident, Slice, may_join, occupy
from sublet.core.values import MINUTE_US, SECOND_US

GB = 1_000_000_000
S = SECOND_US
M = MINUTE_US
#: A "now" far from zero, so that an instant and a duration cannot be mixed up unseen.
NOW = 1_700_000_000 * S

SHARED, SESSION, DEVICE = Exclusivity.SHARED, Exclusivity.SESSION, Exclusivity.DEVICE
INTERACTIVE, BATCH, SPOT = Tier.INTERACTIVE, Tier.BATCH, Tier.SPOT


def device(
    name: str = "d0", gb: int = 80, *, host: str = "h", state: DeviceState = DeviceState.READY
) -> Device:
    return Device(
        id=name,
        host=host,
        driver="host",
        ordinal=0,
        name=name,
        capacity_bytes=gb * GB,
        free_bytes=gb * GB,
        state=state,
    )


def request(tenant: str = "ann", gb: int = 8, **fields: object) -> Request:
    fields.setdefault("ttl_us", 5 * M)
    return Request(tenant=tenant, vram_bytes=gb * GB, **fields)  # type: ignore[arg-type]


LEASE_FIELDS = {f for f in LeaseRecord.__dataclass_fields__ if f not in ("id", "request", "holder", "state")}


def _split(fields: dict[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """`hold_cap_us` is in both records; here it means the lease's, which is what the rules read."""
    mine = {k: v for k, v in fields.items() if k in LEASE_FIELDS}
    return mine, {k: v for k, v in fields.items() if k not in LEASE_FIELDS}


def waiter(name: str, tenant: str = "ann", gb: int = 8, **fields: object) -> LeaseRecord:
    """Joined just now and seen just now, unless said otherwise."""
    mine, asked = _split(fields)
    mine.setdefault("joined_at", NOW)
    mine.setdefault("seen_at", NOW)
    return LeaseRecord(
        id=name,
        request=request(tenant, gb, **asked),
        holder=Holder(host="h"),
        state=LeaseState.WAITING,
        **mine,  # type: ignore[arg-type]
    )


def active(
    name: str, on: str | Sequence[str] = "d0", tenant: str = "bob", gb: int = 8, **fields: object
) -> LeaseRecord:
    """Granted a second ago, busy, far from its expiry, unless said otherwise."""
    names = [on] if isinstance(on, str) else list(on)
    mine, asked = _split(fields)
    defaults: dict[str, object] = {
        "epoch": 1,
        "granted_at": NOW - S,
        "joined_at": NOW - S,
        "expires_at": NOW + 5 * M,
        "active_at": NOW,
        "busy": True,
    }
    return LeaseRecord(
        id=name,
        request=request(tenant, gb, count=len(names), **asked),
        holder=Holder(host="h", pid=7),
        state=LeaseState.ACTIVE,
        vram_bytes=gb * GB,
        slices=tuple(Slice(n, gb * GB) for n in names),
        **(defaults | mine),  # type: ignore[arg-type]
    )


def residents_of(leases: Iterable[LeaseRecord], device_id: str) -> list[Resident]:
    return [
        Resident(x.tenant, x.request.exclusivity, s.vram_bytes)
        for x in leases
        if x.holds_slices
        for s in x.slices
        if s.device_id == device_id
    ]


def view_of(
    devices: Iterable[Device],
    leases: Iterable[LeaseRecord] = (),
    waiters: Iterable[LeaseRecord] = (),
    tenants: Mapping[str, Tenant] | Iterable[Tenant] = (),
    policy: Policy | None = None,
) -> PoolView:
    leases, waiters = tuple(leases), tuple(waiters)
    # A waiter with a held offer owns slices, so it is in both tuples, as the ledger loads it.
    known = {x.id for x in leases}
    leases += tuple(w for w in waiters if w.slices and w.id not in known)
    rows = dict(tenants) if isinstance(tenants, Mapping) else {t.name: t for t in tenants}
    for name in sorted({x.tenant for x in (*leases, *waiters)} - rows.keys()):
        rows[name] = Tenant(name=name)
    for name, row in rows.items():
        mine = [x for x in leases if x.tenant == name and x.holds_slices]
        rows[name] = replace(
            row,
            live_leases=len(mine),
            live_bytes=sum(s.vram_bytes for x in mine for s in x.slices),
            waiting=sum(w.tenant == name for w in waiters),
        )
    return PoolView(
        devices=tuple(occupy(d, residents_of(leases, d.id)) for d in devices),
        leases=leases,
        waiters=waiters,
        tenants=rows,
        policy=policy or Policy(),
    )


def assert_exclusion(devices: Iterable[Device], leases: Sequence[LeaseRecord]) -> None:
    """L2, from first principles: sums within capacity, and every pair of residents may sit together."""
    for d in devices:
        residents = residents_of(leases, d.id)
        used = sum(r.vram_bytes for r in residents)
        assert used <= d.capacity_bytes, f"L2: {d.id} holds {used} of {d.capacity_bytes}"
        for a, b in combinations(residents, 2):
            assert may_join(a.exclusivity, b.exclusivity, same_tenant=a.tenant == b.tenant), (
                f"L2: {a} sits beside {b} on {d.id}"
            )
