"""I1: no session of a second tenant runs where the boundary between the two is not in force.

The service is a real one, started as the manifests start it: a uid of its own, no capabilities, and a seccomp
filter that refuses namespaces; and as root, where everything is there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.core.errors import NotIsolated
from sublet.core.leasing.lease import Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.studio.isolation import NEEDED, NOT_CHECKED, IsolationMode, refusal, words_of
from sublet.core.studio.session import job_of
from sublet.settings import Setting, Settings, load_settings
from sublet.studio.holder.admission import admitted
from tests.conftest import need
from tests.free_ports import free_port
from tests.homes import process_is_gone
from tests.ledger.rig import Rig
from tests.processes.conftest import REPOSITORY, end_zygotes, one_of
from tests.processes.conftest import folder as folder
from tests.processes.conftest import workers as workers
from tests.studio.running import Running, add_device, running, settings_of

MANIFEST_UID = 10_001
PROCESSES = Path(__file__).parents[1] / "processes"
READS_THE_LEDGER = """
import sqlite3
found = sqlite3.connect('file:{path}?mode=ro', uri=True).execute('select tenant from token').fetchall()
print('tokens', len(found))
"""


@dataclass
class Contained:
    """`sublet serve`, started by this command, and what it printed."""

    home: Path
    prefix: list[str]
    port: int = field(default_factory=free_port)
    lines: list[str] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        own = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
        return own | {
            "SUBLET_HOME": str(self.home),
            "SUBLET_DEVICES": "host:1x16GiB",
            "SUBLET_HOST": f"iso-{self.home.parent.name}"[:60],
            "SUBLET_PRELOAD": "none",
            "PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def sublet(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self.prefix, "-m", "sublet", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
            env=self.environment,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def serve(self, *options: str) -> None:
        command = [*self.prefix, "-m", "sublet", "serve", "--port", str(self.port), *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            env=self.environment,
        )
        threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()), daemon=True).start()  # type: ignore[union-attr]
        give_up = time.monotonic() + 60
        while self.ask("/healthz") is None:
            assert self.process.poll() is None, "".join(self.lines)
            assert time.monotonic() < give_up, "".join(self.lines)
            time.sleep(0.05)

    def ask(self, path: str, tenant: str = "") -> Any:
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if tenant:
            asked.add_header("Authorization", f"Bearer {self.tokens[tenant]}")
        try:
            with urllib.request.urlopen(asked, timeout=10) as said:
                return json.loads(said.read())
        except (OSError, ValueError):
            return None

    def studio(self, tenant: str) -> sublet.Studio:
        self.sublet("tenant", "add", tenant)
        made = json.loads(self.sublet("tenant", "token", "add", tenant, "--json"))
        self.tokens[tenant] = made["token"]
        return sublet.connect(f"http://127.0.0.1:{self.port}", made["token"])

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        for lock in [*self.home.glob("session-host-*.lock"), *self.home.glob("warden-*.lock")]:
            pid = lock.read_text().split()[:1]
            if pid and pid[0].isdigit() and not process_is_gone(int(pid[0])):
                os.kill(int(pid[0]), signal.SIGKILL)
        end_zygotes(self.home)


@contextmanager
def contained(prefix: list[str], uid: int) -> Iterator[Contained]:
    with tempfile.TemporaryDirectory(prefix="sublet-iso-", dir="/tmp", ignore_cleanup_errors=True) as name:
        home = Path(name) / "home"
        home.mkdir(mode=0o700)
        os.chmod(name, 0o755)
        os.chown(home, uid, uid)
        made = Contained(home, prefix)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def as_manifest() -> Iterator[Contained]:
    """As the shipped containers run it: their uid, no namespaces, no capabilities."""
    need(os.uname().machine in ("x86_64", "aarch64"), "a machine whose system calls the filter knows")
    python = [sys.executable, str(PROCESSES / "as_manifest.py")]
    uid = os.getuid()
    if uid == 0:
        uid = MANIFEST_UID
        python = [sys.executable, str(PROCESSES / "as_user.py"), str(uid), *python[1:]]
    with contained(python, uid) as made:
        yield made


@pytest.fixture
def as_root() -> Iterator[Contained]:
    need(os.getuid() == 0, "root")
    with contained([sys.executable], 0) as made:
        yield made


def printed(session: sublet.Session, code: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    session.run_code(code)
    return capsys.readouterr().out.strip()


# --- where nothing separates tenants ---


def test_the_shipped_container_admits_one_tenant_and_refuses_the_second(
    as_manifest: Contained, capsys: pytest.CaptureFixture[str]
) -> None:
    as_manifest.serve()
    with ExitStack() as stack:
        ann, ben = (stack.enter_context(as_manifest.studio(name)) for name in ("ann", "ben"))
        session = ann.session(vram="1GiB").wait_until_active()
        assert printed(session, "print(6 * 7)", capsys) == "42"
        for _ in range(2):
            with pytest.raises(NotIsolated, match="another tenant has sessions") as refused:
                ben.session(vram="1GiB")
            assert "nothing was started" in refused.value.message
            assert "one of your own" in refused.value.remedy
            assert printed(session, "print('still there')", capsys) == "still there"
            session.end()  # what it left can be reached all the same
            session = ann.session(vram="1GiB").wait_until_active()
    said = "".join(as_manifest.lines)
    assert "one tenant only: this host has no own uid, hidden home" in said
    assert "limited memory" in said


def test_what_is_missing_is_shown_wherever_one_looks(as_manifest: Contained) -> None:
    as_manifest.serve("--metrics-open")
    ready = as_manifest.ask("/readyz")
    assert ready["isolation"]["mode"] == "required"
    assert ready["isolation"]["separates"] is False
    assert {"own uid", "hidden home", "limited memory"} <= set(ready["isolation"]["missing"])
    assert "same uid" in ready["isolation"]["in_force"]
    assert str(as_manifest.home) not in json.dumps(ready)
    with urllib.request.urlopen(f"http://127.0.0.1:{as_manifest.port}/metrics", timeout=10) as page:
        metrics = page.read().decode()
    assert 'sublet_isolation_in_force{boundary="own uid"} 0' in metrics
    with as_manifest.studio("ann") as ann:
        ann.session(vram="1GiB").wait_until_active().end()
        [facts] = as_manifest.ask("/v1/sessions?open=false", "ann")["sessions"]
    assert facts["isolation"]["separates"] is False


def test_none_by_name_lets_people_in_who_can_then_read_everything(
    as_manifest: Contained, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the refusal is for: this cell belongs to a user, and counts the operator's tokens."""
    as_manifest.serve("--isolation", "none")
    with ExitStack() as stack:
        ann, ben = (stack.enter_context(as_manifest.studio(name)) for name in ("ann", "ben"))
        ann.session(vram="1GiB").wait_until_active()
        theirs = ben.session(vram="1GiB").wait_until_active()
        code = READS_THE_LEDGER.format(path=as_manifest.home / "ledger.db")
        assert printed(theirs, code, capsys).startswith("tokens ")
    assert "NOT kept apart" in "".join(as_manifest.lines)


