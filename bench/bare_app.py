"""A FastAPI app that does nothing but one SQL statement for a request: what a service costs before it is one.

Run as `python -m bench.bare_app LEDGER_URL PORT`; the server's settings are those of `sublet serve`.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import apsw
import uvicorn
import uvloop
from fastapi import FastAPI
from fastapi.responses import JSONResponse

#: About what a session's answer shows, and no more.
_COLUMNS = (
    "s.id", "s.name", "s.tenant", "s.asked_bytes", "s.tier", "s.checkpoint", "s.opened_at", "s.active_at", "s.version",
    "l.id", "l.state", "l.epoch", "l.vram_bytes", "l.slices", "l.expires_at",
)  # fmt: skip
_NAMES = [name.replace(".", "_") for name in _COLUMNS]
_SELECT = (
    f"SELECT {', '.join(_COLUMNS)} FROM studio_session s LEFT JOIN lease l ON l.id = s.lease_id "
    "WHERE s.id = {p} AND s.tenant = {p}"
)
_UPDATE = "UPDATE studio_session SET active_at = active_at + 1 WHERE id = {p} AND tenant = {p}"


def on_sqlite(app: FastAPI, path: str) -> None:
    """In the loop, as the studio does: a read of one row is shorter than a change of threads."""
    connection = apsw.Connection(path)
    connection.pragma("synchronous", "normal")
    connection.set_busy_timeout(5000)
    select, update = _SELECT.format(p="?"), _UPDATE.format(p="?")

    @app.get("/select/{session_id}")
    async def look(session_id: str) -> JSONResponse:
        [row] = connection.execute(select, (session_id, "operator")).fetchall()
        return JSONResponse(dict(zip(_NAMES, row, strict=True)))

    @app.get("/update/{session_id}")
    async def touch(session_id: str) -> JSONResponse:
        connection.execute(update, (session_id, "operator"))
        return JSONResponse({"changed": connection.changes()})


def on_postgres(app: FastAPI, url: str, schema: str) -> None:
    """In FastAPI's own threads, a connection for each."""
    import psycopg

    local = threading.local()
    select = _SELECT.format(p="%s")

    def connection() -> Any:
        if not hasattr(local, "found"):
            local.found = psycopg.connect(url, autocommit=True, prepare_threshold=1)
            local.found.execute(f'SET search_path = "{schema}"')
        return local.found

    @app.get("/select/{session_id}")
    def look(session_id: str) -> JSONResponse:
        row = connection().execute(select, (session_id, "operator")).fetchone()
        return JSONResponse(dict(zip(_NAMES, row, strict=True)))


def main() -> None:
    url, port = sys.argv[1], int(sys.argv[2])
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if url.startswith("sqlite:"):
        on_sqlite(app, url.removeprefix("sqlite:"))
    else:
        server, _, schema = url.partition("&sublet_schema=")
        on_postgres(app, server, schema)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=port,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
    )
    uvloop.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
