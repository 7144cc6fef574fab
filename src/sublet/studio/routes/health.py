"""Whether the service lives, and whether it can do its work."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from sublet.json_shapes import isolation_json
from sublet.studio.edge.auth import Access, terms
from sublet.studio.edge.wire import Json
from sublet.studio.readiness import OK
from sublet.studio.service import Service


def add_health(router: APIRouter, service: Service) -> None:
    @router.get("/healthz", summary="The service runs")
    @terms(Access.ANYBODY, lean=True)
    async def healthz(request: Request) -> Json:
        return Json({"status": "ok"})

    @router.get(
        "/readyz",
        summary="The ledger can be written, sessions can be held, the warden turns; 503 says which does not",
    )
    @terms(Access.ANYBODY, lean=True)
    async def readyz(request: Request) -> Json:
        checks = await service.readiness.checks()
        fine = all(found == OK for found in checks.values())
        isolation = service.isolation
        body = {
            "status": "ready" if fine else "not ready",
            "checks": checks,
            "isolation": {**isolation_json(isolation), "summary": isolation.summary},
        }
        return Json(body, 200 if fine else 503)
