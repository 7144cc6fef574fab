"""A pool that is full: `n` devices, a lease on each, some idle, some of lower tiers, and a few who wait. For counting what a decision costs."""

from __future__ import annotations

from dataclasses import replace

from sublet.core.leasing.lease import Holder, LeaseRecord, LeaseState, Request, Tier
from sublet.core.leasing.tenancy import PPM, Tenant
from sublet.core.scheduling.admission import PoolIndex
from sublet.core.scheduling.device import Device, Exclusivity, Resident, Slice, join
from sublet.core.values import DAY_US, MINUTE_US, SECOND_US

NOW = 1_700_000_000 * SECOND_US
GIB = 1 << 30
CAPACITY = 80 * GIB
HOLDER = Holder(host="h0", pid=1)


def name_of(number: int) -> str:
    return f"t{number:06d}"


def tenants(count: int) -> dict[str, Tenant]:
    """Each has used something, and a different amount."""
    return {
        name_of(i): Tenant(
            name=name_of(i),
            used_us=(i * 7_919 % 86_400 + 1) * SECOND_US,
            rate_ppm=PPM if i % 3 == 0 else 0,
            as_of=NOW - (i % 1_000) * MINUTE_US,
            live_leases=1,
        )
        for i in range(count)
    }


def lease(number: int, count: int, *, kind: str) -> LeaseRecord:
    """`kind`: 'busy', 'idle' (one in four is) or 'lower' (batch, past its protected time)."""
    idle = kind == "idle" and number % 4 == 0
    return LeaseRecord(
        id=f"l{number:06d}",
        request=Request(
            tenant=name_of(number % count),
            vram_bytes=CAPACITY,
            ttl_us=5 * MINUTE_US,
            exclusivity=Exclusivity.DEVICE,
            tier=Tier.BATCH if kind == "lower" else Tier.INTERACTIVE,
        ),
        holder=HOLDER,
        state=LeaseState.ACTIVE,
        epoch=number + 1,
        vram_bytes=CAPACITY,
        slices=(Slice(f"d{number:06d}", CAPACITY),),
        joined_at=NOW - DAY_US // 48 - number,
        granted_at=NOW - 10 * MINUTE_US - number,
        expires_at=NOW + 5 * MINUTE_US + number,
        active_at=NOW - (60 + number % 977) * SECOND_US,
        committed_at=NOW - (number * 31 % 600 + 1) * SECOND_US,
        busy=not idle,
        hold_cap_us=0 if kind == "lower" else 30 * MINUTE_US,
    )


def waiter(number: int, tenant: str) -> LeaseRecord:
    return LeaseRecord(
        id=f"w{number:04d}",
        request=Request(
            tenant=tenant, vram_bytes=CAPACITY, ttl_us=5 * MINUTE_US, exclusivity=Exclusivity.DEVICE
        ),
        holder=HOLDER,
        state=LeaseState.WAITING,
        joined_at=NOW - number - 1,
        seen_at=NOW,
        busy=True,
    )


def pool(devices: int, *, tenant_count: int, waiting: int, kind: str = "busy", free: int = 0) -> PoolIndex:
    """`free` devices have nobody on them."""
    found = []
    for i in range(devices):
        bare = Device(
            id=f"d{i:06d}",
            host=f"h{i // 8}",
            driver="host",
            ordinal=i % 8,
            name="device",
            capacity_bytes=CAPACITY,
            free_bytes=CAPACITY,
        )
        resident = Resident(name_of(i % tenant_count), Exclusivity.DEVICE, CAPACITY)
        found.append(bare if i >= devices - free else join(bare, resident))
    rows = tenants(tenant_count)
    waiters = [waiter(i, name_of(i * 13 % tenant_count)) for i in range(waiting)]
    for w in waiters:
        rows[w.tenant] = replace(rows[w.tenant], waiting=rows[w.tenant].waiting + 1)
    leases = (lease(i, tenant_count, kind=kind) for i in range(devices - free))
    return PoolIndex(found, leases, waiters, rows)
