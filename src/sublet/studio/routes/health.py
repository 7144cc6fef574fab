"""Whether the service lives, and whether it can do its work."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from sublet.core.errors import SubletError
from sublet.studio.edge.auth import Access, terms
from sublet.studio.edge.wire import Json
from sublet.studio.service import Service

READY_SECONDS = 3.0


def add_health(router: APIRouter, service: Service) -> None:
    @router.get("/healthz", summary="The service runs")
    @terms(Access.ANYBODY, lean=True)
    async def healthz(request: Request) -> Json:
        return Json({"status": "ok"})

    @router.get("/readyz", summary="The ledger answers and sessions can be held; 503 says which does not")
    @terms(Access.ANYBODY, lean=True)
    async def readyz(request: Request) -> Json:
        checks = {"serving": "leaving" if service.leaving else "ok"}
        checks["ledger"] = await _checked(service, lambda: service.ledger.now() > 0)
        checks["session_host"] = await _checked(service, service.relay.alive)
        fine = all(found == "ok" for found in checks.values())
        return Json({"status": "ready" if fine else "not ready", "checks": checks}, 200 if fine else 503)


async def _checked(service: Service, look: object) -> str:
    """The state of one check, in words that reveal no address."""
    try:
        return "ok" if await service.checked(look, READY_SECONDS) else "unreachable"  # type: ignore[arg-type]
    except (SubletError, TimeoutError, OSError):
        return "unreachable"
