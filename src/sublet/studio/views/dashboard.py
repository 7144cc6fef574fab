"""Everything the page shows, and its parts on their own: as a tenant may see it, or as an operator does.

Rules of this file:
- Each view is one snapshot: its devices, leases and sessions were true together at the moment `at`.
- `id` is the journal row the live stream has reached: a client that follows the stream from there misses
  nothing.
- A user's view contains what belongs to its tenant, and of devices only what is needed to request one.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from sublet.core.billing.allowance import allowance
from sublet.core.errors import NotFound
from sublet.core.leasing.lease import HOLDING, LeaseRecord, LeaseState
from sublet.core.leasing.tenancy import Tenant, used_now
from sublet.core.scheduling.device import DeviceState
from sublet.core.studio.token import Credential
from sublet.core.values import HOUR_US, check_name
from sublet.json_shapes import (
    Shape,
    bars_json,
    devices_json,
    job_json,
    lease_json,
    queue_json,
    receipt_json,
    session_json,
    tenant_json,
    waiting_json,
)
from sublet.ports.ledger import Answer, LeaseHistory, Ledger
from sublet.studio.edge.auth import Access, credential, is_operator, terms
from sublet.studio.edge.wire import Json
from sublet.studio.service import Service
from sublet.studio.views.pricing import Pricing
from sublet.studio.views.usage_totals import DashboardTotals, UsageTotals

MOST_LEASES = 2000
MOST_BARS = 2000
RECEIPTS = 50

Limit = Annotated[int, Query(ge=1, le=1000)]


class Dashboard:
    """Reads what each view needs. Called in threads."""

    def __init__(self, ledger: Ledger, pricing: Pricing) -> None:
        self._ledger = ledger
        self._pricing = pricing

    def me(self, who: Credential) -> Shape:
        tenant = self._ledger.tenant(who.tenant)
        shape = self._tenant(tenant, self._ledger.now(), self._ledger.policy().half_life_us)
        return {
            "tenant": who.tenant,
            "scope": who.scope.value,
            **{name: value for name, value in shape.items() if name != "name"},
            "sessions": len(self._ledger.sessions(tenant=who.tenant, open_only=True)),
            "stored_bytes": self._ledger.stored_bytes(who.tenant),
        }

    def _tenant(self, tenant: Tenant, now: int, half_life_us: int) -> Shape:
        time = self._ledger.allowance(tenant.name) if tenant.gpu_us_per_day else allowance(tenant, 0, now)
        return tenant_json(tenant, used_now(tenant, now, half_life_us), time)

    def devices(self, who: Credential) -> list[Shape]:
        live = self._ledger.leases(live_only=True, tenant=_whose(who), limit=MOST_LEASES)
        return devices_json(self._ledger.devices(), [a.lease for a in live], operator=is_operator(who))

    def timeline(self, who: Credential, since: int) -> list[Shape]:
        return _bars(self._ledger.lease_history(since=since).leases, _whose(who), since)

    def _live(self, whose: str, history: LeaseHistory) -> list[Answer]:
        """The live leases. Only waiting ones need a second read, for their place in the waitlist."""
        mine = [x for x in history.leases if x.state is not LeaseState.ENDED and whose in ("", x.tenant)]
        if any(x.state is LeaseState.WAITING for x in mine):
            return self._ledger.leases(live_only=True, tenant=whose, limit=MOST_LEASES)
        return [Answer(lease=x, at=history.at) for x in mine]

    def tenants(self, who: Credential, totals: DashboardTotals, now: int) -> list[Shape]:
        operator = is_operator(who)
        half_life = self._ledger.policy().half_life_us
        found = self._ledger.tenants() if operator else [self._ledger.tenant(who.tenant)]
        rows = []
        for tenant in found:
            used = totals.tenants.get(tenant.name, {"gpu_seconds": 0.0, "cost": None})
            row = {**self._tenant(tenant, now, half_life), **used}
            if operator and tenant.name in totals.noisy:
                row["noisy"] = totals.noisy[tenant.name]
            rows.append(row)
        return rows

    def jobs(self, who: Credential, totals: DashboardTotals) -> list[Shape]:
        return [job_json(head, totals.jobs.get(head.job)) for head in self._ledger.heads(tenant=_whose(who))]

    def queues(self, who: Credential) -> list[Shape]:
        names = [t.name for t in self._ledger.tenants()] if is_operator(who) else [who.tenant]
        found = [queue for name in names for queue in self._ledger.queues(name)]
        return [queue_json(queue, self._ledger.queue_stats(queue.id)) for queue in found]

    def snapshot(self, who: Credential, reached: int, totals: DashboardTotals) -> Shape:
        operator, whose = is_operator(who), _whose(who)
        now = self._ledger.now()
        since = max(0, now - HOUR_US)
        history = self._ledger.lease_history(since=since)
        live = self._live(whose, history)
        holding = [a for a in live if a.lease.state in HOLDING]
        sessions = self._ledger.sessions(tenant=whose, open_only=True)
        usages = self._pricing.usages_now(whose, sessions)
        of_session = {a.session.lease_id: a.session.id for a in sessions if a.session.lease_id}
        devices = self._ledger.devices()
        receipts = self._ledger.receipts(tenant=whose, limit=RECEIPTS)
        return {
            "at": now / 1e6,
            "id": reached,
            "me": {"tenant": who.tenant, "scope": who.scope.value},
            "devices": devices_json(devices, [a.lease for a in live], operator=operator),
            "leases": [{**lease_json(a), "session_id": of_session.get(a.lease.id, "")} for a in holding],
            "sessions": [
                session_json(a, usages.get(a.session.id), self._pricing.offer_now(a)) for a in sessions
            ],
            "waitlist": [waiting_json(a) for a in _in_line(live)],
            "timeline": _bars(history.leases, whose, since),
            "tenants": self.tenants(who, totals, now),
            "jobs": self.jobs(who, totals),
            "queues": self.queues(who),
            "quarantine": [
                {"id": d.id, "state": d.state.value, "capacity_bytes": d.capacity_bytes, "note": d.note}
                for d in devices
                if operator and d.state in (DeviceState.QUARANTINED, DeviceState.DRAINING)
            ],
            "receipts": [receipt_json(t, operator=operator) for t in receipts],
        }


def _bars(leases: Sequence[LeaseRecord], whose: str, since: int) -> list[Shape]:
    held = [x for x in leases if x.granted_at and x.slices and whose in ("", x.tenant)]
    held.sort(key=lambda x: (x.granted_at, x.id))
    return [bar for lease in held[-MOST_BARS:] for bar in bars_json(lease, since)]


def _whose(who: Credential) -> str:
    """The tenant whose rows the caller sees; '' (everybody's) for operators."""
    return "" if is_operator(who) else who.tenant


def _in_line(live: list[Answer]) -> list[Answer]:
    waiting = [a for a in live if a.lease.state is LeaseState.WAITING]
    return sorted(
        waiting, key=lambda a: (a.wait.position if a.wait else 1 << 30, a.lease.joined_at, a.lease.id)
    )


class DashboardRoutes:
    def __init__(self, service: Service, pricing: Pricing) -> None:
        self._service = service
        self._ledger = service.ledger
        self._pricing = pricing
        self._totals = UsageTotals(service.ledger)
        self._dashboard = Dashboard(service.ledger, pricing)

    @terms(Access.USER)
    async def dashboard(self, request: Request) -> Json:
        who = credential(request)
        reached = self._service.live.reached
        known = await self._service.work(self._totals.for_dashboard)
        await self._pricing.refresh()
        return Json(
            await self._service.work(
                lambda: self._ledger.at_once(lambda: self._dashboard.snapshot(who, reached, known))
            )
        )

    @terms(Access.USER)
    async def me(self, request: Request) -> Json:
        who = credential(request)
        return Json(await self._service.work(lambda: self._ledger.at_once(lambda: self._dashboard.me(who))))

    @terms(Access.USER)
    async def devices(self, request: Request) -> Json:
        who = credential(request)
        return Json(
            {
                "devices": await self._service.work(
                    lambda: self._ledger.at_once(lambda: self._dashboard.devices(who))
                )
            }
        )

    @terms(Access.USER)
    async def leases(self, request: Request, live: bool = True, limit: Limit = 200) -> Json:
        whose = _whose(credential(request))
        found = await self._service.work(
            lambda: self._ledger.leases(live_only=live, tenant=whose, limit=limit)
        )
        return Json({"leases": [lease_json(a) for a in found]})

    @terms(Access.USER)
    async def lease(self, request: Request, lease_id: str) -> Json:
        return Json(lease_json(await own_lease(self._service, credential(request), lease_id)))

    @terms(Access.USER)
    async def waitlist(self, request: Request) -> Json:
        whose = _whose(credential(request))
        found = await self._service.work(
            lambda: self._ledger.leases(live_only=True, tenant=whose, limit=MOST_LEASES)
        )
        return Json({"waitlist": [waiting_json(a) for a in _in_line(found)]})

    @terms(Access.USER)
    async def receipts(self, request: Request, limit: Limit = 200) -> Json:
        who = credential(request)
        found = await self._service.work(lambda: self._ledger.receipts(tenant=_whose(who), limit=limit))
        return Json({"receipts": [receipt_json(t, operator=is_operator(who)) for t in found]})

    @terms(Access.USER)
    async def jobs(self, request: Request) -> Json:
        who = credential(request)
        known = await self._service.work(self._totals.for_dashboard)
        return Json({"jobs": await self._service.work(lambda: self._dashboard.jobs(who, known))})

    @terms(Access.USER)
    async def queues(self, request: Request) -> Json:
        who = credential(request)
        return Json(
            {
                "queues": await self._service.work(
                    lambda: self._ledger.at_once(lambda: self._dashboard.queues(who))
                )
            }
        )

    @terms(Access.USER)
    async def timeline(self, request: Request, hours: Annotated[float, Query(gt=0, le=48)] = 1.0) -> Json:
        who = credential(request)

        def read() -> Shape:
            now = self._ledger.now()
            return {
                "at": now / 1e6,
                "timeline": self._dashboard.timeline(who, max(0, now - round(hours * HOUR_US))),
            }

        return Json(
            await self._service.expensive.read(
                who.tenant, ("timeline", _whose(who), hours), lambda: self._ledger.at_once(read)
            )
        )

    @terms(Access.USER)
    async def usage(
        self,
        request: Request,
        days: Annotated[int, Query(ge=1, le=366)] = 7,
        by: Literal["tenant", "session", "tier", "day", "job"] = "tenant",
        format: Literal["json", "csv"] = "json",
    ) -> Response:
        who = credential(request)
        whose = _whose(who)
        found = await self._service.expensive.read(
            who.tenant, ("usage", whose, by, days), lambda: self._totals.usage(whose, by, days)
        )
        return Json(found) if format == "json" else _as_csv(found, by)


def add_dashboard(router: APIRouter, service: Service, pricing: Pricing) -> None:
    routes = DashboardRoutes(service, pricing)
    router.get("/v1/dashboard", summary="Everything the page shows, in one snapshot")(routes.dashboard)
    router.get("/v1/me", summary="Who the token speaks for, what that tenant may and what it has")(routes.me)
    router.get("/v1/devices", summary="Devices: what is free; your leases on them")(routes.devices)
    router.get("/v1/leases", summary="Your leases, newest first")(routes.leases)
    router.get("/v1/leases/{lease_id}", summary="One lease")(routes.lease)
    router.get("/v1/waitlist", summary="Who waits, in order: yours")(routes.waitlist)
    router.get("/v1/receipts", summary="How teardowns went, newest first")(routes.receipts)
    router.get("/v1/jobs", summary="Jobs: how far they are, and their goodput over the last week")(
        routes.jobs
    )
    router.get("/v1/queues", summary="Queues: how many items are in which state")(routes.queues)
    router.get("/v1/timeline", summary="Leases of the last hours, on their devices")(routes.timeline)
    router.get("/v1/usage", summary="What was used and what it costs, less refunds")(routes.usage)


async def own_lease(service: Service, who: Credential, lease_id: str) -> Answer:
    """A lease of the caller's tenant, or anybody's for an operator; any other raises the same `NotFound`."""
    gone = NotFound("there is no such lease", remedy="GET /v1/leases lists yours")
    try:
        check_name(lease_id, what="lease id")
        found = await service.quick(lambda: service.ledger.look(lease_id))
    except (NotFound, ValueError):
        raise gone from None
    if not is_operator(who) and found.lease.tenant != who.tenant:
        raise gone
    return found


def _as_csv(found: Shape, by: str) -> Response:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    rows: list[Shape] = found["rows"]
    names = [name for name in (rows[0] if rows else {"key": ""}) if name != "losses"]
    writer.writerow([by if name == "key" else name for name in names])
    for row in rows:
        writer.writerow([_cell(row[name]) for name in names])
    headers = {"Content-Disposition": f'attachment; filename="usage-by-{by}.csv"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


def _cell(value: object) -> object:
    """Quotes a text that a spreadsheet would take for a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") and value != "-":
        return f"'{value}"
    return "" if value is None else value
