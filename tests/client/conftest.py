"""A real studio: its service, its session host, its warden and its workers, all processes of their own; ended with the test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet import wiring
from sublet.core.leasing.lease import EndReason
from sublet.core.leasing.tenancy import Tenant
from sublet.core.studio.token import Scope
from sublet.ports.ledger import Ledger
from sublet.studio.holder import finding
from sublet.studio.tokens import new_token
from tests import forked
from tests.free_ports import free_port
from tests.homes import Home, close_home, make_home, process_is_gone, wait_until


@dataclass
class House:
    """One host with a studio on it."""

    home: Home
    port: int = field(default_factory=free_port)
    service: subprocess.Popen[Any] | None = None
    tokens: dict[str, str] = field(default_factory=dict)
    studios: list[sublet.Studio] = field(default_factory=list)
    options: list[str] = field(default_factory=list)  # of `sublet serve`

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ledger(self) -> Ledger:
        return wiring.open_ledger(self.home.settings)

    def start(self) -> None:
        log = open(self.home.settings.home / "service.log", "ab")  # noqa: SIM115
        command = [sys.executable, "-m", "sublet", "serve", "--port", str(self.port), "--rate", "0"]
        command += ["--address-rate", "0", *self.options]
        environment = {
            k: v for k, v in self.home.environment.items() if k not in ("SUBLET_URL", "SUBLET_TOKEN")
        }
        self.service = forked.Forked(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
        )
        log.close()
        wait_until(self.answers)

    def answers(self) -> bool:
        assert self.service is not None
        assert self.service.poll() is None, self.log()
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=10):
                return True
        except OSError:
            return False

    def log(self) -> str:
        return (self.home.settings.home / "service.log").read_text()

    def kill(self) -> None:
        """As a machine does: no goodbye."""
        assert self.service is not None
        self.service.send_signal(signal.SIGKILL)
        self.service.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def token(self, tenant: str = "ann", scope: Scope = Scope.USER) -> str:
        key = f"{tenant}:{scope.value}"
        if key not in self.tokens:
            self.ledger.add_tenant(Tenant(name=tenant), actor="test", exist_ok=True)
            new = new_token()
            self.ledger.add_token(new.id, new.digest, tenant, actor="test", scope=scope)
            self.tokens[key] = new.text
        return self.tokens[key]

    def connect(self, tenant: str = "ann", **options: Any) -> sublet.Studio:
        made = sublet.connect(self.url, self.token(tenant), **options)
        self.studios.append(made)
        return made

    def revoke(self, lease_id: str, *, grace_s: float = 0.0, detail: str = "ada needs it") -> None:
        self.ledger.revoke(
            lease_id, reason=EndReason.REVOKED, detail=detail, grace_us=int(grace_s * 1e6), actor="test"
        )

    def kill_session_host(self) -> None:
        pid = finding.session_host_pid(self.home.settings)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: process_is_gone(pid))

    def live_leases(self) -> list[Any]:
        return self.ledger.leases()

    def close(self) -> None:
        for studio in self.studios:
            with contextlib.suppress(Exception):
                studio.close()
        if self.service is not None:
            self.kill()
        self.kill_session_host()
        close_home(self.home)


def open_house(folder: Path, monkeypatch: pytest.MonkeyPatch, devices: str, **environment: str) -> House:
    home = make_home(folder, f"sqlite:{folder}/home/ledger.db", monkeypatch, devices)
    home.environment.update(environment)
    monkeypatch.setattr(finding, "spawn_detached", forked.spawn_detached)
    home.settings.home.mkdir(parents=True, exist_ok=True)
    house = House(home)
    # What a client on a laptop does not have.
    for name in ("SUBLET_HOME", "SUBLET_LEDGER", "SUBLET_DEVICES"):
        monkeypatch.setenv(name, f"/nowhere/{name.lower()}" if name != "SUBLET_DEVICES" else "none")
    house.start()
    return house


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    made = open_house(tmp_path, monkeypatch, "host:1x16GiB")
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for all tests of a file that leave it as they found it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = open_house(tmp_path_factory.mktemp("studio"), monkeypatch, "host:2x16GiB")
        yield made
        made.close()


def settled(house: House) -> None:
    wait_until(lambda: not house.live_leases())