# --- where everything does ---


def test_as_root_two_tenants_are_kept_apart_and_their_receipts_say_how(
    as_root: Contained, capsys: pytest.CaptureFixture[str]
) -> None:
    as_root.serve("--metrics-open")
    found = as_root.ask("/readyz")["isolation"]
    need(found["separates"], f"what keeps tenants apart here: {', '.join(found['missing'])}")
    with ExitStack() as stack:
        ann, ben = (stack.enter_context(as_root.studio(name)) for name in ("ann", "ben"))
        hers, his = (x.session(vram="1GiB").wait_until_active() for x in (ann, ben))
        assert printed(hers, "import os; print(os.getuid())", capsys) != printed(
            his, "import os; print(os.getuid())", capsys
        )
        code = "import os\ntry: print(os.listdir({!r}))\nexcept OSError as e: print(type(e).__name__)"
        assert "ledger.db" not in printed(his, code.format(str(as_root.home)), capsys)
        [facts] = as_root.ask("/v1/sessions", "ben")["sessions"]
        assert facts["isolation"]["separates"] is True
        lease = his.lease_id
        his.end()
        give_up = time.monotonic() + 20
        receipts: list[dict[str, Any]] = []
        while not receipts and time.monotonic() < give_up:
            rows = json.loads(as_root.sublet("ps", "--receipts", "--json"))
            receipts = [row for row in rows if row["lease_id"] == lease]
            time.sleep(0.2)
        words = words_of(receipts[0]["containment"])
        assert [boundary.name for boundary in NEEDED if not boundary.in_force(words)] == []
        assert "4096 processes by cgroup" in words
    assert "tenants are kept apart by" in "".join(as_root.lines)


