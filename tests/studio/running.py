"""A real service on the loopback, in a thread of the test's process: real server, real ledger, real sockets.

Rules of this file:
- Nobody attends its sessions: they stay `opening` or what the test makes of them in the ledger. Tests of
  calls have a real session host.
- Limits are wide unless a test says otherwise, so that only its subject is limited.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import secrets
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sublet.core.leasing.lease import Holder, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.studio.isolation import HostIsolation, IsolationMode
from sublet.core.studio.session import job_of
from sublet.core.studio.token import Scope
from sublet.ports.ledger import FoundDevice, Ledger
from sublet.settings import Setting, Settings
from sublet.studio.edge.limits import EdgeLimits
from sublet.studio.edge.logs import ServiceLog
from sublet.studio.edge.relay import SessionHostRelay
from sublet.studio.service import Service
from sublet.studio.serving import ListenAddress, StudioServer, make_server
from sublet.studio.tokens import new_token

GIB = 1 << 30
HOST = "node-a"
WIDE = EdgeLimits(address_rate=0, tenant_rate=0, penalty_seconds=0.0, read_share=0.0)


#: Its tenants trust each other, because no code of theirs runs.
TRUSTING = HostIsolation(mode=IsolationMode.NONE)


class Unattended(SessionHostRelay):
    """Sessions are only recorded."""

    def ensure(self) -> None:
        return

    def alive(self) -> bool:
        return True


@dataclass
class Said:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["code"])


@dataclass
class Running:
    service: Service
    ledger: Ledger
    port: int
    server: StudioServer
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    lines: list[str]
    tokens: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        method: str,
        path: str,
        token: str | None = None,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
        timeout: float = 30.0,
    ) -> Said:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        given = dict(headers or {})
        if token is not None:
            given["Authorization"] = f"Bearer {token}"
        data = raw
        if raw:
            given.setdefault("Content-Type", "application/json")
        if body is not None:
            data = json.dumps(body).encode()
            given.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            return Said(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def token(self, tenant: str, scope: Scope = Scope.USER) -> str:
        """One for each, made when it is first asked for."""
        key = f"{tenant} {scope.value}"
        if key not in self.tokens:
            self.ledger.add_tenant(Tenant(name=tenant), actor="test", exist_ok=True)
            new = new_token()
            self.ledger.add_token(new.id, new.digest, tenant, actor="test", scope=scope)
            self.tokens[key] = new.text
        return self.tokens[key]

    @property
    def operator(self) -> str:
        return self.token("operator", Scope.OPERATOR)

    def log(self) -> str:
        self.service.log.flush()
        return "".join(self.lines)

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.leave)
            self.thread.join(20)
            assert not self.thread.is_alive()


def settings_of(base: Settings, ledger_url: str, home: str) -> Settings:
    given = {"ledger": ledger_url, "home": home, "host": HOST, "store": f"dir:{home}/store", "price": ""}
    return replace(base, values={**base.values, **{n: Setting(n, v, "test") for n, v in given.items()}})


@contextmanager
def running(
    ledger: Ledger,
    settings: Settings,
    limits: EdgeLimits = WIDE,
    *,
    relay: SessionHostRelay | None = None,
    metrics_open: bool = False,
    isolation: HostIsolation = TRUSTING,
    proxies: Any = (),
) -> Iterator[Running]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    lines: list[str] = []
    made: list[Any] = []
    ready = threading.Event()

    async def main() -> None:
        service = Service(
            ledger,
            settings,
            limits=limits,
            log=ServiceLog(lines.append),
            metrics_open=metrics_open,
            warden=lambda: None,
            isolation=isolation,
        )
        server = make_server(service, ListenAddress(host="127.0.0.1", port=port), proxies)
        service.relay = relay or Unattended(settings)
        made.extend([service, server, asyncio.get_running_loop()])
        asyncio.get_running_loop().create_task(_started(server))
        await server.serve([listener])

    async def _started(server: StudioServer) -> None:
        while not server.started:
            await asyncio.sleep(0.005)
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name=f"service-{port}", daemon=True)
    thread.start()
    assert ready.wait(60)
    found = Running(made[0], ledger, port, made[1], made[2], thread, lines)
    try:
        yield found
    finally:
        found.stop()


# --- arranging in the ledger ---


def add_device(ledger: Ledger, name: str = "node-a-gpu0", gb: int = 80) -> None:
    ledger.report_host(
        HOST,
        [FoundDevice(id=name, driver="host", ordinal=0, name="a device", capacity_bytes=gb * GIB)],
        complete=False,
    )


def add_session(
    ledger: Ledger, tenant: str, *, host: str = HOST, checkpoint: str = "", name: str = ""
) -> str:
    session_id = f"S{secrets.token_hex(10)}"
    wish = Request(
        tenant=tenant,
        vram_bytes=GIB,
        ttl_us=300_000_000,
        host=host,
        job=job_of(tenant, session_id, checkpoint),
    )
    ledger.open_session(
        session_id, tenant, request=wish, warm_us=300_000_000, host=host, name=name, checkpoint=checkpoint
    )
    return session_id


def give_lease(ledger: Ledger, session_id: str, tenant: str, number: int = 1) -> str:
    """As a session host would: bound, then asked for."""
    wish = ledger.look_session(session_id, tenant).session.request
    lease_id = f"L{uuid.uuid4().hex[:20]}"
    ledger.bind_session(session_id, number=number, lease_id=lease_id)
    ledger.acquire(lease_id, f"secret-{lease_id}", wish, Holder(host=HOST))
    return lease_id
