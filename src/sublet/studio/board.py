"""Everything the page shows, and its parts on their own: as the tenant may see it, or as an operator does.

Rules of this file:
- One snapshot each: what a board says of devices, leases and sessions was true at one moment, the moment `at`.
- `id` is the row of the journal the live stream has reached: whoever follows it from there misses nothing.
- A user's view is made from what belongs to its tenant, and of devices only what everybody must know to ask for one.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from sublet.core.allowance import allowance
from sublet.core.device import Device, DeviceState
from sublet.core.errors import NotFound
from sublet.core.lease import HOLDING, Lease, LeaseState
from sublet.core.tenancy import Tenant, used_now
from sublet.core.token import Credential
from sublet.core.values import HOUR_US, check_name
from sublet.ports.ledger import Answer, Ledger, Stays
from sublet.studio.auth import Opens, credential, is_operator, terms
from sublet.studio.pricing import Pricing
from sublet.studio.service import Service
from sublet.studio.shapes import (
    Shape,
    bar_shapes,
    device_shape,
    job_shape,
    lease_shape,
    queue_shape,
    receipt_shape,
    session_shape,
    tenant_shape,
    waiting_shape,
)
from sublet.studio.sums import BoardSums, Sums
from sublet.studio.wire import Json

MOST_LEASES = 2000
MOST_BARS = 2000
RECEIPTS = 50

Limit = Annotated[int, Query(ge=1, le=1000)]


class Boards:
    """Reads what one view needs; called in threads."""

    def __init__(self, ledger: Ledger, sums: Sums, pricing: Pricing) -> None:
        self._ledger = ledger
        self._sums = sums
        self._pricing = pricing

    def me(self, who: Credential) -> Shape:
        tenant = self._ledger.tenant(who.tenant)
        shape = self._tenant(tenant, self._ledger.now(), self._ledger.policy().half_life_us)
        open_sessions = len(self._ledger.sessions(tenant=who.tenant, open_only=True))
        stored = self._ledger.stored_bytes(who.tenant)
        return {
            "tenant": who.tenant,
            "scope": who.scope.value,
            "sessions": open_sessions,
            "stored_bytes": stored,
            **{name: value for name, value in shape.items() if name != "name"},
        }

    def _tenant(self, tenant: Tenant, now: int, half_life_us: int) -> Shape:
        time = self._ledger.allowance(tenant.name) if tenant.gpu_us_per_day else allowance(tenant, 0, now)
        return tenant_shape(tenant, used_now(tenant, now, half_life_us), time)

    def devices(self, who: Credential) -> list[Shape]:
        live = self._ledger.leases(live_only=True, tenant=_whose(who), limit=MOST_LEASES)
        return _devices(self._ledger.devices(), [a.lease for a in live], operator=is_operator(who))

    def timeline(self, who: Credential, since: int) -> list[Shape]:
        return _bars(self._ledger.stays(since=since).leases, _whose(who), since)

    def _live(self, whose: str, stays: Stays) -> list[Answer]:
        """Where nobody waits, all there is to say of them was read already."""
        mine = [x for x in stays.leases if x.state is not LeaseState.ENDED and whose in ("", x.tenant)]
        if any(x.state is LeaseState.WAITING for x in mine):
            return self._ledger.leases(live_only=True, tenant=whose, limit=MOST_LEASES)
        return [Answer(lease=x, at=stays.at) for x in mine]

    def tenants(self, who: Credential, sums: BoardSums, now: int) -> list[Shape]:
        operator = is_operator(who)
        half_life = self._ledger.policy().half_life_us
        found = self._ledger.tenants() if operator else [self._ledger.tenant(who.tenant)]
        rows = []
        for tenant in found:
            used = sums.tenants.get(tenant.name, {"gpu_seconds": 0.0, "cost": None})
            row = {**self._tenant(tenant, now, half_life), **used}
            if operator and tenant.name in sums.noisy:
                row["noisy"] = sums.noisy[tenant.name]
            rows.append(row)
        return rows

    def jobs(self, who: Credential, sums: BoardSums) -> list[Shape]:
        return [job_shape(head, sums.jobs.get(head.job)) for head in self._ledger.heads(tenant=_whose(who))]

    def queues(self, who: Credential) -> list[Shape]:
        names = [t.name for t in self._ledger.tenants()] if is_operator(who) else [who.tenant]
        found = [queue for name in names for queue in self._ledger.queues(name)]
        return [queue_shape(queue, self._ledger.queue_stats(queue.id)) for queue in found]

    def board(self, who: Credential, reached: int, sums: BoardSums) -> Shape:
        operator, whose = is_operator(who), _whose(who)
        now = self._ledger.now()
        since = max(0, now - HOUR_US)
        stays = self._ledger.stays(since=since)
        live = self._live(whose, stays)
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
            "devices": _devices(devices, [a.lease for a in live], operator=operator),
            "leases": [{**lease_shape(a), "session_id": of_session.get(a.lease.id, "")} for a in holding],
            "sessions": [
                session_shape(a, usages.get(a.session.id), self._pricing.offer_now(a)) for a in sessions
            ],
            "waitlist": [waiting_shape(a) for a in _in_line(live)],
            "timeline": _bars(stays.leases, whose, since),
            "tenants": self.tenants(who, sums, now),
            "jobs": self.jobs(who, sums),
            "queues": self.queues(who),
            "quarantine": [
                {"id": d.id, "state": d.state.value, "capacity_bytes": d.capacity_bytes, "note": d.note}
                for d in devices
                if operator and d.state in (DeviceState.QUARANTINED, DeviceState.DRAINING)
            ],
            "receipts": [receipt_shape(t, operator=operator) for t in receipts],
        }


def _bars(leases: Sequence[Lease], whose: str, since: int) -> list[Shape]:
    held = [x for x in leases if x.granted_at and x.slices and whose in ("", x.tenant)]
    held.sort(key=lambda x: (x.granted_at, x.id))
    return [bar for lease in held[-MOST_BARS:] for bar in bar_shapes(lease, since)]


def _whose(who: Credential) -> str:
    """'' for operators: everybody's."""
    return "" if is_operator(who) else who.tenant


