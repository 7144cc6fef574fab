"""What a decision costs as the pool grows: from 10 devices to 10,000, and to 100,000 tenants that have used something.

Rules of this file:
- The pools are those whose elementary steps the tests count (`tests/core/crowded.py`): full, a lease on each device, a few who wait.
- Sizes take turns, so the machine's mood is the same for all; a figure is the median over rounds. The rules alone are timed first, no
  disk and no SQL. What the ledger adds by loading its rows for a decision is measured beside it, and is not hidden.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.ledgers import GIB, SECRET, furnish, new_id, on_sqlite
from bench.measure import Goal, Section, median_ratio, progress
from sublet.core.leasing.lease import Holder, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.scheduling import admission, schedule
from sublet.core.scheduling.device import Exclusivity
from sublet.core.scheduling.pool_index import PoolIndex
from sublet.ledger.ledger import SqlLedger
from tests.core.crowded import NOW, name_of, pool, waiter

SIZES = (10, 100, 1_000, 10_000)
MANY_TENANTS = 100_000
ROUNDS = 9
WAITING = 4
#: log(10,000) / log(10): what growing with the logarithm would be.
WANTED = math.log(SIZES[-1]) / math.log(SIZES[0])

CASES: dict[str, tuple[Callable[[PoolIndex], object], dict[str, object]]] = {
    "a request, one device is free": (
        lambda p: admission.admit(waiter(999, name_of(1)), p, NOW, forecast=False),
        {"free": 1, "waiting": 0},
    ),
    "a request, nothing is free": (
        lambda p: admission.admit(waiter(999, name_of(1)), p, NOW, forecast=False),
        {"waiting": WAITING},
    ),
    "handing out a device": (lambda p: admission.place(p, NOW), {"free": 1, "waiting": WAITING}),
    "a tick, nothing to take": (lambda p: schedule.tick(p, NOW), {"waiting": WAITING}),
    "a tick that takes idle leases": (
        lambda p: schedule.tick(p, NOW),
        {"waiting": 2, "kind": "idle"},
    ),
    "a tick that takes lower tiers": (
        lambda p: schedule.tick(p, NOW),
        {"waiting": 2, "kind": "lower"},
    ),
    "when to look again": (lambda p: schedule.next_look_at(p, NOW), {"waiting": WAITING}),
}


def run(place: Path) -> list[Section]:
    return [_rules(), _ledger(place)]


def _rules() -> Section:
    section = Section(
        f"What a decision costs: {SIZES[0]} devices to {SIZES[-1]:,}, us",
        ["", *(f"{n:,}" for n in SIZES), f"{SIZES[-1]:,}, {MANY_TENANTS:,} tenants", "x"],
    )
    section.notes.append(
        "x is the cost with 10,000 devices and as many tenants over that with 10; growing with the logarithm is 4"
    )
    sizes = [(n, n) for n in SIZES] + [(SIZES[-1], MANY_TENANTS)]
    for name, (call, setting) in CASES.items():
        progress(f"scheduling: {name} ...")
        pools = [pool(devices, tenant_count=known, **setting) for devices, known in sizes]  # type: ignore[arg-type]
        times: list[list[float]] = [[] for _ in pools]
        for number in range(ROUNDS):
            order = range(len(pools)) if number % 2 else reversed(range(len(pools)))
            for which in order:
                times[which].append(_timed(partial(call, pools[which])))
        ratio = median_ratio(times[len(SIZES) - 1], times[0])
        section.rows.append([name, *(f"{1e6 * statistics.median(t):.0f}" for t in times), f"{ratio:.2f}"])
        section.data[name] = times
        section.goals.append(Goal(f"10,000 / 10 devices, {name}", ratio, WANTED, at_most=True))
    return section


def _timed(call: Callable[[], object], turn_s: float = 0.02) -> float:
    """Seconds for one call, over as many as fit into a turn."""
    call()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < turn_s or count < 3:
        call()
        count += 1
    return (time.perf_counter() - began) / count


# --- with the ledger's rows -------------------------------------------------------------------------------------

LEDGER_SIZES = (10, 1_000)


def _ledger(place: Path) -> Section:
    section = Section(
        "The same decisions with the ledger's rows (SQLite), ms",
        ["", *(f"{n:,} devices" for n in LEDGER_SIZES), "x"],
    )
    section.notes.append(
        "somebody waits, so every such verb loads all devices, waiters and tenants (a tick all leases too): linear in the pool"
    )
    ledgers = []
    for devices in LEDGER_SIZES:
        progress(f"scheduling: filling a ledger with {devices:,} devices ...")
        ledgers.append(_full(on_sqlite(place / f"pool-{devices}.db"), devices))
    calls: dict[str, Callable[[SqlLedger], object]] = {
        "tick, four wait": lambda ledger: ledger.tick("host-0000"),
        "a request that is refused for lack of room": _refused,
    }
    for name, call in calls.items():
        times: list[list[float]] = [[], []]
        for number in range(5):
            for which in (0, 1) if number % 2 else (1, 0):
                times[which].append(_timed(partial(call, ledgers[which]), 0.05))
        ratio = median_ratio(times[1], times[0])
        section.rows.append([name, *(f"{1e3 * statistics.median(t):.2f}" for t in times), f"{ratio:.0f}"])
        section.data[name] = times
    for ledger in ledgers:
        ledger.close()
    return section


def _full(ledger: SqlLedger, devices: int) -> SqlLedger:
    hosts = furnish(ledger, devices=devices)
    ledger.add_tenant(Tenant(name="guest"), actor="bench")
    for number in range(devices + WAITING):
        host = hosts[number % len(hosts)]
        request = Request(
            tenant="lab" if number < devices else "guest",
            vram_bytes=16 * GIB,
            ttl_us=3_600_000_000,
            exclusivity=Exclusivity.DEVICE,
            hold_cap_us=0,
        )
        ledger.acquire(new_id(), SECRET, request, Holder(host=host, pid=1))
    return ledger


def _refused(ledger: SqlLedger) -> None:
    from sublet.core.errors import Refused

    request = Request(
        tenant="guest", vram_bytes=16 * GIB, ttl_us=300_000_000, exclusivity=Exclusivity.DEVICE, wait_us=0
    )
    try:
        ledger.acquire(new_id(), SECRET, request, Holder(host="host-0000", pid=1))
    except Refused:
        return
    raise RuntimeError("the pool was meant to be full")
