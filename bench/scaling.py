"""What a grant costs in a small pool and in a large one.

Rules of this file:
- The large pool has a hundred times the devices and live leases of the small one. Every device but one carries ten
  leases and has the same room left, the worst case for choosing among them; one device is empty.
- How throughput grows with processes on PostgreSQL is in `postgres_scaling`.
- Small and large take turns, so the machine's mood is the same for both. The cost is what the caller waits, disk included.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

from bench import postgres_scaling
from bench.ledgers import (
    GIB,
    SECRET,
    TENANT,
    TTL_US,
    furnish,
    new_id,
    on_postgres,
    on_sqlite,
    running_postgres,
)
from bench.measure import Goal, Section, median_ratio, progress
from sublet.core.leasing.lease import Holder, Request
from sublet.core.scheduling.device import Exclusivity
from sublet.ledger.ledger import SqlLedger

SMALL, LARGE = 10, 1000
LEASES_PER_DEVICE = 10
ROUNDS = 7
CYCLES = 40
LONG_TTL_US = 3_600_000_000

CASES: dict[str, dict[str, Any]] = {
    "a slice on a named host": {},
    "a slice on any host": {"host": ""},
    "a whole device on any host": {"host": "", "exclusivity": Exclusivity.DEVICE},
    "a session slice on any host": {"host": "", "exclusivity": Exclusivity.SESSION, "tenant": "guest"},
}


def run(place: Path) -> list[Section]:
    sections = []
    with contextlib.ExitStack() as stack:
        small, large = on_sqlite(place / "small.db"), on_sqlite(place / "large.db")
        stack.callback(small.close)
        stack.callback(large.close)
        sections.append(_compare("SQLite", small, large))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_postgres(place))
        url = server.url
        small, large = on_postgres(url, "small"), on_postgres(url, "large")
        stack.callback(small.close)
        stack.callback(large.close)
        sections.append(_compare("PostgreSQL", small, large))
    with running_postgres(place) as server:
        sections.append(postgres_scaling.run(server, server.url))
    return sections


def _fill(ledger: SqlLedger, devices: int) -> str:
    """Ten leases of 1.5 GiB on each device of 16 GiB, the last device left empty. Returns a host in the middle."""
    from sublet.core.leasing.tenancy import Tenant

    hosts = furnish(ledger, devices=devices)
    ledger.add_tenant(Tenant(name="guest"), actor="bench")
    left = (devices - 1) * LEASES_PER_DEVICE
    for number, host in enumerate(hosts):
        request = Request(tenant=TENANT, vram_bytes=3 * GIB // 2, ttl_us=LONG_TTL_US, host=host)
        on_host = min(8, devices - number * 8)
        for _ in range(min(left, on_host * LEASES_PER_DEVICE)):
            ledger.acquire(new_id(), SECRET, request, Holder(host=host))
            left -= 1
    return hosts[len(hosts) // 2] if len(hosts) > 2 else hosts[0]


def _cycle(ledger: SqlLedger, request: Request, holder: Holder) -> tuple[float, float]:
    lease_id = new_id()
    began = time.perf_counter()
    ledger.acquire(lease_id, SECRET, request, holder)
    granted = time.perf_counter()
    ledger.release(lease_id, SECRET)
    return granted - began, time.perf_counter() - granted


def _compare(engine: str, small: SqlLedger, large: SqlLedger) -> Section:
    section = Section(
        f"Scaling on {engine}: {SMALL} devices and {(SMALL - 1) * LEASES_PER_DEVICE} live leases against "
        f"{LARGE:,} and {(LARGE - 1) * LEASES_PER_DEVICE:,}",
        ["", "small us", "large us", "x", "more us"],
    )
    section.notes.append(
        "A slow disk flatters the ratio of a durable verb; 'more us' does not depend on the disk."
    )
    pools = []
    for ledger, devices in ((small, SMALL), (large, LARGE)):
        progress(f"scaling on {engine}: filling {devices:,} devices ...")
        pools.append((ledger, _fill(ledger, devices)))
    progress(f"scaling on {engine}: measuring ...")
    for what, asked in CASES.items():
        costs: list[list[tuple[float, float]]] = [[], []]
        requests = [
            Request(**{"tenant": TENANT, "vram_bytes": GIB // 2, "ttl_us": TTL_US, "host": host, **asked})
            for _, host in pools
        ]
        for (ledger, host), request in zip(pools, requests, strict=True):
            for _ in range(20):
                _cycle(ledger, request, Holder(host=host))
        for number in range(ROUNDS):
            for which in (0, 1) if number % 2 else (1, 0):
                ledger, host = pools[which]
                times = [_cycle(ledger, requests[which], Holder(host=host)) for _ in range(CYCLES)]
                acquired, released = zip(*times, strict=True)
                costs[which].append((statistics.median(acquired), statistics.median(released)))
        for verb, index in (("acquire", 0), ("release", 1)):
            small_us, large_us = ([1e6 * cost[index] for cost in costs[which]] for which in (0, 1))
            ratio = median_ratio(large_us, small_us)
            more_us = statistics.median(b - a for a, b in zip(small_us, large_us, strict=True))
            name = f"{verb}: {what}"
            section.rows.append(
                [
                    name,
                    f"{statistics.median(small_us):.0f}",
                    f"{statistics.median(large_us):.0f}",
                    f"{ratio:.2f}",
                    f"{more_us:+.0f}",
                ]
            )
            section.data[name] = {"small_us": small_us, "large_us": large_us, "more_us": more_us}
            section.goals.append(Goal(f"{engine}, large / small pool, {name}", ratio, 2, at_most=True))
    return section