def _in_line(live: list[Answer]) -> list[Answer]:
    waiting = [a for a in live if a.lease.state is LeaseState.WAITING]
    return sorted(
        waiting, key=lambda a: (a.wait.position if a.wait else 1 << 30, a.lease.joined_at, a.lease.id)
    )


def _devices(devices: list[Device], live: list[Lease], *, operator: bool) -> list[Shape]:
    on: dict[str, list[Lease]] = {}
    for lease in live:
        for s in lease.slices:
            on.setdefault(s.device_id, []).append(lease)
    return [device_shape(d, on.get(d.id, []), operator=operator) for d in devices]


def add_board(router: APIRouter, service: Service, pricing: Pricing) -> None:
    ledger = service.ledger
    sums = Sums(ledger)
    boards = Boards(ledger, sums, pricing)

    @router.get("/v1/board", summary="Everything the page shows, in one snapshot")
    @terms(Opens.USER)
    async def board(request: Request) -> Json:
        who = credential(request)
        reached = service.live.reached
        known = await service.work(sums.for_board)
        await pricing.refresh()
        return Json(await service.work(lambda: ledger.at_once(lambda: boards.board(who, reached, known))))

    @router.get("/v1/me", summary="Who the token speaks for, what that tenant may and what it has")
    @terms(Opens.USER)
    async def me(request: Request) -> Json:
        who = credential(request)
        return Json(await service.work(lambda: ledger.at_once(lambda: boards.me(who))))

    @router.get("/v1/devices", summary="Devices: what is free; your leases on them")
    @terms(Opens.USER)
    async def devices(request: Request) -> Json:
        who = credential(request)
        return Json({"devices": await service.work(lambda: ledger.at_once(lambda: boards.devices(who)))})

    @router.get("/v1/leases", summary="Your leases, newest first")
    @terms(Opens.USER)
    async def leases(request: Request, live: bool = True, limit: Limit = 200) -> Json:
        whose = _whose(credential(request))
        found = await service.work(lambda: ledger.leases(live_only=live, tenant=whose, limit=limit))
        return Json({"leases": [lease_shape(a) for a in found]})

    @router.get("/v1/leases/{lease_id}", summary="One lease")
    @terms(Opens.USER)
    async def lease(request: Request, lease_id: str) -> Json:
        return Json(lease_shape(await own_lease(service, credential(request), lease_id)))

    @router.get("/v1/waitlist", summary="Who waits, in order: yours")
    @terms(Opens.USER)
    async def waitlist(request: Request) -> Json:
        whose = _whose(credential(request))
        found = await service.work(lambda: ledger.leases(live_only=True, tenant=whose, limit=MOST_LEASES))
        return Json({"waitlist": [waiting_shape(a) for a in _in_line(found)]})

    @router.get("/v1/receipts", summary="How teardowns went, newest first")
    @terms(Opens.USER)
    async def receipts(request: Request, limit: Limit = 200) -> Json:
        who = credential(request)
        found = await service.work(lambda: ledger.receipts(tenant=_whose(who), limit=limit))
        return Json({"receipts": [receipt_shape(t, operator=is_operator(who)) for t in found]})

    @router.get("/v1/jobs", summary="Jobs: how far they are, and their goodput over the last week")
    @terms(Opens.USER)
    async def jobs(request: Request) -> Json:
        who = credential(request)
        known = await service.work(sums.for_board)
        return Json({"jobs": await service.work(lambda: boards.jobs(who, known))})

    @router.get("/v1/queues", summary="Queues: how many items are in which state")
    @terms(Opens.USER)
    async def queues(request: Request) -> Json:
        who = credential(request)
        return Json({"queues": await service.work(lambda: ledger.at_once(lambda: boards.queues(who)))})

    @router.get("/v1/timeline", summary="Leases of the last hours, on their devices")
    @terms(Opens.USER)
    async def timeline(request: Request, hours: Annotated[float, Query(gt=0, le=48)] = 1.0) -> Json:
        who = credential(request)

        def read() -> Shape:
            now = ledger.now()
            return {"at": now / 1e6, "timeline": boards.timeline(who, max(0, now - round(hours * HOUR_US)))}

        return Json(await service.work(lambda: ledger.at_once(read)))

    @router.get("/v1/usage", summary="What was used and what it costs, less refunds")
    @terms(Opens.USER)
    async def usage(
        request: Request,
        days: Annotated[int, Query(ge=1, le=366)] = 7,
        by: Literal["tenant", "session", "tier", "day", "job"] = "tenant",
        format: Literal["json", "csv"] = "json",
    ) -> Response:
        whose = _whose(credential(request))
        found = await service.work(lambda: sums.usage(whose, by, days))
        return Json(found) if format == "json" else _as_csv(found, by)


async def own_lease(service: Service, who: Credential, lease_id: str) -> Answer:
    """A lease of the caller's tenant, or anybody's for an operator; else the one answer for what is not there."""
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
    """A spreadsheet takes a text that begins like a formula for one."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") and value != "-":
        return f"'{value}"
    return "" if value is None else value
