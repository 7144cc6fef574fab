"""Everything that goes wrong has one shape, and says nothing of the inside."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sublet.core import errors
from sublet.core.errors import NotDurable, SubletError, error_tree
from sublet.core.leasing.stamp import LedgerState, Stamp
from sublet.ledger.engines.stamp_file import packed
from sublet.processes.loop_watch import ProcessHealth
from sublet.settings import load_settings
from sublet.studio import readiness
from sublet.studio.edge.wire import STATUS, refusal, status_of, told
from tests.homes import wait_until
from tests.ledger.rig import Rig
from tests.studio.running import Running, running, settings_of

INSIDE = re.compile(r"/home/|/tmp/|/work/|/usr/|postgresql:|sqlite:|Traceback|File \"|\.py\b|psycopg|apsw")


def check_shape(body: bytes, headers: dict[str, str]) -> dict[str, str]:
    found = json.loads(body)
    assert set(found) == {"code", "message", "remedy", "id"}
    assert all(isinstance(v, str) for v in found.values())
    assert found["code"]
    assert found["message"]
    assert found["id"] == headers["x-request-id"]
    assert headers["content-type"] == "application/json"
    assert not INSIDE.search(body.decode()), body
    return found


BAD: list[tuple[str, str, dict[str, Any], int, str]] = [
    # what, (method path), how it is sent, status, code
    ("unknown path", "GET /nothing/here", {}, 404, "not_found"),
    ("unknown path below v1", "GET /v1/nothing", {"token": True}, 404, "not_found"),
    ("trailing slash", "GET /v1/sessions/", {"token": True}, 404, "not_found"),
    ("dots", "GET /page/..%2f..%2fapp.py", {}, 404, "not_found"),
    ("a page that is not there", "GET /page/app.py", {}, 404, "not_found"),
    ("wrong method", "PATCH /v1/sessions", {"token": True}, 405, "method_not_allowed"),
    ("options", "OPTIONS /v1/sessions", {}, 405, "method_not_allowed"),
    ("trace", "TRACE /v1/sessions", {}, 405, "method_not_allowed"),
    ("no token", "GET /v1/sessions", {}, 401, "unauthorized"),
    (
        "a wrong token",
        "GET /v1/sessions",
        {"headers": {"Authorization": "Bearer sublet_x"}},
        401,
        "unauthorized",
    ),
    ("another scheme", "GET /v1/sessions", {"headers": {"Authorization": "Basic YTpi"}}, 401, "unauthorized"),
    ("an empty token", "GET /v1/sessions", {"headers": {"Authorization": "Bearer "}}, 401, "unauthorized"),
    ("token in the address", "GET /v1/sessions?token=TOKEN", {}, 401, "unauthorized"),
    ("a user at an operator's", "GET /v1/tenants", {"token": True}, 403, "forbidden"),
    ("no JSON", "POST /v1/sessions", {"token": True, "raw": b"{nope"}, 400, "bad_input"),
    ("not UTF-8", "POST /v1/sessions", {"token": True, "raw": b'{"vram":"\xff\xfe"}'}, 400, "bad_input"),
    (
        "NUL",
        "POST /v1/sessions",
        {"token": True, "body": {"vram": "1GB", "name": "a\x00b"}},
        422,
        "bad_input",
    ),
    (
        "an escape",
        "POST /v1/sessions",
        {"token": True, "body": {"vram": "1GB", "name": "\x1b[2J"}},
        422,
        "bad_input",
    ),
    (
        "half a surrogate",
        "POST /v1/sessions",
        {"token": True, "raw": b'{"vram":"1GB","name":"\\ud800"}'},
        422,
        "bad_input",
    ),
    ("deep JSON", "POST /v1/sessions", {"token": True, "raw": b"[" * 100_000}, 400, "bad_input"),
    (
        "a huge number",
        "POST /v1/sessions",
        {"token": True, "raw": b'{"vram":' + b"9" * 5000 + b"}"},
        400,
        "bad_input",
    ),
    ("NaN", "POST /v1/sessions", {"token": True, "raw": b'{"vram":"1GB","ttl":NaN}'}, 422, "bad_input"),
    ("no body", "POST /v1/sessions", {"token": True}, 422, "bad_input"),
    ("a list", "POST /v1/sessions", {"token": True, "body": []}, 422, "bad_input"),
    (
        "an unknown field",
        "POST /v1/sessions",
        {"token": True, "body": {"vram": "1GB", "tenant": "bob"}},
        422,
        "bad_input",
    ),
    (
        "another type",
        "POST /v1/sessions",
        {"token": True, "raw": b"vram=1", "headers": {"Content-Type": "application/x-www-form-urlencoded"}},
        415,
        "unsupported_type",
    ),
    ("a size that is none", "POST /v1/sessions", {"token": True, "body": {"vram": "much"}}, 422, "bad_input"),
    ("no such session", "GET /v1/sessions/S00000000000000000000", {"token": True}, 404, "not_found"),
    ("no session's id", "GET /v1/sessions/%00", {"token": True}, 404, "not_found"),
    ("no lease", "GET /v1/leases/L1", {"token": True}, 404, "not_found"),
    ("no lease's id", "GET /v1/leases/..%5c..", {"token": True}, 404, "not_found"),
    ("a query that is none", "GET /v1/sessions?limit=-1", {"token": True}, 422, "bad_input"),
    (
        "a wait that is none",
        "GET /v1/sessions/S00000000000000000000?wait=x",
        {"token": True},
        404,
        "not_found",
    ),
    ("an event that is none", "GET /v1/events?after=-1", {"token": True}, 422, "bad_input"),
    ("too much", "POST /v1/sessions", {"token": True, "raw": b" " * ((1 << 20) + 1)}, 413, "too_large"),
    ("a body where none belongs", "GET /v1/sessions", {"token": True, "raw": b"x"}, 200, ""),
    (
        "a foreign page",
        "POST /v1/sessions",
        {"token": True, "body": {"vram": "1GB"}, "headers": {"Origin": "https://evil.example"}},
        403,
        "forbidden",
    ),
    (
        "no page",
        "DELETE /v1/sessions/S00000000000000000000",
        {"token": True, "headers": {"Origin": "null"}},
        403,
        "forbidden",
    ),
]


@pytest.mark.parametrize(
    ("where", "how", "status", "code"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_one_shape(studio_here: Running, where: str, how: dict[str, Any], status: int, code: str) -> None:
    method, path = where.split(" ", 1)
    how = dict(how)
    token = studio_here.token("ann") if how.pop("token", False) else None
    said = studio_here.ask(method, path.replace("TOKEN", studio_here.token("ann")), token, **how)
    assert said.status == status, said.body
    if status >= 400:
        found = check_shape(said.body, said.headers)
        assert found["code"] == code
        assert said.headers["cache-control"] == "no-store"
        assert ("www-authenticate" in said.headers) == (status == 401)
        assert ("allow" in said.headers) == (status == 405)


def test_head_has_the_status_and_no_body(studio_here: Running) -> None:
    said = studio_here.ask("HEAD", "/v1/sessions", studio_here.token("ann"))
    assert (said.status, said.body) == (405, b"")


def test_two_tokens_are_none(studio_here: Running) -> None:
    with studio_here.connect() as sock:
        line = f"Authorization: Bearer {studio_here.token('ann')}\r\n"
        sock.sendall(
            f"GET /v1/sessions HTTP/1.1\r\nHost: x\r\n{line}{line}Connection: close\r\n\r\n".encode()
        )
        assert b" 401 " in sock.recv(65536)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_no_http_has_the_shape_too(studio_here: Running, sent: bytes) -> None:
    with studio_here.connect() as sock:
        sock.sendall(sent)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 ", b"HTTP/1.1 405 "))
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.decode().split("\r\n")[1:])}
    check_shape(body, headers)


def test_a_bug_is_told_as_internal_and_its_traceback_is_in_the_log(
    studio_here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("secret plan in /home/somebody/plan.txt")

    monkeypatch.setattr(studio_here.ledger, "sessions", broken)
    said = studio_here.ask("GET", "/v1/sessions", studio_here.token("ann"))
    assert (said.status, said.code) == (500, "internal")
    check_shape(said.body, said.headers)
    assert b"plan" not in said.body
    wait_until(lambda: "secret plan" in studio_here.log())
    assert said.json["id"] in studio_here.log()


def test_what_names_the_installation_is_told_in_other_words(
    studio_here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(**_: object) -> None:
        raise errors.Misconfigured("/home/ann/ledger.db cannot be opened", remedy="chmod /home/ann/ledger.db")

    monkeypatch.setattr(studio_here.ledger, "sessions", away)
    said = studio_here.ask("GET", "/v1/sessions", studio_here.token("ann"))
    assert said.status == 503
    check_shape(said.body, said.headers)


def test_every_error_has_a_status_and_its_words_are_clean() -> None:
    for cls in error_tree():
        if not cls.__module__.startswith("sublet.core"):
            continue
        error = cls()
        assert 400 <= status_of(error) <= 503
        assert not any(ord(c) < 32 and c != "\n" for text in told(error) for c in text)
        assert json.loads(refusal(error, "x").body)["code"] == error.code
    assert SubletError in STATUS


@pytest.mark.parametrize(
    ("cls", "status"),
    [
        (errors.BadInput, 422), (errors.NotFound, 404), (errors.TooLarge, 413), (errors.HeadMoved, 409), (errors.WorkerLost, 410),
        (errors.Disconnected, 503), (errors.NoCapacity, 503), (errors.QuotaReached, 409), (errors.TokenRevoked, 401),
        (errors.Forbidden, 403), (errors.Elsewhere, 421), (errors.TooMany, 429), (errors.InvariantBroken, 500),
    ],
)  # fmt: skip
def test_families_have_their_status(cls: type[SubletError], status: int) -> None:
    assert status_of(cls()) == status


def test_terminal_escapes_do_not_leave() -> None:
    body = refusal(errors.BadInput("a\x1b[2Jb\x9b\x07c"), "x").body
    assert b"\\u001b" not in body
    assert b"\\u009b" not in body
    assert body.isascii()


CHECKS = ("serving", "ledger", "ledger_writes", "session_host", "warden")


def test_health(studio: Running) -> None:
    assert studio.ask("GET", "/healthz").json == {"status": "ok"}
    ready = studio.ask("GET", "/readyz")
    assert ready.status == 200
    assert ready.json["checks"] == dict.fromkeys(CHECKS, "ok")


def test_not_ready_says_which(studio_here: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studio_here.service.relay, "alive", lambda: False)
    said = studio_here.ask("GET", "/readyz")
    assert said.status == 503
    assert said.json["checks"] == dict.fromkeys(CHECKS, "ok") | {"session_host": "unreachable"}
    monkeypatch.setattr(studio_here.ledger, "now", lambda: time.sleep(30))
    began = time.monotonic()
    assert studio_here.ask("GET", "/readyz").json["checks"]["ledger"] == "unreachable"
    assert time.monotonic() - began < 15


def test_a_ledger_that_reads_and_cannot_be_written_is_not_ready(
    studio_here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk was 'ready', because only a read was tried."""
    asked: list[int] = []

    def refuse() -> None:
        asked.append(1)
        raise NotDurable("the ledger's disk is full; the change was not made")

    monkeypatch.setattr(studio_here.ledger, "prove_write", refuse)
    said = studio_here.ask("GET", "/readyz")
    assert said.status == 503
    assert said.json["checks"]["ledger_writes"] == "a write was refused: its disk is full or fails"
    for _ in range(5):
        studio_here.ask("GET", "/readyz")
    assert len(asked) < 5, "anybody may ask, and each time the disk had to work"


