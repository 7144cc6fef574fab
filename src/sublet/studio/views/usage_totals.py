"""What was used, by whom and for what: totals over the ledger's leases, recomputed now and then.

Rules of this file:
- All tenants' totals are computed from one snapshot; a user is shown the part of its tenant.
- Totals over days hardly change within seconds, so they are cached for `FRESH_SECONDS`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sublet.core.billing.goodput import (
    MICRO,
    REFUND_RULE,
    GoodputTotals,
    Stretch,
    accounts,
    day_of,
    stretches,
)
from sublet.core.billing.meter import billed_until
from sublet.core.billing.neighbours import Neighbour
from sublet.core.billing.price import PriceList, Tariff, class_of
from sublet.core.leasing.lease import LeaseRecord
from sublet.core.studio.session_usage import SessionUsage
from sublet.core.values import DAY_US
from sublet.json_shapes import Shape, money, usage_json
from sublet.ports.ledger import HeldTime, Ledger
from sublet.studio.views import neighbours

FRESH_SECONDS = 10.0
DASHBOARD_DAYS = 7


def _day(part: Stretch) -> str:
    return datetime.fromtimestamp(day_of(part.until) * DAY_US / MICRO, UTC).strftime("%Y-%m-%d")


GROUPS: dict[str, Callable[[Stretch], str]] = {
    "tenant": lambda part: part.tenant,
    "tier": lambda part: part.tier,
    "day": _day,
    "job": lambda part: part.job or "-",
}


@dataclass(frozen=True, slots=True)
class DashboardTotals:
    tenants: dict[str, Shape] = field(default_factory=dict)
    jobs: dict[str, float | None] = field(default_factory=dict)
    noisy: dict[str, Shape] = field(default_factory=dict)


class UsageTotals:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._kept = DashboardTotals()
        self._made_at = float("-inf")

    def for_dashboard(self) -> DashboardTotals:
        """The totals. Blocks; callers that come while they are computed wait for the same ones."""
        with self._lock:
            if time.monotonic() - self._made_at > FRESH_SECONDS:
                self._kept = self._ledger.at_once(self._made)
                self._made_at = time.monotonic()
            return self._kept

    def _made(self) -> DashboardTotals:
        since = max(0, self._ledger.now() - DASHBOARD_DAYS * DAY_US)
        found, tariffs, listed = self._held("", since)
        parts = stretches(found.leases, found.commits, since=since, now=found.at)
        by_tenant, _ = accounts(parts, GROUPS["tenant"], tariffs=tariffs, removed=found.removed)
        by_job, _ = accounts(parts, GROUPS["job"], tariffs=tariffs, removed=found.removed)
        return DashboardTotals(
            tenants={a.name: {"gpu_seconds": a.held_us / 1e6, "cost": _cost(a, listed)} for a in by_tenant},
            jobs={a.name: None if a.goodput_ppm is None else a.goodput_ppm / MICRO for a in by_job},
            noisy={n.tenant: _noisy(n) for n in neighbours.find(self._ledger, days=1)},
        )

    def _held(self, tenant: str, since: int) -> tuple[HeldTime, dict[str, Tariff], bool]:
        found = self._ledger.held(tenant=tenant, since=since)
        listed = PriceList(self._ledger.prices())
        classes = {d.id: class_of(d) for d in self._ledger.devices()}
        tariffs = {x.id: t for x in found.leases if (t := listed.tariff(x, classes)) is not None}
        return found, tariffs, bool(listed)

    def usage(self, tenant: str, by: str, days: int) -> Shape:
        """`tenant` '' is everybody."""
        return self._ledger.at_once(lambda: self._usage(tenant, by, days))

    def _usage(self, tenant: str, by: str, days: int) -> Shape:
        now = self._ledger.now()
        since = max(0, now - days * DAY_US)
        head = {"by": by, "since": since / 1e6, "until": now / 1e6, "refund_rule": REFUND_RULE}
        if by == "session":
            rows = [
                _session_row(u) for u in self._ledger.session_usage(tenant=tenant, since=since, limit=1000)
            ]
            return {**head, "rows": rows}
        found, tariffs, listed = self._held(tenant, since)
        parts = stretches(found.leases, found.commits, since=since, now=found.at)
        groups, total = accounts(parts, GROUPS[by], tariffs=tariffs, removed=found.removed)
        more = _besides(found, GROUPS[by], since, parts)
        return {
            **head,
            "rows": [_row(a, listed, *more.get(a.name, (0, 0))) for a in groups],
            "total": _row(
                total, listed, *(sum(pair) for pair in zip(*more.values(), strict=True)) if more else (0, 0)
            ),
        }


def _besides(
    found: HeldTime, group: Callable[[Stretch], str], since: int, parts: list[Stretch]
) -> dict[str, tuple[int, int]]:
    """Memory × time and waiting time of each group. A lease counts in the group of its last part."""
    names = {part.lease: group(part) for part in parts}
    totals: dict[str, tuple[int, int]] = {}
    for lease in found.leases:
        name = names.get(lease.id)
        if name is None:
            continue
        bytes_s, waited = totals.get(name, (0, 0))
        totals[name] = (
            bytes_s + _memory(lease, since, found.at),
            waited + max(0, lease.granted_at - lease.joined_at),
        )
    return totals


def _memory(lease: LeaseRecord, since: int, now: int) -> int:
    start = max(lease.granted_at, since)
    end = lease.ended_at or billed_until(lease, now)
    return max(0, end - start) * sum(s.vram_bytes for s in lease.slices) // MICRO


def _cost(account: GoodputTotals, listed: bool) -> str | None:
    priced = listed and (account.unpriced_us < account.held_us or not account.held_us)
    return money(account.cost_micro) if priced else None


def _row(a: GoodputTotals, listed: bool, byte_seconds: int, waited_us: int) -> Shape:
    return {
        "key": a.name,
        "gpu_seconds": a.held_us / 1e6,
        "useful_seconds": a.useful_us / 1e6,
        "overhead_seconds": a.overhead_us / 1e6,
        "wasted_seconds": a.wasted_us / 1e6,
        "open_seconds": a.open_us / 1e6,
        "other_seconds": a.other_us / 1e6,
        "goodput": None if a.goodput_ppm is None else a.goodput_ppm / MICRO,
        "vram_gb_seconds": byte_seconds / 1e9,
        "wait_seconds": waited_us / 1e6,
        "refund_seconds": a.refund_us / 1e6,
        "cost": _cost(a, listed),
        "leases": a.lease_count,
        "steps": a.steps,
        "commits": a.commits,
        "losses": dict(sorted(a.losses.items())),
    }


def _session_row(used: SessionUsage) -> Shape:
    return {"key": used.session_id, "name": used.name, "tenant": used.tenant, **usage_json(used)}


def _noisy(found: Neighbour) -> Shape:
    return {
        "noisy": found.noisy,
        "share": found.held_ppm / MICRO,
        "fair": found.fair_ppm / MICRO,
        "others_waited": found.caused_us / 1e6,
        "why": found.reason,
    }
