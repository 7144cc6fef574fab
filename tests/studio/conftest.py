"""A home with a warden and a session host of its own for each test, both ended with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sublet import wiring
from sublet.core.leasing.lease import Request, Tier
from sublet.core.leasing.tenancy import Tenant
from sublet.core.studio.session import SessionStatus, job_of, status
from sublet.ports.ledger import Ledger, SessionAnswer
from sublet.settings import Settings, load_settings
from sublet.studio.holder import finding
from tests import forked
from tests.homes import Home, close_home, make_home, process_is_gone, wait_until
from tests.ledger.conftest import postgres as postgres
from tests.ledger.conftest import rig as rig
from tests.ledger.conftest import sqlite as sqlite
from tests.ledger.rig import Rig
from tests.studio.running import Running, add_device, running, settings_of

GIB = 1 << 30
SECOND = 1_000_000


@dataclass
class HostedSessions:
    """What the tests of sessions stand on."""

    home: Home
    ledger: Ledger

    @property
    def settings(self) -> Settings:
        return self.home.settings

    def open(
        self,
        tenant: str = "ann",
        vram: int = 8 * GIB,
        *,
        ttl_us: int = 60 * SECOND,
        warm_us: int = 0,
        wait_us: int | None = None,
        offers: bool = False,
        tier: Tier = Tier.INTERACTIVE,
        checkpoint: str = "",
    ) -> str:
        self.ledger.add_tenant(Tenant(name=tenant), actor="test", exist_ok=True)
        session_id = f"S{secrets.token_hex(10)}"
        request = Request(
            tenant=tenant,
            vram_bytes=vram,
            ttl_us=ttl_us,
            wait_us=wait_us,
            wants_offers=offers,
            tier=tier,
            host=self.settings["host"],
            job=job_of(tenant, session_id, checkpoint),
        )
        self.ledger.open_session(
            session_id,
            tenant,
            request=request,
            warm_us=warm_us or ttl_us,
            host=self.settings["host"],
            checkpoint=checkpoint,
        )
        return session_id

    def look(self, session_id: str, tenant: str = "ann") -> SessionAnswer:
        return self.ledger.look_session(session_id, tenant)

    def status(self, session_id: str, tenant: str = "ann") -> SessionStatus:
        found = self.look(session_id, tenant)
        return status(found.session, found.lease, found.at)

    def becomes(self, wanted: str, session_id: str, tenant: str = "ann") -> SessionAnswer:
        wait_until(lambda: self.status(session_id, tenant).value == wanted)
        return self.look(session_id, tenant)

    def kill_session_host(self, number: int = signal.SIGKILL) -> int:
        pid = finding.session_host_pid(self.settings)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            wait_until(lambda: process_is_gone(pid))
        return pid


@pytest.fixture
def hosted(tmp_path: Path, ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostedSessions]:
    yield from _hosted(tmp_path, ledger_url, monkeypatch)


@pytest.fixture
def hosted_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostedSessions]:
    """On SQLite only."""
    yield from _hosted(tmp_path, f"sqlite:{tmp_path}/home/ledger.db", monkeypatch)


def _hosted(tmp_path: Path, ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostedSessions]:
    home = make_home(tmp_path, ledger_url, monkeypatch, "host:1x16GiB")
    monkeypatch.setattr(finding, "spawn_detached", forked.spawn_detached)
    made = HostedSessions(home, wiring.open_ledger(home.settings))
    finding.ensure_session_host(home.settings)
    yield made
    made.kill_session_host()
    close_home(home)


@pytest.fixture
def studio(rig: Rig, tmp_path: Path) -> Iterator[Running]:
    """A service on each engine, with one device and nobody attending."""
    yield from _studio(rig, tmp_path)


@pytest.fixture
def studio_here(sqlite: Rig, tmp_path: Path) -> Iterator[Running]:
    """On SQLite only."""
    yield from _studio(sqlite, tmp_path)


def _studio(rig: Rig, tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "home" / "run").mkdir(parents=True)
    add_device(rig.ledger)
    with running(rig.ledger, settings_of(load_settings(), rig.url, str(tmp_path / "home"))) as found:
        yield found