def test_a_ledger_from_the_past_is_not_ready_and_says_so(sqlite: Rig, tmp_path: Path) -> None:
    """I5: it is read, and nothing is opened; no path of the machine is shown to whoever asks."""
    sqlite.device()
    newer = Stamp(
        ledger_id=sqlite.sql("SELECT value FROM meta WHERE key = 'ledger_id'")[0][0],
        state=LedgerState(1000, 1000, 0),
    )
    settings = settings_of(load_settings(), sqlite.url, str(tmp_path / "home"))
    with running(sqlite.ledger, settings) as studio:
        token = studio.token("ann")
        Path(f"{sqlite.url.removeprefix('sqlite:')}-stamp").write_bytes(packed(newer))
        said = studio.ask("GET", "/readyz")
        assert said.status == 503
        assert "went back in time" in said.json["checks"]["ledger_writes"]
        refused = studio.ask("POST", "/v1/sessions", token, {"vram": "1GB"})
        assert refused.status >= 500
        assert refused.json["code"] == "ledger_from_the_past"
        assert "ledger-" not in refused.json["message"], "no path"
        assert studio.ask("GET", "/v1/me", token).status == 200


def test_a_write_that_hangs_is_not_ready_and_is_not_begun_again(
    studio_here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, over = [], threading.Event()
    monkeypatch.setattr(studio_here.ledger, "prove_write", lambda: (asked.append(1), over.wait(60)))
    monkeypatch.setattr(readiness, "READY_SECONDS", 0.05)
    monkeypatch.setattr(readiness, "WRITE_SECONDS", 0.0)
    for _ in range(3):
        assert "longer than" in studio_here.ask("GET", "/readyz").json["checks"]["ledger_writes"]
    over.set()
    assert len(asked) == 1


def test_a_warden_whose_loop_hangs_is_not_ready_and_one_that_restarts_is(
    studio_here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = ProcessHealth(
        pid=7, running=True, late=True, problem="its loop 'ledger' has not turned for 20s", silent_us={}
    )
    gone = ProcessHealth(pid=0, running=False, late=False, problem="it does not run", silent_us={})
    ready = studio_here.service.readiness
    monkeypatch.setattr(ready, "_warden", lambda: hangs)
    assert "not turned for 20s" in studio_here.ask("GET", "/readyz").json["checks"]["warden"]
    monkeypatch.setattr(ready, "_warden", lambda: gone)
    assert studio_here.ask("GET", "/readyz").json["checks"]["warden"] == "ok"
    monkeypatch.setattr(readiness, "WARDEN_SECONDS", 0.0)
    assert studio_here.ask("GET", "/readyz").json["checks"]["warden"] == "it does not run"


def test_security_headers(studio_here: Running) -> None:
    page = studio_here.ask("GET", "/")
    assert page.status == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["x-frame-options"] == "DENY"
    script = studio_here.ask("GET", "/page/main.js")
    assert script.headers["content-type"].startswith("text/javascript")
    again = studio_here.ask("GET", "/page/main.js", headers={"If-None-Match": script.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    for said in (page, script, studio_here.ask("GET", "/v1/sessions")):
        assert said.headers["x-content-type-options"] == "nosniff"
        assert "server" not in said.headers
