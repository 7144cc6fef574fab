"""What operators do: take leases back, withhold devices, set quotas and prices.

Rules of this file:
- Every route is an operator's; a user's token is answered 403 before anything is looked up.
- The journal says who did it: the token's id, never its text.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request

from sublet.core.billing.price import Price, PriceList
from sublet.core.errors import BadInput, NotFound
from sublet.core.leasing.lease import EndReason
from sublet.core.leasing.tenancy import Tenant, used_now
from sublet.core.values import check_name, parse_duration, parse_price
from sublet.json_shapes import Shape, device_json, lease_json, money, tenant_json
from sublet.studio.edge.auth import Access, BodyLimit, credential, terms
from sublet.studio.edge.wire import Json
from sublet.studio.routes.requests import DeviceNote, NewTenant, RevokeLease, SetPrice, TenantChange
from sublet.studio.service import Service
from sublet.studio.views import neighbours
from sublet.studio.views.dashboard import own_lease


def actor_of(request: Request) -> str:
    return f"token {credential(request).token_id}"


class OperatorRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._ledger = service.ledger

    @terms(Access.OPERATOR, body=BodyLimit.JSON)
    async def revoke(self, request: Request, lease_id: str, body: RevokeLease | None = None) -> Json:
        wish = body or RevokeLease()
        await own_lease(self._service, credential(request), lease_id)
        answer = await self._service.work(
            lambda: self._ledger.revoke(
                lease_id,
                reason=EndReason.REVOKED,
                detail=wish.reason,
                grace_us=parse_duration(wish.grace, what="grace"),
                actor=actor_of(request),
            )
        )
        return Json(lease_json(answer))

    @terms(Access.OPERATOR, body=BodyLimit.JSON)
    async def drain(self, request: Request, device_id: str, body: DeviceNote | None = None) -> Json:
        return await self._set_device(request, device_id, "draining", body)

    @terms(Access.OPERATOR, body=BodyLimit.JSON)
    async def quarantine(self, request: Request, device_id: str, body: DeviceNote | None = None) -> Json:
        return await self._set_device(request, device_id, "quarantined", body)

    @terms(Access.OPERATOR, body=BodyLimit.JSON)
    async def clear(self, request: Request, device_id: str, body: DeviceNote | None = None) -> Json:
        return await self._set_device(request, device_id, "ready", body)

    async def _set_device(
        self, request: Request, device_id: str, state: str, body: DeviceNote | None
    ) -> Json:
        note = body.note if body is not None else ""
        known = await self._service.work(self._ledger.devices)
        if all(d.id != device_id for d in known):
            raise NotFound("there is no such device", remedy="GET /v1/devices lists them")
        device = await self._service.work(
            lambda: self._ledger.set_device(device_id, state=state, note=note, actor=actor_of(request))
        )
        return Json(device_json(device, [], operator=True))

    @terms(Access.OPERATOR)
    async def tenants(self, request: Request) -> Json:
        def read() -> list[Shape]:
            now, half_life = self._ledger.now(), self._ledger.policy().half_life_us
            return [
                tenant_json(
                    t,
                    used_now(t, now, half_life),
                    self._ledger.allowance(t.name) if t.gpu_us_per_day else None,
                )
                for t in self._ledger.tenants()
            ]

        return Json({"tenants": await self._service.work(lambda: self._ledger.at_once(read))})

    @terms(Access.OPERATOR, body=BodyLimit.JSON)
    async def add_tenant(self, request: Request, body: NewTenant) -> Json:
        given: dict[str, Any] = {name: value for name, value in body.changes().items() if value is not None}
        made = await self._service.work(
            lambda: self._ledger.add_tenant(
                Tenant(name=check_name(body.name, what="tenant"), **given),
                actor=actor_of(request),
                returning=body.returning,
            )
        )
        return Json(tenant_json(made, 0, None), 201)

    @terms(Access.OPERATOR, body=BodyLimit.JSON)
    async def change_tenant(self, request: Request, name: str, body: TenantChange) -> Json:
        changes: dict[str, Any] = body.changes()
        try:
            check_name(name, what="tenant")
            await self._service.work(lambda: self._ledger.tenant(name))
        except (NotFound, ValueError):
            raise NotFound("there is no such tenant", remedy="GET /v1/tenants lists them") from None
        changed = await self._service.work(
            lambda: self._ledger.set_tenant(name, actor=actor_of(request), **changes)
        )
        now, half_life = await self._service.work(
            lambda: (self._ledger.now(), self._ledger.policy().half_life_us)
        )
        return Json(tenant_json(changed, used_now(changed, now, half_life), None))

    @terms(Access.OPERATOR)
    async def beside(self, request: Request, days: Annotated[float, Query(gt=0, le=366)] = 7.0) -> Json:
        found = await self._service.expensive.read(
            credential(request).tenant,
            ("neighbours", days),
            lambda: self._ledger.at_once(lambda: neighbours.view(self._ledger, days=days)),
        )
        return Json({"days": days, "neighbours": found})

    @terms(Access.OPERATOR)
    async def prices(self, request: Request) -> Json:
        now, found = await self._service.work(lambda: (self._ledger.now(), self._ledger.prices()))
        return Json({"prices": [_price_shape(p) for p in PriceList(found).current(now)]})

    @terms(Access.OPERATOR, body=BodyLimit.JSON)
    async def set_price(self, request: Request, body: SetPrice) -> Json:
        micro = parse_price(body.per_gpu_hour)
        made = await self._service.work(
            lambda: self._ledger.set_price(body.device_class, micro, tier=body.tier, actor=actor_of(request))
        )
        return Json(_price_shape(made))

    @terms(Access.OPERATOR, body=BodyLimit.JSON)
    async def remove_price(
        self,
        request: Request,
        device_class: Annotated[str, Query(min_length=1, max_length=100)],
        tier: Annotated[str, Query(max_length=40)] = "",
    ) -> Json:
        if not device_class.isprintable() or not tier.isprintable():
            raise BadInput("device_class and tier are printable")
        await self._service.work(
            lambda: self._ledger.remove_price(device_class, tier=tier, actor=actor_of(request))
        )
        return Json({"device_class": device_class, "tier": tier, "removed": True})


def add_operations(router: APIRouter, service: Service) -> None:
    routes = OperatorRoutes(service)
    router.post(
        "/v1/leases/{lease_id}/revoke",
        summary="Take a lease back: notice now, teardown when the grace is over",
    )(routes.revoke)
    router.post("/v1/devices/{device_id}/drain", summary="No new leases on a device; those on it go on")(
        routes.drain
    )
    router.post("/v1/devices/{device_id}/quarantine", summary="Withhold a device until somebody clears it")(
        routes.quarantine
    )
    router.post(
        "/v1/devices/{device_id}/clear", summary="Say that a device is clean: it may be leased again"
    )(routes.clear)
    router.get("/v1/tenants", summary="Every tenant, what it may hold and what it has")(routes.tenants)
    router.post("/v1/tenants", status_code=201, summary="Add a tenant")(routes.add_tenant)
    router.patch(
        "/v1/tenants/{name}", summary="Change a tenant's weight and quotas; live leases keep what they have"
    )(routes.change_tenant)
    router.get("/v1/neighbours", summary="Who has more than its share, and who waited because of it")(
        routes.beside
    )
    router.get("/v1/prices", summary="The price list as it stands")(routes.prices)
    router.put("/v1/prices", summary="What a GPU-hour of a device class costs, from now on")(routes.set_price)
    router.delete(
        "/v1/prices", summary="Take a price off the list; what was granted before costs what it did"
    )(routes.remove_price)


def _price_shape(price: Price) -> Shape:
    return {
        "device_class": price.device_class,
        "tier": price.tier,
        "per_gpu_hour": money(price.micro_per_gpu_hour),
        "valid_from": price.valid_from / 1e6,
    }
