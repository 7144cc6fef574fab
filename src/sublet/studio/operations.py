"""What operators do: take leases back, withhold devices, set quotas and prices.

Rules of this file:
- Every route is an operator's; a user's token is answered 403 before anything is looked up.
- The journal says who did it: the token's id, never its text.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request

from sublet.core.errors import BadInput, NotFound
from sublet.core.lease import EndReason
from sublet.core.price import Price, PriceList
from sublet.core.tenancy import Tenant, used_now
from sublet.core.values import check_name, parse_duration, parse_price
from sublet.studio import neighbours
from sublet.studio.auth import Body, Opens, credential, terms
from sublet.studio.board import own_lease
from sublet.studio.bodies import DeviceNote, NewTenant, RevokeLease, SetPrice, TenantChange
from sublet.studio.service import Service
from sublet.studio.shapes import Shape, device_shape, lease_shape, money, tenant_shape
from sublet.studio.wire import Json

_STATES = {"drain": "draining", "quarantine": "quarantined", "clear": "ready"}


def actor_of(request: Request) -> str:
    return f"token {credential(request).token_id}"


def add_operations(router: APIRouter, service: Service) -> None:
    ledger = service.ledger

    @router.post(
        "/v1/leases/{lease_id}/revoke",
        summary="Take a lease back: notice now, teardown when the grace is over",
    )
    @terms(Opens.OPERATOR, body=Body.JSON)
    async def revoke(request: Request, lease_id: str, body: RevokeLease | None = None) -> Json:
        wish = body or RevokeLease()
        await own_lease(service, credential(request), lease_id)
        answer = await service.work(
            lambda: ledger.revoke(
                lease_id,
                reason=EndReason.REVOKED,
                detail=wish.reason,
                grace_us=parse_duration(wish.grace, what="grace"),
                actor=actor_of(request),
            )
        )
        return Json(lease_shape(answer))

    def set_device(verb: str, words: str) -> None:
        @router.post(f"/v1/devices/{{device_id}}/{verb}", summary=words, name=verb)
        @terms(Opens.OPERATOR, body=Body.JSON)
        async def change(request: Request, device_id: str, body: DeviceNote | None = None) -> Json:
            note = body.note if body is not None else ""
            known = await service.work(ledger.devices)
            if all(d.id != device_id for d in known):
                raise NotFound("there is no such device", remedy="GET /v1/devices lists them")
            device = await service.work(
                lambda: ledger.set_device(device_id, state=_STATES[verb], note=note, actor=actor_of(request))
            )
            return Json(device_shape(device, [], operator=True))

    set_device("drain", "No new leases on a device; those on it go on")
    set_device("quarantine", "Withhold a device until somebody clears it")
    set_device("clear", "Say that a device is clean: it may be leased again")

    @router.get("/v1/tenants", summary="Every tenant, what it may hold and what it has")
    @terms(Opens.OPERATOR)
    async def tenants(request: Request) -> Json:
        def read() -> list[Shape]:
            now, half_life = ledger.now(), ledger.policy().half_life_us
            return [
                tenant_shape(
                    t, used_now(t, now, half_life), ledger.allowance(t.name) if t.gpu_us_per_day else None
                )
                for t in ledger.tenants()
            ]

        return Json({"tenants": await service.work(lambda: ledger.at_once(read))})

    @router.post("/v1/tenants", status_code=201, summary="Add a tenant")
    @terms(Opens.OPERATOR, body=Body.JSON)
    async def add_tenant(request: Request, body: NewTenant) -> Json:
        given: dict[str, Any] = {name: value for name, value in body.changes().items() if value is not None}
        made = await service.work(
            lambda: ledger.add_tenant(
                Tenant(name=check_name(body.name, what="tenant"), **given), actor=actor_of(request)
            )
        )
        return Json(tenant_shape(made, 0, None), 201)

    @router.patch(
        "/v1/tenants/{name}", summary="Change a tenant's weight and quotas; live leases keep what they have"
    )
    @terms(Opens.OPERATOR, body=Body.JSON)
    async def change_tenant(request: Request, name: str, body: TenantChange) -> Json:
        changes: dict[str, Any] = body.changes()
        try:
            check_name(name, what="tenant")
            await service.work(lambda: ledger.tenant(name))
        except (NotFound, ValueError):
            raise NotFound("there is no such tenant", remedy="GET /v1/tenants lists them") from None
        changed = await service.work(lambda: ledger.set_tenant(name, actor=actor_of(request), **changes))
        now, half_life = await service.work(lambda: (ledger.now(), ledger.policy().half_life_us))
        return Json(tenant_shape(changed, used_now(changed, now, half_life), None))

    @router.get("/v1/neighbours", summary="Who has more than its share, and who waited because of it")
    @terms(Opens.OPERATOR)
    async def beside(request: Request, days: Annotated[float, Query(gt=0, le=366)] = 7.0) -> Json:
        found = await service.work(lambda: ledger.at_once(lambda: neighbours.view(ledger, days=days)))
        return Json({"days": days, "neighbours": found})

    @router.get("/v1/prices", summary="The price list as it stands")
    @terms(Opens.OPERATOR)
    async def prices(request: Request) -> Json:
        now, found = await service.work(lambda: (ledger.now(), ledger.prices()))
        return Json({"prices": [_price_shape(p) for p in PriceList(found).current(now)]})

    @router.put("/v1/prices", summary="What a GPU-hour of a device class costs, from now on")
    @terms(Opens.OPERATOR, body=Body.JSON)
    async def set_price(request: Request, body: SetPrice) -> Json:
        micro = parse_price(body.per_gpu_hour)
        made = await service.work(
            lambda: ledger.set_price(body.device_class, micro, tier=body.tier, actor=actor_of(request))
        )
        return Json(_price_shape(made))

    @router.delete(
        "/v1/prices", summary="Take a price off the list; what was granted before costs what it did"
    )
    @terms(Opens.OPERATOR, body=Body.JSON)
    async def remove_price(
        request: Request,
        device_class: Annotated[str, Query(min_length=1, max_length=100)],
        tier: Annotated[str, Query(max_length=40)] = "",
    ) -> Json:
        if not device_class.isprintable() or not tier.isprintable():
            raise BadInput("device_class and tier are printable")
        await service.work(lambda: ledger.remove_price(device_class, tier=tier, actor=actor_of(request)))
        return Json({"device_class": device_class, "tier": tier, "removed": True})


def _price_shape(price: Price) -> Shape:
    return {
        "device_class": price.device_class,
        "tier": price.tier,
        "per_gpu_hour": money(price.micro_per_gpu_hour),
        "valid_from": price.valid_from / 1e6,
    }