# --- the two places that refuse ---


def opened(rig: Rig, tenant: str, *, alone: bool = True) -> str:
    rig.ledger.add_tenant(Tenant(name=tenant), actor="test", exist_ok=True)
    session_id = f"S{os.urandom(10).hex()}"
    rig.open().open_session(
        session_id,
        tenant,
        request=Request(tenant=tenant, vram_bytes=1 << 30, ttl_us=60_000_000, job=job_of(tenant, session_id)),
        warm_us=60_000_000,
        host="here",
        alone=refusal(NEEDED) if alone else None,
    )
    return session_id


def test_of_two_tenants_who_come_at_once_one_is_admitted(rig: Rig) -> None:
    """I1, on one ledger, by whichever service; the refused one left nothing."""
    for tenant in ("ann", "ben"):
        rig.ledger.add_tenant(Tenant(name=tenant), actor="test")
    outcomes: list[str] = []

    def come(tenant: str) -> None:
        try:
            opened(rig, tenant)
            outcomes.append("admitted")
        except NotIsolated:
            outcomes.append("refused")

    threads = [threading.Thread(target=come, args=(tenant,)) for tenant in ("ann", "ben")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["admitted", "refused"]
    assert len(rig.ledger.sessions(open_only=False)) == 1
    first = rig.ledger.sessions()[0].session.tenant
    assert opened(rig, first)  # the one who is there may have more
    assert not rig.ledger.others_have_sessions(first)


def test_whoever_was_there_first_stays_alone_after_leaving(rig: Rig) -> None:
    """I1: its checkpoints are still there, and nothing would keep the next one from them."""
    session_id = opened(rig, "ann")
    rig.ledger.end_session(session_id, "ann", detail="enough", actor="test")
    with pytest.raises(NotIsolated):
        opened(rig, "ben")
    assert opened(rig, "ann")


def test_the_answer_over_http_says_what_happened_and_names_no_path(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "home" / "run").mkdir(parents=True)
    add_device(rig.ledger)
    settings = settings_of(load_settings(), rig.url, str(tmp_path / "home"))
    with running(rig.ledger, settings, isolation=NOT_CHECKED) as studio:
        assert _open(studio, "ann") == (201, "")
        status, code = _open(studio, "ben")
        assert (status, code) == (409, "not_isolated")
        assert _open(studio, "ann") == (201, "")


def _open(studio: Running, tenant: str) -> tuple[int, str]:
    said = studio.ask("POST", "/v1/sessions", studio.token(tenant), {"vram": "1GiB"})
    return said.status, said.json.get("code", "")


def test_the_worker_itself_is_judged_before_it_is_anybodys(rig: Rig, workers: Any) -> None:
    """I1, whoever opened it: a service that was wrong about this machine, or one of another host."""
    settings = load_settings()

    def of(mode: str) -> Settings:
        return Settings({**settings.values, "isolation": Setting("isolation", mode, "test")})

    opened(rig, "ann", alone=False)
    with one_of(workers) as worker:  # it is not sandboxed at all
        assert admitted(of("required"), rig.ledger, worker, "ann") is worker
        assert admitted(of("none"), rig.ledger, worker, "ben") is worker
        with pytest.raises(NotIsolated, match="own uid"):
            admitted(of("required"), rig.ledger, worker, "ben")
        assert worker.ending == "it is not kept apart from another tenant"


def test_the_mode_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUBLET_ISOLATION", raising=False)
    assert load_settings()["isolation"] == IsolationMode.REQUIRED.value
    monkeypatch.setenv("SUBLET_ISOLATION", "maybe")
    with pytest.raises(sublet.errors.BadInput, match="required or none"):
        load_settings()
