"""A home of its own for each test, on each engine, with a real warden that is ended with the test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sublet import wiring
from sublet.functions import on_gpu
from sublet.leases.warden import warden_process
from sublet.processes.worker import workers
from sublet.settings import Settings, load_settings
from tests import forked
from tests.waiting import wait_until


@dataclass
class Home:
    settings: Settings
    environment: dict[str, str]
    children: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, code: str, *args: str, **environment: str) -> subprocess.Popen[str]:
        """A real process running this code, its standard output to be read line by line."""
        child = forked.Forked(
            [sys.executable, "-u", "-c", textwrap.dedent(code), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment | environment,
        )
        self.children.append(child)
        return child

    def warden_pid(self) -> int:
        return warden_process.warden_state(self.settings)[2]

    def end_warden(self, number: int = signal.SIGKILL) -> int:
        """Also one that is only starting: it has no number yet, or takes the place of the one that was told."""
        pid = self.warden_pid()
        told = {0}

        def over() -> bool:
            running, _, now = warden_process.warden_state(self.settings)
            if running and now not in told:
                told.add(now)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(now, number)
            return not running

        wait_until(over)
        return pid

    def zygote_pids(self) -> list[int]:
        found = []
        for lock in (self.settings.home / "run").glob("zygote-*.lock"):
            text = lock.read_text().strip()
            if text.isdigit() and not process_is_gone(int(text)):
                found.append(int(text))
        return found

    def end_zygotes(self) -> None:
        for pid in self.zygote_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def process_is_gone(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return text[text.rindex(")") + 2] == "Z"


def make_home(tmp_path: Path, ledger: str, monkeypatch: pytest.MonkeyPatch, devices: str) -> Home:
    values = {
        "SUBLET_HOME": str(tmp_path / "home"),
        "SUBLET_LEDGER": ledger,
        "SUBLET_DEVICES": devices,
        # Device memory is looked for machine-wide: each home must have devices of its own.
        "SUBLET_HOST": f"h{uuid.uuid4().hex[:8]}",
        # Tenants of these tests trust each other, wherever they run. Tests of what separates them say otherwise.
        "SUBLET_ISOLATION": "none",
        "SUBLET_PRELOAD": "none",  # a zygote that is up in a moment; tests that want torch say so
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    forked.warm()
    for module in (warden_process, workers):
        monkeypatch.setattr(module, "spawn_detached", forked.spawn_detached)
    return Home(load_settings(), dict(os.environ) | values)


def close_home(home: Home) -> None:
    for child in home.children:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
    on_gpu.release_warm()
    home.end_warden()
    home.end_zygotes()
    wiring.close_all()


@pytest.fixture(params=["sqlite", "postgres"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ledger_url(engine: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if engine == "sqlite":
        return f"sqlite:{tmp_path}/home/ledger.db"
    server = request.getfixturevalue("postgres_server")
    return f"{server.url}&sublet_schema=t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def home(tmp_path: Path, ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    made = make_home(tmp_path, ledger_url, monkeypatch, "host:1x16GiB")
    yield made
    close_home(made)


@pytest.fixture
def sqlite_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    made = make_home(tmp_path, f"sqlite:{tmp_path}/home/ledger.db", monkeypatch, "host:1x16GiB")
    yield made
    close_home(made)
