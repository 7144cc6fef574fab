"""The routes of saved states: what a tenant's sessions saved, by name.

Rules of this file:
- A name always means the caller's own: the tenant is part of the job's name, and comes from the token.
- Bytes are returned as they were saved.
"""

from __future__ import annotations

import threading
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from sublet.core.errors import NotFound
from sublet.core.studio.session import job_of
from sublet.core.values import check_name
from sublet.store.checkpoints import CheckpointStore
from sublet.studio.edge.auth import Access, credential, terms
from sublet.studio.edge.wire import Json
from sublet.studio.routes.state import load_state
from sublet.studio.service import Service
from sublet.wiring import checkpoints


def add_checkpoints(router: APIRouter, service: Service) -> None:
    ledger = service.ledger
    opened: list[CheckpointStore] = []
    lock = threading.Lock()

    def store() -> CheckpointStore:
        with lock:
            if not opened:
                opened.append(checkpoints(settings=service.settings))
            return opened[0]

    @router.get("/v1/checkpoints", summary="What your sessions saved, by name")
    @terms(Access.USER)
    async def list_checkpoints(request: Request) -> Json:
        tenant = credential(request).tenant
        mine = f"studio/{tenant}/"
        heads = await service.work(lambda: ledger.heads(tenant=tenant))
        return Json(
            {
                "checkpoints": [
                    {
                        "name": head.job.removeprefix(mine),
                        "job": head.job,
                        "version": head.version,
                        "step": head.step,
                        "committed_at": head.committed_at / 1e6,
                    }
                    for head in heads
                    if head.job.startswith(mine)
                ]
            }
        )

    @router.get("/v1/checkpoints/{name}", summary="The bytes of the tree that was saved last, or ?version=")
    @terms(Access.USER)
    async def one(
        request: Request, name: str, version: Annotated[int, Query(ge=0, le=1 << 53)] = 0
    ) -> Response:
        tenant = credential(request).tenant
        gone = NotFound("there is no such checkpoint", remedy="GET /v1/checkpoints lists yours")
        try:
            job = job_of(tenant, "", check_name(name, what="checkpoint"))
        except ValueError:
            raise gone from None
        head = await service.work(lambda: ledger.head(job))
        if head is None or head.tenant != tenant:
            raise gone
        found = await service.work(lambda: load_state(store(), ledger, job, version or None))
        if found is None:
            raise gone
        return Response(
            found, media_type="application/octet-stream", headers={"X-Version": str(version or head.version)}
        )
