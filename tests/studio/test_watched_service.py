"""A real service, watched from outside: its counters over a kill, and its spans at a collector."""

from __future__ import annotations

import gzip
import http.client
import http.server
import signal
import threading
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from sublet.core.studio.token import Scope
from tests.homes import wait_until
from tests.studio.conftest import GIB, HostedSessions
from tests.studio.running import Running
from tests.studio.served import Caller, Served, token_for

TRACE = "0af7651916cd43dd8448eb211c80319c"


def scrape(port: int, token: str) -> dict[tuple[str, str], float]:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    line.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
    answer = line.getresponse()
    text = answer.read().decode()
    line.close()
    assert answer.status == 200
    assert answer.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    return {(s.name, str(sorted(s.labels.items()))): s.value for f in parsed(text) for s in f.samples}


def total(found: dict[tuple[str, str], float], name: str) -> float:
    return sum(value for (own, _), value in found.items() if own == name)


def worked(caller: Caller, code: str) -> str:
    """A session that ran this and ended; its id."""
    status, made = caller.ask("POST", "/v1/sessions", {"vram": GIB, "ttl": "30s"})
    assert status == 201
    while caller.ask("GET", f"/v1/sessions/{made['id']}?wait=5")[1]["status"] != "active":
        pass
    assert caller.ask("POST", f"/v1/sessions/{made['id']}/run", {"code": code})[0] == 200
    caller.ask("DELETE", f"/v1/sessions/{made['id']}")
    return str(made["id"])


def test_the_ledgers_counters_outlive_a_killed_service(hosted_here: HostedSessions) -> None:
    operator = token_for(hosted_here.ledger, "operator", Scope.OPERATOR)
    served = Served(hosted_here.home.environment)
    served.start()
    caller = Caller(served.port, token_for(hosted_here.ledger, "ann"))
    worked(caller, "1 + 1")
    before = scrape(served.port, operator)
    assert total(before, "sublet_lease_wait_seconds_count") >= 1
    assert total(before, "sublet_gpu_seconds_total") > 0
    assert total(before, "sublet_http_requests_total") > 3
    served.kill()
    served.start()
    after = scrape(served.port, operator)
    own = ("sublet_http_", "sublet_scrape_", "process_")
    counters = [key for key in before if key[0].endswith(("_total", "_count", "_sum", "_bucket"))]
    for key in counters:
        if not key[0].startswith(own):
            assert after[key] >= before[key], key
    assert total(after, "sublet_http_requests_total") < total(before, "sublet_http_requests_total")
    served.kill(signal.SIGTERM)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Where spans go, and what came there."""
    got: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    server.server_close()


def test_requests_sessions_and_calls_reach_a_collector(
    hosted_here: HostedSessions, collector: tuple[str, list[bytes]]
) -> None:
    url, got = collector
    token = token_for(hosted_here.ledger, "ann")
    served = Served(hosted_here.home.environment | {"OTEL_EXPORTER_OTLP_ENDPOINT": url})
    served.start()
    secret = "a word of the user's code"
    session = worked(Caller(served.port, token), f"x = {secret!r}; 1 / 0")
    line = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    headers = {"Authorization": f"Bearer {token}", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    line.request("GET", "/v1/me", headers=headers)
    line.getresponse().read()
    line.close()
    served.kill(signal.SIGTERM)  # what is left is sent on the way out
    told = b"".join(got)
    for name in ("GET /v1/me", "POST /v1/sessions", "session.open", "session.call", "sublet-studio"):
        assert name.encode() in told, name
    assert bytes.fromhex(TRACE) in told
    assert session.encode() in told
    for hidden in (token, token[-40:], secret, "Bearer", "ZeroDivisionError: division"):
        assert hidden.encode() not in told, hidden


def test_open_streams_are_counted(studio_here: Running) -> None:
    """Until the reader is gone."""
    streams = ("sublet_http_streams", "[('kind', 'events')]")
    line = http.client.HTTPConnection("127.0.0.1", studio_here.port, timeout=30)
    line.request("GET", "/v1/events", headers={"Authorization": f"Bearer {studio_here.token('ann')}"})
    answer = line.getresponse()
    assert answer.status == 200
    assert scrape(studio_here.port, studio_here.operator)[streams] == 1
    answer.close()
    line.close()
    wait_until(lambda: scrape(studio_here.port, studio_here.operator)[streams] == 0)
