"""Running the service: the socket, the first token, and an orderly shutdown.

Rules of this file:
- A token never crosses the network in the clear: without TLS only this machine can connect, unless the
  operator says that a proxy does TLS, or that it does not matter.
- On shutdown the service first says so (`/readyz`), ends its streams, lets running requests finish within
  `LEAVE_SECONDS`, and exits with 0. Sessions go on in the session host.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import uvicorn

from sublet.core.errors import Misconfigured, SubletError
from sublet.core.leasing.tenancy import Tenant
from sublet.core.studio.isolation import HostIsolation
from sublet.core.studio.token import Scope, judge
from sublet.leases.warden.warden_process import ensure_warden
from sublet.ports.ledger import Ledger
from sublet.processes.sandbox.limits import step_aside
from sublet.settings import Settings
from sublet.studio.edge.app import make_app
from sublet.studio.edge.connection import connection_class
from sublet.studio.edge.http_edge import Network
from sublet.studio.edge.limits import EdgeLimits
from sublet.studio.edge.logs import LibraryLogHandler, ServiceLog
from sublet.studio.service import Service
from sublet.studio.tokens import new_token
from sublet.wiring import open_ledger, try_isolation

OPERATOR = "operator"
LEAVE_SECONDS = 10
#: The pause between reporting that it leaves and refusing connections, so that a load balancer notices.
NOTICE_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 30
BACKLOG = 1024
#: How long a thread that computes keeps the others waiting each time. The default of 5 ms adds up over the
#: many short turns of a request.
SWITCH_SECONDS = 0.0005
#: How often the service checks that the warden and the session host run.
HOST_LOOK_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    host: str
    port: int
    certificate: str = ""
    key: str = ""
    behind_proxy: bool = False
    insecure: bool = False

    @property
    def scheme(self) -> str:
        return "https" if self.certificate else "http"


def check_address(address: ListenAddress) -> None:
    if bool(address.certificate) != bool(address.key):
        raise Misconfigured(
            "TLS needs a certificate and its key", remedy="give both --tls-cert FILE and --tls-key FILE"
        )
    if address.certificate or address.behind_proxy or address.insecure or is_loopback(address.host):
        return
    raise Misconfigured(
        f"without TLS, tokens would cross the network to {address.host} in the clear for anybody to read",
        remedy="give --tls-cert and --tls-key, or --behind-proxy if a proxy in front does TLS, or "
        "--insecure for a trial",
    )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bound_socket(address: ListenAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address.host.strip("[]"), address.port))
    except (OSError, OverflowError) as e:
        sock.close()
        raise Misconfigured(
            f"port {address.port} of {address.host} cannot be taken: {getattr(e, 'strerror', None) or e}",
            remedy="give another one with --port",
        ) from e
    sock.listen(BACKLOG)
    return sock


def first_operator_token(ledger: Ledger) -> str:
    """A new token if no operator has a valid one, else ''. Its text exists only in the return value."""
    now = ledger.now()
    if any(t.scope is Scope.OPERATOR and not judge(t, now) for t in ledger.tokens()):
        return ""
    ledger.add_tenant(Tenant(name=OPERATOR), actor="serve", exist_ok=True)
    new = new_token()
    ledger.add_token(
        new.id, new.digest, OPERATOR, actor="serve", scope=Scope.OPERATOR, note="made at the first start"
    )
    return new.text


class StudioServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals as a request to leave, without raising them again: an orderly exit is no
        failure."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield  # a program that runs it in a thread calls `leave` itself
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def leave(self) -> None:
        if self._service.leaving:
            self.force_exit = self.should_exit = True  # asked twice: at once
            return
        self._service.log.event("leaving")
        self._service.leave()
        asyncio.get_running_loop().call_later(NOTICE_SECONDS, setattr, self, "should_exit", True)


def make_server(service: Service, address: ListenAddress, proxies: Sequence[Network]) -> StudioServer:
    config = uvicorn.Config(
        make_app(service, proxies),
        http=connection_class(service.unread),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LEAVE_SECONDS,
        ssl_certfile=address.certificate or None,
        ssl_keyfile=address.key or None,
    )
    return StudioServer(config, service)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """Where a service can be reached as soon as it runs."""

    url: str
    token: str  # the first operator's, or ''
    isolation: HostIsolation


def serve(
    settings: Settings,
    address: ListenAddress,
    limits: EdgeLimits,
    proxies: Sequence[Network],
    *,
    metrics_open: bool,
    on_open: Callable[[ServiceAddress], None],
) -> None:
    check_address(address)
    sys.setswitchinterval(SWITCH_SECONDS)
    ledger = open_ledger(settings)
    sock = bound_socket(address)
    log = ServiceLog()
    bridge = LibraryLogHandler(log)
    for name in ("uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [bridge], False
    try:
        token = first_operator_token(ledger)
        step_aside()  # before anything is started: what is started later is in the same group
        ensure_warden(settings, wait=False, for_pid=os.getpid())
        host = f"[{address.host}]" if ":" in address.host else address.host
        isolation = try_isolation(settings)
        url = f"{address.scheme}://{host}:{sock.getsockname()[1]}"
        on_open(ServiceAddress(url=url, token=token, isolation=isolation))
        _log_isolation(log, isolation)

        async def run() -> None:
            service = Service(
                ledger, settings, limits=limits, log=log, metrics_open=metrics_open, isolation=isolation
            )
            server = make_server(service, address, proxies)
            await asyncio.get_running_loop().run_in_executor(None, _start_session_host, service)
            keeping = asyncio.create_task(_keep_host_running(service))
            await server.serve([sock])
            keeping.cancel()

        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run())
    finally:
        sock.close()
        log.close()


def _log_isolation(log: ServiceLog, isolation: HostIsolation) -> None:
    level = "info" if isolation.separates or isolation.elsewhere else "warning"
    log.event("isolation", level=level, summary=isolation.summary, advice=isolation.advice)


async def _keep_host_running(service: Service) -> None:
    """Starts a killed warden or session host again, because clients that wait for a GPU send no request that
    would."""
    while True:
        await asyncio.sleep(HOST_LOOK_SECONDS)
        try:
            if service.leaving:
                continue
            # It stays while this process does: a waiter whose warden died is otherwise never served.
            await service.work(lambda: ensure_warden(service.settings, wait=False, for_pid=os.getpid()))
            if service.isolation.refused:
                service.isolation = await service.work(lambda: try_isolation(service.settings))
            if service.relay.alive():
                continue
            found = await service.work(lambda: service.ledger.host_sessions(service.host))
            if any(not answer.session.ended_at for answer in found):  # without sessions it leaves by itself
                await service.work(service.relay.ensure)
                service.log.event("session host", level="warning", error="it was gone, and was started again")
        except (SubletError, OSError) as e:  # a failed look is repeated later
            service.log.event("session host", level="warning", error=str(e))


def _start_session_host(service: Service) -> None:
    try:
        service.relay.ensure()
    except Misconfigured as e:
        service.log.event(
            "session host", level="error", error=e.message
        )  # readyz says so too; listings work without it


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop factory where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
