"""`sublet serve` as a process: its first start, how it leaves, two of it on one ledger, and what a flood does
to the others."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sublet import wiring
from sublet.core.errors import Misconfigured
from sublet.core.leasing.tenancy import Tenant
from sublet.core.studio.session import SessionStatus, status
from sublet.core.studio.token import Scope
from sublet.ports.ledger import Ledger
from sublet.studio.holder import finding
from sublet.studio.serving import ListenAddress, check_address, first_operator_token
from sublet.studio.tokens import new_token
from tests import forked
from tests.homes import Home, close_home, make_home, wait_until
from tests.ledger.rig import Rig


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    token: str
    errors: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, method: str, path: str, token: str = "", body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            connection.close()

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(30)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return code


def serve(home: Home, *options: str) -> Served:
    process = forked.Forked(
        [sys.executable, "-m", "sublet", "serve", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=home.environment,
    )
    home.children.append(process)
    assert process.stdout is not None
    first = process.stdout.readline()
    found = re.search(r"https?://\S+", first)
    assert found, first + (process.stderr.read() if process.stderr else "")
    served = Served(process, found[0], "")
    threading.Thread(target=lambda: served.errors.extend(process.stderr or ()), daemon=True).start()
    threading.Thread(target=lambda: _rest(process, served), daemon=True).start()
    wait_until(lambda: _answers(served), 30)
    return served


def _rest(process: subprocess.Popen[str], served: Served) -> None:
    with contextlib.suppress(ValueError):
        for line in process.stdout or ():
            if "operator token:" in line:
                served.token = line.split()[-1]


def _answers(served: Served) -> bool:
    with contextlib.suppress(OSError):
        return served.ask("GET", "/healthz")[0] == 200
    return False


@pytest.fixture
def served_home(tmp_path: Path, ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    yield from _home(tmp_path, ledger_url, monkeypatch)


@pytest.fixture
def served_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    yield from _home(tmp_path, f"sqlite:{tmp_path}/home/ledger.db", monkeypatch)


def _home(tmp_path: Path, ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    made = make_home(tmp_path, ledger_url, monkeypatch, "host:1x16GiB")
    monkeypatch.setattr(finding, "spawn_detached", forked.spawn_detached)
    yield made
    for child in made.children:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
    pid = finding.session_host_pid(made.settings)
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    close_home(made)


def user_token(ledger: Ledger, tenant: str, scope: Scope = Scope.USER) -> str:
    ledger.add_tenant(Tenant(name=tenant), actor="test", exist_ok=True)
    new = new_token()
    ledger.add_token(new.id, new.digest, tenant, actor="test", scope=scope)
    return new.text


def test_the_first_start_prints_an_operators_token_once(served_here: Home) -> None:
    first = serve(served_here)
    wait_until(lambda: first.token)
    assert first.ask("GET", "/v1/me", first.token)[1]["scope"] == "operator"
    wait_until(lambda: first.ask("GET", "/readyz")[0] == 200)
    assert first.end() == 0
    second = serve(served_here)
    assert second.ask("GET", "/v1/me", first.token)[0] == 200
    assert second.end(signal.SIGINT) == 0
    assert not second.token
    assert first.token not in "".join(first.errors)
    text = (served_here.settings.home / "ledger.db").read_bytes()
    assert first.token.split("_")[2].encode() not in text


def test_a_new_operators_token_only_when_none_opens(rig: Rig) -> None:
    made = first_operator_token(rig.ledger)
    assert made
    assert first_operator_token(rig.ledger) == ""
    rig.ledger.revoke_token(made.split("_")[1], actor="test")
    assert first_operator_token(rig.ledger)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "studio.example"])
def test_it_does_not_listen_elsewhere_in_the_clear(host: str) -> None:
    with pytest.raises(Misconfigured, match="in the clear"):
        check_address(ListenAddress(host=host, port=80))
    check_address(ListenAddress(host=host, port=80, behind_proxy=True))
    check_address(ListenAddress(host=host, port=80, insecure=True))
    check_address(ListenAddress(host=host, port=80, certificate="c", key="k"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_it_listens_on_loopback(host: str) -> None:
    check_address(ListenAddress(host=host, port=80))


def test_half_of_tls_is_none() -> None:
    with pytest.raises(Misconfigured, match="certificate and its key"):
        check_address(ListenAddress(host="127.0.0.1", port=80, certificate="c"))


def test_leaving_says_so_ends_streams_lets_requests_finish_and_ends_with_0(served_here: Home) -> None:
    served = serve(served_here)
    ledger = wiring.open_ledger(served_here.settings)
    token = user_token(ledger, "ann")
    session = served.ask("POST", "/v1/sessions", token, {"vram": "1GiB"})[1]
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as stream:
        stream.sendall(
            f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
        assert b" 200 " in stream.recv(4096)
        polled: list[int] = []
        path = f"/v1/sessions/{session['id']}?wait=30"
        poll = threading.Thread(target=lambda: polled.append(served.ask("GET", path, token)[0]))
        poll.start()
        time.sleep(0.3)
        with http_kept(served.port) as ready:
            assert ready() == 200
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: ready() == 503)
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := stream.recv(4096):
                heard += piece
        assert b"event: leaving" in heard
    poll.join(60)
    assert polled == [200]
    assert served.end() == 0


@contextlib.contextmanager
def http_kept(port: int) -> Iterator[Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def ready() -> int:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        answer.read()
        return answer.status

    try:
        yield ready
    finally:
        connection.close()


def test_killed_it_loses_nothing_and_the_session_stays(served_here: Home) -> None:
    served = serve(served_here)
    ledger = wiring.open_ledger(served_here.settings)
    token = user_token(ledger, "ann")
    session = served.ask("POST", "/v1/sessions", token, {"vram": "1GiB"})[1]["id"]
    wait_until(lambda: served.ask("GET", f"/v1/sessions/{session}", token)[1]["status"] == "active")
    lease = served.ask("GET", f"/v1/sessions/{session}", token)[1]["lease_id"]
    served.end(signal.SIGKILL)
    again = serve(served_here)
    found = again.ask("GET", f"/v1/sessions/{session}", token)[1]
    assert (found["status"], found["lease_id"]) == ("active", lease)
    assert again.end() == 0


def test_two_instances_on_one_postgres(
    tmp_path: Path, postgres_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for home in _home(tmp_path, f"{postgres_server.url}&sublet_schema=two{os.getpid()}", monkeypatch):
        one = serve(home)
        two = serve(home)
        ledger = wiring.open_ledger(home.settings)
        token = user_token(ledger, "ann")
        session = one.ask("POST", "/v1/sessions", token, {"vram": "1GiB"})[1]
        seen = two.ask("GET", f"/v1/sessions/{session['id']}", token)[1]
        assert seen["id"] == session["id"]
        # What happens through one is heard at the other, from where the first was left.
        dashboard = one.ask("GET", "/v1/dashboard", token)[1]
        with socket.create_connection(("127.0.0.1", two.port), timeout=20) as stream:
            stream.sendall(
                f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nLast-Event-ID: {dashboard['id']}\r\n\r\n".encode()
            )
            one.ask("DELETE", f"/v1/sessions/{session['id']}", token)
            heard = b""
            while b"session.ended" not in heard:
                heard += stream.recv(4096)
        ledger.revoke_token(token.split("_")[1], actor="test")
        assert one.ask("GET", "/v1/me", token)[0] == two.ask("GET", "/v1/me", token)[0] == 401
        assert one.end() == two.end() == 0


CANARY_PATHS = ["/v1/sessions?token={}", "/v1/{}", "/{}", "/v1/sessions/{}", "/v1/events?after={}"]


def test_a_token_is_never_written_down(served_here: Home) -> None:
    """Threat 4: in no log, row, journal or environment, wherever somebody puts it."""
    served = serve(served_here)
    ledger = wiring.open_ledger(served_here.settings)
    token = user_token(ledger, "ann")
    secret = token.split("_")[2]
    for path in CANARY_PATHS:
        served.ask("GET", path.format(token), token)
        served.ask("GET", path.format(token))
    for body in (
        {"vram": token},
        {"vram": "1GB", "name": token},
        {"vram": "1GiB", "checkpoint": token[:60]},
        {token: 1},
    ):
        served.ask("POST", "/v1/sessions", token, body)
    session = served.ask("POST", "/v1/sessions", token, {"vram": "1GiB"})[1]["id"]
    wait_until(lambda: served.ask("GET", f"/v1/sessions/{session}", token)[1]["status"] == "active")
    environments = [Path(f"/proc/{served.process.pid}/environ").read_bytes()]
    pid = finding.session_host_pid(served_here.settings)
    environments.append(Path(f"/proc/{pid}/environ").read_bytes())
    assert served.end() == 0
    found = [
        p for p in served_here.settings.home.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()
    ]
    assert found == []
    assert secret not in "".join(served.errors)
    assert all(secret.encode() not in text for text in environments)
    lines = [json.loads(line) for line in served.errors if line.startswith("{")]
    assert len([x for x in lines if x["what"] == "request"]) >= 15
    assert all(x["route"].startswith(("/", "-")) for x in lines if x["what"] == "request")


def test_a_session_host_that_was_killed_is_started_again_though_nobody_asks(served_here: Home) -> None:
    """K3: whoever waits asks for nothing, and is served."""
    served = serve(served_here)
    ledger = wiring.open_ledger(served_here.settings)
    token = user_token(ledger, "ann")
    _, first = served.ask("POST", "/v1/sessions", token, {"vram": "12GiB"})
    wait_until(lambda: served.ask("GET", f"/v1/sessions/{first['id']}", token)[1]["status"] == "active")
    _, second = served.ask("POST", "/v1/sessions", token, {"vram": "12GiB"})
    wait_until(lambda: served.ask("GET", f"/v1/sessions/{second['id']}", token)[1]["status"] == "waiting")
    pid = finding.session_host_pid(served_here.settings)
    os.kill(pid, signal.SIGKILL)
    # Looked at in the ledger: a request would be a reason to start one.
    wait_until(lambda: status_of(ledger, second["id"]) is SessionStatus.ACTIVE)
    assert finding.session_host_pid(served_here.settings) not in (0, pid)
    assert status_of(ledger, first["id"]) is SessionStatus.SUSPENDED
    assert served.end() == 0


def status_of(ledger: Ledger, session_id: str) -> SessionStatus:
    found = ledger.look_session(session_id, "ann")
    return status(found.session, found.lease, found.at)
