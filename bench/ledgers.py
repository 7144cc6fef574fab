"""Ledgers to measure: a new one on each engine, with a tenant and a host in it."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sublet.core.leasing.lease import Holder, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.progress.effect import Commit
from sublet.ledger.ledger import SqlLedger
from sublet.ports.ledger import FoundDevice, LeaseKey
from sublet.processes.clock import HostClock

if TYPE_CHECKING:
    from sublet.testing.postgres import PostgresServer

GIB = 1 << 30
TENANT = "lab"
SECRET = "only-for-measuring"
TTL_US = 300_000_000


def on_sqlite(path: Path) -> SqlLedger:
    from sublet.ledger.engines.sqlite.engine import open_ledger

    return open_ledger(f"sqlite:{path}", HostClock())


@contextlib.contextmanager
def postgres_server(place: Path) -> Iterator[str]:
    """Its URL. The data lies at `place`, so on the disk that everything else is measured on."""
    with running_postgres(place) as server:
        yield server.url


@contextlib.contextmanager
def running_postgres(place: Path) -> Iterator[PostgresServer]:
    from sublet.testing.postgres import PostgresServer

    before, tempfile.tempdir = tempfile.tempdir, str(place)
    try:
        server = PostgresServer()
    finally:
        tempfile.tempdir = before
    try:
        server.start()
        yield server
    finally:
        server.stop()


def on_postgres(url: str, schema: str) -> SqlLedger:
    from sublet.ledger.engines.postgres.engine import open_ledger

    return open_ledger(f"{url}&sublet_schema={schema}", HostClock())


def furnish(ledger: SqlLedger, *, devices: int = 2, per_host: int = 8, capacity: int = 16 * GIB) -> list[str]:
    """One tenant, and devices spread over hosts. Returns the hosts."""
    ledger.add_tenant(Tenant(name=TENANT), actor="bench")
    hosts = []
    for start in range(0, devices, per_host):
        host = f"host-{start // per_host:04d}"
        found = [
            FoundDevice(
                id=f"{host}-gpu-{i}", driver="host", ordinal=i, name="measured", capacity_bytes=capacity
            )
            for i in range(min(per_host, devices - start))
        ]
        ledger.report_host(host, found)
        hosts.append(host)
    return hosts


_numbers = itertools.count(1)


def new_id() -> str:
    return f"lease-{os.getpid()}-{next(_numbers):08d}"


def lease_cycle(ledger: SqlLedger, host: str, *, all_durable: bool = False) -> Callable[[], None]:
    """Acquire, renew, release. A barrier after a relaxed verb makes it durable too."""
    request = Request(tenant=TENANT, vram_bytes=8 * GIB, ttl_us=TTL_US, host=host)
    holder = Holder(host=host)

    def cycle() -> None:
        lease_id = new_id()
        answer = ledger.acquire(lease_id, SECRET, request, holder)
        ledger.renew(LeaseKey(lease_id, answer.lease.epoch, SECRET))
        if all_durable:
            ledger.barrier()
        ledger.release(lease_id, SECRET)
        if all_durable:
            ledger.barrier()

    return cycle


def step_cycle(ledger: SqlLedger, host: str) -> Callable[[], None]:
    """Commit the next step of a job: fence, head, effect, journal in one transaction."""
    request = Request(tenant=TENANT, vram_bytes=GIB // 64, ttl_us=TTL_US, host=host)
    lease_id = new_id()
    lease = ledger.acquire(lease_id, SECRET, request, Holder(host=host)).lease
    key = LeaseKey(lease_id, lease.epoch, SECRET)
    job = f"job-{lease_id}"
    numbers = itertools.count(1)

    def cycle() -> None:
        step = next(numbers)
        ledger.commit(
            key,
            Commit(
                job=job,
                key=f"{job}:{step}",
                step=step,
                fingerprint="f" * 16,
                expected_version=step - 1,
                digest="d" * 64,
            ),
        )

    return cycle
