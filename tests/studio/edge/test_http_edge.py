"""Where a request comes from, and what is written down of it."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import Any

import pytest

from sublet.settings import load_settings
from sublet.studio.edge.http_edge import HttpEdge, _same_origin
from sublet.studio.edge.logs import LINES_MAX, ServiceLog, scrubbed
from tests.homes import wait_until
from tests.ledger.rig import Rig
from tests.studio.running import Running, running, settings_of

PROXIES = (ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8"))


def arrived(client: str, forwarded: str, proxies: Any = PROXIES) -> str:
    door = HttpEdge(lambda *_: None, None, proxies)  # type: ignore[arg-type]
    scope: dict[str, Any] = {
        "client": (client, 1),
        "headers": [(b"x-forwarded-for", forwarded.encode())],
        "scheme": "http",
    }
    return door._arrived(scope)


def test_a_forwarded_address_cannot_write_into_the_log() -> None:
    """The zone of an IPv6 address is any text, and a quotation mark in it broke the line."""
    for crafted in ('fe80::1%","tenant":"root', "fe80::1%\n{}", "::1%x"):
        assert arrived("10.0.0.1", crafted) == "10.0.0.1"
    lines: list[str] = []
    log = ServiceLog(lines.append)
    log.request("1", "GET", "/x", 200, 0.1, "ann", arrived("10.0.0.1", 'fe80::1%","tenant":"root'))
    log.flush()
    assert json.loads(lines[0])["tenant"] == "ann"
    log.close()


@pytest.mark.parametrize(
    ("client", "forwarded", "found"),
    [
        ("192.0.2.1", "198.51.100.7", "192.0.2.1"),  # not from a proxy: anybody can write that
        ("10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "1.1.1.1, 198.51.100.7", "198.51.100.7"),  # what the client wrote before does not count
        ("10.0.0.1", "198.51.100.7, 10.0.0.2", "198.51.100.7"),  # two of our own proxies
        ("10.0.0.1", "nonsense", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7, <script>", "10.0.0.1"),
        ("fd00::1", "2001:db8::7", "2001:db8::7"),
    ],
)
def test_a_forwarded_address_counts_only_from_a_proxy(client: str, forwarded: str, found: str) -> None:
    assert arrived(client, forwarded) == found
    assert arrived(client, forwarded, ()) == client


@pytest.mark.parametrize(
    ("origin", "host", "scheme", "same"),
    [
        (b"https://studio.example", b"studio.example", "https", True),
        (b"https://studio.example:443", b"studio.example", "https", True),
        (b"http://127.0.0.1:8080", b"127.0.0.1:8080", "http", True),
        (b"http://127.0.0.1:8081", b"127.0.0.1:8080", "http", False),
        (b"http://studio.example", b"studio.example", "https", False),
        (b"https://studio.example.evil", b"studio.example", "https", False),
        (b"null", b"studio.example", "https", False),
        (b"https://[", b"studio.example", "https", False),
        (b"\xff", b"studio.example", "https", False),
        (b"https://x:99999", b"x", "https", False),
    ],
)
def test_origins(origin: bytes, host: bytes, scheme: str, same: bool) -> None:
    assert _same_origin(origin, host, scheme) is same


def test_behind_a_proxy_the_page_has_the_proxys_origin(sqlite: Rig, tmp_path: Path) -> None:
    settings = settings_of(load_settings(), sqlite.url, str(tmp_path))
    headers = {
        "Origin": "https://studio.example",
        "X-Forwarded-Proto": "https",
        "X-Forwarded-Host": "studio.example",
    }
    for trusted, status in (((), 403), ((ipaddress.ip_network("127.0.0.0/8"),), 201)):
        with running(sqlite.ledger, settings, proxies=trusted) as studio:
            said = studio.ask("POST", "/v1/sessions", studio.token("ann"), {"vram": "1GB"}, headers=headers)
            assert said.status == status
            assert ("strict-transport-security" in said.headers) == bool(trusted)


def test_one_line_of_json_for_each_request(studio_here: Running) -> None:
    token = studio_here.token("ann")
    said = studio_here.ask("GET", "/v1/sessions/S00000000000000000000?wait=%1b", token)
    studio_here.ask("GET", "/v1/%1b%5b2J/..%0a%0d?secret=hunter2")
    wait_until(lambda: studio_here.log().count('"what":"request"') == 2)
    first, second = (json.loads(line) for line in studio_here.log().splitlines())
    assert first["id"] == said.headers["x-request-id"]
    assert (first["method"], first["route"], first["status"], first["tenant"]) == (
        "GET", "/v1/sessions/{session_id}", 404, "ann",
    )  # fmt: skip
    assert first["ms"] >= 0
    assert (second["route"], second["status"], second["tenant"]) == ("-", 404, "")
    text = studio_here.log()
    assert text.isascii()
    assert "\x1b" not in text
    assert "hunter2" not in text
    assert token not in text


def test_secrets_are_searched_for_before_they_are_written() -> None:
    lines: list[str] = []
    log = ServiceLog(lines.append)
    secret = "sublet_0123456789abcdef_" + "ab" * 32
    log.event("x", text=f"who used {secret}?", dsn="postgresql://u:hunter2@host/db", escape="\x1b[2J")
    log.failure("y", RuntimeError(secret))
    log.close()
    text = "".join(lines)
    assert "ab" * 32 not in text
    assert "hunter2" not in text
    assert "\x1b" not in text
    assert scrubbed("nothing here") == "nothing here"


def test_a_flood_of_lines_is_counted_not_kept() -> None:
    lines: list[str] = []
    log = ServiceLog(lines.append)
    log._stopped.set()
    log._thread.join()
    for _ in range(LINES_MAX + 10):
        log.event("x")
    log.close()
    assert '"count":10' in lines[-1]
